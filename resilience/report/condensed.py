"""What should a user know about a run?  Header, incidents, notes, and unreadable parts.

`report` condenses a loaded run; `report.terminal` formats it for a terminal, `as_json` for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from resilience.attribution.advice import named
from resilience.attribution.cost import Times, times
from resilience.attribution.incident import Incident, to_json
from resilience.attribution.incidents import incidents_of
from resilience.attribution.restarts import RestartTimes, restart_times
from resilience.facts import events
from resilience.facts.identity import Job
from resilience.history.completeness import Completeness
from resilience.history.cycles import CycleHistory
from resilience.history.history import History
from resilience.history.job_end import job_end
from resilience.history.places import AT_ENTRY
from resilience.report.counterfactual import NONE_VACANT, WhatIf, vacancies, what_ifs
from resilience.report.sections import SectionSummary, sections_of, write_s
from resilience.run_folder.load import Missing, Reader, Run
from resilience.run_folder.merge import history_of
from resilience.run_folder.timings import TimingsReader

SCHEMA = 1


class Note(msgspec.Struct, frozen=True):
    """A note besides the incidents, and its ranks."""

    what: str
    ranks: tuple[int, ...] = ()


class LeftRank(msgspec.Struct, frozen=True):
    """A rank that left its last call with an exception."""

    rank: int
    error: str


class Launched(msgspec.Struct, frozen=True):
    """The job from the view of the launcher. max_restarts: None if no cycle began. outcome, exit_code, detail: None or
    empty while it runs. exit_code: None too if only other records prove the end. is_clean: the job was preempted, and
    all workers ended with exit status 0."""

    cycles: int
    restarts_used: int
    max_restarts: int | None
    outcome: str | None = None
    exit_code: int | None = None
    detail: str = ""
    is_clean: bool = False


class Report(msgspec.Struct, frozen=True):
    """A run, condensed. Times are UTC nanoseconds; ranks are initial ranks.

    completed, lost, stopped, open: ranks by the end of their last call or worker: it completed; its process died;
    the launcher stopped it; no end is recorded. failed: lost ranks whose process exited with another status than 0.
    asked: lost ranks whose process died because it was asked to stop.
    lost_s, lost_steps: known losses of all incidents; as all counts of incidents and restarts, too low or too high if
    records are missing (`completeness.has_all_records`). unknown_cost, unknown_rework: number of incidents whose cost,
    or whose time for repeated steps, is not known and missing in `lost_s`. times: of the whole job, None if too
    many records are missing. restarts: of ranks, in each layer. what_ifs: estimates for other settings.
    completeness: of the records and timings.
    launched: None without the launcher. attempt: the newest one; a folder of an older version may contain several."""

    run: str
    job_id: str
    functions: tuple[str, ...]
    world_size: int | None
    nodes: tuple[str, ...]
    versions: dict[str, str]
    attempt: int
    attempts: int
    calls: int
    iterations: int
    started_wall_ns: int | None
    last_wall_ns: int | None
    completed: tuple[int, ...]
    lost: tuple[int, ...]
    failed: tuple[int, ...]
    asked: tuple[int, ...]
    left: tuple[LeftRank, ...]
    stopped: tuple[int, ...]
    open: tuple[int, ...]
    lost_s: float | None
    lost_steps: int | None
    unknown_cost: int
    unknown_rework: int
    times: Times | None
    restarts: tuple[RestartTimes, ...]
    what_ifs: tuple[WhatIf, ...]
    sections: tuple[SectionSummary, ...]
    launched: Launched | None
    incidents: tuple[Incident, ...]
    notes: tuple[Note, ...]
    missing: tuple[Missing, ...]
    completeness: Completeness

    @property
    def is_ended(self) -> bool:
        """True if the end of the run is recorded. Otherwise the report covers the run up to its last record."""
        if self.launched is not None:
            return not self.open and self.launched.outcome is not None
        return not self.open and bool(self.completed or self.lost or self.left or self.stopped)

    @property
    def records_completeness(self) -> Completeness:
        """Return the completeness of the records alone."""
        return msgspec.structs.replace(self.completeness, timings=())

    @property
    def end(self) -> str:
        """Return how the run ended, as text."""
        parts = []
        if self.completed:
            parts.append(f"completed on {named(self.completed)}")
        if self.asked:
            parts.append(f"{named(self.asked)} asked to stop")
        if self.failed:
            parts.append(f"{named(self.failed)} failed")
        if lost := set(self.lost).difference(self.asked, self.failed):
            parts.append(f"{named(lost)} lost")
        if self.left:
            parts.append(f"{named(left_rank.rank for left_rank in self.left)} left with an error")
        if self.stopped:
            parts.append(f"{named(self.stopped)} stopped by the launcher")
        if self.open:
            parts.append(f"no end recorded for {named(self.open)}: running, or cut off")
        if self.launched is not None and self.launched.outcome is not None:
            detail = f": {self.launched.detail}" if self.launched.detail else ""
            cleanly = " cleanly" if self.launched.is_clean else ""
            code = "" if self.launched.exit_code is None else f", exit status {self.launched.exit_code}"
            parts.append(f"the launcher: {self.launched.outcome}{cleanly}{code}{detail}")
        elif self.launched is not None and not self.open:
            parts.append("the launcher recorded no end")
        return "; ".join(parts) or "no records"


def report(run: Run | Reader, history: History | None = None) -> Report:
    """Return the report of a run. history: of its records, if already read."""
    history = history_of(run.folder, run.records) if history is None else history
    incidents = incidents_of(history, run.completeness)
    ranks = history.last_calls()
    unended = {rank: last for rank, last in ranks.items() if last.outcome is None}
    seconds = [cost for incident in incidents if (cost := incident.cost.lost_s) is not None]
    steps = [cost for incident in incidents if (cost := incident.cost.lost_steps) is not None]
    unknown_rework = sum(incident.has_unknown_rework for incident in incidents)
    size = history.world_size if history.world_size is not None else history.cycles.largest_world
    sections = sections_of(run.folder, timings := TimingsReader(run.folder))
    completeness = msgspec.structs.replace(run.completeness, timings=tuple(sorted(timings.unread)))
    spent = times(history, completeness.damaged, unknown_rework > 0) if completeness.is_enough else None
    vacant = NONE_VACANT if spent is None else vacancies(history, incidents, max(1, spent.ranks), completeness.damaged)
    return Report(
        run=str(run.folder),
        job_id=run.job.job_id if run.job else history.job_id or run.folder.name,
        functions=tuple(history.functions) or _program(run),
        world_size=size if size is not None or run.job is None else run.job.world_size,
        nodes=tuple(sorted(history.nodes)),
        versions=_versions(history.started or run.job),
        attempt=max(history.attempts, default=0),
        attempts=len(history.attempts),
        calls=len(history.calls),
        iterations=sum(place[3] != AT_ENTRY for place in history.iterations),
        started_wall_ns=history.first_ns,
        last_wall_ns=history.last_ns,
        completed=tuple(rank for rank, last in ranks.items() if last.outcome == "completed"),
        lost=tuple(rank for rank, last in unended.items() if last.is_lost),
        failed=tuple(rank for rank, last in unended.items() if last.has_failed),
        asked=tuple(rank for rank, last in unended.items() if last.is_lost and last.is_asked),
        left=tuple(
            LeftRank(rank, last.error) for rank, last in ranks.items() if last.outcome not in (None, "completed")
        ),
        stopped=tuple(rank for rank, last in unended.items() if last.is_stopped),
        open=tuple(rank for rank, last in unended.items() if not (last.is_lost or last.is_stopped)),
        lost_s=sum(seconds) if seconds else None,
        lost_steps=sum(steps) if steps else None,
        unknown_cost=len(incidents) - len(seconds),
        unknown_rework=unknown_rework,
        times=spent,
        restarts=restart_times(history, completeness),
        what_ifs=() if spent is None else what_ifs(spent, incidents, vacant, write_s(sections)),
        sections=sections,
        launched=_launched(history),
        incidents=incidents,
        notes=_notes(history),
        missing=(*run.missing, *(timings.unread[name] for name in completeness.timings)),
        completeness=completeness,
    )


def _notes(history: History) -> tuple[Note, ...]:
    noted = (Note(what, tuple(sorted(ranks))) for what, ranks in history.noted.items())
    return (*noted, *_unknown_progress(history.cycles))


def as_json(condensed: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(condensed)
    plain["times"] = dict.fromkeys(Times.__struct_fields__) if condensed.times is None else plain["times"]
    plain["times"]["ettr"] = None if condensed.times is None else condensed.times.ettr
    plain["completeness"]["is_whole"] = condensed.completeness.is_whole
    plain["completeness"]["has_all_records"] = condensed.completeness.has_all_records
    plain["incidents"] = [to_json(incident) for incident in condensed.incidents]
    return {"schema": SCHEMA, **plain, "is_ended": condensed.is_ended, "end": condensed.end}


def _program(run: Run | Reader) -> tuple[str, ...]:
    return (run.job.function,) if run.job is not None and run.job.function else ()


def _launched(history: History) -> Launched | None:
    cycles = history.cycles
    if not cycles.places and not cycles.agents:
        return None
    newest = cycles.parts(cycles.places[-1]) if cycles.places else {}
    starts = [part.started for part in newest.values() if part.started is not None]
    attempt = cycles.places[-1][0] if cycles.places else max(agents[-1].attempt for agents in cycles.agents.values())
    end = job_end(history, attempt)
    return Launched(
        cycles=len(cycles.places),
        restarts_used=max((event.restarts_used for event in starts), default=0),
        max_restarts=starts[0].max_restarts if starts else None,
        outcome=None if end is None else end.outcome,
        exit_code=None if end is None else end.exit_code,
        detail="" if end is None else end.detail,
        is_clean=end is not None and end.is_clean,
    )


def _versions(source: events.CallStarted | Job | None) -> dict[str, str]:
    if source is None:
        return {}
    named_versions = {
        "resilience": source.resilience_version,
        "torch": source.torch_version,
        "Python": source.python_version,
    }
    return {name: version for name, version in named_versions.items() if version}


def _unknown_progress(cycles: CycleHistory) -> Iterable[Note]:
    """Yield a note on workers of the last cycle, running or stopped, that have sent no signal of progress."""
    ranks = tuple(
        rank
        for rank, worker in sorted(cycles.last_workers().items())
        if worker.progress is None and worker.called_ns is None and (worker.exit is None or worker.exit.expected)
        if worker.exit is None or worker.exit.code != 0
    )
    if ranks:
        yield Note(
            "progress unknown: no heartbeat, step or section reported; only the death of a process would be detected",
            ranks,
        )
