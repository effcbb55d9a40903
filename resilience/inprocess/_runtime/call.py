"""One call of a wrapped function.  Runs the stages that the restart protocol asks for.

`CallWrapper.run` joins the other ranks, then drives `core.restart.iterate` once per iteration. The protocol picks the
next stage; this module runs it (hooks, environment, function) and reports it. The `IterationWatcher` frees the main
thread; the `Session` holds monitor, page and store. A rank that leaves without completion records that, then raises.

An exception may land between any two bytecodes. So the rank says goodbye right after the last store operation that
other ranks may need. If a rank leaves the call without a goodbye, its monitor stands in for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import typing
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from resilience.core import restart
from resilience.core.observation import Doing
from resilience.core.restart import (
    COMPLETED,
    ENTRY,
    Assign,
    Await,
    Check,
    End,
    Ending,
    Keys,
    Result,
    RunStage,
    Settle,
    Stage,
    Unassigned,
    WaitLimits,
)
from resilience.errors import (
    BarrierTimeout,
    HealthCheckError,
    InternalError,
    LeftInChild,
    RankDiscarded,
    ResilienceError,
    StoreError,
    error_in_words,
)
from resilience.facts import events
from resilience.facts.events import StageName
from resilience.facts.interruptions import FaultOrigin, Interruption, InterruptionRecord, decode, encode
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import failure
from resilience.inprocess._runtime.assigning import assign, nobody_active, seat_after, seat_of
from resilience.inprocess._runtime.entry import check_alone, check_caller, inject, name_of
from resilience.inprocess._runtime.event_reporter import RankEvents
from resilience.inprocess._runtime.forked import here_only, left_by
from resilience.inprocess._runtime.operations import await_server, ensure_server, note_arrival
from resilience.inprocess._runtime.watcher import LOST, IterationWatcher
from resilience.inprocess.abort import abort_wait
from resilience.inprocess.hook_store import CallStore, IterationStore
from resilience.inprocess.initialize import prepared
from resilience.inprocess.state import State, Status
from resilience.system import collectives, garbage, group_aborts, group_shutdowns, store_constructor
from resilience.system.environment import keep_nccl_watchdog_from_raising, scoped_environment
from resilience.system.interrupt import Atomic, Interrupter
from resilience.system.store import drive, execute
from resilience.system.tcp_urls import meeting_at_own_store
from resilience.system.torch_modes import modes, restore

if TYPE_CHECKING:
    from resilience.inprocess._runtime.session import Session
    from resilience.inprocess.initialize import Initialize
    from resilience.inprocess.wrap import Wrapper

DROP_LIMIT = 1.0  # seconds to wait for process groups that are still being dropped; it takes 10 ms a device
HOST_LIMIT = (
    10.0  # seconds at most that rank 0 waits for its monitor to host the iteration's store; usually a millisecond
)

T = TypeVar("T")
_calls = itertools.count()


class CallWrapper:
    """One call of a wrapped function: the object that the function itself may use.

    The function receives it in every argument annotated `CallWrapper` or `Optional[CallWrapper]`."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._number: int
        self._state: State
        self._session: Session
        self._interrupter: Interrupter
        self._watcher: IterationWatcher
        self._reporter: RankEvents
        self._said_goodbye = False
        self._entered = 0  # the last iteration in which this rank's function, or its wait as a spare, began
        self._error: BaseException | None = None  # this rank's own failure in the present iteration
        self._failure_record: InterruptionRecord | None = None  # describes that failure
        self._origin: FaultOrigin = "own"  # of that failure, final when the last call is over
        self._unassigned_after: int | None = None  # the iteration after which this rank's own assignment failed
        self._value: Any = None
        self._function: Callable[[], Any]
        self._limits = WaitLimits(
            barrier=wrapper.barrier_timeout.total_seconds(),
            completion=wrapper.completion_timeout.total_seconds(),
            last_call=wrapper.last_call_wait.total_seconds(),
        )
        self._hook_limit = wrapper.hard_timeout.total_seconds()
        # No single wait may be so long that the watchdog takes the waiting rank for hung.
        slack = wrapper.soft_timeout - wrapper.progress_watchdog_interval
        self._chunk = max(0.05, slack.total_seconds() / 2)

    # -- for the wrapped function ---------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Number of the current start of the function in this call, counted from 0."""
        return self._state.iteration

    def ping(self) -> None:
        """Report progress. The first ping of an iteration arms the timeouts for the following ones."""
        self._session.page.ping()

    @property
    def state(self) -> State:
        """This rank's place in the present iteration: the object that the hooks get."""
        return self._state

    @property
    def store(self) -> CallStore:
        """The store with the keys and barriers of the whole call, for user code. It is closed when the call ends.
        `state.store` is the present iteration's store. Both use the restart protocol's connection, which performs one
        operation at a time: use them in the main thread, and bound each wait below `hard_timeout`."""
        return self._session.hook_store

    def atomic(self) -> Atomic:
        """Hold off abort and interruption while the body runs. Also a decorator. Reentrant. An interruption that
        arrives inside is delivered at the outermost end. Keep the body short: no restart happens meanwhile."""
        return self._interrupter.atomic()

    # -- the call -------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function` until all active ranks have completed; return this rank's value."""
        name, pid = name_of(function), os.getpid()  # noqa: F841  check_alone reads pid
        check_caller(name)
        positional, named = inject(function, CallWrapper, self, args, kwargs)
        self._modes = modes()
        self._outside = sys.exc_info()[1]
        self._function = lambda: function(*positional, **named)
        check_alone(name)
        try:
            value = left_by(lambda: self._run(name))
        except BaseException as error:
            try:
                self._call_deferred()
            except Exception as raised:  # must not replace a KeyboardInterrupt: it may be an error to retry
                failure.note_later(error, raised)
            raise
        self._call_deferred()
        return value

    def _call_deferred(self) -> None:
        """Call the program's signal handlers that were put off. Raises: what they raise."""
        if "_interrupter" in self.__dict__:
            self._interrupter.raise_deferred()

    def _run(self, name: str) -> Any:
        with garbage.postponed():
            from resilience.inprocess._runtime.session import (
                Session,  # imports what a monitor needs, so only a call loads it
            )

        garbage.freeze_once()  # before the fork: a collection in the rank then copies no page shared with its monitor
        self._state = State.from_environment()
        self._number = next(_calls)  # counts calls that begin, so not one that only this rank refuses
        with (
            scoped_environment(),
            meeting_at_own_store(),
            collectives.nothing_left(DROP_LIMIT),
            group_shutdowns.kept(self._wrapper.abort is not None, self._outside),
            Session.open(self._wrapper, name, self._number, self._state) as session,
        ):
            self._session = session
            soft, hard = self._wrapper.soft_timeout, self._wrapper.hard_timeout
            self._abort_wait = abort_wait(session.settings.abort_wait, soft.total_seconds(), hard.total_seconds())
            self._reporter = RankEvents(session.emitter, lambda: session.page.step_value)
            self._interrupter = Interrupter(
                session.settings.interrupt_signal,
                on_swallow=session.swallowed,
                on_deferred=session.signal_deferred,
                leaving=self._leaving,
            )
            kind, error, takes_part = "", "", False
            try:
                self._interrupter.install()
                takes_part = True
                return self._completed(self._take_part())
            except BaseException as failure_raised:
                kind, error = type(failure_raised).__name__, error_in_words(failure_raised)
                failure.release_own(failure_raised)
                if takes_part and not isinstance(failure_raised, LeftInChild):  # else the store does not know yet
                    self._restore_modes_for_caller()
                    self._call_last("terminate", self._wrapper.terminate)
                raise
            finally:
                try:
                    session.leave()  # again in Session.open, for an exception that lands here
                finally:
                    self._let_go()
                if os.getpid() == session.emitter.origin.pid:  # else a forked child leaves, and the call goes on
                    session.ended(self._state.iteration + 1, self._entered, kind, error)

    def _restore_modes_for_caller(self) -> None:
        try:
            restore(self._modes)
        except Exception as error:  # must not replace the exception of the call
            self._session.emit(events.HookFailed("torch modes", error_in_words(error)))

    def _completed(self, value: Any) -> Any:
        with contextlib.suppress(Exception):  # it is recorded; the call has completed
            self._call_last("completion", self._wrapper.completion)
        return value

    def _call_last(self, name: str, hook: Callable[[State], object] | None) -> None:
        """Run a hook at the end of the call, under its limit. The store knows how this rank ended, and no rank waits
        for it."""
        if hook is None:
            return
        self._session.page.doing(Doing.HOOK, name)
        try:
            here_only(lambda: hook(self._state))()
        except Exception as error:
            self._session.emit(events.HookFailed(name, error_in_words(error)))
            raise

    def _let_go(self) -> None:
        """Undo the call's changes to this process. A user may keep this object, and a hook the state."""
        try:
            self._interrupter.remove()
        except BaseException:  # of a signal handler, perhaps of one that is not guarded any more
            self._interrupter.remove()
            raise
        finally:
            self._state.store = self._error = self._outside = None
            if "_watcher" in self.__dict__:
                self.__dict__.pop("_watcher").end()

    def _take_part(self) -> Any:
        """Iterate until completion, or leave. Either way the store records how this rank ended."""
        seat = seat_of(self._state, ENTRY)
        self._session.page.doing(Doing.WAITING)  # from now on the other ranks wait for this one
        try:
            ending = self._drive(restart.enter(seat, self._limits))
            while True:
                seat = self._next_seat(seat, ending.terminated)
                ending = self._iterate(seat)
                if ending.outcome == COMPLETED:
                    self._depart(seat)
                    return self._value
                if ending.outcome == restart.LEFT:
                    self._say_goodbye(seat, self._limits.last_call)
                    raise self._error or InternalError("a rank left without an error")
        except RankDiscarded as error:
            self._say_goodbye(seat)  # all ranks compute the same seats, so they know
            self._session.emit(events.RankLeft(error_in_words(error)))
            raise
        except BaseException as error:
            if not self._said_goodbye and not isinstance(error, LeftInChild):
                self._stand_in_for_myself(seat, error)
            self._session.emit(events.RankLeft(error_in_words(error)))
            raise
        finally:
            self._release_watcher()

    def _say_goodbye(self, left: Seat | None = None, limit: float = 0.0) -> None:
        self._session.page.doing(Doing.WAITING)  # after the goodbye only a hook has a limit
        self._session.say_goodbye()
        self._said_goodbye = True
        self._session.see_who_goes_on(left, limit)

    def _release_watcher(self) -> None:  # the main thread is out of the function
        if hasattr(self, "_watcher"):
            self._watcher.left()

    def _iterate(self, seat: Seat) -> Ending:
        self._error = self._failure_record = self._value = None
        self._watcher = IterationWatcher(
            self._session.watch_store,
            seat,
            lambda: self._state,  # initialize may replace it
            self._wrapper.abort,
            self._interrupter,
            self._session.position,
            self._session.emit,
            patience=self._session.watch_patience,
            abort_wait=self._abort_wait,
            abort_limit=self._session.settings.abort_limit,
        )
        self._watcher.start()
        try:
            with store_constructor.interruptible():
                ending: Ending = self._drive(restart.iterate(seat, self._limits))
        finally:
            self._release_watcher()
            collectives.let_go()
            collectives.drop_destroyed()
        if ending.outcome == COMPLETED:
            self._reporter.iteration_ended("completed")
        elif ending.outcome == restart.LEFT:
            self._reporter.iteration_ended("left")
        else:
            self._reporter.iteration_ended("interrupted")
        return ending

    def _depart(self, seat: Seat) -> None:
        """Leave after completion. A lost store does no harm now: the call has completed."""
        try:
            self._drive(restart.depart(seat, self._limits, self._session.is_critical))
            self._say_goodbye()
        except StoreError as error:
            self._session.emit(events.StoreLost(str(error)[:500]))

    def _next_seat(self, seat: Seat, terminated: frozenset[int]) -> Seat:
        """Assign this rank's place in the next iteration. Raises: RankDiscarded, RestartError."""
        doing = self._session.page.doing
        doing(Doing.HOOK, "rank_assignment")
        self._state.store = IterationStore(seat, self._session.hook_store)
        try:
            filter_begins = partial(doing, Doing.HOOK, "rank_filter")
            self._state = here_only(lambda: assign(self._wrapper, self._state, terminated, filter_begins))()
        except RankDiscarded:
            doing(Doing.WAITING)
            self._drive(restart.discard(seat, terminated))
            raise
        except BaseException:
            self._unassigned_after = seat.iteration
            raise
        if seat.iteration != ENTRY:
            self._state.advance()
        following = seat_of(self._state, seat.iteration + 1)
        self._session.move_to(following)
        return following

    def _stand_in_for_myself(self, seat: Seat, error: BaseException) -> None:
        """Leave so that the other ranks continue without this one, as far as the store still answers."""
        self._failure_record = record = self._describe(error, Interruption.BASE_EXCEPTION, "outside")
        try:
            has_waited = isinstance(error, BarrierTimeout)
            with contextlib.suppress(BarrierTimeout):  # everything the other ranks need is written by then
                self._drive(restart.leave(seat, self._limits, encode(record), has_waited=has_waited))
            self._say_goodbye(seat)
        except ResilienceError as store_error:
            self._session.emit(events.HookFailed("leave", error_in_words(store_error)))

    # -- performing the protocol ----------------------------------------------------------------

    def _drive(self, protocol: restart.Protocol[Any]) -> Any:
        return drive(protocol, self._session.store, self._perform, self._chunk)

    def _perform(self, operation: restart.Operation) -> Any:
        match operation:
            case RunStage(stage):
                return self._run_stage(stage)
            case Assign(seat, _, place):
                store, size = self._session.hook_store, self._state.initial_world_size
                if place is None and seat.iteration == self._unassigned_after:
                    return Unassigned(size)  # the hook would wait again if a signal has ended its wait
                self._session.page.doing(Doing.HOOK, "rank_assignment")
                try:
                    following = seat_after(self._wrapper, operation, store, size)
                finally:
                    self._session.page.doing(Doing.WAITING)
                if isinstance(following, Seat):
                    self._session.move_to(following)
                return following
            case Settle(origin):
                self._origin = origin
                self._reporter.settled(origin)
                return None
            case restart.AwaitOutcome(_, limit):
                self._session.page.doing(Doing.WAITING)
                return self._await_decision(limit)
            case Await():
                self._session.page.doing(Doing.WAITING)
            case restart.SetRecord(_, value) if self._failure_record is None:
                # The protocol wrote this record: some rank missed the completion barrier.
                self._session.emit(events.RankInterrupted(decode(value)))
            case restart.Set() | restart.Add() | restart.CompareSet() | restart.Check() | restart.Read():
                pass  # the store performs it
        if self._failure_record is not None:
            return note_arrival(operation, self._session.store, self._failure_record, self._session.emit)
        return NotImplemented

    def _await_decision(self, limit: float) -> bool:
        """Wait for the watcher to learn the outcome, at most `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self._watcher.decided.wait(max(0.0, min(self._chunk, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        if self._watcher.outcome == LOST:
            assert self._watcher.error is not None
            raise self._watcher.error
        return True

    def _run_stage(self, stage: Stage) -> Result:
        stages = {
            Stage.INITIALIZE: self._initialize,
            Stage.CHECK_BEFORE: self._check_before,
            Stage.FUNCTION: self._call_function,
            Stage.RESERVE: self._wait_in_reserve,
            Stage.ABORT: self._abort,
            Stage.FINALIZE: self._finalize,
            Stage.CHECK_AFTER: self._check_after,
            Stage.COLLECT: self._collect,
        }
        return stages[stage]()

    def _initialize(self) -> Result:
        self._session.page.doing(Doing.WAITING)
        decided = self._watcher.decided.is_set
        if self._state.rank == 0:
            limit = min(self._wrapper.soft_timeout.total_seconds() / 2, HOST_LIMIT)
            publish = partial(self._session.host_store, self._state.iteration)
            ensure_server(self._state.iteration, self._session.store, limit, self._chunk, decided, publish)
        address = await_server(self._state.iteration, self._session.store, self._limits.barrier, self._chunk, decided)
        if address is None or self._watcher.is_interrupted:
            return Result(End.INTERRUPTED)
        host, _, port = address.rpartition(":")
        self._watcher.store_port = int(port)
        self._set_environment(host, port)
        self._state.store = IterationStore(seat_of(self._state, self._state.iteration), self._session.hook_store)
        self._reporter.iteration_started(self._state)
        return self._hook_before("initialize", self._wrapper.initialize, self._prepare)

    def _prepare(self, hook: Initialize) -> None:
        self._state = prepared(hook, self._state)

    def _set_environment(self, host: str, port: str) -> None:
        self._state.set_distributed_vars()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # every rank is a client of that store
        os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")  # torch reads it whenever the line above is set
        keep_nccl_watchdog_from_raising()

    def _check_before(self) -> Result:
        hook = self._wrapper.health_check  # its return value is for a Compose
        return self._hook_before("health_check", hook, lambda hook: hook(self._state, None))

    def _call_function(self) -> Result:
        from resilience.monitor import client  # the session has loaded it, and nearly all of the other one
        from resilience.telemetry import workload

        client.function_entered()
        self._entered = self._state.iteration
        self._reporter.entering()
        self._session.page.doing(Doing.FUNCTION)
        self._session.page.on_progress = self._progressed
        try:
            with workload.running(self._session.emitter.origin):
                function = here_only(self._function)
                self._value = self._interrupter.call(function, unless=lambda: self._watcher.is_interrupted)
            collectives.drop_destroyed()  # it has completed after a failure of its own; peers may still wait for it
            client.function_left()  # it may wait for a slow peer until completion_timeout
            return Result(End.RETURNED)
        except BaseException as error:
            is_cutting = self._watcher.is_cutting  # read first: the state when the error arrived counts
            self._state.failed_beside_abort = self._has_built_no_group()
            client.function_interrupted()
            counts = self._without_interruption(error)
            if counts is None:
                return Result(End.INTERRUPTED)
            return self._failed(counts, "run", failure.origin_of(counts, is_cutting))
        finally:
            self._session.page.on_progress = None
            self._session.page.doing(Doing.WAITING)
            self._reporter.left_function(self._watcher.is_interrupted, self._error is not None)

    def _has_built_no_group(self) -> bool:
        """Return True if an abort of this rank that hardly ever ends may have kept it from building groups."""
        return group_aborts.has_run_for(self._hook_limit) and self._reporter.is_without_progress

    def _progressed(self, sign: str) -> None:
        """Report the first sign of progress and the first step; later ones cost nothing more."""
        if not self._reporter.progressed(typing.cast(events.ProgressSign, sign)):
            self._session.page.on_progress = None

    def _wait_in_reserve(self) -> Result:
        from resilience.monitor import client

        client.function_left()
        self._entered = self._state.iteration
        self._reporter.entering()
        self._value = None
        if not self._state.active_world_size:
            return Result(End.FATAL, self._failed(nobody_active(self._state), "reserve").report)
        self._session.page.doing(Doing.WAITING)
        while not self._await_decision(self._chunk):
            execute(Check((Keys(self._state.iteration).outcome,)), self._session.store)  # is the store still there?
        self._reporter.left_function(self._watcher.is_interrupted, failed=False)
        return Result(End.RETURNED if self._watcher.outcome == COMPLETED else End.INTERRUPTED)

    def _without_interruption(self, error: BaseException) -> BaseException | None:
        """Return the exception that counts: None if an interruption led to `error`, whatever user code made of it. A
        signal that ends this rank counts, also if the interruption replaced its exception; so does an exit."""
        is_arrived = self._watcher.is_interrupted and self._interrupter.arrived
        if not is_arrived or isinstance(error, LeftInChild) or failure.ends_rank_by_signal(error):
            return error
        return self._leaving(error.__context__)

    def _leaving(self, error: BaseException | None) -> BaseException | None:
        return failure.leaving(error, self._outside)

    def _failed(self, error: BaseException, stage: str, origin: FaultOrigin = "own") -> Result:
        """Report an exception that left a stage, and return the stage's result."""
        if isinstance(error, LeftInChild):
            raise error
        restarts_all = failure.restarts_all(error)
        is_leaving = not restarts_all and self._leaving(error) is not None
        if is_leaving and origin == "communication":
            origin = "own"  # a signal ends this rank, whatever its function was handling
        kind = Interruption.EXCEPTION if restarts_all else Interruption.BASE_EXCEPTION
        record = self._describe(error, kind, stage, origin)
        if origin == "consequence" and not is_leaving:
            failure.release(error)
            return Result(End.INTERRUPTED)  # our own abort caused it; this rank did not fail
        self._error, self._failure_record, self._origin = error, record, origin
        return Result(End.FAILED if restarts_all else End.FATAL, encode(record), origin)

    def _describe(
        self, error: BaseException, kind: Interruption, stage: str, origin: FaultOrigin = "own"
    ) -> InterruptionRecord:
        step = self._session.page.step_value
        record = failure.record_of(error, kind, stage, origin, self._state, self._session.node, step)
        self._reporter.failed(record)
        return record

    def _abort(self) -> Result:
        """Let the watcher finish, then drop the remaining groups. The main thread has left the function."""
        from resilience.monitor import client

        client.function_interrupted()  # it may have returned on this rank, or failed before it was called
        self._watcher.left()
        self._session.page.doing(Doing.HOOK, "abort")
        self._reporter.interrupted(self._await_noticed())
        if not self._watcher.join(self._hook_limit):
            raise InternalError(f"the abort hook did not return within hard_timeout ({self._hook_limit:g} s)")
        is_late = self._watcher.freed_after_s > self._wrapper.soft_timeout.total_seconds()
        self._state.status = Status.ABORTED if is_late else Status.ABORTING
        if self._error is not None:
            failure.release(self._error)
        # An interruption may have kept a context manager from doing it; the hooks see torch's modes too. Not before the
        # frames are gone: one may hold a context that restores a mode itself.
        restore(self._modes)
        if self._wrapper.abort is not None:
            collectives.drop_groups()
        self._reporter.phase("agree")
        return Result(End.RETURNED)

    def _await_noticed(self) -> float:
        """Wait until the store announces the interruption; return that time (monotonic seconds)."""
        if not self._await_decision(self._limits.barrier):
            raise StoreError(
                f"an interruption was reported, but the store did not announce it within {self._limits.barrier:g} s "
                "(barrier_timeout); is the process that hosts the store stopped, or its node unreachable?"
            )
        return self._watcher.decided_at

    def _finalize(self) -> Result:
        collectives.let_go()  # the last call has closed
        self._reporter.phase("finalize")
        return self._hook_after("finalize", self._wrapper.finalize)

    def _check_after(self) -> Result:
        self._reporter.phase("check")
        result = self._hook_after("health_check", self._wrapper.health_check)
        is_excluded = result.end is not End.RETURNED
        if is_excluded and isinstance(self._error, Exception) and not isinstance(self._error, HealthCheckError):
            cause = self._error
            self._error = HealthCheckError(f"the health check failed: {error_in_words(cause)}")
            self._error.__cause__ = cause
        return result

    def _collect(self) -> Result:
        """Free the memory of the interrupted iteration, except what user code still holds."""
        self._reporter.phase("collect")
        self._session.page.doing(Doing.HOOK, "collect")  # finalizers run user code
        self._error = None
        groups_left = collectives.await_drops(DROP_LIMIT)
        collection = garbage.collect()
        self._session.emit(
            events.GarbageCollected(collection.objects, collection.passes, collection.duration_s, groups_left)
        )
        self._session.page.doing(Doing.WAITING)
        self._reporter.phase("regroup")
        return Result(End.RETURNED)

    def _hook_before(self, name: StageName, hook: T | None, call: Callable[[T], object]) -> Result:
        """Run a hook before the function, under its limit. An interruption reaches a hook as it reaches the function.
        An Exception restarts all ranks; a BaseException ends this rank."""
        if hook is None:
            return Result(End.RETURNED)
        self._session.page.doing(Doing.HOOK, name)
        with self._reporter.stage(name) as stage:
            try:
                self._interrupter.call(here_only(lambda: call(hook)), unless=lambda: self._watcher.is_interrupted)
                stage.outcome = "completed"
                return Result(End.RETURNED)
            except BaseException as error:
                is_cutting = self._watcher.is_cutting  # read first: the state when the error arrived counts
                self._state.failed_beside_abort = self._has_built_no_group()
                counts = self._without_interruption(error)
                if counts is None:
                    stage.outcome = "interrupted"
                    return Result(End.INTERRUPTED)
                return self._hook_failed(name, counts, failure.origin_of(counts, is_cutting))
            finally:
                self._session.page.doing(Doing.WAITING)

    def _hook_after(self, name: str, hook: Callable[..., Any] | None) -> Result:
        """Run a hook after a fault, under its limit. Any exception that it raises excludes this rank."""
        if hook is None:
            return Result(End.RETURNED)
        self._session.page.doing(Doing.HOOK, name)
        try:
            cause = failure.own_cause(self._error, self._origin)
            here_only(lambda: hook(self._state, cause))()  # its value is for a Compose
            return Result(End.RETURNED)
        except BaseException as error:
            return Result(End.FATAL, self._hook_failed(name, error).report)
        finally:
            self._session.page.doing(Doing.WAITING)

    def _hook_failed(self, name: str, error: BaseException, origin: FaultOrigin = "own") -> Result:
        self._session.emit(events.HookFailed(name, error_in_words(error)))
        return self._failed(error, name, origin)
