"""Reads the run folders of jobs."""
