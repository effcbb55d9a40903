"""What the ranks of the collectives tests run: groups that are cut, dropped and built again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from resilience.errors import RankShouldRestart, RestartError
from resilience.system import collectives, group_aborts, group_shutdowns, places
from resilience.system.listening_sockets import listen
from tests.support import threads

LIMIT = 20.0  # seconds: far less than the groups' timeout
GROUP_TIMEOUT = timedelta(minutes=30)
BUSY = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


HOSTED: list[dist.TCPStore] = []


def server(port: int = 0) -> dist.TCPStore:
    listener = listen("127.0.0.1", port)
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def new_client() -> dist.TCPStore:
    """A client of the store that rank 0 hosts at MASTER_PORT."""
    if os.environ["RANK"] == "0" and not HOSTED:
        HOSTED.append(server(int(os.environ["MASTER_PORT"])))
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


class UsersOwn:
    """Connections that are none of ours: a TCP connection to an asyncio server, and a store client."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._echo, "127.0.0.1", 0))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._old = self._connect()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    def _connect(self) -> Any:
        connection = socket.create_connection(self._server.sockets[0].getsockname(), LIMIT)
        return connection.makefile("rwb")

    def answer(self) -> bool:
        """Whether connections old and new, the server and the store client work."""
        for stream in (self._old, new := self._connect()):
            stream.write(b"hello\n")
            stream.flush()
            assert stream.readline() == b"hello\n"
        new.close()
        key = f"own/{os.getpid()}"
        self._store.set(key, "x")
        return self._store.get(key) == b"x"


def meet(store: dist.Store, name: str, count: int) -> None:
    """Wait until `count` ranks are here."""
    store.add(name, 1)
    deadline = time.monotonic() + LIMIT
    while store.add(name, 0) < count:
        assert time.monotonic() < deadline, f"{name}: {store.add(name, 0)} of {count}"
        time.sleep(0.001)


