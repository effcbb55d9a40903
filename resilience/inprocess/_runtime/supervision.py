"""What if a monitor dies too?  One monitor per node watches its neighbours.

The monitors of a node have one leader: the holder of the lock on a folder that only this user can enter. The
kernel frees the lock when the holder dies. The leader raises its node's counter in the store, watches the counter
of the next node in a ring (and of those after it while it is silent), and checks that the processes of its own node are
alive. It also stands in for ranks whose own monitor is gone: those of a lost node, or a rank that died together with
its monitor. In steady state it does at most one store operation per node and second, with the default
heartbeat_timeout. A rank of a silent node that shows by itself that it lives (`lone_rank`) is left alone.

A leader may be stopped, or wait for the store in vain, and keep the lock. So each round of the leader also sets the
folder's modification time. If that does not change, another monitor of the node does the leader's rounds until it
does. Two at once do no harm: a counter only rises, and several stand-ins for one rank agree.

Containers may share the name of a node, but not its process numbers, and one may end alone. So the ranks of one node
and pid namespace are a group, and each group has a leader, a counter and a place in the ring of its own."""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from resilience.core import restart
from resilience.core.peer_liveness import Peer, PeerRing, beat_key, look, take_place, weigh
from resilience.core.restart import Add, CompareSet, Read, Set
from resilience.errors import ResilienceError, error_in_words
from resilience.facts import encoding, events
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.operations import failure_of
from resilience.monitor import messages
from resilience.system import call_with_timeout, private, processes
from resilience.system.client_sockets import answers
from resilience.system.store import StoreLike, drive, execute

if TYPE_CHECKING:
    from resilience.telemetry.exporters import ExportThread

EXPORT_LIMIT = 2.0  # seconds for the remaining exports when this monitor leaves
NO_FOLDER = "/nonexistent"
BEATS = 6  # checks per heartbeat_timeout: at most a sixth of it late, one store operation a second by default


class Member(msgspec.Struct, frozen=True):
    """A rank of a node and its monitor, each as (pid, start time). Their pids are those of the pid namespace."""

    initial_rank: int
    rank: tuple[int, int]
    monitor: tuple[int, int]
    pid_namespace: str = ""


