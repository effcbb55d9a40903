"""`resilience status RUN`: the state of a job now: ranks, steps, open sections against their limits, restarts.

Reads only the run folder, once or repeatedly (--watch). On a terminal, --watch shows an interactive screen. Exit
status: 0 while the job runs and after it completed, 1 if it ended otherwise."""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilience.cli.run_argument import add_run, find_readable_run
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.status.screen import Screen, is_possible
from resilience.status.state import Now, Watcher
from resilience.status.view import StatusView, frame, pressed, status_lines
from resilience.system.render import NARROWEST, say, say_json, show
from resilience.telemetry import rank_snapshot

EVERY = 1.0  # seconds between two reads with --watch, and between two frames
LOOKS_A_PAUSE = 8  # reads per interval in which each rank of a large job updates its snapshot once
LEAST_ROWS = 8
AROUND = 9  # lines above and below the table
WIDEST = 200  # columns that are used
RATE_OVER = 10.0  # seconds over which steps are counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show the current state of a job: ranks, steps, open sections against their limits, restarts."
    add_run(parser)
    parser.add_argument(
        "--watch", action="store_true", help="refresh every second until the job ends; on a terminal, press h for help"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object; with --watch, one per line")
    parser.add_argument("--all", action="store_true", help="show all ranks, even if they do not fit on the screen")


def run(arguments: argparse.Namespace) -> int:
    """Show the job; return the exit status. Raises: ConfigurationError for an argument that names no run."""
    folder = find_readable_run(arguments.run)
    is_screen = arguments.watch and not arguments.json and not arguments.all and is_possible()
    try:
        now = _on_screen(folder) if is_screen else None
        if is_screen and (now is None or now.phase != "ended"):
            return 0  # the user left the screen
        return _printed(folder, arguments, now)
    except KeyboardInterrupt:
        return 0


def _printed(folder: Path, arguments: argparse.Namespace, now: Now | None) -> int:
    """Print the state once, or with --watch until the job ends. now: the last state, if the job has ended already."""
    watcher = Watcher(folder)
    while True:
        began = time.monotonic()
        now = now or watcher.look()
        if now is None and not arguments.watch:
            raise ConfigurationError(f"{folder} has no records yet; --watch waits for them")
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
    """Return the seconds to wait before the next read. took: seconds that the last read took.

    Ranks of a large job update their snapshots less often, because they may share a file server. Reads load it too."""
    world = len(now.ranks) if now is not None else 1
    return max(EVERY, rank_snapshot.pause(world) / LOOKS_A_PAUSE if world > rank_snapshot.A_SECOND else EVERY, 2 * took)


# -- the screen --------------------------------------------------------------------------------


def _on_screen(folder: Path) -> Now | None:
    """Show the job until it ends or the user leaves. Return the last state."""
    looker = _Looker(folder)
    view = StatusView()
    page = 1
    with Screen.taken() as screen:
        looker.start(screen.wake)
        try:
            while True:
                columns, lines = screen.size
                now, age, rate = looker.latest()
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
    """Reads the folder in its own thread, so that keys respond while the disk is slow."""

    def __init__(self, folder: Path) -> None:
        self.is_paused = False
        self._watcher = Watcher(folder)
        self._done = threading.Event()
        self._latest: tuple[Now | None, float] = (None, time.monotonic())
        self._steps: list[tuple[float, int]] = []  # (time, highest step); the first entry is about RATE_OVER old
        self._failure: Exception | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="resilience-status", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread. wake: called after each read."""
        self._wake = wake
        self._thread.start()

    def stop(self) -> None:
        """Stop reading and calling `wake`. Does not wait for a read in progress."""
        self._wake = lambda: None
        self._done.set()

    def latest(self) -> tuple[Now | None, float, float | None]:
        """Return the last state, its age in seconds, and steps per second. Raises what the thread raised."""
        if self._failure is not None:
            raise self._failure
        now, at = self._latest
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
        except Exception as error:  # edge of the thread: `latest` raises it again
            self._failure = error
            self._wake()

    def _note(self, now: Now | None, at: float) -> None:
        self._latest = (now, at)
        highest = max((rank.step for rank in now.ranks if rank.step is not None), default=None) if now else None
        if highest is None:
            return
        if self._steps and highest < self._steps[-1][1]:
            self._steps = []  # the job went back to a checkpoint
        steps = [*self._steps, (at, highest)]
        while len(steps) > 2 and at - steps[1][0] >= RATE_OVER:
            steps = steps[1:]
        self._steps = steps
