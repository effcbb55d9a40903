"""Forks workers from a process that has imported torch already.

Importing torch is nine tenths of what a worker's restart costs. The zygote is forked from the agent right
after its imports, while both have one thread, and never does anything but fork. It forks twice: the
worker's parent is gone at once, so that the agent, a subreaper, becomes its parent, and learns its exit
status whatever happens to the zygote. The kernel kills a worker when the agent dies (`tied`). Workers wait
at a gate until the agent knows them all: none runs that the agent has given up. Where the zygote cannot be
used the caller starts fresh interpreters, and says why. What a forked worker does to be like a fresh one
stands in `worker_main`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.adapters.channel import MOST_FDS, Channel, ChannelClosed, close_all, pair
from resilience.core import encoding
from resilience.errors import LaunchError
from resilience.launcher import tied, worker_main

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy.random")
ANSWER_LIMIT = 10.0  # seconds for forks, on a busy host
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # torchrun has handlers for them
_born = struct.Struct("=ii")  # a worker's place in the orders, its pid; or FAILED, errno
FAILED = -1


class Order(msgspec.Struct, frozen=True):
    """What a worker is to be. stdin is the agent's; stdout, stderr: descriptors of this process."""

    arguments: tuple[str, ...]  # of the interpreter, behind its name
    environment: Mapping[str, str]
    stdout: int
    stderr: int


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """An order on its way, in the bytes that the kernel knows. stdout, stderr: places among the descriptors."""

    arguments: list[bytes]
    environment: dict[bytes, bytes]
    stdout: int
    stderr: int


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
    """The agent's end of the line. Main thread only. pid: 0 if none could be forked."""

    def __init__(self, pid: int, line: Channel, why_not: str = "") -> None:
        self.pid = pid
        self._line = line
        self._why_not = why_not

    @classmethod
    def start(cls) -> Zygote:
        """Import what workers will want, and fork the zygote. Its `why_not` tells if it is of no use."""
        for name in PRELOADED:
            importlib.import_module(name)
        ours, theirs = pair()
        refusal = cannot_fork()
        if refusal:
            theirs.close()
            return cls(0, ours, refusal)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # once, and not by every worker again
        gc.collect()
        gc.freeze()  # a collection in a worker must not copy what is shared
        agent = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                _serve(theirs, agent)
            finally:
                os._exit(0)
        theirs.close()
        gc.unfreeze()
        return cls(pid, ours)

    @property
    def why_not(self) -> str:
        """Why no worker can be forked, empty if one can."""
        if not self._why_not:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._why_not = f"the zygote is gone ({_in_words(status)})"
        return self._why_not

    def spawn(self, orders: Sequence[Order]) -> list[Worker]:
        """Fork workers that do in this folder what fresh interpreters would do: all of them, or none.

        Raises: LaunchError if the zygote cannot; it is given up then."""
        folder = os.open(os.curdir, os.O_RDONLY | os.O_CLOEXEC)  # by descriptor: its name may be gone
        held, gate = os.pipe2(os.O_CLOEXEC)
        workers: list[Worker] = []
        try:
            at_once = (MOST_FDS - 3) // 2
            for first in range(0, len(orders), at_once):
                self._fork(orders[first : first + at_once], [folder, held], workers)
            os.write(gate, b"." * len(orders))
        except LaunchError as error:
            self._give_up(self.why_not or str(error))
            os.close(gate)  # whoever waits there leaves
            gate = -1
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(ANSWER_LIMIT)
            raise LaunchError(self._why_not) from error
        finally:
            close_all([folder, held, *([gate] if gate >= 0 else [])])
        return workers

    def _fork(self, orders: Sequence[Order], fds: list[int], workers: list[Worker]) -> None:
        streams = sorted({fd for order in orders for fd in (order.stdout, order.stderr)})
        memory = os.memfd_create("resilience-orders", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(encoding.to_msgpack([_sent(order, streams) for order in orders]))
            if not self._line.send(b"fork", [memory, *fds, *streams]):
                raise LaunchError("the zygote does not take orders")
            answer = self._line.receive(ANSWER_LIMIT)
        except ChannelClosed as error:
            raise LaunchError("the zygote is gone") from error
        finally:
            os.close(memory)
        if answer is None:
            raise LaunchError(f"the zygote did not fork within {ANSWER_LIMIT:g} s")
        born = dict(_born.iter_unpack(answer))
        errno = born.pop(FAILED, 0)
        workers += [Worker(born[place]) for place in sorted(born)]
        if len(born) < len(orders):
            raise LaunchError(f"the zygote could not fork: {os.strerror(errno)}")

    def _give_up(self, why: str) -> None:
        self.close()
        self._why_not = why

    def close(self) -> None:
        """End the zygote; workers go on. Again changes nothing."""
        self._line.close()
        if not self.pid:
            return
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def cannot_fork() -> str:
    """Return why this process must not be forked, empty if it may be."""
    threads = [encoding.text((task / "comm").read_bytes()).strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"{len(threads)} threads run in the agent ({', '.join(sorted(threads))}), and a fork has only one"
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/dev/nvidia"):
                return "the agent uses CUDA, which does not survive a fork"
    return ""


_orders = encoding.reader(list[Sent], "msgpack")


def _sent(order: Order, streams: Sequence[int]) -> Sent:
    return Sent(
        [os.fsencode(argument) for argument in order.arguments],
        {os.fsencode(name): os.fsencode(value) for name, value in order.environment.items()},
        streams.index(order.stdout),
        streams.index(order.stderr),
    )


def _in_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


# -- the zygote itself -----------------------------------------------------------------------------


def _serve(line: Channel, agent: int) -> None:
    """Fork on demand until the agent lets go of the line, or is gone."""
    tied.tie_to(agent)
    os.setsid()  # what is typed at the terminal is for the agent
    for number in _HANDLED:
        signal.signal(number, lambda *_: None)  # a handler, which a worker has no more, is not inherited as SIG_IGN is
    worker_main.show_as(["resilience-zygote"])
    while True:
        try:
            received = line.receive_with_fds(60.0)
        except ChannelClosed:
            return
        if received is None:
            continue
        _, fds = received
        line.send(_fork_all(fds, agent))
        close_all(fds)


def _fork_all(fds: Sequence[int], agent: int) -> bytes:
    """Fork workers whose parent is gone at once; answers their places and pids, and what went wrong."""
    memory, folder, gate, *streams = fds
    orders = _orders(os.pread(memory, os.fstat(memory).st_size, 0))
    read, write = os.pipe()
    told = b""
    try:
        between = os.fork()
        if not between:
            _be_between(orders, streams, folder, gate, write, agent)
        os.close(write)
        write = -1
        while more := os.read(read, 1 << 16):  # until every worker has told its pid
            told += more
        os.waitpid(between, 0)
        return told or _born.pack(FAILED, 0)
    except OSError as error:
        return _born.pack(FAILED, error.errno or 0)
    finally:
        close_all([read, *([write] if write >= 0 else [])])


def _be_between(orders: Sequence[Sent], streams: Sequence[int], folder: int, gate: int, write: int, agent: int) -> None:
    """Fork every worker, and leave them to the agent. Never returns."""
    try:
        for place, order in enumerate(orders):
            if not os.fork():
                _be_worker(place, order, streams, folder, gate, write, agent)
    except OSError as error:
        os.write(write, _born.pack(FAILED, error.errno or 0))
    finally:
        os._exit(0)


def _be_worker(place: int, order: Sent, streams: Sequence[int], folder: int, gate: int, write: int, agent: int) -> None:
    """Become what was ordered, once the agent lets all through the gate. Never returns."""
    try:
        os.setsid()
        os.write(write, _born.pack(place, os.getpid()))
        os.close(write)
        if not os.read(gate, 1):
            os._exit(0)  # the agent is gone, or has given this up
        tied.tie_to(agent)  # it is the parent by now: the process between has ended before the gate was opened
        os.fchdir(folder)
        os.dup2(streams[order.stdout], 1)
        os.dup2(streams[order.stderr], 2)
        os.closerange(3, 1 + max(int(fd) for fd in os.listdir("/proc/self/fd")))
        worker_main.become(
            [os.fsdecode(argument) for argument in order.arguments],
            {os.fsdecode(name): os.fsdecode(value) for name, value in order.environment.items()},
        )
    except BaseException as error:
        os.write(2, encoding.text(f"a forked worker could not begin: {type(error).__name__}: {error}\n").encode())
    finally:
        os._exit(70)  # not reached otherwise
