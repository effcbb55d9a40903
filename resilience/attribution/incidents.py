"""What broke in this run?  Builds one incident for each restart from the history.

All records that one interruption left on any rank (`history.iterations`) become one `Incident`: which rank was first,
which ranks only followed, which are cleared and why (`attribution.verdict`), how long each phase took, the cost, the
actions, and what to do next. A failed cycle of the launcher is an incident too (`attribution.launch_incidents`), and so
are the monitors that a node lost in a cycle (`attribution.lost_monitors`). The store defines the order of arrival,
never a clock. A damaged or unfinished run gives incidents with fewer facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

import msgspec

from resilience.attribution import launch_incidents, lost_monitors
from resilience.attribution.advice import ADVICE, named
from resilience.attribution.culprits import UNSURE
from resilience.attribution.evidence import Evidence, broken_in_restart, corrected
from resilience.attribution.incident import (
    Incident,
    Status,
    completed,
    evidence_in_words,
    nodes_of_suspects,
    spreads,
)
from resilience.attribution.progress import in_iteration
from resilience.attribution.restarts import is_undone
from resilience.attribution.symptoms import TORCHRUN_STOPS_WITHIN, gives_up, is_end, symptom
from resilience.attribution.verdict import WITHIN_LIMITS, Exonerated, Verdict, judge
from resilience.errors import StoreError
from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.completeness import WHOLE, Completeness
from resilience.history.cycles import Cycle
from resilience.history.history import History
from resilience.history.iterations import Iteration
from resilience.history.phases import Place
from resilience.history.places import AT_ENTRY

_STORE_ERROR = f"{StoreError.__module__}.{StoreError.__qualname__}"
_LAST = float("inf")  # a cycle's own incident comes after those of its iterations


def incidents_of(history: History, completeness: Completeness = WHOLE) -> tuple[Incident, ...]:
    """Return the incidents of a job, in order. completeness: of its records. If some are missing, no rank is blamed or
    cleared only because they say nothing about it."""
    cycles, iterations = history.cycles, history.iterations
    places = [place for place in cycles.places if launch_incidents.is_incident(cycles, place)]
    of_cycles: dict[Cycle, dict[Place, Iteration]] = {place: {} for place in places}
    for key in sorted(iterations):
        if key[:2] in of_cycles:
            of_cycles[key[:2]][key] = iterations[key]
    within = {place: _cut_off(history, place, of_cycle) for place, of_cycle in of_cycles.items()}
    taken = {key for keys in within.values() for key in keys}
    taken |= {key for key in iterations if _ended_after(history, key) is not None}
    newest = {key[:2]: key for key in sorted(iterations)}
    taken |= {key for key in newest.values() if _obeyed_a_signal(history, key)}
    incidents: list[Incident] = []
    makers: list[tuple[tuple[float, ...], Callable[[], Incident]]] = [
        (key, partial(_incident, history, key, incidents, completeness.is_sample))
        for key, iteration in iterations.items()
        if iteration.is_incident and key not in taken
    ]
    for place in places:
        inside = [iterations[key] for key in within[place]]
        makers.append(((*place, _LAST, 1), partial(launch_incidents.incident, history, place, inside, incidents)))
    for place in cycles.places:
        for number, (node, part) in enumerate(sorted(cycles.parts(place).items())):
            if part.lost_monitors:
                lost = partial(lost_monitors.incident, history, place, node, incidents)
                makers.append(((*place, _LAST, 0, number), lost))
    for _, make in sorted(makers, key=lambda maker: maker[0]):
        incidents.append(make())
    return tuple(_known(incident, completeness) for incident in incidents)


def _ended_after(history: History, key: Place) -> Place | None:
    """Return the earlier iteration whose incident ended in this one: the ranks only gave up, or torchrun stopped them
    because of the same fault. It does not know of restarts in place."""
    iterations = history.iterations
    records = iterations[key].records
    if _only_gives_up(iterations[key]):
        before = _last_before(iterations, key, _only_gives_up)
        return before if before is None else _ended_after(history, before) or before
    if not _is_only_stopped(iterations[key]) or not history.is_by_torchrun(key):
        return None
    before = _last_before(iterations, key, _is_only_stopped)
    if before is None:
        return None
    fault = iterations[before]
    gone = {record.rank for record in fault.records if is_end(record)} | fault.left.keys()
    since, until = _first_detected(fault.records), _first_detected(records)
    is_soon = since is None or until is None or until - since <= TORCHRUN_STOPS_WITHIN * 1e9
    if not is_soon or not gone - {record.rank for record in records}:
        return None
    return _ended_after(history, before) or before


def _last_before(
    iterations: Mapping[Place, Iteration], key: Place, is_consequence: Callable[[Iteration], bool]
) -> Place | None:
    """Return the last iteration before this one that has a cause of its own. All between them are incidents."""
    before: Place | None = None
    while key[3] > AT_ENTRY and (earlier := iterations.get((*key[:3], key[3] - 1))) is not None:
        if not earlier.is_incident:
            break
        before = key = (*key[:3], key[3] - 1)
        if not is_consequence(earlier):
            break
    return before


def _only_gives_up(iteration: Iteration) -> bool:
    return bool(iteration.records) and all(gives_up(record) for record in iteration.records)


def _is_only_stopped(iteration: Iteration) -> bool:
    """Return True if nothing is known of an iteration but processes that were asked to stop, or were killed, and errors
    that followed from it."""
    ends = [record for record in iteration.records if is_end(record)]
    others = (record for record in iteration.records if not is_end(record))
    are_stops = all(end.exit is not None and (end.exit.is_stop or _is_killed(end)) for end in ends)
    return bool(ends) and are_stops and not any(symptom(record).is_own for record in others)


def _is_killed(record: InterruptionRecord) -> bool:
    return record.exit is not None and record.exit.signal == "SIGKILL"


def _first_detected(records: Iterable[InterruptionRecord]) -> int | None:
    return min((record.detected_wall_ns for record in records if record.detected_wall_ns is not None), default=None)


def _obeyed_a_signal(history: History, key: Place) -> bool:
    """Return True if the ranks only left their last iteration in a cycle that a signal ended: the launcher forwards the
    signal, and its handler in the program raises KeyboardInterrupt or SystemExit."""
    records = history.iterations[key].records
    return (
        launch_incidents.is_preempted(history.cycles.parts(key[:2]).values())
        and any(record.interruption is Interruption.BASE_EXCEPTION for record in records)
        and all(record.interruption is Interruption.BASE_EXCEPTION or not symptom(record).is_own for record in records)
    )


def fold(
    records: Iterable[Record],
    offsets: Mapping[str, int] | None = None,
    clock_errors: Mapping[str, int] | None = None,
    completeness: Completeness = WHOLE,
) -> tuple[Incident, ...]:
    """Return the incidents of a job. records: of all ranks and agents, in the order of each file. offsets: how far each
    node's clock is ahead, in nanoseconds. clock_errors: by how much that may be wrong."""
    return incidents_of(History(offsets, clock_errors=clock_errors).take_all(records), completeness)


