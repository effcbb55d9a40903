"""What do hooks see and change through `state.store`?  The StoreMixin's methods, backed by the restart protocol's keys.

The protocol (`core.restart`) has its own keys. Hooks have a part of the store for themselves, for barriers and for the
keys that they set. The records of interruptions, the terminated ranks and the initial ranks are read from the
protocol's keys, and what a hook reports is written to them. A method that would have no effect raises an error that
says what to write instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch.distributed as dist

from resilience.core import restart
from resilience.core.restart import ENTRY, Add, Check, Keys, Read, seat_key
from resilience.errors import ConfigurationError, StoreError
from resilience.facts import encoding, events
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord, decode, encode
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.operations import note_arrival
from resilience.inprocess.store import PrefixStore, StoreMixin
from resilience.system.store import StoreLike, drive, execute

_RANKS = "rank_assignment and rank_filter decide which rank gets which place"
_LEFT = "state.world_size is the number of ranks that take part, and state.initial_world_size that at the call"
_MONITORS = "the ranks' monitors watch them; write state.store.get_interruption_records()"
_NOT_HERE = {
    "lock_interruption_records": "records are complete once finalize runs: the last call is over then",
    "reentrant_barrier": "write barrier: arriving again changes nothing",
    "is_rank_at_reentrant_barrier": "write barrier: arriving again changes nothing",
    "send_heartbeat": _MONITORS,
    "get_heartbeat": _MONITORS,
    "get_all_heartbeats": _MONITORS,
}


def _refused(name: str, instead: str) -> Any:
    """Return a method that raises ConfigurationError, because it would have no effect, or always the same answer."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ConfigurationError(f"{name} has no meaning in {type(self).__name__}: {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Raises: ConfigurationError. Instead: {instead}."
    return refuse


def _in_iteration(name: str) -> Any:
    return _refused(name, f"it belongs to one iteration; write state.store.{name}, without base_store")


class _SaysInstead:
    """Says what to write in place of the compatible API's names that are not here."""

    def __getattr__(self, name: str) -> Any:
        instead = f"; {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{instead}", name=name, obj=self)


class CallStore(_SaysInstead, dist.PrefixStore, StoreMixin):
    """The part of the job's store that the hooks of one call share: `state.store.base_store`.

    prefix: of the protocol's keys in `base`. emit: takes the events of a hook's report."""

    def __init__(self, prefix: str, base: Any, emit: Callable[..., None]) -> None:
        super().__init__(f"{prefix}hooks", base)
        self.protocol: StoreLike = dist.PrefixStore(prefix, base)
        self.emit = emit
        self._critical_ranks = tuple(getattr(base, "critical_ranks", ()))

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Initial ranks whose processes must leave last, because the store ends with them. None with the Wrapper's
        TCPStore: rank 0's monitor hosts it."""
        return self._critical_ranks

    set_initial_rank = _refused("set_initial_rank", _RANKS)
    record_base_terminated_rank = _refused("record_base_terminated_rank", _LEFT)
    get_base_terminated_count = _refused("get_base_terminated_count", _LEFT)
    get_initial_rank = _in_iteration("get_initial_rank")
    record_interrupted = _in_iteration("record_interrupted")
    get_interruption_records = _in_iteration("get_interruption_records")
    record_completed = _in_iteration("record_completed")
    is_any_rank_completed = _in_iteration("is_any_rank_completed")
    record_terminated_rank = _in_iteration("record_terminated_rank")
    get_terminated_ranks = _in_iteration("get_terminated_ranks")


