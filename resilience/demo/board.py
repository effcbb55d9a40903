"""A shared board with the current activity of each rank of the demonstration.

The board is shared memory: writing and reading cost next to nothing, and the last entry of a killed rank stays
readable."""

from __future__ import annotations

import mmap
import time
from enum import IntEnum

import msgspec


class DemoActivity(IntEnum):
    """What a rank's process does, as the board shows it."""

    STARTING = 0
    TRAINING = 1
    WAITING = 2  # as a spare
    RESTARTING = 3
    FINISHED = 4


class DemoRow(msgspec.Struct, frozen=True):
    """One process on the board. rank: its current rank; loss: 0 before the first step."""

    doing: DemoActivity
    rank: int
    iteration: int
    step: int
    loss: float


class Strike(msgspec.Struct, frozen=True):
    """An injected fault: the process (its initial rank), the iteration, and the time."""

    process: int
    iteration: int
    at: float


class Return(msgspec.Struct, frozen=True):
    """The time at which a process trained again after a fault, and its first step."""

    at: float
    step: int


class DemoBoard:
    """Numbers in shared memory. Each has one writer at a time; times are monotonic seconds."""

    _ROW, _STRIKE = 5, 4

    def __init__(self, processes: int, faults: int) -> None:
        self._processes = processes
        self._strikes_at = processes * self._ROW
        self._returns_at = self._strikes_at + faults * self._STRIKE
        size = self._returns_at + faults * processes * 2
        self._numbers = memoryview(mmap.mmap(-1, 8 * size)).cast("d")

    def row(self, process: int) -> DemoRow:
        doing, rank, iteration, step, loss = self._numbers[process * self._ROW :][: self._ROW]
        return DemoRow(DemoActivity(int(doing)), int(rank), int(iteration), int(step), loss)

    def seat(self, process: int, doing: DemoActivity, rank: int, iteration: int) -> None:
        start = process * self._ROW
        self._numbers[start], self._numbers[start + 1], self._numbers[start + 2] = doing, rank, iteration

    def progress(self, process: int, step: int, loss: float | None = None) -> None:
        start = process * self._ROW
        self._numbers[start], self._numbers[start + 3] = DemoActivity.TRAINING, step
        if loss is not None:
            self._numbers[start + 4] = loss

    def do(self, process: int, doing: DemoActivity) -> None:
        self._numbers[process * self._ROW] = doing

    def strike(self, fault: int, process: int) -> None:
        """Record that `fault` is about to hit `process`."""
        start = self._strikes_at + fault * self._STRIKE
        self._numbers[start + 1], self._numbers[start + 2] = process, self.row(process).iteration
        self._numbers[start + 3] = time.monotonic()
        self._numbers[start] = 1

    def struck(self, fault: int) -> Strike | None:
        start = self._strikes_at + fault * self._STRIKE
        is_struck, process, iteration, at = self._numbers[start : start + self._STRIKE]
        return Strike(int(process), int(iteration), at) if is_struck else None

    def came_back(self, fault: int, process: int, step: int) -> None:
        """Record that `process` trains again after `fault`, starting at `step`."""
        start = self._returns_at + (fault * self._processes + process) * 2
        if not self._numbers[start]:
            self._numbers[start + 1] = step
            self._numbers[start] = time.monotonic()

    def returns(self, fault: int) -> list[Return]:
        """Return the returns of the processes that trained again after `fault`."""
        start = self._returns_at + fault * self._processes * 2
        cells = self._numbers[start : start + self._processes * 2].tolist()
        return [Return(at, int(step)) for at, step in zip(cells[::2], cells[1::2], strict=True) if at]
