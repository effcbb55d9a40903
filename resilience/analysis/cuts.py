"""Was an occurrence that a limit ended a hang, or healthy?  The verdict of its incident says, as far as anything can.

A rank that was stopped, sat in the kernel, held the interpreter's lock or waited for a lock hung. So did one that only
waited for another rank which is to blame. Of all others nobody knows: a long computation looks like an endless one."""

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
    """The incidents of one run, read when a limit has ended something."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """folders: of the run; each node may have kept its own."""
        self._folders = sorted(set(folders))
        self._incidents: tuple[Incident, ...] | None = None

    def judged(self, rank: int, place: tuple[int, int], value: Value) -> Cut:
        """Return what is known of an occurrence that was cut off. place: cycle and iteration."""
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
