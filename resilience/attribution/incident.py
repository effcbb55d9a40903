"""What is one incident?  An interruption and its outcome, as a value, for both layers.

`incidents` and `launch_incidents` collect the facts of an iteration or a cycle. This module derives the rest for either
layer: time, cost, place in the code, how the evidence was taken, and advice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from resilience.attribution.advice import advise, named
from resilience.attribution.progress import Progress
from resilience.attribution.symptoms import main_stack
from resilience.attribution.verdict import Verdict
from resilience.core import budget
from resilience.facts.fingerprints import of_parts, place_of
from resilience.facts.interruptions import HANGS, Category, Frame, Interruption, InterruptionRecord
from resilience.facts.user_frames import user_frame
from resilience.history.cycles import Cycle
from resilience.history.phases import Place, RankOrNode, TimedPhase, seconds_of
from resilience.history.places import AT_ENTRY, BESIDE_CALLS

Status = Literal["restarted", "ended", "unfinished", "continued"]


class Spread(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long something took on several ranks, in seconds. slowest: the initial rank that took longest.
    node: the slowest node, if whole nodes were timed."""

    median_s: float
    max_s: float
    slowest: int
    ranks: int
    node: str = ""


class Phase(msgspec.Struct, frozen=True):
    """One phase of the restart."""

    name: str
    took: Spread


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of the incident, in steps and in seconds of the whole job; None means "not known".

    hang_s: silence until a limit fired. restart_s: detection to first progress, slowest rank. rework_s:
    repeated steps, at the speed before the incident. lost_s: the sum of the known costs. has_steps: a step before or
    after the restart is on record. has_several_functions: several wrapped functions were called before a restart by the
    launcher, so that it is not known in which of them the job continued."""

    lost_steps: int | None = None
    hang_s: float | None = None
    restart_s: float | None = None
    rework_s: float | None = None
    has_steps: bool = True
    has_several_functions: bool = False

    @property
    def lost_s(self) -> float | None:
        known = [part for part in (self.hang_s, self.restart_s, self.rework_s) if part is not None]
        return sum(known) if known else None


NO_COST = Cost(lost_steps=0, rework_s=0.0)


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """One interruption of the job and its outcome. Ranks are initial ranks.

    layer: which layer restarted; for a cycle of the launcher, call is 0 and iteration AT_ENTRY. detail: what its agents
    agreed on. number: from 1, in order. reported_first: the rank whose record reached the store first; the first mover
    in `verdict` may be another rank that could not report. records: the first mover's come first. nodes: of the blamed
    ranks and the candidates. is_judged: a verdict on it that names nodes is on record. reached_step: the highest step
    that had begun, on any rank."""

    number: int
    attempt: int
    cycle: int
    call: int
    iteration: int
    status: Status
    kind: str
    verdict: Verdict
    layer: Literal["inprocess", "launcher"] = "inprocess"
    detail: str = ""
    records: tuple[InterruptionRecord, ...] = ()
    nodes: dict[int, str] = {}
    is_judged: bool = False
    reported_first: int | None = None
    detected_wall_ns: int | None = None
    since_wall_ns: int | None = None
    where: Frame | None = None  # where the verdict's first mover was
    world_size: int | None = None
    active_world_size: int | None = None
    next_world_size: int | None = None
    next_active_world_size: int | None = None
    excluded: tuple[int, ...] = ()
    stepped_in: tuple[int, ...] = ()
    reached_step: int | None = None
    phases: tuple[Phase, ...] = ()
    restart: Spread | None = None
    cost: Cost = Cost()
    actions: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    same_as: tuple[int, ...] = ()

    @property
    def category(self) -> Category:
        return self.verdict.category

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for the same fault across ranks, restarts and runs. For exceptions and exits the
        restart budget compares the same text. An error that followed from the fault of another rank does not count:
        any of the others may have been the first to raise one."""
        chief = self.chief
        if chief is None:
            return of_parts(self.verdict.what)
        blamed = {culprit.rank for culprit in self.verdict.culprits}
        is_echo = chief.exception is not None and (
            chief.origin == "consequence" or chief.rank not in (blamed or {chief.rank})
        )
        if chief.exception is not None and not is_echo:
            return chief.exception.fingerprint
        if chief.interruption in HANGS or is_echo:
            frame = self.where
            return of_parts("hang", self.verdict.what, "" if frame is None else place_of(frame))
        return of_parts(budget.fingerprint(chief))

    @property
    def has_unknown_rework(self) -> bool:
        """Return True if the job continued, and how long it repeated steps is not known."""
        return self.cost.rework_s is None and self.status == "restarted"

    @property
    def interrupted_no_rank(self) -> bool:
        """Return True if only monitors were lost, which costs nothing."""
        return self.verdict.what == "monitor_lost" and self.status == "continued"

    @property
    def is_of_lost_monitors(self) -> bool:
        """Return True if the launcher lost monitors of ranks, which ends no cycle."""
        return self.layer == "launcher" and self.verdict.what == "monitor_lost"

    @property
    def place(self) -> Place | Cycle:
        """Return its place in the history: an iteration, or a cycle of the launcher. Lost monitors of the launcher have
        a place that no iteration has: nothing restarts there."""
        if self.is_of_lost_monitors:
            return self.attempt, self.cycle, BESIDE_CALLS, AT_ENTRY
        if self.layer == "launcher":
            return self.attempt, self.cycle
        return self.attempt, self.cycle, self.call, self.iteration

    @property
    def chief(self) -> InterruptionRecord | None:
        """Return the record that says most about the fault: the first mover's."""
        return self.records[0] if self.records else None

    @property
    def first_detected(self) -> InterruptionRecord | None:
        """Return the record of the chief's rank that was detected first. Detection times and silences count from it,
        also if the chief is of a later limit or of the rank's end."""
        return min(_of_chief(self.records), key=_detected_at) if self.records else None


