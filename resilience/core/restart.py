"""How does this rank restart?  The restart protocol, one store operation at a time.

Each rank of an iteration runs `iterate`. `stand_in` represents a dead or leaving rank; its monitor, a sibling's monitor
or the leaving rank itself (`leave`) runs it. They are generators: they *yield* an operation on the shared store, or
`RunStage` for a stage of the wrapped call, and are *sent* the result. So the same code runs against a real store
(`system.store.drive`) and under the virtual clock of `tests/restart_simulation`, which may stop any rank between any
two operations.

A rank may be killed at any point, because:
- every write is idempotent, so a stand-in for a dead rank simply repeats it;
- one key, `outcome`, decides each iteration by compare-and-set: completed or interrupted, never both;
- the rank that completes the end barrier freezes the next world by compare-and-set; a rank that dies later belongs to
  the next iteration, and its stand-in interrupts that one.

The protocol knows ranks, counts and keys, but no exceptions, process groups or clocks: `inprocess._runtime.call` runs
the stages, and the driver enforces the limits of `Await`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec

from resilience.errors import BarrierOverflow, BarrierTimeout
from resilience.facts import in_words
from resilience.facts.encoding import from_json, to_json_text
from resilience.facts.interruptions import FaultOrigin, missed_completion
from resilience.facts.seats import Seat

T = TypeVar("T")

COMPLETED = "completed"
INTERRUPTED = "interrupted"
NO_SERVER = "none"  # instead of an address: the iteration was interrupted before its store was published
SEATS = "seat"
LOOK_AGAIN = 0.2  # seconds between two looks whether the others have taken their places
LEVELS = 6  # of blocks in blocks: enough for a barrier of 32**6 ranks
BLOCK = 32  # arrivals checked together: bounds the bytes of one barrier operation at any world size


# -- operations --------------------------------------------------------------------------------


class Set(msgspec.Struct, frozen=True):
    """Write `value` under `key`."""

    key: str
    value: str


class Add(msgspec.Struct, frozen=True):
    """Add `amount` to the integer under `key` (0 if absent). Return the sum."""

    key: str
    amount: int


class AddRecord(Add, frozen=True):
    """Reserve the place of an interruption record among those of `iteration`. Return its number.

    fault_of: the initial rank whose own fault came first; None if the record is not about the rank's own fault."""

    iteration: int
    fault_of: int | None


class SetRecord(Set, frozen=True):
    """Write an encoded interruption record."""


class CompareSet(msgspec.Struct, frozen=True):
    """Write `value` under `key` only if `key` is absent. Return the value that is stored afterwards."""

    key: str
    value: str


class Check(msgspec.Struct, frozen=True):
    """Return True if every key is present."""

    keys: tuple[str, ...]


class Read(msgspec.Struct, frozen=True):
    """Return the values of `keys`, None for an absent key. Does not wait."""

    keys: tuple[str, ...]


class Await(msgspec.Struct, frozen=True):
    """Wait until `key` is present, at most `limit` seconds. Return True if it is present."""

    key: str
    limit: float


class AwaitOutcome(Await, frozen=True):
    """Wait until the outcome of the iteration is decided. The shell may know it without the store."""


class Stage(Enum):
    """A stage of the wrapped call that the shell runs on behalf of the protocol."""

    INITIALIZE = "initialize"
    CHECK_BEFORE = "health_check"
    FUNCTION = "run"
    RESERVE = "reserve"  # an inactive rank waits until the iteration is decided
    ABORT = "abort"  # wait until this rank's groups are cut and it has left the function
    FINALIZE = "finalize"
    CHECK_AFTER = "check"
    COLLECT = "collect"  # free the memory of the interrupted iteration


class RunStage(msgspec.Struct, frozen=True):
    """Run a stage. Return a `Result`."""

    stage: Stage


class Settle(msgspec.Struct, frozen=True):
    """Give the shell the origin of this rank's failure, which was unknown when it failed."""

    origin: FaultOrigin


class Assign(msgspec.Struct, frozen=True):
    """Find this rank's seat in the next iteration. Return a `Seat`, None if it gets none, or `Unassigned`.

    place: the seat that was found for a rank whose assignment failed. It is returned unchanged."""

    seat: Seat
    terminated: frozenset[int]
    place: Seat | None = None


