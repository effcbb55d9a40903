"""Who watches the watchers?  One monitor a node looks after its neighbours.

The monitors of a node have one leader: the one that holds the lock on a folder which only this user can
enter. The kernel frees the lock when the holder dies. The leader raises its node's counter in the store,
watches the counter of the next node in a ring, and looks whether the processes of its own node are
alive. It stands in for ranks whose own monitor is gone too: a lost node, or a rank and its monitor
that died together. At most one store operation a node and second in steady state."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from resilience.adapters import private, processes
from resilience.adapters.store import StoreLike, drive, execute
from resilience.core import encoding, events, restart
from resilience.core.attribution import Detector, Interruption, InterruptionRecord
from resilience.core.membership import Peer, next_node, take_place, weigh
from resilience.core.restart import Add, CompareSet, Read, Set
from resilience.monitor import messages

EXPORT_LIMIT = 2.0  # seconds for what is still to be exported when this monitor leaves
BEATS = 6  # looks within heartbeat_timeout: late by a sixth of it at most, one store operation a second by default


class Member(msgspec.Struct, frozen=True):
    """A rank of a node and its monitor, each as (pid, start time)."""

    initial_rank: int
    rank: tuple[int, int]
    monitor: tuple[int, int]


class Supervisor:
    """Runs in a thread of every monitor; only the node's leader acts."""

    def __init__(
        self,
        begin: messages.Begin,
        folder: str,
        connect: Callable[[], Any],
        represent: Callable[[InterruptionRecord], None],
        emit: Callable[..., None],
    ) -> None:
        """folder: that the node's monitors have agreed on; connect: for the one that leads, and for it alone."""
        self._begin = begin
        self._folder = folder
        self._connect = connect
        self._represent = represent
        self._emit = emit
        self._node = begin.origin.node
        self._allowed = begin.heartbeat_timeout
        self._beat_every = self._allowed / BEATS
        self._stood_still_after = 2 * (self._beat_every + begin.interval)  # twice the longest time between two looks
        self._beat_at = 0.0
        self._looked_at = 0.0
        self._done = threading.Event()
        self._store: StoreLike
        self._peer: Peer | None = None
        self._known: dict[str, list[Member]] = {}
        self._leads = False
        self._represented: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="resilience-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave: this monitor has nothing more to watch. Waits for what is being exported, bounded."""
        self._done.set()
        if self._leads:
            self._thread.join(2 * EXPORT_LIMIT)

    def _run(self) -> None:
        try:
            with _Lead(self._folder, self._done) as is_leader:
                if is_leader:
                    self._store = dist.PrefixStore(self._begin.prefix, self._connect())
                    self._run_as_leader()
        except Exception as error:  # the edge of the thread: a node without a leader must be on record
            if not self._done.is_set():
                self._emit(events.StoreLost(f"supervision: {type(error).__name__}: {error}"[:500]))

    def _run_as_leader(self) -> None:
        """Look after the neighbours, and export for the node, until this monitor leaves."""
        from resilience.telemetry.setup import NodeExports  # costs a rank that never leads nothing

        self._leads = True
        self._place = drive(take_place(self._node), self._store)
        exports = NodeExports.start(Path(os.fsdecode(self._begin.folder)), self._node, self._emit)
        try:
            while not self._done.wait(self._begin.interval):
                self._look()
                if exports is not None:
                    exports.poll()
        finally:
            if exports is not None:
                exports.close(EXPORT_LIMIT)

    # -- looking --------------------------------------------------------------------------------

    def _look(self) -> None:
        for member in self._known.get(self._node, []):
            if not processes.is_alive(member.rank) and not processes.is_alive(member.monitor):
                self._lose(self._node, member, Interruption.TERMINATED, "rank and monitor died together", None)
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._beat_every
            execute(Add(f"nodes/{self._node}/beat", 1), self._store)
            self._members(self._node)
            name = drive(next_node(self._place), self._store)
            if name:
                self._look_at(name)

    def _look_at(self, name: str) -> None:
        count = execute(Add(f"nodes/{name}/beat", 0), self._store)
        now = time.monotonic()
        if now - self._looked_at > self._stood_still_after:
            self._peer = None  # we or the store stood still: then so may the peer have, for no fault of its own
        self._looked_at = now
        if self._peer is None or self._peer.node != name:
            self._peer = Peer(name, count, now)
        verdict = weigh(self._peer, count, now, self._allowed)
        self._peer = verdict.peer
        if verdict.silent_for is not None:
            self._lose_node(name, verdict.silent_for)

    def _lose_node(self, name: str, silent_for: float) -> None:
        members = [member for member in self._members(name) if member.initial_rank not in self._represented]
        if not members:
            return
        ranks = tuple(member.initial_rank for member in members)
        self._emit(events.NodeFellSilent(name, self._allowed, silent_for, ranks))
        for member in members:
            self._lose(name, member, Interruption.UNRESPONSIVE, f"node {name} fell silent", silent_for)

    def _members(self, node: str) -> list[Member]:
        """The ranks that registered on a node; read again only when there are more of them."""
        size = execute(Add(f"nodes/{node}/size", 0), self._store)
        known = self._known.get(node, [])
        if len(known) < size:
            slots = tuple(f"nodes/{node}/{slot}" for slot in range(1, size + 1))
            texts = execute(Read(slots), self._store)
            known = [encoding.from_json(text, Member) for text in texts if text is not None]
            self._known[node] = known
        return known

    def _lose(self, node: str, member: Member, kind: Interruption, message: str, silent_for: float | None) -> None:
        if member.initial_rank in self._represented:
            return
        self._represented.add(member.initial_rank)
        if execute(restart.Check((finished_key(member.initial_rank),)), self._store):
            return  # it had left cleanly
        (text,) = execute(Read((restart.seat_key(member.initial_rank),)), self._store)
        seat = None if text is None else encoding.from_json(text, restart.Seat)
        record = InterruptionRecord(
            rank=member.initial_rank,
            interruption=kind,
            message=message,
            detector=Detector("peer", None if silent_for is None else self._allowed),
            iteration=None if seat is None else seat.iteration,
            active_rank=None if seat is None else seat.rank,
            node=node,
            pid=member.rank[0],
            silent_for_s=silent_for,
            detected_wall_ns=time.time_ns(),
        )
        self._emit(events.Interrupted(record))
        # Each in a thread: every one of them waits until all have arrived.
        threading.Thread(target=self._represent, args=(record,), daemon=True).start()


