"""How do the nodes of a job meet?  The agents' rendezvous, the store that it uses, and the processes that host it."""