def await_blocked(thread: int) -> str:
    """Wait until a thread is in a call of torch's process groups; return where."""
    deadline = time.monotonic() + LIMIT
    while (where := where_in_process_groups(thread)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return where


def where_in_process_groups(thread: int) -> str | None:
    place = places.place_of(thread)
    return place.where if place is not None and places.is_in_process_groups(place) else None


def build(store: dist.Store, name: str, rank: int, world: int) -> list[Any]:
    """Build the default group and two that overlap, and use each."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=GROUP_TIMEOUT
    )
    groups = [None, *(dist.new_group(ranks, timeout=GROUP_TIMEOUT) for ranks in ([0, 1, 2], [1, 2, 3]))]
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == dist.get_world_size(group)
    return groups


def cut_rounds(rounds: int, shape: bool) -> list[tuple[str, int]]:
    """Be freed from a collective that one rank never joins, round after round.

    Returns the method and the number of sockets of each cut."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if shape:
        collectives.LOOP_THREAD = "as if gloo did not name its threads"
    own, store, beside = UsersOwn(new_client()), new_client(), new_client()
    cuts, before = [], (0, 0)
    for number in range(rounds):
        groups = build(store, f"round{number}", rank, world)
        if number < 2:  # a thread may be about to start when the first groups are built
            meet(store, f"built{number}", world)
            before = max(before[0], resources()[0]), max(before[1], resources()[1])
        if rank == number % world:  # the absent one
            meet(store, f"blocked{number}", world)
            cut = collectives.cut_gloo_sockets()
        else:
            cut = wait_and_be_cut(groups, number, beside, world)
        assert cut == collectives.last_cut()
        assert collectives.last_cut() == collectives.NO_CUT
        cuts.append((cut.method, cut.sockets))
        del groups  # user code that held on to one would keep it
        collectives.drop_groups()
        assert not collectives.groups_alive()
        assert not dist.is_initialized()
        assert own.answer()
        meet(store, f"over{number}", world)
        collectives.let_go()
    total = build(store, "last", rank, world)
    assert len(total) == 3
    deadline = time.monotonic() + LIMIT
    while any(now > then for now, then in zip(resources(), before, strict=True)):  # groups go in the background
        assert time.monotonic() < deadline, (
            f"descriptors and threads: {resources()}, before the cuts {before}; {threads.names_of()}"
        )
        time.sleep(0.01)
    if rank:
        store.add("left", 1)
    else:  # the host of the store goes last
        meet(store, "left", world)
    return cuts


class SlowToClose:
    """The module os. A thread that closes the last copy of a socket is kept from it for a while, as on a busy host."""

    copies: ClassVar[set[int]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def close(self, descriptor: int) -> None:
        if descriptor in self.copies and not collectives._held:
            time.sleep(0.3)
        os.close(descriptor)


def cut_and_drop(rounds: int) -> int:
    """Drop the groups in the moment in which they are cut, before gloo's threads can have seen it; answers how many
    sockets were cut in all."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, sockets = new_client(), 0
    for number in range(rounds):
        build(store, f"round{number}", rank, world)
        meet(store, f"built{number}", world)
        sockets += collectives.cut_gloo_sockets().sockets
        collectives.drop_groups()
        meet(store, f"over{number}", world)
        collectives.let_go()
    leave_last_with_store(store, rank, world)
    return sockets


def cut_and_let_go_on_a_busy_host(rounds: int) -> int:
    """The same with copies that are closed before gloo's threads, which hardly ever run, have seen the cut."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, sockets = new_client(), 0
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    os.sched_setaffinity(busy.pid, {core})
    collectives.os = SlowToClose()  # type: ignore[attr-defined]
    try:
        for number in range(rounds):
            build(store, f"round{number}", rank, world)
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # a thread has ended meanwhile
                    if Path(f"/proc/self/task/{task}/comm").read_text().startswith(collectives.LOOP_THREAD):
                        os.sched_setaffinity(int(task), {core})
                        os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
            meet(store, f"built{number}", world)
            sockets += collectives.cut_gloo_sockets().sockets
            keep_one_copy()
            SlowToClose.copies = set(collectives._held.values())
            collectives.drop_groups()
            collectives.let_go()
            assert collectives.await_drops(LIMIT) == 0
            meet(store, f"over{number}", world)
    finally:
        busy.kill()
        busy.wait()
    leave_last_with_store(store, rank, world)
    return sockets


def destroy_while_being_cut(rounds: int, pause: float) -> int:
    """Destroy the groups, as user code does, while another thread cuts them. pause: the most seconds between both."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, pauses, original = new_client(), random.Random(rank), vars(c10d.ProcessGroup)["shutdown"]
    with group_shutdowns.kept():
        for number in range(rounds):
            build(store, f"round{number}", rank, world)
            meet(store, f"built{number}", world)
            cutting = threading.Timer(pauses.random() * pause, collectives.cut_gloo_sockets)
            cutting.start()
            if not pause:
                cutting.join()  # the groups go after the cut, and before gloo's threads can have seen it
            with contextlib.suppress(ValueError):
                try:
                    raise ValueError("of the user's")
                finally:
                    dist.destroy_process_group()
            cutting.join()
            assert not collectives.groups_alive()
            collectives.drop_groups()
            meet(store, f"over{number}", world)
            collectives.let_go()
    assert vars(c10d.ProcessGroup)["shutdown"] is original
    leave_last_with_store(store, rank, world)
    return rounds


def keep_one_copy() -> None:
    """Keep a copy of one socket alone, if possible of one whose end no thread of gloo has read."""
    unread = collectives._held.keys() & {inode for _, inode in collectives._find_sockets()[1]}
    kept = next(iter(unread), None)
    for inode in list(collectives._held):
        if inode != kept:
            os.close(collectives._held.pop(inode))


def leave_last_with_store(store: dist.Store, rank: int, world: int) -> None:
    if rank:
        store.add("left", 1)
    else:  # the host of the store goes last
        meet(store, "left", world)


def resources() -> tuple[int, int]:
    """Descriptors and threads, with one world of groups up."""
    return len(os.listdir("/proc/self/fd")), threads.count()


def wait_and_be_cut(groups: list[Any], number: int, beside: dist.Store, world: int) -> collectives.CutResult:
    """Wait in a collective without end: of the default group, of another, or in a Work of one."""
    mine = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    main = threading.get_ident()
    cuts: list[collectives.CutResult] = []
    way = (number + int(os.environ["RANK"])) % 3

    def watch() -> None:
        if way < 2:  # in the third way the user's own frame is the innermost
            await_blocked(main)
        meet(beside, f"blocked{number}", world)
        cuts.append(collectives.cut_gloo_sockets())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        while True:  # a group without the absent rank gets through once or twice
            group = mine[0] if way == 0 else mine[-1]
            work = dist.all_reduce(torch.ones(1), group=group, async_op=way == 2)
            if work is not None:
                work.wait()
    except RuntimeError:  # long before the groups' timeout: by the cut
        pass
    watcher.join(LIMIT)
    return cuts[0]


def cut_under_way(rounds: int, size: int, seed: int) -> list[int]:
    """Be freed, round after round, while collectives are under way on all ranks, each by its own cut.

    Returns the number of sockets of each cut. A rank that is stuck is missed by the others in `meet`."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, beside = new_client(), new_client()
    torch.set_num_threads(1)
    chance, counts = random.Random(seed), []
    for number in range(rounds):
        pause = chance.uniform(0.0, 0.005)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"round{number}", store), rank=rank, world_size=world, timeout=GROUP_TIMEOUT
        )
        total = torch.ones(size)
        dist.all_reduce(total)
        watcher = threading.Thread(target=lambda: counts.append(cut_when_told(beside, number, pause)))  # noqa: B023
        watcher.start()
        try:
            while True:
                dist.all_reduce(total)
        except RuntimeError:
            pass
        watcher.join()
        meet(store, f"left{number}", world)
        collectives.let_go()
        collectives.drop_groups()
        collectives.await_drops()  # else the next cut may still find sockets of these groups
    if rank:
        store.add("left", 1)
    else:  # the host of the store goes last
        meet(store, "left", world)
    return counts


