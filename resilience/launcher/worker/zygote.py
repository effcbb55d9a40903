"""Forks workers from a process that has imported torch already.

Importing torch is nine tenths of the cost of a worker's restart. The agent forks the zygote right after its imports,
while both have one thread, and the zygote only forks. It forks twice: the worker's parent exits at once, so the agent,
a subreaper, becomes the parent and learns the exit status whatever happens to the zygote. The kernel kills a worker
when the agent dies (`tied`). Workers wait at a gate until the agent knows all of them, so no worker runs after the
agent has given up on it. If the zygote cannot be used, the caller starts fresh interpreters and says why. `worker_main`
makes a forked worker like a fresh interpreter.

The zygote itself imports nothing: `preload` makes it fork a successor, which imports more modules (`preload`) and
replaces the zygote if it can still be forked afterwards. A module that prevents this is left out."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
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

from resilience.errors import DecodeError, LaunchError, error_in_words
from resilience.facts import encoding
from resilience.facts.printable import printable
from resilience.launcher.worker import notes, preload, tied, worker_main
from resilience.launcher.worker.preload import Loaded, cannot_fork
from resilience.system import descriptors, titles
from resilience.system.channel import MOST_FDS, Channel, ChannelClosed, close_all, pair
from resilience.system.environment import async_error_handling
from resilience.system.processes import continue_if_stopped, signal_name

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy.random")
# Seconds for forks, in which the agent does nothing else; cold workers need as long to start. A fork takes longer the
# more memory the preloaded modules fill.
ANSWER_LIMIT, ANSWER_LIMIT_EACH = 3.0, 0.25
IMPORT_LIMIT = 120.0  # seconds for a successor's imports, also from a slow file server; no worker waits that long
MOST_REFUSALS = 5  # refused modules, each of which costs a process; after that, learned modules are not tried
LOOK = 0.01  # seconds between polls of a process for which there is no descriptor
STOPPED_LOOK = 0.5  # seconds for an answer before the process is continued, if somebody has stopped it
KILL_LIMIT = 2.0  # seconds that a killed process may take to end
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # torchrun has handlers for them
_born = struct.Struct("=ii")  # index of a process's order, its pid; or FAILED, errno
FAILED = -1
FORK, LOAD = b"fork", b"load"  # kinds of orders: workers, or a successor


class Order(msgspec.Struct, frozen=True):
    """Describes a worker. stdin is the agent's; stdout, stderr: descriptors of this process."""

    arguments: tuple[str, ...]  # of the interpreter, after its name
    environment: Mapping[str, str]
    stdout: int
    stderr: int


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """An order in transit, as bytes for the kernel. stdout, stderr: indices into the descriptors."""

    arguments: list[bytes]
    environment: dict[bytes, bytes]
    stdout: int
    stderr: int


class Imports(msgspec.Struct, frozen=True, array_like=True):
    """The order for a successor. environment: variables of all workers; worker_variables: variables that also differ
    between workers."""

    modules: list[str]
    learned: list[str]
    environment: dict[bytes, bytes]
    worker_variables: tuple[str, ...]


