"""How the demonstration looks: a picture of the ranks that is redrawn in a terminal, plain lines elsewhere.

`picture`, `progress` and `happened_line` are pure: they turn a `View` into styled lines. `Screen` puts lines where they
belong, cut to the width of the terminal, and needs nothing but the usual escape sequences; colours are `render`'s."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TextIO

import msgspec

from resilience.cli.demo_board import Doing, Return, Row, Strike
from resilience.cli.demo_faults import HANG_LIMIT, Fault
from resilience.cli.ending import signals_deferred
from resilience.cli.render import Line, Piece, count, cut_line, may_paint, painted, seconds

_BAR = 30
_ASCII = str.maketrans({"█": "#", "░": ".", "…": "~", "·": "-"})
_NAMES = {"exception": "exception", "kill": "SIGKILL", "hang": "hang"}


class Happened(msgspec.Struct, frozen=True):
    """A planned fault, and what has become of it so far."""

    fault: Fault
    strike: Strike | None
    returns: tuple[Return, ...]
    ranks: int

    @property
    def recovered_after(self) -> float | None:
        """Seconds from the fault until all active ranks train again, None while they do not."""
        if self.strike is None or len(self.returns) < self.ranks:
            return None
        # A spare that steps in later comes back after this fault too.
        return sorted(back.at for back in self.returns)[self.ranks - 1] - self.strike.at

    @property
    def steps_again(self) -> int:
        return self.fault.step - min((back.step for back in self.returns), default=self.fault.step)


class View(msgspec.Struct, frozen=True):
    """One look at a run. ended: exit code of processes that ended, minus the signal for a killed one."""

    rows: tuple[Row, ...]
    pids: tuple[int, ...]
    ended: dict[int, int]
    happened: tuple[Happened, ...]
    ranks: int
    steps: int

    @property
    def step(self) -> int:
        """Steps that are done: by the newest iteration, since an older one's may have been lost."""
        active = [row for process, row in enumerate(self.rows) if self.is_active(process)]
        newest = max((row.iteration for row in active), default=0)
        return min((row.step for row in active if row.iteration == newest), default=0)

    @property
    def restarts(self) -> int:
        return max(row.iteration for row in self.rows)

    @property
    def loss(self) -> float:
        """Mean over all ranks in the last step, 0 before the first."""
        return next((row.loss for process, row in enumerate(self.rows) if self.is_active(process) and row.loss), 0.0)

    def is_active(self, process: int) -> bool:
        row = self.rows[process]
        return row.doing is not Doing.WAITING and row.rank < self.ranks and self.ended.get(process, 0) == 0


def name_of(fault: Fault) -> str:
    return _NAMES[fault.kind]


# -- pictures -----------------------------------------------------------------------------------


def picture(view: View) -> list[Line]:
    """Return the whole picture: a line a process, the progress, a line a fault."""
    lines: list[Line] = [(("  process     pid   rank   state         step", "dim"),)]
    lines += [_process_line(view, process) for process in range(len(view.rows))]
    lines += [(), _bar(view)]
    if view.happened:
        lines += [(), *(happened_line(happened) for happened in view.happened)]
    return lines


def _process_line(view: View, process: int) -> Line:
    row = view.rows[process]
    word, style = _state(view, process)
    is_placed = view.is_active(process) or row.doing is Doing.RESTARTING
    rank = str(row.rank) if is_placed else "-"
    step = str(row.step) if row.doing is not Doing.STARTING and rank != "-" else ""
    return ((f"  {process:7} {view.pids[process]:7}   {rank:>4}   ", ""), (f"{word:12}", style), (f" {step:>5}", ""))


def _state(view: View, process: int) -> tuple[str, str]:
    code = view.ended.get(process)
    row = view.rows[process]
    if code is not None and code < 0:
        return signal.Signals(-code).name, "bold red"
    if code:
        return f"failed ({code})", "bold red"
    struck = [happened for happened in view.happened if happened.strike and happened.strike.process == process]
    if any(h.strike and h.strike.iteration == row.iteration and h.fault.kind == "hang" for h in struck):
        return "hanging", "bold red"
    return {
        Doing.STARTING: ("starting", "yellow"),
        Doing.TRAINING: ("training", "green"),
        Doing.WAITING: ("spare", "cyan"),
        Doing.RESTARTING: ("restarting", "yellow"),
        Doing.FINISHED: ("finished", "green"),
    }[row.doing]


def _bar(view: View) -> Line:
    filled = _BAR * view.step // view.steps
    return (("  ", ""), ("█" * filled, "green"), ("░" * (_BAR - filled), "dim"), (progress(view), ""))


def progress(view: View) -> str:
    """Return step, loss and restarts in words."""
    loss = f"   loss {view.loss:.3f}" if view.loss else ""
    restarts = f"   restarts {view.restarts}" if view.happened or view.restarts else ""
    return f"  step {view.step:4}/{view.steps}{loss}{restarts}"


def happened_line(happened: Happened) -> Line:
    """Return what is known of a fault so far."""
    fault, strike = happened.fault, happened.strike
    what = f"  step {fault.step:4}  {name_of(fault):9} "
    if strike is None:
        return ((f"{what} planned for rank {fault.rank}", "dim"),)
    where = (f"{what} process {strike.process}, rank {fault.rank}  ", "")
    after = happened.recovered_after
    if after is None:
        silent = f"silent, noticed after {seconds(HANG_LIMIT)}"
        return (where, (silent if fault.kind == "hang" else "restarting", "yellow"))
    again = "" if not happened.steps_again else f", {count(happened.steps_again, 'step')} again"
    return (where, (f"back after {seconds(after)}", "green"), (again, ""))


# -- the screen ---------------------------------------------------------------------------------


class Screen:
    """Where lines go. `show` replaces what the last `show` drew; `say` stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._paint = may_paint(stream)
        self._drawn = 0
        self._has_unicode = (stream.encoding or "ascii").lower().replace("-", "") == "utf8"

    def say(self, *pieces: Piece | str) -> None:
        """Write one line for good."""
        self.settle()
        line = tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces)
        self._write(self._styled(line) + "\n")

    def show(self, lines: list[Line]) -> None:
        """Draw `lines` over those drawn before. Only where `is_live`."""
        size = shutil.get_terminal_size()
        cut = [cut_line(line, size.columns - 1) for line in lines[: size.lines - 1]]  # taller could not be redrawn
        up = f"\x1b[{self._drawn}F" if self._drawn else "\x1b[?25l"
        with signals_deferred():  # half a picture could not be drawn over
            self._write(up + "".join(f"\x1b[2K{self._styled(line)}\n" for line in cut) + "\x1b[J")
            self._drawn = len(cut)

    def settle(self) -> None:
        """Let what was shown last stay, and give the cursor back."""
        if self._drawn:
            self._drawn = 0
            self._write("\x1b[?25h")

    def _styled(self, line: Line) -> str:
        text = painted(line, self._paint)
        return text if self._has_unicode else text.translate(_ASCII)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
