"""Do all agents of a job have the same settings?  The first agent writes its own, the others compare.

An agent that ends its workers by one limit, while the others wait for it by another, would run them beside those of the
next cycle. Agents with different numbers of nodes, or different restart policies, would wait for each other, or start
cycles without end. So these settings are equal, or the later agent ends with an error; the job continues without it.

Some settings may differ. `join_limit` is how long a node itself waits. `last_call` is used by the agent that leads. The
agent that decides about a restart applies its own budget, and all others obey its verdict."""

from __future__ import annotations

import msgspec

from resilience.core.agent_protocol import Protocol, Seconds
from resilience.core.control import Policy
from resilience.core.restart import CompareSet, Read
from resilience.errors import ConfigurationError
from resilience.facts.encoding import reader, to_json_text

KEY = "terms"


class Terms(msgspec.Struct, frozen=True):
    """An agent's settings. least, most: nodes of a cycle; join_limit: seconds to wait for a place while no cycle runs;
    last_call: seconds that the first cycle waits for more nodes than it needs; interval: seconds between two looks of
    an agent at others, and between its counts unless its limits need more of them; lost_after: seconds of silence after
    which an agent is lost; policy: what a failed worker means."""

    least: int
    most: int
    join_limit: Seconds = 600.0
    last_call: Seconds = 30.0
    interval: Seconds = 2.0
    lost_after: Seconds = 8.0
    policy: Policy = "any-failed"

    @property
    def shared(self) -> dict[str, str]:
        """Return the settings that all agents of a job must share: each option with its value."""
        return {
            "--nnodes": f"{self.least}:{self.most}",
            "--rdzv-conf keep_alive_interval × keep_alive_max_attempt": f"{self.lost_after:g} s",
            "--ft-restart-policy": self.policy,
        }


class FirstTerms(msgspec.Struct, frozen=True):
    """The settings of the first agent of a job, and its node."""

    node: str
    terms: Terms


_read = reader(FirstTerms)


def agree(node: str, terms: Terms) -> Protocol[None]:
    """Write this agent's settings, unless another agent of the job has. Raises: ConfigurationError if they differ."""
    text = yield CompareSet(KEY, to_json_text(FirstTerms(node, terms)))
    first = _read(text)
    theirs = first.terms.shared
    differences = [
        f"{option} is {value} on node {node}, but {theirs[option]} on node {first.node}, which came first"
        for option, value in terms.shared.items()
        if value != theirs[option]
    ]
    if differences:
        raise ConfigurationError(
            f"{'; '.join(differences)}; all nodes of a job need the same value. To change it, stop the job and start a "
            "new one (with etcd: another RESILIENCE_ATTEMPT or --rdzv-id)"
        )


def read() -> Protocol[Terms | None]:
    """Return the settings of the first agent of a job, None if no agent has written any."""
    (text,) = yield Read((KEY,))
    return None if text is None else _read(text).terms
