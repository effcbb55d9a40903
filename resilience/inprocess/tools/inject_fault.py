"""What happens to my job if ranks break?  Breaks some, chosen by a seed.

Every rank calls `inject_fault` with the same arguments and draws the same result. A drawn rank breaks some time
later, from a thread of its own. The faults are real: a read from unmapped memory, a C call that holds the GIL,
a signal with which the process kills itself."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from resilience.errors import ConfigurationError, ConfigurationTypeError, InjectedException
from resilience.inprocess._runtime import options
from resilience.inprocess.later_releases import missing
from resilience.inprocess.monitor_thread import async_raise
from resilience.system.environment import rank_and_world_size


class Fault(Enum):
    """How a rank breaks."""

    GPU = auto()  # an index out of bounds on the device, which breaks its context
    GPU_SLEEP = auto()  # the device stays busy forever
    ASYNC_EXC = auto()  # an InjectedException set on the main thread
    SIGNAL_EXC = auto()  # an InjectedException raised by the handler of SIGUSR1
    ABORT = auto()  # abort()
    GIL = auto()  # a C call that holds the interpreter's lock forever
    SEGFAULT = auto()
    INT = auto()  # SIGINT
    KILL = auto()  # SIGKILL
    TERM = auto()  # SIGTERM
    STOP = auto()  # SIGSTOP

    # Names of later releases of the compatible API.
    GPU_ERROR = GPU
    OS_ABORT = ABORT
    LOCK_GIL = GIL
    SIGINT = INT
    SIGKILL = KILL
    SIGTERM = TERM
    SIGSTOP = STOP


class Draw(msgspec.Struct, frozen=True):
    """The result of a draw: which ranks break, how, and after how many seconds."""

    ranks: tuple[int, ...]
    fault: Fault
    delay: float


def inject_fault(
    faults: Sequence[Fault],
    num_faults: int | Sequence[int],
    keep_alive: int,
    delay: float | Sequence[float],
    seed: int,
    callback: Callable[[], Any] | None = None,
) -> None:
    """Break some ranks of the world given by RANK and WORLD_SIZE. Returns at once.

    faults: one of them is drawn. num_faults: how many ranks break, or inclusive bounds to draw between.
    keep_alive: ranks below it never break. delay: seconds before the fault, or bounds to draw between.
    seed: equal on all ranks. callback: called on a rank right before it breaks. Call this in the main thread.
    Raises: ConfigurationError; RuntimeError from torch for GPU_SLEEP without CUDA."""
    if callback is not None and not callable(callback):
        raise ConfigurationTypeError(
            f"callback is {callback!r}, expected a function without arguments, or None", option="callback"
        )
    rank, world_size = rank_and_world_size()
    drawn = draw(faults, num_faults, keep_alive, delay, seed, world_size)
    if rank in drawn.ranks:
        _start(drawn, callback)


def draw(
    faults: Sequence[Fault],
    num_faults: int | Sequence[int],
    keep_alive: int,
    delay: float | Sequence[float],
    seed: int,
    world_size: int,
) -> Draw:
    """Return what the arguments yield, the same on every rank. Raises: ConfigurationError."""
    chosen_from = _faults(faults)
    options.whole("keep_alive", keep_alive, 0)
    fewest, most = _bounds("num_faults", num_faults, int, "a whole number")
    earliest, latest = _bounds("delay", delay, float, "a number of seconds")
    if not isinstance(seed, int | float | str | bytes):
        raise ConfigurationTypeError(
            f"seed is {seed!r}, expected a number that is equal on all ranks: they draw the same ranks from it",
            option="seed",
        )
    chance = random.Random(seed)
    seconds = chance.uniform(earliest, latest)
    breakable = range(min(keep_alive, world_size), world_size)
    count = min(chance.randint(int(fewest), int(most)), len(breakable))
    return Draw(ranks=tuple(sorted(chance.sample(breakable, count))), fault=chance.choice(chosen_from), delay=seconds)


def _faults(faults: Any) -> list[Fault]:
    is_ordered = isinstance(faults, Sequence) or faults is Fault  # a set has another order on each rank
    chosen_from = list(faults) if is_ordered else []
    if not chosen_from or not all(isinstance(fault, Fault) for fault in chosen_from):
        raise ConfigurationTypeError(
            f"faults is {faults!r}, expected a list of one or more of Fault, such as [Fault.KILL]", option="faults"
        )
    return chosen_from


def _bounds(name: str, value: Any, kind: type, what: str) -> tuple[float, float]:
    """Return the lower and upper bound of a number, or of two in a sequence. Raises: ConfigurationError."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value, value]
    expected = f"expected {what} from 0, or two with the smaller one first"
    if len(pair) != 2 or not all(isinstance(bound, int | kind) and not isinstance(bound, bool) for bound in pair):
        raise ConfigurationTypeError(f"{name} is {value!r} ({type(value).__name__}), {expected}", option=name)
    lowest, highest = pair
    if not 0 <= lowest <= highest < math.inf:
        raise ConfigurationError(f"{name} is {value!r}, {expected}", option=name)
    return lowest, highest


def _start(drawn: Draw, callback: Callable[[], Any] | None) -> None:
    strike = _prepared(drawn.fault)

    def wait_and_strike() -> None:
        time.sleep(drawn.delay)
        if callback is not None:
            callback()
        strike()

    threading.Thread(target=wait_and_strike, name=f"inject-{drawn.fault.name.lower()}", daemon=True).start()


_SIGNALS = {
    Fault.SIGNAL_EXC: signal.SIGUSR1,
    Fault.INT: signal.SIGINT,
    Fault.KILL: signal.SIGKILL,
    Fault.TERM: signal.SIGTERM,
    Fault.STOP: signal.SIGSTOP,
}


def _prepared(fault: Fault) -> Callable[[], object]:
    """Return a function that breaks this process. Parts that need the main thread run here."""
    if fault in _SIGNALS:
        if fault is Fault.SIGNAL_EXC:
            signal.signal(signal.SIGUSR1, _raise_injected)
        return lambda: os.kill(os.getpid(), _SIGNALS[fault])
    if fault is Fault.ASYNC_EXC:
        main = threading.main_thread().ident or 0
        return lambda: async_raise(main, InjectedException)
    if fault is Fault.GPU_SLEEP:
        device = _cuda().current_device()
        return lambda: _sleep_on(device)
    strikes = {Fault.GPU: _break_device, Fault.ABORT: os.abort, Fault.GIL: _hold_gil, Fault.SEGFAULT: _read_nowhere}
    return strikes[fault]


def _raise_injected(number: int, frame: FrameType | None) -> None:
    raise InjectedException("injected by a signal")


def _hold_gil() -> None:
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
    while True:
        libc.sleep(1_000_000)  # a signal ends it early


def _read_nowhere() -> object:
    return ctypes.c_char.from_address(1).value


def _cuda() -> Any:
    import torch

    return torch.cuda


def _break_device() -> None:
    import torch

    ones = torch.ones(1, dtype=torch.int64, device="cuda")
    ones[ones] = 0  # index 1 of one element


def _sleep_on(device: int) -> None:
    cuda = _cuda()
    cuda.set_device(device)
    cuda._sleep(1 << 62)


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
