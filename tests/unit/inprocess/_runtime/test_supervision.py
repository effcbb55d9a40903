"""What the leader of a node asks of the store while nothing happens."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.core.peer_liveness import beat_key, take_place
from resilience.core.restart import Add, Set, WaitLimits
from resilience.facts import encoding, events
from resilience.inprocess._runtime import lone_rank, supervision
from resilience.inprocess._runtime.lone_rank import LoneRank
from resilience.inprocess._runtime.supervision import (
    Member,
    Supervisor,
    agree_on_folder,
    alone_key,
    announce,
    entry_of,
    finished_key,
)
from resilience.system import private, processes
from resilience.system.store import drive, execute
from resilience.telemetry import exporters

HOUR = 3600
GONE = (2**22 + 1, 1)  # (pid, start time); no process can have this pid


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: list[str] = []
        self.keys: list[str] = []

    def add(self, key: str, amount: int) -> int:
        self.calls.append("add")
        self.keys.append(key)
        return int(self.store.add(key, amount))

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":  # answered without the server
            self.calls.append(name)
        return getattr(self.store, name)


def beginning(node: str = "here", **fields: Any) -> Any:
    """Return what a monitor of this node is started with."""
    return SimpleNamespace(origin=SimpleNamespace(node=node), waits=WaitLimits(), **fields)


@pytest.mark.parametrize("nodes", [1, 2, 1000])
def test_leader_of_a_node_asks_the_store_once_a_second_at_any_number_of_nodes(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, time_ns=time.time_ns)
    monkeypatch.setattr(supervision, "time", clock)
    store = Counting()
    names = [f"node-{number}" for number in range(nodes)]
    for rank, name in enumerate(names[:2]):
        announce(store.store, name, entry_of(rank, os.getpid(), os.getpid()))
    for name in names[2:]:
        drive(take_place(f"{name}@{processes.pid_namespace()}"), store.store)
    lost: list[Any] = []
    begin: Any = beginning(node=names[0], heartbeat_timeout=30.0, interval=1.0)
    supervisor = Supervisor(begin, "", lambda: store, lost.append, lambda event: lost.append(event))
    supervisor._store, supervisor._place = store, 1
    for second in range(1, HOUR):
        clock.seconds = float(second)
        for name in names[1:2]:
            execute(Add(f"nodes/{name}@{processes.pid_namespace()}/beat", 1), store.store)
        supervisor._check_neighbours()
    assert not lost
    assert 0 < len(store.calls) <= HOUR, store.calls[:20]


def leading(store: Any, represent: Any, emit: Any) -> Supervisor:
    """Return the supervisor of the leader of `here`, which has looked at no node yet."""
    begin: Any = beginning(heartbeat_timeout=30.0, interval=1.0)
    supervisor = Supervisor(begin, "", lambda: store, represent, emit)
    supervisor._store, supervisor._place = store, 1
    return supervisor


def in_this_thread(refusals: int = 0) -> Any:
    """Return a stand-in for the module `threading`: a thread runs in its caller. The first starts are refused."""
    left = [RuntimeError("can't start new thread")] * refusals

    def thread(target: Any, args: Any = (), **_: Any) -> Any:
        def start() -> None:
            if left:
                raise left.pop()
            target(*args)

        return SimpleNamespace(start=start)

    return SimpleNamespace(Thread=thread, Event=threading.Event)


def test_rank_is_represented_once_a_thread_can_be_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    represented: list[Any] = []
    emitted: list[Any] = []
    store = dist.HashStore()
    announce(store, "here", Member(3, GONE, GONE, processes.pid_namespace()))
    supervisor = leading(store, represented.append, emitted.append)
    monkeypatch.setattr(supervision, "threading", in_this_thread(refusals=2))
    for _ in range(5):
        supervisor._check_neighbours()
    assert [record.rank for record in represented] == [3]
    failed, interrupted = emitted
    assert (failed.initial_rank, failed.result, failed.error) == (3, "failed", "RuntimeError: can't start new thread")
    assert isinstance(interrupted, events.RankInterrupted)


def test_rank_of_another_pid_namespace_is_not_represented_because_its_pid_is_unknown_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    represented: list[Any] = []
    store = dist.HashStore()
    announce(store, "here", Member(1, GONE, GONE, "4026532999-boot"))
    announce(store, "here", Member(2, GONE, GONE, processes.pid_namespace()))
    supervisor = leading(store, represented.append, lambda event: None)
    monkeypatch.setattr(supervision, "threading", in_this_thread())
    for _ in range(3):
        supervisor._check_neighbours()
    assert [record.rank for record in represented] == [2]


def test_pid_namespace_that_falls_silent_is_represented_by_another_one_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, time_ns=time.time_ns)
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(supervision, "threading", in_this_thread())
    represented: list[Any] = []
    emitted: list[Any] = []
    store = dist.HashStore()
    announce(store, "here", entry_of(0, os.getpid(), os.getpid()))
    announce(store, "here", Member(1, GONE, GONE, "4026532999-boot"))
    supervisor = leading(store, represented.append, emitted.append)
    for second in range(120):
        clock.seconds = float(second)
        supervisor._check_neighbours()
    assert [(record.rank, record.node, record.message) for record in represented] == [
        (1, "here", "node here fell silent")
    ]
    assert [event.silent_node for event in emitted if isinstance(event, events.NodeFellSilent)] == ["here"]


OTHER = "4026532999-boot"  # a pid namespace
ALONE = "4026532998-boot"
LEADERLESS = range(10, 36)  # seconds in which no monitor of a node acts


def watch(store: Any, monkeypatch: pytest.MonkeyPatch, seconds: int, every_second: Any) -> tuple[list[int], list[Any]]:
    """Let the leader of `here` look once a second. Return the ranks that it represents, and its events."""
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, time_ns=time.time_ns)
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(supervision, "threading", in_this_thread())
    represented: list[int] = []
    emitted: list[Any] = []
    supervisor = leading(store, lambda record: represented.append(record.rank), emitted.append)
    for second in range(seconds):
        clock.seconds = float(second)
        every_second(second)
        supervisor._check_neighbours()
    return represented, emitted


def silent_ranks(emitted: list[Any]) -> list[tuple[int, ...]]:
    return [event.ranks for event in emitted if isinstance(event, events.NodeFellSilent)]


def ring_of_three() -> dist.Store:
    """Return a store in which rank 0 is `here`, which watches rank 1; the node of rank 2 comes after that."""
    store = dist.HashStore()
    announce(store, "here", entry_of(0, os.getpid(), os.getpid()))
    announce(store, "next", Member(1, GONE, GONE, ALONE))
    announce(store, "last", Member(2, GONE, GONE, OTHER))
    return store


def test_node_after_one_that_left_cleanly_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ring_of_three()
    execute(Set(finished_key(1), "1"), store)
    represented, emitted = watch(store, monkeypatch, 120, lambda second: None)
    assert (represented, silent_ranks(emitted)) == ([2], [(2,)])


def test_rank_without_a_monitor_is_represented_once_it_is_silent_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store, last = ring_of_three(), 200

    def live(second: int) -> None:
        execute(Add(beat_key(f"last@{OTHER}"), 1), store)
        if second < last:
            execute(Add(alone_key(1), 1), store)

    assert watch(store, monkeypatch, last, live) == ([], [])
    represented, emitted = watch(store, monkeypatch, 100, lambda second: live(last))
    assert (represented, silent_ranks(emitted)) == ([1], [(1,)])


def test_rank_is_alive_in_a_second_outage_that_begins_with_the_number_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its counter begins anew in each outage of its node's monitor."""
    store, outages = ring_of_three(), (range(60, 100), range(600, 640))

    def live(second: int) -> None:
        execute(Add(beat_key(f"last@{OTHER}"), 1), store)
        is_outage = any(second in outage for outage in outages)
        execute(Set(alone_key(1), "5" if is_outage else "0"), store)
        if not is_outage:
            execute(Add(beat_key(f"next@{ALONE}"), 1), store)

    assert watch(store, monkeypatch, 660, live) == ([], [])


