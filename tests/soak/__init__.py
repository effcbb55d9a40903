"""The soak: one job after the other under random faults, for an hour. A task, not a test: `poe soak`."""
