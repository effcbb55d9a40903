"""What happened when the launcher had to restart the workers?  Builds one incident for each failed cycle.

`history.cycles` provides the facts: which rank failed first as the agents agreed, what its monitor recorded, how long
each phase took, what was lost. `attribution.verdict` decides, as for an iteration. The incident includes what a Wrapper
in the workers had recorded when the launcher stopped it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from resilience.attribution.advice import named
from resilience.attribution.evidence import Evidence
from resilience.attribution.incident import (
    Incident,
    Status,
    completed,
    evidence_in_words,
    nodes_of_suspects,
    silence_of,
    spreads,
)
from resilience.attribution.lost_stores import without_cycle_store
from resilience.attribution.progress import in_cycle
from resilience.attribution.symptoms import is_end
from resilience.attribution.verdict import Verdict, judge
from resilience.attribution.wrapped_ranks import with_accounts
from resilience.core.watch import AGENT_LOST
from resilience.facts import tracebacks
from resilience.facts.in_words import count
from resilience.facts.interruptions import LOOK, Detector, Interruption, InterruptionRecord
from resilience.history.cycles import RESTART, Cycle, CycleHistory, NodeCycle
from resilience.history.history import History
from resilience.history.iterations import Iteration
from resilience.history.places import AT_ENTRY
from resilience.history.processes import Worker

WISHED = ("preempted", "shutdown", "excluded")  # outcomes that are never a failure, whatever else is on record


def is_incident(cycles: CycleHistory, place: Cycle) -> bool:
    """Return True if something broke in a cycle and no Wrapper handled it."""
    parts = cycles.parts(place).values()
    if any(part.is_failed for part in parts):
        return True
    is_wished = any(part.ended is not None and part.ended.outcome in WISHED for part in parts)
    mover = cycles.mover(place)
    return not is_wished and any(part.is_left(sighting.record, mover) for part in parts for sighting in part.seen)


def is_preempted(parts: Iterable[NodeCycle]) -> bool:
    """Return True if a signal to an agent ended a cycle."""
    return any(part.ended is not None and part.ended.outcome == "preempted" for part in parts)


def incident(history: History, place: Cycle, inside: Sequence[Iteration], before: Sequence[Incident]) -> Incident:
    """Return the incident of a cycle. inside: a Wrapper's iterations that belong to it, in order. before: earlier
    incidents."""
    cycles = history.cycles
    parts = cycles.parts(place)
    within = [record for iteration in inside for record in iteration.records if not _may_be_stopped(parts, record)]
    later = cycles.following(place)
    following = {} if later is None else cycles.parts(later)
    mover = cycles.mover(place)
    lost = _lost_nodes(parts)
    size = cycles.world_size(place)
    without_store = _without_store(parts, inside) or without_cycle_store(parts, mover)
    is_store_lost = 2 * len(without_store) > (size or 0)  # then the other nodes are not to blame
    ranks = _ranks_by_node(parts, lost, size)
    records = _with_one_reason(_records(parts, within, mover, [] if is_store_lost else lost, ranks), inside)
    evidence = with_accounts(_evidence(history, parts, records, mover, size), inside, parts.values())
    gone_nodes = set() if is_store_lost else {*lost, *_without_agent(parts)}
    gone = frozenset(rank for node in gone_nodes for rank in ranks.get(node, ()))
    evidence = msgspec.structs.replace(evidence, store_lost=without_store, on_lost_node=gone)
    verdict = judge(evidence)
    first = _first(verdict, evidence, mover)
    records = tuple(sorted(records, key=lambda record: (record.rank != first, is_end(record), record.rank)))
    restarts = {restart.rank: restart.duration_s for restart in history.restarts_after(place)}
    lowest = {node: min(part.workers, default=0) for node, part in (parts | following).items()}
    ended = [part for part in parts.values() if part.ended is not None]
    present = {node: part for node, part in parts.items() if part.ended is not None or node not in lost}
    status = _status(cycles, place, present or parts, following)
    next_size = None if later is None else cycles.world_size(later)
    incident = Incident(
        *(0, *place, 0, AT_ENTRY),
        status=status,
        kind="",
        verdict=verdict,
        layer="launcher",
        detail=next((part.ended.detail for part in ended if part.ended is not None and part.ended.detail), ""),
        records=records,
        nodes=nodes_of_suspects(verdict, {rank: node for node in ranks for rank in ranks[node]}, records),
        is_judged=any(iteration.is_judged for iteration in inside),
        reported_first=first if mover is None else mover,
        world_size=size,
        active_world_size=size,
        next_world_size=next_size,
        next_active_world_size=next_size,
        excluded=tuple(sorted(rank for node in lost for rank in ranks[node])),
        phases=spreads(history.restart_phases(place), RESTART, lowest),
        actions=_actions(parts, following, lost, status, first),
    )
    wall_ns = min((part.ended_wall_ns for part in ended), default=None)
    progress = in_cycle(history, place, evidence.steps, silence_of(records))
    return completed(incident, before, restarts, progress, wall_ns, evidence.stacks)


def _first(verdict: Verdict, evidence: Evidence, mover: int | None) -> int | None:
    """Return the rank whose records come first: one that is blamed, if any is."""
    blamed = [culprit.rank for culprit in verdict.culprits]
    if blamed:
        return verdict.first if verdict.first in blamed else blamed[0]
    return verdict.first if evidence.first is None or evidence.first != mover else mover


def _lost_nodes(parts: dict[str, NodeCycle]) -> list[str]:
    """Return the nodes that others declared lost, and those that noticed their own loss of the job's store."""
    decided = {part.lost_node for part in parts.values() if part.lost_node is not None}
    return sorted(decided | _cut_off(parts).keys())