def test_node_after_one_without_a_monitor_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ring_of_three()
    represented, emitted = watch(store, monkeypatch, 120, lambda second: execute(Add(alone_key(1), 1), store))
    assert (represented, silent_ranks(emitted)) == ([2], [(2,)])


def test_rank_that_was_shown_by_itself_before_is_lost_together_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has lost its monitor; that of rank 2 leads their node, until all of it is lost."""
    store, lost = dist.HashStore(), 50
    announce(store, "here", entry_of(0, os.getpid(), os.getpid()))
    for rank in (1, 2):
        announce(store, "next", Member(rank, GONE, GONE, OTHER))
    clock = SimpleNamespace(seconds=0)
    node = f"next@{OTHER}"
    monkeypatch.setattr(lone_rank, "own_beat_key", lambda _: beat_key(node))
    monkeypatch.setattr(lone_rank, "dist", SimpleNamespace(PrefixStore=lambda prefix, store: store))

    class Looks:
        """Ends the rank with its node. Each look of the rank takes the time between two of its node's rounds."""

        def is_set(self) -> bool:
            return clock.seconds >= lost

        def wait(self, seconds: float) -> bool:
            clock.seconds += int(seconds)
            if LEADERLESS.start <= clock.seconds < LEADERLESS.stop:
                counts.append(execute(Add(alone_key(1), 0), store))
            else:
                execute(Add(beat_key(node), 1), store)
            return self.is_set()

    counts: list[int] = []
    LoneRank(SimpleNamespace(clone=lambda: store), "", "next", 1, 30.0, Looks(), emit=print)._run()  # type: ignore[arg-type]
    assert counts[-1] > 0, "it does not show itself while no monitor acts"
    represented, emitted = watch(store, monkeypatch, 40, lambda second: None)
    assert (represented, silent_ranks(emitted)) == ([1, 2], [(1, 2)])


