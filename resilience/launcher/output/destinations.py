"""Where does the workers' output go?  Into files in the run folder and on to the terminal, through the drain process.

`output/<cycle>/<rank>.out` and `.err` keep what every worker wrote; the terminal shows what torchrun would show. A
worker writes to a pipe, or to a terminal of its own if the launcher's stream is a terminal. `drain` reads the other
end, so neither disk nor reader nor agent can hold up a worker. The agent keeps a copy of each reading end: if the drain
process is killed, another one continues, and no write fails meanwhile. If the user redirects or tees with torchrun's
options, those apply, and this module is not used."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from resilience.errors import DecodeError
from resilience.facts import events
from resilience.facts.identity import safe_name
from resilience.launcher.output.byte_counts import SLOTS, ByteCounts
from resilience.launcher.output.streams import (
    Finished,
    FinishStreams,
    FromDrain,
    OpenStream,
    ProbeDrain,
    Reading,
    StreamClosed,
    StreamLost,
    decode_for_agent,
    encode,
)
from resilience.monitor.starting import PYTHONS_FOLDER, lean_environment
from resilience.system import private
from resilience.system.background import WRITER
from resilience.system.channel import ChannelClosed, close_all, listen, pair
from resilience.system.processes import continue_if_stopped, job_signals_blocked, signal_name

PROGRAM = "resilience.launcher.output.drain"
RUN_ID = "TORCHELASTIC_RUN_ID"
FINISH_LIMIT = 20.0  # seconds for the drain process to pass on the rest; it gives up on a slow reader by itself
PREEMPTED_LIMIT = 3.0  # seconds for that if the scheduler may kill this process soon
PATIENCE_SHARE = 1 / 3  # share of these limits after which a reader that has taken nothing is given up
HASTY_LIMIT = 0.5  # seconds if a person asks again
LOOK = 0.1  # seconds between polls for a signal meanwhile
LEAVE_LIMIT = 0.5  # seconds to wait for its exit; it stays while a child of a worker may still write
KILL_LIMIT = 1.0  # seconds for a killed drain process to end
STEADY = 30.0  # seconds of running after which a loss counts as the first
PROBE_EVERY = 1.0  # seconds between probes of the drain process
SILENT_LIMIT = 10.0  # seconds without an answer before another one replaces it
DELAYS = (0.0, 0.1, 1.0)  # seconds before a replacement starts, by losses in a row

Emit = Callable[[events.Event], None]


class Streams:
    """The writing ends of one worker's stdout and stderr, while the worker starts."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.stdout = os.fdopen(stdout, "w")
        self.stderr = os.fdopen(stderr, "w")

    def close(self) -> None:
        """Close our copies; the worker has its own. May be called again."""
        self.stdout.close()
        self.stderr.close()


