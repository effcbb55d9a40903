"""How does a worker start and end?  Warm from the zygote, or cold as a fresh interpreter."""
