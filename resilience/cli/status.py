"""`resilience status RUN`: a live job: ranks, states, steps, open sections against their limits, restarts.

Read from the run folder alone, at once or again and again (--watch), on a terminal as a screen that keys change. Exit
status: 0 while the job runs or once it has completed, 1 if it ended otherwise."""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilience.analysis.status import Now, Watcher
from resilience.cli.render import NARROWEST, say, say_json, show
from resilience.cli.run_argument import add_run, find_run
from resilience.cli.status_screen import Screen, is_possible
from resilience.cli.status_view import View, frame, pressed, status_lines
from resilience.core import encoding
from resilience.errors import ConfigurationError
from resilience.telemetry import signs

EVERY = 1.0  # seconds between two looks with --watch, and two frames
LOOKS_A_PAUSE = 8  # looks in the time in which every rank of a large job shows something new once
LEAST_ROWS = 8
AROUND = 9  # lines beside the table
WIDEST = 200  # columns that are made use of
RATE_OVER = 10.0  # seconds over which steps are counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show how a job is doing: ranks, states, steps, open sections against their limits, restarts."
    add_run(parser)
    parser.add_argument(
        "--watch", action="store_true", help="look again every second, until the job ends; on a terminal, h is for help"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object, with --watch one a line")
    parser.add_argument("--all", action="store_true", help="show every rank, not only as many as fit")


def run(arguments: argparse.Namespace) -> int:
    """Show the job; return the exit status. Raises: ConfigurationError for an argument that names no run."""
    folder = find_run(arguments.run)
    is_screen = arguments.watch and not arguments.json and not arguments.all and is_possible()
    try:
        now = _on_screen(folder) if is_screen else None
        if is_screen and (now is None or now.phase != "ended"):
            return 0  # whoever watched has left
        return _printed(folder, arguments, now)
    except KeyboardInterrupt:
        return 0


def _printed(folder: Path, arguments: argparse.Namespace, now: Now | None) -> int:
    """Print one look, or with --watch many, until the job ends. now: the last one, where it has ended already."""
    watcher = Watcher(folder)
    while True:
        began = time.monotonic()
        now = now or watcher.look()
        if now is None and not arguments.watch:
            raise ConfigurationError(f"{folder} has nothing on record yet; --watch waits for it")
        if now is not None:
            _show(now, arguments)
        if not arguments.watch or (now is not None and now.phase == "ended"):
            return 0 if now is None or now.is_well else 1
        time.sleep(pause(now, time.monotonic() - began))
        now = None


def _show(now: Now, arguments: argparse.Namespace) -> None:
    if arguments.json:
        encoded = encoding.to_json(now) + b"\n" if arguments.watch else encoding.to_json_page(now)
        say_json(encoded)
        return
    columns, height = shutil.get_terminal_size((80, 24))
    rows = len(now.ranks) if arguments.all else max(LEAST_ROWS, height - AROUND)
    show(status_lines(now, min(max(columns, NARROWEST), WIDEST), rows))
    if arguments.watch and now.phase != "ended":
        say("")


def pause(now: Now | None, took: float) -> float:
    """Return the seconds until another look is worth its while. took: seconds that the last one did.

    Ranks of a large job show what is new less often, for they may share a file server, and looking costs it as much."""
    world = len(now.ranks) if now is not None else 1
    return max(EVERY, signs.pause(world) / LOOKS_A_PAUSE if world > signs.A_SECOND else EVERY, 2 * took)


# -- the screen --------------------------------------------------------------------------------


def _on_screen(folder: Path) -> Now | None:
    """Show the job until it ends or the person leaves; answers what was seen last."""
    looker = _Looker(folder)
    view = View()
    page = 1
    with Screen.taken() as screen:
        looker.start(screen.wake)
        try:
            while True:
                columns, lines = screen.size
                now, age, rate = looker.seen()
                drawn = frame(now, view, min(columns, WIDEST), max(3, lines), age, rate)
                view, page = msgspec.structs.replace(view, top=drawn.top), drawn.page
                screen.draw(drawn.lines)
                if now is not None and now.phase == "ended" and not view.is_paused:
                    return now
                for key in screen.keys(EVERY):
                    changed = pressed(view, key, page)
                    if changed is None:
                        return now
                    view = changed
                looker.is_paused = view.is_paused
        except EOFError:
            return now
        finally:
            looker.stop()


class _Looker:
    """Looks at the folder in a thread of its own, so that keys are answered while a slow disk is not."""

    def __init__(self, folder: Path) -> None:
        self.is_paused = False
        self._watcher = Watcher(folder)
        self._done = threading.Event()
        self._seen: tuple[Now | None, float] = (None, time.monotonic())
        self._steps: list[tuple[float, int]] = []  # when, and the highest step; the first is RATE_OVER ago
        self._failure: Exception | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="resilience-status", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Begin. wake: is called after each look."""
        self._wake = wake
        self._thread.start()

    def stop(self) -> None:
        """Look no more, and wake nobody. Does not wait for a look at a slow disk."""
        self._wake = lambda: None
        self._done.set()

    def seen(self) -> tuple[Now | None, float, float | None]:
        """Return the last look, its age in seconds, and steps a second. Raises what looking raised."""
        if self._failure is not None:
            raise self._failure
        now, at = self._seen
        return now, time.monotonic() - at, self._rate()

    def _rate(self) -> float | None:
        steps = list(self._steps)
        if len(steps) < 2 or steps[-1][1] <= steps[0][1]:
            return None
        return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                began = time.monotonic()
                now = self._watcher.look()
                if not self.is_paused:
                    self._note(now, began)
                    self._wake()
                self._done.wait(pause(now, time.monotonic() - began))
        except Exception as error:  # the thread's edge: `seen` raises it where it is told
            self._failure = error
            self._wake()

    def _note(self, now: Now | None, at: float) -> None:
        self._seen = (now, at)
        highest = max((rank.step for rank in now.ranks if rank.step is not None), default=None) if now else None
        if highest is None:
            return
        if self._steps and highest < self._steps[-1][1]:
            self._steps = []  # it went back, to a checkpoint
        steps = [*self._steps, (at, highest)]
        while len(steps) > 2 and at - steps[1][0] >= RATE_OVER:
            steps = steps[1:]
        self._steps = steps