def _cut_off(parts: dict[str, NodeCycle]) -> dict[str, NodeCycle]:
    """Return the nodes that lost the job's store while they had a place in this cycle. A node that waits for a place
    takes no part."""
    return {node: part for node, part in parts.items() if part.is_cut_off and part.started is not None}


def _ranks_by_node(parts: dict[str, NodeCycle], lost: list[str], size: int | None) -> dict[str, list[int]]:
    """Return the ranks of each node. A node that was lost as soon as it had its place may not have recorded its
    workers: it had the ranks that no other node has, if there is only one such node."""
    ranks = {node: sorted(part.workers) for node, part in parts.items()} | {
        node: [] for node in lost if node not in parts
    }
    unrecorded = [node for node in lost if not ranks[node]]
    if len(unrecorded) == 1 and all(ranks[node] for node in ranks if node not in unrecorded):
        known = {rank for of_node in ranks.values() for rank in of_node}
        ranks[unrecorded[0]] = [rank for rank in range(size or 0) if rank not in known]
    return ranks


def _without_store(parts: dict[str, NodeCycle], inside: Sequence[Iteration]) -> frozenset[int]:
    """Return the ranks without a store. These are the ranks of nodes that lost the job's store, unless only one node
    lost it and another one ended the cycle with it. If no node did, nodes that fell silent count too. If a Wrapper's
    call found no store, and no other call found one, these are all ranks: the launcher may have ended the others before
    they could record it."""
    workers = {rank: worker for part in parts.values() for rank, worker in part.workers.items()}
    is_refused = any(iteration.store_lost and not iteration.started for iteration in inside)
    if is_refused and all(worker.called_ns is None for worker in workers.values()):
        return frozenset(workers)
    cut_off = list(_cut_off(parts).values())
    is_answered = any(part.ended is not None and not part.is_cut_off for part in parts.values())
    if is_answered and len(cut_off) == 1:
        return frozenset()
    if cut_off and not is_answered:
        cut_off += [part for part in parts.values() if part.ended is None and part.decided is None]
    return frozenset(rank for part in cut_off for rank in part.workers)


def _without_agent(parts: dict[str, NodeCycle]) -> list[str]:
    return [node for node, part in parts.items() if any(worker.lost_its_agent for worker in part.workers.values())]


def _may_be_stopped(parts: dict[str, NodeCycle], record: InterruptionRecord) -> bool:
    """Return True if a process ended as agents end workers, and its agent, which knows whether it was that, has left no
    record."""
    is_recorded = any(part.started is not None for node, part in parts.items() if node == record.node)
    return is_end(record) and record.exit is not None and record.exit.signal == "SIGTERM" and not is_recorded


def is_end_after(left: InterruptionRecord, end: InterruptionRecord) -> bool:
    """Return True if a process ended with the exception with which its rank had left its wrapped function. left: the
    record of that exception. end: perhaps of the end of that process."""
    if not is_end(end) or end.rank != left.rank or end.exit is None or end.exit.signal is not None:
        return False
    exception = left.exception
    if exception is None or end.exception is not None:
        return exception is not None and end.exception is not None and end.exception.in_words == exception.in_words
    is_status = exception.type == "SystemExit" and exception.message.isdecimal()
    return str(end.exit.code) == exception.message if is_status else end.exit.code == 1


