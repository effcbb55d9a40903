"""What we and our users test with: virtual time, a memory store, faults, thousands of virtual ranks.

The same decisions as in production (`core.watch`, `core.restart`) driven by a virtual clock: no threads,
no processes, no sockets. A schedule is a seed, so whatever it finds happens again."""