def test_node_whose_ranks_are_all_settled_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    store.store = ring_of_three()
    asked: list[tuple[int, str]] = []

    def live(second: int) -> None:
        execute(Add(beat_key(f"last@{OTHER}"), 1), store.store)
        asked.extend((second, key) for key in store.keys)
        store.keys.clear()

    joined = int(WaitLimits().barrier)
    represented, _ = watch(store, monkeypatch, joined + 100, live)
    last = max(second for second, key in asked if f"next@{ALONE}" in key)
    assert represented == [1]
    assert joined < last < joined + 10  # before that, a rank of the node may still join


class HungDisk:
    """Exports whose disk does not answer."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.answers = threading.Event()

    def poll(self) -> None:
        self.is_asked.set()
        self.answers.wait()

    def close(self, timeout: float) -> None:
        self.answers.wait()


def test_node_whose_disk_hangs_still_counts_as_alive(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HungDisk()
    monkeypatch.delenv("RESILIENCE_RESTART_POLICY", raising=False)
    monkeypatch.setenv("RESILIENCE_METRICS_TEXTFILE", str(tmp_path))
    monkeypatch.setattr(exporters.NodeExports, "start", lambda *_: disk)
    monkeypatch.setattr(supervision, "EXPORT_LIMIT", 0.1)
    store: Any = dist.HashStore()
    begin: Any = beginning(heartbeat_timeout=0.06, interval=0.01, prefix="", folder=os.fsencode(tmp_path))
    supervisor = Supervisor(begin, private.make(), lambda: store, lambda record: None, lambda event: None)
    supervisor.start()
    key = f"nodes/here@{processes.pid_namespace()}/beat"
    beats = dist.PrefixStore("", store)
    assert disk.is_asked.wait(60.0)
    before = execute(Add(key, 0), beats)
    deadline = time.monotonic() + 60.0
    try:
        while execute(Add(key, 0), beats) < before + 3:
            assert time.monotonic() < deadline, "the node fell silent"
            time.sleep(0.01)
        supervisor.stop()
        supervisor._thread.join(60.0)
        assert not supervisor._thread.is_alive()
    finally:
        disk.answers.set()
        supervisor.stop()


class Silent:
    """A store that stops answering `add` after some calls, as behind a connection that loses its data."""

    def __init__(self, store: Any, answers: int) -> None:
        self.store = store
        self.answers = answers
        self.is_asked_in_vain = threading.Event()
        self.answers_again = threading.Event()

    def add(self, key: str, amount: int) -> int:
        if self.answers == 0:
            self.is_asked_in_vain.set()
            self.answers_again.wait()
        self.answers -= amount
        return int(self.store.add(key, amount))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def _beginning(folder: Any) -> Any:
    """What the monitors of node "here" are started with."""
    return beginning(heartbeat_timeout=0.6, interval=0.01, prefix="", folder=os.fsencode(folder), store=None)


def test_node_whose_leader_gets_no_answer_still_counts_as_alive(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock stays with it. The two behind it take turns: the first of them gets no answer either."""
    monkeypatch.setattr(supervision, "dist", SimpleNamespace(PrefixStore=lambda prefix, store: store))
    store: Any = dist.HashStore()
    begin = _beginning(tmp_path)
    emitted: list[Any] = []
    folder = private.make()
    key = f"nodes/here@{processes.pid_namespace()}/beat"
    stores = [Silent(store, 4), Silent(store, 3), store]  # the first add takes the node's place
    supervisors = [
        Supervisor(begin, folder, lambda store=each: store, lambda record: None, emitted.append) for each in stores
    ]
    try:
        for supervisor, silent in zip(supervisors, stores[:2], strict=False):
            supervisor.start()
            assert silent.is_asked_in_vain.wait(60.0)
        before = execute(Add(key, 0), store)
        supervisors[2].start()
        deadline = time.monotonic() + 60.0
        while execute(Add(key, 0), store) < before + 3:
            assert time.monotonic() < deadline, "the node fell silent"
            time.sleep(0.01)
    finally:
        for silent in stores[:2]:
            silent.answers_again.set()
        for supervisor in supervisors:
            supervisor.stop()
    assert not emitted


