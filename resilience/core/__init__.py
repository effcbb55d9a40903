"""All decisions, as pure functions over immutable values. Nothing here reads a clock, a socket or a file."""
