"""How is a rank freed that waits in a collective, and how are its process groups dropped?

No public function unblocks a thread inside a gloo collective: torch's `abort`, `shutdown` and `destroy_process_group`
return and free nothing. Shutting down the group's own connected sockets does, within milliseconds. They are found
exactly: every gloo TCP device has a thread named `gloo_tcp_loop` that sits in `epoll_wait`, and its epoll set is the
list of the device's sockets. No other connection of the process is touched. `group_aborts` handles groups of
accelerators. Groups are then dropped: torch's registry is emptied at once, so that the next group can be built. The
last references, which cost about 10 ms per gloo device, are dropped in the background.

Only the reading direction is shut, and the sockets stay open until `let_go`. gloo forgets a send that meets a closed
connection (`Pair::signalException` in gloo/transport/tcp/pair.cc passes over its queue of sends), and a thread that
waits for that send is stuck until the group's timeout. So a rank sees the end of a connection by its own cut, and never
by that of a faster peer.

The caller decides when to cut, how often, and what happens to a rank that stays stuck. This covers gloo over TCP; the
cut does not find its ibverbs, TLS and uv transports. Imports no torch by itself: if torch.distributed was never
imported, there is nothing to free."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from resilience.errors import RestartError, error_in_words
from resilience.system import group_aborts
from resilience.system.group_aborts import c10d as _c10d

LOOP_THREAD = "gloo_tcp_loop"
TRIES = 20  # checks of a loop thread that is not in its wait; it waits again after 0.2 ms of work
EXIT_LIMIT = 5.0  # seconds that the process's exit waits for groups that are still being dropped
READ_LIMIT = 2.0  # seconds for a device's thread to read the end of a stream; it takes 0.1 ms on an idle core
INHERITED_LIMIT = 0.25  # seconds for that if only a child of this process, such as a loader's worker, may have a copy
CONNECT_LIMIT = 0.1  # seconds for a connection to this process's own listener
NUMBER_BYTES = 8  # sequence_number_t in gloo/transport/tcp/address.h


Method = Literal["epoll", "shape", "none"]  # none: no gloo device was found, or /proc cannot be read


class CutResult(msgspec.Struct, frozen=True):
    """The result of a cut. Few or no sockets are not a failure: the peers may have cut them already."""

    sockets: int
    method: Method
    duration: float  # seconds


NO_CUT = CutResult(sockets=0, method="none", duration=0.0)
_latest = NO_CUT
_held: dict[int, int] = {}  # descriptors of sockets that were cut, by inode
_closing: dict[object, int] = {}  # inodes of those that are being closed, one entry for each attempt
os.register_at_fork(after_in_child=lambda: _leave_to_parent())
_cut_before: set[int] = set()  # inodes of sockets that were cut: a second cut has no use, and copies them once more
_destroyed: list[Any] = []  # groups of the world that user code has destroyed last in this iteration
_dropping: list[threading.Thread] = []
_kept: list[list[Any]] = []  # groups that no thread could be started to drop, and in a forked child the parent's


def cut_gloo_sockets() -> CutResult:
    """Shut every connected socket of this process's gloo groups. Never raises; any thread.

    A group under construction opens new ones. So repeat the cut with growing pauses (10, 30, 100, 300 ms; faster keeps
    peers in retry), see also `connect_in_place_of_peers`, and give it a limit."""
    global _latest
    if _c10d() is None:
        return NO_CUT
    began = time.monotonic()
    method, members = _find_sockets()
    _cut_before.intersection_update(inode for _, inode in members)
    sockets = sum(_cut(fd, inode) for fd, inode in members if inode not in _cut_before)
    _latest = CutResult(sockets, method, time.monotonic() - began)
    return _latest


def listeners() -> frozenset[int]:
    """Return the inode of each listening socket of this process's gloo groups. Never raises; any thread."""
    if _c10d() is None:
        return frozenset()
    inodes = set()
    for fd, inode in _find_sockets()[1]:
        if _is_listener(fd, inode):
            inodes.add(inode)
    return frozenset(inodes)


