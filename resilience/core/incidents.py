"""What happened, told once?  Folds the records of a job into one incident for each restart.

Records are gathered by the iteration they belong to; whatever one interruption left on whichever rank
becomes one `Incident`: who moved first, who only followed, who is exonerated and why (`core.verdict`),
how long each phase took and on which rank longest, what it cost, what was done, what to do next. The
order of arrival is the store's, never a clock's. A pure function of records: a torn or unfinished run
gives incidents with less in them."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from resilience.core import events
from resilience.core.advice import advise, named
from resilience.core.attribution import Category, Frame, Interruption, InterruptionRecord
from resilience.core.records import Record
from resilience.core.verdict import Evidence, Verdict, judge, main_stack, symptom, user_frame

Key = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration. Iteration -1: ranks were still meeting at the call."""

Status = Literal["restarted", "ended", "unfinished", "continued"]
AT_ENTRY = -1


class Spread(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long something took on several ranks, in seconds. slowest: the initial rank that took longest."""

    median_s: float
    max_s: float
    slowest: int
    ranks: int


class Phase(msgspec.Struct, frozen=True):
    """One leg of the restart."""

    name: str
    took: Spread


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the incident cost, in steps and in seconds of the whole job; None is "not known".

    hang_s: silence until a limit fired. restart_s: detection to first progress, slowest rank. rework_s:
    steps done again, at the speed of before. lost_s: their sum, as far as known."""

    lost_steps: int | None = None
    hang_s: float | None = None
    restart_s: float | None = None
    rework_s: float | None = None

    @property
    def lost_s(self) -> float | None:
        known = [part for part in (self.hang_s, self.restart_s, self.rework_s) if part is not None]
        return sum(known) if known else None


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """One interruption of the job and what came of it. Ranks are initial ranks.

    number: from 1, in the order of the account. reported_first: whose record the store has first; the
    first mover in `verdict` may be another one, who could not report. records: first mover's first."""

    number: int
    attempt: int
    cycle: int
    call: int
    iteration: int
    status: Status
    kind: str
    verdict: Verdict
    layer: Literal["inprocess"] = "inprocess"
    records: tuple[InterruptionRecord, ...] = ()
    reported_first: int | None = None
    detected_wall_ns: int | None = None
    since_wall_ns: int | None = None
    where: Frame | None = None
    world_size: int | None = None
    active_world_size: int | None = None
    next_world_size: int | None = None
    next_active_world_size: int | None = None
    excluded: tuple[int, ...] = ()
    stepped_in: tuple[int, ...] = ()
    phases: tuple[Phase, ...] = ()
    restart: Spread | None = None
    cost: Cost = Cost()
    actions: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    same_as: tuple[int, ...] = ()

    @property
    def category(self) -> Category:
        return self.verdict.category

    @property
    def chief(self) -> InterruptionRecord | None:
        """The record that tells most of what broke: the first mover's."""
        return self.records[0] if self.records else None


class _Case:
    """What is gathered of one iteration."""

    def __init__(self) -> None:
        self.records: list[InterruptionRecord] = []
        self.first: Counter[int] = Counter()
        self.answered: set[int] = set()
        self.stacks: dict[int, tuple[Frame, ...]] = {}
        self.steps: dict[int, int] = {}
        self.started: dict[int, str] = {}
        self.world_size: int | None = None
        self.active_world_size: int | None = None
        self.ended: dict[int, str] = {}
        self.runs: dict[int, tuple[str, float]] = {}
        self.phases: dict[str, dict[int, float]] = {}
        self.restarts: dict[int, events.RestartEnded] = {}
        self.signalled: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.excluded: set[int] = set()
        self.left: dict[int, str] = {}
        self.stacks_by: dict[str, list[int]] = defaultdict(list)
        self.swallowed: list[tuple[int, str]] = []
        self.stuck: dict[int, str] = {}
        self.store_lost: dict[int, str] = {}
        self.unmonitored: set[int] = set()
        self.wall_ns: int | None = None

    @property
    def is_interrupted(self) -> bool:
        return bool(self.answered) or any(outcome != "completed" for outcome in self.ended.values())

    @property
    def is_incident(self) -> bool:
        return bool(self.records) or self.is_interrupted or bool(self.store_lost and not self.ended)


class _Gathered:
    """All cases of a job, and what is known of each rank across them."""

    def __init__(self) -> None:
        self.cases: dict[Key, _Case] = {}
        self.leg: dict[tuple[int, int, int, int], Key] = {}  # rank's call -> whose phases it goes through
        self.began: dict[tuple[int, int, int, int], Key] = {}  # rank's call -> where its open restart began
        self.signalled: dict[tuple[int, int, int, int], tuple[Key, str]] = {}  # rank's call -> since when, and why
        self.finished: set[tuple[int, int, int, int]] = set()  # (attempt, cycle, call, rank) that ended
        self.seen: set[tuple[int, int, int, int]] = set()

    def case(self, key: Key) -> _Case:
        return self.cases.setdefault(key, _Case())


def fold(records: Iterable[Record]) -> tuple[Incident, ...]:
    """Return the incidents that the records of a job tell, in order.

    records: of all ranks; only the order within each rank's own file matters."""
    gathered = _Gathered()
    for record in records:
        _gather(gathered, record)
    _once_each(gathered.cases)
    _late_ends(gathered)
    incidents: list[Incident] = []
    for key in sorted(gathered.cases):
        if gathered.cases[key].is_incident:
            incidents.append(_incident(gathered, key, incidents))
    return tuple(incidents)


# -- gathering ---------------------------------------------------------------------------------


def _gather(gathered: _Gathered, record: Record) -> None:
    origin, event = record.origin, record.event
    if origin.initial_rank is None:
        return
    call = (origin.attempt, origin.cycle, origin.call)
    rank = origin.initial_rank
    who = (*call, rank)
    gathered.seen.add(who)
    iteration = AT_ENTRY if origin.iteration is None else origin.iteration
    key = (*call, iteration)
    if isinstance(event, events.Interrupted):
        _gather_interrupted(gathered, key, record, event.record)
        return
    case = gathered.case(key)
    match event:
        case events.CallEnded() | events.RankExited():
            gathered.finished.add(who)
        case events.IterationStarted():
            case.started[rank] = event.state
            case.world_size, case.active_world_size = origin.world_size, event.active_world_size
        case events.IterationEnded():
            case.ended[rank] = event.outcome
        case events.StageEnded():
            _gather_stage(gathered, key, rank, event)
        case events.StageStarted(stage="restart"):
            gathered.began[who] = key
        case events.RestartEnded():
            began = gathered.began.pop(who, None) or gathered.leg.get(who)
            if began is not None:
                gathered.case(began).restarts[rank] = event
        case events.OutcomeSeen():
            case.answered.add(rank)
            if event.by is not None:
                case.first[event.by] += 1
            if event.stack:
                case.stacks[rank] = event.stack
            if event.step is not None:
                case.steps[rank] = event.step
        case events.RankSignalled():
            before = case.signalled.get(rank, ("", ()))[1]
            case.signalled[rank] = (event.reason, before + event.signals)
            gathered.signalled.setdefault(who, (key, event.reason))
        case events.RankStoodInFor(result="excluded" | "discarded"):
            case.excluded.add(event.initial_rank)
        case events.RankLeft():
            case.left[rank] = event.error
        case events.EvidenceCaptured():
            case.stacks_by[event.method].append(rank)
        case events.InterruptSwallowed():
            case.swallowed.append((rank, f"{event.file}:{event.line} ({event.function})"))
        case events.AbortStuck():
            case.stuck[rank] = event.where
        case events.StoreLost():
            case.store_lost[rank] = event.error
            case.wall_ns = case.wall_ns or record.wall_ns
        case events.MonitorLost():
            case.unmonitored.add(rank)


def _gather_interrupted(gathered: _Gathered, key: Key, record: Record, seen: InterruptionRecord) -> None:
    if seen.iteration is not None:
        key = (*key[:3], seen.iteration)
    if seen.detected_wall_ns is None:
        seen = msgspec.structs.replace(seen, detected_wall_ns=record.wall_ns)
    if seen.node is None and seen.rank == record.origin.initial_rank:
        seen = msgspec.structs.replace(seen, node=record.origin.node)
    gathered.case(key).records.append(seen)


def _gather_stage(gathered: _Gathered, key: Key, rank: int, event: events.StageEnded) -> None:
    who = (*key[:3], rank)
    if event.stage == "run":
        gathered.case(key).runs[rank] = (event.outcome, max(0.0, event.duration_s))
    elif event.stage in events.PHASES:
        # Regroup and resume reach into the next iteration, but belong to the restart begun before.
        if event.stage not in ("regroup", "resume"):
            gathered.leg[who] = key
        leg = gathered.leg.get(who)
        if leg is not None and event.outcome != "lost":
            of_rank = gathered.case(leg).phases.setdefault(event.stage, {})
            of_rank[rank] = of_rank.get(rank, 0.0) + max(0.0, event.duration_s)


def _once_each(cases: dict[Key, _Case]) -> None:
    """One death is one record: keep it where it interrupted something.

    A rank that dies between two iterations may be on record in the one and interrupt the other, and its
    own monitor and a neighbour's may both have seen it."""
    deaths: defaultdict[tuple[object, int, int | None], list[Key]] = defaultdict(list)
    for key in sorted(cases):
        for record in cases[key].records:
            if record.interruption is Interruption.TERMINATED:
                deaths[key[:3], record.rank, record.pid].append(key)
    for (_, rank, _), keys in deaths.items():
        home = keys[0]
        later = [
            key
            for key in sorted(cases)
            if key[:3] == home[:3] and key > home and _first(cases[key]) == rank and not cases[key].records
        ]
        if later and (_first(cases[home]) != rank):
            home = later[0]
        record = next(r for r in cases[keys[0]].records if _is_death(r, rank))
        for key in keys:
            cases[key].records = [r for r in cases[key].records if not _is_death(r, rank)]
        cases[home].records.append(record)


def _late_ends(gathered: _Gathered) -> None:
    """A rank that its monitor ends may die an iteration later: that is the monitor's doing too."""
    for key, case in gathered.cases.items():
        for record in case.records:
            since, reason = gathered.signalled.get((*key[:3], record.rank), (key, ""))
            if record.interruption is Interruption.TERMINATED and since < key and reason:
                case.signalled.setdefault(record.rank, (reason, ()))


def _is_death(record: InterruptionRecord, rank: int) -> bool:
    return record.rank == rank and record.interruption is Interruption.TERMINATED


def _first(case: _Case) -> int | None:
    """Whose record the store has first."""
    for record in case.records:
        if record.arrival_order == 1:
            return record.rank
    return case.first.most_common(1)[0][0] if case.first else None


# -- one incident ------------------------------------------------------------------------------


def _incident(gathered: _Gathered, key: Key, before: list[Incident]) -> Incident:
    case = gathered.cases[key]
    following = gathered.cases.get((*key[:3], key[3] + 1), _Case())
    verdict = judge(_evidence(case))
    records = _ordered(case, verdict)
    chief = records[0] if records else None
    of_chief = [record for record in records if chief is not None and record.rank == chief.rank]
    silence = max((record.silent_for_s for record in of_chief if record.silent_for_s is not None), default=None)
    alike = _alike(records, before)
    restart = _spread({rank: max(0.0, end.duration_s) for rank, end in case.restarts.items()}, "resume", following)
    seen = [(at, record.silent_for_s or 0.0) for record in of_chief if (at := record.detected_wall_ns) is not None]
    excluded = tuple(sorted(case.excluded | {rank for rank, end in case.ended.items() if end == "left"}))
    status = _status(gathered, key, case, following)
    return Incident(
        number=len(before) + 1,
        attempt=key[0],
        cycle=key[1],
        call=key[2],
        iteration=key[3],
        status=status,
        kind=chief.interruption.value if chief is not None else verdict.what,
        verdict=verdict,
        records=records,
        reported_first=_first(case),
        detected_wall_ns=min((at for at, _ in seen), default=case.wall_ns),
        since_wall_ns=min((at - round(silent * 1e9) for at, silent in seen), default=case.wall_ns),
        where=_where(case, verdict, chief),
        world_size=case.world_size,
        active_world_size=case.active_world_size,
        next_world_size=following.world_size,
        next_active_world_size=following.active_world_size,
        excluded=excluded,
        stepped_in=_stepped_in(case, following),
        phases=tuple(
            Phase(name, took) for name in events.PHASES if (took := _spread(case.phases.get(name, {}), name, following))
        ),
        restart=restart,
        cost=_cost(gathered, key, case, silence, restart),
        actions=_actions(case, following, excluded, status, key[3] == AT_ENTRY),
        advice=advise(verdict, len(alike), any(record.progress_unknown for record in of_chief), case.swallowed),
        same_as=alike,
    )


def _evidence(case: _Case) -> Evidence:
    return Evidence(
        records=tuple(case.records),
        first=_first(case),
        active=frozenset(rank for rank, state in case.started.items() if state == "active"),
        inactive=frozenset(rank for rank, state in case.started.items() if state != "active"),
        stacks=case.stacks,
        steps={record.rank: record.step for record in case.records if record.step is not None} | case.steps,
        answered=frozenset(case.answered),
        returned=frozenset(rank for rank, (outcome, _) in case.runs.items() if outcome == "completed"),
        signalled={rank: reason for rank, (reason, _) in case.signalled.items()},
        store_lost=frozenset(case.store_lost) if not case.answered else frozenset(),
    )


def _ordered(case: _Case, verdict: Verdict) -> tuple[InterruptionRecord, ...]:
    """What tells most comes first: what the first mover and the other culprits have on record of their
    own, then who noticed that somebody did not come, then what only followed."""
    blamed = [verdict.first, *(culprit.rank for culprit in verdict.culprits)]
    place = {rank: position for position, rank in reversed(list(enumerate(blamed)))}
    first = _first(case)
    killed = {r.rank for r in case.records if r.interruption is Interruption.HARD_TIMEOUT}

    def order(record: InterruptionRecord) -> tuple[int, int, bool, int, bool]:
        signalled = case.signalled.get(record.rank, (None, ()))[0]
        found = symptom(record, signalled, case.stacks.get(record.rank, ()))
        is_own = found.is_own and record.rank in place
        group = 0 if is_own else 1 if found.what in ("hung", "missed_completion") else 2
        # Of a rank's two timeouts the hard limit's record knows more.
        is_soft = record.interruption is Interruption.SOFT_TIMEOUT and record.rank in killed
        return group, place.get(record.rank, len(blamed)), record.rank != first, record.rank, is_soft

    return tuple(sorted(case.records, key=order))


def _spread(seconds: dict[int, float], name: str, following: _Case) -> Spread | None:
    """Over all ranks; a spare has no progress to show, so it does not count for how long resuming took."""
    if name == "resume":
        seconds = {rank: value for rank, value in seconds.items() if following.started.get(rank) == "active"}
    if not seconds:
        return None
    slowest = max(sorted(seconds), key=lambda rank: seconds[rank])
    return Spread(statistics.median(seconds.values()), seconds[slowest], slowest, len(seconds))


def _where(case: _Case, verdict: Verdict, chief: InterruptionRecord | None) -> Frame | None:
    """The line of the user's own code where the first mover broke, or was."""
    found = None
    if chief is not None and chief.rank == verdict.first:
        found = user_frame(chief.exception.stack if chief.exception is not None else main_stack(chief))
    if found is None and verdict.first is not None:
        found = user_frame(case.stacks.get(verdict.first, ()))
    return found


def _status(gathered: _Gathered, key: Key, case: _Case, following: _Case) -> Status:
    if following.started:
        return "restarted"
    if not case.is_interrupted and not case.store_lost:
        return "continued"
    ranks = {who for who in gathered.seen if who[:3] == key[:3]}
    return "ended" if ranks <= gathered.finished else "unfinished"


def _stepped_in(case: _Case, following: _Case) -> tuple[int, ...]:
    return tuple(
        sorted(
            rank
            for rank, state in following.started.items()
            if state == "active" and case.started.get(rank) not in (None, "active")
        )
    )


def _cost(gathered: _Gathered, key: Key, case: _Case, silence: float | None, restart: Spread | None) -> Cost:
    reached, resumed = _reached(case), _resumed(case)
    lost = max(0, reached - resumed) if reached is not None and resumed is not None else None
    a_step = _seconds_a_step(gathered, key) if lost else 0.0
    return Cost(
        lost_steps=lost,
        hang_s=silence,
        restart_s=None if restart is None else restart.max_s,
        rework_s=None if lost is None or a_step is None else lost * a_step,
    )


def _reached(case: _Case) -> int | None:
    """The highest step that a rank was about to do when the iteration was interrupted."""
    steps = [*case.steps.values(), *(record.step for record in case.records if record.step is not None)]
    return max(steps, default=None)


def _resumed(case: _Case) -> int | None:
    """The lowest step with which a rank went on after the restart."""
    return min((end.step for end in case.restarts.values() if end.step is not None), default=None)


def _seconds_a_step(gathered: _Gathered, key: Key) -> float | None:
    """Return how long a step took in this iteration, else in another one of the call.

    Where an iteration began is known from the restart before it; the first one began with step 0 if
    the job had nothing to go on from after it."""
    others = sorted(gathered.cases.keys() - {key})
    for place in (key, *(other for other in others if other[:3] == key[:3])):
        case, before = gathered.cases[place], gathered.cases.get((*place[:3], place[3] - 1))
        entered = _resumed(before) if before is not None and place[3] > 0 else None
        if entered is None and place[3] == 0 and _resumed(case) == 0:
            entered = 0
        run = max((seconds for _, seconds in case.runs.values()), default=None)
        reached = _reached(case)
        if entered is not None and reached is not None and run is not None and reached > entered:
            silence = max((record.silent_for_s or 0.0 for record in case.records), default=0.0)
            return max(0.0, run - silence) / (reached - entered)
    return None


def _alike(records: tuple[InterruptionRecord, ...], before: list[Incident]) -> tuple[int, ...]:
    """Earlier incidents of which the chief record has the same fingerprint."""
    if not records or records[0].exception is None:
        return ()
    mark = records[0].exception.fingerprint
    return tuple(
        incident.number
        for incident in before
        if incident.chief is not None
        and incident.chief.exception is not None
        and incident.chief.exception.fingerprint == mark
    )


def _actions(
    case: _Case, following: _Case, excluded: tuple[int, ...], status: Status, is_entry: bool
) -> tuple[str, ...]:
    done: list[str] = []
    for method, ranks in sorted(case.stacks_by.items()):
        words = "no stack could be taken" if method == "none" else f"stacks taken by {method}"
        done.append(f"{words} of {named(ranks)}")
    for rank, (reason, signals) in sorted(case.signalled.items()):
        if not signals:
            continue  # they were sent in an iteration before
        done.append(f"{', '.join(dict.fromkeys(signals))} sent to rank {rank} ({reason})")
    for rank, where in sorted(case.stuck.items()):
        done.append(f"abort did not free rank {rank} (in {where}): its process had to go")
    if excluded:
        done.append(f"{named(excluded)} excluded")
    stepped_in = _stepped_in(case, following)
    if stepped_in:
        done.append(f"{named(stepped_in)} stepped in")
    if status == "restarted":
        done.append(f"{'started without it' if is_entry else 'restarted in place'}: {named(following.started)}")
    elif status == "continued" and case.unmonitored:
        done.append(f"{named(case.unmonitored)} went on without a monitor")
    elif status == "ended":
        done.append("the call ended")
    return tuple(done)


def to_json(incident: Incident) -> Any:
    """Return the incident as plain values, what is computed included."""
    plain = msgspec.to_builtins(incident)
    plain["cost"] = {**msgspec.to_builtins(incident.cost), "lost_s": incident.cost.lost_s}
    plain["category"] = incident.category
    return plain
