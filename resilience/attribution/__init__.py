"""What broke, whose fault was it, what did it cost, and what to do next?  Incidents, made from the history of a run.

Pure. The verdict names where the symptom is; "unknown" is an answer."""