def connect_in_place_of_peers(world_size: int, done: frozenset[int] = frozenset()) -> frozenset[int]:
    """Free a rank that waits, while its group is built, for a connection that no peer will open any more.
    Return the inodes of the listeners that have had their connections by now. Never raises; any thread.

    The rank identifies the connection by a number below `world_size`, which the peer sends first. Each number is sent
    to each gloo listener of this process, over a connection that is then closed. So the rank has its connection, and it
    is broken. Only for groups that are given up.

    done: listeners to skip: those that had their connections, and `listeners()` from before the iteration. A connection
    that no group waits for stays with its listener as long as that group lives, which may be forever: user code may
    keep a group, and so may torch (DTensor's caches keep the first DeviceMesh of each size, and its groups)."""
    if _c10d() is None:
        return done
    for fd, inode in _find_sockets()[1]:
        if inode in done or inode in _cut_before:
            continue
        with contextlib.suppress(OSError), _duplicate(fd, inode) as copy:  # a listener may close at this moment
            if copy is None or not _listens(copy):
                continue
            for number in range(world_size):
                with socket.create_connection(copy.getsockname()[:2], CONNECT_LIMIT) as line:
                    line.sendall(number.to_bytes(NUMBER_BYTES, sys.byteorder))
            done |= {inode}
    return done


def let_go() -> None:
    """Close the sockets that were cut. Call it when all ranks have left their collectives, or when one is so late that
    the end of a connection is better than waiting for its own cut. Any thread."""
    while _held:
        _close_copies(list(_held))


def _leave_to_parent() -> None:
    """Let go in a forked child, whose copies would keep sockets open. It has no threads of gloo: groups stay."""
    let_go()
    _kept.append(list(_destroyed))
    _destroyed.clear()


def last_cut() -> CutResult:
    """Return the latest cut since the last call; `NO_CUT` if there was none."""
    global _latest
    cut, _latest = _latest, NO_CUT
    return cut


def cut_connections_to(port: int) -> int:
    """Shut down this process's TCP connections to remote port `port`. Return how many. Never raises.

    Frees a rank that waits in the store phase of `init_process_group`. Use it only for the port of the iteration's own
    store: if another server may have the port, the user would lose a connection."""
    count = 0
    for fd in _descriptors():
        if _link(fd).startswith("socket:"):
            with _duplicate(fd) as copy:
                if copy is not None and _peer_port(copy) == port:
                    count += _shut_down(copy)
    return count


def groups_alive() -> bool:
    """Return True if torch.distributed holds a process group, finished or half built."""
    c10d = _c10d()
    return c10d is not None and (c10d._world.default_pg is not None or bool(c10d._world.pg_map))


def drop_groups() -> None:
    """Reset torch.distributed to its state before `init_process_group`, even if that was interrupted.

    Groups are dropped in the background; user code that still holds one keeps it alive. A second call does no harm,
    and is needed if another thread was building a group meanwhile. Any thread.
    Raises: RestartError if this torch keeps its groups in an unknown way."""
    c10d = _c10d()
    if c10d is None:
        return
    try:
        held = _empty_registry(c10d)
        unwrap_excepthook()
    except Exception as error:
        raise RestartError(
            f"torch {sys.modules['torch'].__version__} keeps its process groups in an unknown way "
            f"({error_in_words(error)}), so they could not be dropped; expected torch 2.12 to 2.15"
        ) from error
    aborting = group_aborts.forget()
    if held:
        _release_in_background(held, aborting)
    drop_destroyed()


def keep_destroyed() -> None:
    """Keep the groups of gloo that user code destroys now, until `drop_groups` or `drop_destroyed`. Only the last world
    is kept."""
    c10d = _c10d()
    drop_destroyed()
    _destroyed.extend(group for group in c10d._world.pg_map if "gloo" in group_aborts.backends(c10d, group))


def drop_destroyed() -> None:
    """Drop the groups that user code has destroyed, and so shut down itself."""
    destroyed, _destroyed[:] = list(_destroyed), []
    if destroyed:
        _release_in_background(destroyed, frozenset(map(id, destroyed)))


# -- finding sockets --------------------------------------------------------------------------------

Members = list[tuple[int, int]]  # (descriptor, inode) as the epoll set knows them


def _find_sockets() -> tuple[Method, set[tuple[int, int]]]:
    """Return the members of the epoll sets of all gloo devices, and how they were found."""
    method: Method = "epoll"
    sets = list(_sets_of_loop_threads())
    if not sets or None in sets:
        # Threads are busy or cannot be read, or this torch's gloo does not name them.
        method, sets = "shape", [*sets, *_sets_by_shape()]
    members = {member for members_of_set in sets for member in members_of_set or ()}
    return method if members else "none", members


