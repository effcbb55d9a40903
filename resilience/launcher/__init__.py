"""The agent of a node, built on torchelastic.

It starts the workers and their monitors, replaces workers that die or hang, and records why. `resilience run`
is its command."""
