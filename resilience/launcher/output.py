"""Where workers' output goes: into files in the run folder, and on to the terminal, by way of the drain process.

`output/<cycle>/<rank>.out` and `.err` keep what every worker wrote; the terminal shows what torchrun would show. A
worker writes to a pipe, or to a terminal of its own where the launcher's stream is one, and `drain` reads the other
end, so that neither disk nor reader nor agent can hold up a worker. The agent keeps a copy of each other end: where
the drain process is killed another one goes on, and no write fails meanwhile. Where the user redirects or tees by
torchrun's options, those rule, and nothing here is used."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from resilience.adapters import private
from resilience.adapters.background import WRITER
from resilience.adapters.channel import ChannelClosed, close_all, listen, pair
from resilience.adapters.processes import continue_if_stopped, job_signals_blocked
from resilience.core import events
from resilience.core.identity import safe_name
from resilience.errors import DecodeError
from resilience.launcher.streams import (
    Closed,
    Finish,
    Finished,
    Lost,
    Open,
    Probe,
    Reading,
    decode_for_agent,
    encode,
)
from resilience.monitor.starting import lean_environment

PROGRAM = "resilience.launcher.drain"
RUN_ID = "TORCHELASTIC_RUN_ID"
FINISH_LIMIT = 20.0  # seconds for the drain process to pass on what is left; it gives up a reader by itself
PREEMPTED_LIMIT = 2.0  # seconds for it where the scheduler may end this process soon
LOOK = 0.1  # seconds between looks for a signal meanwhile
LEAVE_LIMIT = 0.5  # seconds for it to end then; it goes on for what a process of a worker's may still write
KILL_LIMIT = 1.0  # seconds for one that is killed to be gone
STEADY = 30.0  # seconds after which the loss of a drain process is no repetition
PROBE_EVERY = 1.0  # seconds between questions whether the drain process reads
SILENT_LIMIT = 10.0  # seconds without an answer after which another one takes its place
DELAYS = (0.0, 0.1, 1.0)  # seconds before another one is started, by losses in a row

Emit = Callable[[events.Event], None]


class Streams:
    """The writing ends of one worker's stdout and stderr, for the moment in which it is started."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.stdout = os.fdopen(stdout, "w")
        self.stderr = os.fdopen(stderr, "w")

    def close(self) -> None:
        """The worker has them now. Again changes nothing."""
        self.stdout.close()
        self.stderr.close()


class NamedLogs(LogsSpecs):
    """Log files as torchrun's options ask for them, in a folder that is named for the job's id: any id names a folder
    inside of --log-dir."""

    def __init__(self, specs: LogsSpecs) -> None:
        super().__init__(local_ranks_filter=specs._local_ranks_filter)
        self._specs = specs

    @property
    def root_log_dir(self) -> str:
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each worker's files. Its environment keeps the id."""
        named = {local: {**env, RUN_ID: safe_name(env[RUN_ID])} for local, env in envs.items()}
        destination = self._specs.reify(named)
        for local, env in envs.items():
            env.update({**named[local], RUN_ID: env[RUN_ID]})
        return destination