def _sets_of_loop_threads() -> Iterator[Members | None]:
    """Yield the set of each gloo device, None if its thread does not wait for it at present."""
    for task in _directory_entries("/proc/self/task"):
        if _read(f"/proc/self/task/{task}/comm").startswith(LOOP_THREAD):
            epoll = _waited_for(task)
            if epoll is not None and _link(epoll) == "anon_inode:[eventpoll]":
                yield [(fd, inode) for fd, inode, _ in _epoll_members(epoll)]
            else:
                yield None


def _waited_for(task: str) -> int | None:
    """Return the first argument of the thread's present system call."""
    for _ in range(TRIES):
        words = _read(f"/proc/self/task/{task}/syscall").split()
        if len(words) > 1 and words[1].startswith("0x"):
            return int(words[1], 16)
        if words != ["running"]:
            return None
        time.sleep(0.0002)
    return None


def _sets_by_shape() -> Iterator[Members]:
    """Find gloo's epoll sets by their members: one pipe, one listener, and pointers as user data.

    asyncio and libuv use the descriptor as user data, and gRPC wakes itself by an eventfd, so none of them matches."""
    for epoll in _descriptors():
        if _link(epoll) != "anon_inode:[eventpoll]":
            continue
        members = list(_epoll_members(epoll))
        if members and all(data > 0xFFFFFFFF for _, _, data in members):
            links = [_link(fd) for fd, _, _ in members]
            pipes = sum(link.startswith("pipe:") for link in links)
            listeners = sum(_is_listener(fd, inode) for fd, inode, _ in members)
            if pipes == 1 and listeners == 1:
                yield [(fd, inode) for fd, inode, _ in members]


def _epoll_members(epoll: int) -> Iterator[tuple[int, int, int]]:
    """Yield (descriptor, inode, user data) of an epoll set.

    A line reads `tfd:       18 events:       19 data:       55d21d86e610  pos:0 ino:44f9 sdev:9`."""
    for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines():
        if line.startswith("tfd:"):
            words = line.replace(":", " ").split()
            fields = dict(zip(words[::2], words[1::2], strict=False))
            yield int(fields["tfd"]), int(fields["ino"], 16), int(fields["data"], 16)


def _cut(fd: int, inode: int) -> int:
    """Make the loop thread read the end of the stream, after arrived data. Return 1 if it was connected."""
    with _duplicate(fd, inode) as copy:
        if copy is None or inode in _held or _listens(copy) or not _shut_down(copy, socket.SHUT_RD):
            return 0
        with contextlib.suppress(OSError):  # too many open files
            _held[inode] = os.dup(copy.fileno())  # socket.dup() would make it blocking, for gloo too
            _cut_before.add(inode)
        return 1


