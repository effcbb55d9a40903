"""What is known about one interruption, and what does each rank show?  All evidence, before the ranks are compared.

`symptoms_of` picks the most telling symptom of each rank. `broken_in_restart` finds the ranks that had answered the
interruption before they broke: these have a fault, but did not begin the interruption. `attribution.verdict` compares
the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

import msgspec

from resilience.attribution.symptoms import Symptom, own_error, symptom
from resilience.core.hang_kind import in_backward, in_collective
from resilience.core.wait_for import ahead
from resilience.facts.deadlines import parse_limit
from resilience.facts.interruptions import HANGS, Collective, Frame, Hang, Interruption, InterruptionRecord
from resilience.history.clocks import UNKNOWN_NS

RESTART_STAGES = ("finalize", "health_check", "barrier")
"""What a rank does in a restart, between its abort and the next iteration."""
_ON_DEVICE: frozenset[Hang | None] = frozenset((None, "in_call", "in_loop"))
"""How a rank that waits for its device seems to hang: CUDA waits in a call, or uses a processor for it."""
_SAYS_LITTLE: frozenset[Hang | None] = frozenset((None, "in_call"))
_IN_NO_RESTART: frozenset[Hang | None] = frozenset(("stopped", "holds_gil"))
"""What no restart looks like, so it is from before."""


class Evidence(msgspec.Struct, frozen=True):
    """All evidence of one interruption. Ranks are initial ranks.

    records: each rank's records in the order it wrote them. first: the rank whose record reached the store first.
    stacks: each rank's main thread when it learned of the interruption, innermost last. hangs: how ranks hung that
    exceeded no limit. sections: each rank's open sections, if known. collectives: the last ones of each rank. seats:
    initial ranks by torch's ranks, where they differ. returned: ranks whose function had returned by then. signalled:
    ranks that a monitor signalled, each with the limit that it exceeded. after_answer: records that were made after the
    rank had answered the interruption. freed_before_look: ranks, each with the iteration, whose monitor saw how they
    hung only after they had answered, when their own abort may have freed them. late: ranks whose hang was seen only
    after another rank had been signalled, for its stacks or to end it, which may have freed them. on_lost_node: ranks
    that were lost with their node or its agent. left: ranks that left the call, so their processes may have ended.
    is_alone: one rank alone was active, so no other rank can have caused its error. size: number of active ranks, None
    if unknown; with fewer in `active`, the records of the others are missing. world: the same of all ranks. kills_late:
    the launcher kills the ranks that have not ended a while after another one has. clock_errors: by how much the clock
    of each node may be wrong, in nanoseconds, if there are several nodes."""

    records: tuple[InterruptionRecord, ...] = ()
    first: int | None = None
    active: frozenset[int] = frozenset()
    inactive: frozenset[int] = frozenset()
    stacks: dict[int, tuple[Frame, ...]] = {}
    steps: dict[int, int] = {}
    hangs: dict[int, Hang] = {}
    sections: dict[int, tuple[str, ...]] = {}
    collectives: dict[int, tuple[Collective, ...]] = {}
    seats: dict[int, int] = {}
    answered: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    signalled: dict[int, str] = {}
    store_lost: frozenset[int] = frozenset()
    after_answer: frozenset[tuple[int, Interruption]] = frozenset()
    freed_before_look: frozenset[tuple[int, int | None]] = frozenset()
    late: frozenset[int] = frozenset()
    on_lost_node: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    is_alone: bool = False
    size: int | None = None
    world: int | None = None
    kills_late: bool = False
    clock_errors: Mapping[str, int] = {}

    @property
    def count(self) -> int:
        """Return the number of active ranks, with those whose records are missing."""
        return max(len(self.active), self.size or 0)

    @property
    def is_whole(self) -> bool:
        """Return True unless the records of active ranks are known to be missing."""
        return len(self.active) >= self.count


def apart_ns(evidence: Evidence, record: InterruptionRecord, other: InterruptionRecord) -> int:
    """Return by how much the clocks of the nodes of two records may differ, in nanoseconds."""
    if record.node is None or other.node is None or record.node == other.node:
        return 0
    if not evidence.clock_errors:
        return 0
    return sum(evidence.clock_errors.get(node, UNKNOWN_NS) for node in (record.node, other.node))


def corrected(evidence: Evidence) -> Evidence:
    """Return the evidence with how each rank hung, and where, as far as all of it together shows that."""
    evidence = _with_own_accounts(_without_reruns(evidence))
    hangs = {record.rank: record.hang for record in evidence.records if record.hang is not None}
    entered = {record.rank: record.last_collectives for record in evidence.records if record.last_collectives}
    evidence = msgspec.structs.replace(
        evidence, hangs=hangs | evidence.hangs, collectives=entered | evidence.collectives
    )
    return _with_waits_for_a_device(evidence)


def symptoms_of(evidence: Evidence) -> dict[int, Symptom]:
    """Return the most telling symptom of each rank, the first reporter's first. Own faults win over echoes."""
    symptoms: dict[int, Symptom] = {}
    for record in evidence.records:
        if _has_waited(evidence, record):
            record = msgspec.structs.replace(record, hang="in_collective")
        rank = record.rank
        later = _symptom(evidence, record)
        earlier = symptoms.get(rank)
        is_graver = record.interruption is Interruption.HARD_TIMEOUT and earlier is not None and earlier.rule > 2
        if earlier is None or (later.is_own and not earlier.is_own) or (is_graver and later.is_own >= earlier.is_own):
            symptoms[rank] = later
    order = sorted(symptoms, key=lambda rank: (rank != evidence.first, arrival(symptoms[rank].record), rank))
    return {rank: symptoms[rank] for rank in order}


