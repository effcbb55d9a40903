"""Did everything stay as it must?  What really happened in a job of several nodes, held against what the store says.

The referee is told what each agent really does, and reads the store over their shoulder: as text, with a reader of its
own. It shares no decision with the protocol. It knows what must never be:

- *one membership, one verdict*: a key that decides for all is never overwritten, and all agents of a cycle obey it;
- *no split brain*: workers of two cycles are never at work at once, unless an agent was stopped that should end them;
- *seats are for those who came*: whoever has a seat or waits for one has arrived since its last cycle, and has neither
  left nor been excluded; nobody who arrived is forgotten;
- *budget*: no more cycles follow a failure or a loss than the job may restart;
- *leaving costs no restart*: no verdict names a failure if agents were only told to stop;
- *nobody is forgotten*: whoever waits for a place in vain is on the list of those who wait;
- *the end is the end*: after a verdict that ends the job no further cycle runs;
- *who is lost gave a reason*: an agent is taken for lost only if it is gone, was stopped, or did not reach the store;
- *others go on*: what happens to one node ends the job of the others only if they are too few, or the budget is used;
- *every schedule ends*, and every agent with a verdict that the schedule explains.

Raises: InternalError with the attribute `invariant`, from whatever call first sees it broken."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from resilience.core.agent_liveness import LEASE
from resilience.core.cycle import CycleDecision
from resilience.errors import InternalError
from tests.launcher_simulation.schedules import (
    Asks,
    Crash,
    Delay,
    Fails,
    Fault,
    Partition,
    PartitionBefore,
    Pause,
    Repeat,
    Sick,
    Signalled,
)

if TYPE_CHECKING:
    from tests.launcher_simulation.agents import Agent
    from tests.launcher_simulation.jobs import Job

Seconds = float
EARLY = 2.0  # seconds in which agents come that are there when anything happens
SETTLED = 8.0  # seconds after which all agents that come early have arrived
GRACE = 4.0  # seconds of silence below which nobody may take an agent for lost
OF_ONE_NODE = Crash | Fails | Partition | PartitionBefore | Pause | Sick | Signalled
VOLUNTARY = ("membership", "request")


def broken(invariant: str, what: str) -> InternalError:
    """Return the error that says which invariant does not hold."""
    return InternalError(f"{invariant}: {what}", invariant=invariant)


class Referee:
    """Watches one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memberships: dict[int, dict[str, Any]] = {}  # by cycle
        self._log: dict[int, dict[str, Any]] = {}  # by place
        self._schedule = job.schedule
        self._stalls: dict[Agent, list[tuple[Seconds, Seconds, bool]]] = defaultdict(list)  # from, until, stops
        self._is_delayed: set[Agent] = set()
        self._living: dict[Agent, int] = {}  # workers at work: their cycle
        self._frozen_until: dict[Agent, Seconds] = {}
        self._ended: dict[Agent, Seconds] = {}
        self._cycles: list[int] = []  # that ran, in order
        self.restarts = 0
        self._wishes: dict[int, CycleDecision] = {}  # by cycle: what its agents obeyed
        self._asked_to_go: set[Agent] = set()
        self._banned: set[int] = set()  # nodes that have left because one of their ranks asked for it
        self._lost: set[Agent] = set()  # taken for lost by others
        self.signalled: dict[Agent, Seconds] = {}  # and when
        self._had_trouble = False  # the store stood still or is gone

    @property
    def _now(self) -> Seconds:
        return self._job.clock.now

    # -- what happens to agents -------------------------------------------------------------------

    def stalls(self, agent: Agent, duration: Seconds, stops: bool = False, frozen: bool = False) -> None:
        """An agent does not reach the store, or is stopped (with its host, if that is frozen), for `duration`."""
        self._stalls[agent].append((self._now, self._now + duration, stops))
        if frozen:
            self._frozen_until[agent] = self._now + duration

    def delays(self, agent: Agent, duration: Seconds) -> None:
        self._is_delayed.add(agent)

    def store_stalls(self, duration: Seconds) -> None:
        self._had_trouble = True

    def ended(self, agent: Agent) -> None:
        """An agent's process is gone."""
        self._ended[agent] = self._now
        if agent.verdict is not None and agent.verdict.outcome == "excluded" and agent in self._asked_to_go:
            self._banned.add(agent.node)

    def asked(self, agent: Agent, action: str) -> None:
        """A rank of an agent's node asks for something."""
        if action == "ExcludeThisNode":
            self._asked_to_go.add(agent)

    def _was_stalled(self, agent: Agent, least: Seconds) -> bool:
        """Whether an agent was held up for so long, not long ago."""
        return any(
            min(until, self._now) - since >= least and until > self._now - 20.0
            for since, until, _ in self._stalls[agent]
        )

    # -- what agents write ------------------------------------------------------------------------

    def wrote(self, agent: Agent, key: str, before: str | None, after: str) -> None:
        """An agent has written into the store."""
        kind, _, rest = key.partition("/")
        if before == after:
            return
        if kind in ("cycle", "end", "log") and before is not None:
            raise broken("nothing is overwritten", f"{agent} overwrites {key}: {before} becomes {after}")
        if kind == "cycle":
            change = json.loads(after)
            whole = self._job.store.data.get(f"membership/{rest}/{change['by']}")
            self._memberships[int(rest)] = membership = change if change.get("closed") else json.loads(str(whole))
            self._formed(int(rest), membership)
        elif kind == "log":
            self._log[int(rest)] = entry = json.loads(after)
            if entry.get("reason", "").startswith("found no place"):
                self._gives_up(agent, int(rest))
            self._logged(entry)

    def _logged(self, entry: dict[str, Any]) -> None:
        if entry["type"] != "left" or "no sign of life" not in entry.get("reason", ""):
            return
        agent = next(agent for agent in self._job.agents if agent.id == entry["id"])
        self._lost.add(agent)
        is_there = agent not in self._ended and agent.is_counting and not agent.is_cut_off
        if is_there and not self._was_stalled(agent, GRACE):
            raise broken("who is lost gave a reason", f"{agent} is taken for lost, and counts")

    def _gives_up(self, agent: Agent, place: int) -> None:
        """An agent that has waited for a place in vain writes that at a place of the log: the others knew of it."""
        known = next(known for known in range(place + 1) if known not in self._log or known == place)
        last = self._memberships[max(self._memberships)] if self._memberships else {}
        former = [seat[0] for seat in last.get("seats", [])]
        has_seat = agent.id in former  # and does not know, for its answers come late
        if last.get("closed") or has_seat or known < last.get("entries", 0) or self._was_stalled(agent, GRACE):
            return
        arrived, excluded, _ = self._replay(known, last)
        if agent.id not in arrived and agent.id.rpartition("/")[0] not in excluded:
            raise broken("nobody is forgotten", f"{agent} waits for a place, and the others do not know")

    def _formed(self, number: int, membership: dict[str, Any]) -> None:
        """A membership stands: hold it against the log."""
        if number > 0 and number - 1 not in self._memberships:
            raise broken("cycles follow one another", f"cycle {number} is formed and there is no cycle {number - 1}")
        if membership.get("closed"):
            return
        last = self._memberships[number - 1] if number else {}
        seats = [seat[0] for seat in membership["seats"]]
        spares = [seat[0] for seat in membership.get("spares", [])]
        former = [seat[0] for seat in last.get("seats", [])]
        arrived, excluded, left = self._replay(membership.get("entries", 0), last)
        came = [id for id in arrived if id.rpartition("/")[0] not in excluded]
        terms = self._schedule.terms
        if sorted(seats + spares) != sorted(came):
            raise broken(
                "seats are for those who came",
                f"cycle {number} has {seats}, spares {spares}; there came {sorted(came)}",
            )
        if not terms.least <= len(seats) <= terms.most or len(seats) != min(terms.most, len(came)):
            raise broken("the size of a cycle", f"cycle {number} has {len(seats)} nodes of {len(came)} that came")
        forgotten = [id for id in former if id not in came and id not in left and id.rpartition("/")[0] not in excluded]
        if forgotten:
            raise broken("the last cycle is heard", f"cycle {number} is formed without a word of {forgotten}")
        if self._schedule.ranks:
            given = [seat[4] for seat in membership["seats"]]  # a node may be missing: the others keep their order
            if given != sorted(set(given)):
                raise broken("ranks are in the order of the infrastructure's", f"cycle {number} has {given}")
            former = []
        for rank, id in enumerate(former):
            if id in came and (id not in seats or (rank < len(seats) and seats[rank] != id)):
                raise broken("ranks are kept", f"{id} had rank {rank}, cycle {number} has {seats}")
        former = [seat[0] for seat in last.get("seats", [])]
        waits = [id for id in came if id not in former]
        if [id for id in waits if id in seats] != waits[: len(seats) - len([id for id in former if id in seats])]:
            raise broken("who came first is first", f"cycle {number} has {seats}; there waited {waits}")

    def _replay(self, entries: int, last: dict[str, Any]) -> tuple[list[str], set[str], set[str]]:
        """Return, of the log up to `entries`: who waits for a seat in order, who is excluded, and who has left since
        `last` was formed. An arrival of an agent that has a seat of it, and did not know that, is used up."""
        begin, former = last.get("entries", 0), [seat[0] for seat in last.get("seats", [])]
        arrived: dict[str, None] = {}
        excluded: set[str] = set()
        left: set[str] = set()
        for place in range(entries):
            if place == begin:
                for id in former:
                    arrived.pop(id, None)
                left.clear()
            entry = self._log[place]
            if entry["type"] == "arrived":
                id = entry["seat"][0]
                is_used_up = place >= begin and id in former and entry["known"] < last.get("cycle", 0)
                if entry["seat"][1] not in excluded and not is_used_up:
                    arrived.setdefault(id)
                    left.discard(id)
            elif entry["type"] == "left":
                arrived.pop(entry["id"], None)
                left.add(entry["id"])
            elif entry["type"] == "excluded":
                excluded.add(entry["node"])
                for id in [id for id in arrived if id.rpartition("/")[0] == entry["node"]]:
                    del arrived[id]
        if begin >= entries:
            for id in former:
                arrived.pop(id, None)
        return list(arrived), excluded, left

    # -- cycles -----------------------------------------------------------------------------------

    def started(self, agent: Agent, cycle: int) -> None:
        """Workers of an agent begin."""
        membership = self._memberships[cycle]
        ids = [seat[0] for seat in membership["seats"]]
        if ids != [seat.id for seat in agent.rendezvous.membership.seats] or agent.id not in ids:
            raise broken("one membership", f"{agent} starts workers of cycle {cycle} with other seats than {ids}")
        for other, older in self._living.items():
            if older < cycle and not self._may_be_late(other):
                raise broken(
                    "no split brain", f"workers of cycle {older} of {other} live as {agent} starts cycle {cycle}"
                )
        self._living[agent] = cycle
        if not self._cycles or cycle > self._cycles[-1]:
            self._began(cycle)

    def _may_be_late(self, agent: Agent) -> bool:
        """Whether an agent is stopped, or was until a lease ago, so that it could not end its workers."""
        lease = LEASE * self._schedule.terms.lost_after
        return any(stops and until > self._now - lease for _, until, stops in self._stalls[agent])

    def _began(self, cycle: int) -> None:
        if self._cycles:
            last = self._cycles[-1]
            text = self._job.store.data.get(f"end/{last}")
            verdict = {} if text is None else json.loads(text)
            if text is not None and not verdict.get("again"):
                raise broken("the end is the end", f"cycle {cycle} runs after {text}")
            if verdict.get("again") not in VOLUNTARY:
                self.restarts += 1
            most = self._schedule.rules.budget.max_restarts
            if self.restarts > most:
                raise broken("budget", f"cycle {cycle} is restart {self.restarts} of {most}")
        self._cycles.append(cycle)

    def workers_gone(self, agent: Agent) -> None:
        del self._living[agent]

    def obeys(self, agent: Agent, verdict: CycleDecision) -> None:
        """An agent ends its workers because of a verdict."""
        if agent.has_lost_store or agent.is_broken or verdict.detail.startswith("the others went on"):
            return
        text = self._job.store.data.get(f"end/{agent.rendezvous.cycle}")
        standing = {} if text is None else json.loads(text)
        closing = self._closing()
        if (verdict.outcome, verdict.again) not in (
            (standing.get("outcome"), standing.get("again")),
            (closing.get("outcome"), closing.get("again")),
        ):
            raise broken("one verdict", f"{agent} obeys {verdict}, and there stands {text}")
        if verdict.outcome == "completed":
            self._completes(agent.rendezvous.cycle)

    def _closing(self) -> dict[str, Any]:
        """Return the verdict with which the rendezvous is closed."""
        words = self._memberships[max(self._memberships)].get("closed", "") if self._memberships else ""
        return dict(json.loads(words)) if words.startswith("{") else {}

    def _completes(self, cycle: int) -> None:
        """The job is said to be through: all its workers are."""
        if self._schedule.rules.policy == "any-failed":
            for other, crew in self._job.crews[cycle].items():
                if not crew.ended_well:
                    raise broken("completed", f"cycle {cycle} is said to be completed, and {other}'s workers are not")

    # -- the end ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing happens any more."""
        for agent in self._job.agents:
            if agent.is_alive:
                raise broken("every schedule ends", f"{agent} waits for nothing")
            if agent.verdict is not None:
                self._explain(agent, agent.verdict)
        common = {
            # Each agent that is signalled may end with its own signal's status.
            (agent.verdict.outcome, 0 if agent.verdict.outcome == "preempted" else agent.verdict.exit_code)
            for agent in self._job.agents
            if agent.verdict is not None and not self._is_its_own(agent, agent.verdict)
        }
        if len(common) > 1:
            raise broken("one end", f"agents of one job end with {sorted(common)}")
        are_right = len(set(self._schedule.ranks)) == len(self._schedule.ranks)
        if are_right and all(map(_is_harmless, self._schedule.faults)):
            self._undisturbed()
        if all(isinstance(fault, Signalled) for fault in self._schedule.faults):
            self._costs_no_restart()
        if are_right:
            self._others_go_on()

    def deletes(self, agent: Agent) -> None:
        """The last agent of a job in an outside store deletes its keys: none of the others uses them any more."""
        for other in self._job.agents:
            is_using = other.is_alive and other.is_counting and other is not agent and not other.has_left
            if is_using and other.has_arrived and not other.is_cut_off and not self._has_stalled(other):
                raise broken("keys in use are kept", f"{agent} deletes the job's keys, and {other} has not left")

    def _has_stalled(self, agent: Agent) -> bool:
        """Whether an agent may be taken for lost, rightly or not."""
        return bool(self._stalls[agent])

    def _is_its_own(self, agent: Agent, verdict: CycleDecision) -> bool:
        """Whether an agent's end is not that of the job."""
        is_cut = agent.has_lost_store or agent.is_misconfigured or agent.is_broken
        return is_cut or bool(agent.supervision.leaves)

    def _explain(self, agent: Agent, verdict: CycleDecision) -> None:
        """Every agent's end has a reason, and the schedule one for it."""
        faults = self._schedule.faults
        if verdict.outcome != "completed" and not verdict.detail:
            raise broken("every end has a reason", f"{agent} ends with {verdict}")
        is_there: bool
        match verdict.outcome:
            case "completed":
                is_there = True
            case "preempted":
                is_there = bool(self.signalled)
            case "shutdown":
                is_there = any(isinstance(fault, Asks) and fault.action == "ShutdownWorkload" for fault in faults)
            case "excluded":
                is_there = self._is_excluded(agent)
            case "exhausted":
                is_there = self._is_exhausted()
            case _:
                is_there = bool(faults) or self._job.is_store_dead or len(self._schedule.comes) > 1
        if not is_there:
            raise broken(
                "every end has a reason", f"{agent} ends with {verdict}, and nothing in the schedule explains it"
            )

    def _is_excluded(self, agent: Agent) -> bool:
        return agent in self.signalled or any(
            isinstance(fault, Asks | Sick) and fault.node == agent.node for fault in self._schedule.faults
        )

    def _is_exhausted(self) -> bool:
        """Whether so many cycles have failed or were lost, started or not, that the budget may be used."""
        budget, data = self._schedule.rules.budget, self._job.store.data
        rules = [rule for rule in (budget.same_limit, budget.stalled_restarts, budget.same_in_window) if rule]
        ends = [json.loads(text) for key, text in data.items() if key.startswith("end/")]
        failures = sum(end.get("again") not in VOLUNTARY for end in ends)
        return failures > min(budget.max_restarts, *(rule - 1 for rule in rules), 99)

    def _others_go_on(self) -> None:
        """If enough nodes had no trouble, and the budget allows for what the others had, they come to the end."""
        schedule = self._schedule
        budget, faults = schedule.rules.budget, [fault for fault in schedule.faults if not _is_harmless(fault)]
        if len(faults) > 2 or budget.max_restarts < len(faults):
            return
        if not all(isinstance(fault, OF_ONE_NODE) for fault in faults) or schedule.rules.mode == "stop":
            return
        if any(isinstance(fault, Signalled) and fault.signal != "SIGTERM" for fault in faults):
            return
        if any(at < SETTLED for at in self.signalled.values()):  # the others may not have come by then
            return
        troubled = {fault.node for fault in faults if not isinstance(fault, Fails)}
        if schedule.node_hosts_store and 0 in troubled:
            return
        others = [agent for agent in self._job.agents if agent.node not in troubled]
        if sum(schedule.comes[agent.node] < EARLY for agent in others) < schedule.terms.least:
            return
        for agent in others:
            verdict = agent.verdict
            assert verdict is not None
            is_surplus = len(schedule.comes) > schedule.terms.most
            found_no_place = is_surplus and "found no place" in agent.supervision.leaves
            came_after_the_end = agent.rendezvous.cycle < 0 and (agent.has_lost_store or agent.is_misconfigured)
            if verdict.outcome != "completed" and not found_no_place and not came_after_the_end:
                raise broken("others go on", f"{agent} had no trouble, and ends with {verdict}")

    def _costs_no_restart(self) -> None:
        """No verdict names a failure: nodes left because they were told to."""
        for key, text in self._job.store.data.items():
            if key.startswith("end/") and json.loads(text).get("failure"):
                raise broken("leaving costs no restart", f"{key} is {text}")

    def _undisturbed(self) -> None:
        """Nothing went wrong that should cost a restart: the job is through, on all nodes that had a place."""
        terms = self._schedule.terms
        if len(self._schedule.comes) < terms.least:
            return
        for agent in self._job.agents:
            verdict = agent.verdict
            assert verdict is not None
            is_late = agent.rendezvous.cycle < 0  # it had no place, or came when the job was over
            if verdict.outcome != "completed" and not is_late:
                raise broken("an undisturbed job completes", f"{agent} ends with {verdict}")
        if self.restarts:
            raise broken("an undisturbed job completes", f"it used {self.restarts} restarts")


def _is_harmless(fault: Fault) -> bool:
    return isinstance(fault, Repeat) or (isinstance(fault, Delay) and fault.duration < 5.0)
