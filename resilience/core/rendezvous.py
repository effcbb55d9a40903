"""How do the agents of a job agree on the next cycle?  One agent's part, one store operation at a time.

An agent that wants to take part writes an entry into a log. The first agent to ask for a cycle leads it: it reads the
log and writes the cycle's formation under one key, which nobody can write twice (`core.gathering`). All others wait
for that key. Agents count in the store (`core.agent_liveness`). An agent whose count stands still is lost, and so is
a leader: another one takes over.

Each `yield` is a point at which the agent may be killed, stopped or cut off, so what was written before must be of use
to the others. `launcher.rendezvous` is the shell around it, behind torch's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

import msgspec

from resilience.core import agent_liveness, gathering, group_ranks
from resilience.core.agent_liveness import Silences, Timer
from resilience.core.agent_protocol import Counts, Delete, IsInterrupted, Now, Protocol, Seconds, Sleep, Watch
from resilience.core.gathering import Around, Arrived, Excluded, Formation, Left, Nothing, Seat
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.restart import Add, CompareSet, Read, Set
from resilience.errors import ConfigurationError

NOTICE = 0.25  # seconds between two looks of a leader at its own timers
LONGEST_PAUSE = 0.1  # seconds for which a leader lets entries gather before it reads them
ASK_EVERY = 10  # looks, after which an agent asks for the next formation even if nothing was said of it
NOTICES = "notices"  # counts what seldom happens to agents that wait: a refusal, an exclusion, a loss, a lead given up
LEAVE_LIMIT = 300.0  # seconds that others may take to leave a job that is over


class Terms(msgspec.Struct, frozen=True):
    """What all agents of a job have agreed on. least, most: nodes of a cycle; join_limit: seconds to wait for a place;
    last_call: seconds that the first cycle waits for more nodes than it needs; interval: seconds between two counts
    of an agent, and between its looks at others; lost_after: seconds of silence after which an agent is lost."""

    least: int
    most: int
    join_limit: Seconds = 600.0
    last_call: Seconds = 30.0
    interval: Seconds = 2.0
    lost_after: Seconds = 8.0


class Refusal(NamedTuple):
    """Why an agent has no place in the next cycle. closed: there is none, or not for this node; late: not in time."""

    kind: Literal["closed", "late"]
    why: str


class Rendezvous:
    """One agent's part. At most one of its protocols runs at a time."""

    def __init__(self, id: str, node: str, terms: Terms) -> None:
        """id: of this agent, never used again; node: name that a returning node has again."""
        self.id = id
        self.node = node
        self.terms = terms
        self.formation = Formation()  # of the cycle that this agent takes or took part in
        self.gathering = gathering.begin(self.formation)
        # Asked before each cycle but the first: why the job ends with the cycle before, empty if it goes on.
        self.why_not_continued: Callable[[int], Protocol[str]] = _is_continued
        self._log = RendezvousLog()
        self._silences = Silences(terms.interval, terms.lost_after)
        self._duplicates: dict[str, Seconds] = {}  # id -> since when its rank is another node's too
        self._wrong = Timer(terms.last_call)  # ranks that cannot be
        self._lease: str | None = None  # key of the leadership that this agent holds
        self._announced: dict[str, int] = {}  # losses that this agent has announced as a leader: `Gathering.lost`
        self._seat: Seat | None = None  # with which it has arrived
        self._arrived_at = -1  # place of the entry that says so
        self._asked_at, self._looks_since_asked = -1, 0  # when it asked for the newest cycle: entries, looks
        self._notices = 0  # of NOTICES, as far as this agent has looked into them

    @property
    def cycle(self) -> int:
        """The cycle that this agent takes or took part in; counts from 0 for the job, -1 before the first."""
        return self.formation.cycle

    # -- joining ----------------------------------------------------------------------------------

    def join(self, seat: Seat) -> Protocol[Formation | Refusal]:
        """Arrive, and wait until a cycle has a place for this agent. Raises: ConfigurationError if ranks are wrong."""
        self._seat = None
        refusal = yield from self._hear_notices((yield Add(NOTICES, 0)))
        if refusal is not None:
            return refusal
        last = yield from self.newest()
        if last.closed:
            return _closed(last)
        deadline = (yield Now()) + self.terms.join_limit
        self._arrived_at = yield from self._log.append(Arrived(seat, last.cycle))
        self._seat = seat
        if self.gathering.last.cycle != last.cycle:
            self.gathering = gathering.begin(last)
        while True:
            found = yield from self._await_formation(deadline)
            if isinstance(found, Refusal):
                return found
            if found.closed:
                return _closed(found)
            former = self.gathering.last.entries
            self.gathering = gathering.begin(found)
            yield from self._log.forget(former)
            if found.rank_of(self.id) is not None:
                self.formation = found
                return found
            yield from self._arrive_again()

    def _await_formation(self, deadline: Seconds) -> Protocol[Formation | Refusal]:
        """Wait for the next cycle's formation; lead if no other agent does."""
        number = self.gathering.last.cycle + 1
        epoch, leader = 0, (yield from self._take_lead(number, 0))
        last_call = Timer(self.terms.last_call)
        began = now = yield Now()
        heard, looks, is_told = 0, 0, True  # heard: notices that this agent has looked into for its leader
        look_at = now + self.terms.interval if self._notices == heard else now
        while now < deadline and not (yield IsInterrupted()):
            is_time = now >= look_at  # for what nobody is told of
            if is_time:
                look_at, looks = now + self.terms.interval, looks + 1
            leads = leader == self.id
            formation = None
            if is_told or (is_time and (leads or looks % ASK_EVERY == 0)):
                formation = yield from self._log.following(self.gathering.last)
            if formation is None and leads:
                formation = yield from self._lead(number, last_call, is_told or is_time, is_time)
            if formation is not None:
                self._lease = None
                return formation
            if is_time:
                refusal, is_leader_gone = yield from self._hear(number, epoch, leader, heard)
                if refusal is not None:
                    return refusal
                heard = self._notices
                if is_leader_gone:
                    epoch, former, heard = epoch + 1, leader, 0
                    leader = yield from self._take_lead(number, epoch)
                    if leader == self.id:
                        yield from self._tell_lost([former])  # before it is given a place
            awaited = f"cycle/{number}"
            if leader == self.id:
                awaited = self._log.next_key(self.gathering)
                yield Sleep(min(LONGEST_PAUSE, max(0.001, (now - began) / 10)))
            is_told = yield Watch(awaited, min(NOTICE, look_at - now))
            now = yield Now()
        return (yield from self._stop_waiting(number))

    def _stop_waiting(self, number: int) -> Protocol[Refusal]:
        terms, known = self.terms, self.gathering
        is_late = not (yield IsInterrupted())
        why = f"found no place within {terms.join_limit:g} s (join_timeout)" if is_late else "was told to stop"
        yield from self._log.append(Left(self.id, why))
        if self._lease is not None:
            yield Set(f"{self._lease}/given_up", "1")
            yield Add(NOTICES, 1)
            self._lease = None
        if not is_late:
            return Refusal("closed", f"node {self.node} was told to stop while it waited for cycle {number}")
        return Refusal(
            "late",
            f"node {self.node} {why} in cycle {number}: {len(known.last.seats)} nodes took part in the last one, "
            f"{len(known.arrived)} wait, {len(known.missing)} of the last are missing, {terms.least} to {terms.most} "
            "are wanted",
        )

    def _hear(self, number: int, epoch: int, leader: str, heard: int) -> Protocol[tuple[Refusal | None, bool]]:
        """Look at what nobody is told of: whether this node is refused, and whether the leader is gone. One operation
        where nothing is new. heard: notices that were looked into for this leader."""
        notices, count = yield Counts((NOTICES, agent_liveness.key(leader)))
        refusal = yield from self._hear_notices(notices)
        if refusal is not None or leader == self.id:
            return refusal, False
        is_gone = self._silences.hear(leader, count, (yield Now())) >= self.terms.lost_after
        if notices != heard and not is_gone:
            (given_up,) = yield Read((f"leader/{number}/{epoch}/given_up",))
            is_gone = given_up is not None
        return None, is_gone

    def _hear_notices(self, notices: int) -> Protocol[Refusal | None]:
        """Return why this node is excluded, None if it is not. An agent that stood still while it waited, and was taken
        for lost, arrives again. notices: how many there are; if none is new there is nothing to read.
        Raises: ConfigurationError if its rank is taken."""
        if notices == self._notices:
            return None
        names = f"refused/{self.id}", f"excluded/{self.node}", f"lost/{self.id}"
        refused, excluded, lost = yield Read(names)
        if refused is not None:
            raise ConfigurationError(refused)
        if excluded is not None:
            return Refusal("closed", f"node {self.node} is excluded: {excluded}")
        if lost is not None:
            yield Delete(f"lost/{self.id}")
            yield from self.read()  # what a leader had read before it wrote that key can be read here
            yield from self._arrive_again()
        self._notices = notices
        return None

    def _arrive_again(self) -> Protocol[bool]:
        """Arrive once more if this agent waits and the others took it for lost. Return True if they did."""
        known = self.gathering
        if self._seat is None or known.entries <= self._arrived_at or self.id in known.arrived:
            return False
        self._arrived_at = yield from self._log.append(Arrived(self._seat, known.last.cycle))
        return True

    # -- leading ----------------------------------------------------------------------------------

    def _take_lead(self, number: int, epoch: int) -> Protocol[str]:
        """Lead unless another agent does. Return the leader's id."""
        key = f"leader/{number}/{epoch}"
        leader = str((yield CompareSet(key, self.id)))
        self._lease = key if leader == self.id else None
        return leader

    def _lead(self, number: int, last_call: Timer, is_new: bool, is_time: bool) -> Protocol[Formation | None]:
        """Read who is there. Form the cycle if that can be done now. is_new: there may be something to read."""
        terms = self.terms
        if is_new:
            yield from self.read()
        known = self.gathering
        if known.last.cycle >= number:
            return known.last  # this agent stood still, and the others went on
        if (yield from self._arrive_again()):
            return None  # looks again
        yield from self._announce_losses()
        if is_time and (yield from self._tell_lost([*(seat.id for seat in known.missing), *known.arrived])):
            return None
        if (yield from self._refuse_duplicates()):
            return None
        now = yield Now()
        is_last = last_call.has_run_out(len(known.arrived) >= terms.least, now)
        if not gathering.is_due(known, terms.least, terms.most, is_last):
            return None
        if known.last.cycle != gathering.FIRST:
            why_not = yield from self.why_not_continued(known.last.cycle)
            if why_not:
                return (yield from self._write(known.last, Formation(cycle=number, closed=why_not)))
        try:
            formation = gathering.form(known, terms.most, group_ranks.assign)
            self._wrong.has_run_out(False, now)
        except ConfigurationError as error:
            if not self._wrong.has_run_out(True, now):
                return None  # the node whose rank is missing may only be late
            formation = Formation(cycle=number, closed="the ranks of nodes are wrong", error=str(error))
        return (yield from self._write(known.last, formation))

    def _write(self, last: Formation, formation: Formation) -> Protocol[Formation]:
        """Write the formation of a cycle unless another agent has. Return the one that stands, or a later one."""
        return (yield from self._log.write(last, msgspec.structs.replace(formation, by=self.id, before=last.by)))

    def _tell_lost(self, ids: Iterable[str]) -> Protocol[bool]:
        """Write down which of these agents are lost. Return True if any is."""
        lost = yield from self._silences.lost([id for id in ids if id != self.id])
        for id in lost:
            yield from self.tell_lost(id)
        return bool(lost)

    def tell_lost(self, id: str) -> Protocol[None]:
        """Write down that an agent is lost."""
        yield from self._log.append(Left(id, f"gave no sign of life for {self.terms.lost_after:g} s", is_lost=True))

    def _announce_losses(self) -> Protocol[None]:
        """Tell each agent that was taken for lost while it waited that it has to arrive again. It reads no log, and it
        may only have been stopped for a while. Each leader does this for the whole log, since the agent that wrote the
        entry may have died."""
        for id, place in self.gathering.lost.items():
            if self._announced.get(id) != place:
                yield Set(f"lost/{id}", "1")
                yield Add(NOTICES, 1)
                self._announced[id] = place

    def _refuse_duplicates(self) -> Protocol[bool]:
        """Return True if two agents claim one rank. The later one is refused, unless the other turns out to
        be lost: then it is its successor."""
        claims: dict[int, Seat] = {}
        now = yield Now()
        is_any = False
        for seat in self.gathering.candidates:
            if seat.infra is None or claims.setdefault(seat.infra, seat) is seat:
                continue
            is_any = True
            if now - self._duplicates.setdefault(seat.id, now) > self.terms.lost_after + 2 * self.terms.interval:
                yield Set(
                    f"refused/{seat.id}",
                    f"node {seat.node} has rank {seat.infra} of the infrastructure, and so has node "
                    f"{claims[seat.infra].node}, which came first; each node needs a rank of its own",
                )
                yield Add(NOTICES, 1)
                yield from self._log.append(Left(seat.id, "its rank is taken"))
        return is_any

    # -- while workers run ------------------------------------------------------------------------

    def look(self, counter: str = "log/count") -> Protocol[Around]:
        """Return what is new around this agent, which takes part in the cycle. counter: a key of the store that
        holds a number, read at the same time. One operation if nothing is new."""
        neighbour = gathering.neighbour(self.gathering, self.formation, self.id)
        watched = () if neighbour is None else (agent_liveness.key(neighbour.id),)
        count, asked, *beat = yield Counts(("log/count", counter, *watched))
        self.gathering = yield from self._log.read(self.gathering, count)
        if neighbour is not None:
            now = yield Now()
            if self._silences.hear(neighbour.id, beat[0], now) >= self.terms.lost_after:
                yield from self.tell_lost(neighbour.id)
                yield from self.read()
        known = self.gathering
        self._looks_since_asked += 1
        if known.entries != self._asked_at or known.arrived or known.gone or self._looks_since_asked >= ASK_EVERY:
            self._asked_at, self._looks_since_asked = known.entries, 0
            is_over = (yield from self.newest()).cycle > self.cycle
        else:
            is_over = False  # an agent that forms a cycle, or closes the rendezvous, has written to the log before
        # An agent that was taken for lost ends its workers, and then waits for the next cycle: it is lost to this one.
        lost = frozenset(seat.id for seat in self.formation.seats if known.is_gone(seat) or seat.id in known.arrived)
        # The others do not wait for an agent that they took for lost: a next cycle may begin at any moment.
        is_over |= self.id in lost
        return Around(0 if is_over else known.waiting(self.terms.most), lost, is_over, asked)

    def end_cycle(self, reason: str) -> Protocol[str]:
        """Say that the cycle is over, for all its agents. Return what was said first."""
        return str((yield CompareSet(f"end/{self.cycle}", reason)))

    def is_end_told(self) -> Protocol[bool]:
        """Return True if the cycle's end may have been said. No request to the store, but for the first time."""
        return bool((yield Watch(f"end/{self.cycle}")))

    def cycle_end(self, cycle: int | None = None) -> Protocol[str | None]:
        """Return the reason that any agent gave first for the end of a cycle, None if there is none yet. cycle: this
        agent's if it is not given."""
        (text,) = yield Read((f"end/{self.cycle if cycle is None else cycle}",))
        return None if text is None else str(text)

    def others(self, leaving: Collection[str]) -> Protocol[int]:
        """Return how many nodes could take part in the next cycle, without this one and without those of the agents
        that leave."""
        yield from self.read()
        return min(self.terms.most, len(gathering.present(self.gathering, self.formation) - {self.id, *leaving}))

    def is_taken_for_lost(self) -> Protocol[bool]:
        """Return True if others have found this agent lost, as after it was stopped for a while: they said so, or went
        on without it."""
        yield from self.read()
        return self.id in self.gathering.gone or (yield from self.newest()).cycle > self.cycle

    def waiting(self) -> Protocol[int]:
        """Return how many nodes would take part if there was a new cycle now, 0 once the rendezvous is closed."""
        if (yield from self.newest()).closed:
            return 0
        yield from self.read()
        return self.gathering.waiting(self.terms.most)

    # -- the end ----------------------------------------------------------------------------------

    def newest(self) -> Protocol[Formation]:
        """Return the last formation of the job."""
        return (yield from self._log.newest(self.formation))

    def close(self, reason: str) -> Protocol[str]:
        """Say that there will be no further cycle. Return the reason that was given first."""
        newest = yield from self.newest()
        while not newest.closed:
            newest = yield from self._write(newest, Formation(cycle=newest.cycle + 1, closed=reason))
            yield from self._log.append(Nothing())  # wakes those who look at the log first
        return newest.closed

    def exclude(self, node: str, reason: str) -> Protocol[None]:
        """Let a node take part in no further cycle. The one that runs is not ended."""
        yield Set(f"excluded/{node}", reason or "excluded")
        yield Add(NOTICES, 1)
        yield from self._log.append(Excluded(node, reason))

    def leave(self, reason: str) -> Protocol[None]:
        """Take part no more, without closing the rendezvous for others."""
        yield from self._log.append(Left(self.id, reason))

    def await_leaving(self, is_host: bool, expected: int = 0) -> Protocol[bool]:
        """Wait until the others have left. Return True if nobody is left of a job that is over.

        is_host: the others need this node's store; otherwise it only looks. expected: so many others must have left,
        also if they have not arrived yet. While the job goes on it waits as long as
        that takes, once the job is over LEAVE_LIMIT at most."""
        if not is_host and (yield Add("left", 1)) < len(gathering.present(self.gathering, self.gathering.last)):
            return False  # others are there; only an agent that may be the last one reads who
        closed_at: Seconds | None = None
        while True:
            yield from self.read()
            known = self.gathering
            living = sorted(gathering.present(known, known.last))
            now = yield Now()
            if closed_at is None and (yield from self.newest()).closed:
                closed_at = now
            if not living and len(known.gone - {self.id}) >= expected:
                return closed_at is not None
            is_late = closed_at is not None and now - closed_at > LEAVE_LIMIT
            if not is_host or is_late or (yield IsInterrupted()):
                return False
            yield from self._tell_lost(living)
            yield Watch(self._log.next_key(known), self.terms.interval)

    def read(self) -> Protocol[None]:
        """Read what the log holds beyond what is known."""
        self.gathering = yield from self._log.read(self.gathering)


def _is_continued(cycle: int) -> Protocol[str]:
    yield from ()
    return ""


def _closed(formation: Formation) -> Refusal:
    """Return why there is no cycle. Raises: ConfigurationError if the job is misconfigured."""
    if formation.error:
        raise ConfigurationError(formation.error)
    return Refusal("closed", formation.closed)
