"""How does the main thread leave a function that does not return?  By a signal whose handler raises.

A signal reaches what an asynchronous exception does not: `sleep`, locks, queues, `select`, a DataLoader.
But a handler that raises at any instruction leaves locks locked, modules half imported and cleanup code
cut short, so the handler first decides whether this is a place to raise at; if not it returns, and the
sender repeats. Inside the standard library, torch and this package it lets the call run on, and raises
when the call has returned to the user's own code (by a trace function). An exception that user code
swallows is noticed when it dies, with the place, and sent again.

`Interrupter.call` runs the function in the main thread; another thread sends. When to interrupt, and
what to do where nothing arrives, is the caller's matter. Not curable here: user code that calls
`lock.acquire()` and only then enters `try`; `with lock:` and `atomic()` are safe."""

from __future__ import annotations

import contextlib
import ctypes
import opcode
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import msgspec

from resilience.errors import ConfigurationError, ProtocolError, RankShouldRestart
from resilience.system.frames import is_ours, is_standard, is_torch
from resilience.system.signal_handlers import MAX_LINKS, Deferred, ProgramHandlers

T = TypeVar("T")

IN_FLIGHT = 0.05  # seconds for which an exception may be on its way through C code, where it is not seen
STEP_LIMIT = 0.25  # seconds for which torch may go on before we raise inside it
FRAGILE_LIMIT = 5.0  # seconds for which the standard library, an import, a __del__ or a signal handler may go on
BLOCKED_LOOKS, BLOCKED_APART = 3, 0.0008  # so often at one instruction, so many seconds apart: blocked
UNANSWERED = 8  # signals without one call of the handler: masked by user code


class Swallow(msgspec.Struct, frozen=True):
    """Where user code kept an interrupt from arriving: the `except` line, or the line it was raised
    through if it was kept somewhere instead of dying there."""

    file: str
    line: int
    function: str


