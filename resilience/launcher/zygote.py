"""Forks workers from a process that has imported torch already.

Importing torch is nine tenths of what a worker's restart costs. The zygote is forked from the agent right
after its imports, while both have one thread, and never does anything but fork. It forks twice: the
worker's parent is gone at once, so that the agent, a subreaper, becomes its parent, and learns its exit
status whatever happens to the zygote. The kernel kills a worker when the agent dies (`tied`). Workers wait
at a gate until the agent knows them all: none runs that the agent has given up. Where the zygote cannot be
used the caller starts fresh interpreters, and says why. What a forked worker does to be like a fresh one
stands in `worker_main`.

A zygote does not import anything itself: `preload` has it fork a successor, which imports more modules (`preload`)
and takes its place if it can still be forked afterwards. A module that spoils it is left out."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

from resilience.adapters import titles
from resilience.adapters.channel import MOST_FDS, Channel, ChannelClosed, close_all, pair
from resilience.core import encoding
from resilience.core.printable import printable
from resilience.errors import DecodeError, LaunchError
from resilience.launcher import notes, preload, tied, worker_main
from resilience.launcher.preload import Loaded, cannot_fork

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy.random")
ANSWER_LIMIT = 10.0  # seconds for forks, on a busy host
MOST_REFUSALS = 5  # of modules, each of which costs a process; then no learned module is tried any more
KILL_LIMIT = 2.0  # seconds that a killed process may take to be gone
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # torchrun has handlers for them
_born = struct.Struct("=ii")  # a process's place in the orders, its pid; or FAILED, errno
FAILED = -1
FORK, LOAD = b"fork", b"load"  # orders: workers, or a successor


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

    def __init__(self, pid: int, notes: notes.Reader | None = None) -> None:
        self.pid = pid
        self.notes = notes
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


Part = tuple[bytes, bytes, int, list[int]]  # of an order: its kind and body, how many processes, descriptors


class Successor(msgspec.Struct, frozen=True):
    """A process that imports modules and then takes the place of the zygote."""

    pid: int
    line: Channel
    modules: tuple[str, ...]
    learned: tuple[str, ...] = ()

    def without(self, refused: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return what is to be imported still, where these cannot be."""
        return (
            [name for name in self.modules if name not in refused],
            [name for name in self.learned if name not in refused],
        )


