"""Does the restart protocol hold?  Virtual time, a store in memory, faults, thousands of virtual ranks.

A virtual clock drives the same decisions as in production (`core.watch`, `core.restart`): no threads, no processes, no
sockets. A schedule is a seed, so every failure that it finds can be repeated."""
