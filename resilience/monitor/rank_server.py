"""One rank's monitor without `resilience run`: for a launcher of one's own.

The launcher's monitors and this are the same program; here the process that calls is the agent. It says
which worker is to be watched, may ask what was found, and decides what follows. When it dies, the monitor
ends its worker."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from resilience.adapters import environment, processes
from resilience.adapters.channel import ChannelClosed, close_all, listen
from resilience.core.attribution import InterruptionRecord
from resilience.core.identity import Origin, run_name
from resilience.errors import MonitorError
from resilience.monitor import messages
from resilience.monitor.config import FaultToleranceConfig, to_limits
from resilience.monitor.starting import MonitorProcess

START_LIMIT = 30.0  # seconds for the program to begin; it needs 0.2
END_LIMIT = 5.0  # seconds for it to close its account


class RankMonitorServer:
    """A rank's monitor in a process of its own. `run_in_subprocess` starts one."""

    def __init__(self, cfg: FaultToleranceConfig, ipc_socket_path: str, folder: Path) -> None:
        self._config = cfg
        self._folder = folder
        self._path = Path(ipc_socket_path)
        self._listener: socket.socket = listen(self._path)
        try:
            self._monitor = MonitorProcess(self._listener)
        except OSError:
            self._give_back()
            raise

    @classmethod
    def run_in_subprocess(
        cls,
        cfg: FaultToleranceConfig,
        ipc_socket_path: str,
        is_restarter_logger: bool = False,
        mp_ctx: object = None,
        folder: str | Path | None = None,
    ) -> RankMonitorServer:
        """Start a monitor to which a worker attaches by RESILIENCE_MONITOR_SOCKET=`ipc_socket_path`.

        folder: where its account goes, by default a folder of this process's job in RESILIENCE_RUN_DIR.
        is_restarter_logger and mp_ctx are taken for compatibility: the account is always kept, and the program
        is always executed, never forked. Raises: MonitorError."""
        del is_restarter_logger, mp_ctx
        settings = environment.Settings.from_environment()
        default = Path(settings.run_dir) / run_name(settings.job_id or f"monitor-{os.getpid()}", settings.attempt_hint)
        try:
            server = cls(cfg, ipc_socket_path, Path(folder or default).absolute())
        except OSError as error:
            raise MonitorError(f"the rank monitor at {ipc_socket_path} cannot be started: {error}") from error
        if not isinstance(server._hear(time.monotonic() + START_LIMIT), messages.Ready):
            server.close()
            raise MonitorError(f"the rank monitor at {ipc_socket_path} did not begin within {START_LIMIT:g} s")
        return server

    @property
    def pid(self) -> int:
        """The monitor's process."""
        return self._monitor.pid

    def is_alive(self) -> bool:
        """Whether the monitor is there."""
        return not self._monitor.has_ended()

    def watch(self, pid: int, rank: int = 0, world_size: int = 1) -> None:
        """Have a child of this process watched as this rank, until its end."""
        state = processes.state(pid)
        settings = environment.Settings.from_environment()
        node = environment.node_name()
        job = settings.job_id or self._folder.name
        self._monitor.send(
            messages.Assigned(
                worker_pid=pid,
                start_time=0 if state is None else state.start_time,
                origin=Origin(job, node, "rank", pid, initial_rank=rank, rank=rank, world_size=world_size),
                folder=os.fsencode(self._folder),
                limits=to_limits(self._config),
            )
        )

    def find(self, wait: float) -> InterruptionRecord | None:
        """Return what the monitor has found next, None if that is nothing within `wait` seconds.

        Raises: MonitorError if the monitor is gone."""
        deadline = time.monotonic() + wait
        while (message := self._hear(deadline)) is not None:
            if isinstance(message, messages.Found):
                return message.record
        return None

    def close(self) -> None:
        """End the monitor; a worker that is still there is left alone."""
        self._monitor.end(END_LIMIT)
        self._give_back()

    def _hear(self, deadline: float) -> messages.ToAgent | None:
        try:
            heard = self._monitor.hear(max(0.0, deadline - time.monotonic()))
        except ChannelClosed as error:
            raise MonitorError(f"the rank monitor {self.pid} is gone") from error
        if heard is None:
            return None
        message, fds = heard
        close_all(fds)
        return message

    def _give_back(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)