class Interrupter:
    """Interrupts a function that the main thread runs. Made, installed, called and removed by the main
    thread; `deliver` and `hold_off` belong to the thread that watches.

    signal_number: default SIGRTMIN + 9. If it is in use, the next free real-time signal is taken.
    exception: what is raised; user code may catch it to clean up, and must let it go on.
    on_swallow: called for each swallow, by the delivering thread or, at the end of a call, by the main thread.
    on_deferred: called by the main thread, between two calls, for each signal whose handler raised in our code.
    leaving: returns an exception if the one that is handled leaves the function for good, see `_is_fragile`.

    Attributes: `arrived`, whether the latest call was left by an exception after an interrupt had been
    raised in it, whatever user code turned that into; `swallows` of the latest call; `signal_number`."""

    def __init__(
        self,
        signal_number: int | None = None,
        exception: type[BaseException] = RankShouldRestart,
        on_swallow: Callable[[Swallow], None] | None = None,
        on_deferred: Callable[[Deferred], None] | None = None,
        leaving: Callable[[BaseException | None], BaseException | None] = lambda handled: None,
    ) -> None:
        self.signal_number = signal.SIGRTMIN + 9 if signal_number is None else signal_number
        self.arrived = False
        self.swallows: list[Swallow] = []
        self._on_swallow = on_swallow
        self._on_deferred = on_deferred
        self._leaving = leaving
        self._type: Any = _mortal(exception, self)
        self._handler = self._on_signal  # one object: it is compared with what is installed
        self._tracer = self._on_trace
        self._question = _Question(self._claim_again)
        self._others = ProgramHandlers(lambda: self._armed, self._type)
        self._claimed: dict[int, bool] = {}  # our signal numbers -> was it blocked before
        self._pid = 0  # where it is installed; a forked child never reacts
        self._main = 0
        self._gate = threading.Lock()  # sending against the begin of a call and removal
        self._section = threading.RLock()  # atomic() against hold_off()
        _interrupters.add(self)
        self._depth = 0  # of atomic() in the main thread
        self._armed = False  # only the main thread writes it
        self._call = 0
        self._forget()

    def _forget(self) -> None:
        """Start with a clean slate, at each call."""
        self.arrived = False
        self.swallows = []
        self._reported = 0
        self._requested = False
        self._raised = 0
        self._raised_at = 0.0
        self._live: weakref.ref[BaseException] | None = None  # raised, neither arrived nor dead
        self._unanswered = 0
        self._is_handling = False
        self._is_held_back = False
        self._stepping_since: float | None = None
        self._fragile_since: float | None = None
        self._seen: FrameType | None = None  # a reference, because ids are reused
        self._seen_instruction = 0
        self._seen_at = 0.0
        self._looks = 0
        self._target: FrameType | None = None  # of the trace function
        self._called_at = 0  # the instruction at which the target stood
        self._bottom: FrameType | None = None

    # -- main thread --------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the signal. Raises: ProtocolError outside the main thread, ConfigurationError if no
        real-time signal is free."""
        if threading.current_thread() is not threading.main_thread():
            raise ProtocolError("install the Interrupter in the main thread: only that thread can be interrupted")
        self._pid, self._main = os.getpid(), threading.get_ident()
        self._claim()
        self._others.guard(self.signal_number)

    def remove(self) -> None:
        """Give the signal back, with its default action and its former mask. A late signal is lost."""
        self._others.release()
        self._report_deferred()
        with self._gate:
            claimed, self._claimed = self._claimed, {}
        for number, was_blocked in claimed.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_IGN)  # drops one still pending: by default it kills
                signal.signal(number, signal.SIG_DFL)
                if was_blocked:
                    signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def call(self, function: Callable[[], T], unless: Callable[[], bool] | None = None) -> T:
        """Run `function` so that `deliver` reaches it; return its value.

        unless: asked once when signals already count, before the function starts; True interrupts at
        once. Closes the gap to a sender that found no call to interrupt.
        Raises: the exception where an interrupt arrived, what user code turned it into, or what the
        function raised; ProtocolError if not installed, or inside another call of this Interrupter."""
        self._begin()
        with self._watching_unraisable():
            try:
                return self._run(function, unless)
            except BaseException as error:
                self._armed = False  # first, and no call: a signal could strike in one
                self.arrived = self._raised > 0
                self._others.judge(error)
                raise
            finally:
                self._armed = False
                try:
                    self._others.guard(self.signal_number)
                except Exception:  # a handler that the function has installed raised before it was guarded
                    self._others.guard(self.signal_number)
                self._end()

    def raise_deferred(self) -> None:
        """Call the handlers again that are still put off, once the last call is over. Raises: what they raise."""
        if os.getpid() == self._pid and self._others.are_put_off:
            try:
                self._others.raise_again()
            finally:
                self.raise_deferred()  # also those after one that raises: there is no further call for them

    def atomic(self) -> Atomic:
        """Keep interrupts and `hold_off` out while the body runs; they wait, asleep. Reentrant.

        An interrupt that arrives meanwhile is raised at the outermost exit, or at the entry if the
        body has not begun. In another thread it only keeps `hold_off` out."""
        return Atomic(self)

    @property
    def is_armed(self) -> bool:
        """Whether the main thread is inside a call. Any thread."""
        return self._armed

    # -- watching thread ----------------------------------------------------------------------------

    def deliver(self) -> None:
        """Send one interrupt to the present call, if there is one. Whether it is raised is decided where
        it strikes, so it has to be repeated."""
        with self._gate:
            if self._armed and self._claimed:
                self._requested = True
                self._unanswered += 1
                is_ours = signal.getsignal(self.signal_number) is self._handler
                if not is_ours or self._unanswered % UNANSWERED == 0:
                    # User code took the signal or masked it: only the main thread can undo that.
                    _add_pending_call(_is_true, id(self._question))
                if is_ours:
                    signal.pthread_kill(self._main, self.signal_number)
        self._report_swallows()

    @contextlib.contextmanager
    def hold_off(self, timeout: float | None = None) -> Iterator[bool]:
        """Keep the user's `atomic()` sections out while the body runs.

        Waits for one that is open, at most `timeout` seconds (None: as long as it takes); the value
        says whether it has ended."""
        held = self._section.acquire(timeout=-1 if timeout is None else timeout)
        try:
            yield held
        finally:
            if held:
                self._section.release()

    # -- a call -------------------------------------------------------------------------------------

    def _run(self, function: Callable[[], T], unless: Callable[[], bool] | None) -> T:
        self._bottom = sys._getframe()
        self._armed = True
        if unless is not None and unless():
            raise self._new_exception()
        self._others.raise_again()
        value = function()
        self._armed = False
        return value

    def _begin(self) -> None:
        if not self._claimed or os.getpid() != self._pid or threading.get_ident() != self._main:
            raise ProtocolError("Interrupter.call needs install() before it, in the same process and main thread")
        if self._armed:
            raise ProtocolError("Interrupter.call cannot be nested: each nested call needs an Interrupter of its own")
        self._claim()
        self._report_deferred()
        with self._gate:
            self._call += 1
            self._forget()

    def _end(self) -> None:
        self._stop_stepping()
        self._leave_atomic_to(0)
        self._seen = self._bottom = None
        self._report_swallows()

    def _claim(self) -> None:
        """Make sure that a signal of ours gets through: held by our handler, and not masked."""
        if signal.getsignal(self.signal_number) is not self._handler:
            self.signal_number = _free_signal(self.signal_number)
            signal.signal(self.signal_number, self._handler)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.signal_number})
        self._claimed.setdefault(self.signal_number, self.signal_number in before)

    def _claim_again(self) -> None:
        """As a pending call of the interpreter: in the main thread, between two of its instructions. What a signal
        handler of the program raises in here is raised there."""
        if self._armed and os.getpid() == self._pid:
            self._is_handling = True  # we do not raise in here: this may be no place for it
            try:
                self._claim()
            except ConfigurationError:
                pass  # none is free: the sender's limit ends the matter
            finally:
                self._is_handling = False

    @contextlib.contextmanager
    def _watching_unraisable(self) -> Iterator[None]:
        """Notice an interrupt that is lost because it struck in a `__del__`, weakref or gc callback."""
        previous = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            is_ours = isinstance(unraisable.exc_value, self._type) and os.getpid() == self._pid
            if is_ours:
                unraisable.exc_value.is_settled = True
            if not is_ours or previous is not sys.__unraisablehook__:
                previous(unraisable)  # the default one would only print it

        sys.unraisablehook = hook
        try:
            yield
        finally:
            if sys.unraisablehook is hook:
                sys.unraisablehook = previous

    # -- where the signal strikes -------------------------------------------------------------------

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if not self._armed or not self._requested or self._is_handling or frame is None:
            return
        if os.getpid() != self._pid:
            return
        self._is_handling = True
        try:
            self._unanswered = 0
            if not self._must_wait(frame):
                # Never stored in a local: in a cycle with this frame it would not die when swallowed.
                raise self._new_exception()
        finally:
            self._is_handling = False

    def _must_wait(self, frame: FrameType) -> bool:
        """Whether `frame` is no place to raise at; if so the sender repeats, or a trace has been set."""
        if self._depth:
            self._is_held_back = True
            return True
        return self._is_unfit(frame)

    def _is_unfit(self, frame: FrameType) -> bool:
        now = time.monotonic()
        if self._is_under_way(now):
            return True
        if self._is_fragile(frame):
            self._fragile_since = self._fragile_since or now
            if now - self._fragile_since < FRAGILE_LIMIT:
                return True
        if not _is_library(frame) and not _is_at_jump(frame):
            return False
        self._stepping_since = self._stepping_since or now
        elapsed = now - self._stepping_since
        if elapsed >= FRAGILE_LIMIT or self._is_blocked(frame, now):
            return False
        # Under load any call can outlast STEP_LIMIT. Torch is then cut short, and the standard library still is not:
        # it takes locks in Python, logging's for one, that nobody would release any more.
        is_late = elapsed >= STEP_LIMIT
        if is_late and not _takes_locks(frame):
            return False
        self._step_out(frame, _takes_locks if is_late else _is_library)
        return True

    def _is_under_way(self, now: float) -> bool:
        """Whether the latest exception still travels, or user code cleans up while handling it."""
        exception = None if self._live is None else self._live()
        if exception is None:
            return False
        if now - self._raised_at < IN_FLIGHT:
            return True  # in C++, autograd's for one, no frame shows it
        handled = sys.exc_info()[1]
        for _ in range(MAX_LINKS):
            if handled is None:
                break
            if handled is exception:
                return True
            handled = handled.__context__
        self._live = None
        self._swallowed(exception, None)  # stored away: nobody will let it go on
        return False

    def _is_fragile(self, frame: FrameType) -> bool:
        """Whether something runs that cannot be left: a `__del__` loses what is raised in it, an import
        that is cut short leaves modules with C parts broken for good, a trace function that
        raises (a debugger's, coverage's) is switched off, and a signal whose handler is cut short, or
        whose exception is replaced while it travels, is lost."""
        handled = sys.exc_info()[1]
        self._others.note(self.signal_number)
        self._others.judge(handled)
        if self._leaving(handled) is not None:
            return True
        tracer = sys.gettrace()
        tracing = None if tracer is self._tracer else _code_of(tracer)
        at: FrameType | None = frame
        while at is not None and at is not self._bottom:
            code = at.f_code
            if code is tracing or code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
                return True
            if self._others.is_handler(code):
                return True
            at = at.f_back
        return False

    def _is_blocked(self, frame: FrameType, now: float) -> bool:
        """Whether this very call has stood at one instruction for several looks: nothing to step over."""
        if frame is not self._seen or frame.f_lasti != self._seen_instruction:
            self._seen, self._seen_instruction = frame, frame.f_lasti
            self._seen_at, self._looks = now, 1
        elif now - self._seen_at >= BLOCKED_APART:
            self._seen_at = now
            self._looks += 1
        return self._looks >= BLOCKED_LOOKS

    def _new_exception(self) -> BaseException:
        self._stop_stepping()
        self._seen = self._stepping_since = self._fragile_since = None
        self._is_held_back = False
        exception: BaseException = self._type("the iteration was interrupted: leave the function, it starts again")
        exception.call = self._call  # type: ignore[attr-defined]
        exception.is_settled = False  # type: ignore[attr-defined]
        self._live = weakref.ref(exception)
        self._raised_at = time.monotonic()
        self._raised += 1
        return exception

    # -- stepping out of the standard library -------------------------------------------------------

    def _step_out(self, inner: FrameType, is_uncut: Callable[[FrameType], bool]) -> None:
        """Trace the first caller that may be cut short, to raise as soon as its call has returned."""
        if sys.gettrace() not in (None, self._tracer):
            return  # a debugger or coverage: repeating has to do
        frame: FrameType | None = inner
        while frame is not None and frame is not self._bottom and is_uncut(frame):
            frame = frame.f_back  # none of them: we are at a jump, and raise behind it
        if frame is not None and frame is not self._bottom and frame is not self._target:
            self._stop_stepping()
            self._target, self._called_at = frame, frame.f_lasti
            frame.f_trace_opcodes = True
            frame.f_trace = self._tracer
            sys.settrace(self._tracer)

    def _on_trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if os.getpid() != self._pid:  # a child forked meanwhile
            sys.settrace(None)
            return None
        if frame is not self._target:
            return None
        if event in ("opcode", "line"):
            # At the instruction after the call what protected the call still holds, `with` and `finally`
            # included; a line further down the lock may be about to be released by the next instruction.
            is_protected = _protects(frame.f_code, self._called_at, frame.f_lasti)
            self._stop_stepping()
            if self._armed and is_protected and not self._must_wait(frame):
                raise self._new_exception()
            return None  # otherwise the next signal finds another place
        if event == "return":  # the call raised, and nothing here catches that
            self._stop_stepping()
        return self._tracer

    def _stop_stepping(self) -> None:
        if self._target is not None:
            self._target.f_trace = None
            self._target.f_trace_opcodes = False
            self._target = None
        if sys.gettrace() is self._tracer:
            sys.settrace(None)

    # -- swallowed exceptions -----------------------------------------------------------------------

    def _died(self, exception: Any) -> None:
        """Called by the exception's __del__, in whatever thread let go of it last."""
        if not self._armed or exception.call != self._call or os.getpid() != self._pid:
            return
        if not exception.is_settled:
            self._swallowed(exception, sys._getframe(1).f_back)

    def _swallowed(self, exception: Any, where: FrameType | None) -> None:
        exception.is_settled = True
        trace = exception.__traceback__
        if trace is None:  # user code took it off
            return
        # The first entry is the frame that caught it, at the line in its try body; if it died there,
        # that frame now stands at its `except`.
        caught = trace.tb_frame
        line = (where.f_lineno if caught is where else trace.tb_lineno) or 0  # None between two lines
        self.swallows.append(Swallow(caught.f_code.co_filename, line, caught.f_code.co_name))

    def _report_swallows(self) -> None:
        with self._gate:
            fresh = self.swallows[self._reported :]
            self._reported += len(fresh)
        if self._on_swallow is not None:
            for swallow in fresh:
                self._on_swallow(swallow)

    def _report_deferred(self) -> None:
        for deferred in self._others.take_deferred():
            if self._on_deferred is not None:
                self._on_deferred(deferred)

    # -- atomic() -----------------------------------------------------------------------------------

    def _enter_atomic(self, frame: FrameType) -> None:
        if os.getpid() != self._pid:
            return  # the lock of a forked child may be held by a thread that it has not
        if threading.get_ident() != self._main:
            self._section.acquire()
            return
        self._depth += 1  # before the lock: what strikes while we wait for it is held back too
        self._section.acquire()
        if self._depth == 1 and self._is_held_back and self._armed and not self._is_unfit(frame):
            raise self._new_exception()  # which leaves the section

    def _leave_atomic_to(self, depth: int) -> None:
        """Leave the sections of the main thread that are deeper. The outermost one frees the lock, however often an
        exception at an entry or exit has left it held."""
        if os.getpid() != self._pid or threading.get_ident() != self._main:
            return
        self._depth = depth
        if depth == 0:
            with contextlib.suppress(RuntimeError):  # it is not held any more
                while True:
                    self._section.release()

    def _leave_atomic(self, frame: FrameType) -> None:
        if os.getpid() != self._pid:
            return
        if threading.get_ident() != self._main:
            self._section.release()
            return
        self._leave_atomic_to(max(0, self._depth - 1))
        if self._depth == 0 and self._is_held_back:
            self._is_held_back = False
            if self._armed and not self._is_unfit(frame):
                raise self._new_exception()