def cut_when_told(store: dist.Store, number: int, pause: float) -> int:
    """Cut as soon as rank 0 says so, `pause` seconds after it has begun; answers how many sockets."""
    if os.environ["RANK"] == "0":
        time.sleep(pause)
        store.set(f"cut{number}", "")
    store.wait([f"cut{number}"], timedelta(seconds=LIMIT))
    return collectives.cut_gloo_sockets().sockets


def wait_for_one_who_left(rounds: int) -> int:
    """Build groups with a rank that told where it listens and has gone: who has to be called waits for ever.
    Answers how often a connection in its place was what ended that."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = new_client()
    own = server() if rank == 0 else store  # nobody else looks at its keys
    if rank == 0:
        store.set("own", str(own.port))
    own = dist.TCPStore("127.0.0.1", int(store.get("own")), is_master=False) if rank else own
    for number in range(rounds):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"model{number}", own), rank=rank, world_size=world)
        dist.barrier()
        collectives.drop_groups()
    meet(store, "gone", world)
    count = 0
    for number in range(rounds if rank == 0 else 0):
        for key in own.list_keys():
            if key.startswith(f"model{number}/") and key.endswith("/1"):
                own.set(key.replace("model", "round", 1), own.get(key))
        is_free, main = threading.Event(), threading.get_ident()

        def free() -> bool:
            for pause in (0.01, 0.03, 0.1):
                if is_free.wait(pause):  # noqa: B023
                    return False
                collectives.cut_gloo_sockets()
            while not where_in_process_groups(main):  # noqa: B023
                if is_free.wait(0.01):  # noqa: B023
                    return False
            collectives.connect_in_place_of_peers(world)
            assert is_free.wait(LIMIT)  # noqa: B023
            return True

        with ThreadPoolExecutor() as pool:
            freed = pool.submit(free)
            try:
                prefix = dist.PrefixStore(f"round{number}", own)
                dist.init_process_group("gloo", store=prefix, rank=0, world_size=world, timeout=GROUP_TIMEOUT)
            except RuntimeError:
                pass
            is_free.set()
            count += freed.result()
        collectives.let_go()
        collectives.drop_groups()
    if rank == 0:
        meet(store, "left", world - 1)
    else:
        store.add("left", 1)
    return count


# -- one process --------------------------------------------------------------------------------------


def alone(name: str) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(name, dist.HashStore()), rank=0, world_size=1)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1.0


def be_cut_while_building() -> bool:
    """Be freed from init_process_group, which waits in its store for a rank that never comes."""
    store = server()
    os.environ.update(MASTER_PORT=str(store.port), WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    own = UsersOwn(server())
    main, is_free, counts = threading.get_ident(), threading.Event(), []

    def watch() -> None:
        await_blocked(main)
        for pause in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
            counts.append(collectives.cut_connections_to(store.port))
            if is_free.wait(pause):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    except RuntimeError:
        is_free.set()
    watcher.join()
    assert is_free.is_set()
    assert sum(counts) > 0
    collectives.drop_groups()
    alone("next")
    return own.answer()


def build_after_interrupted_builds() -> None:
    """Be interrupted at each step by which torch registers a group, drop, and build again."""
    steps = {  # and whether torch holds the group by then
        "_process_group_name": False,
        "ProcessGroupGloo": False,
        "_register_process_group": True,
        "_update_default_pg": True,
        "get_rank": True,
    }
    for name, is_held in steps.items():
        original = getattr(c10d, name)

        def interrupt(*_: Any, **__: Any) -> Any:
            raise RankShouldRestart

        setattr(c10d, name, interrupt)
        try:
            alone(name)
        except RankShouldRestart:
            pass
        else:
            raise AssertionError(f"{name} is not called any more")
        finally:
            setattr(c10d, name, original)
        assert collectives.groups_alive() is is_held
        collectives.drop_groups()
        assert not collectives.groups_alive()
        alone(f"after {name}")
        assert c10d._world.group_count == 1  # the names of groups count from the start again
        assert collectives.groups_alive()
        collectives.drop_groups()


def keep_excepthook() -> None:
    before = sys.excepthook
    for number in range(3):
        alone(str(number))
        assert sys.excepthook is not before
        collectives.drop_groups()
        assert sys.excepthook is before


def refuse_unknown_torch() -> str:
    alone("unknown")
    del c10d._update_default_pg
    try:
        collectives.drop_groups()
    except RestartError as error:
        return str(error)
    return ""


def exit_while_dropping() -> None:
    """End the interpreter in the regular way while groups are going."""
    alone("exit")
    groups = [dist.new_group([0]) for _ in range(10)]
    del groups
    collectives.drop_groups()
    ctypes.pythonapi.Py_Exit(0)


class Backend(dist.ProcessGroup):  # type: ignore[misc]
    """A backend for an accelerator, as far as a group needs one to be aborted."""

    made: ClassVar[list[Backend]] = []

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborted = 0
        self.made.append(self)

    def abort(self) -> None:
        self.aborted += 1
        if self is self.made[0]:
            threading.Event().wait()  # as NCCL's may
        if self is self.made[1]:
            raise RuntimeError("no abort")

    def shutdown(self) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802
        return "accelerated"


def abort_accelerators() -> list[str]:
    dist.Backend.register_backend(
        "accelerated", lambda store, rank, size, timeout: Backend(rank, size), devices=["cpu"]
    )
    alone("mixed")
    for _ in range(4):
        dist.new_group([0], backend="accelerated")
    group_aborts.abort_all(3.0)
    told = group_aborts.last()
    assert group_aborts.last() == []
    group_aborts.abort_all(3.0)  # reaches no group twice
    assert [backend.aborted for backend in Backend.made] == [1, 1, 1, 1]
    assert {abort.backend for abort in told} == {"accelerated"}
    assert len({abort.group for abort in told}) == 4
    assert not group_aborts.are_running()
    return [abort.outcome for abort in told]


def cut_one_port(family: int, host: str) -> None:
    """Cut connections to one remote port, and nothing else: listener, accepted end, other ports."""
    listeners = [socket.create_server((host, 0), family=socket.AddressFamily(family)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    clients = [socket.create_connection((host, port), LIMIT) for port in (ports[0], ports[0], ports[1])]
    accepted = [listener.accept()[0] for listener in (listeners[0], listeners[0], listeners[1])]
    assert collectives.cut_connections_to(ports[0]) == 2
    assert [client.recv(1) for client in clients[:2]] == [b"", b""]
    accepted[2].send(b"x")
    assert clients[2].recv(1) == b"x"
    again = socket.create_connection((host, ports[0]), LIMIT)
    listeners[0].accept()[0].send(b"y")
    assert again.recv(1) == b"y"
    assert collectives.cut_connections_to(ports[1]) == 1
    assert clients[2].recv(1) == b""


def tell_where() -> tuple[str | None, str]:
    """Where a thread is while it is not in torch.distributed, and while it is."""
    main, told = threading.get_ident(), []
    outside = where_in_process_groups(main)
    watcher = threading.Thread(target=lambda: told.append(await_blocked(main)))
    watcher.start()
    alone("where")
    while not told:
        dist.barrier()
    watcher.join()
    return outside, told[0]
