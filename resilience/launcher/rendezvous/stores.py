"""Which process hosts the job's stores?  A separate one, so stores survive the end of agent and workers.

It opens and closes TCPStore servers on request, and ends with its agent. It is forked if the agent has one thread
(milliseconds); otherwise it is executed, which costs an import of torch but never inherits a lock that another thread
holds. Signals meant for the agent do not reach it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn

import msgspec
import torch.distributed as dist

from resilience.errors import LaunchError, StoreError
from resilience.facts import encoding
from resilience.monitor.starting import PYTHONS_FOLDER, lean_environment
from resilience.system import descriptors, native_threads, titles
from resilience.system.channel import Channel, ChannelClosed, pair
from resilience.system.listening_sockets import LOOPBACK, address_of, listen, listen_beside_free_ports, where_to_listen
from resilience.system.processes import ignore_job_signals, job_signals_blocked, signal_name

START_LIMIT = 120.0  # seconds; an executed process imports torch, on a busy host
ANSWER_LIMIT = 30.0  # seconds for one server
END_LIMIT = 2.0  # seconds to end by itself
SERVER = 11  # descriptors of the first server in a process (torch 2.13); a further one has 9, and 2 clients
PR_SET_PDEATHSIG = 1


class OpenServer(msgspec.Struct, frozen=True, tag=True):
    """Open a server. address: the one that its clients use; port: 0 for any free port."""

    address: str
    port: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Close the server on this port."""

    port: int


class Hosted(msgspec.Struct, frozen=True, tag=True):
    """Answers OpenServer requests, in order. port: 0 if it failed, and `error` says why. address: the server's address
    for this host. lacks_descriptors: it failed because the process has too few left."""

    port: int
    error: str = ""
    address: str = ""
    lacks_descriptors: bool = False


_Request = OpenServer | Release
_requests = encoding.reader(_Request, "msgpack")
_answers = encoding.reader(Hosted, "msgpack")


