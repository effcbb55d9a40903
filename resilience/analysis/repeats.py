"""Which faults come again and again?  The incidents of many runs, grouped by fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilience.analysis.load import Reader
from resilience.analysis.report import report
from resilience.attribution.first_failure import cause_in_words
from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import Class


class Known(msgspec.Struct, frozen=True):
    """An incident, and the run that it was in."""

    run: str
    incident: Incident


class Fault(msgspec.Struct, frozen=True):
    """The incidents of one fingerprint. what: its class. cause: of the last one, in words. lost_s: what all cost, as
    far as known. runs, nodes, ranks: how many incidents each had; nodes and ranks only of verdicts that are sure enough
    to count against them. first_ns, last_ns: UTC."""

    fingerprint: str
    what: Class
    cause: str
    count: int
    lost_s: float
    runs: dict[str, int]
    nodes: dict[str, int]
    ranks: dict[int, int]
    first_ns: int | None
    last_ns: int | None
    first_run: str


def incidents_in(folders: Iterable[Path]) -> Iterator[Known]:
    """Yield the incidents of run folders, run by run. What a folder holds never raises."""
    for folder in folders:
        for incident in report(Reader(folder)).incidents:
            yield Known(folder.name, incident)


def faults(known: Iterable[Known]) -> list[Fault]:
    """Return the faults, the most expensive first."""
    groups: dict[str, list[Known]] = {}
    for each in known:
        groups.setdefault(each.incident.fingerprint, []).append(each)
    found = [_fault(mark, sorted(group, key=_at)) for mark, group in groups.items()]
    return sorted(found, key=lambda fault: (-fault.lost_s, -fault.count, fault.fingerprint))


def as_json(found: Iterable[Fault]) -> Any:
    """Return the faults as plain values."""
    return msgspec.to_builtins(list(found))


def _at(known: Known) -> int:
    return known.incident.since_wall_ns or 0


def _fault(mark: str, group: list[Known]) -> Fault:
    last = group[-1].incident
    moments = [at for each in group if (at := each.incident.since_wall_ns) is not None]
    nodes: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    for each in group:
        sure = {culprit.rank for culprit in each.incident.verdict.sure}
        ranks.update(sure)
        nodes.update({record.node for record in each.incident.records if record.rank in sure and record.node})
    return Fault(
        fingerprint=mark,
        what=last.verdict.what,
        cause=cause_in_words(last.chief) if last.chief is not None else "",
        count=len(group),
        lost_s=sum(each.incident.cost.lost_s or 0.0 for each in group),
        runs=dict(Counter(each.run for each in group)),
        nodes=dict(nodes),
        ranks=dict(ranks),
        first_ns=min(moments, default=None),
        last_ns=max(moments, default=None),
        first_run=group[0].run,
    )