_interrupters: weakref.WeakSet[Interrupter] = weakref.WeakSet()


def _free_in_child() -> None:
    """The thread that held a lock of the parent's is not in the child."""
    for interrupter in list(_interrupters):
        interrupter._gate, interrupter._section = threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_free_in_child)


class Atomic(contextlib.ContextDecorator):
    """A section that is not interrupted, for `with` or as the decorator of a function. May be entered repeatedly."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter

    def __enter__(self) -> None:
        depth = self._interrupter._depth
        try:
            self._interrupter._enter_atomic(sys._getframe(1))
        except BaseException:  # also of a signal handler, at any line: no body follows, so no exit either
            self._interrupter._leave_atomic_to(depth)
            raise

    def __exit__(self, *_: object) -> None:
        depth = max(0, self._interrupter._depth - 1)
        try:
            self._interrupter._leave_atomic(sys._getframe(1))
        except BaseException:
            self._interrupter._leave_atomic_to(depth)
            raise


class _Question:
    """Calls a function when it is asked whether it is true. The interpreter's own C function that asks makes a proper
    pending call: it passes on what is raised. A callback of ctypes prints that, and returns an arbitrary number."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __bool__(self) -> bool:
        self._function()
        return False


def _mortal(base: type[BaseException], owner: Interrupter) -> type[BaseException]:
    """Return a subclass whose instances tell `owner` when they die; otherwise it looks like `base`."""

    def __del__(self: BaseException) -> None:
        owner._died(self)

    def __reduce__(self: BaseException) -> tuple[Any, ...]:
        return base, self.args

    members = {"__del__": __del__, "__reduce__": __reduce__, "__module__": base.__module__}
    return type(base.__name__, (base,), {**members, "__qualname__": base.__qualname__, "__doc__": base.__doc__})


