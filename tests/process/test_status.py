"""`resilience status --watch` on a live job and a real terminal: keys, sizes, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilience.facts.identity import Origin
from resilience.telemetry import rank_snapshot
from tests.process.launching import Launched, launcher
from tests.support.launch_streams import launched
from tests.support.ranks import Job

LIMIT = 60.0  # seconds that anything may take
# A session of its own whose terminal is the test's; job control as a shell does it, so that Ctrl-Z means something.
SHELL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-m", "resilience.cli", "status", *sys.argv[1:]])
while True:
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        sys.exit(os.waitstatus_to_exitcode(status) % 256)
    os.tcsetpgrp(0, os.getpid())
    print("STOPPED", flush=True)
    sys.stdin.readline()
    os.tcsetpgrp(0, child)
    os.killpg(child, signal.SIGCONT)
"""
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._ours, theirs = os.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SHELL, str(folder), *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=env | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )
        self._written = b""

    @property
    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    @property
    def written(self) -> str:
        """All that the program wrote so far."""
        while select.select([self._ours], [], [], 0.0)[0]:
            self._written += os.read(self._ours, 65536)
        return self._written.decode(errors="ignore")

    @property
    def screen(self) -> list[str]:
        """The last frame that was drawn to its end, as a person sees it."""
        frames = re.findall(r"\x1b\[H(.*?)\x1b\[\?25l", self.written, re.DOTALL)
        return re.split(r"\r+\n", re.sub(r"\x1b\[[0-9;]*[mK]", "", frames[-1])) if frames else []

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < deadline, "\n".join(self.screen) or self.written
            time.sleep(0.02)

    def shows(self, pattern: str) -> None:
        """Wait until some line of the screen matches."""
        self.until(lambda: any(re.search(pattern, line) for line in self.screen))

    def wait(self) -> int:
        """Wait for the program's end; answers its exit status."""
        deadline = time.monotonic() + LIMIT
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.written[-2000:]
            _ = self.written  # a full terminal would hold it
            time.sleep(0.02)
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._theirs)
        os.close(self._ours)  # whatever is still in there gets SIGHUP


@contextmanager
def terminal(folder: Path, *arguments: str, **size: int) -> Iterator[Terminal]:
    made = Terminal(folder, "--watch", *arguments, **size)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def job(start: Callable[..., Job], tmp_path: Path) -> Launched:
    """Two ranks: one goes on until it is told to end, the other is in a section and does nothing."""
    made = launcher(start, tmp_path)(
        """
        import resilience
        resilience.step(5)
        if rank == 1:
            with resilience.section("load batch"):
                say("in")
                await_file("go", 300)
        else:
            step = 6
            while not (here / "go").exists():
                resilience.step(step)
                step += 1
                time.sleep(0.02)
        """,
        "--ft-rank-section-timeouts",
        "load batch:600",
        "--ft-rank-heartbeat-timeout",
        "600",
    )
    made.await_worker("in.0.1")
    return made


def finish(job: Launched, folder: Path) -> None:
    (folder / "go").touch()
    assert job.wait() == [0]


def test_screen_follows_the_job_keys_and_the_size_of_the_terminal(job: Launched, tmp_path: Path) -> None:
    with terminal(job.job.run) as shown:
        shown.shows(r"^ *1 +\d+ +node0 +active +5 +load batch +[\d.]+m?s / 10m00s")
        shown.shows(r"step +5 to \d+, [\d.]+ per second")
        first = shown.screen
        assert len(first) == 24 and max(map(len, first)) <= 80
        order = [line.split()[0] for line in first if "node0" in line]
        assert order == ["1", "0"]  # by staleness
        shown.press("s")
        shown.shows("ranks by limit")
        shown.press("g")
        shown.shows("2 groups by limit")
        shown.press("gg/0\r")
        shown.shows("1-1 of 1 rank by limit, filter '0', 2 ranks in all")
        shown.press("\x1b")
        shown.shows("1-2 of 2 ranks")
        shown.resize(140, 40)
        shown.until(lambda: len(shown.screen) == 40)
        shown.shows("limit used")
        shown.resize(50, 10)
        shown.until(lambda: len(shown.screen) == 10)
        assert max(map(len, shown.screen)) <= 50
        shown.press("h")
        shown.shows("next or previous order")
        shown.press("q")
        assert shown.wait() == 0
        assert shown.modes == shown.before
        shown.until(lambda: shown.written.endswith(LEAVE))  # a terminal may pass on the last bytes after the end
        assert shown.written.count(ENTER) == shown.written.count(LEAVE) == 1
    finish(job, tmp_path)


