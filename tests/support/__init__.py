"""What tests stand on: ranks that are real processes, and the account they leave.

`forkserver` is a process that forks ranks; `server` talks to it; `ranks` starts a job and ends it;
`account` reads its run folder; `signs` lets a test and its ranks wait for each other."""