def _known(incident: Incident, completeness: Completeness) -> Incident:
    """Return the incident without clearing or blaming ranks whose records are missing because nothing is on record."""
    if completeness.has_all_records:
        return incident
    damaged, cleared = set(completeness.damaged), []
    incident = _without_silent_culprits(incident, damaged)
    for group in incident.verdict.exonerated:
        left = tuple(rank for rank in group.ranks if rank not in damaged)
        cleared.append(group if group.reason != WITHIN_LIMITS else Exonerated(left, group.reason))
    verdict = msgspec.structs.replace(incident.verdict, exonerated=tuple(group for group in cleared if group.ranks))
    return msgspec.structs.replace(incident, verdict=verdict)


def _without_silent_culprits(incident: Incident, damaged: Set[int]) -> Incident:
    """Return the incident. Rule 7 blames a rank that did not answer, but if its records are missing, it may have."""
    verdict, known = incident.verdict, {record.rank for record in incident.records}
    silent = [culprit for culprit in verdict.culprits if culprit.rule == 7 and culprit.rank in damaged - known]
    if not silent or len(silent) < len(verdict.culprits) or incident.where is not None:  # where it was is on record
        return incident
    candidates = tuple(msgspec.structs.replace(culprit, confidence=UNSURE) for culprit in silent)
    unsure = msgspec.structs.replace(verdict, what="unknown", category="unknown", first=None, culprits=())
    unsure = msgspec.structs.replace(unsure, candidates=verdict.candidates + candidates)
    return msgspec.structs.replace(incident, verdict=unsure, advice=(ADVICE["unknown"],))