def broken_in_restart(evidence: Evidence) -> dict[int, Symptom]:
    """Return the ranks that broke only after they had answered the interruption: they did not begin it."""
    by_rank: defaultdict[int, list[InterruptionRecord]] = defaultdict(list)
    for record in evidence.records:
        by_rank[record.rank].append(record)
    return {
        rank: shown
        for rank, shown in symptoms_of(evidence).items()
        if shown.is_own
        and all(_is_late(evidence, record) for record in by_rank[rank] if _symptom(evidence, record).is_own)
    }


def without_restart(evidence: Evidence, ranks: Set[int]) -> Evidence:
    """Return the evidence as if these ranks had not broken in the restart."""
    records = tuple(record for record in evidence.records if record.rank not in ranks or not _is_late(evidence, record))
    return msgspec.structs.replace(evidence, records=records)


def _with_own_accounts(evidence: Evidence) -> Evidence:
    """Return the evidence with hangs as the ranks recorded them themselves, before their abort, where their monitors
    looked only afterwards: those may have seen the restart.

    "holds_gil" is found while the rank is asked for its stacks, so it may be from before its answer. If the monitor saw
    nothing at all, where the rank was when it answered counts, as for a rank without a limit, if a rank was seen to
    hang elsewhere."""

    def with_hang(record: InterruptionRecord, hang: Hang | None) -> InterruptionRecord:
        if hang in (None, record.hang) or record.hang in _IN_NO_RESTART or not _is_torn(evidence, record):
            return record
        return msgspec.structs.replace(record, hang=hang, process=None, stacks=(), open_sections=())

    records = [with_hang(record, evidence.hangs.get(record.rank)) for record in evidence.records]
    if any(record.hang not in (None, "in_collective") for record in records):
        records = [
            with_hang(record, "in_collective")
            if record.hang is None and not record.stacks and waits(evidence, record.rank)
            else record
            for record in records
        ]
    return msgspec.structs.replace(evidence, records=tuple(records))


def _without_reruns(evidence: Evidence) -> Evidence:
    """Return the evidence without the word for a rank that ran again when it was looked at: if the end of another rank
    may have freed it, it had waited for that one; otherwise it computes, now and then."""

    def known(rank: int, hang: Hang | None) -> Hang | None:
        return hang if hang != "runs_again" else "in_collective" if rank in evidence.late else "in_loop"

    records = (msgspec.structs.replace(record, hang=known(record.rank, record.hang)) for record in evidence.records)
    hangs = {rank: word for rank, hang in evidence.hangs.items() if (word := known(rank, hang)) is not None}
    return msgspec.structs.replace(evidence, records=tuple(records), hangs=hangs)


def _with_waits_for_a_device(evidence: Evidence) -> Evidence:
    """Return the evidence with ranks that wait for a collective on their device as ranks that wait in a collective.

    A collective of an accelerator runs on the device. Its rank goes on, and waits later, anywhere in the program. So
    the numbers of the collectives decide: the rank has entered one that other members have not reached."""
    entered = {rank: entries for rank, entries in evidence.collectives.items() if rank in evidence.active}
    words = {record.rank: record.hang for record in evidence.records if record.interruption in HANGS}
    waiting = {
        rank
        for rank in ahead(entered, evidence.seats or {rank: rank for rank in evidence.active})
        if {words.get(rank), evidence.hangs.get(rank)} <= _ON_DEVICE
    }
    if not waiting:
        return evidence
    records = tuple(
        msgspec.structs.replace(record, hang="in_collective")
        if record.rank in waiting and record.interruption in HANGS
        else record
        for record in evidence.records
    )
    hangs = evidence.hangs | dict.fromkeys(waiting, "in_collective")
    return msgspec.structs.replace(evidence, records=records, hangs=hangs)


def _is_late(evidence: Evidence, record: InterruptionRecord) -> bool:
    """Return True if a rank had answered the interruption when it came to what this record says."""
    rank = record.rank
    if record.interruption is Interruption.TERMINATED:
        return rank in evidence.answered
    if (rank, record.interruption) not in evidence.after_answer:
        return False
    is_in_hook = record.detector is not None and parse_limit(record.detector.name).kind == "hook"
    is_hung_since = record.interruption in HANGS and (is_in_hook or waits(evidence, rank))
    return record.stage in RESTART_STAGES or is_hung_since


def _symptom(evidence: Evidence, record: InterruptionRecord) -> Symptom:
    rank = record.rank
    stack, sections = evidence.stacks.get(rank, ()), evidence.sections.get(rank, ())
    shown = symptom(record, evidence.signalled.get(rank), stack, sections)
    return own_error(shown) if evidence.is_alone and rank in evidence.active else shown


def _has_waited(evidence: Evidence, record: InterruptionRecord) -> bool:
    """Return True if a hung rank recorded itself that it waited in a collective, and its monitor saw no more than that
    it hung, as on a busy host, where the rank does not answer."""
    return evidence.hangs.get(record.rank) == "in_collective" and record.hang in _SAYS_LITTLE


def _is_torn(evidence: Evidence, record: InterruptionRecord) -> bool:
    """Return True if a monitor saw how its rank hung only after the rank's own abort may have freed it."""
    place = (record.rank, record.iteration)
    return record.interruption is Interruption.SOFT_TIMEOUT and place in evidence.freed_before_look


def waits(evidence: Evidence, rank: int) -> bool:
    """Return True if a rank waited in a collective when it answered."""
    stack, hang = evidence.stacks.get(rank, ()), evidence.hangs.get(rank)
    return hang == "in_collective" or in_collective(stack, hang) or in_backward(stack)


def arrival(record: InterruptionRecord) -> float:
    """Return the position in which a record reached the store."""
    return float("inf") if record.arrival_order is None else record.arrival_order
