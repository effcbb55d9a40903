"""Was an occurrence that did not end by itself a hang?  The verdict of its incident decides, if it can.

A rank hung if its process was stopped: it does nothing until another process continues it. If a limit ended an
occurrence of a rank that is not to blame, it hung too if another rank was stopped, failed or ended: it only waited, and
that wait would not have ended. Without a limit this does not follow: a restart cuts off healthy ranks in the middle of
their work, for example in a section that the stopped rank had not reached.

Otherwise it is unknown. A verdict says what a rank did at the moment of its evidence, not that it would never have gone
on. A main thread that waits for the result of a thread that saves looks as if it waited for a lock. State D is read
once, and a long read shows it too. Native code that no interrupt reaches may be a long computation. Ranks that wait for
such a rank are as healthy as it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.attribution.symptoms import Class
from resilience.calibration.unended import Cut
from resilience.history.clocks import errors_of, offsets_of
from resilience.run_folder.load import Reader
from resilience.run_folder.merge import clocks_of
from resilience.telemetry.durations import Value

HUNG: frozenset[Class] = frozenset(("stopped",))
FAILED: frozenset[Class] = frozenset(
    (
        "exception",
        "left",
        "exited",
        "ended_unseen",
        "killed",
        "out_of_memory",
        "crashed",
        "told_to_stop",
        "hook_failed",
        "node_lost",
        "agent_lost",
    )
)


class Verdicts:
    """The incidents of one run, read at the first occurrence that needs a verdict."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """folders: run folders; each node may have its own."""
        self._folders = sorted(set(folders))
        self._incidents: tuple[Incident, ...] | None = None

    def judged(self, rank: int, place: tuple[int, int], value: Value, usual_s: float = 0.0) -> Cut:
        """Return the classification of an interrupted occurrence. place: cycle and iteration. usual_s: if no limit
        ended it, and it did not take longer than this (seconds), it is no hang and needs no verdict."""
        if value.end == "hang" or (value.end == "cut" and value.s <= usual_s):
            return Cut(value.s, value.end)
        causes = HUNG | FAILED if value.end == "killed" else frozenset[Class]()
        is_hang = any(_is_hang(incident, rank, causes) for incident in self._at(place))
        return Cut(value.s, "hang" if is_hang else value.end)

    def _at(self, place: tuple[int, int]) -> list[Incident]:
        """Return the incidents of an iteration. The end of its whole cycle counts only if it has none of its own,
        because a later iteration may have ended the cycle."""
        cycle, iteration = place
        of_cycle = [incident for incident in self._all() if incident.cycle == cycle]
        own = [incident for incident in of_cycle if incident.layer != "launcher" and incident.iteration == iteration]
        return own or [incident for incident in of_cycle if incident.layer == "launcher"]

    def _all(self) -> tuple[Incident, ...]:
        if self._incidents is None:
            readers = [Reader(folder) for folder in self._folders]
            records = chain.from_iterable(reader.records for reader in readers)
            clocks = clocks_of(*self._folders)
            self._incidents = fold(records, offsets_of(clocks), errors_of(clocks))
        return self._incidents


def _is_hang(incident: Incident, rank: int, causes: frozenset[Class]) -> bool:
    """Return True if this rank hung for sure. A candidate may be to blame, so it did not only wait. causes: faults of
    another rank for which the wait would not have ended."""
    verdict = incident.verdict
    own = [culprit.what for culprit in verdict.culprits if culprit.rank == rank]
    if own:
        return HUNG.issuperset(own)
    if any(candidate.rank == rank for candidate in verdict.candidates):
        return False
    return any(culprit.what in causes for culprit in verdict.culprits)
