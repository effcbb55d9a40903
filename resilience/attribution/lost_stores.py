"""Did the ranks of a cycle fail because the store that they used was gone?

The launcher hosts the store of each cycle in a process of one node. If that process ends, the job's store may be
elsewhere, and the workers go on until one of them needs the cycle's store, for example to make a new group."""

from __future__ import annotations

from collections.abc import Mapping

from resilience.attribution.symptoms import symptom
from resilience.facts.interruptions import InterruptionRecord
from resilience.history.cycles import NodeCycle

_STORE_ERRORS = ("torch.distributed.DistNetworkError", "torch.distributed.DistStoreError")  # of a TCPStore's clients


def without_cycle_store(parts: Mapping[str, NodeCycle], mover: int | None) -> frozenset[int]:
    """Return all ranks if the process that hosted their cycle's store ended, a rank failed as one does that uses the
    store then, and no other rank has a clear fault of its own."""
    if not any(part.has_lost_cycle_store for part in parts.values()):
        return frozenset()
    sightings = [(part, sighting.record) for part in parts.values() for sighting in part.seen]
    records = [record for part, record in sightings if part.is_left(record, mover)]
    others = [record for record in records if not _is_of_store(record)]
    if len(others) == len(records) or any(shown.is_own and not shown.is_guess for shown in map(symptom, others)):
        return frozenset()
    return frozenset(rank for part in parts.values() for rank in part.workers)


def _is_of_store(record: InterruptionRecord) -> bool:
    return record.exception is not None and record.exception.type in _STORE_ERRORS