def nodes_of_suspects(
    verdict: Verdict, nodes: Mapping[int, str], records: Iterable[InterruptionRecord]
) -> dict[int, str]:
    """Return the node of each blamed rank and each candidate. nodes: of all ranks, as far as known."""
    known = {record.rank: record.node for record in records if record.node} | dict(nodes)
    suspects = (culprit.rank for culprit in (*verdict.culprits, *verdict.candidates))
    return {rank: known[rank] for rank in suspects if rank in known}


def completed(
    incident: Incident,
    before: Sequence[Incident],
    restarts: Mapping[int, float],
    progress: Progress,
    wall_ns: int | None,
    stacks: Mapping[int, tuple[Frame, ...]],
    swallowed: Sequence[tuple[int, str]] = (),
) -> Incident:
    """Return the incident with its number and with everything that can be derived from its records.

    before: earlier incidents of the job. restarts: how long each rank was away, in seconds. wall_ns: when the
    interruption was noticed, if no record says so. stacks: of ranks when they were stopped. swallowed: ranks whose code
    caught the interrupt, and the place."""
    verdict, records, chief = incident.verdict, incident.records, incident.chief
    of_chief = _of_chief(records)
    detections = [
        (detected_ns, record.silent_for_s or 0.0)
        for record in of_chief
        if (detected_ns := record.detected_wall_ns) is not None
    ]
    progress_unknown = any(record.progress_unknown for record in of_chief)
    restart = spread(restarts)
    suspects = {culprit.rank for culprit in (*verdict.culprits, *verdict.candidates)}
    exits = (record.exit for record in records if record.rank in suspects and record.exit is not None)
    codes = {exit.code for exit in exits if exit.code is not None}
    incident = msgspec.structs.replace(
        incident,
        number=len(before) + 1,
        kind=verdict.what if chief is None else _kind(chief),
        detected_wall_ns=min((detected_ns for detected_ns, _ in detections), default=wall_ns),
        since_wall_ns=min((detected_ns - round(silent * 1e9) for detected_ns, silent in detections), default=wall_ns),
        where=where(verdict.first, records, stacks, incident.reported_first),
        restart=restart,
        cost=NO_COST if incident.interrupted_no_rank else _cost(progress, silence_of(records), restart),
        reached_step=progress.reached,
    )
    alike = _alike(incident, before)
    is_stuck = len(alike) >= 2 and incident.status != "continued" and _is_stuck([*before, incident])
    return msgspec.structs.replace(
        incident,
        advice=advise(verdict, len(alike), is_stuck, progress_unknown, swallowed, codes),
        same_as=tuple(earlier.number for earlier in alike),
    )


def _kind(chief: InterruptionRecord) -> str:
    kind = chief.interruption
    if chief.program_had_failed:
        kind = Interruption.TERMINATED if chief.exception is None else Interruption.EXCEPTION
    return str(kind.value)


def silence_of(records: Sequence[InterruptionRecord]) -> float | None:
    """Return how many seconds the rank of the first record had been silent when the first limit fired, None if it was
    not silent. The restart counts from then on, also if the monitor ends the rank at a later limit."""
    silences = [
        (_detected_at(record), record.silent_for_s) for record in _of_chief(records) if record.silent_for_s is not None
    ]
    return min(silences)[1] if silences else None


def _of_chief(records: Sequence[InterruptionRecord]) -> list[InterruptionRecord]:
    return [record for record in records if record.rank == records[0].rank]


def _detected_at(record: InterruptionRecord) -> float:
    return math.inf if record.detected_wall_ns is None else record.detected_wall_ns


def _cost(progress: Progress, silence: float | None, restart: Spread | None) -> Cost:
    reached, resumed = progress.reached, progress.resumed
    lost = None if reached is None or resumed is None else max(0, reached - resumed)
    step_s = progress.seconds_a_step() if lost else 0.0
    return Cost(
        lost_steps=lost,
        hang_s=silence,
        restart_s=None if restart is None else restart.max_s,
        rework_s=None if lost is None or step_s is None else lost * step_s,
        has_steps=progress.has_steps,
        has_several_functions=progress.has_several_functions,
    )