class Supervisor:
    """Runs in a thread of every monitor; only the node's leader acts."""

    def __init__(
        self,
        begin: messages.Begin,
        folder: str,
        connect: Callable[[], Any],
        represent: Callable[[InterruptionRecord], None],
        emit: Callable[..., None],
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """folder: the one that the node's monitors agreed on. connect: connects to the store; only the leader does.
        failed: called when an error has ended the supervision."""
        self._begin = begin
        self._connect = connect
        self._represent = represent
        self._emit = emit
        self._failed = failed
        self._node = begin.origin.node
        self._group = _group(self._node, processes.pid_namespace())
        self._limit = begin.heartbeat_timeout
        self._beat_every = self._limit / BEATS
        self._pause_limit = 2 * (self._beat_every + begin.interval)  # twice the longest time between two checks
        self._next_beat_at = 0.0
        self._checked_at = 0.0
        self._done = threading.Event()
        self._store: Any = None  # connected while this monitor acts for the node
        self._ring = PeerRing()
        self._settled: set[str] = set()  # silent groups all of whose ranks have a stand-in or have left
        self._all_joined_at = time.monotonic() + begin.waits.barrier  # by then the others wait for no further rank
        self._alone: dict[int, Peer] = {}  # ranks of silent nodes that show by themselves that they live
        self._known_members: dict[str, list[Member]] = {}
        # A third: time for another monitor to act before the other nodes count this one as silent. But a leader that
        # acts in each interval is not idle.
        self._lead = _Lead(folder, max(self._limit / 3, 2 * begin.interval), self._pause_limit)
        self._represented: set[int] = set()  # initial ranks whose stand-in has begun, or that need no stand-in
        self._unstarted: set[int] = set()  # initial ranks whose stand-in did not start at once: no thread was left
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises: RuntimeError, if this host has no thread left for a while."""
        self._thread = call_with_timeout.start(
            lambda: threading.Thread(target=self._run, name="resilience-supervisor", daemon=True)
        )

    def stop(self) -> None:
        """Stop watching. Waits, for at most a bounded time, until the exports have ended and the folder is removed."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(2 * EXPORT_LIMIT)

    def _run(self) -> None:
        try:
            with self._lead:
                while not self._lead.take():
                    if self._lead.is_idle():
                        self._act_for_the_leader()
                    else:
                        self._store = None  # close the connection: the leader acts again
                    if self._done.wait(self._begin.interval):
                        return
                self._open_store()
                if not self._done.is_set():
                    self._run_as_leader()
        except Exception as error:  # the edge of the thread: record that the node has no leader
            if not self._done.is_set():
                self._failed(error)
                self._emit(failure_of("supervision", error))

    def _act_for_the_leader(self) -> None:
        """Do one round for a leader that is stopped. A store that does not answer is the leader's concern: this monitor
        remains the one that follows it."""
        try:
            self._act()
        except Exception:  # whatever a store raises; the next round connects anew
            self._store = None

    def _run_as_leader(self) -> None:
        """Watch the neighbours, and let a thread export for the node, until this monitor leaves. This thread reads no
        file: a disk that hangs must not make this node look lost."""
        exports = self._start_exports()
        try:
            while not self._done.wait(self._begin.interval):
                try:
                    self._act()
                except Exception:  # one lost answer or connection must not make the node look lost: once more, anew
                    if self._done.is_set() or not answers(self._begin.store):
                        raise
                    self._store, self._next_beat_at = None, 0.0
                    self._act()
        finally:
            if exports is not None:
                exports.close(EXPORT_LIMIT)

    def _start_exports(self) -> ExportThread | None:
        try:
            from resilience.telemetry.exporters import ExportThread  # costs a rank that never leads nothing

            return ExportThread.start(Path(os.fsdecode(self._begin.folder)), self._node, self._emit)
        except Exception as error:  # of an import, if the package was replaced on disk: the node is still watched
            self._emit(events.ExportFailed("otlp", error_in_words(error), is_at_start=True))
            return None

    def _act(self) -> None:
        """Do one round of the leader."""
        self._lead.show()  # first: if the store does not answer, the next monitor tries only after a while
        self._open_store()
        self._check_neighbours()

    def _open_store(self) -> None:
        if self._store is None:
            self._store = dist.PrefixStore(self._begin.prefix, self._connect())
            self._place = drive(take_place(self._group), self._store)

    # -- looking --------------------------------------------------------------------------------

    def _check_neighbours(self) -> None:
        for member in self._known_members.get(self._group, []):
            if self._has_died(member) and not self._is_settled(member.initial_rank):
                self._represent_lost(
                    self._node, member, Interruption.TERMINATED, "rank and monitor died together", None
                )
        if time.monotonic() >= self._next_beat_at:
            self._next_beat_at = time.monotonic() + self._beat_every
            execute(Add(beat_key(self._group), 1), self._store)
            self._members(self._group)
            self._check_ring()

    def _has_died(self, member: Member) -> bool:
        """Return True if both processes of a member of this group have ended. All of a group share a pid namespace."""
        return not processes.is_alive(member.rank) and not processes.is_alive(member.monitor)

    def _check_ring(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > self._pause_limit:
            # This process or the store was paused: so may be the peers, without a fault.
            self._ring, self._alone = PeerRing(self._ring.names), {}
        self._checked_at = now
        looks = look(self._place, self._ring, now, self._limit, self._settled)
        self._ring, silent = drive(looks, self._store)
        for peer in silent:
            self._represent_node(peer.node, peer.silent_for, now)
        ranks = {member.initial_rank for peer in silent for member in self._known_members.get(peer.node, [])}
        self._alone = {rank: peer for rank, peer in self._alone.items() if rank in ranks}  # of this outage only

    def _represent_node(self, group: str, silent_for: float, now: float) -> None:
        unsettled = [member for member in self._members(group) if not self._is_settled(member.initial_rank)]
        if not unsettled and now >= self._all_joined_at:
            self._settled.add(group)
        members = [member for member in unsettled if not self._is_alive_alone(member.initial_rank, now)]
        if not members or execute(Add(beat_key(group), 0), self._store) != self._ring.watched[group].count:
            return  # the latter: a rank whose monitor has just come back resets its counter
        ranks = tuple(member.initial_rank for member in members)
        name = _node_of(group)
        if not self._unstarted.issuperset(ranks):  # else it is on record
            self._emit(events.NodeFellSilent(name, self._limit, silent_for, ranks))
        for member in members:
            self._represent_lost(name, member, Interruption.UNRESPONSIVE, f"node {name} fell silent", silent_for)

    def _is_settled(self, rank: int) -> bool:
        """Return True if a rank needs no stand-in from this monitor: it has one, or its end is on record."""
        if rank not in self._represented and execute(restart.Check((finished_key(rank),)), self._store):
            self._represented.add(rank)
        return rank in self._represented

    def _is_alive_alone(self, rank: int, now: float) -> bool:
        """Return True if a rank of a silent node has lost its monitor and shows by itself that it lives."""
        count = execute(Add(alone_key(rank), 0), self._store)
        verdict = weigh(self._alone.get(rank, Peer(str(rank), count, now)), count, now, self._limit)
        self._alone[rank] = verdict.peer
        return count > 0 and verdict.silent_for is None

    def _members(self, group: str) -> list[Member]:
        """Return the ranks registered in a group. Reads them again only if there are more."""
        size = execute(Add(f"nodes/{group}/size", 0), self._store)
        known = self._known_members.get(group, [])
        if len(known) < size:
            slots = tuple(f"nodes/{group}/{slot}" for slot in range(1, size + 1))
            texts = execute(Read(slots), self._store)
            known = [encoding.from_json(text, Member) for text in texts if text is not None]
            self._known_members[group] = known
        return known

    def _represent_lost(
        self, node: str, member: Member, kind: Interruption, message: str, silent_for: float | None
    ) -> None:
        (text,) = execute(Read((restart.seat_key(member.initial_rank),)), self._store)
        seat = None if text is None else encoding.from_json(text, Seat)
        record = InterruptionRecord(
            rank=member.initial_rank,
            interruption=kind,
            message=message,
            detector=Detector("peer", None if silent_for is None else self._limit),
            iteration=None if seat is None else seat.iteration,
            active_rank=None if seat is None else seat.rank,
            node=node,
            pid=member.rank[0],
            silent_for_s=silent_for,
            detected_wall_ns=time.time_ns(),
        )
        # In a thread each: every stand-in waits until all ranks have arrived.
        thread = threading.Thread(target=self._stand_in, args=(record,), name="resilience-stand-in", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started now: the next check tries again
            self._note_unstarted(record, error)
        else:
            self._represented.add(member.initial_rank)

    def _stand_in(self, record: InterruptionRecord) -> None:
        self._emit(events.RankInterrupted(record))
        self._represent(record)

    def _note_unstarted(self, record: InterruptionRecord, error: RuntimeError) -> None:
        """Record, once for each rank, that its stand-in could not be started."""
        if record.rank not in self._unstarted:
            self._unstarted.add(record.rank)
            self._emit(events.RankStoodInFor(record.rank, "failed", 0.0, error_in_words(error)))


class _Lead:
    """The lock on the node's folder, and when a monitor last acted as the node's leader. Enter the folder first.

    folder: the one that the node's monitors agreed on. If it does not exist here, or others can enter it, this monitor
    shares no such folder with them (a container with the same host name), and leads for itself. idle_limit: seconds
    after which a leader that does not act counts as stopped. pause_limit: seconds between two looks after which this
    process was paused itself."""

    def __init__(self, folder: str, idle_limit: float, pause_limit: float) -> None:
        self._folder = folder
        self._idle_limit = idle_limit
        self._pause_limit = pause_limit
        self._fd = -1
        self._acted_ns = 0  # the folder's modification time. Only its changes count: a wall clock may jump
        self._changed_at = self._looked_at = -math.inf

    def __enter__(self) -> None:
        try:
            self._fd = private.enter(self._folder)
        except OSError:
            self._folder = ""
            self._fd = os.memfd_create("resilience-lead")  # needs no folder; nobody else can have its lock

    def __exit__(self, *_: object) -> None:
        if self.take():
            private.remove(self._folder)  # a monitor that has entered it keeps the lock, and passes it on
        os.close(self._fd)

    def take(self) -> bool:
        """Take the lock if no other monitor has it. Return True if this one has it: it is the leader."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it however its holder dies
        except BlockingIOError:
            return False
        return True

    def show(self) -> None:
        """Show the other monitors that this one acts."""
        os.utime(self._fd)
        self._acted_ns = os.fstat(self._fd).st_mtime_ns

    def is_idle(self) -> bool:
        """Return True if no other monitor has acted for idle_limit seconds."""
        now, acted_ns = time.monotonic(), os.fstat(self._fd).st_mtime_ns
        if acted_ns != self._acted_ns or now - self._looked_at > self._pause_limit:
            self._acted_ns, self._changed_at = acted_ns, now
        self._looked_at = now
        return now - self._changed_at >= self._idle_limit


def agree_on_folder(store: StoreLike, node: str) -> str:
    """Return the folder whose lock a node's leader holds, the same for all its monitors. Its random name keeps others
    from creating it first. If this monitor can make none and is the first, there is none: each monitor of the node then
    leads for itself. Raises: what stores raise."""
    try:
        proposed = private.make_in_memory()
    except OSError:  # the file systems are full, or this process is short of descriptors
        proposed = NO_FOLDER
    group = _group(node, processes.pid_namespace())
    agreed = ""
    try:
        agreed = str(execute(CompareSet(f"nodes/{group}/folder", proposed), store))
    finally:
        if agreed != proposed:
            private.remove(proposed)
    return agreed


def announce(store: StoreLike, node: str, member: Member) -> None:
    """Register a rank and its node. The rank itself calls this before the first barrier, so that its loss is noticed
    even if the node is lost before its monitors have reported anything."""
    group = _group(node, member.pid_namespace)
    slot = execute(Add(f"nodes/{group}/size", 1), store)
    execute(Set(f"nodes/{group}/{slot}", encoding.to_json_text(member)), store)
    if slot == 1:  # once per group; its leader does it as well
        drive(take_place(group), store)


def depart(store: StoreLike, member: Member, is_watched: bool) -> None:
    """Note, in place of a monitor that does not, that a rank leaves the call cleanly. Else the neighbours take it for
    dead. is_watched: its monitor notes that."""
    if not is_watched:
        with suppress(ResilienceError):  # a lost store tells the neighbours nothing either
            execute(Set(finished_key(member.initial_rank), "1"), store)


def finished_key(initial_rank: int) -> str:
    """Return the key that exists once a rank's end is on record: it needs no stand-in any more."""
    return f"finished/{initial_rank}"


def alone_key(initial_rank: int) -> str:
    """Return the key of the counter that a rank raises while no monitor of its node does its work."""
    return f"alone/{initial_rank}"


def own_beat_key(node: str) -> str:
    """Return the key of the counter that the leader of this process's group raises. node: this one."""
    return beat_key(_group(node, processes.pid_namespace()))


def entry_of(initial_rank: int, rank_pid: int, monitor_pid: int) -> Member:
    """Return the entry that registers a rank and its monitor."""
    return Member(
        initial_rank,
        processes.identity_of(rank_pid),
        processes.identity_of(monitor_pid),
        processes.pid_namespace(),
    )


def _group(node: str, pid_namespace: str) -> str:
    """Return the name under which the ranks of one node and pid namespace watch, and are watched."""
    return f"{node}@{pid_namespace}"


def _node_of(group: str) -> str:
    return group.rpartition("@")[0]