class StoreProcess:
    """The agent's handle of its store process. One thread."""

    def __init__(self, pid: int, line: Channel, is_forked: bool) -> None:
        self.pid = pid
        self.is_forked = is_forked
        self._line = line
        self._is_ready = is_forked
        self._is_open = True
        self._asked = 0  # servers requested and not taken yet

    @classmethod
    def start(cls) -> StoreProcess:
        """Start the process; fork it if this process has a single thread. Raises: LaunchError."""
        with contextlib.ExitStack() as undo:
            try:
                ours, peer_line = pair()
                undo.callback(ours.close)
                with contextlib.closing(peer_line):
                    is_forked = _may_fork()
                    pid = _fork(peer_line) if is_forked else _execute(peer_line)
            except OSError as error:
                raise LaunchError(
                    f"the store process could not be started: {error}; this host lacks the resources for it"
                ) from error
            undo.pop_all()
        return cls(pid, ours, is_forked)

    @property
    def is_alive(self) -> bool:
        """Return True if the process runs."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    @property
    def end(self) -> str:
        """Return how the process ended, in words; empty if it runs or that is not known."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        if ended is None:
            return ""
        return f"exit code {ended.si_status}" if ended.si_code == os.CLD_EXITED else signal_name(ended.si_status)

    def host(self, address: str = LOOPBACK, port: int = 0) -> Hosted:
        """Open a TCPStore server and return where it listens.

        address: the one that its clients use (`system.listening_sockets`). port: 0 for any. Raises: StoreError."""
        self.ask(address, port)
        return self.take()

    def ask(self, address: str = LOOPBACK, port: int = 0) -> None:
        """Request a server ahead of time; `take` returns where it listens. Raises: StoreError."""
        self._send(OpenServer(address, port))
        self._asked += 1

    def take(self) -> Hosted:
        """Return where the server listens that was requested first. Raises: StoreError."""
        assert self._asked, "no server was asked for"
        self._asked -= 1
        if not self._is_ready:
            self._hear(START_LIMIT)
            self._is_ready = True
        answer = self._hear(ANSWER_LIMIT)
        if answer.error:
            raise StoreError(
                f"no store server could be opened here: {answer.error}",
                error=answer.error,
                lacks_descriptors=answer.lacks_descriptors,
            )
        return answer

    def release(self, port: int) -> None:
        """Close the server on `port`, if there is one; its clients' next operation fails."""
        with contextlib.suppress(StoreError):
            self._send(Release(port))

    def close(self) -> None:
        """End the process and all its servers. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._line.close()
        try:
            pidfd = os.pidfd_open(self.pid)  # safe: it is our child and not reaped yet
        except OSError:  # it has been reaped, or no descriptor is left: without its line it ends by itself
            return
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(END_LIMIT * 1000):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _send(self, request: OpenServer | Release) -> None:
        if not self._line.send(encoding.to_msgpack(request)):
            raise StoreError(
                f"the store process (pid {self.pid}) is gone, so this node can host no store", pid=self.pid
            )

    def _hear(self, limit: float) -> Hosted:
        deadline = time.monotonic() + limit
        while True:  # in short steps, so that signal handlers run in time
            try:
                message = self._line.receive(min(0.2, max(0.0, deadline - time.monotonic())))
            except ChannelClosed as error:
                raise StoreError(f"the store process (pid {self.pid}) has ended", pid=self.pid) from error
            if message is not None:
                return _answers(message)
            if time.monotonic() >= deadline:
                raise StoreError(f"the store process (pid {self.pid}) did not answer within {limit:g} s", pid=self.pid)


def _may_fork() -> bool:
    """Return True if no other thread can hold a lock now. OpenBLAS's pool, whose threads have the process's own name,
    survives a fork."""
    return threading.active_count() == 1 and set(native_threads.others()) <= {native_threads.process_name()}


def _fork(line: Channel) -> int:
    agent = os.getpid()
    with job_signals_blocked():
        pid = os.fork()
        if not pid:
            _serve_forked(line, agent)
    return pid


def _serve_forked(line: Channel, agent: int) -> NoReturn:
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        descriptors.close_others((line.fileno(),))
        serve(line, agent)
    finally:
        os._exit(0)


def _execute(line: Channel) -> int:
    fd = line.fileno()
    with job_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-m", "resilience.launcher.rendezvous.stores", str(fd), str(os.getpid())],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=PYTHONS_FOLDER,
            env=lean_environment(),
        )
    process.returncode = 0  # reaped by `close`, not by subprocess
    return process.pid


def serve(line: Channel, agent: int) -> None:
    """Run as the store process until the line closes or the agent ends."""
    ignore_job_signals()
    signal.set_wakeup_fd(-1)
    titles.name("res-store")
    titles.show(["resilience-store"])
    descriptors.raise_limit()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        return  # the agent ended before our request to end with it
    servers: dict[int, dist.TCPStore] = {}
    known: dict[str, str] = {}
    while True:
        try:
            message = line.receive(3600.0)
        except ChannelClosed:
            return
        if message is None:
            continue
        request: _Request = _requests(message)
        match request:
            case OpenServer(address, port):
                line.send(encoding.to_msgpack(_open(servers, known, address, port)))
            case Release(port):
                servers.pop(port, None)


def _open(servers: dict[int, dist.TCPStore], known: dict[str, str], address: str, port: int) -> Hosted:
    """Open a server. known: where servers listen, by the names that were looked up: the name service may be slow, or
    fail later."""
    if address not in known:
        with contextlib.suppress(socket.gaierror):
            known[address] = where_to_listen(address)
    address = known.get(address, address)
    try:
        descriptors.check_room(SERVER, "a store's server")  # with fewer it opens, accepts nobody and waits for itself
        listener = listen(address, port) if port else listen_beside_free_ports(address)
        number = listener.getsockname()[1]
        reached = address_of(listener)
        servers[number] = dist.TCPStore(
            reached, number, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
        )
    except (OSError, RuntimeError, ValueError) as error:
        return Hosted(0, f"port {port}: {error}", lacks_descriptors=getattr(error, "errno", None) == errno.EMFILE)
    return Hosted(number, address=reached)


if __name__ == "__main__":
    end = Channel(socket.socket(fileno=int(sys.argv[1])))
    end.send(encoding.to_msgpack(Hosted(0)))  # imports are done; ready for requests
    serve(end, int(sys.argv[2]))
    os._exit(0)  # nothing needs cleanup, and the agent waits
