"""Shows at the agent's stdout and stderr what workers write into the files of `--tee`.

torchelastic follows these files, in threads of a pool that write to sys.stdout and sys.stderr. It waits for them
without a limit: at the end of each cycle, and again when the interpreter exits. So a reader that does not read would
stop the agent for ever. Here torchelastic's function runs in threads for which nothing waits at exit. They write to the
descriptor, because the interpreter aborts if a thread holds the lock of sys.stdout then. A reader that takes nothing is
given up at the end of a cycle: the files have everything. Workers' bytes are shown as they are; the console makes the
sentences printable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from resilience.errors import error_in_words
from resilience.facts.in_words import count
from resilience.system import terminal

PATIENCE = 2.5  # seconds without progress after which a reader is given up once the workers have ended
FINISH_LIMIT = 15.0  # seconds for a slow reader to take the rest, and for a slow disk to give it
LOOK = 0.05  # seconds between two looks at the readers
WAIT = 0.2  # seconds of one write attempt
NAMES = {terminal.STDOUT: "stdout", terminal.STDERR: "stderr"}
TOO_SLOW = "the reader was too slow"
UNREAD = f"the file could not be read to its end within {FINISH_LIMIT:g} s"


class TeedOutput:
    """What the workers of one cycle show with `--tee`. Main thread only."""

    def __init__(self, tail_logs: Sequence[TailLog]) -> None:
        """tail_logs: torchelastic's, not started yet. They are changed."""
        self._shown = [_Shown(tail_log) for tail_log in tail_logs if tail_log._log_files]

    def finish(self) -> list[str]:
        """Wait until the output of the ended workers is shown, as long as its readers take it. Return sentences on what
        is not shown."""
        for shown in self._shown:
            shown.end()
        began = now = time.monotonic()
        while now - began < FINISH_LIMIT and not all(shown.is_over(now - PATIENCE, began) for shown in self._shown):
            wait([future for shown in self._shown for future in shown.missing], LOOK)
            now = time.monotonic()
        return [sentence for shown in self._shown for sentence in shown.give_up()]

    def writes_to(self, file: object) -> bool:
        """Return True if a thread still writes to this file: its disk does not answer."""
        return any(shown.missing and shown.destination is file for shown in self._shown)


class _Shown:
    """torchelastic's TailLog, which follows the files of one stream, in threads that may be left behind."""

    def __init__(self, tail_log: TailLog) -> None:
        self._tail_log = tail_log
        self._reader: _PatientStream | None = None  # None: it goes into a file
        number = _standard_stream(tail_log._dst)
        if number is not None:
            self._reader = _PatientStream(number, getattr(tail_log._dst, "encoding", None) or "utf-8")
            tail_log._dst = self._reader  # type: ignore[assignment]
        tail_log._threadpool = _DaemonThreads()  # type: ignore[assignment]

    @property
    def destination(self) -> object:
        """Return what the threads write to."""
        return self._tail_log._dst

    @property
    def missing(self) -> list[Future[object]]:
        """Return the threads that have not ended."""
        return [future for future in self._tail_log._futs if not future.done()]

    def end(self) -> None:
        """Let the threads end at the end of their files."""
        for finished in self._tail_log._finished_events.values():
            finished.set()

    def is_over(self, then: float, began: float) -> bool:
        """Return True if all is shown, or if the reader has taken nothing since `then`, and since the end `began`."""
        return not self.missing or (self._reader is not None and self._reader.has_stood_since(then, began))

    def give_up(self) -> list[str]:
        """Stop waiting for this stream's reader. Return one sentence if output was not shown, none if all was."""
        if self._reader is None:
            return []
        futures = zip(self._tail_log._log_files.values(), self._tail_log._futs, strict=False)
        cut = [(path, future) for path, future in futures if not future.done() or future.exception() is not None]
        if not cut:
            return []
        path, future = cut[0]
        error = future.exception() if future.done() else None
        why = self._reader.give_up() or (UNREAD if error is None else error_in_words(error))
        more = f" and {count(len(cut) - 1, 'other file')}" if len(cut) > 1 else ""
        return [f"the end of the workers' {self._reader.name} is not shown here, {why}; see {path}{more}"]


class _PatientStream:
    """A text stream that waits for its reader until it is given up. Any thread."""

    def __init__(self, number: int, encoding: str) -> None:
        self.name = NAMES[number]
        self._descriptor, self._encoding = terminal.stream(number), encoding
        self._is_given_up = False
        self._error = ""  # of the last attempt to write
        self._waits_since: float | None = None  # when the reader last took something, None if nothing waits for it
        self._is_writing = threading.Lock()  # lines of several files stay whole

    def write(self, text: str) -> int:
        """Raises: OSError, if there is no reader, or if it was given up."""
        data = text.encode(self._encoding, "backslashreplace")
        with self._is_writing:
            self._waits_since = time.monotonic()
            while data:
                if self._is_given_up:
                    raise TimeoutError(TOO_SLOW)
                taken, error = terminal.put_or_say_why(self._descriptor, data, time.monotonic() + WAIT)
                if error:
                    self._error = error
                    raise OSError(error)
                if taken:
                    self._waits_since = time.monotonic()
                data = data[taken:]
            self._waits_since = None
        return len(text)

    def has_stood_since(self, then: float, began: float) -> bool:
        since = self._waits_since
        return since is not None and max(since, began) <= then

    def give_up(self) -> str:
        """Write no more. Return why the reader lacks something, empty if it has all that was to be written."""
        self._is_given_up = True
        return self._error or ("" if self._waits_since is None else TOO_SLOW)


class _DaemonThreads:
    """A pool as torchelastic uses it, with a thread for each task. The interpreter does not wait for them."""

    def submit(self, function: Callable[..., object], **arguments: Any) -> Future[object]:
        """Raises: RuntimeError, if no thread can be started."""
        future: Future[object] = Future()

        def work() -> None:
            try:
                future.set_result(function(**arguments))
            except Exception as error:  # the edge of the thread: the file or the reader is gone
                future.set_exception(error)

        threading.Thread(target=work, name="resilience-tee", daemon=True).start()
        return future


def _standard_stream(stream: object) -> int | None:
    """Return 1 or 2 if this text stream writes to stdout or stderr, else None."""
    with contextlib.suppress(Exception):  # a user's object may raise or return anything
        number = stream.fileno()  # type: ignore[attr-defined]
        return number if number in NAMES else None
    return None