class NamedLogs(LogsSpecs):
    """Log files as torchrun's options request them, in a folder named after the job's id. Any id yields a folder inside
    --log-dir."""

    def __init__(self, specs: LogsSpecs) -> None:
        super().__init__(local_ranks_filter=specs._local_ranks_filter)
        self._specs = specs

    @property
    def root_log_dir(self) -> str:
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each worker's files. The worker's environment keeps the original id."""
        safe_envs = {local: {**env, RUN_ID: safe_name(env[RUN_ID])} for local, env in envs.items()}
        destination = self._specs.reify(safe_envs)
        for local, env in envs.items():
            env.update({**safe_envs[local], RUN_ID: env[RUN_ID]})
        return destination


class RunFolderLogs(LogsSpecs):
    """torchelastic's log files in the run folder, named by cycle and rank."""

    def __init__(self, folder: Path, local_ranks_filter: set[int] | None, drain: DrainProcess) -> None:
        super().__init__(local_ranks_filter=local_ranks_filter)
        self._folder = folder
        self._drain = drain
        self.cycle = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder / "output")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each worker's output files by its rank, and the file for its exception."""
        folder = self._folder / "output" / str(self.cycle)
        # If this fails, the drain process tries again, and counts what it cannot keep.
        WRITER.submit(lambda: folder.mkdir(parents=True, exist_ok=True))
        ranks = {local: env["RANK"] for local, env in envs.items()}
        errors = {local: str(folder / f"{rank}.error.json") for local, rank in ranks.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(
            stdouts={local: str(folder / f"{rank}.out") for local, rank in ranks.items()},
            stderrs={local: str(folder / f"{rank}.err") for local, rank in ranks.items()},
            error_files=errors,
            filtered_stdout=os.devnull,  # torch duplicates lines of teed streams, and here are none
            filtered_stderr=os.devnull,
        )

    def open(self, local_rank: int, rank: str, stdout: str, stderr: str) -> Streams:
        """Return the streams for a worker's output. stdout, stderr: the files that keep it. Raises: OSError."""
        is_shown = not self._local_ranks_filter or local_rank in self._local_ranks_filter
        out = self._drain.open(f"rank {rank}'s stdout", stdout, 1 if is_shown else 0)
        try:
            return Streams(out, self._drain.open(f"rank {rank}'s stderr", stderr, 2 if is_shown else 0))
        except OSError:
            os.close(out)
            raise


class DrainProcess:
    """The current drain process of this node. Main thread only."""

    def __init__(self, file_limit: int) -> None:
        """file_limit: bytes at which files are rotated; 0: never. Raises: OSError."""
        self._limit = file_limit
        self._folder = Path(private.make(longest=90))
        self._listener = listen(self._folder / "drain")
        self._open: dict[int, tuple[OpenStream, int]] = {}  # by number, with the reading end
        self._ended: dict[int, OpenStream] = {}  # by number: the present process may not have passed on the rest of it
        self._number = 0
        self._losses = 0
        self._lost = _LostOutput()
        self._emit: Emit = lambda event: None
        self._finishing: FinishStreams | None = None  # None while workers run
        self._start_at = 0.0
        self._asked_at: float | None = None  # time of an unanswered probe
        self._probe_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def socket(self) -> str:
        """Return the socket where monitors request the rest of a dead worker's output."""
        return str(self._folder / "drain")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def filenos(self) -> list[int]:
        """Return the descriptor that becomes readable when the drain process has a message."""
        return [] if self._process is None else [self._line.fileno()]

    def report_to(self, emit: Emit) -> None:
        """Report losses as events from now on."""
        self._emit = emit

    def open(self, name: str, path: str, to: int) -> int:
        """Return the descriptor for a worker's output. to: 1, 2, or 0 for no terminal. Raises: OSError."""
        reading, writing = _open_pair(to)
        self._number += 1
        stream = OpenStream(self._number, name, os.fsencode(path), self._limit, to)
        self._open[stream.number] = (stream, reading)
        self._give(stream, [reading])
        return writing

    def hear(self) -> bool:
        """Process the drain process's messages; replace it if it is gone. Return True if all output is passed on."""
        while True:
            try:
                data = self._line.receive(0.0) if self._process is not None else None
                message: FromDrain | None = None if data is None else decode_for_agent(data)
            except (ChannelClosed, DecodeError):
                self._lose()
                continue
            match message:
                case None:
                    self._maintain()
                    return False
                case StreamClosed(number):
                    if number in self._open:
                        stream, reading = self._open.pop(number)
                        os.close(reading)
                        self._note_ended(stream)
                case StreamLost():
                    self._note_lost(message)
                case Reading():
                    self._asked_at = None
                case Finished():
                    return True

    def finish(self, is_interrupted: Callable[[], bool], limit: float = FINISH_LIMIT) -> bool:
        """Wait until the output of the ended workers is passed on, or counted as missing; return True if it is.

        limit: seconds; less if the caller is interrupted. Afterwards the drain process continues by itself."""
        is_hasty = False
        self._ask_to_finish(limit)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self.hear():
                return True
            if is_interrupted() and not is_hasty:
                is_hasty = True
                self._ask_to_finish(HASTY_LIMIT)
                deadline = min(deadline, time.monotonic() + HASTY_LIMIT)
            poll = select.poll()
            for fd in self.filenos():
                poll.register(fd, select.POLLIN)
            poll.poll(LOOK * 1000)
        return self.hear()  # if this process stood still, the answer has come meanwhile

    def losses(self) -> list[str]:
        """Return sentences on what is missing in files, and on losses that no terminal line mentioned."""
        return self._lost.sentences()

    def close(self) -> None:
        """Release the drain process; it exits after the last stream ends."""
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

    def _maintain(self) -> None:
        """Check the drain process, and start a new one when that is due."""
        if self._process is not None:
            self._look_after(self._process)
        if self._process is None and time.monotonic() >= self._start_at:
            try:
                self._start()
            except OSError:  # no memory or descriptors: workers wait until there are
                self._start_at = time.monotonic() + DELAYS[-1]

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        """Continue the process if it was suspended; replace it if it does not answer.

        While it does not read, a worker's write blocks when the worker's pipe is full."""
        if continue_if_stopped(process.pid):
            self._emit(events.DrainStopped(process.pid))
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at >= SILENT_LIMIT:
            self._lose(f"it did not answer for {SILENT_LIMIT:g} s")
        elif self._asked_at is None and now >= self._probe_at:
            self._asked_at, self._probe_at = now, now + PROBE_EVERY
            self._line.send(encode(ProbeDrain()))

    def _start(self) -> None:
        """Start a drain process and give it the open streams. Raises: OSError."""
        with contextlib.ExitStack() as until_started:
            self._counts = ByteCounts.create()
            until_started.callback(self._counts.close)
            self._line, peer_line = pair()
            until_started.callback(peer_line.close)
            # First: a monitor may be asking already, and is answered once all streams that wait here are read.
            is_given = all(self._line.send(encode(stream), [reading]) for stream, reading in self._open.values())
            fds = (peer_line.fileno(), self._listener.fileno(), self._counts.fd)
            until_started.enter_context(job_signals_blocked())
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-m", PROGRAM, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                cwd=PYTHONS_FOLDER,
                env=lean_environment(),
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self._asked_at = None
        if not is_given:
            self._lose("it took no message")
        if self._finishing is not None:
            self._give(self._finishing)

    def _ask_to_finish(self, limit: float) -> None:
        self._finishing = FinishStreams(limit * PATIENCE_SHARE)
        self._give(self._finishing)

    def _give(self, message: OpenStream | FinishStreams, fds: Sequence[int] = ()) -> None:
        """Send a message that must arrive: nobody else reads that stream, and its worker would wait for ever. A process
        that does not take it is replaced; the next one gets all streams."""
        if self._process is not None and not self._line.send(encode(message), fds):
            self._lose("" if self._line.is_closed() else "it took no message")

    def _lose(self, reason: str = "") -> None:
        """Drop this process, which is gone or does not read; schedule a replacement. reason: empty if it is gone."""
        assert self._process is not None
        pid = self._process.pid
        reason = reason or self._ending(self._process)
        self._process.kill()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # the kernel holds it; the next one gets the streams anyway
            self._process.wait(KILL_LIMIT)
        self._line.close()
        self._process = None
        self._count_unpassed(f"the process that reads workers' output was lost: {reason}")
        self._lost.count_from_zero()
        self._losses = 1 if time.monotonic() - self._started_at > STEADY else self._losses + 1
        self._start_at = time.monotonic() + DELAYS[min(self._losses, len(DELAYS)) - 1]
        self._emit(events.DrainLost(pid, reason))

    @staticmethod
    def _ending(process: subprocess.Popen[bytes]) -> str:
        """Return how a process that has closed its line ended: that comes a moment later."""
        try:
            code = process.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    def _note_ended(self, stream: OpenStream) -> None:
        """Remember an ended stream until the process has passed on all of it."""
        self._ended[stream.number] = stream
        for number, ended in list(self._ended.items()):
            counts = self._counts.of(number)
            is_passed_on = counts.kept == counts.read and (not ended.to or counts.shown == counts.read)
            if is_passed_on or number <= self._number - SLOTS:
                del self._ended[number]

    def _count_unpassed(self, why: str) -> None:
        """Count what the lost process had read of each stream and not passed on; the next one marks the place."""
        for stream in (*self._ended.values(), *(stream for stream, _ in self._open.values())):
            counts = self._counts.of(stream.number)
            kept = self._count_missing(stream, "file", counts.read - counts.kept, why)
            if stream.to:
                self._count_missing(stream, "terminal", counts.read - counts.shown, why)
            if stream.number in self._open:
                unmarked = kept if counts.kept else kept + stream.missing
                _, reading = self._open[stream.number]
                stream = msgspec.structs.replace(stream, missing=unmarked, why_missing=why)
                self._open[stream.number] = stream, reading
        self._ended.clear()

    def _count_missing(self, stream: OpenStream, place: Literal["file", "terminal"], missing: int, why: str) -> int:
        """Note how many bytes of a stream are missing. Return how many of them were not reported yet."""
        reported = self._lost.reported(place, stream.path)
        unreported = missing - (0 if reported is None else reported.count)
        if unreported <= 0:
            return 0
        unsaid = 0 if place == "file" else unreported + (0 if reported is None else reported.unsaid)
        self._note_lost(StreamLost(stream.name, stream.path, place, missing, why, unsaid, stream.to != 0))
        return unreported

    def _note_lost(self, message: StreamLost) -> None:
        lost = self._lost.add(message)
        path = os.fsdecode(lost.path)
        self._emit(events.OutputLost(lost.place, path, lost.count, lost.why, lost.is_shown))


class _LostOutput:
    """Output that is missing somewhere: sums over all drain processes, each of which counts from zero."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, bytes], StreamLost] = {}  # by place and path
        self._earlier: dict[tuple[str, bytes], StreamLost] = {}  # of earlier processes

    def add(self, message: StreamLost) -> StreamLost:
        """Return the present process's message with the sums of all processes."""
        key = (message.place, message.path)
        if (earlier := self._earlier.get(key)) is not None:
            count, unsaid = earlier.count + message.count, earlier.unsaid + message.unsaid
            message = msgspec.structs.replace(message, count=count, unsaid=unsaid)
        self._sums[key] = message
        return message

    def reported(self, place: str, path: bytes) -> StreamLost | None:
        """Return what the present process has reported, None if it has reported nothing."""
        key = (place, path)
        total, earlier = self._sums.get(key), self._earlier.get(key)
        if total is None or earlier is None:
            return total
        return msgspec.structs.replace(total, count=total.count - earlier.count, unsaid=total.unsaid - earlier.unsaid)

    def count_from_zero(self) -> None:
        """Expect messages of another process."""
        self._earlier = dict(self._sums)

    def sentences(self) -> list[str]:
        """Return sentences on what is missing in files, and on losses that no terminal line mentioned."""
        file_losses = [(lost, lost.count) for lost in self._sums.values() if lost.place == "file"]
        terminal_losses = [(lost, lost.unsaid) for lost in self._sums.values() if lost.unsaid]
        return [
            *_loss_sentences(file_losses, "could not be kept", "missing in"),
            *_loss_sentences(terminal_losses, "are not shown here", "see"),
        ]


def _loss_sentences(losses: list[tuple[StreamLost, int]], verb: str, preposition: str) -> list[str]:
    """Return a sentence about losses of one kind; no sentence if there are none."""
    if not losses:
        return []
    paths = [os.fsdecode(lost.path) for lost, _ in losses]
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    count = sum(count for _, count in losses)
    return [
        f"{count:,} bytes of workers' output {verb} ({losses[-1][0].why}); {preposition} {', '.join(paths[:2])}{more}"
    ]


def _open_pair(to: int) -> tuple[int, int]:
    """Return both ends of a terminal if `to` is one, else of a pipe. Raises: OSError."""
    if to and os.isatty(to):
        with contextlib.suppress(OSError, termios.error):  # this host has no terminal left, or no /dev/pts
            return _open_terminal_like(to)
    return os.pipe2(os.O_CLOEXEC)


def _open_terminal_like(to: int) -> tuple[int, int]:
    """Return both ends of a new terminal of our terminal's size that passes bytes unchanged. Raises: OSError,
    termios.error."""
    reading, writing = os.openpty()
    try:
        tty.setraw(writing)
    except termios.error:
        close_all([reading, writing])
        raise
    with contextlib.suppress(OSError):
        fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(to, termios.TIOCGWINSZ, bytes(8)))
    return reading, writing
