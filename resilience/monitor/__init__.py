"""Watches a rank from another process: the page they share, the rank's side, the loop beside it."""
