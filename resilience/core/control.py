"""What follows from a rank's request, and from nodes that fail, finish or are lost?

Each agent sees the same facts about its cycle's nodes, sooner or later, and weighs them against the restart
policy. any-failed: one failed worker is enough. min-healthy: a cycle goes on while at least the minimum of
nodes is healthy, for the workers help themselves; a lost node is not healthy either. `weigh` says what the
facts call for, whether a restart is granted is `core.budget`'s, and what then stands is one verdict
(`core.cycle`). Of several requests the gravest is followed, whoever made it first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from resilience.core import cycle
from resilience.core.cycle import Verdict

Policy = Literal["any-failed", "min-healthy"]
Call = Literal["go on", "restart", "completed", "premature"]
GRAVEST_FIRST = ("ShutdownWorkload", "ExcludeThisNode")


class Nodes(msgspec.Struct, frozen=True):
    """What is seen of a cycle's nodes, as counts. unhealthy: a worker there ended badly, or the node is lost (its
    agent left, or gives no sign of life); waiting: those that are through, and well, and wait for the others; is_over:
    no worker is left anywhere, however they ended; lost: names."""

    all: int
    unhealthy: int = 0
    waiting: int = 0
    lost: frozenset[str] = frozenset()
    is_over: bool = False


class Request(msgspec.Struct, frozen=True):
    """What a rank asks for. action: as in the compatible API."""

    action: str
    description: str = ""


def weigh(policy: Policy, least: int, nodes: Nodes, waited: float, limit: float) -> Call:
    """Return what the nodes of a cycle call for.

    least: nodes that must be healthy under min-healthy; waited: seconds since the first node was through, and
    limit: seconds by which nodes may finish apart."""
    if nodes.unhealthy and (policy == "any-failed" or nodes.all - nodes.unhealthy < least):
        return "restart"
    if nodes.is_over:
        return "completed"
    if nodes.waiting and waited >= limit:
        return "premature"
    return "go on"


def is_premature(policy: Policy, apart: float, limit: float) -> bool:
    """Return whether workers of a node ended well too long before its others: apart, limit in seconds. With
    min-healthy it may be a rank that its Wrapper has given up."""
    return policy == "any-failed" and apart >= limit


def takes_newcomers(policy: Policy, nodes: Nodes) -> bool:
    """Return whether a node that waits is a reason to end the cycle. Not once a node is through: its workers
    would start again for it."""
    return policy == "any-failed" and not nodes.waiting


def answer(requests: Sequence[Request], node: str) -> Verdict | None:
    """Return what follows from the requests of a node's ranks, None if nothing does. A verdict for another
    cycle (`again`) is for the others: this node leaves."""
    asked = [request for request in requests if request.action in GRAVEST_FIRST]
    if not asked:
        return None
    gravest = min(asked, key=lambda request: GRAVEST_FIRST.index(request.action))
    detail = gravest.description
    match gravest.action:
        case "ShutdownWorkload":
            return Verdict("shutdown", node, exit_code=cycle.SHUT_DOWN, detail=detail)
        case _:
            return Verdict("interrupted", node, again="request", detail=f"node {node} leaves: {detail}")
