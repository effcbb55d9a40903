"""Record files of launched jobs whose workers call a Wrapper, that never ran."""

from __future__ import annotations

from typing import Any

import msgspec

from resilience.facts import events
from resilience.facts.interruptions import Detector, Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from tests.support.launch_streams import LAST_STEP, Fault, Launched, launched
from tests.support.record_streams import job

BEFORE_STEP_S = 0.4  # in the function before its first step
REPEATED = 10  # steps since the checkpoint from which the next cycle goes on
IN_PLACE_S = 0.8  # in the function until a restart in place
AWAY_S = 0.1  # in that restart


def nested(
    faults: list[Fault], nodes: int = 1, ranks: int = 2, import_s: float = 1.5, has_steps: bool = False
) -> Launched:
    """Return a launched job, one fault a cycle, whose workers enter a wrapped function `import_s` after their start.

    has_steps: the function reports its steps, LAST_STEP of them before each fault."""
    told = launched(faults, nodes=nodes, ranks=ranks, signs=False)
    inside = job(world=nodes * ranks).files
    for records in [records for (_, rank), records in told.files.items() if rank is None]:
        for started in records:
            if isinstance(started.event, events.WorkerStarted):
                rank, is_last = started.event.worker_rank, started.origin.cycle == len(faults)
                told.files[started.origin.node, rank] += _moved(inside[rank], started, import_s, is_last)
                if has_steps:
                    told.files[started.origin.node, rank] += _steps(told.files[started.origin.node, rank], started)
    for records in told.files.values():
        records.sort(key=lambda record: record.mono_ns)
    return told


def restart_in_place(told: Launched, cycle: int, reached: int, resumed: int | None, dead: int | None = None) -> None:
    """Add a restart in place to a cycle: its ranks had come to step `reached`, and go on with step `resumed`, None if
    they enter a section first and report no step. dead: a rank that is killed, so that the others go on without it."""
    for (node, rank), records in told.files.items():
        entry = next((record for record in records if _is_entry(record) and record.origin.cycle == cycle), None)
        if rank is None or entry is None:
            continue
        at = entry.mono_ns + round(IN_PLACE_S * 1e9)
        before = [record for record in records if record.mono_ns < at]
        after = [record for record in records if record.mono_ns >= at]
        if rank == dead:
            started = _worker_started(told.files[node, None], rank, cycle)
            ended, exited = _death(entry, at, started, reached)
            told.files[node, rank] = [*before, *ended, *(record for record in after if record.origin.cycle > cycle)]
            agents = [record for record in told.files[node, None] if not _is_exit(record, rank, cycle)]
            told.files[node, None] = sorted([*agents, exited], key=lambda record: record.mono_ns)
            continue
        restart: list[tuple[int, events.Event]] = [
            (0, events.IterationDecided(dead, step=reached)),
            (0, events.StageEnded("run", "interrupted", IN_PLACE_S)),
            (0, events.StageStarted("restart")),
            (0, events.IterationEnded("interrupted", IN_PLACE_S)),
            (1, events.IterationStarted(1, "active")),
            (1, events.StageStarted("run")),
            (1, events.StageEnded("restart", "completed", AWAY_S)),
            (1, events.RestartEnded("peer", AWAY_S, "section" if resumed is None else "step", resumed)),
        ]
        taken = [_later(entry, at + part * round(AWAY_S * 1e9), event, iteration=part) for part, event in restart]
        told.files[node, rank] = [*before, *taken, *(_in_iteration_1(record, cycle) for record in after)]


def call_another_before(told: Launched, cycle: int) -> None:
    """Let the workers of a cycle call another wrapped function first, which reports no step."""
    for (node, rank), records in told.files.items():
        calls = (number for number, record in enumerate(records) if isinstance(record.event, events.CallStarted))
        call = next((number for number in calls if records[number].origin.cycle == cycle), None)
        if rank is None or call is None:
            continue
        started = records[call]
        told.files[node, rank] = [
            *records[:call],
            msgspec.structs.replace(started, mono_ns=started.mono_ns - 2),
            _later(started, started.mono_ns - 1, events.CallEnded("completed", 1, 0.0)),
            *(
                msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, call=1))
                if record.origin.cycle == cycle and record.origin.layer != "launcher"
                else record
                for record in records[call:]
            ),
        ]


def _is_entry(record: Record) -> bool:
    return isinstance(record.event, events.StageStarted) and record.event.stage == "run"


def _is_exit(record: Record, rank: int, cycle: int) -> bool:
    event = record.event
    return isinstance(event, events.WorkerExited) and event.worker_rank == rank and record.origin.cycle == cycle


def _worker_started(records: list[Record], rank: int, cycle: int) -> Record:
    return next(
        record
        for record in records
        if isinstance(record.event, events.WorkerStarted)
        and (record.event.worker_rank, record.origin.cycle) == (rank, cycle)
    )