Operation = Set | Add | CompareSet | Check | Read | Await | RunStage | Settle | Assign
Protocol = Generator[Operation, Any, T]


# -- values ------------------------------------------------------------------------------------


class WaitLimits(msgspec.Struct, frozen=True):
    """How long a rank waits for the others, in seconds."""

    barrier: float = 120.0
    completion: float = 120.0
    last_call: float = 1.0


class End(Enum):
    """How a stage ended."""

    RETURNED = "returned"
    INTERRUPTED = "interrupted"  # because the iteration's outcome was already decided
    FAILED = "failed"  # an Exception: all ranks restart
    FATAL = "fatal"  # a BaseException, or a failed hook that excludes its rank: this rank leaves


class Result(msgspec.Struct, frozen=True):
    """The result of `RunStage`. `report` is the encoded interruption record of a failure, `origin` its origin as far as
    the rank itself knows."""

    end: End
    report: str = ""
    origin: FaultOrigin = "own"


class Unassigned(msgspec.Struct, frozen=True):
    """What the shell answers to `Assign` if the user's assignment raised. initial_world_size: of the call."""

    initial_world_size: int


class Ending(msgspec.Struct, frozen=True):
    """How a rank's iteration ended."""

    outcome: str  # COMPLETED, INTERRUPTED, or "left": this rank takes no further part
    terminated: frozenset[int] = frozenset()


LEFT = "left"


class Keys(msgspec.Struct, frozen=True):
    """The store keys of one iteration, relative to the call's own prefix."""

    iteration: int

    def _key(self, name: str) -> str:
        return f"{self.iteration}/{name}"

    @property
    def start(self) -> str:
        return self._key("start")

    def holder(self, rank: int) -> str:
        """Return the key that holds the initial rank of `rank`. It is present once all ranks have arrived at the start,
        except in a world of one rank."""
        return f"{self.start}/0/{rank}"

    @property
    def returned(self) -> str:
        return self._key("returned")

    @property
    def completion(self) -> str:
        return self._key("completion")

    @property
    def last_call(self) -> str:
        return self._key("last_call")

    @property
    def end(self) -> str:
        return self._key("end")

    @property
    def exit(self) -> str:
        return self._key("exit")

    @property
    def outcome(self) -> str:
        return self._key("outcome")

    @property
    def frozen(self) -> str:
        return self._key("frozen")

    @property
    def records(self) -> str:
        return self._key("records")

    @property
    def fault(self) -> str:
        return self._key("fault")

    @property
    def witnessed(self) -> str:
        return self._key("witnessed")

    @property
    def terminated(self) -> str:
        return self._key("terminated")

    @property
    def server(self) -> str:
        return self._key("server")

    @property
    def unassigned(self) -> str:
        return self._key("unassigned")

    @property
    def discarded(self) -> str:
        return self._key("discarded")

    @property
    def unassigned_ranks(self) -> str:
        return self._key("unassigned_ranks")

    @property
    def claim(self) -> str:
        return self._key("claim")


def seat_key(initial_rank: int) -> str:
    """Return the key under which a rank publishes its seat before it takes part in an iteration."""
    return f"{SEATS}/{initial_rank}"


# -- barriers ----------------------------------------------------------------------------------


def arrive(name: str, rank: int, count: int, note: str = "1") -> Protocol[bool]:
    """Note that `rank` of `count` has arrived. Return True if it completed the barrier. note: the value of its key.

    Idempotent: arriving again, or for another rank, changes nothing. Arrivals are counted in blocks. The rank that
    completes a block arrives for it one level up, so no operation touches more than BLOCK keys.
    Raises: BarrierOverflow if rank is not below count."""
    if not 0 <= rank < count:
        raise BarrierOverflow(
            f"rank {rank} reached barrier {name!r}, which was made for {in_words.count(count, 'rank')} "
            f"(0 to {count - 1}); every participant must pass the same rendezvous_count and its own current rank",
            rank=rank,
            rendezvous_count=count,
            group_name=name,
        )
    level = 0
    while count > 1:
        yield Set(f"{name}/{level}/{rank}", note if level == 0 else "1")
        first = rank - rank % BLOCK
        block = range(first, min(first + BLOCK, count))
        if not (yield Check(tuple(f"{name}/{level}/{member}" for member in block))):
            return False
        rank, count, level = rank // BLOCK, -(-count // BLOCK), level + 1
    yield Set(f"{name}/done", "1")
    return True


