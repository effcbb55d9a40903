"""A program's signal handlers run in the main thread wherever it is, also in the middle of a restart.

One that raises there would cost the rank: torch's handler of SIGCHLD raises an error for each process of a data loader
that was lost, mostly when the error of another call has just reported it and the restart has begun. So for the duration
of a call handlers are guarded. In the program's own code, in its function or a hook, a guarded handler does what it
did. In our code the exception is dropped and reported, and the handler is called again as soon as the function runs, at
the latest when the call is over.

A handler that ends its rank (SystemExit, say) raises a BaseException. It is marked, so that it is not taken for the
interruption if the rank cleans up after one: in a preemption, the first rank to exit interrupts the others. A handler
that the function itself has installed stays as it is while the function runs: code that gives its signal back often
looks first whether the handler is still its own. Such a handler is recognised by its code, in a stack or traceback."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from resilience.errors import error_in_words
from resilience.facts.interruptions import Frame
from resilience.system.frames import is_ours, is_standard, is_torch, stack_of_traceback
from resilience.system.processes import signal_name

MAX_LINKS = 1000  # of an exception's chain of contexts, which may be a circle
_MARK = "_left_signal_handler"
_libc = ctypes.CDLL(None)


class Deferred(NamedTuple):
    """A signal whose handler raised in our code. error: the exception's type and text; stack: where it was raised."""

    signal: str
    error: str
    stack: tuple[Frame, ...] = ()


class ProgramHandlers:
    """Guards the handlers of this process. Belongs to the main thread.

    is_in_function: whether the main thread runs the program's function. interruption: the exception that interrupts
    it; a handler that it cuts short is called again."""

    def __init__(self, is_in_function: Callable[[], bool], interruption: type[BaseException] | tuple[()] = ()) -> None:
        self.interruption = interruption
        self._is_in_function = is_in_function
        self._pid = 0
        self._to_call: dict[int, Any] = {}  # handlers, by signal
        self._of_function: dict[CodeType, tuple[int, Any]] = {}  # signals and handlers that the function has installed
        self._unreported: dict[int, Deferred] = {}

    def guard(self, *others: int) -> None:
        """Guard the handlers that are there now. others: signals whose handlers are left as they are, ours for one.
        Raises: what one that is not guarded yet raises meanwhile; call it again then."""
        self._pid = os.getpid()
        for number in signal.valid_signals():
            handler: Any = signal.getsignal(number)
            if isinstance(handler, _Guarded):
                if handler.owner is self:
                    continue
                handler = handler.handler  # of an earlier call: the program has kept it, and set it again
            is_programs = callable(handler) and handler is not signal.default_int_handler and number not in others
            if is_programs:
                _set_handler(number, _Guarded(self, handler))
        self._of_function.clear()

    def note(self, *others: int) -> None:
        """Note the handlers that the function has installed, without a change to them."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            code = None if isinstance(handler, _Guarded) or number in others else _code_of(handler)
            if code is not None:
                self._of_function[code] = (number, handler)

    def is_handler(self, code: CodeType) -> bool:
        """Return True for the code of a handler that is guarded or noted: what calls it is a signal."""
        return code in _CALLERS or code in self._of_function

    def judge(self, error: BaseException | None) -> None:
        """Treat the exceptions that left a noted handler like those that left a guarded one. error: what has left the
        function; those that it replaced count too."""
        for _ in range(MAX_LINKS):
            if error is None or not self._of_function:
                return
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_code in self._of_function:
                    self._left(error, *self._of_function[frame.f_code])
            error = error.__context__

    def _left(self, error: BaseException, number: int, handler: Any) -> None:
        if isinstance(error, self.interruption):
            self.put_off(number, handler, error)
        else:
            vars(error)[_MARK] = True  # on the exception: a reference to it would keep the function's frames alive

    def release(self) -> None:
        """Put the handlers back that are guarded."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _Guarded):
                _set_handler(number, handler.handler)

    @property
    def are_put_off(self) -> bool:
        """Return True if `raise_again` has a handler to call."""
        return bool(self._to_call)

    def raise_again(self) -> None:
        """Call the handlers again that were put off. Not by a signal: the program may have given it back since, and by
        default it ends the process. Raises: what they raise."""
        for number in list(self._to_call):
            handler = self._to_call.pop(number)
            try:
                handler(number, sys._getframe())
            except self.interruption as error:
                self.put_off(number, handler, error)
                raise

    def must_put_off(self, frame: FrameType | None) -> bool:
        """Return True if an exception at this place would leave through our code only."""
        if self._is_in_function() or os.getpid() != self._pid:
            return False
        while frame is not None and (is_standard(frame.f_code.co_filename) or is_torch(frame.f_code.co_filename)):
            frame = frame.f_back
        return frame is not None and is_ours(frame.f_code.co_filename)

    def put_off(self, number: int, handler: Any, error: BaseException) -> None:
        """Note a handler to call again, because it raised `error` in our code, or the interruption cut it short."""
        tb = error.__traceback__ and error.__traceback__.tb_next  # without the guard's own frame
        self._unreported[number] = Deferred(signal_name(number), error_in_words(error), stack_of_traceback(tb))
        self._to_call[number] = handler

    def take_deferred(self) -> list[Deferred]:
        """Return the signals that were put off since the last call, each once."""
        return [self._unreported.pop(number) for number in list(self._unreported)]


class _Guarded:
    """Stands where the program's handler was."""

    def __init__(self, owner: ProgramHandlers, handler: Any) -> None:
        self.handler = handler
        self.owner = owner

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except Exception as error:
            if not self.owner.must_put_off(frame):
                raise
            self.owner.put_off(number, self.handler, error)
        except BaseException as error:
            self.owner._left(error, number, self.handler)
            raise


_CALLERS = (_Guarded.__call__.__code__, ProgramHandlers.raise_again.__code__)


def is_from_signal(error: BaseException) -> bool:
    """Return True for Ctrl-C, and for a BaseException that left a guarded handler. What user code makes of it has no
    mark."""
    return isinstance(error, KeyboardInterrupt) or _MARK in vars(error)


def _set_handler(number: int, handler: Any) -> None:
    """Set a handler in Python, and leave in place what C code does at this signal before Python's turn: faulthandler
    with `chain=True`, say."""
    action = ctypes.create_string_buffer(512)  # more than a `struct sigaction`: 152 bytes
    _libc.sigaction(int(number), None, action)
    signal.signal(number, handler)
    if signal.getsignal(number) is handler:  # else the handler has just run, and has given its signal back
        _libc.sigaction(int(number), action, None)


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that a handler runs, None for no handler and for one written in C."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
