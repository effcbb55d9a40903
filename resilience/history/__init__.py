"""What happened?  One fold of a job's records into attempts, cycles, iterations, ranks and the phases of restarts.

Every view of a run (report, page, trace, status, metrics) reads this history. Four questions of live views are answered
from records beside it (docs/decisions/a-run-has-one-history.md). The fold is pure: records go in one by one, in the
order of each file. It can be queried at any time, also while the job runs."""
