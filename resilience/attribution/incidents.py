"""What happened, told once?  Folds the records of a job into one incident for each restart.

Whatever one interruption left on whichever rank (`history.iterations`) becomes one `Incident`: who moved first,
who only followed, who is exonerated and why (`attribution.verdict`), how long each phase took and on which rank
longest, what it cost, what was done, what to do next. A cycle of the launcher that failed is one too
(`attribution.launch_incidents`). The order of arrival is the store's, never a
clock's. A pure function of records: a torn or unfinished run gives incidents with less in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from resilience.attribution import launch_incidents
from resilience.attribution.advice import advise, named
from resilience.attribution.incident import Cost, Incident, Phase, Spread, Status, alike, spread
from resilience.attribution.symptoms import main_stack, symptom, user_frame
from resilience.attribution.verdict import Evidence, Verdict, judge
from resilience.core import events
from resilience.core.attribution import Frame, Interruption, InterruptionRecord
from resilience.core.records import Record
from resilience.history.cycles import Launches, Place
from resilience.history.iterations import AT_ENTRY, Case, Gathered, Key, gather

_LAST = float("inf")  # a cycle's own incident comes after those of its iterations


def fold(records: Iterable[Record], launches: Launches | None = None) -> tuple[Incident, ...]:
    """Return the incidents that the records of a job tell, in order.

    records: of all ranks and agents; only the order within each one's own file matters. launches: takes them too,
    for who wants to ask it more afterwards."""
    launches = Launches() if launches is None else launches

    def told() -> Iterator[Record]:
        for record in records:  # once: a run of any length passes by
            launches.take(record)
            yield record

    gathered = gather(told())
    places = [place for place in launches.places if launch_incidents.is_incident(launches, place)]
    for place in launches.places:
        _forget_stopped(gathered, launches, place)
    within = {place: _cut_off(gathered, launches, place) for place in places}
    taken = {key for keys in within.values() for key in keys}
    incidents: list[Incident] = []
    makers: list[tuple[tuple[float, ...], Callable[[], Incident]]] = [
        (key, partial(_incident, gathered, key, incidents))
        for key, case in gathered.cases.items()
        if case.is_incident and key not in taken
    ]
    for place in places:
        seen = [record for key in within[place] for record in gathered.cases[key].records]
        makers.append(((*place, _LAST), partial(launch_incidents.incident, launches, place, seen, incidents)))
    for _, make in sorted(makers, key=lambda maker: maker[0]):
        incidents.append(make())
    return tuple(incidents)


def _forget_stopped(gathered: Gathered, launches: Launches, place: Place) -> None:
    """Whom the launcher ended on purpose did not fail: its Wrapper's monitor could not know."""
    stopped = {rank for part in launches.parts(place).values() for rank in part.stopped}
    for key, case in gathered.cases.items():
        if key[:2] == place and stopped:
            case.records = [
                record
                for record in case.records
                if record.rank not in stopped or record.interruption is not Interruption.TERMINATED
            ]
            case.ended = {rank: end for rank, end in case.ended.items() if rank not in stopped or end != "lost"}


def _cut_off(gathered: Gathered, launches: Launches, place: Place) -> list[Key]:
    """Iterations that are part of the cycle's own incident: no restart came from them, because the launcher took
    over, or it took over for the same death."""
    movers = {part.mover for part in launches.parts(place).values()}

    def is_same(case: Case) -> bool:
        return any(each.rank in movers and each.interruption is Interruption.TERMINATED for each in case.records)

    return [
        key
        for key, case in gathered.cases.items()
        if key[:2] == place and case.is_incident
        if (*key[:3], key[3] + 1) not in gathered.cases or is_same(case)
    ]


