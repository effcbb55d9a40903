"""Did every invariant hold?  Compares the real events of a cluster with the promises of the protocol.

The referee hears what each rank and each stand-in really does, and also reads the store. It knows no protocol step,
only who was where, who returned, who died, and what must never happen. A wait may reach its limit only if other ranks
explain it: the schedule stalled one or several of them for nearly all of that time, or a rank is stuck or dead and no
monitor is left to end it or to stand in for it. Such a wait excuses only itself and the BarrierTimeout that follows.
Raises: InternalError with the attribute `invariant`, from the call that first finds it broken."""

from __future__ import annotations

from resilience.core.restart import (
    COMPLETED,
    ENTRY,
    INTERRUPTED,
    LEFT,
    LOOK_AGAIN,
    CompareSet,
    End,
    Keys,
    Result,
    Set,
    Stage,
    WaitLimits,
)
from resilience.errors import InternalError
from resilience.facts.interruptions import FaultOrigin
from resilience.facts.seats import Seat
from tests.restart_simulation.store import MemoryStore

LIMITS = WaitLimits()  # limits of waits between ranks
SLACK = 20.0  # seconds of a wait that operations may take; a stall has to explain the rest

# Ends of a rank, besides COMPLETED and LEFT.
DISCARDED, TIMEOUT, RAISED, KILLED = "discarded", "timeout", "raised", "killed"

Last = tuple[Stage | None, End]
BEGINNING: Last = (None, End.RETURNED)
READY: Last = (Stage.CHECK_BEFORE, End.RETURNED)
RECOVERED: Last = (Stage.COLLECT, End.RETURNED)
NEXT: dict[Last, Stage] = {
    BEGINNING: Stage.INITIALIZE,
    (Stage.INITIALIZE, End.RETURNED): Stage.CHECK_BEFORE,
    (Stage.ABORT, End.RETURNED): Stage.FINALIZE,
    (Stage.FINALIZE, End.RETURNED): Stage.CHECK_AFTER,
    (Stage.CHECK_AFTER, End.RETURNED): Stage.COLLECT,
}
RECOVERING = (Stage.FINALIZE, Stage.CHECK_AFTER, Stage.COLLECT)
FAILURES = (End.FAILED, End.FATAL)


def broken(invariant: str, what: str) -> InternalError:
    """Return the error for a broken invariant."""
    return InternalError(f"{invariant}: {what}", invariant=invariant)


class World:
    """What really happened in one iteration. The sets contain ranks of this iteration.

    faulty: had a fault of their own before they answered the last call. gave_up: waited for its end in vain.

    came: reached the start barrier themselves. inside: may still be in the function. uncalled: neither they nor a
    stand-in have answered the last call. before_end: are alive and have not reached the end barrier."""

    __slots__ = (
        "active",
        "before_end",
        "came",
        "faulty",
        "gave_up",
        "holders",
        "inside",
        "returned",
        "size",
        "uncalled",
    )

    def __init__(self, seat: Seat) -> None:
        self.size = seat.world_size
        self.active = seat.active_world_size
        self.holders: dict[int, int] = {}  # rank -> initial rank
        self.came = {0} if seat.world_size == 1 else set()  # a lone rank has no peers to meet
        self.returned: set[int] = set()
        self.faulty: set[int] = set()
        self.gave_up: set[int] = set()
        self.inside = set(range(seat.world_size))
        self.uncalled = set(self.inside)
        self.before_end = set(self.inside)

    def is_past(self, rank: int) -> None:
        self.inside.discard(rank)
        self.before_end.discard(rank)


class Truth:
    """What really happened to one rank."""

    __slots__ = (
        "end",
        "frozen_before",
        "has_waited_in_vain",
        "is_exiting",
        "is_fatal",
        "is_grouped",
        "is_suspected",
        "is_unspoken",
        "last",
        "must_say",
        "seat",
        "spoken_for",
        "stalls",
        "standing",
    )

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.last = BEGINNING  # the last stage that it left in this iteration, and how
        self.end: str | None = None
        self.is_fatal = False  # its failure means that it has to leave
        self.is_exiting = False  # the same if its error of a communication call is its own
        self.is_suspected = False  # it had a stand-in while it lived
        self.is_unspoken = False  # it is dead or stuck, and no monitor is left to stand in for it or to end it
        self.is_grouped = False  # the assignment left it out together with a terminated rank
        self.must_say: set[str] = set()  # records of its failures that are not in the store yet
        self.frozen_before = ENTRY - 1  # last iteration that was frozen when it died or was suspected
        self.standing = 0  # processes that stand in for it now
        self.spoken_for: str | None = None  # its stand-in's result
        self.has_waited_in_vain = False
        self.stalls: list[tuple[float, float]] = []  # intervals without progress

    @property
    def is_alive(self) -> bool:
        return self.end != KILLED


