"""What follows from a rank's request, and from nodes that fail, finish or are lost?

Sooner or later each agent learns the same facts about its cycle's nodes, and applies the restart policy to them.
any-failed: one failed worker ends the cycle. min-healthy: a cycle continues while at least the minimum number of nodes
is healthy, because the workers recover by themselves; a lost node counts as unhealthy. `weigh` says what the facts call
for, `core.budget` grants a restart, and the result is one verdict (`core.cycle`). Of several requests the gravest
counts, in whatever order they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from resilience.core import cycle
from resilience.core.cycle import CycleDecision

Policy = Literal["any-failed", "min-healthy"]
Call = Literal["go on", "restart", "completed", "premature"]
Action = Literal["ShutdownWorkload", "ExcludeThisNode"]
GRAVEST_FIRST: tuple[Action, ...] = get_args(Action)


class Nodes(msgspec.Struct, frozen=True):
    """What is known about a cycle's nodes, as counts. unhealthy: nodes with a failed worker, and lost nodes (the agent
    left or is silent); waiting: nodes whose workers all succeeded and that wait for the others; is_over: no worker is
    left on any node, however they ended; lost: names."""

    all: int
    unhealthy: int = 0
    waiting: int = 0
    lost: frozenset[str] = frozenset()
    is_over: bool = False


class Request(msgspec.Struct, frozen=True):
    """A rank's request. action: as in the compatible API; those that are no `Action` ask for nothing."""

    action: str
    description: str = ""


def weigh(policy: Policy, least: int, nodes: Nodes, waited: float, limit: float | None) -> Call:
    """Return what the state of a cycle's nodes calls for.

    least: nodes that must be healthy under min-healthy; waited: seconds since the first node finished; limit: seconds
    by which nodes may finish apart, None if there is no limit."""
    if nodes.unhealthy and (policy == "any-failed" or nodes.all - nodes.unhealthy < least):
        return "restart"
    if nodes.is_over:
        return "completed"
    if nodes.waiting and limit is not None and waited >= limit:
        return "premature"
    return "go on"


def is_premature(policy: Policy, apart: float, limit: float | None) -> bool:
    """Return True if some workers of a node succeeded too long before the others: apart, limit in seconds. Without a
    limit the others may run on. With min-healthy, a Wrapper may have given up the other rank, so this returns False."""
    return policy == "any-failed" and limit is not None and apart >= limit


def takes_newcomers(policy: Policy, nodes: Nodes) -> bool:
    """Return True if a waiting node is a reason to end the cycle. Once a node has finished it is not, because the
    finished workers would start again."""
    return policy == "any-failed" and not nodes.waiting


def answer(requests: Sequence[Request], node: str) -> CycleDecision | None:
    """Return the verdict that follows from the requests of a node's ranks, None if there is none. A verdict with
    `again` applies to the other nodes; this node leaves."""
    asked = {request.action: request.description for request in reversed(requests)}
    gravest = next((action for action in GRAVEST_FIRST if action in asked), None)
    match gravest:
        case None:
            return None
        case "ShutdownWorkload":
            return CycleDecision("shutdown", node, exit_code=cycle.SHUT_DOWN, detail=asked[gravest])
        case "ExcludeThisNode":
            return CycleDecision("interrupted", node, again="request", detail=f"node {node} leaves: {asked[gravest]}")