class RunFolderLogs(LogsSpecs):
    """Log files of torchelastic in the run folder, named by cycle and rank."""

    def __init__(self, folder: Path, local_ranks_filter: set[int] | None, drain: Drain) -> None:
        super().__init__(local_ranks_filter=local_ranks_filter)
        self._folder = folder
        self._drain = drain
        self.cycle = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder / "output")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each worker's files by its rank, and the file that its exception may be written to."""
        folder = self._folder / "output" / str(self.cycle)
        # The drain process tries again, and counts what it cannot keep.
        WRITER.submit(lambda: folder.mkdir(parents=True, exist_ok=True))
        ranks = {local: env["RANK"] for local, env in envs.items()}
        errors = {local: str(folder / f"{rank}.error.json") for local, rank in ranks.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(
            stdouts={local: str(folder / f"{rank}.out") for local, rank in ranks.items()},
            stderrs={local: str(folder / f"{rank}.err") for local, rank in ranks.items()},
            error_files=errors,
        )

    def open(self, local_rank: int, rank: str, stdout: str, stderr: str) -> Streams:
        """Return what a worker is to write to. stdout, stderr: the files that keep it. Raises: OSError."""
        is_shown = not self._local_ranks_filter or local_rank in self._local_ranks_filter
        out = self._drain.open(f"rank {rank}'s stdout", stdout, 1 if is_shown else 0)
        try:
            return Streams(out, self._drain.open(f"rank {rank}'s stderr", stderr, 2 if is_shown else 0))
        except OSError:
            os.close(out)
            raise


class Drain:
    """The drain process of this node, whichever it is at the moment. Main thread only."""

    def __init__(self, file_limit: int) -> None:
        """file_limit: bytes at which files are rotated, 0: never. Raises: OSError."""
        self._limit = file_limit
        self._folder = Path(private.make(longest=90))
        self._listener = listen(self._folder / "drain")
        self._open: dict[int, tuple[Open, int]] = {}  # by number, with the reading end
        self._number = 0
        self._losses = 0
        self._lost: dict[tuple[str, bytes], Lost] = {}  # the last of each place and path
        self._emit: Emit = lambda event: None
        self._is_finishing = False
        self._start_at = 0.0
        self._asked_at: float | None = None  # of a probe without an answer yet
        self._probe_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def socket(self) -> str:
        """Where monitors ask for the rest of a dead worker's output."""
        return str(self._folder / "drain")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def filenos(self) -> list[int]:
        """Return what becomes readable when there is something to hear."""
        return [] if self._process is None else [self._line.fileno()]

    def report_to(self, emit: Emit) -> None:
        """From now on have losses put on record."""
        self._emit = emit

    def open(self, name: str, path: str, to: int) -> int:
        """Return the descriptor that a worker is to write to. to: 1, 2 or 0 for no terminal. Raises: OSError."""
        reading, writing = _terminal_of(to) if to and os.isatty(to) else os.pipe2(os.O_CLOEXEC)
        self._number += 1
        opened = Open(self._number, name, os.fsencode(path), self._limit, to)
        self._open[opened.number] = (opened, reading)
        self._line.send(encode(opened), [reading])
        return writing

    def hear(self) -> bool:
        """Take what the drain process says; replace it if it is gone. True if it has passed on everything."""
        while True:
            try:
                data = self._line.receive(0.0) if self._process is not None else None
                message = None if data is None else decode_for_agent(data)
            except (ChannelClosed, DecodeError):
                self._lose()
                continue
            match message:
                case None:
                    self._tend()
                    return False
                case Closed(number):
                    _, reading = self._open.pop(number, (None, -1))
                    close_all([reading] if reading >= 0 else [])
                case Lost():
                    self._lost[message.place, message.path] = message
                    self._emit(events.OutputLost(message.place, os.fsdecode(message.path), message.count, message.why))
                case Reading():
                    self._asked_at = None
                case Finished():
                    return True

    def finish(self, is_interrupted: Callable[[], bool], limit: float = FINISH_LIMIT) -> None:
        """All workers are gone: wait until what they wrote is passed on, as far as it is taken. limit: seconds.

        Afterwards the process goes on by itself."""
        self._is_finishing = True
        self._line.send(encode(Finish()))
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not self.hear() and not is_interrupted():
            poll = select.poll()
            for fd in self.filenos():
                poll.register(fd, select.POLLIN)
            poll.poll(LOOK * 1000)

    def losses(self) -> list[str]:
        """Return in words what is missing in files, and what the terminal did not say itself."""
        kept = [(lost, lost.count) for lost in self._lost.values() if lost.place == "file"]
        shown = [(lost, lost.unsaid) for lost in self._lost.values() if lost.unsaid]
        return [*_in_words(kept, "could not be kept", "missing in"), *_in_words(shown, "are not shown here", "see")]

    def close(self) -> None:
        """Let the process leave; it ends with the last stream."""
        self._line.close()
        close_all([reading for _, reading in self._open.values()])
        self._open.clear()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_LIMIT)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.socket)
            os.rmdir(self._folder)

    # -- the process ----------------------------------------------------------------------------

    def _tend(self) -> None:
        """Have a process that reads, if it is time for that."""
        if self._process is not None:
            self._look_after(self._process)
        if self._process is None and time.monotonic() >= self._start_at:
            try:
                self._start()
            except OSError:  # no memory, no descriptors: workers wait until there are
                self._start_at = time.monotonic() + DELAYS[-1]

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        """Continue the process if somebody has stopped it; put another one in its place if it does not answer.

        While it does not read, a worker's write waits once the worker's pipe is full."""
        if continue_if_stopped(process.pid):
            self._emit(events.DrainStopped(process.pid))
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at >= SILENT_LIMIT:
            self._lose(f"it did not answer for {SILENT_LIMIT:g} s")
        elif self._asked_at is None and now >= self._probe_at:
            self._asked_at, self._probe_at = now, now + PROBE_EVERY
            self._line.send(encode(Probe()))

    def _start(self) -> None:
        """Start a process, and give it what is open. Raises: OSError."""
        self._line, theirs = pair()
        fds = (theirs.fileno(), self._listener.fileno())
        try:
            with job_signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-m", PROGRAM, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    cwd="/",  # no module of a user's working directory comes first
                    env=lean_environment(),
                    start_new_session=True,
                )
        finally:
            theirs.close()
        self._started_at = time.monotonic()
        self._asked_at = None
        for opened, reading in self._open.values():
            self._line.send(encode(opened), [reading])
        if self._is_finishing:
            self._line.send(encode(Finish()))

    def _lose(self, why: str = "") -> None:
        """Have another process in place of this one, which is gone. why: or does not read."""
        assert self._process is not None
        pid = self._process.pid
        self._process.kill()
        try:
            code = self._process.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:  # the kernel holds it; the streams are for the next one all the same
            code = 0
        self._line.close()
        self._process = None
        self._losses = 1 if time.monotonic() - self._started_at > STEADY else self._losses + 1
        self._start_at = time.monotonic() + DELAYS[min(self._losses, len(DELAYS)) - 1]
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self._emit(events.DrainLost(pid, why or how))


def _in_words(losses: list[tuple[Lost, int]], what: str, where: str) -> list[str]:
    """Return a sentence for losses of one kind, none for none."""
    if not losses:
        return []
    paths = [os.fsdecode(lost.path) for lost, _ in losses]
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    count = sum(count for _, count in losses)
    return [f"{count:,} bytes of workers' output {what} ({losses[-1][0].why}); {where} {', '.join(paths[:2])}{more}"]


def _terminal_of(to: int) -> tuple[int, int]:
    """Return both ends of a new terminal as large as ours, that passes every byte on as it is. Raises: OSError."""
    reading, writing = os.openpty()
    tty.setraw(writing)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(to, termios.TIOCGWINSZ, bytes(8)))
    return reading, writing
