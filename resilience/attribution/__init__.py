"""What broke, which rank caused it, what did it cost, and what to do next?  Builds incidents from a run's history.

Pure. The verdict names the place of the symptom; "unknown" is a valid verdict."""