def evidence_in_words(
    by_method: Mapping[str, Iterable[int]], sent: Mapping[int, tuple[str, str]], unseen: Collection[int]
) -> list[str]:
    """Return how the ranks' stacks were taken, which signals monitors sent to which rank, and why. unseen: ranks that
    were not looked at before a hung rank was stopped."""
    actions = [
        f"{'no stack could be taken' if method == 'none' else f'stacks taken by {method}'} of {named(ranks)}"
        for method, ranks in sorted(by_method.items())
    ]
    if unseen:
        actions.append(f"not looked at before anything was stopped: {named(unseen)}")
    return actions + [f"{signals} sent to rank {rank} ({reason})" for rank, (signals, reason) in sorted(sent.items())]


def where(
    rank: int | None,
    records: Iterable[InterruptionRecord],
    stacks: Mapping[int, tuple[Frame, ...]],
    first: int | None = None,
) -> Frame | None:
    """Return the line of user code where this rank failed or was. stacks: of ranks when they learned of the
    interruption. first: the rank whose record reached the store first. The record of another rank's hang may have been
    written after the restart began, so its earlier stack is preferred."""
    if rank is None:
        return None
    for record in records:
        if record.rank == rank:
            is_late = record.interruption in HANGS and first not in (None, rank)
            taken = stacks.get(rank) if is_late else None
            frame = user_frame(record.exception.stack if record.exception is not None else taken or main_stack(record))
            if frame is not None:
                return frame
    return user_frame(stacks.get(rank, ()))


def spread(
    seconds: Mapping[int, float] | Mapping[RankOrNode, float], lowest: Mapping[str, int] | None = None
) -> Spread | None:
    """Return how long something took, None if nothing is known. lowest: the lowest rank of each node."""
    if not seconds:
        return None
    lowest_ranks = {} if lowest is None else lowest

    def rank_of(place: RankOrNode) -> int:
        return place if isinstance(place, int) else lowest_ranks.get(place, 0)

    longest = max(seconds.values())
    slowest = min((place for place, took in seconds.items() if took == longest), key=rank_of)
    node = slowest if isinstance(slowest, str) else ""
    return Spread(statistics.median(seconds.values()), longest, rank_of(slowest), len(seconds), node)


def spreads(
    phases: Iterable[TimedPhase], names: Iterable[str], lowest: Mapping[str, int] | None = None
) -> tuple[Phase, ...]:
    """Return how long each phase of a restart took, in the order of `names`. lowest: as for `spread`."""
    seconds = seconds_of(phases)
    named_spreads = ((name, spread(seconds.get(name, {}), lowest)) for name in names)
    return tuple(Phase(name, took) for name, took in named_spreads if took is not None)


def _alike(incident: Incident, before: Iterable[Incident]) -> list[Incident]:
    """Return the earlier incidents of the same fault. Without a record of the rank nothing says that it is the same."""
    if not incident.records:
        return []
    fingerprint = incident.fingerprint
    return [earlier for earlier in before if earlier.records and earlier.fingerprint == fingerprint]


def _is_stuck(incidents: Sequence[Incident]) -> bool:
    """Return True if the restart budget, with its defaults, calls the last incident a repetition: the third of the same
    failure in a row without progress. If no rank reports a step, only an exception can be one."""
    defaults = budget.Budget(max_restarts=0)
    restarted = [incident for incident in incidents if incident.status != "continued"]
    failures = [_failure(incident, last) for last, incident in zip([None, *restarted], restarted, strict=False)]
    return budget.same_in_a_row(defaults, failures[:-1], failures[-1]) >= defaults.same_limit


def _failure(incident: Incident, last: Incident | None) -> budget.Failure:
    """Return the incident as the budget sees it. last: the incident before, since which the ranks have run."""
    mark = "" if incident.chief is None else budget.fingerprint(incident.chief)
    kind: budget.FailureKind = "exit" if incident.chief is None else budget.kind_of(incident.chief)
    steps = [record.step for record in incident.records]
    steps += [incident.reached_step] if incident.layer == "launcher" else []  # which its budget knows from all ranks
    step = max((step for step in steps if step is not None), default=-1)
    at, began = incident.since_wall_ns, None if last is None else last.detected_wall_ns
    ran = 0.0 if at is None or began is None else (at - began) / 1e9
    return budget.Failure(incident.number, mark, incident.kind, "", -1, step, ran=ran, kind=kind)


def to_json(incident: Incident) -> Any:
    """Return the incident as plain values, including the computed ones."""
    plain = msgspec.to_builtins(incident)
    plain["cost"] = {**msgspec.to_builtins(incident.cost), "lost_s": incident.cost.lost_s}
    plain["category"] = incident.category
    plain["fingerprint"] = incident.fingerprint
    return plain
