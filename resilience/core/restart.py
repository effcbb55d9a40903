"""How does this rank come back?  The restart protocol, one store operation at a time.

Each rank of an iteration runs `iterate`; a dead or leaving rank is represented by `stand_in`, run by
its monitor, by a sibling's monitor, or by itself on its way out. Both are generators that *yield*
what is to be done (an operation on the shared store, or `Run` of a stage of the wrapped call) and are
*sent* the result, so the same code runs against a real store (`adapters.store.drive`) and under the
virtual clock of `testing.cluster`, which may stop any rank between any two operations.

What makes it safe to be killed anywhere:
- every write is idempotent, so whoever stands in for a dead rank simply repeats it;
- one key, `outcome`, decides each iteration by compare-and-set: completed or interrupted, never both;
- who goes on is frozen by compare-and-set by whoever completes the end barrier; a rank that dies later
  than that is a member of the next iteration, and its stand-in interrupts that one.

The protocol knows ranks, counts and keys. It knows nothing of exceptions, process groups or clocks:
`inprocess.call` runs the stages, the driver enforces the limits of `Await`."""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, TypeVar

import msgspec

from resilience.core.attribution import FaultOrigin, missed_completion
from resilience.core.encoding import to_json_text
from resilience.errors import BarrierOverflow, BarrierTimeout

T = TypeVar("T")

COMPLETED = "completed"
INTERRUPTED = "interrupted"
NO_SERVER = "none"  # in place of an address: the iteration was interrupted before its store was published
BLOCK = 32  # arrivals looked at together: bounds the bytes of one barrier operation at any world size


# -- what a protocol asks for ------------------------------------------------------------------


class Set(msgspec.Struct, frozen=True):
    """Write `value` under `key`."""

    key: str
    value: str


class Add(msgspec.Struct, frozen=True):
    """Add `amount` to the integer under `key` (0 where absent); answers the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True):
    """Write `value` under `key` only if `key` is absent; answers the value that is there afterwards."""

    key: str
    value: str


class Check(msgspec.Struct, frozen=True):
    """Answer whether every key is present."""

    keys: tuple[str, ...]


class Read(msgspec.Struct, frozen=True):
    """Answer the values of `keys`, None for an absent one. Does not wait."""

    keys: tuple[str, ...]


class Await(msgspec.Struct, frozen=True):
    """Wait until `key` is present, at most `limit` seconds; answers whether it is."""

    key: str
    limit: float


class Stage(Enum):
    """A stage of the wrapped call that the shell runs on behalf of the protocol."""

    INITIALIZE = "initialize"
    CHECK_BEFORE = "health_check"
    FUNCTION = "run"
    RESERVE = "reserve"  # an inactive rank waits until the iteration is decided
    ABORT = "abort"  # wait until this rank's groups are cut and its function has been left
    FINALIZE = "finalize"
    CHECK_AFTER = "check"
    COLLECT = "collect"  # free what the interrupted iteration has left in memory


class Run(msgspec.Struct, frozen=True):
    """Run a stage; answers a `Result`."""

    stage: Stage


class Settle(msgspec.Struct, frozen=True):
    """Tell the shell whose fault this rank's failure is, which was not known when it failed."""

    origin: FaultOrigin


class Assign(msgspec.Struct, frozen=True):
    """Find this rank's seat in the next iteration; answers a `Seat`, or None if it gets none."""

    seat: Seat
    terminated: frozenset[int]


Operation = Set | Add | CompareSet | Check | Read | Await | Run | Settle | Assign
Protocol = Generator[Operation, Any, T]


# -- values ------------------------------------------------------------------------------------


class Seat(msgspec.Struct, frozen=True):
    """Where a rank sits in one iteration. Ranks are 0 … world_size-1; the first active_world_size
    of them are active. `initial_rank` names the rank for the whole call."""

    initial_rank: int
    rank: int
    world_size: int
    active_world_size: int
    iteration: int

    @property
    def is_active(self) -> bool:
        return self.rank < self.active_world_size


class Limits(msgspec.Struct, frozen=True):
    """How long a rank waits for the others, in seconds."""

    barrier: float = 120.0
    completion: float = 120.0
    last_call: float = 1.0