def ends_of(parts: Iterable[NodeCycle], rank: int | None) -> list[InterruptionRecord]:
    """Return the records of the ends of a rank's process in a cycle."""
    records = (sighting.record for part in parts for sighting in part.seen)
    return [record for record in records if is_end(record) and record.rank == rank]


def _with_one_reason(
    records: Iterable[InterruptionRecord], inside: Sequence[Iteration]
) -> tuple[InterruptionRecord, ...]:
    """Return the records without the ends of processes that follow from why their rank left its wrapped function."""
    left = [record for iteration in inside for record in iteration.records if record.rank in iteration.left]
    return tuple(end for end in records if not any(is_end_after(record, end) for record in left))


def _records(
    parts: dict[str, NodeCycle],
    within: Sequence[InterruptionRecord],
    mover: int | None,
    lost: list[str],
    ranks: dict[str, list[int]],
) -> tuple[InterruptionRecord, ...]:
    """Return the records of this cycle, each process end once. ranks: of each node."""
    own: dict[tuple[int, Interruption, int | None], InterruptionRecord] = {}
    for part in parts.values():
        for sighting in part.seen:
            record = sighting.record
            key = (record.rank, record.interruption, record.pid)
            if _may_be_stopped(parts, record):
                continue
            if part.is_left(record, mover) and (key not in own or own[key].step is None):
                own[key] = record  # the monitor's record says more than the agent's
    for record in within:  # a Wrapper's monitor knows the step and the sections, the launcher's may not
        key = (record.rank, record.interruption, record.pid)
        if is_end(record) and key in own and own[key].step is None and record.step is not None:
            own[key] = record
    for node, part in parts.items():
        own |= {(end.rank, end.interruption, end.pid): end for end in _failed_programs(node, part, own.values())}
    known = {record.rank for record in own.values() if is_end(record)}
    records = [*own.values(), *(record for record in within if not (is_end(record) and record.rank in known))]
    for node in sorted({*lost, *_without_agent(parts)}):
        # Monitors that still ran ended their workers because the agent was gone. One record stands for the whole node.
        workers = parts[node].workers if node in parts else {}
        ended = {rank for rank, worker in workers.items() if worker.lost_its_agent}
        detected = [record.detected_wall_ns for record in records if is_end(record) and record.rank in ended]
        records = [record for record in records if not (is_end(record) and record.rank in ended)]
        rank = min(ranks[node], default=None)
        if rank is not None and not any(record.rank == rank for record in records):
            message = f"node {node} is lost" if node in lost else f"the agent of {node} is gone"
            detector = None if node in lost else Detector(AGENT_LOST)
            since_ns = min(filter(None, detected), default=None)
            records.append(
                InterruptionRecord(
                    rank, Interruption.UNRESPONSIVE, message, detector=detector, node=node, detected_wall_ns=since_ns
                )
            )
    return tuple(
        msgspec.structs.replace(record, arrival_order=1 if record.rank == mover else None, iteration=record.iteration)
        for record in records
    )


def _failed_programs(node: str, part: NodeCycle, known: Iterable[InterruptionRecord]) -> Iterator[InterruptionRecord]:
    """Yield the ends of programs that had failed when another rank hung. The launcher stops such a rank before its
    interpreter has shut down, so nothing else tells how it would have ended. One that was seen so only after another
    rank of its node had been signalled may have failed because of that. known: the records of the cycle."""
    ranks = {record.rank for record in known}
    for rank, worker in part.workers.items():
        look = None if _is_seen_late(rank, part.workers) else worker.seen
        if rank not in ranks and look is not None and look.exit is not None:
            yield InterruptionRecord(
                rank,
                Interruption.TERMINATED,
                "its program had failed, and its interpreter was shutting down",
                exception=tracebacks.parse(look.log_tail) if look.log_tail else None,
                exit=look.exit,
                detector=Detector(LOOK),
                node=node,
                pid=worker.pid,
                detected_wall_ns=worker.seen_ns or None,
                stage="ending",
                step=look.step,
                log_tail=look.log_tail,
            )


