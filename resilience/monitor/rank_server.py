"""One rank's monitor without `resilience run`: for launchers other than ours.

It is the same program as the launcher's monitors, with the calling process as its agent. The monitor watches processes
of the same user that connect, one after the other. It takes their pid from the connection's credentials, and their rank
from their own message. The caller may ask for findings and for ranks' requests, and decides what follows. If the caller
dies, the monitor ends its worker."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from resilience.errors import MonitorError
from resilience.facts.identity import attempt_of, run_name
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.limits import Limits
from resilience.monitor import messages
from resilience.monitor.config import FaultToleranceConfig, rule_of, to_limits
from resilience.monitor.rank_client import WorkloadAction, WorkloadControlRequest
from resilience.monitor.starting import MonitorProcess
from resilience.system import environment
from resilience.system.channel import ChannelClosed, close_all, connect, file_at, listen, remove_own_file

START_LIMIT = 30.0  # seconds for the program to start; it needs 0.2
END_LIMIT = 5.0  # seconds for it to close its files
LOOK_EVERY = 1.0  # seconds
LOCK_LIMIT = 10.0  # seconds for another server at the same path to listen
LOCK_EVERY = 0.01  # seconds between two attempts to lock
CONNECT_LIMIT = 1.0  # seconds; a monitor that runs takes a connection at once, or its queue is full
MOST_UNREAD = 256  # records, and requests, that are kept until the caller asks for them


def limits_of(cfg: FaultToleranceConfig, settings: environment.Settings) -> Limits:
    """Return what a server enforces: the limits of `cfg`, and the rule for silences only if `cfg` asks for it. Code for
    the compatible API sets its own limits, and may be silent for longer between two heartbeats."""
    return msgspec.structs.replace(to_limits(cfg), rule=rule_of(cfg, settings) if cfg.detect_hangs else None)


class RankMonitorServer:
    """A rank's monitor in a process of its own. `run_in_subprocess` starts one."""

    def __init__(self, cfg: FaultToleranceConfig, ipc_socket_path: str, folder: Path) -> None:
        settings = environment.Settings.from_environment()
        limits = limits_of(cfg, settings)  # first: it may be wrong
        self._path = Path(ipc_socket_path)
        self._listener = _listen(self._path)
        self._socket_file = file_at(self._path)
        self._findings: deque[InterruptionRecord] = deque(maxlen=MOST_UNREAD)
        self._requests: deque[tuple[int, WorkloadControlRequest]] = deque(maxlen=MOST_UNREAD)
        self._kill_at: float | None = None  # once it was asked to end
        try:
            self._monitor = MonitorProcess(self._listener)
        except OSError:
            self._remove_socket()
            raise
        job_id = settings.job_id or folder.name
        attempt = attempt_of(folder.name, job_id) or 0
        node = environment.node_name()
        self._monitor.send(messages.Adopt(job_id, node, os.fsencode(folder), limits, attempt))

    @classmethod
    def run_in_subprocess(
        cls,
        cfg: FaultToleranceConfig,
        ipc_socket_path: str,
        is_restarter_logger: bool = False,
        mp_ctx: object = None,
        folder: str | Path | None = None,
    ) -> RankMonitorServer:
        """Start a monitor to which a worker attaches by FT_RANK_MONITOR_IPC_SOCKET=`ipc_socket_path`.

        The worker sends its RANK and WORLD_SIZE. While one is attached another one waits: it is watched once the first
        has ended or has called `shutdown_workload_monitoring()`.

        folder: of its records, by default a folder of this process's job in RESILIENCE_RUN_DIR. Nothing is allocated
        here, because servers of one launch do not know each other. They share that folder, and so do two launches with
        the same job id and RESILIENCE_ATTEMPT. A launcher gives each launch its own number.
        is_restarter_logger and mp_ctx are accepted for compatibility: records are always kept, and the program is
        always executed, never forked. Raises: MonitorError, ConfigurationError."""
        del is_restarter_logger, mp_ctx
        settings = environment.Settings.from_environment()
        default = Path(settings.run_dir) / run_name(settings.job_id or f"monitor-{os.getpid()}", settings.attempt_hint)
        try:
            server = cls(cfg, ipc_socket_path, Path(folder or default).absolute())
        except OSError as error:
            raise MonitorError(f"the rank monitor at {ipc_socket_path} cannot be started: {error}") from error
        try:
            is_ready = isinstance(server._hear(time.monotonic() + START_LIMIT), messages.Ready)
        except MonitorError:
            server.close()
            raise
        if not is_ready:
            server.close()
            raise MonitorError(f"the rank monitor at {ipc_socket_path} did not start within {START_LIMIT:g} s")
        return server

    @property
    def pid(self) -> int:
        """Process id of the monitor."""
        return self._monitor.pid

    def is_alive(self) -> bool:
        """Return True if the monitor's process runs."""
        return not self._monitor.has_ended()

    def find(self, wait: float) -> InterruptionRecord | None:
        """Return the monitor's next finding, None if there is none within `wait` seconds.

        Raises: MonitorError if the monitor is gone."""
        deadline = time.monotonic() + wait
        while not self._findings and self._keep_next_message(deadline):
            pass
        return self._findings.popleft() if self._findings else None

    def receive_request(self, wait: float) -> tuple[int, WorkloadControlRequest] | None:
        """Return the rank and the request of the next `client.send_workload_control_request()`, None if there is none
        within `wait` seconds. The caller decides what follows.

        Raises: MonitorError if the monitor is gone."""
        deadline = time.monotonic() + wait
        while not self._requests and self._keep_next_message(deadline):
            pass
        return self._requests.popleft() if self._requests else None

    def terminate(self) -> None:
        """Ask the monitor to end, and return at once. A worker that still runs is left alone."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + END_LIMIT
            self._monitor.send(messages.Leave())
            self._remove_socket()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the monitor has ended, at most `timeout` seconds. It is killed if it does not end within 5 s after
        `terminate`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            wait = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - now))
            if self._monitor.has_ended(wait) or (deadline is not None and now >= deadline):
                return
            if self._kill_at is not None and now >= self._kill_at:
                self._monitor.kill()

    def close(self) -> None:
        """End the monitor. A worker that still runs is left alone."""
        self.terminate()
        self.join(END_LIMIT + LOOK_EVERY)
        self._monitor.kill()

    def _keep_next_message(self, deadline: float) -> bool:
        """Keep the monitor's next message until a call asks for its kind. Return False if none arrives in time."""
        match self._hear(deadline):
            case None:
                return False
            case messages.Found(record):
                self._findings.append(record)
            case messages.Requested(action, description, rank):
                self._requests.append((rank, WorkloadControlRequest(WorkloadAction[action], description)))
            case messages.Ready() | messages.Connected() | messages.Alive() | messages.Gone() | messages.WillStop():
                pass
            case (
                messages.Suspected() | messages.SeeksOthers() | messages.Looked()
            ):  # for an agent with several monitors
                pass
        return True

    def _hear(self, deadline: float) -> messages.ToAgent | None:
        try:
            received = self._monitor.hear(max(0.0, deadline - time.monotonic()))
        except ChannelClosed as error:
            raise MonitorError(f"the rank monitor {self.pid} is gone") from error
        if received is None:
            return None
        message, fds = received
        close_all(fds)
        return message

    def _remove_socket(self) -> None:
        remove_own_file(self._path, self._socket_file)
        self._listener.close()  # last: until then no other file gets this one's inode


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, in place of one that a killed launch has left there. Raises: OSError."""
    with _locked(path):
        return _listen_alone(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one server at a time start at `path`. Else two would replace the same left-over socket, and one of them a
    socket that the other one listens at, or is about to. Raises: OSError."""
    file = Path(f"{path}.lock")
    lock = _lock(file)
    while file_at(file) != file_at(lock):  # the holder before this one has removed it
        os.close(lock)
        lock = _lock(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)


def _lock(file: Path) -> int:
    """Return a descriptor that holds the lock of a file. The kernel releases it if this process dies."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_LIMIT
    try:
        while not _has_locked(lock):
            if time.monotonic() >= deadline:
                raise OSError(
                    errno.EAGAIN,
                    f"another server has been starting there for {LOCK_LIMIT:g} s: it holds {file}; end it, or use "
                    "another path",
                )
            time.sleep(LOCK_EVERY)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _has_locked(lock: int) -> bool:
    """Lock the file. Return False if another process holds the lock; True also where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


def _listen_alone(path: Path) -> socket.socket:
    try:
        return listen(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    if not _is_left_behind(path):
        raise OSError(
            errno.EADDRINUSE,
            "a monitor listens there, or another file is there; give each rank its own path, or remove the file",
        )
    path.unlink(missing_ok=True)
    return listen(path)


def _is_left_behind(path: Path) -> bool:
    """Return True for the socket of a process that is gone. To connect to another file is refused, too."""
    if path.is_socket():
        try:
            connect(str(path), CONNECT_LIMIT).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # its queue is full
            pass
    return False
