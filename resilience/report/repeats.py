"""Which faults occur repeatedly?  The incidents of many runs, grouped by fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilience.attribution.first_failure import cause_of
from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import Class
from resilience.history.completeness import Completeness
from resilience.report.condensed import report
from resilience.run_folder.load import Reader


class KnownIncident(msgspec.Struct, frozen=True):
    """An incident and its run: the folder's name, or its path if several have this name."""

    run: str
    incident: Incident


class KnownRun(msgspec.Struct, frozen=True):
    """What is known of a run. name: as of its incidents."""

    name: str
    incidents: tuple[KnownIncident, ...]
    completeness: Completeness


class RepeatedFault(msgspec.Struct, frozen=True):
    """The incidents of one fingerprint. what: their class. cause: cause of the last one, as text.

    lost_s: total known cost, None if no cost is known. unknown_rework: number of incidents whose repeated steps are not
    on record, so that `lost_s` lacks their time. runs, nodes, ranks: number of incidents of each; nodes and ranks
    count only for verdicts with enough confidence. first_ns, last_ns: UTC."""

    fingerprint: str
    what: Class
    cause: str
    count: int
    lost_s: float | None
    unknown_rework: int
    runs: dict[str, int]
    nodes: dict[str, int]
    ranks: dict[int, int]
    first_ns: int | None
    last_ns: int | None
    first_run: str


def known_runs(folders: Iterable[Path]) -> Iterator[KnownRun]:
    """Yield the runs of these folders with their incidents. No content of a folder raises."""
    folders = [folder.absolute() for folder in folders]  # "." has no name
    names = Counter(folder.name for folder in folders)
    for folder in folders:
        name = folder.name if names[folder.name] == 1 else str(folder)
        condensed = report(Reader(folder))
        incidents = tuple(KnownIncident(name, incident) for incident in condensed.incidents)
        yield KnownRun(name, incidents, condensed.completeness)


def faults(known: Iterable[KnownIncident]) -> list[RepeatedFault]:
    """Return the faults, the most expensive first, those of unknown cost last."""
    groups: dict[str, list[KnownIncident]] = {}
    for occurrence in known:
        groups.setdefault(occurrence.incident.fingerprint, []).append(occurrence)
    repeated = [_fault(mark, sorted(group, key=_at)) for mark, group in groups.items()]
    return sorted(repeated, key=lambda fault: (by_cost(fault.lost_s), -fault.count, fault.fingerprint))


def known_cost(incidents: Iterable[Incident]) -> float | None:
    """Return the total known cost of incidents in seconds, None if no cost is known."""
    costs = [incident.cost.lost_s for incident in incidents if incident.cost.lost_s is not None]
    return sum(costs) if costs else None


def by_cost(lost_s: float | None) -> float:
    """Return the sort key of a cost: the highest comes first, an unknown one last."""
    return float("inf") if lost_s is None else -lost_s


def as_json(faults: Iterable[RepeatedFault]) -> Any:
    """Return the faults as plain values."""
    return msgspec.to_builtins(list(faults))


def _at(known: KnownIncident) -> int:
    return known.incident.since_wall_ns or 0


def _fault(mark: str, group: list[KnownIncident]) -> RepeatedFault:
    last = group[-1].incident
    moments = [at for occurrence in group if (at := occurrence.incident.since_wall_ns) is not None]
    nodes: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    for occurrence in group:
        sure_ranks = {culprit.rank for culprit in occurrence.incident.verdict.sure}
        ranks.update(sure_ranks)
        nodes.update({node for rank, node in occurrence.incident.nodes.items() if rank in sure_ranks})
    return RepeatedFault(
        fingerprint=mark,
        what=last.verdict.what,
        cause=cause_of(last),
        count=len(group),
        lost_s=known_cost(occurrence.incident for occurrence in group),
        unknown_rework=sum(occurrence.incident.has_unknown_rework for occurrence in group),
        runs=dict(Counter(occurrence.run for occurrence in group)),
        nodes=dict(nodes),
        ranks=dict(ranks),
        first_ns=min(moments, default=None),
        last_ns=max(moments, default=None),
        first_run=group[0].run,
    )
