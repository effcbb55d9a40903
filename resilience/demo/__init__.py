"""What does a job look like that loses ranks and recovers?  The training of `resilience demo`, faults and screens."""