class End(Enum):
    """How a stage ended."""

    RETURNED = "returned"
    INTERRUPTED = "interrupted"  # because the iteration's outcome was already decided
    FAILED = "failed"  # an Exception: all ranks restart
    FATAL = "fatal"  # a BaseException, or a hook that excludes its rank: this rank leaves


class Result(msgspec.Struct, frozen=True):
    """What the shell answers to `Run`. `report` is the encoded interruption record of a failure, `origin` whose fault
    it is as far as the rank knows by itself."""

    end: End
    report: str = ""
    origin: FaultOrigin = "own"


class Ending(msgspec.Struct, frozen=True):
    """How a rank's iteration ended."""

    outcome: str  # COMPLETED, INTERRUPTED, or "left": this rank does not go on
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


def seat_key(initial_rank: int) -> str:
    """Where a rank publishes its seat before it takes part in an iteration."""
    return f"seat/{initial_rank}"


# -- barriers ----------------------------------------------------------------------------------


def arrive(name: str, rank: int, count: int) -> Protocol[bool]:
    """Note that `rank` of `count` has arrived; answers whether it completed the barrier.

    Idempotent: arriving again, or for somebody else, changes nothing. Arrivals are gathered in blocks,
    and whoever completes a block arrives for it one level up, so that no operation touches more than
    BLOCK keys.
    Raises: BarrierOverflow if rank is not below count."""
    if not 0 <= rank < count:
        raise BarrierOverflow(
            f"rank {rank} reached barrier {name!r}, which was made for {count} ranks (0 to {count - 1}); "
            "every participant must pass the same rendezvous_count and its own current rank",
            rank=rank,
            rendezvous_count=count,
            group_name=name,
        )
    level = 0
    while count > 1:
        yield Set(f"{name}/{level}/{rank}", "1")
        first = rank - rank % BLOCK
        block = range(first, min(first + BLOCK, count))
        if not (yield Check(tuple(f"{name}/{level}/{other}" for other in block))):
            return False
        rank, count, level = rank // BLOCK, -(-count // BLOCK), level + 1
    yield Set(f"{name}/done", "1")
    return True