class Referee:
    """Watches one cluster. Each method is called when the event in its name has happened."""

    def __init__(self, ranks: int, store: MemoryStore) -> None:
        self._data = store.data
        self.worlds: dict[int, World] = {}
        self.truths = [Truth(Seat(rank, rank, ranks, ranks, ENTRY)) for rank in range(ranks)]
        self.vain_waits: list[str] = []  # those that another rank explains
        self._pauses: list[tuple[float, float]] = []  # intervals in which the store answers nobody
        self._true: set[str] = set()  # every record that may be in the store
        self._last_frozen = ENTRY - 1
        self._superfluous: list[Seat] = []  # seats of ranks whose stand-ins gave up waiting for the others
        for truth in self.truths:
            self.took_seat(truth.seat)

    # -- who waits for whom -----------------------------------------------------------------------

    def stalls(self, truth: Truth, now: float, duration: float) -> None:
        """Note that the schedule delays a rank, or its stand-in, for this long."""
        if duration:
            truth.stalls.append((now, now + duration))

    def pauses(self, now: float, duration: float) -> None:
        """Note that the store stands still for this long. All ranks wait for it, also those that go on meanwhile."""
        self._pauses.append((now, now + duration))

    def goes_on(self, truth: Truth, now: float) -> None:
        """Note that a stall is over, perhaps early."""
        truth.stalls = [(begin, min(end, now)) for begin, end in truth.stalls]

    def overdue(self, truth: Truth, seat: Seat, key: str, limit: float, now: float) -> None:
        """Check a wait of a rank, or its stand-in, that reached its limit without the key."""
        if key.endswith("/last_call/done"):
            self.worlds[seat.iteration].gave_up.add(seat.rank)
            if not self.worlds[seat.iteration].uncalled:
                raise broken("no vain wait", f"{seat} waited for the last call though all had answered it")
            return
        if limit <= LOOK_AGAIN:
            return  # the rank only checks again after that
        others = [peer for peer in self.truths if peer is not truth]
        stalled = covered(self._pauses + [stall for peer in others for stall in peer.stalls], now - limit, now)
        if stalled < limit - SLACK and not any(peer.is_unspoken for peer in others):
            raise broken("no vain wait", f"{seat} waited {limit:g} s for {key}, others were late for {stalled:.0f} s")
        truth.has_waited_in_vain = True
        self.vain_waits.append(f"{seat} for {key}")

    # -- where ranks are --------------------------------------------------------------------------

    def entered(self, seat: Seat) -> None:
        self.worlds[ENTRY].before_end.discard(seat.rank)

    def took_seat(self, seat: Seat, by_stand_in: bool = False) -> None:
        """Check a taken seat: ranks are unique and below the size, and all see one world."""
        world = self.worlds.get(seat.iteration)
        if world is None:
            world = self.worlds[seat.iteration] = World(seat)
        if (world.size, world.active) != (seat.world_size, seat.active_world_size):
            raise broken("one world", f"{seat} beside a world of {world.size} with {world.active} active")
        if not 0 <= seat.rank < world.size:
            raise broken("consecutive ranks", f"{seat}")
        holder = world.holders.setdefault(seat.rank, seat.initial_rank)
        if holder != seat.initial_rank:
            raise broken("unique ranks", f"{seat} is also held by initial rank {holder}")
        if by_stand_in:
            world.is_past(seat.rank)

    def moves_on(self, truth: Truth, terminated: frozenset[int]) -> None:
        """Check a rank's move to the next iteration: it has recovered, and all others have ended this one."""
        seat = truth.seat
        world = self.worlds[seat.iteration]
        if world.before_end:
            raise broken("end together", f"{seat} goes on, ranks {world.before_end} have not ended")
        if seat.iteration != ENTRY and truth.last != RECOVERED:
            raise broken("stages in order", f"{seat} goes on after {truth.last}")
        truth.last = BEGINNING
        self.agreed(seat, terminated)

    def agreed(self, seat: Seat, terminated: frozenset[int]) -> None:
        """Check the terminated ranks that a rank or stand-in has learned: all learn the same."""
        frozen = self._data.get(f"{seat.iteration}/frozen")
        if frozen is None or terminated != parse_frozen(frozen):
            raise broken("one agreement", f"{seat} learned of {set(terminated)}, frozen is {frozen}")

    def begins(self, truth: Truth, stage: Stage, called_for: float) -> None:
        """Check a stage that a rank enters. called_for: seconds since it last left a function for an interruption."""
        seat = truth.seat
        world = self.worlds[seat.iteration]
        expected = NEXT.get(truth.last, Stage.ABORT)
        if truth.last == READY:
            expected = Stage.FUNCTION if seat.is_active else Stage.RESERVE
        if stage is not expected or (truth.is_fatal and stage is not Stage.ABORT):
            raise broken("stages in order", f"{seat} runs {stage} after {truth.last}")
        if stage is Stage.INITIALIZE and len(world.came) < world.size and f"{seat.iteration}/outcome" not in self._data:
            raise broken("start together", f"{seat} starts, only {sorted(world.came)} have come")
        if stage is Stage.ABORT and self._data.get(f"{seat.iteration}/outcome") != INTERRUPTED:
            raise broken("one outcome", f"{seat} aborts an iteration that was not decided as interrupted")
        if stage is Stage.FINALIZE and world.inside and called_for < LIMITS.last_call:
            raise broken("last call", f"{seat} finalizes after {called_for:.3g} s, {world.inside} are in the function")

    def leaves(self, truth: Truth, stage: Stage, result: Result) -> None:
        seat = truth.seat
        world = self.worlds[seat.iteration]
        truth.last = (stage, result.end)
        if result.end in FAILURES:
            truth.must_say.add(self.may_say(result.report))
            truth.is_fatal |= result.end is End.FATAL and result.origin != "communication"
            truth.is_exiting = result.end is End.FATAL and result.origin == "communication"
            if result.origin == "own" and stage not in RECOVERING:
                world.faulty.add(seat.rank)
        if stage is Stage.FUNCTION and result.end is End.RETURNED:
            world.returned.add(seat.rank)
        elif stage is Stage.ABORT:
            world.inside.discard(seat.rank)
        if truth.last == RECOVERED or (truth.is_fatal and stage not in (Stage.INITIALIZE, Stage.CHECK_BEFORE)):
            world.before_end.discard(seat.rank)

    def settled(self, truth: Truth, origin: FaultOrigin) -> None:
        """Check whose fault an error is that left a rank's communication call."""
        seat, world = truth.seat, self.worlds[truth.seat.iteration]
        others = world.faulty - {seat.rank}
        records = self._records(seat.iteration)
        if origin == "own" and (others or not records[0].startswith(f"{seat.initial_rank}:")):
            raise broken("no healthy rank blamed", f"{seat} is blamed, and so are {others} for {records}")
        # Places given out, or a fault that was announced: by another rank, which may have died before it wrote its
        # record, or by a process that stands in for this one, whose record then blames it.
        places = int(self._data[f"{seat.iteration}/records"])
        is_known = places > 1 or Keys(seat.iteration).fault in self._data
        if origin == "own" and truth.is_exiting:
            truth.is_fatal = True
            world.before_end.discard(seat.rank)
        if origin == "consequence" and not is_known and seat.rank not in world.gave_up:
            raise broken("a fault is somebody's", f"{seat} is cleared, and nobody else has a fault")

    def answered(self, seat: Seat) -> None:
        """Note that a rank, or its stand-in, has answered the last call."""
        self.worlds[seat.iteration].uncalled.discard(seat.rank)

    def completed(self, truth: Truth) -> None:
        """Check a completion that a rank has learned; it now only departs."""
        outcome = self._data.get(f"{truth.seat.iteration}/outcome")
        if outcome != COMPLETED:
            raise broken("one outcome", f"{truth.seat} completed an iteration that was decided as {outcome}")

    def departed(self, truth: Truth) -> None:
        """Check the departure of the store's rank: no other rank needs it, or it has waited long enough."""
        seat = truth.seat
        if self.worlds[seat.iteration].before_end and not truth.has_waited_in_vain:
            raise broken("the store goes last", f"{seat} departs before {self.worlds[seat.iteration].before_end}")

    def ended(self, truth: Truth, end: str) -> None:
        """Check how a rank ended."""
        truth.end = end
        seat = truth.seat
        self.worlds[seat.iteration].is_past(seat.rank)
        if end == LEFT and not truth.is_fatal:
            raise broken("no healthy rank excluded", f"{seat} left without a reason")
        if end == COMPLETED and truth.is_fatal:
            raise broken("no fault swallowed", f"{seat} had to leave, and completed")
        if end == DISCARDED and not (truth.is_suspected or truth.is_grouped):
            raise broken("no healthy rank excluded", f"{seat} was given no seat")
        if end == TIMEOUT and not truth.has_waited_in_vain:
            raise broken("no rank forgotten", f"{seat} gave up at a barrier without a wait")

    def died(self, truth: Truth, now: float) -> None:
        truth.is_unspoken = False
        self.goes_on(truth, now)
        if not truth.is_suspected:
            truth.frozen_before = self._last_frozen
        seat = truth.seat
        if f"{seat.iteration}/last_call/0/{seat.rank}" not in self._data:
            self.worlds[seat.iteration].faulty.add(seat.rank)
        self.ended(truth, KILLED)

    def suspected(self, truth: Truth) -> None:
        """Note that a living rank gets a stand-in, which may overtake it from now on."""
        if not truth.is_suspected:
            truth.frozen_before = self._last_frozen
        truth.is_suspected = True
        self.worlds[truth.seat.iteration].is_past(truth.seat.rank)

    def terminated(self, truth: Truth, stalled_for: float | None, limit: float) -> None:
        """Check that a rank ended by its monitor has really made no progress for that long."""
        if stalled_for is None or stalled_for < limit - 1e-6:
            raise broken("no healthy rank killed", f"{truth.seat} stalled for {stalled_for} s, its limit is {limit} s")

    def stood_in(self, truth: Truth, seat: Seat, result: str) -> None:
        """Check the result of a stand-in, whose rank ended at `seat`."""
        truth.spoken_for = result
        if result == TIMEOUT:
            self._superfluous.append(seat)
        if result == COMPLETED and self._data.get(f"{seat.iteration}/outcome") != COMPLETED:
            raise broken("one outcome", f"the stand-in of {seat} believes in a completion")
        if result == "excluded" and seat.rank not in parse_frozen(self._data[f"{seat.iteration}/frozen"]):
            raise broken("stand-ins end", f"the stand-in of {seat} left, and the others take it along")
        if result == DISCARDED and not (
            truth.is_grouped or self._is_unassigned_everywhere(seat) or self._is_replaced(seat)
        ):
            raise broken("stand-ins end", f"the stand-in of {seat} found no seat")

    def _is_replaced(self, seat: Seat) -> bool:
        """Return True if the assignment failed on this rank, and another such rank has claimed a place instead."""
        keys, size = Keys(seat.iteration + 1), len(self.truths)
        owners = {self._data.get(f"{keys.claim}/{rank}") for rank in range(size)} - {None, str(seat.initial_rank)}
        return f"{keys.unassigned}/{seat.initial_rank}" in self._data and bool(owners)

    def _is_unassigned_everywhere(self, seat: Seat) -> bool:
        """Return True if the assignment failed on every rank that it does not discard after this seat's iteration."""
        keys = Keys(seat.iteration + 1)
        initial_ranks = [truth.seat.initial_rank for truth in self.truths]
        failed = sum(f"{keys.unassigned}/{rank}" in self._data for rank in initial_ranks)
        failed += sum(f"{keys.discarded}/{rank}" in self._data for rank in initial_ranks)
        return failed + len(parse_frozen(self._data[f"{seat.iteration}/frozen"])) >= seat.world_size

    # -- what stands in the store -------------------------------------------------------------------

    def may_say(self, record: str) -> str:
        """Note a record that may truthfully be in the store, and return it."""
        self._true.add(record)
        return record

    def wrote(self, truth: Truth, by_stand_in: bool, operation: Set | CompareSet, before: str | None) -> None:
        """Check a written key. before: its previous value."""
        key = operation.key
        if isinstance(operation, Set):
            if before is not None and before != operation.value and not key.startswith("seat/"):
                raise broken("written once", f"{key} was {before!r}, is {operation.value!r}")
            if "/records/" in key:
                self._recorded(truth, by_stand_in, int(key.partition("/")[0]), operation.value)
            elif "/start/0/" in key and not by_stand_in:
                self.worlds[truth.seat.iteration].came.add(truth.seat.rank)
            elif "/exit/" in key:
                self.worlds[truth.seat.iteration].is_past(truth.seat.rank)
        elif before is None:
            iteration = int(key.partition("/")[0])
            if key.endswith("/outcome"):
                self._decided(iteration, operation.value)
            elif key.endswith("/frozen"):
                self._last_frozen = max(self._last_frozen, iteration)

    def _recorded(self, truth: Truth, by_stand_in: bool, iteration: int, record: str) -> None:
        if record not in self._true:
            raise broken("true records", f"{record!r} stands in iteration {iteration}")
        truth.must_say.discard(record)
        if by_stand_in and iteration <= truth.frozen_before:
            raise broken("true records", f"{record!r} stands in iteration {iteration}, which had ended before")

    def _decided(self, iteration: int, outcome: str) -> None:
        world = self.worlds[iteration]
        if outcome == COMPLETED:
            missing = set(range(world.active)) - world.returned
            if missing:
                raise broken("completed means all returned", f"{missing} have not returned in iteration {iteration}")
        elif not self._records(iteration):
            raise broken("no interruption without a record", f"iteration {iteration}")

    def _records(self, iteration: int) -> list[str]:
        count = int(self._data.get(f"{iteration}/records", "0"))
        records = (self._data.get(f"{iteration}/records/{position}") for position in range(1, count + 1))
        return [record for record in records if record is not None]

    # -- the end ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Check that every rank's end is known, once no event is left."""
        # A rank may wait forever only for another that hangs unmonitored, or died with no monitor left to notice.
        self._is_stuck = any(truth.is_unspoken for truth in self.truths)
        records = [record for iteration in self.worlds for record in self._records(iteration)]
        for truth in self.truths:
            self._settle_rank(truth, records)
        for iteration, world in self.worlds.items():
            self._settle_world(iteration, world)
        for seat in self._superfluous:
            frozen = self._data.get(f"{seat.iteration}/frozen")
            if frozen is not None and seat.rank not in parse_frozen(frozen):
                raise broken("stand-ins end", f"the stand-in of {seat} gave up, and the others took it along")

    def _settle_rank(self, truth: Truth, records: list[str]) -> None:
        if truth.end is None and not self._is_stuck:
            raise broken("no rank forgotten", f"{truth.seat} waits forever")
        if truth.standing:
            raise broken("stand-ins end", f"{truth.standing} of {truth.seat} wait forever")
        if truth.is_alive and truth.must_say and truth.end != RAISED:  # then its monitor recorded it
            raise broken("no fault without a record", f"{truth.must_say} of {truth.seat}")
        is_out = truth.is_alive and truth.end != RAISED
        if is_out or truth.is_unspoken or truth.spoken_for == DISCARDED:
            return
        if truth.spoken_for is None:
            raise broken("no rank forgotten", f"{truth.seat} is gone and had no stand-in")
        if not any(record.startswith(f"{truth.seat.initial_rank}:") for record in records):
            raise broken("no death without a record", f"{truth.seat}")

    def _settle_world(self, iteration: int, world: World) -> None:
        outcome = self._data.get(f"{iteration}/outcome")
        members = [self.truths[initial] for initial in world.holders.values()]
        if len(world.holders) < world.size and not self._is_stuck:
            raise broken("consecutive ranks", f"iteration {iteration} has {sorted(world.holders)} of {world.size}")
        if outcome == COMPLETED:
            for truth in members:
                has_left = truth.end in (LEFT, RAISED) and truth.seat.iteration == iteration
                if truth.is_alive and truth.end != COMPLETED and not has_left and not truth.is_unspoken:
                    raise broken("completion is never half", f"{truth.seat} {truth.end}")
            if iteration + 1 in self.worlds:
                raise broken("completion is never half", f"iteration {iteration + 1} after a completed one")
        elif outcome is None and iteration != ENTRY and any(truth.is_alive for truth in members) and not self._is_stuck:
            raise broken("every iteration is decided", f"iteration {iteration}")
        elif outcome not in (None, INTERRUPTED):
            raise broken("one outcome", f"iteration {iteration} was decided as {outcome!r}")
        for rank in parse_frozen(self._data.get(f"{iteration}/frozen", "none")):
            truth = self.truths[world.holders[rank]]
            if truth.is_alive and not truth.is_fatal and not truth.is_suspected:
                raise broken("no healthy rank excluded", f"{truth.seat} in iteration {iteration}")


def covered(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return how much of the time from `begin` to `end` lies in at least one interval."""
    total, position = 0.0, begin
    for first, last in sorted(intervals):
        total += max(0.0, min(end, last) - max(position, first))
        position = max(position, last)
    return total


def parse_frozen(text: str) -> frozenset[int]:
    """Return the ranks that a frozen agreement names."""
    return frozenset() if text == "none" else frozenset(map(int, text.split()))
