"""The display of the demonstration: a picture of the ranks that a terminal redraws, plain lines elsewhere.

`picture`, `progress` and `fault_line` are pure: they turn a `DemoView` into styled lines. `DemoScreen` writes the
lines, cut to the width of the terminal, with common escape sequences only. Colours come from `render`."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TextIO

import msgspec

from resilience.demo.board import DemoActivity, DemoRow, Return, Strike
from resilience.demo.faults import HANG_LIMIT, DemoFault
from resilience.facts.in_words import count, seconds
from resilience.system.exit_signals import signals_deferred
from resilience.system.render import Line, Piece, cut_line, may_paint, painted

_BAR = 30
_ASCII = str.maketrans({"█": "#", "░": ".", "…": "~", "·": "-"})
_NAMES = {"exception": "exception", "kill": "SIGKILL", "hang": "hang"}


class FaultProgress(msgspec.Struct, frozen=True):
    """A planned fault, and its progress so far: struck, recovered."""

    fault: DemoFault
    strike: Strike | None
    returns: tuple[Return, ...]
    ranks: int

    @property
    def recovered_after(self) -> float | None:
        """Seconds from the fault until all active ranks train again; None until they do."""
        if self.strike is None or len(self.returns) < self.ranks:
            return None
        # A spare that joins later also counts as a return after this fault.
        return sorted(back.at for back in self.returns)[self.ranks - 1] - self.strike.at

    @property
    def steps_again(self) -> int:
        return self.fault.step - min((back.step for back in self.returns), default=self.fault.step)


class DemoView(msgspec.Struct, frozen=True):
    """The state of a run. ended: exit codes of ended processes, the negative signal number for killed ones."""

    rows: tuple[DemoRow, ...]
    pids: tuple[int, ...]
    ended: dict[int, int]
    fault_progress: tuple[FaultProgress, ...]
    ranks: int
    steps: int

    @property
    def step(self) -> int:
        """Completed steps of the newest iteration. Steps of an older one may have been lost."""
        active = [row for process, row in enumerate(self.rows) if self.is_active(process)]
        newest = max((row.iteration for row in active), default=0)
        return min((row.step for row in active if row.iteration == newest), default=0)

    @property
    def restarts(self) -> int:
        return max(row.iteration for row in self.rows)

    @property
    def loss(self) -> float:
        """Mean loss of all ranks in the last step; 0 before the first step."""
        return next((row.loss for process, row in enumerate(self.rows) if self.is_active(process) and row.loss), 0.0)

    def is_active(self, process: int) -> bool:
        row = self.rows[process]
        return row.doing is not DemoActivity.WAITING and row.rank < self.ranks and self.ended.get(process, 0) == 0


def name_of(fault: DemoFault) -> str:
    return _NAMES[fault.kind]


# -- pictures -----------------------------------------------------------------------------------


def picture(view: DemoView) -> list[Line]:
    """Return the whole picture: one line per process, the progress, one line per fault."""
    lines: list[Line] = [(("  process     pid   rank   state         step", "dim"),)]
    lines += [_process_line(view, process) for process in range(len(view.rows))]
    lines += [(), _bar(view)]
    if view.fault_progress:
        lines += [(), *(fault_line(fault_progress) for fault_progress in view.fault_progress)]
    return lines


def _process_line(view: DemoView, process: int) -> Line:
    row = view.rows[process]
    word, style = _state(view, process)
    is_placed = view.is_active(process) or row.doing is DemoActivity.RESTARTING
    rank = str(row.rank) if is_placed else "-"
    step = str(row.step) if row.doing is not DemoActivity.STARTING and rank != "-" else ""
    return ((f"  {process:7} {view.pids[process]:7}   {rank:>4}   ", ""), (f"{word:12}", style), (f" {step:>5}", ""))


def _state(view: DemoView, process: int) -> tuple[str, str]:
    code = view.ended.get(process)
    row = view.rows[process]
    if code is not None and code < 0:
        return signal.Signals(-code).name, "bold red"
    if code:
        return f"failed ({code})", "bold red"
    struck = [
        fault_progress
        for fault_progress in view.fault_progress
        if fault_progress.strike and fault_progress.strike.process == process
    ]
    if any(h.strike and h.strike.iteration == row.iteration and h.fault.kind == "hang" for h in struck):
        return "hanging", "bold red"
    return {
        DemoActivity.STARTING: ("starting", "yellow"),
        DemoActivity.TRAINING: ("training", "green"),
        DemoActivity.WAITING: ("spare", "cyan"),
        DemoActivity.RESTARTING: ("restarting", "yellow"),
        DemoActivity.FINISHED: ("finished", "green"),
    }[row.doing]


def _bar(view: DemoView) -> Line:
    filled = _BAR * view.step // view.steps
    return (("  ", ""), ("█" * filled, "green"), ("░" * (_BAR - filled), "dim"), (progress(view), ""))


def progress(view: DemoView) -> str:
    """Return step, loss and restarts as text."""
    loss = f"   loss {view.loss:.3f}" if view.loss else ""
    restarts = f"   restarts {view.restarts}" if view.fault_progress or view.restarts else ""
    return f"  step {view.step:4}/{view.steps}{loss}{restarts}"


def fault_line(fault_progress: FaultProgress) -> Line:
    """Return the line of a fault: planned, in progress, or recovered."""
    fault, strike = fault_progress.fault, fault_progress.strike
    label = f"  step {fault.step:4}  {name_of(fault):9} "
    if strike is None:
        return ((f"{label} planned for rank {fault.rank}", "dim"),)
    place = (f"{label} process {strike.process}, rank {fault.rank}  ", "")
    recovery_s = fault_progress.recovered_after
    if recovery_s is None:
        detection = f"silent, detected after {seconds(HANG_LIMIT)}"
        return (place, (detection if fault.kind == "hang" else "restarting", "yellow"))
    repeated = "" if not fault_progress.steps_again else f", {count(fault_progress.steps_again, 'step')} redone"
    return (place, (f"back after {seconds(recovery_s)}", "green"), (repeated, ""))


# -- the screen ---------------------------------------------------------------------------------


class DemoScreen:
    """Writes lines. `show` replaces the output of the last `show`; `say` writes permanently."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._paint = may_paint(stream)
        self._drawn = 0
        self._has_unicode = (stream.encoding or "ascii").lower().replace("-", "") == "utf8"

    def say(self, *pieces: Piece | str) -> None:
        """Write one permanent line."""
        self.settle()
        line = tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces)
        self._write(self._styled(line) + "\n")

    def show(self, lines: list[Line]) -> None:
        """Draw `lines` over the previous ones. Only if `is_live`."""
        size = shutil.get_terminal_size()
        cut = [
            cut_line(line, size.columns - 1) for line in lines[: size.lines - 1]
        ]  # a taller picture could not be redrawn
        up = f"\x1b[{self._drawn}F" if self._drawn else "\x1b[?25l"
        with signals_deferred():  # an incomplete picture could not be redrawn
            self._write(up + "".join(f"\x1b[2K{self._styled(line)}\n" for line in cut) + "\x1b[J")
            self._drawn = len(cut)

    def settle(self) -> None:
        """Keep the last picture and show the cursor again."""
        if self._drawn:
            self._drawn = 0
            self._write("\x1b[?25h")

    def _styled(self, line: Line) -> str:
        text = painted(line, self._paint)
        return text if self._has_unicode else text.translate(_ASCII)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