class Zygote:
    """The agent's end of the line. Main thread only. pid: 0 if none could be forked."""

    def __init__(self, pid: int, line: Channel, why_not: str = "") -> None:
        self.pid = pid
        self.loaded: dict[str, str] = {}  # file of each top-level module that was preloaded in a successor
        self.reads: set[str] = set()  # variables that these modules have read at their import
        self._refusals = 0
        self.why_unsuited = ""  # why this program is to start cold; the zygote goes on
        self._line = line
        self._why_not = why_not
        self._successor: Successor | None = None

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
                _be_zygote(theirs, agent)
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
                    self._why_not = f"the zygote is gone ({_in_words(os.waitstatus_to_exitcode(status))})"
        return self._why_not

    @property
    def pids(self) -> set[int]:
        """The zygote, and its successor if there is one."""
        return {self.pid, *([self._successor.pid] if self._successor is not None else [])}

    @property
    def is_preloading(self) -> bool:
        return self._successor is not None

    def preload(self, modules: Sequence[str], learned: Sequence[str] = ()) -> None:
        """Have a successor import modules. It is not waited for: `succeed` looks. One at a time.

        learned: names that workers have tried to import; one that cannot be imported is left out."""
        assert self._successor is None
        if self.why_not or not (modules or learned):
            return
        ours, theirs = pair()
        try:
            (forked,) = self._forked([(LOAD, encoding.to_msgpack([modules, learned]), 1, [theirs.fileno()])])
        except LaunchError:
            ours.close()
            return
        finally:
            theirs.close()
        self._successor = Successor(forked.pid, ours, tuple(modules), tuple(learned))

    def succeed(self, limit: float) -> list[Loaded]:
        """Let the successor take over if it is ready within this time, in seconds; return what became of modules.

        The rest is tried again without a module that spoils it."""
        deadline = time.monotonic() + limit
        outcomes = []
        while (successor := self._successor) is not None:
            outcome = _outcome(successor, max(0.0, deadline - time.monotonic()))
            if outcome is None:
                break
            outcomes.append(outcome)
            self._successor = None
            if outcome.refused:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(successor.pid, signal.SIGKILL)  # with what a module has started
                _end(successor.pid, successor.line)
                self._refusals += 1
                modules, learned = successor.without(outcome.refused)
                self.preload(modules, learned if self._refusals < MOST_REFUSALS else ())
            else:
                _end(self.pid, self._line)
                self.pid, self._line = successor.pid, successor.line
                self.loaded |= outcome.found
                self.reads |= set(outcome.reads)
        return outcomes

    def spawn(self, orders: Sequence[Order]) -> list[Worker]:
        """Fork workers that do in this folder what fresh interpreters would do: all of them, or none.

        Raises: LaunchError if the zygote cannot; it is given up then."""
        at_once = (MOST_FDS - 3) // 2
        parts = []
        for first in range(0, len(orders), at_once):
            some = orders[first : first + at_once]
            streams = sorted({fd for order in some for fd in (order.stdout, order.stderr)})
            body = encoding.to_msgpack([_sent(order, streams) for order in some])
            parts.append((FORK, body, len(some), streams))
        return self._forked(parts)

    def _forked(self, parts: Sequence[Part]) -> list[Worker]:
        """Have processes forked, and let them through the gate: all of them, or none. Raises: LaunchError."""
        folder = os.open(os.curdir, os.O_RDONLY | os.O_CLOEXEC)  # by descriptor: its name may be gone
        held, gate = os.pipe2(os.O_CLOEXEC)
        workers: list[Worker] = []
        try:
            for part in parts:
                self._fork(part, [folder, held], workers)
            os.write(gate, b"." * len(workers))
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

    def _fork(self, part: Part, fds: list[int], workers: list[Worker]) -> None:
        kind, body, count, more = part
        memory = os.memfd_create("resilience-orders", os.MFD_CLOEXEC)
        notes_at = -(-(_layout.size + len(body)) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(_layout.pack(len(body), notes_at) + body)
            os.ftruncate(memory, notes_at + count * notes.SIZE)
            readers = [notes.Reader(memory, notes_at + place * notes.SIZE) for place in range(count)]
            if not self._line.send(kind, [memory, *fds, *more]):
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
        workers += [Worker(born[place], readers[place]) for place in sorted(born)]
        if len(born) < count:
            raise LaunchError(f"the zygote could not fork: {os.strerror(errno)}")

    def _give_up(self, why: str) -> None:
        self.close()
        self._why_not = why

    def close(self) -> None:
        """End the zygote; workers go on. Again changes nothing."""
        if self._successor is not None:
            _end(self._successor.pid, self._successor.line)
            self._successor = None
        _end(self.pid, self._line)


def _end(pid: int, line: Channel) -> str:
    """End a process that serves this line; return how it ended. One that SIGKILL does not end is left to the kernel."""
    line.close()
    if not pid:
        return ""
    process = Worker(pid)
    process.send_signal(signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return _in_words(process.wait(KILL_LIMIT))
    return "SIGKILL does not end it"


def _outcome(successor: Successor, limit: float) -> Loaded | None:
    """Return what a successor has to say, None if that is nothing yet."""
    try:
        answer = successor.line.receive(limit)
        return None if answer is None else _loaded(answer)
    except (ChannelClosed, DecodeError):
        how = _end(successor.pid, successor.line)
        return Loaded(refused=successor.modules, why=f"the process that imported them is gone ({how})")


_orders = encoding.reader(list[Sent], "msgpack")
_names = encoding.reader(tuple[list[str], list[str]], "msgpack")
_layout = struct.Struct("=QQ")  # length of an order's body behind this, where the workers' notes begin
_loaded = encoding.reader(Loaded, "msgpack")


def _sent(order: Order, streams: Sequence[int]) -> Sent:
    return Sent(
        [os.fsencode(argument) for argument in order.arguments],
        {os.fsencode(name): os.fsencode(value) for name, value in order.environment.items()},
        streams.index(order.stdout),
        streams.index(order.stderr),
    )


def _in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


# -- the zygote itself -----------------------------------------------------------------------------


def _be_zygote(line: Channel, agent: int) -> None:
    tied.tie_to(agent)
    os.setsid()  # what is typed at the terminal is for the agent
    for number in _HANDLED:
        signal.signal(number, lambda *_: None)  # a handler, which a worker has no more, is not inherited as SIG_IGN is
    titles.name("res-zygote")
    titles.show(["resilience-zygote"])
    preload.begin()
    _serve(line, agent)


def _serve(line: Channel, agent: int) -> None:
    """Fork on demand until the agent lets go of the line, or is gone."""
    while True:
        try:
            received = line.receive_with_fds(60.0)
        except ChannelClosed:
            return
        if received is None:
            continue
        kind, fds = received
        line.send(_fork_all(kind, fds, agent))
        close_all(fds)


def _fork_all(kind: bytes, fds: Sequence[int], agent: int) -> bytes:
    """Fork processes whose parent is gone at once; return their places and pids, and what went wrong."""
    memory, folder, gate, *more = fds
    length, notes_at = _layout.unpack(os.pread(memory, _layout.size, 0))
    body = os.pread(memory, length, _layout.size)
    become: list[Callable[[], None]]
    if kind == FORK:
        become = [
            functools.partial(_be_worker, order, more, folder, memory, notes_at + place * notes.SIZE, agent)
            for place, order in enumerate(_orders(body))
        ]
    else:
        become = [functools.partial(_be_successor, *_names(body), more[0], agent)]
    read, write = os.pipe()
    told = b""
    try:
        between = os.fork()
        if not between:
            _be_between(become, gate, write)
        os.close(write)
        write = -1
        while data := os.read(read, 1 << 16):  # until every process has told its pid
            told += data
        os.waitpid(between, 0)
        return told or _born.pack(FAILED, 0)
    except OSError as error:
        return _born.pack(FAILED, error.errno or 0)
    finally:
        close_all([read, *([write] if write >= 0 else [])])


def _be_between(become: Sequence[Callable[[], None]], gate: int, write: int) -> NoReturn:
    """Fork every process, and leave them to the agent."""
    try:
        for place, be in enumerate(become):
            if not os.fork():
                _be_born(place, be, gate, write)
    except OSError as error:
        os.write(write, _born.pack(FAILED, error.errno or 0))
    finally:
        os._exit(0)


def _be_born(place: int, be: Callable[[], None], gate: int, write: int) -> NoReturn:
    """Become what was ordered, once the agent lets all through the gate."""
    try:
        os.setsid()
        os.write(write, _born.pack(place, os.getpid()))
        os.close(write)
        if not os.read(gate, 1):
            os._exit(0)  # the agent is gone, or has given this up
        be()  # the agent is the parent by now: the process between has ended before the gate was opened
        os._exit(0)
    except BaseException as error:
        words = f"a forked process could not begin: {type(error).__name__}: {error}\n"
        os.write(2, printable(words).encode())
    finally:
        os._exit(70)


def _be_worker(order: Sent, streams: Sequence[int], folder: int, memory: int, notes_at: int, agent: int) -> None:
    tied.tie_to(agent)
    writer = notes.Writer(memory, notes_at)
    os.fchdir(folder)
    os.dup2(streams[order.stdout], 1)
    os.dup2(streams[order.stderr], 2)
    os.closerange(3, 1 + max(int(fd) for fd in os.listdir("/proc/self/fd")))
    worker_main.become(
        [os.fsdecode(argument) for argument in order.arguments],
        {os.fsdecode(name): os.fsdecode(value) for name, value in order.environment.items()},
        preload.groups,
        writer.write,
    )


def _be_successor(modules: Sequence[str], learned: Sequence[str], end: int, agent: int) -> None:
    """Import modules, tell what became of them, and serve from then on if nothing stands against it."""
    tied.tie_to(agent)
    close_all([fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and fd != end])
    line = Channel(socket.socket(fileno=end))
    loaded = preload.load(modules, learned)
    line.send(encoding.to_msgpack(loaded))
    _serve(line, agent)  # if a module was refused, until the agent ends this process