def _cut_off(history: History, place: Cycle, iterations: dict[Place, Iteration]) -> list[Place]:
    """Return the iterations that are part of the cycle's own incident, in order: no restart followed them in its newest
    call because the launcher took over; the launcher restarted for the same death; or a process ended whose rank had
    left. If ranks then only gave up, these iterations are part of it too, even if another rank had already begun the
    next one.

    iterations: of this cycle, in order."""
    mover = history.cycles.mover(place)
    ends = launch_incidents.ends_of(history.cycles.parts(place).values(), mover)
    last = next(reversed(iterations), None)

    def is_last(key: Place, begun_after: int = 0) -> bool:
        return last is not None and key[:3] == last[:3] and last[3] <= key[3] + begun_after

    def has_left(key: Place, iteration: Iteration) -> bool:
        left = [record for record in iteration.records if record.rank == mover and mover in iteration.left]
        has_ended = any(launch_incidents.is_end_after(record, end) for record in left for end in ends)
        return has_ended and not any(other > (*key[:3], key[3] + 1) and other[3] > AT_ENTRY for other in iterations)

    def is_given_up(key: Place) -> bool:
        endings = _ended_in(history, key)
        return bool(endings) and is_last(endings[-1], 1)

    keys = {
        key
        for key, iteration in iterations.items()
        if iteration.is_incident
        if is_last(key) or is_undone(iteration, mover) or has_left(key, iteration) or is_given_up(key)
    }
    keys |= {begun for key in keys if (begun := _ended_after(history, key)) is not None}
    return sorted(keys.union(key for key in iterations if _ended_after(history, key) in keys))


def _incident(history: History, key: Place, before: list[Incident], is_sample: bool = False) -> Incident:
    iterations = history.iterations
    iteration = iterations[key]
    places_after = _ended_in(history, key)
    records_after = tuple(record for place in places_after for record in iterations[place].records)
    records_known = tuple(record for record in records_after if not _is_killed(record))
    evidence = msgspec.structs.replace(
        _evidence(iteration, records_known),
        kills_late=history.is_by_torchrun(key),
        clock_errors=history.clock_errors,
    )
    if is_sample:
        evidence = msgspec.structs.replace(evidence, size=None, world=None)
    verdict = judge(evidence)
    in_restart = broken_in_restart(corrected(evidence)).keys() - {verdict.first}
    records = (*_ordered(iteration, verdict, in_restart), *records_after)
    last = places_after[-1] if places_after else key
    again = history.started_again(last)
    has_following = again is not None or not places_after
    following = iterations.get(again or (*key[:3], key[3] + 1), Iteration()) if has_following else Iteration()
    restarts = {restart.rank: restart.duration_s for restart in history.restarts_after(last)}
    stopped = {record.rank for record in records_after if is_end(record)}
    excluded = _excluded(iteration, following.started.keys() if again is not None else ())
    status = _status(history, key, iteration, following, again is not None)
    incident = Incident(
        *(0, *key),
        status=status,
        kind="",
        verdict=verdict,
        records=records,
        nodes=nodes_of_suspects(verdict, iteration.nodes, records),
        is_judged=iteration.is_judged,
        reported_first=iteration.first_reporter,
        world_size=iteration.world_size,
        active_world_size=iteration.active_world_size,
        next_world_size=following.world_size,
        next_active_world_size=following.active_world_size,
        excluded=excluded,
        stepped_in=_stepped_in(iteration, following),
        phases=spreads(history.restart_phases(key), events.PHASES),
        actions=_actions(iteration, following, excluded, status, key[3] == AT_ENTRY, again is not None, stopped),
    )
    progress = in_iteration(history, key, last)
    return completed(incident, before, restarts, progress, iteration.wall_ns, iteration.stacks, iteration.swallowed)


def _ended_in(history: History, key: Place) -> list[Place]:
    """Return the iterations after this one in which its incident ended, in order; none if it ended in its own."""
    places: list[Place] = []
    place = key
    while (place := (*place[:3], place[3] + 1)) in history.iterations and _ended_after(history, place) == key:
        places.append(place)
    return places


def _evidence(iteration: Iteration, records_after: tuple[InterruptionRecord, ...]) -> Evidence:
    return Evidence(
        records=(*iteration.records, *records_after),
        first=iteration.first_reporter,
        active=frozenset(rank for rank, state in iteration.started.items() if state == "active"),
        inactive=frozenset(rank for rank, state in iteration.started.items() if state != "active"),
        stacks=iteration.stacks,
        steps={record.rank: record.step for record in iteration.records if record.step is not None} | iteration.steps,
        answered=frozenset(iteration.answered),
        after_answer=frozenset(iteration.after_answer),
        freed_before_look=iteration.freed_before_look,
        sections=iteration.sections,
        hangs=iteration.hangs,
        collectives=iteration.collectives,
        seats=iteration.seats,
        returned=frozenset(rank for rank, (outcome, _) in iteration.runs.items() if outcome == "completed"),
        signalled=dict(iteration.signalled),
        store_lost=_without_store(iteration),
        late=_late(iteration),
        left=frozenset(rank for rank, outcome in iteration.ended.items() if outcome == "left"),
        is_alone=iteration.active_world_size == 1,
        size=iteration.active_world_size,
        world=iteration.world_size,
    )