class _Lead:
    """Holds the lock on the node's folder while in the body; False if this monitor left before its turn.

    folder: the one that the node's monitors have agreed on. Where it is not there, or not ours alone, this monitor
    shares no temporary folder with them (a container with the same host name): it leads for itself."""

    def __init__(self, folder: str, done: threading.Event) -> None:
        self._folder = folder
        self._done = done
        self._fd = -1

    def __enter__(self) -> bool:
        try:
            self._fd = private.enter(self._folder)
        except OSError:
            self._folder = private.make()
            self._fd = private.enter(self._folder)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # waits; the kernel frees it when its holder dies, however it dies
        return not self._done.is_set()

    def __exit__(self, *_: object) -> None:
        private.remove(self._folder)  # who has entered it keeps the lock, and hands it on
        os.close(self._fd)


def agree_on_folder(store: StoreLike, node: str) -> str:
    """Return the folder whose lock the leader of a node holds: the same for all monitors of the node. Its name is
    random, so nobody can make it before us. Raises: OSError, and what stores raise."""
    own = private.make()
    agreed = str(execute(CompareSet(f"nodes/{node}/folder", own), store))
    if agreed != own:
        private.remove(own)
    return agreed


def announce(store: StoreLike, node: str, member: Member) -> None:
    """Make a rank and its node known to all, before anything can happen to them: called by the rank itself ahead
    of the first barrier. A node that is lost before its monitors have said a word is missed all the same."""
    slot = execute(Add(f"nodes/{node}/size", 1), store)
    execute(Set(f"nodes/{node}/{slot}", encoding.to_json_text(member)), store)
    if slot == 1:  # one for all ranks of the node; its leader does it as well
        drive(take_place(node), store)


def finished_key(initial_rank: int) -> str:
    """Present once a rank has left the call cleanly."""
    return f"finished/{initial_rank}"


def entry_of(initial_rank: int, rank_pid: int, monitor_pid: int) -> Member:
    """Return what is to be known of a rank and its monitor."""
    return Member(initial_rank, processes.identity_of(rank_pid), processes.identity_of(monitor_pid))
