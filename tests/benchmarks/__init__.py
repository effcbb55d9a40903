"""What does a restart cost, and how does that compare with the best open peer?

`python -m tests.benchmarks.run` measures every budget of the in-process restart on this machine, ours
and `nvidia-resiliency-ext==0.4.1` interleaved in one run, and prints a table of medians and ratios.
The peer is optional (`pip install --no-deps nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py`):
without it its column stays empty.

`processes` starts and ends the ranks, `implementations` hides what differs between the two libraries,
`restarts`, `hangs`, `building` and `costs` measure, `table` judges and renders."""
