"""What follows from a signal that asks a node, or one of its workers, to stop?

A signal to an agent concerns its node: a pod is evicted, or a node is drained. With `--on-sigterm leave` the node
leaves, and the others form the next cycle at once, if they are enough and do not need this node's store. Otherwise
the job stops on all nodes, as one preemption. A scheduler that ends a whole job signals one agent after another.
Agents that are signalled later, also while the others form a cycle, count only the remaining nodes: the last ones stop
the job.

A signal to a worker alone is a failure of that worker, as in torchrun. A scheduler that signals all processes of a node
signals its agent too, within a moment; then the agent's signal counts."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["leave", "stop"]

AGENT_LIMIT = 1.0  # seconds after a worker's SIGTERM in which its agent is signalled, if the node is meant


class Asked(msgspec.Struct, frozen=True):
    """What an agent knows when it is signalled.

    signal: its name; mode: `--on-sigterm`; hosts_store: the others cannot continue without this node; others: nodes
    that could take part in the next cycle, without this node and nodes that leave; least: nodes of a cycle."""

    signal: str
    mode: Mode
    hosts_store: bool
    others: int
    least: int


def on_signal(asked: Asked) -> Mode:
    """Return "leave" if only this node leaves, "stop" if the whole job stops. Only SIGTERM concerns one node: other
    signals come from a user, or warn of the end of the whole job."""
    may_leave = asked.mode == "leave" and asked.signal == "SIGTERM" and not asked.hosts_store
    return "leave" if may_leave and asked.others >= asked.least else "stop"


def on_workers_sigterm(is_agent_signalled: bool, waited: float) -> Literal["agent", "wait", "failure"]:
    """Return the meaning of a SIGTERM to a worker `waited` seconds ago."""
    if is_agent_signalled:
        return "agent"
    return "wait" if waited < AGENT_LIMIT else "failure"
