"""Do learned limits hold on real jobs?  A matrix of small jobs, through the documented commands only."""