class ForkedWorker:
    """A forked worker with the methods of subprocess.Popen that torchelastic uses. Its parent is this process."""

    def __init__(self, pid: int, notes: notes.NotesReader | None = None) -> None:
        self.pid = pid
        self.notes = notes
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code reaped it
                self.returncode = 255
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            self._await_end(math.inf if timeout is None else timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _await_end(self, timeout: float) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left
            deadline = time.monotonic() + timeout
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(LOOK)
            return
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(None if timeout == math.inf else timeout * 1000)
        finally:
            os.close(pidfd)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


Part = tuple[bytes, bytes, int, list[int]]  # one message: kind and body of the orders, number of processes, descriptors


class Successor(msgspec.Struct, frozen=True):
    """A process that imports modules and then replaces the zygote."""

    pid: int
    line: Channel
    modules: tuple[str, ...]
    learned: tuple[str, ...]
    deadline: float  # of its imports, on this process's monotonic clock

    def refused(self, why: str) -> Loaded:
        return Loaded(refused=(*self.modules, *self.learned), why=why, is_learned=not self.modules)

    def without(self, refused: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the modules and learned modules that remain without the refused ones."""
        return (
            [name for name in self.modules if name not in refused],
            [name for name in self.learned if name not in refused],
        )


class Zygote:
    """The agent's handle of the zygote. Main thread only. pid: 0 if no zygote could be forked."""

    def __init__(self, pid: int, line: Channel | None, why_not: str = "") -> None:
        """line: None if there is no zygote; then why_not says why."""
        self.pid = pid
        self.loaded: dict[str, str] = {}  # file of each top-level module that a successor preloaded
        self.reads: set[str] = set()  # variables that these modules read at import
        self._refusals = 0
        self._unanswered = 0  # orders that the zygote has not answered in time, and may answer late
        self._not_tried: list[Loaded] = []  # modules of `preload` for which no successor could be forked
        self.worker_variables: tuple[str, ...] = ()  # which differ between workers, besides the usual ones
        self.why_unsuited = ""  # why this program must start cold; the zygote continues
        self._line = line
        self._why_not = why_not
        self._successor: Successor | None = None

    @classmethod
    def start(cls) -> Zygote:
        """Import the modules that workers need, and fork the zygote. If it is unusable, its `why_not` says why."""
        for name in PRELOADED:
            importlib.import_module(name)
        with contextlib.ExitStack() as undo:
            try:
                ours, peer_line = pair()
                undo.callback(ours.close)
                with contextlib.closing(peer_line):
                    why_not = cannot_fork()
                    pid = 0 if why_not else _fork_zygote(ours, peer_line)
            except OSError as error:
                return cls(0, None, f"the zygote could not be forked: {error}; this host lacks the resources for it")
            undo.pop_all()
        return cls(pid, ours, why_not)

    @property
    def why_not(self) -> str:
        """Return why no worker can be forked; empty if workers can be forked."""
        if not self._why_not:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._why_not = f"the zygote is gone ({_exit_in_words(os.waitstatus_to_exitcode(status))})"
        return self._why_not

    @property
    def pids(self) -> set[int]:
        """Return the pids of the zygote and of its successor, if there is one."""
        return {self.pid, *([self._successor.pid] if self._successor is not None else [])}

    @property
    def is_preloading(self) -> bool:
        return self._successor is not None

    @property
    def being_preloaded(self) -> tuple[str, ...]:
        """Return the modules of `preload` whose import has not ended."""
        return () if self._successor is None else self._successor.modules

    def preload(self, modules: Sequence[str], learned: Sequence[str] = ()) -> None:
        """Let a successor import modules, without waiting; `succeed` checks for the result. One at a time. Modules find
        the environment that this process has now, and that it gives to all workers.

        learned: names that workers have tried to import; a name that cannot be imported is left out."""
        assert self._successor is None
        if not (modules or learned):
            return
        try:
            self._begin_successor(modules, learned)
        except (LaunchError, OSError) as error:  # this host lacks a process or a descriptor for the moment
            if modules:  # workers offer learned ones again
                self._not_tried.append(Loaded(refused=tuple(modules), why=str(error), is_tried=False))

    def _begin_successor(self, modules: Sequence[str], learned: Sequence[str]) -> None:
        """Fork a successor. Raises: LaunchError, OSError."""
        if self.why_not:
            raise LaunchError(self.why_not)
        ours, peer_line = pair()
        try:
            imports = Imports(list(modules), list(learned), _in_bytes(_shared_environment()), self.worker_variables)
            (forked,) = self._fork_all_or_none([(LOAD, encoding.to_msgpack(imports), 1, [peer_line.fileno()])])
        except LaunchError:
            ours.close()
            raise
        finally:
            peer_line.close()
        self._successor = Successor(forked.pid, ours, tuple(modules), tuple(learned), time.monotonic() + IMPORT_LIMIT)

    def succeed(self, limit: float) -> list[Loaded]:
        """Let the successor take over if it is ready within `limit` seconds; return what happened to the modules.

        If a module is refused, try again without it."""
        deadline = time.monotonic() + limit
        outcomes = []
        while (successor := self._successor) is not None:
            outcome = _outcome(successor, deadline)
            if outcome is None:
                break
            outcomes.append(outcome)
            self._successor = None
            if outcome.refused:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(successor.pid, signal.SIGKILL)  # including processes that a module has started
                _end(successor.pid, successor.line)
                self._refusals += 1
                modules, learned = successor.without(outcome.refused)
                self.preload(modules, learned if self._refusals < MOST_REFUSALS else ())
            else:
                _end(self.pid, self._line)
                self.pid, self._line, self._unanswered = successor.pid, successor.line, 0
                self.loaded |= outcome.found
                self.reads |= set(outcome.reads)
        not_tried, self._not_tried = self._not_tried, []
        return outcomes + not_tried

    def spawn(self, orders: Sequence[Order]) -> list[ForkedWorker]:
        """Fork workers that do in this folder what fresh interpreters would do: all of them, or none.

        Raises: LaunchError if the zygote cannot. It is given up only if it is gone: a host that has no room for a
        process may have it later. A zygote that has not answered an order is asked again once it has."""
        batch_size = (MOST_FDS - 3) // 2
        parts = []
        for first_index in range(0, len(orders), batch_size):
            batch = orders[first_index : first_index + batch_size]
            streams = sorted({fd for order in batch for fd in (order.stdout, order.stderr)})
            body = encoding.to_msgpack([_sent(order, streams) for order in batch])
            parts.append((FORK, body, len(batch), streams))
        return self._fork_all_or_none(parts)

    def _fork_all_or_none(self, parts: Sequence[Part]) -> list[ForkedWorker]:
        """Let the zygote fork processes, and open the gate for them: all of them, or none. Raises: LaunchError."""
        folder = gate_reader = gate_writer = -1
        workers: list[ForkedWorker] = []
        try:
            # By descriptor, because the folder's name may be gone; O_PATH, because it may be unreadable.
            folder = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)
            gate_reader, gate_writer = os.pipe2(os.O_CLOEXEC)
            for part in parts:
                self._fork(part, [folder, gate_reader], workers)
            os.write(gate_writer, b"." * len(workers))
        except (LaunchError, OSError) as error:
            close_all([gate_writer])  # processes that wait at the gate exit
            gate_writer = -1
            deadline = time.monotonic() + ANSWER_LIMIT
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, deadline - time.monotonic()))
            raise LaunchError(self.why_not or str(error)) from error
        finally:
            close_all([folder, gate_reader, gate_writer])
        return workers

    def _fork(self, part: Part, fds: list[int], workers: list[ForkedWorker]) -> None:
        kind, body, count, streams = part
        memory = os.memfd_create("resilience-orders", os.MFD_CLOEXEC)
        notes_at = -(-(_layout.size + len(body)) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(_layout.pack(len(body), notes_at) + body)
            os.ftruncate(memory, notes_at + count * notes.SIZE)
            readers = [notes.NotesReader(memory, notes_at + index * notes.SIZE) for index in range(count)]
            answer = self._answer(kind, [memory, *fds, *streams], ANSWER_LIMIT + count * ANSWER_LIMIT_EACH)
        finally:
            os.close(memory)
        born = dict(_born.iter_unpack(answer))
        errno = born.pop(FAILED, 0)
        workers += [ForkedWorker(born[index], readers[index]) for index in sorted(born)]
        if len(born) < count:
            raise LaunchError(f"the zygote could not fork: {os.strerror(errno)}")

    def _answer(self, kind: bytes, fds: Sequence[int], limit: float) -> bytes:
        """Give an order and return the zygote's answer. Raises: LaunchError if there is none.

        A late answer is about processes that have found their gate closed."""
        assert self._line is not None
        try:
            while self._unanswered:
                if _receive(self.pid, self._line, 0.0) is None:
                    raise LaunchError("the zygote has not answered an earlier order yet")
                self._unanswered -= 1
            if not self._line.send(kind, fds):
                if self._line.is_closed():
                    raise ChannelClosed
                raise LaunchError("the zygote accepts no requests to fork")
            answer = _receive(self.pid, self._line, limit)
        except ChannelClosed as error:
            self._give_up(self.why_not or "the zygote is gone")
            raise LaunchError(self.why_not) from error
        if answer is None:
            self._unanswered += 1
            raise LaunchError(f"the zygote did not fork within {limit:g} s")
        return answer

    def _give_up(self, reason: str) -> None:
        self.close()
        self._why_not = reason

    def close(self) -> None:
        """End the zygote; workers continue. May be called again."""
        if self._successor is not None:
            _end(self._successor.pid, self._successor.line)
            self._successor = None
        _end(self.pid, self._line)


def _fork_zygote(ours: Channel, peer_line: Channel) -> int:
    """Fork the zygote; return its pid. Raises: OSError."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # once here, instead of again in every worker
    gc.collect()
    gc.freeze()  # a garbage collection in a worker must not copy shared pages
    agent = os.getpid()
    try:
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                _be_zygote(peer_line, agent)
            finally:
                os._exit(0)
    finally:
        gc.unfreeze()
    return pid


def _end(pid: int, line: Channel | None) -> str:
    """End the process behind this line; return how it ended. A process that survives SIGKILL is left to the kernel."""
    if line is not None:
        line.close()
    if not pid:
        return ""
    process = ForkedWorker(pid)
    process.send_signal(signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return _exit_in_words(process.wait(KILL_LIMIT))
    return "SIGKILL does not end it"


def _receive(pid: int, line: Channel, limit: float) -> bytes | None:
    """Return the next message of a child, None if there is none within `limit` seconds; continue a stopped child.

    Raises: ChannelClosed."""
    deadline = time.monotonic() + limit
    while True:
        continue_if_stopped(pid)
        left = deadline - time.monotonic()
        answer = line.receive(max(0.0, min(left, STOPPED_LOOK)))
        if answer is not None or left <= STOPPED_LOOK:
            return answer


def _outcome(successor: Successor, deadline: float) -> Loaded | None:
    """Return a successor's result, None if there is none at the deadline."""
    try:
        answer = _receive(successor.pid, successor.line, min(deadline, successor.deadline) - time.monotonic())
        if answer is not None:
            return _loaded(answer)
    except (ChannelClosed, DecodeError):
        ending = _end(successor.pid, successor.line)
        return successor.refused(f"the process that imported them is gone ({ending})")
    if max(deadline, time.monotonic()) < successor.deadline:
        return None
    return successor.refused(f"the import did not end within {IMPORT_LIMIT:g} s")


_orders = encoding.reader(list[Sent], "msgpack")
_imports = encoding.reader(Imports, "msgpack")
_layout = struct.Struct("=QQ")  # length of the orders' body that follows, offset of the workers' notes
_loaded = encoding.reader(Loaded, "msgpack")


def _sent(order: Order, streams: Sequence[int]) -> Sent:
    return Sent(
        [os.fsencode(argument) for argument in order.arguments],
        _in_bytes(order.environment),
        streams.index(order.stdout),
        streams.index(order.stderr),
    )


def _shared_environment() -> dict[str, str]:
    """Return the variables that this process gives to all of its workers."""
    return {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": async_error_handling()}


def _in_bytes(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}


def _in_text(environment: Mapping[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def _exit_in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)


# -- the zygote itself -----------------------------------------------------------------------------


def _be_zygote(line: Channel, agent: int) -> None:
    tied.tie_to(agent)
    os.setsid()  # keys typed at the terminal are for the agent
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored, as in a new interpreter
            signal.signal(number, lambda *_: None)  # a worker drops a handler (`worker_main`), but would keep SIG_IGN
    titles.name("res-zygote")
    titles.show(["resilience-zygote"])
    preload.begin()
    _serve(line, agent)


def _serve(line: Channel, agent: int) -> None:
    """Fork on demand until the agent closes the line or is gone."""
    while True:
        try:
            received = line.receive_with_fds(60.0)
        except ChannelClosed:
            return
        if received is None:
            continue
        kind, fds = received
        line.send(_fork_all(kind, fds, agent, line))
        close_all(fds)


def _fork_all(kind: bytes, fds: Sequence[int], agent: int, line: Channel) -> bytes:
    """Fork processes whose parent exits at once; return their indices and pids, and any error. line: to the agent."""
    memory, folder, gate, *streams = fds
    length, notes_at = _layout.unpack(os.pread(memory, _layout.size, 0))
    body = os.pread(memory, length, _layout.size)
    actions: list[Callable[[], None]]
    is_worker = kind == FORK
    if is_worker:
        actions = [
            functools.partial(_be_worker, order, streams, folder, memory, notes_at + index * notes.SIZE, agent)
            for index, order in enumerate(_orders(body))
        ]
    else:
        actions = [functools.partial(_be_successor, _imports(body), streams[0], agent)]
    read, write = os.pipe()
    births = b""
    try:
        middle = os.fork()
        if not middle:
            line.close()  # so that the agent notices at once that the zygote is gone, while these wait at the gate
            _be_middle_process(actions, gate, write, is_worker)
        os.close(write)
        write = -1
        while data := os.read(read, 1 << 16):  # until every process has reported its pid
            births += data
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, or a module's handler has reaped it
            os.waitpid(middle, 0)
        return births or _born.pack(FAILED, 0)
    except OSError as error:
        return _born.pack(FAILED, error.errno or 0)
    finally:
        close_all([read, *([write] if write >= 0 else [])])


def _be_middle_process(actions: Sequence[Callable[[], None]], gate: int, write: int, are_workers: bool) -> NoReturn:
    """Fork every process and exit, which leaves them to the agent."""
    try:
        for index, action in enumerate(actions):
            if not os.fork():
                if are_workers:
                    _drop_handlers()
                _await_gate(index, action, gate, write)
    except OSError as error:
        os.write(write, _born.pack(FAILED, error.errno or 0))
    finally:
        os._exit(0)


def _drop_handlers() -> None:
    """Let signals end this process, as they end a new interpreter. The agent does not know its pid yet."""
    for number in _HANDLED:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _await_gate(index: int, action: Callable[[], None], gate: int, write: int) -> NoReturn:
    """Run the ordered action after the agent opens the gate."""
    try:
        os.setsid()
        os.write(write, _born.pack(index, os.getpid()))
        os.close(write)
        if not os.read(gate, 1):
            os._exit(0)  # the agent is gone or has given up on this process
        action()  # the agent is the parent by now: the middle process ended before the gate opened
        os._exit(0)
    except BaseException as error:
        message = f"a forked process could not start: {error_in_words(error)}\n"
        os.write(2, printable(message).encode())
    finally:
        os._exit(70)


def _be_worker(order: Sent, streams: Sequence[int], folder: int, memory: int, notes_at: int, agent: int) -> None:
    tied.tie_to(agent)
    writer = notes.NotesWriter(memory, notes_at)
    os.fchdir(folder)
    os.dup2(streams[order.stdout], 1)
    os.dup2(streams[order.stderr], 2)
    descriptors.close_others()
    worker_main.become(
        [os.fsdecode(argument) for argument in order.arguments],
        _in_text(order.environment),
        preload.groups,
        writer.write,
    )


def _be_successor(imports: Imports, line_fd: int, agent: int) -> None:
    """Import modules, report the result, then serve as the zygote."""
    tied.tie_to(agent)
    descriptors.close_others((line_fd,))
    line = Channel(socket.socket(fileno=line_fd))
    os.environ.clear()
    os.environ.update(_in_text(imports.environment))
    modules, learned = imports.modules, imports.learned
    loaded = preload.load(modules, learned, imports.worker_variables)
    if not line.send(encoding.to_msgpack(loaded)):
        refused, why = (*modules, *learned), "they import too many modules to report"
        line.send(encoding.to_msgpack(Loaded(refused=refused, why=why, is_learned=not modules)))
        return  # if even that is too long, the agent notices that this process is gone
    _serve(line, agent)  # after a refused module, only until the agent kills this process
