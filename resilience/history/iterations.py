"""What is known of each iteration of a job?  Records, gathered by the iteration they belong to.

A restart reaches into the next iteration, a death between two iterations may be told in the one and
interrupt the other, a rank that its monitor ends may die late: here everything comes to where it belongs.
`attribution.incidents` makes one incident of each iteration that was interrupted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from resilience.core import events
from resilience.core.attribution import Frame, Interruption, InterruptionRecord
from resilience.core.records import Record

Key = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration. Iteration AT_ENTRY: ranks were still meeting at the call."""

AT_ENTRY = -1


class Case:
    """What is gathered of one iteration."""

    def __init__(self) -> None:
        self.records: list[InterruptionRecord] = []
        self.arrivals: dict[tuple[int, Interruption], int] = {}
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
    def first_reporter(self) -> int | None:
        """Whose record the store has first, as an initial rank."""
        for record in self.records:
            if record.arrival_order == 1:
                return record.rank
        return self.first.most_common(1)[0][0] if self.first else None

    @property
    def is_interrupted(self) -> bool:
        return bool(self.answered) or any(outcome != "completed" for outcome in self.ended.values())

    @property
    def is_incident(self) -> bool:
        return bool(self.records) or self.is_interrupted or bool(self.store_lost and not self.ended)


class Gathered:
    """All cases of a job, and what is known of each rank across them."""

    def __init__(self) -> None:
        self.cases: dict[Key, Case] = {}
        self.leg: dict[tuple[int, int, int, int], Key] = {}  # rank's call -> whose phases it goes through
        self.began: dict[tuple[int, int, int, int], Key] = {}  # rank's call -> where its open restart began
        self.signalled: dict[tuple[int, int, int, int], tuple[Key, str]] = {}  # rank's call -> since when, and why
        self.finished: set[tuple[int, int, int, int]] = set()  # (attempt, cycle, call, rank) that ended
        self.seen: set[tuple[int, int, int, int]] = set()

    def case(self, key: Key) -> Case:
        found = self.cases.get(key)
        if found is None:
            found = self.cases[key] = Case()
        return found


def gather(records: Iterable[Record]) -> Gathered:
    """Sort the records of a job by iteration; only the order within each rank's own file matters."""
    gathered = Gathered()
    for record in records:
        _gather(gathered, record)
    for case in gathered.cases.values():
        case.records = [_in_order(case, seen) for seen in case.records]
    _once_each(gathered.cases)
    _late_ends(gathered)
    return gathered


def _gather(gathered: Gathered, record: Record) -> None:
    origin, event = record.origin, record.event
    if origin.initial_rank is None or origin.is_launchers:
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
        case events.InterruptionArrived(position=position):
            arrivals = gathered.case((*call, event.iteration)).arrivals
            place = (event.initial_rank, event.interruption)
            arrivals[place] = min(position, arrivals.get(place, position))
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


def _gather_interrupted(gathered: Gathered, key: Key, record: Record, seen: InterruptionRecord) -> None:
    if seen.iteration is not None:
        key = (*key[:3], seen.iteration)
    if seen.detected_wall_ns is None:
        seen = msgspec.structs.replace(seen, detected_wall_ns=record.wall_ns)
    if seen.node is None and seen.rank == record.origin.initial_rank:
        seen = msgspec.structs.replace(seen, node=record.origin.node)
    gathered.case(key).records.append(seen)


def _gather_stage(gathered: Gathered, key: Key, rank: int, event: events.StageEnded) -> None:
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


def _in_order(case: Case, seen: InterruptionRecord) -> InterruptionRecord:
    """The record with its place in the store's order of arrival."""
    position = case.arrivals.get((seen.rank, seen.interruption), seen.arrival_order)
    return msgspec.structs.replace(seen, arrival_order=position)


def _once_each(cases: dict[Key, Case]) -> None:
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
            if key[:3] == home[:3] and key > home and cases[key].first_reporter == rank and not cases[key].records
        ]
        if later and (cases[home].first_reporter != rank):
            home = later[0]
        record = next(r for r in cases[keys[0]].records if _is_death(r, rank))
        for key in keys:
            cases[key].records = [r for r in cases[key].records if not _is_death(r, rank)]
        cases[home].records.append(record)


def _late_ends(gathered: Gathered) -> None:
    """A rank that its monitor ends may die an iteration later: that is the monitor's doing too."""
    for key, case in gathered.cases.items():
        for record in case.records:
            since, reason = gathered.signalled.get((*key[:3], record.rank), (key, ""))
            if record.interruption is Interruption.TERMINATED and since < key and reason:
                case.signalled.setdefault(record.rank, (reason, ()))


def _is_death(record: InterruptionRecord, rank: int) -> bool:
    return record.rank == rank and record.interruption is Interruption.TERMINATED