def test_monitor_that_reaches_no_store_for_a_silent_leader_tries_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "dist", SimpleNamespace(PrefixStore=lambda prefix, store: store))
    store: Any = dist.HashStore()
    emitted: list[Any] = []
    tries: list[bool] = []

    def connect() -> Any:
        tries.append(True)
        if len(tries) < 3:
            raise ConnectionRefusedError("no answer")
        return store

    begin, folder, silent = _beginning(tmp_path), private.make(), Silent(store, 4)
    leader = Supervisor(begin, folder, lambda: silent, lambda record: None, emitted.append)
    follower = Supervisor(begin, folder, connect, lambda record: None, emitted.append)
    key = f"nodes/here@{processes.pid_namespace()}/beat"
    try:
        leader.start()
        assert silent.is_asked_in_vain.wait(60.0)
        before = execute(Add(key, 0), store)
        follower.start()
        deadline = time.monotonic() + 60.0
        while execute(Add(key, 0), store) < before + 3:
            assert time.monotonic() < deadline, "the node fell silent"
            time.sleep(0.01)
    finally:
        silent.answers_again.set()
        for supervisor in (leader, follower):
            supervisor.stop()
    assert not emitted


def test_entry_without_a_pid_namespace_can_be_read() -> None:
    text = '{"initial_rank": 1, "rank": [2, 3], "monitor": [4, 5]}'
    assert encoding.from_json(text, Member) == Member(1, (2, 3), (4, 5), "")


def test_leader_whose_connection_breaks_connects_anew(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks:
        """A connection that breaks at its sixth count."""

        def __init__(self) -> None:
            self.left = 5

        def add(self, key: str, amount: int) -> int:
            if not self.left:
                raise RuntimeError("Connection reset by peer")
            self.left -= 1
            return int(store.add(key, amount))

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    monkeypatch.setattr(supervision, "dist", SimpleNamespace(PrefixStore=lambda prefix, store: store))
    store: Any = dist.HashStore()
    emitted: list[Any] = []
    connections: list[Breaks] = []

    def connect() -> Breaks:
        connections.append(Breaks())
        return connections[-1]

    leader = Supervisor(_beginning(tmp_path), private.make(), connect, lambda record: None, emitted.append)
    leader.start()
    try:
        deadline = time.monotonic() + 60.0
        while len(connections) < 3:
            assert time.monotonic() < deadline, f"it gave up: {emitted}"
            time.sleep(0.01)
    finally:
        leader.stop()
    assert not emitted


def test_node_whose_monitors_can_make_no_folder_still_has_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private, "make_in_memory", full)
    store = dist.HashStore()
    lead = supervision._Lead(agree_on_folder(store, "here"), 10.0, 1.0)
    with lead:
        assert lead.take()
        lead.show()
        assert not lead.is_idle()