def barrier(name: str, rank: int, count: int, limit: float, note: str = "1") -> Protocol[None]:
    """Wait until all `count` ranks have arrived, at most `limit` seconds.

    Raises: BarrierTimeout, BarrierOverflow."""
    if not (yield from arrive(name, rank, count, note)):
        yield from _await_all(f"{name}/done", name, rank, count, limit)


def _await_all(key: str, name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """Wait for the key that is written once all ranks have arrived. Raises: BarrierTimeout."""
    if not (yield Await(key, limit)):
        missing = yield from _first_missing(name, count)
        late = f"missing at last: {', '.join(map(str, missing))}" if missing else "the last of them came too late"
        raise BarrierTimeout(
            f"rank {rank} waited {limit:g} s in barrier {name!r} and not all {count} ranks arrived; "
            f"{late}. A missing rank was not reported dead: look for it on its node, or raise barrier_timeout if "
            "healthy ranks may arrive this far apart",
            rank=rank,
            rendezvous_count=count,
            group_name=name,
            limit=limit,
            missing=missing,
        )


def _first_missing(name: str, count: int) -> Protocol[tuple[int, ...]]:
    """Return the ranks that have not arrived, of the first block that is not complete. One operation a level."""
    sizes = [-(-count // BLOCK**level) for level in range(LEVELS)]
    top = next(level for level, size in enumerate(sizes) if size <= BLOCK)
    missing: tuple[int, ...] = (0,)  # of the level above; its first block is the one to look into
    for level in range(top, -1, -1):
        block = range(missing[0] * BLOCK, min((missing[0] + 1) * BLOCK, sizes[level]))
        values = yield Read(tuple(f"{name}/{level}/{member}" for member in block))
        missing = tuple(member for member, value in zip(block, values, strict=True) if value is None)
        if not missing:
            break
    return missing


def witness(keys: Keys, rank: int, world_size: int, limit: float) -> Protocol[bool]:
    """Note that the position of `rank` is on record. Wait until this holds for all ranks, at most `limit` seconds.
    Return True if it does."""
    if (yield from arrive(keys.witnessed, rank, world_size)):
        return True
    return bool((yield Await(f"{keys.witnessed}/done", limit)))


def unwitnessed(keys: Keys, world_size: int) -> Protocol[list[int]]:
    """Return the ranks whose position is not on record."""
    witnessed = yield from numbered(f"{keys.witnessed}/0", world_size)
    return [rank for rank in range(world_size) if rank not in witnessed]


def numbered(prefix: str, count: int) -> Protocol[dict[int, str]]:
    """Read the keys `prefix`/0 to `prefix`/(count - 1); return the values of those that are present."""
    present: dict[int, str] = {}
    for first in range(0, count, BLOCK):
        numbers = range(first, min(first + BLOCK, count))
        values = yield Read(tuple(f"{prefix}/{number}" for number in numbers))
        present |= {number: value for number, value in zip(numbers, values, strict=True) if value is not None}
    return present


# -- one iteration of a live rank --------------------------------------------------------------

ENTRY = -1  # the iteration before the first: ranks only meet at its end barrier


def enter(seat: Seat, limits: WaitLimits) -> Protocol[Ending]:
    """Meet all ranks at the call of the function. `seat` belongs to iteration ENTRY.

    If a rank dies before all ranks have arrived, its stand-in excludes it, as in any iteration."""
    keys = Keys(seat.iteration)
    return Ending(INTERRUPTED, (yield from _agree(keys, seat, limits)))


def iterate(seat: Seat, limits: WaitLimits) -> Protocol[Ending]:
    """Take part in one iteration, from the start barrier to the agreement on the next world."""
    keys = Keys(seat.iteration)
    yield Set(seat_key(seat.initial_rank), to_json_text(seat))
    yield from barrier(keys.start, seat.rank, seat.world_size, limits.barrier, str(seat.initial_rank))
    result = yield from _work(seat)
    if result.end is End.RETURNED and (yield from _complete(keys, seat, limits)) == COMPLETED:
        return Ending(COMPLETED)
    if result.end in (End.FAILED, End.FATAL) and (yield from _report_failure(keys, seat, result)) == COMPLETED:
        # A spare failed when all active ranks had already returned: the call is over, no rank restarts.
        if result.end is End.FAILED:
            return Ending(COMPLETED)
        yield from arrive(keys.exit, seat.rank, seat.world_size)
        return Ending(LEFT)
    yield RunStage(Stage.ABORT)
    yield from arrive(keys.last_call, seat.rank, seat.world_size)
    # A leaving rank waits too: the end of its connections must not come before the others' own cuts.
    all_answered = yield Await(f"{keys.last_call}/done", limits.last_call)
    if result.origin == "communication":
        origin = yield from _settle(keys, result.report, all_answered)
        yield Settle(origin)
        if origin == "consequence":  # also of an exit: another rank's fault ends no healthy rank
            result = Result(End.INTERRUPTED)
    if result.end is not End.FATAL:
        result = yield from _recover()
        if result.end is not End.RETURNED:
            yield from report(keys, result.report, seat.initial_rank)
    is_leaving = result.end is not End.RETURNED
    if is_leaving:
        yield from mark_terminated(keys, seat.rank)
        if (yield from arrive(keys.end, seat.rank, seat.world_size)):
            yield from _freeze(keys)
        return Ending(LEFT)
    return Ending(INTERRUPTED, (yield from _agree(keys, seat, limits)))


def depart(seat: Seat, limits: WaitLimits, is_critical: bool) -> Protocol[None]:
    """Leave a completed call. A rank whose process hosts the store leaves last, or after the barrier's limit."""
    name = Keys(seat.iteration).exit
    yield from arrive(name, seat.rank, seat.world_size)
    if is_critical:
        yield Await(f"{name}/done", limits.barrier)


def _work(seat: Seat) -> Protocol[Result]:
    """Prepare and run the function. The first stage that does not return ends it."""
    result = Result(End.RETURNED)
    for stage in (
        Stage.INITIALIZE,
        Stage.CHECK_BEFORE,
        Stage.FUNCTION if seat.is_active else Stage.RESERVE,
    ):
        result = yield RunStage(stage)
        if result.end is not End.RETURNED:
            break
    return result


def _complete(keys: Keys, seat: Seat, limits: WaitLimits) -> Protocol[str]:
    """Wait until the iteration is decided. The last active rank to arrive decides it as completed, unless an
    interruption came first."""
    if seat.is_active:
        yield Set(keys.returned, "1")
    if seat.is_active and (yield from arrive(keys.completion, seat.rank, seat.active_world_size)):
        yield CompareSet(keys.outcome, COMPLETED)
    if not (yield AwaitOutcome(keys.outcome, limits.completion)):
        yield from report(keys, missed_completion(seat, limits.completion), None)
    (decided,) = yield Read((keys.outcome,))
    return str(decided)


def _recover() -> Protocol[Result]:
    """Run the user's hooks between two iterations, then free memory. The first failure excludes this rank."""
    result = Result(End.RETURNED)
    for stage in (Stage.FINALIZE, Stage.CHECK_AFTER, Stage.COLLECT):
        result = yield RunStage(stage)
        if result.end is not End.RETURNED:
            break
    return result


# -- interruptions and the next world ----------------------------------------------------------


def report(keys: Keys, record: str, fault_of: int | None) -> Protocol[str]:
    """Write an interruption record to the store and decide the iteration as interrupted.

    Return the outcome of the iteration: COMPLETED if success came first. The order of arrival comes from the store,
    never from a clock. fault_of: the initial rank if the record is of its own fault. The first of these faults counts:
    it clears every rank that has only an error out of a communication call."""
    first = None if fault_of is None else int((yield CompareSet(keys.fault, str(fault_of))))
    position = yield AddRecord(keys.records, 1, keys.iteration, first)
    yield SetRecord(f"{keys.records}/{position}", record)
    outcome = str((yield CompareSet(keys.outcome, INTERRUPTED)))
    yield CompareSet(keys.server, NO_SERVER)  # wakes ranks that wait for the address of the iteration's store
    return outcome


def _report_failure(keys: Keys, seat: Seat, result: Result) -> Protocol[str]:
    return (yield from report(keys, result.report, seat.initial_rank if result.origin == "own" else None))


def _settle(keys: Keys, record: str, all_answered: bool) -> Protocol[FaultOrigin]:
    """Return the origin of an error out of a communication call, now that the last call is over.

    It is the rank's own only if no fault is on record, no rank is missing, and this record arrived first. All ranks
    that answered the last call have reported their faults before that, and so have stand-ins of dead ranks."""
    fault, first = yield Read((keys.fault, f"{keys.records}/1"))
    return "own" if all_answered and fault is None and first == record else "consequence"


def mark_terminated(keys: Keys, rank: int) -> Protocol[None]:
    """List a rank as terminated. This must precede the caller's arrival at the end barrier."""
    yield from enlist(keys.terminated, rank)


def enlist(name: str, rank: int) -> Protocol[None]:
    """Add a rank to a list of ranks. Repeating it changes nothing."""
    position = yield Add(name, 1)
    yield Set(f"{name}/{position}", str(rank))


def freeze(name: str, key: str) -> Protocol[str]:
    """Write a list of ranks under `key`, where it stays as it is. The first caller decides for all."""
    return str((yield CompareSet(key, " ".join(map(str, sorted((yield from listed(name))))) or "none")))


def ranks_of(frozen: str) -> frozenset[int]:
    """Return the ranks of a frozen list."""
    return frozenset() if frozen == "none" else frozenset(map(int, frozen.split()))


def listed(name: str) -> Protocol[frozenset[int]]:
    """Return the ranks of a list. The place of a writer that was killed stays empty."""
    count = yield Add(name, 0)
    ranks = yield Read(tuple(f"{name}/{position}" for position in range(1, count + 1)))
    return frozenset(int(rank) for rank in ranks if rank is not None)


def _agree(keys: Keys, seat: Seat, limits: WaitLimits) -> Protocol[frozenset[int]]:
    """Meet all ranks at the end of an iteration. Return the terminated ranks. Raises: BarrierTimeout.

    One rank reads the list of all terminated ranks, the others get the result."""
    if (yield from arrive(keys.end, seat.rank, seat.world_size)):
        frozen = yield from _freeze(keys)
    else:
        yield from _await_all(keys.frozen, keys.end, seat.rank, seat.world_size, limits.barrier)
        (frozen,) = yield Read((keys.frozen,))
    return ranks_of(frozen)


def terminated_of(seat: Seat, limit: float) -> Protocol[frozenset[int] | None]:
    """Return the ranks that were terminated in an iteration that this rank has left, None if the others have not agreed
    on them within `limit` seconds."""
    keys = Keys(seat.iteration)
    if not (yield Await(keys.frozen, limit)):
        return None
    (frozen,) = yield Read((keys.frozen,))
    return ranks_of(frozen)


def _freeze(keys: Keys) -> Protocol[str]:
    """Decide which ranks are terminated, once all ranks have arrived at the end."""
    return (yield from freeze(keys.terminated, keys.frozen))


def leave(seat: Seat, limits: WaitLimits, record: str, *, has_waited: bool = False) -> Protocol[str]:
    """Represent this rank itself, which leaves with an exception. That may have landed before the rank had published
    its seat, and a rank whose assignment failed learns the next world from the seats of the others. See `stand_in`."""
    yield Set(seat_key(seat.initial_rank), to_json_text(seat))
    return (yield from stand_in(seat, limits, record, has_waited=has_waited))


def stand_in(seat: Seat, limits: WaitLimits, record: str, *, has_waited: bool = False) -> Protocol[str]:
    """Represent a dead or leaving rank until the others have agreed to continue without it.

    has_waited: the rank leaves because it has waited for the others in vain, so it does not wait for them again.

    Starts from the last seat that the rank published and completes the rank's unfinished operations. If the rank died
    after the others had agreed to include it, the stand-in follows them into the next iteration and interrupts that
    one. Returns "excluded", "completed" (the call was over) or "discarded" (the rank had no seat anyway).
    Raises: BarrierTimeout if the others do not pass the end barrier either."""
    while True:
        keys = Keys(seat.iteration)
        if not (yield Check((keys.frozen,))):
            if (yield from report(keys, record, seat.initial_rank)) == COMPLETED:
                yield from arrive(keys.exit, seat.rank, seat.world_size)
                return COMPLETED
            yield from arrive(keys.start, seat.rank, seat.world_size, str(seat.initial_rank))
            yield from arrive(keys.last_call, seat.rank, seat.world_size)
            yield from mark_terminated(keys, seat.rank)
            if has_waited and not (yield from arrive(keys.end, seat.rank, seat.world_size)):
                return "excluded"  # the rank that completes the end barrier later reads the mark
        terminated = yield from _agree(keys, seat, limits)
        if seat.rank in terminated:
            return "excluded"
        following: Seat | Unassigned | None = yield Assign(seat, terminated)
        if following is None:
            yield from discard(seat, terminated)
        if isinstance(following, Unassigned):
            place = yield from _place_left(seat, terminated, following.initial_world_size, limits.barrier)
            following = None if place is None else (yield Assign(seat, terminated, place))
        if following is None:
            return "discarded"
        seat = following
        yield Set(seat_key(seat.initial_rank), to_json_text(seat))


def discard(seat: Seat, terminated: frozenset[int]) -> Protocol[None]:
    """Note that a rank gets no seat after this one. `_place_left` needs this."""
    if seat.rank not in terminated:
        yield Set(f"{Keys(seat.iteration + 1).discarded}/{seat.initial_rank}", "1")


def unassigned_after(iteration: int) -> Protocol[frozenset[int]]:
    """Return the ranks of an iteration whose assignment after it is known to have failed."""
    return (yield from listed(Keys(iteration + 1).unassigned_ranks))


def _place_left(seat: Seat, terminated: frozenset[int], initial_world_size: int, limit: float) -> Protocol[Seat | None]:
    """Find the place in the next iteration that the others leave to a rank whose assignment failed.

    Each other rank arrives at its place in the start barrier, or notes that it gets no place. Once this is known of all
    other ranks, the places without a rank are left for those whose assignment failed, and each of these claims one.
    Return None if no place is left: the assignment would have discarded the rank. This polls, because waiting for a
    counter would cost each rank an operation in each iteration, and an assignment rarely raises.
    Raises: BarrierTimeout if the others do not arrive within `limit` seconds."""
    keys = Keys(seat.iteration + 1)
    yield Set(f"{keys.unassigned}/{seat.initial_rank}", "1")
    yield from enlist(keys.unassigned_ranks, seat.rank)
    for _ in range(int(limit / LOOK_AGAIN)):
        unassigned = yield from numbered(keys.unassigned, initial_world_size)
        discarded = yield from numbered(keys.discarded, initial_world_size)
        known = unassigned.keys() | discarded.keys()
        if len(known) + len(terminated) >= seat.world_size:
            return None  # no rank has a seat
        published = yield from _published(initial_world_size)
        seats = {rank: other for rank, other in published.items() if other.iteration == keys.iteration}
        if not seats and any(other.iteration > keys.iteration for other in published.values()):
            return None  # that iteration has begun, so no place was left
        if seats:
            world = next(iter(seats.values()))
            arrived = yield from numbered(f"{keys.start}/0", world.world_size)
            known |= seats.keys() | set(map(int, arrived.values()))
            if len(known) + len(terminated) >= seat.world_size:
                claims = yield from numbered(keys.claim, world.world_size)
                taken = {other.rank for other in seats.values()} | arrived.keys() | claims.keys()
                missing = [rank for rank in range(world.world_size) if rank not in taken]
                rank = yield from _claim(keys, seat.initial_rank, claims, missing)
                if rank is None:
                    return None
                return msgspec.structs.replace(world, initial_rank=seat.initial_rank, rank=rank)
        yield Await(f"{keys.start}/done", LOOK_AGAIN)
    raise BarrierTimeout(
        f"the rank assignment failed on initial rank {seat.initial_rank}, and the other ranks did not arrive at the "
        f"next iteration within {limit:g} s",
        rank=seat.rank,
        rendezvous_count=seat.world_size,
        group_name=keys.start,
        limit=limit,
    )


def _published(initial_world_size: int) -> Protocol[dict[int, Seat]]:
    """Return the seats that ranks have published last, by initial rank."""
    texts = yield from numbered(SEATS, initial_world_size)
    return {initial_rank: from_json(text, Seat) for initial_rank, text in texts.items()}


def _claim(keys: Keys, initial_rank: int, claims: Mapping[int, str], missing: Sequence[int]) -> Protocol[int | None]:
    """Claim a missing place, or return the one that was claimed before; None if other ranks have claimed them all."""
    own = str(initial_rank)
    for rank in (*(rank for rank, owner in claims.items() if owner == own), *missing):
        if (yield CompareSet(f"{keys.claim}/{rank}", own)) == own:
            return rank
    return None
