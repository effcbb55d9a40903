"""Was an occurrence that a limit ended a hang or healthy?  The verdict of its incident decides, if it can.

A rank hung if it was stopped, blocked in the kernel, held the interpreter's lock, or waited for a lock. A rank also
hung if it only waited for another rank that is to blame. Otherwise it is unknown: a long computation looks like an
endless one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from resilience.analysis.load import Reader
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.attribution.symptoms import Class
from resilience.core.calibration import Cut
from resilience.telemetry.durations import Value

HUNG: frozenset[Class] = frozenset(("stopped", "blocked_in_kernel", "blocked_in_native_code", "waits_for_lock"))


class Verdicts:
    """The incidents of one run, read at the first occurrence that a limit ended."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """folders: run folders; each node may have its own."""
        self._folders = sorted(set(folders))
        self._incidents: tuple[Incident, ...] | None = None

    def judged(self, rank: int, place: tuple[int, int], value: Value) -> Cut:
        """Return the classification of an interrupted occurrence. place: cycle and iteration."""
        if value.end != "killed":
            return Cut(value.s, value.end)
        cycle, iteration = place
        for incident in self._all():
            is_there = incident.layer == "launcher" or incident.iteration == iteration
            if incident.cycle == cycle and is_there and _is_hang(incident, rank):
                return Cut(value.s, "hang")
        return Cut(value.s, "killed")

    def _all(self) -> tuple[Incident, ...]:
        if self._incidents is None:
            readers = [Reader(folder) for folder in self._folders]
            self._incidents = fold(chain.from_iterable(reader.records for reader in readers))
        return self._incidents


def _is_hang(incident: Incident, rank: int) -> bool:
    verdict = incident.verdict
    blamed = {culprit.rank: culprit.what for culprit in verdict.culprits or verdict.candidates}
    return blamed[rank] in HUNG if rank in blamed else bool(blamed)
