"""How do a cycle's workers start?  Warm from the zygote, or cold as fresh interpreters if that is not possible.

Both use torchelastic's SubprocessContext, so torchelastic handles redirection, tee, log and error files and NUMA
binding. The context records how it started its workers, and why not warm."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from resilience.errors import LaunchError
from resilience.launcher.output.destinations import RunFolderLogs
from resilience.launcher.output.teed_output import TeedOutput
from resilience.launcher.worker import fork_safety, tied
from resilience.launcher.worker.zygote import Order, Zygote
from resilience.system import descriptors


@dataclasses.dataclass(frozen=True)
class WorkersSpec:
    """Everything that starting workers needs; fields as in torchelastic's `start_processes`."""

    name: str
    entrypoint: Callable[..., Any] | str | None
    args: dict[int, tuple[Any, ...]]
    envs: dict[int, dict[str, str]]
    logs_specs: LogsSpecs
    log_line_prefixes: dict[int, str] | None = None
    start_method: str = "spawn"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    zygote: Zygote | None = None
    open_files: int | None = None  # soft limit of a cold worker; None: this process's. The zygote has its own limit.


class Workers(SubprocessContext):
    """The worker processes of one cycle. how, reason: warm or cold, and why not warm; unshown: once it is closed,
    sentences on output of `--tee` that the terminal lacks."""

    def __init__(self, spec: WorkersSpec) -> None:
        assert isinstance(spec.entrypoint, str)
        super().__init__(
            spec.name,
            spec.entrypoint,
            spec.args,
            spec.envs,
            spec.logs_specs,
            spec.log_line_prefixes,
            spec.numa_options,
            spec.duplicate_stdout_filters,
            spec.duplicate_stderr_filters,
        )
        self._zygote = spec.zygote
        self._open_files = spec.open_files
        self._logs = spec.logs_specs if isinstance(spec.logs_specs, RunFolderLogs) else None
        self.how: Literal["warm", "cold"] = "cold"
        self.reason = ""
        self.why_not_forked = ""  # the part of `reason` that is the zygote's: it was asked, and could not
        self.unshown: list[str] = []
        self._teed = TeedOutput(self._tail_logs)
        self._refusals: io.FileIO | None = None  # what `tied` writes if the kernel refuses a program

    def start(self) -> None:
        """Start the workers. Installs no signal handlers: torchelastic's would raise in the agent's main thread, also
        for signals that the agent does not handle or ignores, such as SIGHUP under nohup.

        Raises: OSError, LaunchError."""
        self._start()
        with starting():
            for tail_log in self._tail_logs:
                tail_log.start()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the workers, and what shows their output. torchelastic's waits for the terminal without a limit."""
        self._close(death_sig or signal.SIGTERM, timeout)
        if self._refusals is not None:
            self._refusals.close()
        self.unshown = self._teed.finish()
        for filtered in (self.filtered_stdout, self.filtered_stderr):
            if filtered is not None and not self._teed.writes_to(filtered):
                filtered.close()

    def refusal(self) -> LaunchError | None:
        """Return the error if the kernel refused to execute a program that has ended, else None. Does not wait."""
        number = None if self._refusals is None else self._refusals.read(1)
        if not number:
            return None
        handler = self.subprocess_handlers[0]  # all have the same program
        assert isinstance(handler, Ordered)
        error = OSError(number[0], os.strerror(number[0]), handler.command[0])
        refusal = _cannot_start(error)
        refusal.__cause__ = error
        return refusal

    def _start(self) -> None:
        with contextlib.ExitStack() as streams_to_close:
            self._start_each(
                {local_rank: self._handler(local_rank, streams_to_close) for local_rank in range(self.nprocs)}
            )

    def _start_each(self, handlers: dict[int, Ordered]) -> None:
        self.reason = self._why_cold(list(handlers.values()))
        if not self.reason and self._zygote is not None:
            try:
                self._start_warm(handlers, self._zygote)
            except LaunchError as error:
                self.reason = self.why_not_forked = str(error)
        if self.how == "cold":
            self._start_cold(handlers)

    def _handler(self, local_rank: int, streams_to_close: contextlib.ExitStack) -> Ordered:
        """Return the handler of a worker. streams_to_close: closes our copies of the worker's output streams."""
        out, err, env = self.stdouts[local_rank], self.stderrs[local_rank], self.envs[local_rank]
        is_drained = self._logs is not None
        handler = Ordered(
            str(self.entrypoint),
            self.args[local_rank],
            env,
            "" if is_drained else out,
            "" if is_drained else err,
            local_rank,
            self._numa_options,
        )
        if self._logs is not None:
            streams = self._logs.open(local_rank, env["RANK"], out, err)
            streams_to_close.callback(streams.close)
            handler._stdout, handler._stderr = streams.stdout, streams.stderr
        return handler

    def _start_warm(self, handlers: dict[int, Ordered], zygote: Zygote) -> None:
        forked = zygote.spawn([handler.order() for handler in handlers.values()])
        for handler, worker in zip(handlers.values(), forked, strict=True):
            handler.proc = worker  # type: ignore[assignment]  # it has the methods of Popen that are used
        self.subprocess_handlers = dict(handlers)
        self.how = "warm"

    def _start_cold(self, handlers: dict[int, Ordered]) -> None:
        """Start the workers as programs. Raises: OSError."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._refusals = io.FileIO(reading)
        try:
            for local_rank, handler in handlers.items():
                handler.start_cold(self._open_files, writing)
                self.subprocess_handlers[local_rank] = handler  # from now on, closing the context ends it
        finally:
            os.close(writing)

    def _why_cold(self, handlers: Sequence[Ordered]) -> str:
        """Return why these workers cannot all be forked, empty if they can."""
        if self._zygote is None:
            return "--cold"
        for handler in handlers:
            if handler.command[0] != sys.executable:
                return f"the workers' program is {handler.command[0]}, not this interpreter"
        workers = [(handler.command[1:], handler.environment) for handler in handlers]
        reason = fork_safety.why_not(workers, self._zygote.loaded, self._zygote.reads)
        return reason or self._zygote.why_unsuited or self._zygote.why_not


class Ordered(SubprocessHandler):
    """torchelastic's handler of one worker. It only stores the command here; all workers start together later."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        """Store the command that torchelastic would start; it may be wrapped to bind it to a NUMA node."""
        self.command, self.environment = args, env

    def order(self) -> Order:
        """Return the order for the zygote."""
        out = 1 if self._stdout is None else self._stdout.fileno()
        err = 2 if self._stderr is None else self._stderr.fileno()
        return Order(self.command[1:], self.environment, out, err)

    def start_cold(self, open_files: int | None, pipe: int) -> None:
        """Start the command, usually a fresh interpreter; it ends with this process.

        open_files: its soft limit, None for this process's; pipe: as in `tied`. Raises: OSError."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
        wrapper = (sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), str(files), str(pipe))
        self.proc = subprocess.Popen(  # as torchelastic does, but with the pipe
            (*wrapper, *self.command),
            env=self.environment,
            stdout=self._stdout,
            stderr=self._stderr,
            pass_fds=(pipe,),
            start_new_session=True,
        )


def start(spec: WorkersSpec) -> Workers:
    """Start the workers. Raises: LaunchError."""
    with contextlib.ExitStack() as until_started:
        try:
            workers = Workers(spec)  # creates log files
            until_started.callback(workers.close)
            workers.start()
        except OSError as error:
            raise _cannot_start(error) from error
        until_started.pop_all()
    return workers


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Run code of torch that creates files and starts threads. Raises: LaunchError, with an OSError as its cause, if it
    cannot."""
    try:
        yield
    except OSError as error:
        raise _cannot_start(error) from error
    except RuntimeError as error:  # Python's for a thread that the kernel refuses with this number
        raise _cannot_start(error) from OSError(errno.EAGAIN, str(error))


def _cannot_start(error: Exception) -> LaunchError:
    reason = str(error)
    if descriptors.are_missing(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason += f"; the limit of the launcher is {limit}: raise it before the job starts (`ulimit -Hn`, `ulimit -n`)"
    return LaunchError(f"the workers cannot be started: {reason}")