def _evidence(
    history: History,
    parts: dict[str, NodeCycle],
    records: tuple[InterruptionRecord, ...],
    mover: int | None,
    size: int | None,
) -> Evidence:
    workers = {rank: worker for part in parts.values() for rank, worker in part.workers.items()}
    looks = {rank: worker.seen for rank, worker in workers.items() if worker.seen is not None}
    steps = {rank: look.step for rank, look in looks.items() if look.step is not None}
    return Evidence(
        records=records,
        first=mover,
        active=frozenset(range(size or 0)),
        stacks={rank: look.stack for rank, look in looks.items() if look.stack},
        steps=steps | {record.rank: record.step for record in records if record.step is not None},
        hangs={rank: look.hang for rank, look in looks.items() if look.hang is not None},
        collectives={rank: look.collectives for rank, look in looks.items() if look.collectives},
        returned=frozenset(
            rank
            for rank, worker in workers.items()
            if worker.exit is not None and worker.exit.code == 0 and worker.exit.expected
        ),
        signalled={rank: worker.signals[1] for rank, worker in workers.items() if worker.signals is not None},
        late=frozenset(rank for rank in workers if _is_late(rank, workers, records)),
        is_alone=size == 1,
        clock_errors=history.clock_errors,
    )


def _is_seen_late(rank: int, workers: dict[int, Worker]) -> bool:
    """Return True if a rank was looked at only after another one of its node had been signalled."""
    signals = (worker.signalled_ns for other, worker in workers.items() if other != rank and worker.signalled_ns)
    return min(signals, default=math.inf) < workers[rank].seen_ns


def _is_late(rank: int, workers: dict[int, Worker], records: tuple[InterruptionRecord, ...]) -> bool:
    """Return True if a rank was seen to run again only after a monitor had signalled another rank, for its stacks or to
    end it."""
    signals = [worker.signalled_ns for other, worker in workers.items() if other != rank and worker.signalled_ns]
    by_signal = [record for record in records if record.rank != rank and record.stack_method == "faulthandler"]
    signals += [record.detected_wall_ns for record in by_signal if record.detected_wall_ns]
    ran_again_ns = [
        record.detected_wall_ns or 0 for record in records if record.rank == rank and record.hang == "runs_again"
    ]
    return bool(signals) and min(signals) < max(workers[rank].seen_ns, *ran_again_ns, 0)


def _status(cycles: CycleHistory, place: Cycle, parts: dict[str, NodeCycle], following: dict[str, NodeCycle]) -> Status:
    if following:
        return "restarted"
    if not any(part.ended is not None for part in parts.values()):
        if all(part.is_undecided for part in parts.values()):
            return "ended" if all(part.has_lost_its_agent for part in parts.values()) else "unfinished"
        return "unfinished" if any(part.decided is not None for part in parts.values()) else "continued"
    if any(part.ended is None for part in parts.values()):
        return "unfinished"
    if any(part.ended is not None and part.ended.outcome == "completed" for part in parts.values()):
        return "continued"
    return "ended" if any((node, place[0]) in cycles.over for node in parts) else "unfinished"


def _unseen(parts: dict[str, NodeCycle]) -> set[int]:
    """Return the ranks that no agent looked at before it let a hung rank be stopped."""
    unseen = [
        {*part.others.missing, *(rank for other in parts.values() if other is not part for rank in other.workers)}
        for part in parts.values()
        if part.others is not None
    ]
    return set.intersection(*unseen) if unseen else set()


def _actions(
    parts: dict[str, NodeCycle], following: dict[str, NodeCycle], lost: list[str], status: Status, first: int | None
) -> tuple[str, ...]:
    workers = {rank: worker for part in parts.values() for rank, worker in sorted(part.workers.items())}
    by_method: defaultdict[str, list[int]] = defaultdict(list)
    for rank, worker in workers.items():
        if worker.evidence is not None:
            by_method[worker.evidence].append(rank)
    sent = {rank: worker.signals for rank, worker in workers.items() if worker.signals is not None}
    done = evidence_in_words(by_method, sent, _unseen(parts))
    stopped = sorted(rank for part in parts.values() for rank in part.stopped)
    if stopped and status != "continued":
        done.append(f"{named(stopped)} stopped")
    done += [f"node {node} left behind" for node in lost]
    if status == "restarted":
        starts = {worker.how for part in following.values() for worker in part.workers.values() if worker.how}
        start = f" ({' and '.join(sorted(starts))})" if starts else ""
        started = [list(part.workers) for part in following.values() if part.workers]
        if started:
            ranks = [rank for on_node in started for rank in on_node]
            done.append(f"started again{start}: {named(ranks)} on {count(len(started), 'node')}")
    elif status == "ended":
        reason = next((part.decided.why for part in parts.values() if part.decided is not None), "")
        done.append(f"the job ended{f': {reason}' if reason else ''}")
    elif status == "continued" and first is not None:
        done.append("the other ranks continued")
    return tuple(done)
