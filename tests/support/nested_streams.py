"""Record files of launched jobs whose workers call a Wrapper, that never ran."""

from __future__ import annotations

import msgspec

from resilience.facts import events
from resilience.facts.interruptions import Detector, Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from tests.support.launch_streams import LAST_STEP, Fault, Launched, launched
from tests.support.record_streams import job

BEFORE_STEP_S = 0.4  # in the function before its first step
REPEATED = 10  # steps since the checkpoint from which the next cycle goes on


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
