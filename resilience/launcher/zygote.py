"""Forks workers from a process that has imported torch already.

Importing torch is nine tenths of what a worker's restart costs. The zygote is forked from the agent right
after its imports, while both have one thread, and never does anything but fork. It forks twice: the
worker's parent is gone at once, so that the agent, a subreaper, becomes its parent, and learns its exit
status whatever happens to the zygote. Where it cannot be used the caller starts a fresh interpreter, and
says why. What a forked worker does to be like a fresh one stands in `worker_main`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence

import msgspec

from resilience.adapters.channel import Channel, ChannelClosed, close_all, pair
from resilience.errors import LaunchError
from resilience.launcher import worker_main

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy")
ANSWER_LIMIT = 10.0  # seconds for a fork, on a busy host
PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct, frozen=True):
    """What a worker is to be. arguments: of the interpreter, behind its name. stdout, stderr: descriptors here."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    stdout: int
    stderr: int


_answered = msgspec.msgpack.Decoder(list[int])


class Worker:
    """A forked worker, with the part of subprocess.Popen that torchelastic uses. Its parent is this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else took it
                self.returncode = 255
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(pidfd)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Zygote:
    """The agent's end of the line. Main thread only."""

    def __init__(self, pid: int, line: Channel) -> None:
        self.pid = pid
        self._line = line
        self._why_not = ""

    @classmethod
    def start(cls) -> Zygote:
        """Import what workers will want, and fork the zygote. Its `why_not` tells if it is of no use."""
        for name in PRELOADED:
            importlib.import_module(name)
        threads = os.listdir("/proc/self/task")
        ours, theirs = pair()
        gc.collect()
        gc.freeze()  # a collection in a worker must not copy what is shared
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        gc.unfreeze()
        made = cls(pid, ours)
        if len(threads) > 1 or threading.active_count() > 1:
            made.give_up(f"{len(threads)} threads were running when it was forked")
        return made

    @property
    def why_not(self) -> str:
        """Why no worker can be forked, empty if one can."""
        if not self._why_not:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._why_not = f"the zygote is gone (wait status {status})"
        return self._why_not

    def give_up(self, why: str) -> None:
        """Fork no more workers."""
        self.close()
        self._why_not = why

    def spawn(self, orders: Sequence[Order]) -> list[Worker]:
        """Fork workers that do what fresh interpreters would do with these arguments.

        Raises: LaunchError if the zygote cannot; it is given up then."""
        memory = os.memfd_create("resilience-order", os.MFD_CLOEXEC)
        streams = sorted({fd for order in orders for fd in (order.stdout, order.stderr)})
        # As many descriptors as workers have streams: each goes over once, and is named by its place.
        named = [
            msgspec.structs.replace(order, stdout=streams.index(order.stdout), stderr=streams.index(order.stderr))
            for order in orders
        ]
        try:
            os.write(memory, msgspec.msgpack.encode(named))
            if not self._line.send(b"spawn", [memory, *streams]):
                raise LaunchError(f"the zygote (pid {self.pid}) does not read")
            answer = self._line.receive(ANSWER_LIMIT)
            if answer is None:
                raise LaunchError(f"the zygote (pid {self.pid}) did not fork within {ANSWER_LIMIT:g} s")
            return [Worker(pid) for pid in _answered.decode(answer)]
        except ChannelClosed as error:
            self.give_up("the zygote is gone")
            raise LaunchError(f"the zygote (pid {self.pid}) is gone") from error
        except msgspec.DecodeError as error:
            self.give_up(f"the zygote could not fork: {bytes(answer or b'').decode(errors='replace')}")
            raise LaunchError(self._why_not) from error
        except LaunchError as error:
            self.give_up(str(error))
            raise
        finally:
            os.close(memory)

    def close(self) -> None:
        """End the zygote; workers go on. Again changes nothing."""
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


# -- the zygote itself -----------------------------------------------------------------------------


def _serve(line: Channel) -> None:
    """Fork on demand until the agent lets go of the line, or is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()  # what is typed at the terminal is for the agent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            received = line.receive_with_fds(60.0)
        except ChannelClosed:
            return
        if received is None:
            continue
        _, fds = received
        line.send(_fork(fds))
        close_all(fds)


def _fork(fds: Sequence[int]) -> bytes:
    """Fork workers whose parent is gone at once; answers their pids, or what went wrong."""
    memory, *streams = fds
    orders = msgspec.msgpack.decode(os.pread(memory, os.fstat(memory).st_size, 0), type=list[Order])
    read, write = os.pipe()
    try:
        between = os.fork()
        if not between:
            _fork_all(orders, streams, write)
        os.close(write)
        answer = os.read(read, 1 << 16)
        os.waitpid(between, 0)
        return answer or b"a fork failed"
    except OSError as error:
        os.close(write)
        return f"fork: {error.strerror}".encode()
    finally:
        os.close(read)


def _fork_all(orders: Sequence[Order], streams: Sequence[int], write: int) -> None:
    """In between: fork every worker, tell their pids, and leave them to the agent. Never returns."""
    pids: list[int] = []
    try:
        for order in orders:
            pid = os.fork()
            if not pid:
                _be_worker(order, streams)
            pids.append(pid)
        os.write(write, msgspec.msgpack.encode(pids))
    except OSError as error:
        for pid in pids:  # all or none
            os.kill(pid, signal.SIGKILL)
        os.write(write, f"fork: {error.strerror}".encode())
    finally:
        os._exit(0)


def _be_worker(order: Order, streams: Sequence[int]) -> None:
    """Become what was ordered. Never returns."""
    try:
        os.setsid()
        os.dup2(streams[order.stdout], 1)
        os.dup2(streams[order.stderr], 2)
        close_all([int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2])
        worker_main.become(order.arguments, order.environment, order.folder)
    except BaseException as error:
        os.write(2, f"a forked worker could not begin: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(70)  # not reached otherwise
