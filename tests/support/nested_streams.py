"""Record files of launched jobs whose workers call a Wrapper, that never ran."""

from __future__ import annotations

import msgspec

from resilience.facts import events
from resilience.facts.records import Record
from tests.support.launch_streams import Fault, Launched, launched
from tests.support.record_streams import job


def nested(faults: list[Fault], nodes: int = 1, ranks: int = 2, import_s: float = 1.5) -> Launched:
    """Return a launched job, one fault a cycle, whose workers enter a wrapped function `import_s` after their start."""
    told = launched(faults, nodes=nodes, ranks=ranks, signs=False)
    inside = job(world=nodes * ranks).files
    for records in [records for (_, rank), records in told.files.items() if rank is None]:
        for started in records:
            if isinstance(started.event, events.WorkerStarted):
                rank, is_last = started.event.worker_rank, started.origin.cycle == len(faults)
                told.files[started.origin.node, rank] += _moved(inside[rank], started, import_s, is_last)
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
