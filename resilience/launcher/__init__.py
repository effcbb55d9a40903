"""The agent of a node, on torchelastic.

Starts the workers and their monitors, replaces what is dead or hung, and accounts for it. `resilience run`
is its command."""
