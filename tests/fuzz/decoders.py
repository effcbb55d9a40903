"""Decoders: of records, messages between processes, entries of the stores, and what torch and other programs say."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from resilience.core import budget, cycle, job_budget, membership, restart, terms
from resilience.errors import ConfigurationError, DecodeError, StoreError
from resilience.facts import encoding, events, tracebacks
from resilience.facts import interruptions as attribution
from resilience.facts.records import from_line, to_line
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.supervision import Member
from resilience.launcher.output import streams
from resilience.launcher.rendezvous import stores
from resilience.launcher.worker import notes, preload, zygote
from resilience.monitor import messages, worker
from resilience.monitor.duration_recorder import DurationRecorder
from resilience.monitor.page import MonitorSide, Page
from resilience.system import attempts, flight_recorder, rank_reductions
from resilience.telemetry import elastic, log
from tests.fuzz import corpus
from tests.fuzz.target import Feed, Target, only_bytes

Row = tuple[str, float, Sequence[bytes], Callable[[bytes], object]]
TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\n'


def decoder_targets(folder: Path) -> list[Target]:
    """Return the targets that need no file of a run. folder: an empty one."""
    rows = [*_records(), *_messages(), *_store_entries(), *_launcher(), *_other_programs()]
    made = [Target(name, weight, inputs, only_bytes(decode)) for name, weight, inputs, decode in rows]
    yaml = encoding.to_yaml(msgspec.to_builtins(corpus.timeouts())).encode()
    return [
        *made,
        Target("any YAML", 3, [yaml], only_bytes(encoding.from_yaml)),
        Target("launch in the store", 20, corpus.launches(), only_bytes(_launch), (StoreError,)),
        Target("note of a monitor before", 20, corpus.notes(), _going_on(folder / "notes")),
    ]


def _records() -> list[Row]:
    lines = [to_line(record) for record in corpus.records()]
    return [
        ("record line", 180, lines, from_line),
        ("any JSON", 80, lines[:50], encoding.from_json),
        ("traceback of a program", 20, [TRACEBACK], lambda data: tracebacks.parse(encoding.text(data).split("\n"))),
        ("line for a terminal", 20, corpus.log_lines(), lambda data: log.as_people_read(encoding.text(data))),
    ]


# -- messages and the store -------------------------------------------------------------------------


def _messages() -> list[Row]:
    msgpack = encoding.to_msgpack
    records = corpus.records()
    told = [record.event.record for record in records if isinstance(record.event, events.RankInterrupted)]
    suspicions = [record.event for record in records if isinstance(record.event, events.HangSuspected)]
    limits = messages.NewLimits(corpus.LIMITS)
    link = messages.Attachment(7, True, 1.5, corpus.LIMITS)
    exited = attribution.Exit(1)
    of_rank: list[messages.FromRank] = [
        messages.Begin(corpus.ORIGIN, b"/runs", "prefix/", corpus.LIMITS, restart.WaitLimits(), 30.0, 1.0),
        messages.LeftCall(), messages.HostStore(2), messages.Introduced(1, 4), messages.Attached(True),
        messages.EndedMonitoring(),
        messages.Armed(3.0), messages.Progressed("step", 12.5, 40), messages.RankRequest("Continue", "why"), limits,
        *(messages.Emitted(record) for record in records[:200]),
    ]  # fmt: skip
    for_rank: list[messages.ToRank] = [
        messages.Welcome(1, 4, corpus.LIMITS), messages.Ready("the port is in use"), messages.Introduce(),
        messages.Refused("another process is watched"), messages.ShowStacks(3), messages.TerminalLine("rank 1 hangs"),
    ]  # fmt: skip
    of_agent: list[messages.FromAgent] = [
        messages.OpenMonitor(1), messages.Adopt("job", "node", b"/run", corpus.LIMITS, 1),
        messages.Assigned(7, 1, corpus.ORIGIN, b"/run", corpus.LIMITS, (b"out",), "drain", link), limits,
        messages.Dismissed("why"), messages.Stop(), messages.Look(True), messages.OthersRecorded(7),
        messages.OthersPositions(7, {0: "in_collective", 2: None}, (3,), 4), messages.Reaped(7, exited),
        messages.ProbeMonitor(2), messages.Leave(),
    ]  # fmt: skip
    for_agent: list[messages.ToAgent] = [
        messages.Ready(), messages.SeeksOthers(7), messages.Gone(7, exited, goodbye=False),
        messages.Requested("exclude_node", "its disk is full", 1, 7), messages.WillStop(7, is_heard=True),
        messages.Looked(7, True, "on_lock"), messages.Connected(7, link), messages.Alive(2),
        *(messages.Suspected(1, suspicion) for suspicion in suspicions[:10]),
        *(messages.Found(record, ended=True) for record in told[:50]),
    ]  # fmt: skip
    return [
        ("message of a rank", 160, list(map(msgpack, of_rank)), messages.decode_for_monitor),
        ("message for a rank", 40, list(map(msgpack, for_rank)), messages.decode_for_rank),
        ("message of an agent", 90, list(map(msgpack, of_agent)), messages.decode_from_agent),
        ("message for an agent", 90, list(map(msgpack, for_agent)), messages.decode_for_agent),
        ("interruption in the store", 130, list(map(encoding.to_json, told)), attribution.decode),
    ]


def _store_entries() -> list[Row]:
    seat = membership.NodeSeat("id", "node", "127.0.0.1", 4711, 0, 2)
    other = membership.NodeSeat("id2", "node2", "10.0.0.2", 4712, None, 2, "trainer")
    third = membership.NodeSeat("id3", "node3", "10.0.0.3", 4713)
    arrivals = [
        membership.Arrived(seat, 3),
        membership.Left("id", "why", is_lost=True),
        membership.Excluded("node", "its disk is full"),
        membership.Nothing(),
    ]
    last = membership.Membership(3, (seat, other, third), (), ("node", "node2", "node3"), entries=4, by="id")
    following = [
        membership.Membership(4, (seat, other), (third,), last.holders, ("node4",), 6, by="id2", before="id"),
        membership.Membership(4, (third, other, seat), (), last.holders, (), 5, by="id", before="id"),
        membership.Membership(4, (seat, other, third), (), last.holders, (), 5, by="id", before="id"),
        membership.Membership(4, closed="completed", by="id", before="id"),
        membership.Membership(4, closed="misconfigured", error="no ranks fit", by="id", before="id"),
    ]
    changes = [membership.difference(last, new) for new in following]
    failure = budget.Failure(0, "f", "what", "node", 1, 2)
    verdict = cycle.CycleDecision("failed", "node", "failure", 1, "why", 2, failure)
    json = encoding.to_json
    rows: list[tuple[str, float, Sequence[Any], Callable[[str], object]]] = [
        ("verdict in the store", 50, [verdict, cycle.CycleDecision("completed", "")], cycle.decode),
        ("arrival in the store", 50, arrivals, membership.decode_entry),
        ("membership in the store", 30, [last, *following], membership.decode_membership),
        ("change in the store", 40, changes, lambda text: membership.changed(last, membership.decode_change(text))),
        ("member in the store", 30, [Member(1, (2, 3), (4, 5))], encoding.reader(Member)),
        ("seat in the store", 30, [Seat(1, 1, 4, 4, 0)], encoding.reader(Seat)),
        ("failure in the store", 30, [failure], job_budget._read),
        ("settings in the store", 30, [terms.FirstTerms("node", terms.Terms(1, 2, policy="min-healthy"))], terms._read),
    ]
    return [(name, weight, list(map(json, values)), _of_text(decode)) for name, weight, values, decode in rows]


def _of_text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    """Feed a decoder as a store does: with text, whatever the bytes were."""
    return lambda data: decode(data.decode("utf-8", "replace"))


def _launch(data: bytes) -> str:
    try:
        return attempts._valid(data.decode("utf-8", "replace")).run_name
    except ConfigurationError as error:  # another process says why there is no attempt
        return str(error)


def _going_on(folder: Path) -> Feed:
    """Let a monitor go on where the note of the one before it says."""
    side = MonitorSide(Page.create())

    def feed(data: bytes, _: random.Random) -> None:
        side.leave_note(b"")
        side.leave_note(data)
        note = worker._note(side.note())
        side.continue_at(note.tail)
        recorder = DurationRecorder(folder / "job", corpus.ORIGIN)
        recorder.continue_from(note.position)
        recorder.take((), (), announced=100.0, heartbeat_at=101.0, step=12)
        encoding.to_msgpack(worker._Note(side.tail, recorder.position))

    return feed


# -- the launcher's processes -----------------------------------------------------------------------


def _launcher() -> list[Row]:
    msgpack = encoding.to_msgpack
    output = b"/runs/job/output/0/1.out"
    orders = [zygote.Sent([b"train.py", b"--lr=1"], {b"RANK": b"1", b"PATH": b"/bin"}, 0, 1)] * 2
    imports = zygote.Imports(["torch"], ["yaml", "train"], {b"OMP_NUM_THREADS": b"1"}, ("CUDA_VISIBLE_DEVICES",))
    noted = [notes.ModuleImported("torch.utils.data"), notes.VariablesSetTooLate("torch", ("TORCH_LOGS", "A"))]
    for_drain = [streams.OpenStream(3, "rank 1 stdout", output, 1 << 20, 1), streams.ProbeDrain()]
    of_drain = [
        streams.Reading(),
        streams.StreamLost("rank 1 stdout", output, "file", 4096, "No space left on device", 512, False),
        streams.StreamLost("rank 0 stderr", output, "terminal", 10),
        streams.StreamClosed(3),
        streams.Finished(),
    ]
    loaded = [
        preload.Loaded(("torch", "numpy"), (), "", {"numpy": "/lib/numpy/__init__.py"}, ("OMP_NUM_THREADS",), 1.5),
        preload.Loaded(refused=("jax",), why="ImportError: no module named jax", is_learned=True),
    ]
    hosted = [stores.Hosted(4711, address="10.0.0.1"), stores.Hosted(0, "Address already in use")]
    requests = [stores.OpenServer("::", 0), stores.Release(1)]
    return [
        ("request for a store", 30, list(map(msgpack, requests)), stores._requests),
        ("answer of the store process", 20, list(map(msgpack, hosted)), stores._answers),
        ("note of a worker", 20, list(map(encoding.to_json, noted)), notes._decode),
        ("order for workers", 30, [msgpack(orders)], zygote._orders),
        ("imports of a successor", 20, [msgpack(imports)], zygote._imports),
        ("outcome of imports", 30, list(map(msgpack, loaded)), zygote._loaded),
        (
            "message for the drain",
            30,
            list(map(msgpack, [*for_drain, streams.FinishStreams()])),
            streams.decode_for_drain,
        ),
        ("message of the drain", 30, list(map(msgpack, of_drain)), streams.decode_for_agent),
    ]


# -- torch and other programs -----------------------------------------------------------------------


def _other_programs() -> list[Row]:
    names = [name.encode() for name in ("data", "forward", "caf\xe9")]
    listener = elastic._Listener(lambda event: to_line(corpus.record_of(event)))
    return [
        ("flight recorder of torch", 30, corpus.flight_dumps(), _flight_recorder),
        ("names of another rank", 20, [encoding.to_msgpack(names)], _names_of_another_rank),
        (
            "event of torchelastic",
            20,
            corpus.elastic_events(),
            lambda data: listener.emit(logging.makeLogRecord({"msg": encoding.text(data)})),
        ),
    ]


def _flight_recorder(dump: bytes) -> object:
    """Read the flight recorder's dump. One that cannot be read is an empty one, which counts as refused here."""
    import torch.distributed  # noqa: F401  loads torch._C

    c10d = sys.modules["torch._C"]._distributed_c10d
    with mock.patch.object(c10d, "_dump_fr_trace_json", create=True, return_value=dump):
        calls = flight_recorder.last(0)
    if not calls:
        raise DecodeError("no calls")
    return calls


def _names_of_another_rank(data: bytes) -> list[str]:
    """Receive names as a rank does whose group broadcasts them."""
    import torch

    def all_reduce(tensor: torch.Tensor, op: object) -> None:
        tensor.fill_(len(data))

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    group: Any = SimpleNamespace(
        get_rank=lambda: 0,
        get_backend_config=lambda: "cpu:gloo",
        all_reduce=all_reduce,
        broadcast=broadcast,
        ReduceOp=torch.distributed.ReduceOp,
    )
    return rank_reductions._broadcast(group, [], 1)
