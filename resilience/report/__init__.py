"""What broke in a run, and what did it cost?  The report, as data, on a terminal and as a page."""