def _incident(gathered: Gathered, key: Key, before: list[Incident]) -> Incident:
    case = gathered.cases[key]
    following = gathered.cases.get((*key[:3], key[3] + 1), Case())
    verdict = judge(_evidence(case))
    records = _ordered(case, verdict)
    chief = records[0] if records else None
    of_chief = [record for record in records if chief is not None and record.rank == chief.rank]
    silence = max((record.silent_for_s for record in of_chief if record.silent_for_s is not None), default=None)
    repeated = alike(records, before)
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
        reported_first=case.first_reporter,
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
        advice=advise(verdict, len(repeated), any(record.progress_unknown for record in of_chief), case.swallowed),
        same_as=repeated,
    )


def _evidence(case: Case) -> Evidence:
    return Evidence(
        records=tuple(case.records),
        first=case.first_reporter,
        active=frozenset(rank for rank, state in case.started.items() if state == "active"),
        inactive=frozenset(rank for rank, state in case.started.items() if state != "active"),
        stacks=case.stacks,
        steps={record.rank: record.step for record in case.records if record.step is not None} | case.steps,
        answered=frozenset(case.answered),
        returned=frozenset(rank for rank, (outcome, _) in case.runs.items() if outcome == "completed"),
        signalled={rank: reason for rank, (reason, _) in case.signalled.items()},
        store_lost=frozenset(case.store_lost) if not case.answered else frozenset(),
    )


def _ordered(case: Case, verdict: Verdict) -> tuple[InterruptionRecord, ...]:
    """What tells most comes first: what the first mover and the other culprits have on record of their
    own, then who noticed that somebody did not come, then what only followed."""
    blamed = [verdict.first, *(culprit.rank for culprit in verdict.culprits)]
    place = {rank: position for position, rank in reversed(list(enumerate(blamed)))}
    first = case.first_reporter
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


def _spread(seconds: dict[int, float], name: str, following: Case) -> Spread | None:
    """Over all ranks; a spare has no progress to show, so it does not count for how long resuming took."""
    if name == "resume":
        seconds = {rank: value for rank, value in seconds.items() if following.started.get(rank) == "active"}
    return spread(seconds)


def _where(case: Case, verdict: Verdict, chief: InterruptionRecord | None) -> Frame | None:
    """The line of the user's own code where the first mover broke, or was."""
    found = None
    if chief is not None and chief.rank == verdict.first:
        found = user_frame(chief.exception.stack if chief.exception is not None else main_stack(chief))
    if found is None and verdict.first is not None:
        found = user_frame(case.stacks.get(verdict.first, ()))
    return found


def _status(gathered: Gathered, key: Key, case: Case, following: Case) -> Status:
    if following.started:
        return "restarted"
    if not case.is_interrupted and not case.store_lost:
        return "continued"
    ranks = {who for who in gathered.seen if who[:3] == key[:3]}
    return "ended" if ranks <= gathered.finished else "unfinished"


def _stepped_in(case: Case, following: Case) -> tuple[int, ...]:
    return tuple(
        sorted(
            rank
            for rank, state in following.started.items()
            if state == "active" and case.started.get(rank) not in (None, "active")
        )
    )


def _cost(gathered: Gathered, key: Key, case: Case, silence: float | None, restart: Spread | None) -> Cost:
    reached, resumed = _reached(case), _resumed(case)
    lost = max(0, reached - resumed) if reached is not None and resumed is not None else None
    a_step = _seconds_a_step(gathered, key) if lost else 0.0
    return Cost(
        lost_steps=lost,
        hang_s=silence,
        restart_s=None if restart is None else restart.max_s,
        rework_s=None if lost is None or a_step is None else lost * a_step,
    )


def _reached(case: Case) -> int | None:
    """The highest step that a rank was about to do when the iteration was interrupted."""
    steps = [*case.steps.values(), *(record.step for record in case.records if record.step is not None)]
    return max(steps, default=None)


def _resumed(case: Case) -> int | None:
    """The lowest step with which a rank went on after the restart."""
    return min((end.step for end in case.restarts.values() if end.step is not None), default=None)


def _seconds_a_step(gathered: Gathered, key: Key) -> float | None:
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


def _actions(case: Case, following: Case, excluded: tuple[int, ...], status: Status, is_entry: bool) -> tuple[str, ...]:
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