def _without_store(iteration: Iteration) -> frozenset[int]:
    """Return the ranks that lost the job's store, unless an interruption with another cause came first. A lost store
    also interrupts a rank by itself, and a monitor that hosted it is gone too."""
    by_error = {record.rank for record in iteration.records if _is_store_error(record)}
    others = [
        record
        for record in iteration.records
        if not _is_store_error(record) and record.interruption is not Interruption.MONITOR_PROCESS_EXCEPTION
    ]
    return frozenset() if iteration.answered and others else frozenset(iteration.store_lost | by_error)


def _is_store_error(record: InterruptionRecord) -> bool:
    return record.exception is not None and record.exception.type == _STORE_ERROR


def _late(iteration: Iteration) -> frozenset[int]:
    """Return the ranks that are looked at after another rank was signalled, for its stacks or to end it: that may end
    what the other one was blocked in. A look follows the first report, and that one follows such a signal."""
    signalled = {record.rank for record in iteration.records if record.stack_method == "faulthandler"}
    signalled |= iteration.signalled.keys()
    return frozenset(rank for rank in iteration.started if signalled - {rank})


def _ordered(iteration: Iteration, verdict: Verdict, in_restart: Set[int]) -> tuple[InterruptionRecord, ...]:
    """Return the records, most informative first: own faults of the first mover and the other culprits, then records of
    ranks that noticed a missing rank, then consequences. in_restart: ranks that broke later."""
    blamed = [verdict.first, *(culprit.rank for culprit in verdict.culprits)]
    place = {rank: position for position, rank in reversed(list(enumerate(blamed)))}
    first = iteration.first_reporter
    killed = {record.rank for record in iteration.records if record.interruption is Interruption.HARD_TIMEOUT}

    def order(record: InterruptionRecord) -> tuple[int, int, bool, int, bool]:
        signalled = iteration.signalled.get(record.rank)
        rank_symptom = symptom(record, signalled, iteration.stacks.get(record.rank, ()))
        is_own = rank_symptom.is_own and record.rank in place and record.rank not in in_restart
        group = 0 if is_own else 1 if rank_symptom.what in ("hung", "missed_completion") else 2
        # If a rank has two timeouts, the record of the hard limit says more.
        is_soft = record.interruption is Interruption.SOFT_TIMEOUT and record.rank in killed
        return group, place.get(record.rank, len(blamed)), record.rank != first, record.rank, is_soft

    return tuple(sorted(iteration.records, key=order))


def _status(history: History, key: Place, iteration: Iteration, following: Iteration, is_by_launcher: bool) -> Status:
    if following.started or is_by_launcher:
        return "restarted"
    if not iteration.is_interrupted and not iteration.store_lost:
        return "continued"
    return "ended" if history.is_over(key) else "unfinished"


def _excluded(iteration: Iteration, again: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks without which the others went on, or could have. If none is left, or all were stopped, nobody
    was excluded. again: ranks that a launcher started again."""
    excluded = iteration.excluded | {rank for rank, end in iteration.ended.items() if end == "left"}
    is_everybody = bool(iteration.started) and excluded >= iteration.started.keys()
    return () if is_everybody else tuple(sorted(excluded.difference(again)))


def _stepped_in(iteration: Iteration, following: Iteration) -> tuple[int, ...]:
    return tuple(
        sorted(
            rank
            for rank, state in following.started.items()
            if state == "active" and iteration.started.get(rank) not in (None, "active")
        )
    )


def _actions(
    iteration: Iteration,
    following: Iteration,
    excluded: tuple[int, ...],
    status: Status,
    is_entry: bool,
    is_by_launcher: bool,
    stopped: Set[int],
) -> tuple[str, ...]:
    sent = {rank: (", ".join(dict.fromkeys(signals)), reason) for rank, (reason, signals) in iteration.sent.items()}
    done = evidence_in_words(iteration.stacks_by, sent, iteration.unseen)
    for rank, place in sorted(iteration.stuck.items()):
        done.append(f"abort did not free rank {rank} (in {place}): its process had to end")
    if excluded:
        done.append(f"{named(excluded)} excluded")
    stepped_in = _stepped_in(iteration, following)
    if stepped_in:
        done.append(f"{named(stepped_in)} stepped in")
    if stopped:
        done.append(f"the launcher stopped {named(stopped)}")
    if is_by_launcher:
        done.append(f"started again by the launcher: {named(following.started)}")
    elif status == "restarted":
        done.append(f"{'started without it' if is_entry else 'restarted in place'}: {named(following.started)}")
    elif status == "continued" and iteration.unmonitored:
        done.append(f"{named(iteration.unmonitored)} continued without a monitor")
    elif status == "ended":
        done.append("the call ended")
    return tuple(done)