@contextlib.contextmanager
def _duplicate(fd: int, inode: int | None = None) -> Iterator[socket.socket | None]:
    """Yield a second descriptor of a socket, so that its owner may close and reuse the first meanwhile.

    inode: the expected inode; the value is None for any other socket, and for a descriptor that is not a socket.
    `shutdown` acts on the socket, not on the descriptor, so copies inherited by children do not matter."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    duplicate = None
    try:
        if inode is None or os.fstat(copy).st_ino == inode:
            duplicate = socket.socket(fileno=copy)
    except OSError:  # not a socket
        pass
    try:
        yield duplicate
    finally:
        if duplicate is None:
            os.close(copy)
        else:
            duplicate.close()


def _is_listener(fd: int, inode: int) -> bool:
    if inode in _cut_before:
        return False  # and no copy of it may keep it open while its group is dropped
    with _duplicate(fd, inode) as copy:
        return copy is not None and _listens(copy)


def _listens(copy: socket.socket) -> bool:
    try:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _peer_port(copy: socket.socket) -> int | None:
    """Return the remote port of a connected TCP socket."""
    if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
        return None
    try:
        return int(copy.getpeername()[1])
    except OSError:
        return None


def _shut_down(copy: socket.socket, how: int = socket.SHUT_RDWR) -> int:
    """Shut the connection down. Return 1 if there was one."""
    try:
        copy.getpeername()
        copy.shutdown(how)
    except OSError:
        return 0
    return 1


def _descriptors() -> list[int]:
    return [int(name) for name in _directory_entries("/proc/self/fd")]


def _directory_entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # the thread or descriptor is gone, or may not be read
        return ""


# -- torch's groups ---------------------------------------------------------------------------------


_REGISTRY = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


def _empty_registry(c10d: Any) -> list[Any]:
    """Remove every group from torch's registries. Return the groups, whose last references this module drops.

    Like `destroy_process_group`, which refuses to run if the default group is not finished yet."""
    world = c10d._world
    names = dict(world.pg_names)
    groups = set(world.pg_map) | set(names)
    if world.default_pg is not None:
        groups.add(world.default_pg)
    # In torch's order, largest name first: NCCL's shutdown was a collective in some versions.
    held = sorted(groups, key=lambda group: str(names.get(group, "")), reverse=True)
    held.extend(getattr(world, "comms", ()))
    c10d._update_default_pg(None)
    for name in _REGISTRY:
        registry = getattr(world, name, None)
        if registry is not None:
            registry.clear()
    if hasattr(world, "comms"):
        world.comms.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0  # group names count from here; all ranks must agree on them
    return held


def unwrap_excepthook() -> None:
    """Remove torch's wrappers of sys.excepthook, one for every `init_process_group`.

    torch never does this: after 200 restarts each line of a traceback would have 200 rank prefixes."""
    hook = _without_wrappers(sys.excepthook)
    if hook is not sys.excepthook:
        sys.excepthook = hook


def _without_wrappers(hook: Any) -> Any:
    while getattr(hook, "__name__", "") == "_distributed_excepthook" and hook.__closure__:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        if "old_hook" not in cells:
            break
        hook = cells["old_hook"].cell_contents
    return hook


def _release_in_background(held: list[Any], aborting: frozenset[int]) -> None:
    thread = threading.Thread(target=_release, args=(held, aborting), name="resilience-drop", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this host or process has no thread left, and a shutdown in this one may never return
        _kept.append(held)
    else:
        _dropping.append(thread)


def _release(held: list[Any], aborting: frozenset[int]) -> None:
    """Shut down and drop the groups, one after another. aborting: ids of groups that must not be shut down."""
    began = time.monotonic()
    while held:
        _await_stream_ends(began)
        group = held.pop(0)
        with contextlib.suppress(Exception):  # a thread's edge: a group that cannot be shut down is dropped anyway
            if id(group) not in aborting:
                (group.shutdown if hasattr(group, "shutdown") else group.finalize)()
        del group


def _await_stream_ends(began: float) -> None:
    """Wait until the devices' threads have read the end of each cut connection, within a limit since `began`.

    A device after shutdown no longer removes sockets from its epoll set (`Loop::unregisterDescriptor` in
    gloo/transport/tcp/loop.cc): it relies on `close`, which removes a socket only without a copy. It would find
    the end of the stream again, for a closed pair, and end the process."""
    while unread := _cut_before & {inode for _, inode in _find_sockets()[1]}:
        ours = unread & _open_copies()
        waited = time.monotonic() - began
        if waited >= READ_LIMIT:
            _close_copies(ours)  # it is not ours any more, unless another thread is closing it
        if waited >= (2 * READ_LIMIT if ours else INHERITED_LIMIT):
            return
        time.sleep(0.002)


def _close_copies(inodes: Iterable[int]) -> None:
    """Close our copies of sockets. Until a copy is closed, it is in `_held` or in `_closing`. Any thread."""
    for inode in inodes:
        attempt = object()
        _closing[attempt] = inode
        try:
            copy = _held.pop(inode, None)
            if copy is not None:  # no other thread was faster
                os.close(copy)
        finally:
            del _closing[attempt]


def _open_copies() -> set[int]:
    """Return the inodes of the sockets of which we still have a copy."""
    held = set(_held)  # first: a copy that is being closed comes to `_closing` before it leaves `_held`
    return held.union(_closing.values())


def await_drops(limit: float = EXIT_LIMIT) -> int:
    """Wait until the dropped groups are gone, at most `limit` seconds. Return how many threads still drop groups."""
    deadline = time.monotonic() + limit
    for thread in _dropping:
        thread.join(max(0.0, deadline - time.monotonic()))
    _dropping[:] = [thread for thread in _dropping if thread.is_alive()]
    return len(_dropping)


@contextlib.contextmanager
def nothing_left(limit: float) -> Iterator[None]:
    """Leave no thread that drops groups and no excepthook that torch set in it. limit: seconds for the threads."""
    hook = sys.excepthook
    try:
        yield
    finally:
        drop_destroyed()
        await_drops(limit)
        unwrap_excepthook()
        if sys.excepthook is _without_wrappers(hook):
            sys.excepthook = hook  # the program built groups of its own before


# A daemon thread in a C++ destructor at the interpreter's end would abort the process.
atexit.register(await_drops)
