"""Watches a rank from another process: the shared page, the rank's side, and the monitor's loop."""
