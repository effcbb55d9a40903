"""Record streams of Wrapper ranks that torchrun stops, and starts again.

torchrun does not know of restarts in place: if a process ends, it stops all others."""

from __future__ import annotations

import msgspec

from resilience.facts import events
from resilience.facts.interruptions import Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from tests.support.record_streams import Job


def stopped_in_restart(
    told: Job, cause: int, after: type[events.Event] | None = None, by: str = "SIGTERM", after_s: float = 0.1
) -> list[Record]:
    """Return a job's records up to its first restart, in which a launcher like torchrun stops all ranks but `cause`.
    after: an event of the restart after which it does, by default the last one before the ranks meet again. by: the
    signal that ends the ranks, after_s seconds after that event."""
    cut: list[Record] = []
    for rank, records in told.files.items():
        names = [type(record.event) if after else getattr(record.event, "stage", None) for record in records]
        kept = records[: names.index(after or "regroup") + 1] if rank != cause else records
        cut += [record for record in kept if after or not isinstance(record.event, events.RankStoodInFor)]
        if rank == cause:
            continue
        last = kept[-1]
        later_ns = round(after_s * 1e9)
        at_ns = last.wall_ns + later_ns
        ended = InterruptionRecord(
            *(rank, Interruption.TERMINATED),
            exit=Exit(signal=by),
            iteration=last.origin.iteration,
            detected_wall_ns=at_ns,
            pid=100 + rank,
            stage="barrier",
        )
        origin = msgspec.structs.replace(last.origin, role="monitor", pid=500 + rank)
        gone = events.RankExited(goodbye=False, signal=by)
        stated = (events.RankInterrupted(ended), events.IterationEnded("lost", 1.0, closed_by="monitor"), gone)
        cut += [
            Record(900 + number, at_ns, last.mono_ns + later_ns, origin, event) for number, event in enumerate(stated)
        ]
    return cut


def under_torchrun(records: list[Record], left: int = 0) -> list[Record]:
    """Return the records of ranks that torchrun has started. left: how often it may start them again."""
    return [
        msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, restarts_left=left))
        if isinstance(record.event, events.CallStarted)
        else record
        for record in records
    ]


def in_cycle(records: list[Record], cycle: int) -> list[Record]:
    """Return the records, 300 s later with each cycle."""
    return [
        msgspec.structs.replace(
            record,
            origin=msgspec.structs.replace(record.origin, cycle=cycle),
            wall_ns=record.wall_ns + cycle * 300 * 10**9,
            mono_ns=record.mono_ns + cycle * 300 * 10**9,
        )
        for record in records
    ]
