"""The rows of the views of `resilience logs --sql` that are no lines of a file: what is folded or counted from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.incidents import incidents_of
from resilience.attribution.restarts import is_undone
from resilience.errors import DecodeError
from resilience.facts.deadlines import HEARTBEAT, OUT_OF_SECTION
from resilience.facts.identity import owner_of
from resilience.history.completeness import Completeness
from resilience.history.history import History
from resilience.history.phases import Place
from resilience.history.places import AT_ENTRY
from resilience.run_folder.entries import utc
from resilience.run_folder.lines import fields_of
from resilience.run_folder.load import TIMINGS
from resilience.run_folder.merge import LineFilter, MergedLines, files_of
from resilience.run_folder.timings import TimingsReader
from resilience.telemetry import durations, single_durations, timings
from resilience.telemetry.timings import Histogram, upper_bound

_NAMED = {timings.HEARTBEAT: "(heartbeat)", HEARTBEAT: "(heartbeat)", OUT_OF_SECTION: "(out of section)"}


def tables(
    folder: Path, history: History, completeness: Completeness, reader: TimingsReader
) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the rows of each such view, by its name. Those of `text_of` are no view of their own. reader: of the run's
    timings; notes afterwards what could not be read."""
    incidents = incidents_of(history, completeness)
    return {
        "timings": _timings_of(reader),
        "periods": _periods_of(reader),
        "calls": _calls_of(folder, reader),
        "incidents": _rows_of(incidents),
        "phases": _phases_of(history, incidents),
        "restarts": _restarts_of(history),
        "seconds": _seconds_of(history, incidents, completeness),
    }


def text_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of workers' output."""
    for line in MergedLines(folder, LineFilter(kinds=frozenset({"text"})), clocks=()):
        place = {"node": line.node, "initial_rank": line.rank, "cycle": line.cycle}
        about = {"ts": utc(line.at_ns), "level": line.level, "event": line.event, "kind": "text"}
        yield {**about, **place, "file": line.file, **fields_of(line)}


def _timings_of(reader: TimingsReader) -> Iterator[dict[str, Any]]:
    for path, histograms in reader.histograms:
        recorded = histograms.timings()
        owner = owner_of(path.stem)
        for outcome, sections in (("completed", recorded.sections), ("failed", recorded.failed)):
            for name, histogram in sections.items():
                place = {"node": owner.node, "rank": owner.rank}
                place |= {"section": _NAMED.get(name, name), "outcome": outcome}
                yield place | _summary(histogram)


def _periods_of(reader: TimingsReader) -> Iterator[dict[str, Any]]:
    for _, recorded in reader.histograms:
        for name, series in recorded.deadlines.items():
            for number, period in sorted(series.periods.items()):
                begin = recorded.began_at + number * recorded.period_s
                place = {"node": recorded.header.node, "rank": recorded.header.rank, "section": _NAMED.get(name, name)}
                place |= {"ts": _micros(begin), "until": _micros(begin + recorded.period_s)}
                values = {"count": period.count, "sum_s": period.sum, "mean_s": period.sum / max(1, period.count)}
                yield place | values | {"p50_s": period.median, "max_s": period.max, "max_ts": _micros(period.max_at)}


def _calls_of(folder: Path, reader: TimingsReader) -> Iterator[dict[str, Any]]:
    for path in files_of(folder, TIMINGS):
        place: dict[str, Any] = {}
        start: dict[str, Any] = {}
        try:
            for _, line in single_durations.read_values(path):
                match line:
                    case durations.Header():
                        place = {"node": line.node, "rank": line.rank}
                    case durations.Started():
                        start = {"start": line.how, "cycle": line.cycle, "iteration": line.iteration}
                    case durations.Value():
                        values = {"section": _NAMED.get(line.section, line.section), "ts": _micros(line.t)}
                        values |= {"duration_s": line.s, "outcome": line.end, "number": line.i, "since_start": line.j}
                        yield place | values | start
        except (OSError, DecodeError) as error:
            reader.note(path, error)  # the lines after an invalid one are left out


def _rows_of(incidents: Iterable[Incident]) -> Iterator[dict[str, Any]]:
    for incident in incidents:
        at, restart, cost = incident.detected_wall_ns, incident.restart, incident.cost
        yield {
            "number": incident.number,
            "layer": incident.layer,
            "attempt": incident.attempt,
            "cycle": incident.cycle,
            "call": incident.call,
            "iteration": None if incident.iteration == AT_ENTRY else incident.iteration,
            "ts": None if at is None else at // 1000,
            "kind": incident.kind,
            "category": incident.category,
            "status": incident.status,
            "first_rank": incident.verdict.first_blamed,
            "hang_s": cost.hang_s,
            "restart_s": None if restart is None else restart.max_s,
            "rework_s": cost.rework_s,
            "lost_s": cost.lost_s,
        }


def _phases_of(history: History, incidents: Iterable[Incident]) -> Iterator[dict[str, Any]]:
    for incident in incidents:
        for place in (*_undone(history, incident), incident.place):
            for phase in history.restart_phases(place):
                yield {
                    "incident": incident.number,
                    "layer": incident.layer if place == incident.place else "inprocess",
                    "phase": phase.name,
                    "node": phase.node,
                    "rank": phase.who if isinstance(phase.who, int) else None,
                    "ts": phase.start_ns // 1000,
                    "duration_s": phase.seconds,
                }


def _undone(history: History, incident: Incident) -> list[Place]:
    """Return the iterations after which ranks restarted in place, before the launcher restarted for the same death."""
    if incident.layer != "launcher":
        return []
    mover = history.cycles.mover(incident.place[:2])
    of_cycle = (key for key in sorted(history.iterations) if key[:2] == incident.place)
    return [key for key in of_cycle if is_undone(history.iterations[key], mover)]


def _restarts_of(history: History) -> Iterator[dict[str, Any]]:
    names = ("attempt", "cycle", "call", "iteration")
    for restart in history.restarts():
        place = dict(zip(names, restart.place, strict=False))  # the launcher has no calls and iterations
        if place.get("iteration") == AT_ENTRY:
            del place["iteration"]
        yield {"layer": restart.layer, **place, "rank": restart.rank, "duration_s": restart.duration_s}


def _seconds_of(
    history: History, incidents: Iterable[Incident], completeness: Completeness
) -> Iterator[dict[str, Any]]:
    """Yield the time of each rank whose records are complete; of none if the report gives no times."""
    if not completeness.is_enough:
        return
    has_unknown_rework = any(incident.has_unknown_rework for incident in incidents)
    for rank, spent in sorted(history.spent().items()):
        if rank in completeness.damaged:
            continue
        times: dict[str, float | None] = {
            f"{name}_s": value / 1e9 for name, value in msgspec.structs.asdict(spent).items()
        }
        if has_unknown_rework and not spent.rework:
            times["rework_s"] = None
        yield {"rank": rank} | times | {"work_s": spent.productive / 1e9}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _summary(histogram: Histogram) -> dict[str, Any]:
    mean = histogram.sum / histogram.count if histogram.count else None
    shares = {f"p{share}_s": _quantile(histogram, share / 100) for share in (50, 95, 99)}
    return {"count": histogram.count, "sum_s": histogram.sum, "mean_s": mean, **shares, "max_s": histogram.max}


def _quantile(histogram: Histogram, share: float) -> float | None:
    """Return the upper bound of the bucket that this share of durations does not exceed, at most the maximum."""
    below = 0
    for number in sorted(histogram.buckets):
        below += histogram.buckets[number]
        if below >= share * histogram.count:
            return min(upper_bound(number), histogram.max)
    return None
