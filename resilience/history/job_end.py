"""How did the launcher's job end?  The one rule for report, status and metrics.

Each agent records the end of the job as its last record. That record may be missing: the agent was killed, or the disk
was full. Other records prove the end all the same: another node's, the end of the last cycle on all of its nodes, or
the ends of its workers, all of which completed. A job without the launcher has no such record: its calls decide."""

from __future__ import annotations

import msgspec

from resilience.history.cycles import LAST_OUTCOMES, CycleHistory, NodeCycle
from resilience.history.history import History

CYCLE_ENDED = "not all agents recorded the end of the job"
RANKS_COMPLETED = "all ranks completed, but no agent recorded the end of the job"


class EndOfJob(msgspec.Struct, frozen=True):
    """The end of a job. outcome: as in job.ended. exit_code: None if no agent recorded it. at_ns: UTC. is_recorded:
    every agent of the last cycle recorded it; otherwise other records prove it, and an agent that lives may still
    record its own."""

    outcome: str
    at_ns: int
    exit_code: int | None = None
    detail: str = ""
    is_clean: bool = False
    is_recorded: bool = False


def job_end(history: History, attempt: int) -> EndOfJob | None:
    """Return how the job ended in an attempt; None if it runs, or if no record proves an end."""
    cycles = history.cycles
    recorded, is_over = cycles.end(attempt), cycles.is_over(attempt)
    place = max((place for place in cycles.places if place[0] == attempt), default=None)
    parts = {} if place is None else cycles.parts(place)
    at_ns = history.attempts[attempt].last_ns if attempt in history.attempts else 0
    if recorded is not None and (is_over or recorded.outcome == "completed" or _have_all_ended(parts, cycles, attempt)):
        ends = cycles.ends(attempt)
        is_clean = bool(ends) and all(event.is_clean for event in ends)
        return EndOfJob(recorded.outcome, at_ns, recorded.exit_code, recorded.detail, is_clean, is_over)
    if place is None or place != cycles.places[-1] or _has_new_agent(parts, cycles):
        return None
    outcome = _cycle_outcome(parts)
    if outcome is not None:
        ended_ns = max(part.ended_wall_ns for part in parts.values())
        return EndOfJob(outcome, ended_ns, detail=CYCLE_ENDED)
    if any(_is_interrupted(part) for part in parts.values()):
        return None
    if _have_all_ended(parts, cycles, attempt) and _have_all_completed(history, cycles.world_size(place)):
        ended_ns = max(worker.ended_wall_ns for part in parts.values() for worker in part.workers.values())
        return EndOfJob("completed", ended_ns, detail=RANKS_COMPLETED)
    return None


def _have_all_ended(parts: dict[str, NodeCycle], cycles: CycleHistory, attempt: int) -> bool:
    """Return True if no worker of a cycle may still run: on each node the job is over, or all workers have ended."""
    lost = {part.lost_node for part in parts.values()}
    return bool(parts) and all(
        (node, attempt) in cycles.over
        or node in lost
        or (bool(part.workers) and all(worker.has_ended for worker in part.workers.values()))
        for node, part in parts.items()
    )


def _is_interrupted(part: NodeCycle) -> bool:
    """Return True if workers of the node were ended, or were asked to end, before they completed. Such a worker may
    exit with status 0."""
    return (
        part.is_asked_to_stop
        or part.decided is not None
        or (part.ended is not None and part.ended.outcome != "completed")
        or any(worker.exit is not None and not part.has_completed(worker) for worker in part.workers.values())
    )


def _has_new_agent(parts: dict[str, NodeCycle], cycles: CycleHistory) -> bool:
    """Return True if the agent of a node is gone and another one has come, which waits for a cycle."""
    lost = {part.lost_node for part in parts.values()}
    newest = {node: agents[-1] for node, agents in cycles.agents.items() if node not in lost}
    return any(
        part.agent is not None and newest.get(node, part.agent) is not part.agent for node, part in parts.items()
    )


def _cycle_outcome(parts: dict[str, NodeCycle]) -> str | None:
    """Return how the last cycle ended, None if nodes have not ended it, or may begin another one. Nodes that it lost do
    not count."""
    lost = {part.lost_node for part in parts.values()}
    ended = [part.ended for node, part in parts.items() if part.started is not None and node not in lost]
    outcomes = {None if cycle is None else cycle.outcome for cycle in ended}
    if not outcomes.issubset(LAST_OUTCOMES):
        return None
    return next((outcome for outcome in LAST_OUTCOMES if outcome in outcomes), None)


def _have_all_completed(history: History, world_size: int | None) -> bool:
    calls = history.last_calls()
    return bool(world_size) and all(
        rank in calls and calls[rank].outcome == "completed" for rank in range(world_size or 0)
    )
