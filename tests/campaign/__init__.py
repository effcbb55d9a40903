"""The campaign: faults with a truth that was written down before, and what each contestant makes of them.

    python -m tests.campaign --quick
    python -m tests.campaign --cases 1000 --resume

The truth of a case follows from its seed alone (`cases`), and stands in a file before the job starts. The injector
(`injector`) shares no code with the package. A contestant is an adapter (`contestants`): a command, and how its verdict
is read through a documented door. The judge is blind: the truth is beside the job's folder, the folder's name is the
number of the case, and an adapter gets only that folder to find the verdict. `scoring` counts. Nothing in here is in
the wheel."""