class IterationStore(_SaysInstead, PrefixStore):
    """The present iteration's store, as hooks get it in `state.store`. Ranks are those of the iteration, as in
    `state.rank`, unless they are called initial ranks. Keys and barriers of hooks are separate from the Wrapper's.
    `base_store` is the part for the whole call: its keys and barriers, and `critical_ranks`.

    seat: the rank's place in the iteration. During the first rank assignment, the iteration is the entry of the call.
    Raises: StoreError, from every method, if the store does not answer; ConfigurationError."""

    base_store: CallStore

    def __init__(self, seat: Seat, call_store: CallStore) -> None:
        super().__init__(seat.iteration, call_store)
        self._seat = seat
        self._keys = Keys(seat.iteration)

    @property
    def seat(self) -> Seat:
        """This rank's place in the iteration. An assignment or a filter leaves it as it was before."""
        return self._seat

    def get_initial_rank(self, rank: int) -> int:
        """Return the initial rank of a rank of this iteration. Does not wait."""
        self._check(rank)
        seat = self._seat
        if rank == seat.rank:
            return seat.initial_rank
        if seat.iteration == ENTRY:
            return rank
        (initial_rank,) = self._ask(Read((self._keys.holder(rank),)))
        if initial_rank is None:
            raise StoreError(f"rank {rank} has not arrived at the start of this iteration", rank=rank)
        return int(initial_rank)

    set_initial_rank = _refused("set_initial_rank", _RANKS)

    def record_interrupted(self, record: InterruptionRecord | Iterable[InterruptionRecord] | None = None) -> None:
        """Restart all ranks, and record why: one record, several, or none. `rank` of each is a rank of this iteration.
        No effect on an iteration that has completed. Call it at the latest in the health check after a fault."""
        if self._have_ranks_agreed():
            raise ConfigurationError(
                "it is too late to interrupt this iteration: the ranks have agreed which of them continue; raise an "
                "exception in the hook instead"
            )
        if record is None:
            message = "state.store.record_interrupted was called without a record"
            record = InterruptionRecord(self._seat.rank, Interruption.EXCEPTION, message)
        for interruption in [record] if isinstance(record, InterruptionRecord) else record:
            self._interrupt(interruption)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return why this iteration was interrupted, in order of arrival. `rank` is a rank of this iteration."""
        return [self._in_present_ranks(decode(text)) for text in self._listed(self._keys.records)]

    def is_any_rank_iterrupted(self) -> bool:
        """Return True if this iteration has an interruption record. The spelling is the compatible API's."""
        return bool(self._ask(Add(self._keys.records, 0)))

    record_completed = _refused("record_completed", "return from the wrapped function")

    def is_any_rank_completed(self) -> bool:
        """Return True if the wrapped function has returned on any rank of this iteration."""
        return bool(self._ask(Check((self._keys.returned,))))

    def record_terminated_rank(self, rank: int) -> None:
        """Exclude a rank from the next iteration, if this one is interrupted: the rank assignment gets it as
        terminated. Repeating it changes nothing. Call it at the latest in the health check after the fault."""
        self._check(rank)
        if self._have_ranks_agreed():
            raise ConfigurationError(
                f"it is too late to terminate rank {rank}: the ranks have agreed which of them continue; "
                "call record_terminated_rank in the function, finalize or health_check, or return the rank from the "
                "rank_assignment"
            )
        drive(restart.mark_terminated(self._keys, rank), self.base_store.protocol)

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks of this iteration that do not continue, as far as they are known."""
        return {int(text) for text in self._listed(self._keys.terminated)}

    record_base_terminated_rank = _refused("record_base_terminated_rank", _LEFT)
    get_base_terminated_count = _refused("get_base_terminated_count", _LEFT)

    def _have_ranks_agreed(self) -> bool:
        return bool(self._ask(Check((self._keys.frozen,))))

    def _check(self, rank: int) -> None:
        last = self._seat.world_size - 1
        if not isinstance(rank, int) or not 0 <= rank <= last:
            raise ConfigurationError(f"there is no rank {rank!r} in this iteration, which has the ranks 0 to {last}")

    def _ask(self, operation: restart.Operation) -> Any:
        return execute(operation, self.base_store.protocol)

    def _listed(self, name: str) -> list[str]:
        count = self._ask(Add(name, 0))
        texts = self._ask(Read(tuple(f"{name}/{position}" for position in range(1, count + 1))))
        return [text for text in texts if text is not None]  # a place whose writer was killed stays empty

    def _in_present_ranks(self, record: InterruptionRecord) -> InterruptionRecord:
        rank = record.active_rank
        if rank is None:
            (text,) = self._ask(Read((seat_key(record.rank),)))
            seat = None if text is None else encoding.from_json(text, Seat)
            rank = seat.rank if seat is not None and seat.iteration == self._seat.iteration else record.rank
        return msgspec.structs.replace(record, rank=rank)

    def _interrupt(self, reported: InterruptionRecord) -> None:
        from resilience.attribution.symptoms import symptom  # only a rank that reports needs it

        store, emit = self.base_store.protocol, self.base_store.emit
        record: InterruptionRecord = msgspec.structs.replace(
            reported,
            rank=self.get_initial_rank(reported.rank),
            active_rank=reported.rank,
            iteration=self._seat.iteration,
            message=reported.message or f"reported by rank {self._seat.rank} through state.store.record_interrupted",
            detector=reported.detector or Detector("record_interrupted"),
            detected_wall_ns=reported.detected_wall_ns or time.time_ns(),
        )
        emit(events.RankInterrupted(record))
        fault_of = record.rank if symptom(record).is_own else None
        protocol = restart.report(self._keys, encode(record), fault_of)
        drive(protocol, store, lambda operation: note_arrival(operation, store, record, emit))