def _code_of(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _free_signal(wanted: int) -> int:
    """Return `wanted`, or the next real-time signal that nobody handles. Raises: ConfigurationError."""
    first = wanted if wanted >= signal.SIGRTMIN else signal.SIGRTMIN + 9
    following: list[int] = [*range(first, signal.SIGRTMAX + 1), *range(signal.SIGRTMIN, first)]
    caught = _caught_signals()
    for number in (wanted, *following):
        if signal.getsignal(number) == signal.SIG_DFL and not caught >> (number - 1) & 1:
            return number
    raise ConfigurationError(
        f"no signal is free to interrupt the main thread: {wanted} and all real-time signals "
        f"({signal.SIGRTMIN} to {signal.SIGRTMAX}) have handlers; free one, or set RESILIENCE_INTERRUPT_SIGNAL"
    )


def _caught_signals() -> int:
    """Return the set of signals with handlers, also those that C code installed unseen by Python."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            words = next(line.split() for line in file if line.startswith("SigCgt:"))
            return int(words[1], 16)
    except (OSError, StopIteration):
        return 0


def _protects(code: CodeType, before: int, now: int) -> bool:
    """Whether the handler in force at offset `before` is still in force at offset `now`.

    The compiler leaves the end of a `with` block and the regular way through `finally` unprotected: an
    exception there would pass over the very cleanup that is under way. Before Python 3.11 the blocks
    are kept at run time, and hold until an instruction after `now` ends them."""
    handlers = _handlers(getattr(code, "co_exceptiontable", b""))
    wanted = _handler_at(handlers, before)
    at: int | None = now
    for _ in range(len(handlers) + 1):  # from the innermost handler to the outermost
        if wanted is None or at is None:
            break
        at = _handler_at(handlers, at)
        if at == wanted:
            return True
    return wanted is None


def _is_at_jump(frame: FrameType) -> bool:
    """Whether the frame is about to jump back in a loop, in code that has handlers.

    Signals strike there often, and CPython 3.13 leaves these jumps unprotected: what is raised passes over
    every `with`, `finally` and `except` around the loop."""
    code = frame.f_code
    return bool(getattr(code, "co_exceptiontable", b"")) and code.co_code[frame.f_lasti] == _JUMP_BACKWARD


def _handler_at(handlers: list[tuple[int, int, int]], offset: int) -> int | None:
    return next((target for start, end, target in handlers if start <= offset < end), None)


def _handlers(table: bytes) -> list[tuple[int, int, int]]:
    """Decode an exception table into (start, end, handler) offsets.

    Source: https://github.com/python/cpython/blob/3.11/Objects/exception_handling_notes.txt"""
    values: list[int] = []
    value = 0
    for byte in table:
        value = value << 6 | byte & 0x3F
        if not byte & 0x40:
            values.append(value)
            value = 0
    # four values an entry, in units of two bytes: start, length, handler, and depth with a flag
    entries = zip(values[::4], values[1::4], values[2::4], strict=False)
    return [(2 * start, 2 * (start + length), 2 * handler) for start, length, handler in entries]


_JUMP_BACKWARD = opcode.opmap.get("JUMP_BACKWARD", -1)  # unknown before Python 3.11


def _is_library(frame: FrameType) -> bool:
    """Return True for code that is not cut short if it ends soon: the standard library, this package, and torch.

    torch because `__exit__` of `no_grad`, autocast and the like restores state of the whole thread."""
    return _takes_locks(frame) or is_torch(frame.f_code.co_filename)


def _takes_locks(frame: FrameType) -> bool:
    """Return True for the standard library and this package."""
    file = frame.f_code.co_filename
    return is_standard(file) or is_ours(file)


# A handle of our own: argument types set on the shared one would bind other users of it.
_python = ctypes.PyDLL(None)
_add_pending_call = _python.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_is_true = ctypes.cast(_python.PyObject_IsTrue, ctypes.c_void_p)
