"""Where did the time of a restart go?  Its critical path as text, and the whole run for trace viewers."""
