"""Shows the state of a job until it ends or the user leaves: reads in one thread, draws and takes keys in another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilience.status.screen import Screen
from resilience.status.state import Now, Watcher
from resilience.status.view import StatusView, frame, pressed
from resilience.telemetry import rank_snapshot

EVERY = 1.0  # seconds between two reads with --watch, and between two frames
LOOKS_A_PAUSE = 8  # reads per interval in which each rank of a large job updates its snapshot once
WIDEST = 200  # columns that are used
RATE_OVER = 10.0  # seconds over which steps are counted


def on_screen(folder: Path) -> Now | None:
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


def pause(now: Now | None, took: float) -> float:
    """Return the seconds to wait before the next read. took: seconds that the last read took.

    Ranks of a large job update their snapshots less often, because they may share a file server. Reads load it too."""
    world = len(now.ranks) if now is not None else 1
    return max(
        EVERY, rank_snapshot.pause(world) / LOOKS_A_PAUSE if world > rank_snapshot.FILES_PER_SECOND else EVERY, 2 * took
    )


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
        steps_now = [rank.step for rank in now.ranks if rank.step is not None and not rank.is_old] if now else []
        highest = max(steps_now, default=None)
        if highest is None:
            if self._steps and at - self._steps[-1][0] > RATE_OVER:
                self._steps = []  # what is older says nothing about the present speed
            return
        if self._steps and highest < self._steps[-1][1]:
            self._steps = []  # the job went back to a checkpoint
        steps = [*self._steps, (at, highest)]
        while len(steps) > 2 and at - steps[1][0] >= RATE_OVER:
            steps = steps[1:]
        self._steps = steps