def barrier(name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """Wait until all `count` ranks have arrived, at most `limit` seconds.

    Raises: BarrierTimeout, BarrierOverflow."""
    if not (yield from arrive(name, rank, count)):
        yield from _await_all(f"{name}/done", name, rank, count, limit)


def _await_all(key: str, name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """Wait for the key that is written when all have arrived. Raises: BarrierTimeout."""
    if not (yield Await(key, limit)):
        raise BarrierTimeout(
            f"rank {rank} waited {limit:g} s in barrier {name!r} and not all {count} ranks arrived; "
            "a rank is missing that nobody has reported dead. Raise barrier_timeout if ranks may "
            "legitimately be this far apart",
            rank=rank,
            rendezvous_count=count,
            group_name=name,
            limit=limit,
        )


def witness(at: Keys, rank: int, world_size: int, limit: float) -> Protocol[bool]:
    """Note that it is on record where `rank` is, and wait until that holds for all ranks, at most `limit` seconds;
    answers whether it does."""
    if (yield from arrive(at.witnessed, rank, world_size)):
        return True
    return bool((yield Await(f"{at.witnessed}/done", limit)))


def unwitnessed(at: Keys, world_size: int) -> Protocol[list[int]]:
    """Return the ranks of which it is not on record where they are."""
    missing: list[int] = []
    for first in range(0, world_size, BLOCK):
        ranks = range(first, min(first + BLOCK, world_size))
        marks = yield Read(tuple(f"{at.witnessed}/0/{rank}" for rank in ranks))
        missing += [rank for rank, mark in zip(ranks, marks, strict=True) if mark is None]
    return missing


# -- one iteration of a live rank --------------------------------------------------------------

ENTRY = -1  # the iteration before the first: ranks only meet in it, at its end barrier


def enter(seat: Seat, limits: Limits) -> Protocol[Ending]:
    """Meet all ranks at the call of the function. `seat` is that of iteration ENTRY.

    A rank that dies before everybody has come is excluded like any other, by its stand-in."""
    at = Keys(seat.iteration)
    return Ending(INTERRUPTED, (yield from _agree(at, seat, limits)))


def iterate(seat: Seat, limits: Limits) -> Protocol[Ending]:
    """Take part in one iteration, from the start barrier to the agreement on who goes on."""
    at = Keys(seat.iteration)
    yield Set(seat_key(seat.initial_rank), to_json_text(seat))
    yield from barrier(at.start, seat.rank, seat.world_size, limits.barrier)
    result = yield from _work(seat)
    if result.end is End.RETURNED and (yield from _complete(at, seat, limits)) == COMPLETED:
        return Ending(COMPLETED)
    if result.end in (End.FAILED, End.FATAL) and (yield from _report_failure(at, result)) == COMPLETED:
        # A spare failed when all active ranks had already returned: the call is over, nobody restarts.
        if result.end is End.FAILED:
            return Ending(COMPLETED)
        yield from arrive(at.exit, seat.rank, seat.world_size)
        return Ending(LEFT)
    yield Run(Stage.ABORT)
    yield from arrive(at.last_call, seat.rank, seat.world_size)
    # One that leaves waits too: the end of its connections must not overtake the others' own cuts.
    all_answered = yield Await(f"{at.last_call}/done", limits.last_call)
    if result.origin == "communication":
        yield Settle((yield from _settle(at, result.report, all_answered)))
    if result.end is not End.FATAL:
        result = yield from _recover()
        if result.end is not End.RETURNED:
            yield from report(at, result.report)
    is_leaving = result.end is not End.RETURNED
    if is_leaving:
        yield from _mark_terminated(at, seat.rank)
        if (yield from arrive(at.end, seat.rank, seat.world_size)):
            yield from _freeze(at)
        return Ending(LEFT)
    return Ending(INTERRUPTED, (yield from _agree(at, seat, limits)))


def depart(seat: Seat, limits: Limits, is_critical: bool) -> Protocol[None]:
    """Leave a completed call. A rank whose process holds the store leaves last, or after the barrier's limit."""
    name = Keys(seat.iteration).exit
    yield from arrive(name, seat.rank, seat.world_size)
    if is_critical:
        yield Await(f"{name}/done", limits.barrier)


def _work(seat: Seat) -> Protocol[Result]:
    """Prepare and run the function; the first stage that does not return ends it."""
    result = Result(End.RETURNED)
    for stage in (
        Stage.INITIALIZE,
        Stage.CHECK_BEFORE,
        Stage.FUNCTION if seat.is_active else Stage.RESERVE,
    ):
        result = yield Run(stage)
        if result.end is not End.RETURNED:
            break
    return result


def _complete(at: Keys, seat: Seat, limits: Limits) -> Protocol[str]:
    """Wait until the iteration is decided. The last active rank to arrive decides it as completed,
    unless an interruption was faster."""
    if seat.is_active and (yield from arrive(at.completion, seat.rank, seat.active_world_size)):
        yield CompareSet(at.outcome, COMPLETED)
    if not (yield Await(at.outcome, limits.completion)):
        yield from report(at, missed_completion(seat, limits.completion), is_own=False)
    (decided,) = yield Read((at.outcome,))
    return str(decided)


def _recover() -> Protocol[Result]:
    """Run the user's hooks between two iterations, then free memory; the first that fails excludes this rank."""
    result = Result(End.RETURNED)
    for stage in (Stage.FINALIZE, Stage.CHECK_AFTER, Stage.COLLECT):
        result = yield Run(stage)
        if result.end is not End.RETURNED:
            break
    return result


# -- interruptions and the next world ----------------------------------------------------------


def report(at: Keys, record: str, is_own: bool = True) -> Protocol[str]:
    """Put an interruption record into the store and decide the iteration as interrupted.

    Answers what the iteration was decided as: COMPLETED if success came first. The order of arrival
    comes from the store, never from a clock. is_own: the record is of a fault of its rank's own, which clears every
    rank that has only an error of a communication call."""
    position = yield Add(at.records, 1)
    yield Set(f"{at.records}/{position}", record)
    if is_own:
        yield Set(at.fault, "1")
    outcome = str((yield CompareSet(at.outcome, INTERRUPTED)))
    yield CompareSet(at.server, NO_SERVER)  # wakes ranks that wait for the address of the iteration's store
    return outcome


def _report_failure(at: Keys, result: Result) -> Protocol[str]:
    return (yield from report(at, result.report, result.origin == "own"))


def _settle(at: Keys, record: str, all_answered: bool) -> Protocol[FaultOrigin]:
    """Return whose fault an error is that left a communication call, now that the last call is over.

    It is the rank's own only if no rank has a fault of its own, none is missing, and it arrived first. Every rank that
    answered the last call has reported its fault before, and so has the stand-in of a dead one."""
    fault, first = yield Read((at.fault, f"{at.records}/1"))
    return "own" if all_answered and fault is None and first == record else "consequence"


def arrival_in(operation: Operation) -> int | None:
    """Return the iteration in which an operation gives an interruption record its place, None if it does not."""
    if isinstance(operation, Add) and operation.key.endswith("/records"):
        return int(operation.key.partition("/")[0])
    return None


def _mark_terminated(at: Keys, rank: int) -> Protocol[None]:
    """List a rank as not going on. Must precede its arrival at the end barrier."""
    position = yield Add(at.terminated, 1)
    yield Set(f"{at.terminated}/{position}", str(rank))


def _agree(at: Keys, seat: Seat, limits: Limits) -> Protocol[frozenset[int]]:
    """Meet all ranks at the end of an iteration; answers those of them that do not go on. Raises: BarrierTimeout.

    One rank reads the list of all terminated, the others get the result."""
    if (yield from arrive(at.end, seat.rank, seat.world_size)):
        frozen = yield from _freeze(at)
    else:
        yield from _await_all(at.frozen, at.end, seat.rank, seat.world_size, limits.barrier)
        (frozen,) = yield Read((at.frozen,))
    return _ranks(frozen)


def _ranks(frozen: str) -> frozenset[int]:
    return frozenset() if frozen == "none" else frozenset(map(int, frozen.split()))


def terminated_of(seat: Seat, limit: float) -> Protocol[frozenset[int] | None]:
    """Return the ranks that do not go on after the iteration of a rank that has left it, None if the others have not
    agreed on them within `limit` seconds."""
    at = Keys(seat.iteration)
    if not (yield Await(at.frozen, limit)):
        return None
    (frozen,) = yield Read((at.frozen,))
    return _ranks(frozen)


def _freeze(at: Keys) -> Protocol[str]:
    """Decide who does not go on, once all have arrived at the end; whoever asks first decides for all."""
    count = yield Add(at.terminated, 0)
    listed = yield Read(tuple(f"{at.terminated}/{position}" for position in range(1, count + 1)))
    ranks = sorted({int(rank) for rank in listed if rank is not None})
    return str((yield CompareSet(at.frozen, " ".join(map(str, ranks)) or "none")))


def stand_in(seat: Seat, limits: Limits, record: str) -> Protocol[str]:
    """Represent a rank that is dead or leaving until the others have agreed to go on without it.

    Starts from the last seat that the rank published and does what the rank may have left undone. If
    the rank died after the others had agreed to take it along, it follows them into the next iteration
    and interrupts that one. Answers "excluded", "completed" (the call was over) or "discarded" (it had
    no seat anyway).
    Raises: BarrierTimeout if the others do not get through the end barrier either."""
    while True:
        at = Keys(seat.iteration)
        if not (yield Check((at.frozen,))):
            if (yield from report(at, record)) == COMPLETED:
                yield from arrive(at.exit, seat.rank, seat.world_size)
                return COMPLETED
            for name in (at.start, at.last_call):
                yield from arrive(name, seat.rank, seat.world_size)
            yield from _mark_terminated(at, seat.rank)
        terminated = yield from _agree(at, seat, limits)
        if seat.rank in terminated:
            return "excluded"
        following: Seat | None = yield Assign(seat, terminated)
        if following is None:
            return "discarded"
        seat = following
