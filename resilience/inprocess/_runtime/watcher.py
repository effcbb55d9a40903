"""Is this iteration decided, and is the main thread free?  One thread per iteration.

The watcher waits for the iteration's `outcome` key with its own store client. If the outcome is an interruption, the
watcher is in charge until the main thread has left the wrapped function. It runs the abort hook once (never inside
`atomic()`), then interrupts the main thread and cuts what it waits for, again and again with growing pauses. If the
main thread cannot be freed (`core.ladder`), the monitor takes over: it takes evidence and ends the process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from resilience.core.ladder import Ladder, look
from resilience.core.restart import COMPLETED, Keys, Read, witness
from resilience.core.watch import EVIDENCE
from resilience.errors import StoreError, error_in_words
from resilience.facts.events import (
    AbortCut,
    AbortDelayed,
    AbortFailed,
    AbortGroup,
    AbortStuck,
    AnyEvent,
    InterruptDelivered,
    IterationDecided,
    Outcome,
    StageEnded,
    StageStarted,
)
from resilience.facts.interruptions import (
    HANGS,
    Frame,
    Interruption,
    InterruptionRecord,
    ProgramPosition,
    decode,
    load_decoder,
)
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import failure
from resilience.inprocess.state import Status
from resilience.system import (
    call_with_timeout,
    collective_calls,
    collectives,
    gloo_timeouts,
    group_aborts,
    places,
    processes,
    store_constructor,
)
from resilience.system.environment import nvls_may_be_used
from resilience.system.patience import Patience, bounded
from resilience.system.store import StoreLike, drive, execute, wait

if TYPE_CHECKING:
    from resilience.inprocess.abort import Abort
    from resilience.inprocess.state import State
    from resilience.system.interrupt import Interrupter

END_LIMIT = 2.0  # seconds for a call's last watcher to end; its iteration is decided, so it needs almost none
LOST = "lost"  # the outcome of an iteration whose store is gone
OUTCOME_WAIT = timedelta(days=1).total_seconds()  # of one wait for the outcome; an iteration may take many
CUT_AGAIN = (0.01, 0.03, 0.1, 0.3, 1.0)  # pauses between cuts: with shorter ones, peers would keep retrying
NVLS_NOTE = "NCCL may use NVLink SHARP, whose groups cannot be aborted; set NCCL_NVLS_ENABLE=0"
ALONE_AFTER = 0.1  # seconds after which no peer still connects to a group under construction


class IterationWatcher:
    """Watches one iteration for one rank. The main thread owns it: starts it, reports that it has left the
    function, and joins it."""

    def __init__(
        self,
        store: StoreLike,
        seat: Seat,
        state: Callable[[], State],
        abort: Abort | None,
        interrupter: Interrupter,
        position: Callable[[], ProgramPosition],
        emit: Callable[..., None],
        *,
        patience: Patience,
        abort_wait: float,
        abort_limit: float,
    ) -> None:
        self._store = store
        self._patience = patience
        self._seat = seat
        self._keys = Keys(seat.iteration)
        self._state = state
        self._abort = abort
        self._interrupter = interrupter
        self._position = position
        self._emit: Callable[[AnyEvent], None] = emit
        self._abort_wait = abort_wait
        self._abort_limit = abort_limit
        self._has_left = threading.Event()
        self._main = threading.main_thread().ident or 0
        self.decided = threading.Event()
        self.outcome: str | None = None
        self.error: StoreError | None = None
        self.decided_at = 0.0  # monotonic seconds
        self.is_cutting = False  # once True, our own cut may have caused an error of the main thread
        self.freed_after_s = 0.0  # from the end of the abort until the main thread had left the function
        self.store_port: int | None = None  # of the iteration's own store, once known
        self._connected = collectives.listeners()  # listeners of an earlier iteration's groups need nothing
        self._thread = self._new_thread()

    def start(self) -> None:
        call_with_timeout.start(self._new_thread)

    def _new_thread(self) -> threading.Thread:
        name = f"resilience-watch-{self._seat.iteration}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # before it starts, for `join`
        return self._thread

    @property
    def is_interrupted(self) -> bool:
        return self.decided.is_set() and self.outcome != COMPLETED

    def left(self) -> None:
        """Note that the main thread has left the function and will not enter it again in this iteration."""
        self._has_left.set()

    def join(self, limit: float) -> bool:
        """Wait at most `limit` seconds until the watcher has ended; return True if it has."""
        if self._thread.is_alive():  # an exception may have kept it from being started
            self._thread.join(limit)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End with the call. A watcher that waits for an unresponsive store loses its connection."""
        self.left()
        if not self.join(END_LIMIT):
            self._patience.end()
            self.join(END_LIMIT)

    def _run(self) -> None:
        load_decoder()
        with bounded(self._patience):
            self._watch()

    def _watch(self) -> None:
        try:
            while not wait(self._store, self._keys.outcome, OUTCOME_WAIT, OUTCOME_WAIT):
                pass
            (outcome,) = execute(Read((self._keys.outcome,)), self._store)
            if outcome is None:
                raise StoreError(f"the store has lost the key {self._keys.outcome!r}, which it had just announced")
            self.outcome = outcome
        except Exception as error:  # the edge of a thread that the main thread waits for
            self.error = error if isinstance(error, StoreError) else _unreadable_outcome(error)
            self.outcome = LOST
        self.decided_at = time.monotonic()
        stack = () if self.outcome == COMPLETED else failure.stack_of(self._main)  # before anything changes
        waits_in = "" if self.outcome == COMPLETED else processes.waits_in(os.getpid())
        self.decided.set()
        if self.outcome != COMPLETED:
            self._attempt(partial(self._report_outcome, stack, waits_in))
            self._free_main_thread()

    def _report_outcome(self, stack: tuple[Frame, ...], waits_in: str) -> None:
        """Record what was decided and where the main thread was. After a hang, wait until all ranks have done so."""
        first = self._first_record()
        by, silent_for_s = (None, None) if first is None else (first.rank, first.silent_for_s)
        is_hang = first is not None and first.interruption in HANGS
        is_own = first is not None and (first.interruption is Interruption.TERMINATED or first.origin == "own")
        # Read here, not by the monitor: it may come late, when the abort has ended sections and collectives.
        process = None if silent_for_s is None else processes.since_start(os.getpid())
        if is_hang:
            collective_calls.note_recorded()
        step, sections, entered = self._position()
        self._emit(
            IterationDecided(
                *(by, stack, step, silent_for_s, sections, entered), waits_in=waits_in, is_own=is_own, process=process
            )
        )
        if is_hang:
            self._await_witnesses()

    def _first_record(self) -> InterruptionRecord | None:
        if self.outcome == LOST:
            return None
        try:
            (text,) = execute(Read((f"{self._keys.records}/1",)), self._store)
            return None if text is None else decode(text)
        except (StoreError, ValueError):
            return None  # only names the blamed rank in a log line; the record itself decides

    def _await_witnesses(self) -> None:
        """After a hang, let all ranks record their stacks before anything is cut, because a cut shows on all ranks."""
        left = max(0.0, self.decided_at + EVIDENCE - time.monotonic())
        try:
            drive(witness(self._keys, self._seat.rank, self._seat.world_size, left), self._store)
        except (StoreError, ValueError):
            return  # the restart does not depend on it

    def _free_main_thread(self) -> None:
        with self._interrupter.hold_off():  # blocks while the main thread is in atomic()
            began = time.monotonic()
            self._attempt(self._run_abort)
        signals = self._interrupt()
        self._attempt(self._abort_late_groups)
        duration_s, closed = time.monotonic() - began, gloo_timeouts.count()
        self._emit(InterruptDelivered(duration_s, signals, timed_out_groups=closed))

    def _attempt(self, part: Callable[[], object]) -> bool:
        """Run a part of the abort or of its report. The main thread is interrupted even if it raises: return False."""
        try:
            part()
            return True
        except BaseException as error:  # of a user's hook too, which may call sys.exit: recorded, never raised
            self._emit(AbortFailed(error_in_words(error)))
            return False

    def _run_abort(self) -> None:
        began = time.monotonic()
        self.is_cutting = True  # before the first cut
        # Groups under construction have no sockets of their own yet: they block in their store.
        store_connections = self._cut_store()
        state = self._state()
        state.status = Status.ABORTING
        if self._abort is not None:
            state.abort_begins(self._abort_wait)
            began_hook = time.monotonic()
            self._emit(StageStarted("abort_hook"))  # the page still shows the function: only this names the hook
            outcome: Outcome = "completed" if self._attempt(partial(self._abort, state)) else "failed"
            self._emit(StageEnded("abort_hook", outcome, time.monotonic() - began_hook))
        self._report_group_aborts()
        cut = collectives.last_cut()
        self._emit(
            AbortCut(
                sockets=cut.sockets,
                store_connections=store_connections,
                method=cut.method,
                duration_s=time.monotonic() - began,
            )
        )

    def _abort_late_groups(self) -> None:
        """Abort the groups created after the abort hook, and wait for them: nothing may be built or shut down
        meanwhile."""
        if self._abort is not None:
            group_aborts.abort_all(self._abort_wait)
            self._report_group_aborts()

    def _report_group_aborts(self) -> None:
        for done in group_aborts.last():
            note = NVLS_NOTE if "nccl" in done.backend and nvls_may_be_used() else ""
            self._emit(AbortGroup(done.group, done.backend, done.duration, done.outcome, done.error[:500], note))

    def _cut_store(self) -> int:
        ended = store_constructor.cut(places.awaited_port(places.place_of(self._main)))
        return ended if self.store_port is None else ended + collectives.cut_connections_to(self.store_port)

    def _interrupt(self) -> int:
        """Repeat interrupt and cut until the main thread has left the function. Return the number of signals sent."""
        began = time.monotonic()
        pauses = iter(CUT_AGAIN)
        cut_at = began + next(pauses)
        pause, signals = 0.0, 0
        is_delayed = is_stuck = False  # each is reported once
        ladder = Ladder(self._abort_limit)
        while not self._has_left.wait(pause):
            now = time.monotonic()
            ladder = self._look(ladder, now)
            if ladder.is_stuck and not is_stuck:
                is_stuck = True
                self._emit(AbortStuck(limit_s=self._abort_limit, where=self._where()))
            elif now - began > self._abort_limit and self._interrupter.is_armed and not (is_delayed or is_stuck):
                is_delayed = True
                self._emit(AbortDelayed(self._abort_limit, self._where(), self._awaited_store()))
            if self._interrupter.is_armed:  # else it is in a hook or a barrier, and notices the outcome itself
                self._interrupter.deliver()
                signals += 1
            pause = min(max(pause * 2, 0.001), 0.05)
            if self._abort is not None and now >= cut_at:
                self._attempt(partial(self._cut_again, now - began > ALONE_AFTER))
                cut_at = now + next(pauses, CUT_AGAIN[-1])
        self.freed_after_s = time.monotonic() - began
        return signals

    def _cut_again(self, is_alone: bool) -> None:
        """Cut what the main thread waits for now. is_alone: no peer still connects to a group that it builds."""
        collectives.cut_gloo_sockets()
        group_aborts.begin()  # user code may have built another group
        self._cut_store()
        if is_alone:
            gloo_timeouts.begin()
        if is_alone and places.is_in_process_groups(places.place_of(self._main)):
            self._connected = collectives.connect_in_place_of_peers(self._state().world_size, self._connected)

    def _look(self, ladder: Ladder, now: float) -> Ladder:
        """Update the ladder: is the main thread in a place that only a new process can free it from?"""
        place = places.place_of(self._main)
        if place is None or group_aborts.are_running() or not places.is_unfreeable(place, self.store_port):
            return look(ladder, None, False, now)
        process = processes.state(os.getpid())  # its state is that of the main thread
        return look(ladder, place, process is None or process.state == "S", now)

    def _where(self) -> str:
        place = places.place_of(self._main)
        return "" if place is None else place.where

    def _awaited_store(self) -> str:
        place = places.place_of(self._main)
        return "" if place is None else places.awaited_store(place)


def _unreadable_outcome(error: Exception) -> StoreError:
    return StoreError(
        f"the watcher could not learn how the iteration was decided: {error_in_words(error)}; "
        "this rank leaves the call, the other ranks continue"
    )
