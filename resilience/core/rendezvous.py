"""How do the agents of a job agree on the next cycle?  One agent's part, one store operation at a time.

An agent that wants to take part writes an entry into a log. The first agent to ask for a cycle leads it: it reads the
log and writes the cycle's membership under one key, which no agent can overwrite (`core.membership`). All others wait
for that key. Each agent raises a count in the store (`core.agent_liveness`). An agent whose count stands still is lost.
If the leader is lost, another agent takes over.

At each `yield` the agent may be killed, stopped or cut off, so the others must be able to use what it has written.
`launcher.rendezvous.handler` is the shell around this module, behind torch's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from resilience.core import agent_liveness, cycle, group_ranks, membership
from resilience.core.agent_liveness import SignsOfLife, Silences, Timer
from resilience.core.agent_protocol import (
    AwaitKey,
    Counts,
    Delete,
    IsInterrupted,
    Operation,
    Protocol,
    ReadClock,
    Seconds,
    Sleep,
)
from resilience.core.membership import Around, Arrived, Excluded, Left, Membership, NodeSeat, Nothing
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.restart import Add, CompareSet, Read, Set
from resilience.core.terms import Terms
from resilience.errors import ConfigurationError, DecodeError, NodeRefused
from resilience.facts.in_words import count

More = TypeVar("More")  # operations that only the caller's `Question` yields
Question = Callable[[int], Generator[Operation | More, Any, str]]

NOTICE = 0.25  # seconds between two looks of a leader at its own timers
LONGEST_PAUSE = 0.1  # seconds that a leader lets entries accumulate before it reads them
ASK_EVERY = 10  # looks after which an agent asks for the next membership even without a hint
NOTICES = "notices"  # counts rare events for waiting agents: a refusal, an exclusion, a loss, a lead given up
LEAVE_LIMIT = 300.0  # seconds that others may take to leave a job that is over, if their workers end sooner
NEARLY_LAST = 8  # an agent looks for signs of life of the others if so many, or fewer, have not left; each costs reads


class Refusal(NamedTuple):
    """Why an agent has no place in the next cycle. closed: there is no next cycle, or not for this node; late: it found
    no place in time."""

    kind: Literal["closed", "late"]
    why: str


class Rendezvous:
    """One agent's part. At most one of its protocols runs at a time."""

    def __init__(self, id: str, node: str, terms: Terms) -> None:
        """id: of this agent, never reused; node: name, which a returning node keeps."""
        self.id = id
        self.node = node
        self.terms = terms
        self.membership = Membership()  # of the cycle that this agent takes or took part in
        self.arrivals = membership.begin(self.membership)
        self._log = RendezvousLog()
        self._silences = Silences(terms.interval, terms.lost_after)
        self._duplicates: dict[str, Seconds] = {}  # id -> since when another node has the same rank
        self._wrong = Timer(terms.last_call)  # runs while a node has no rank of the infrastructure, and others do
        self._lease: str | None = None  # key of the leadership that this agent holds
        self._announced: dict[str, int] = {}  # losses that this agent has announced as a leader: `Arrivals.lost`
        self._seat: NodeSeat | None = None  # the seat of this agent's arrival
        self._arrived_at = -1  # place of the arrival's log entry
        self._asked_at, self._looks_since_asked = -1, 0  # when it asked for the newest cycle: entries, looks
        self._notices = 0  # value of NOTICES up to which this agent has read the notices
        self.has_lasting_store = False  # no agent hosts the store: it outlives them all
        self._is_stranger = False  # the store holds a job that was over before this agent came

    @property
    def cycle(self) -> int:
        """Return the cycle that this agent takes or took part in, counted from 0 for the job; -1 before the first."""
        return self.membership.cycle

    # -- joining ----------------------------------------------------------------------------------

    def join(self, seat: NodeSeat) -> Protocol[Membership | Refusal]:
        """Arrive and wait until a cycle has a place for this agent. Raises: ConfigurationError for wrong ranks."""
        return self.join_if_continued(seat, _is_continued)

    def join_if_continued(
        self, seat: NodeSeat, why_not_continued: Question[More]
    ) -> Generator[Operation | More, Any, Membership | Refusal]:
        """Join a job that may end between two cycles. Raises: ConfigurationError for wrong ranks.

        why_not_continued: called before each cycle except the first, with the number of the previous cycle. Returns why
        the job ends with that cycle, empty if it does not."""
        self._seat = None
        refusal = yield from self._hear_notices((yield Add(NOTICES, 0)))
        if refusal is not None:
            return refusal
        last = yield from self.newest()
        if last.closed:
            return (yield from self._refused_by(last))
        if (yield IsInterrupted()):
            return self._asked_to_stop(last.cycle + 1)  # the others need not wait for this node
        self._arrived_at = yield from self._log.append(Arrived(seat, last.cycle))
        self._seat = seat
        if self.arrivals.last.cycle != last.cycle:
            self.arrivals = membership.begin(last)
        while True:
            next_membership = yield from self._await_membership(why_not_continued)
            if isinstance(next_membership, Refusal):
                return next_membership
            if next_membership.closed:
                return _closed(next_membership)
            former = self.arrivals.last.entries
            self.arrivals = membership.begin(next_membership)
            yield from self._log.forget(former)
            if next_membership.rank_of(self.id) is not None:
                self.membership = next_membership
                return next_membership
            yield from self._arrive_again()

    def _refused_by(self, end: Membership) -> Protocol[Refusal]:
        """Return why there is no next cycle. end: of the job. Raises: ConfigurationError also if this agent comes when
        all agents of the job have ended, and the last one could not delete the job's keys: the end is not its own."""
        refusal = _closed(end)
        if self.cycle != membership.FIRST or not self.has_lasting_store:
            return refusal
        yield from self.has_agents()
        ids = sorted({end.by, *(seat.id for seat in self.arrivals.last.seats), *self.arrivals.arrived})
        signs = SignsOfLife(self.terms.interval, self.terms.lost_after)
        while (lives := (yield from signs.look(ids))) is None and not (yield IsInterrupted()):
            yield AwaitKey(f"cycle/{end.cycle + 1}", self.terms.interval)  # nobody writes it: this only waits
        if lives is not False:
            return refusal
        self._is_stranger = True
        raise ConfigurationError(
            f"the store holds this job, which is over ({_in_words(end.closed)}), and no agent of it lives. To run the "
            "job again, use another --rdzv-id (with etcd, RESILIENCE_ATTEMPT with a number that no launch has used is "
            "enough)"
        )

    def _await_membership(
        self, why_not_continued: Question[More]
    ) -> Generator[Operation | More, Any, Membership | Refusal]:
        """Wait for the next cycle's membership. Lead if no other agent does."""
        number = self.arrivals.last.cycle + 1
        epoch, leader = 0, (yield from self._take_lead(number, 0))
        last_call = Timer(self.terms.last_call)
        began = now = yield ReadClock()
        heard, looks, is_told = 0, 0, True  # heard: notices that this agent has read for its present leader
        look_at = now + self.terms.interval if self._notices == heard else now
        deadline = began + self.terms.join_limit
        while not (yield IsInterrupted()):
            is_time = now >= look_at  # for events without a hint
            if (is_time or now >= deadline) and (yield from self._is_spare()):
                deadline = now + self.terms.join_limit
            if is_time:
                look_at, looks = now + self.terms.interval, looks + 1
            leads = leader == self.id
            next_membership = None
            if is_told or (is_time and (leads or looks % ASK_EVERY == 0)):
                next_membership = yield from self._log.following(self.arrivals.last)
            if next_membership is None and leads:
                next_membership = yield from self._lead(
                    number, last_call, is_told or is_time, is_time, why_not_continued
                )
            if next_membership is not None:
                self._lease = None
                return next_membership
            if now >= deadline:  # not before the look: a leader that stood still may find that the cycle is due
                break
            if is_time:
                refusal, is_leader_gone = yield from self._hear(number, epoch, leader, heard)
                if refusal is not None:
                    return refusal
                heard = self._notices
                if is_leader_gone:
                    epoch, former, heard = epoch + 1, leader, 0
                    leader = yield from self._take_lead(number, epoch)
                    if leader == self.id:
                        yield from self._tell_lost([former])  # before the lost leader gets a place
            awaited = f"cycle/{number}"
            if leader == self.id:
                awaited = self._log.next_key(self.arrivals)
                yield Sleep(min(LONGEST_PAUSE, max(0.001, (now - began) / 10)))
            is_told = yield AwaitKey(awaited, min(NOTICE, look_at - now))
            now = yield ReadClock()
        return (yield from self._stop_waiting(number))

    def _is_spare(self) -> Protocol[bool]:
        """Return True if the last cycle still runs, and this agent is none of its nodes."""
        if self.arrivals.last.rank_of(self.id) is not None or not self.arrivals.last.seats:
            return False
        yield from self.read()
        return bool(self.arrivals.missing) and (yield from self.cycle_end(self.arrivals.last.cycle)) is None

    def _stop_waiting(self, number: int) -> Protocol[Membership | Refusal]:
        """Leave, unless the cycle has been formed. If it is formed at the same moment, the others read from the log
        that this node has left."""
        terms, known = self.terms, self.arrivals
        next_membership = yield from self._log.following(known.last)
        if next_membership is not None:
            self._lease = None
            return next_membership
        is_late = not (yield IsInterrupted())
        reason = f"found no place within {terms.join_limit:g} s (join_timeout)" if is_late else "was asked to stop"
        yield from self._log.append(Left(self.id, reason))
        if self._lease is not None:
            yield Set(f"{self._lease}/given_up", "1")
            yield Add(NOTICES, 1)
            self._lease = None
        if not is_late:
            return self._asked_to_stop(number)
        return Refusal(
            "late",
            f"node {self.node} {reason} in cycle {number}: {count(len(known.last.seats), 'node')} took part in the "
            f"last one; waiting {len(known.arrived)}, missing of the last {len(known.missing)}, "
            f"wanted {terms.least} to {terms.most}",
        )

    def _asked_to_stop(self, number: int) -> Refusal:
        return Refusal("closed", f"node {self.node} was asked to stop while it waited for cycle {number}")

    def _hear(self, number: int, epoch: int, leader: str, heard: int) -> Protocol[tuple[Refusal | None, bool]]:
        """Check for events without a hint. Return the refusal of this node, if any, and True if the leader is gone. If
        nothing is new, this costs one operation. heard: notices that were read for this leader."""
        notices, count = yield Counts((NOTICES, agent_liveness.key(leader)))
        refusal = yield from self._hear_notices(notices)
        if refusal is not None or leader == self.id:
            return refusal, False
        is_gone = self._silences.hear(leader, count, (yield ReadClock())) >= self.terms.lost_after
        if notices != heard and not is_gone:
            (given_up,) = yield Read((f"leader/{number}/{epoch}/given_up",))
            is_gone = given_up is not None
        return None, is_gone

    def _hear_notices(self, notices: int) -> Protocol[Refusal | None]:
        """Return why this node is excluded, None if it is not. If this agent was stopped while it waited and was
        declared lost, it arrives again. notices: their number; if none is new, nothing is read.
        Raises: NodeRefused if its rank is taken."""
        if notices == self._notices:
            return None
        names = f"refused/{self.id}", f"excluded/{self.node}", f"lost/{self.id}"
        refused, excluded, lost = yield Read(names)
        if refused is not None:
            raise NodeRefused(refused)
        if excluded is not None:
            return Refusal("closed", f"node {self.node} is excluded: {excluded}")
        if lost is not None:
            yield Delete(f"lost/{self.id}")
            yield from self.read()  # reads at least what the leader had read before it wrote that key
            yield from self._arrive_again()
        self._notices = notices
        return None

    def _arrive_again(self) -> Protocol[bool]:
        """Arrive again if this agent waits and the others declared it lost. Return True if they did."""
        known = self.arrivals
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

    def _lead(
        self, number: int, last_call: Timer, is_new: bool, is_time: bool, why_not_continued: Question[More]
    ) -> Generator[Operation | More, Any, Membership | None]:
        """Read the log. Form the cycle if that is possible now. is_new: the log may have new entries."""
        terms = self.terms
        if is_new:
            yield from self.read()
        known = self.arrivals
        if known.last.cycle >= number:
            return known.last  # this agent was stopped, and the others continued
        if (yield from self._arrive_again()):
            return None  # the caller looks again
        yield from self._announce_losses()
        if is_time and (yield from self._tell_lost([*(seat.id for seat in known.missing), *known.arrived])):
            return None
        if (yield from self._refuse_duplicates()):
            return None
        now = yield ReadClock()
        is_last = last_call.has_run_out(len(known.arrived) >= terms.least, now)
        if not membership.is_due(known, terms.least, terms.most, is_last):
            return None
        if known.last.cycle != membership.FIRST:
            why_not = yield from why_not_continued(known.last.cycle)
            if why_not:
                return (yield from self._write(known.last, Membership(cycle=number, closed=why_not)))
        try:
            next_membership = membership.form(known, terms.most, group_ranks.assign)
            self._wrong.has_run_out(False, now)
        except ConfigurationError as error:
            if not self._wrong.has_run_out(True, now):
                return None  # the node without a rank may leave
            next_membership = Membership(cycle=number, closed="the ranks of nodes are wrong", error=str(error))
        return (yield from self._write(known.last, next_membership))

    def _write(self, last: Membership, next_membership: Membership) -> Protocol[Membership]:
        """Write the membership of a cycle unless another agent has. Return the one that counts, or a later one."""
        return (yield from self._log.write(last, msgspec.structs.replace(next_membership, by=self.id, before=last.by)))

    def _tell_lost(self, ids: Iterable[str]) -> Protocol[bool]:
        """Log which of these agents are lost. Return True if any is."""
        now = yield ReadClock()
        lost = yield from self._silences.lost([id for id in ids if id != self.id])
        for id in lost:
            yield from self.tell_lost(id, now)
        return bool(lost)

    def tell_lost(self, id: str, observed_at: Seconds) -> Protocol[None]:
        """Log that an agent is lost, unless this agent stood still since it observed that: it may have returned."""
        lost = Left(id, f"gave no sign of life for {self.terms.lost_after:g} s", is_lost=True)
        yield from self._log.append(lost, until=observed_at + self.terms.lost_after)

    def _announce_losses(self) -> Protocol[None]:
        """Notify each waiting agent that was declared lost: it must arrive again. It may only have been stopped for a
        while, and it does not read the log. Each leader does this for the whole log, because the agent that wrote the
        entry may have died."""
        for id, place in self.arrivals.lost.items():
            if self._announced.get(id) != place:
                yield Set(f"lost/{id}", "1")
                yield Add(NOTICES, 1)
                self._announced[id] = place

    def _refuse_duplicates(self) -> Protocol[bool]:
        """Return True if two agents claim one rank. The later agent is refused, unless the earlier one turns out to be
        lost; then the later agent is its successor."""
        claims: dict[int, NodeSeat] = {}
        now = yield ReadClock()
        is_any = False
        for seat in self.arrivals.candidates:
            if seat.infra is None or claims.setdefault(seat.infra, seat) is seat:
                continue
            is_any = True
            if now - self._duplicates.setdefault(seat.id, now) > self.terms.lost_after + 2 * self.terms.interval:
                yield Set(
                    f"refused/{seat.id}",
                    f"node {seat.node} has infrastructure rank {seat.infra}, but node {claims[seat.infra].node}, which "
                    "arrived first, has the same rank; give each node its own rank",
                )
                yield Add(NOTICES, 1)
                yield from self._log.append(Left(seat.id, "its rank is taken"))
        return is_any

    # -- while workers run ------------------------------------------------------------------------

    def look(self, counter: str = "log/count") -> Protocol[Around]:
        """Return what is new around an agent of the running cycle. counter: the key of a number in the store, read at
        the same time. If nothing is new, this costs one operation."""
        neighbour = membership.neighbour(self.arrivals, self.membership, self.id)
        watched = () if neighbour is None else (agent_liveness.key(neighbour.id),)
        count, asked, *beat = yield Counts(("log/count", counter, *watched))
        self.arrivals = yield from self._log.read(self.arrivals, count)
        if neighbour is not None:
            now = yield ReadClock()
            if self._silences.hear(neighbour.id, beat[0], now) >= self.terms.lost_after:
                yield from self.tell_lost(neighbour.id, now)
                yield from self.read()
        known = self.arrivals
        self._looks_since_asked += 1
        if known.entries != self._asked_at or known.arrived or known.gone or self._looks_since_asked >= ASK_EVERY:
            self._asked_at, self._looks_since_asked = known.entries, 0
            is_over = (yield from self.newest()).cycle > self.cycle
        else:
            is_over = False  # an agent writes to the log before it forms a cycle or closes the rendezvous
        # An agent that was declared lost ends its workers and waits for the next cycle: this cycle has lost it.
        lost = frozenset(seat.id for seat in self.membership.seats if known.is_gone(seat) or seat.id in known.arrived)
        # The others do not wait for an agent that they declared lost: a next cycle may begin at any moment.
        is_over |= self.id in lost
        return Around(0 if is_over else known.waiting(self.terms.most), lost, is_over, asked)

    def end_cycle(self, reason: str) -> Protocol[str]:
        """End the cycle for all its agents. Return the reason that was given first."""
        return str((yield CompareSet(f"end/{self.cycle}", reason)))

    def is_end_told(self) -> Protocol[bool]:
        """Return True if an agent may have ended the cycle. Only the first call costs a request to the store."""
        return bool((yield AwaitKey(f"end/{self.cycle}")))

    def cycle_end(self, cycle: int | None = None) -> Protocol[str | None]:
        """Return the first reason that an agent gave for the end of a cycle, None if there is none yet. cycle: by
        default this agent's."""
        (text,) = yield Read((f"end/{self.cycle if cycle is None else cycle}",))
        return None if text is None else str(text)

    def others(self, leaving: Collection[str]) -> Protocol[int]:
        """Return how many nodes could take part in the next cycle, without this node and without leaving agents."""
        yield from self.read()
        return min(self.terms.most, len(membership.present(self.arrivals, self.membership) - {self.id, *leaving}))

    def is_taken_for_lost(self) -> Protocol[bool]:
        """Return True if others declared this agent lost or continued without it, for example because it was stopped
        for a while."""
        yield from self.read()
        return self.id in self.arrivals.gone or (yield from self.newest()).cycle > self.cycle

    def waiting(self) -> Protocol[int]:
        """Return how many nodes would take part if a new cycle began now, 0 once the rendezvous is closed."""
        if (yield from self.newest()).closed:
            return 0
        yield from self.read()
        return self.arrivals.waiting(self.terms.most)

    # -- the end ----------------------------------------------------------------------------------

    def newest(self) -> Protocol[Membership]:
        """Return the last membership of the job."""
        return (yield from self._log.newest(self.membership))

    def close(self, reason: str) -> Protocol[str]:
        """Close the rendezvous: there will be no further cycle. Return the reason that was given first."""
        newest = yield from self.newest()
        while not newest.closed:
            newest = yield from self._close_after(newest, reason)
        return newest.closed

    def close_if_stuck(self, reason: str) -> Protocol[str]:
        """Close the rendezvous if the job cannot go on without this node: no cycle runs, and too few nodes for one are
        left. Return why the rendezvous is closed, empty if it is not."""
        newest = yield from self.newest()
        if (yield from self._is_stuck(newest)):
            newest = yield from self._close_after(newest, reason)
        return newest.closed

    def _close_after(self, last: Membership, reason: str) -> Protocol[Membership]:
        """Close the rendezvous unless there is a next cycle. Return what follows the last cycle."""
        newest = yield from self._write(last, Membership(cycle=last.cycle + 1, closed=reason))
        yield from self.wake()  # agents that look at the log first
        return newest

    def wake(self) -> Protocol[None]:
        """Wake all agents that wait for the log's next entry."""
        yield from self._log.append(Nothing())

    def _is_stuck(self, newest: Membership) -> Protocol[bool]:
        """Return True if no cycle runs, and too few nodes for one are left besides this node."""
        if newest.cycle != membership.FIRST and (yield from self.cycle_end(newest.cycle)) is None:
            return False  # it runs, or the rendezvous is closed
        yield from self.read()
        known = self.arrivals
        return len(membership.present(known, known.last) - {self.id}) < self.terms.least

    def exclude(self, node: str, reason: str) -> Protocol[None]:
        """Exclude a node from all further cycles. The running cycle continues."""
        yield Set(f"excluded/{node}", reason or "excluded")
        yield Add(NOTICES, 1)
        yield from self._log.append(Excluded(node, reason))

    def leave(self, reason: str) -> Protocol[None]:
        """Leave, without closing the rendezvous for others."""
        yield from self._log.append(Left(self.id, reason))

    def has_agents(self) -> Protocol[bool]:
        """Return True if agents take part in a job, or wait for a place, as this agent reads it without a part of its
        own. It may call `await_leaving` then."""
        newest = yield from self.newest()
        if newest.closed:
            newest = yield from self._log.before(newest)
        self.arrivals = membership.begin(newest)
        yield from self.read()
        return bool(membership.present(self.arrivals, self.arrivals.last))

    def await_leaving(self, is_host: bool, expected: int = 0, limit: Seconds = LEAVE_LIMIT) -> Protocol[bool]:
        """Wait until the others have left. Return True if the job is over and no agent is left.

        is_host: the others need this node's store; otherwise this call waits only to find out if this agent is the
        last one. expected: number of others that must have left, even if they have not arrived yet. While the job runs
        the wait is unbounded; once the job is over, it lasts at most `limit` seconds. If too few nodes for a cycle are
        left for `join_limit`, the job ends. Otherwise nodes that wait in vain, leave and come again would keep a store
        alive in which no cycle begins."""
        if not is_host:
            return (yield from self._is_last(expected))
        closed_at: Seconds | None = None
        stuck = Timer(self.terms.join_limit)
        while True:
            yield from self.read()
            known = self.arrivals
            living = sorted(membership.present(known, known.last))
            now = yield ReadClock()
            newest = yield from self.newest()
            if closed_at is None and newest.closed:
                closed_at = now
            if not living and len(known.gone - {self.id}) >= expected:
                return closed_at is not None
            is_late = closed_at is not None and now - closed_at > limit
            if is_late or (yield IsInterrupted()):
                return False
            if stuck.has_run_out((yield from self._is_stuck(newest)), now):
                yield from self._close_after(newest, self._why_stuck())
            yield from self._tell_lost(living)
            yield AwaitKey(self._log.next_key(known), self.terms.interval)

    def _is_last(self, expected: int) -> Protocol[bool]:
        """Return True if the job is over, and no other agent needs the job's keys, which are in an outside store.

        Agents are counted as they leave, and the last ones read the log. The last that an agent writes is a key of its
        own, so one that finds the keys of all others is the last. An agent that is killed before it leaves has none. So
        the last agents wait until one of the others counts, which then leaves later, or all are lost. Meanwhile another
        agent may delete all keys, so this agent only reads keys that may be missing."""
        if self._is_stranger:
            return False
        agents = membership.present(self.arrivals, self.arrivals.last)
        missing = len(agents) - (yield Add("left", 1))
        yield Set(_left_key(self.id), "1")
        if missing > NEARLY_LAST:
            return False
        if not (yield from self.newest()).closed:
            return False
        signs = SignsOfLife(self.terms.interval, self.terms.lost_after)
        lost: set[str] = set()
        while True:
            left, entries = yield Read(("left", "log/count"))
            if left is None or entries is None:
                return False
            self.arrivals = yield from self._log.read(self.arrivals, int(entries))
            known = self.arrivals
            living = membership.present(known, known.last) - {self.id}
            # An agent whose end is in the log may still write, until its own key is there.
            others = sorted((agents | known.gone) - lost - known.lost.keys() - {self.id})
            if not living and None not in (yield Read(tuple(map(_left_key, others)))):
                return len(known.gone - {self.id}) >= expected
            observed_at = yield ReadClock()
            lives = yield from signs.look(sorted(living) or others)
            if lives or (yield IsInterrupted()):
                return False
            if lives is None:
                yield AwaitKey(self._log.next_key(known), self.terms.interval)
            elif living:
                for id in sorted(living):
                    yield from self.tell_lost(id, observed_at)
                lost |= living
            else:
                return True

    def _why_stuck(self) -> str:
        return (
            f"node {self.node}, which hosts the job's store, has left, and too few nodes for a cycle came within "
            f"{self.terms.join_limit:g} s (join_timeout)"
        )

    def read(self) -> Protocol[None]:
        """Read new entries of the log."""
        self.arrivals = yield from self._log.read(self.arrivals)


def _is_continued(cycle: int) -> Protocol[str]:
    yield from ()
    return ""


def _closed(next_membership: Membership) -> Refusal:
    """Return why there is no next cycle. Raises: ConfigurationError if the job is misconfigured."""
    if next_membership.error:
        raise ConfigurationError(next_membership.error)
    return Refusal("closed", next_membership.closed)


def _left_key(id: str) -> str:
    """Return the key that an agent writes when it leaves, as the last one."""
    return f"left/{id}"


def _in_words(reason: str) -> str:
    """Return the reason for which a rendezvous was closed."""
    try:
        verdict = cycle.decode(reason)
    except DecodeError:
        return reason
    return f"{verdict.outcome}, {verdict.detail}" if verdict.detail else verdict.outcome
