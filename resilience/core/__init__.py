"""What does a running job decide?  Pure functions over immutable values, without clocks, sockets or files."""