def test_pause_holds_what_is_seen(job: Launched, tmp_path: Path) -> None:
    def steps() -> list[str]:
        return [line for line in shown.screen if line.lstrip().startswith("step ")]

    with terminal(job.job.run) as shown:
        shown.shows(r"step +5 to \d+")
        shown.press(" ")
        shown.shows("PAUSED, as of")
        held = steps()
        shown.shows("as of 3")
        assert steps() == held
        shown.press(" ")
        shown.until(lambda: steps() != held)
        shown.press("q")
        assert shown.wait() == 0
    finish(job, tmp_path)


@pytest.mark.parametrize(
    "number",
    ["\x03", pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
)
def test_terminal_is_as_before_however_it_is_ended(number: str | int, job: Launched, tmp_path: Path) -> None:
    with terminal(job.job.run) as shown:
        shown.shows("load batch")
        assert shown.modes != shown.before
        if isinstance(number, str):
            shown.press(number)
        else:
            os.kill(os.tcgetpgrp(shown._ours), number)
        assert shown.wait() == 0
        assert shown.modes == shown.before
        shown.until(lambda: shown.written.endswith(LEAVE))
    finish(job, tmp_path)


def test_ctrl_z_gives_the_terminal_back_and_going_on_takes_it_again(job: Launched, tmp_path: Path) -> None:
    with terminal(job.job.run) as shown:
        shown.shows("load batch")
        shown.press("\x1a")
        shown.until(lambda: "STOPPED" in shown.written)
        assert shown.modes == shown.before
        assert shown.written.count(LEAVE) == 1
        shown.press("\n")
        shown.until(lambda: shown.written.count(ENTER) == 2)
        seen = len(shown.written)
        shown.until(lambda: "load batch" in shown.written[seen:])
        assert shown.modes != shown.before
        shown.press("q")
        assert shown.wait() == 0
        assert shown.modes == shown.before
    finish(job, tmp_path)


def test_end_of_the_job_ends_the_screen_and_stays_readable(job: Launched, tmp_path: Path) -> None:
    with terminal(job.job.run) as shown:
        shown.shows("load batch")
        finish(job, tmp_path)
        assert shown.wait() == 0
        shown.until(lambda: all(word in shown.written.partition(LEAVE)[2] for word in ("ended", "completed")))
        assert shown.modes == shown.before


STUCK = 4711


def large_run(folder: Path, nodes: int, ranks: int) -> Path:
    """A run folder of a job that goes on, one rank of which has shown nothing new for ten minutes."""
    told = launched(nodes=nodes, ranks=ranks, is_running=True)
    told.write(folder)
    now = time.time()
    for rank in range(nodes * ranks):
        node, world = f"node{rank // ranks}", nodes * ranks
        origin = Origin("job", node, "monitor", 500 + rank, initial_rank=rank, rank=rank, world_size=world)
        at = 1000.0 if rank != STUCK else 400.0
        opened = (rank_snapshot.SnapshotSection("data" if rank == STUCK else "step", at - 0.5, 900.0),)
        shown = rank_snapshot.RankSnapshot(origin, "run", at, now - 1000.0, 1234, at, at, opened, alive_at=1000.0)
        assert rank_snapshot.write(folder, shown)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 160])
def test_rank_that_stands_still_is_found_among_10_000(columns: int, tmp_path: Path) -> None:
    with terminal(large_run(tmp_path / "job", nodes=1250, ranks=8), columns=columns) as shown:
        shown.shows("10000 ranks on 1250 nodes: 10000 active")
        tables = [line.split() for line in shown.screen if "open / limit" in line or " active " in line]
        assert [row[:2] for row in tables[:3]] == [["ranks", "count"], ["0-4710,", "4712-9999"], ["4711", "1"]]
        assert tables[3][:3] == ["rank", "pid", "node"]
        assert tables[4][:3] == [str(STUCK), str(1000 + STUCK), f"node{STUCK // 8}"]
        assert len(shown.screen) == 24 and max(map(len, shown.screen)) <= columns
        shown.press("g")
        shown.shows("1-2 of 2 groups")
        shown.press("gg/4711\r")
        shown.shows("1-1 of 1 rank by staleness, filter '4711', 10000 ranks in all")
        shown.press("q")
        assert shown.wait() == 0
        assert shown.modes == shown.before