def _death(entry: Record, at: int, started: Record, step: int) -> tuple[list[Record], Record]:
    """Return what a Wrapper's monitor and the agent record of a rank that is killed."""
    rank = entry.origin.initial_rank
    assert rank is not None and isinstance(started.event, events.WorkerStarted)
    killed = {"exit": Exit(signal="SIGKILL"), "detector": Detector("exit"), "pid": started.event.worker_pid}
    record = InterruptionRecord(
        rank, Interruption.TERMINATED, iteration=0, node=entry.origin.node, stage="run", step=step, **killed
    )
    ends = (
        events.RankExited(False, signal="SIGKILL"),
        events.RankInterrupted(record),
        events.StageEnded("run", "lost", IN_PLACE_S, closed_by="monitor"),
        events.IterationEnded("lost", IN_PLACE_S, closed_by="monitor"),
        events.RankStoodInFor(rank, "excluded", 0.01),
        events.MonitorEnded(),
    )
    exited = events.WorkerExited(started.event.local_rank, rank, record.pid or 0, None, "SIGKILL", False)
    shift = at - started.mono_ns
    return (
        [_later(entry, at, event, role="monitor", pid=700 + rank) for event in ends],
        msgspec.structs.replace(started, mono_ns=at, wall_ns=started.wall_ns + shift, event=exited),
    )


def _later(record: Record, at: int, event: events.Event, **place: Any) -> Record:
    origin = msgspec.structs.replace(record.origin, **place)
    wall_ns = record.wall_ns + at - record.mono_ns
    return msgspec.structs.replace(record, mono_ns=at, wall_ns=wall_ns, origin=origin, event=event)


def _in_iteration_1(record: Record, cycle: int) -> Record:
    """Return a record of a wrapped rank after the restart in place."""
    if record.origin.cycle != cycle or record.origin.iteration is None:
        return record
    event = record.event
    if isinstance(event, events.RankInterrupted):
        event = events.RankInterrupted(msgspec.structs.replace(event.record, iteration=1))
    elif isinstance(event, events.StageEnded) and event.stage == "run":
        event = msgspec.structs.replace(event, duration_s=event.duration_s - IN_PLACE_S - AWAY_S)
    return msgspec.structs.replace(record, event=event, origin=msgspec.structs.replace(record.origin, iteration=1))


def _moved(records: list[Record], started: Record, import_s: float, whole: bool) -> list[Record]:
    """What a wrapped worker records from `import_s` after its start; not whole: until it enters its function."""
    entry = next(
        number
        for number, record in enumerate(records)
        if isinstance(record.event, events.StageStarted) and record.event.stage == "run"
    )
    shift = round(import_s * 1e9) - (records[entry].mono_ns - started.mono_ns)
    found = []
    for record in records if whole else records[: entry + 1]:
        place = {"node": started.origin.node, "cycle": started.origin.cycle, "job_id": started.origin.job_id}
        wall = started.wall_ns + (record.mono_ns + shift - started.mono_ns)
        moved = msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, **place))
        found.append(msgspec.structs.replace(moved, mono_ns=record.mono_ns + shift, wall_ns=wall))
    return found


def _steps(records: list[Record], started: Record) -> list[Record]:
    """Return what a wrapped worker and its monitor record of its steps: the first one, and how far it had come when it
    was ended. records: all others of its rank."""
    cycle, node = started.origin.cycle, started.origin.node
    of_cycle = [record for record in records if record.origin.cycle == cycle]
    entry = next(
        record for record in of_cycle if isinstance(record.event, events.StageStarted) and record.event.stage == "run"
    )
    first = cycle * (LAST_STEP - REPEATED)
    after = round(BEFORE_STEP_S * 1e9)
    reported = msgspec.structs.replace(
        entry,
        sequence=900,
        mono_ns=entry.mono_ns + after,
        wall_ns=entry.wall_ns + after,
        event=events.FirstStepReported(first, BEFORE_STEP_S),
    )
    exited = next((record for record in of_cycle if isinstance(record.event, events.RankExited)), None)
    if exited is None or not isinstance(exited.event, events.RankExited) or exited.event.goodbye:
        return [reported]  # its node is lost, or it has completed
    rank = entry.origin.initial_rank
    assert rank is not None
    pid = started.event.worker_pid if isinstance(started.event, events.WorkerStarted) else None
    last = InterruptionRecord(
        rank,
        Interruption.TERMINATED,
        exit=Exit(exited.event.code, exited.event.signal),
        detector=Detector("exit"),
        iteration=0,
        node=node,
        pid=pid,
        stage="run",
        step=first + LAST_STEP,
    )
    origin = msgspec.structs.replace(entry.origin, role="monitor", pid=700 + rank)
    run_s = (exited.mono_ns - entry.mono_ns) / 1e9
    monitored = (
        exited.event,
        events.RankInterrupted(last),
        events.StageEnded("run", "lost", run_s, closed_by="monitor"),
        events.IterationEnded("lost", run_s, closed_by="monitor"),
        events.MonitorEnded(),
    )
    ends = [
        msgspec.structs.replace(exited, sequence=number, mono_ns=exited.mono_ns + number, origin=origin, event=event)
        for number, event in enumerate(monitored)
    ]
    return [reported, *ends]
