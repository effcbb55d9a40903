"""How do the nodes of a job meet?  The agents' rendezvous, its store, and the process that hosts the store."""
