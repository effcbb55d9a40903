"""What is fed with damaged bytes: every decoder, every reader of a file, every command that reads a run.

A target takes one input. What it may raise is its contract and stands beside it; anything else is a failure."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from resilience.calibration.limits_file import Timeouts
from resilience.cli import main
from resilience.core import budget, cycle, membership, restart
from resilience.errors import ConfigurationError, DecodeError
from resilience.facts import encoding, events, tracebacks
from resilience.facts import interruptions as attribution
from resilience.facts.records import Record, from_line, to_line
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.supervision import Member
from resilience.launcher.rendezvous import stores
from resilience.launcher.worker import zygote
from resilience.monitor import messages
from resilience.monitor.config import FaultToleranceConfig
from resilience.run_folder.entries import entry_of
from resilience.run_folder.lines import FileLines, Kind, KnownFile, line_text
from resilience.system import files, timeouts_file
from resilience.telemetry import durations, rank_snapshot, single_durations
from resilience.telemetry.durations import Header, Recorder
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.recording import RecordFile, RecordTail, read_job
from resilience.telemetry.spans import SpanView
from tests.fuzz import corpus
from tests.fuzz.mutating import mutated, text

Feed = Callable[[bytes, random.Random], object]


@dataclass(frozen=True)
class Target:
    """weight: its share of all inputs. inputs: undamaged ones. may_raise: what the reader promises."""

    name: str
    weight: int
    inputs: Sequence[bytes]
    feed: Feed
    may_raise: tuple[type[Exception], ...] = (DecodeError,)

    def run(self, seed: str) -> None:
        """Feed the input of this seed. Raises: what the target raises beyond its contract."""
        chance = random.Random(f"{self.name}/{seed}")
        data = mutated(chance.choice(self.inputs), chance, self.inputs) if self.inputs else b""
        with contextlib.suppress(*self.may_raise), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that are not known
            self.feed(data, chance)


def targets(folder: Path) -> list[Target]:
    """Return all targets. folder: an empty one, whose files they use."""
    return [*_decoders(), *_texts(folder), *_files(folder), *_runs(folder)]


# -- decoders ----------------------------------------------------------------------------------------


def _decoders() -> list[Target]:
    records = corpus.records()
    interruptions = [record.event.record for record in records if isinstance(record.event, events.Interrupted)]
    begin = messages.Begin(corpus.ORIGIN, b"/runs", "prefix/", corpus.LIMITS, restart.WaitLimits(), 30.0, 1.0)
    of_rank = [begin, *(messages.Emitted(record) for record in records[:200]), messages.RankRequest("Continue", "why")]
    assigned = messages.Assigned(
        7, 1, corpus.ORIGIN, b"/run", corpus.LIMITS, (b"out",), messages.Attachment(7, True, 1.5)
    )
    of_agent = [messages.OpenMonitor(1), assigned, messages.Dismissed("why"), messages.Reaped(7, attribution.Exit(1))]
    for_agent = [messages.Found(told, ended=True) for told in interruptions[:50]]
    seat = membership.NodeSeat("id", "node", "127.0.0.1", 4711, 0, 2)
    entries = [
        membership.Arrived(seat, 3),
        membership.Left("id", "why"),
        membership.Excluded("node"),
        membership.Nothing(),
    ]
    verdict = cycle.CycleDecision(
        "failed", "node", "failure", 1, "why", 2, budget.Failure(0, "f", "what", "node", 1, 2)
    )
    traceback = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\n'
    json, msgpack = encoding.to_json, encoding.to_msgpack
    table: list[tuple[str, int, Sequence[Any], Callable[[bytes], object]]] = [
        ("record line", 180, [to_line(record) for record in records], from_line),
        ("message of a rank", 180, list(map(msgpack, of_rank)), messages.decode_for_monitor),
        ("message for a rank", 40, [msgpack(messages.Welcome(1, 4, corpus.LIMITS))], messages.decode_for_rank),
        ("message of an agent", 100, list(map(msgpack, of_agent)), messages.decode_from_agent),
        ("message for an agent", 100, list(map(msgpack, for_agent)), messages.decode_for_agent),
        ("interruption in the store", 160, [json(told) for told in interruptions], attribution.decode),
        ("verdict in the store", 60, [json(verdict), json(cycle.COMPLETED)], lambda data: cycle.decode(data)),  # type: ignore[arg-type]
        ("arrival in the store", 60, list(map(json, entries)), lambda data: membership.decode_entry(data)),  # type: ignore[arg-type]
        (
            "formation in the store",
            30,
            [json(membership.Membership(1, (seat,), (seat,)))],
            lambda data: membership.decode_formation(data),
        ),  # type: ignore[arg-type]
        ("member in the store", 40, [json(Member(1, (2, 3), (4, 5)))], encoding.reader(Member)),
        ("seat in the store", 40, [json(Seat(1, 1, 4, 4, 0))], encoding.reader(Seat)),
        ("failure in the store", 40, [json(verdict.failure)], encoding.reader(budget.Failure)),
        (
            "request for a store",
            40,
            [msgpack(stores.OpenServer("::", 0)), msgpack(stores.Release(1))],
            stores._requests,
        ),
        ("order for workers", 40, [msgpack([zygote.Sent([b"a"], {b"A": b"b"}, 0, 1)])], zygote._orders),
        ("any JSON", 80, [to_line(record) for record in records[:50]], encoding.from_json),
        ("traceback of a program", 40, [traceback], lambda data: tracebacks.parse(encoding.text(data).split("\n"))),
    ]
    made = [Target(name, weight, inputs, _only_bytes(decode)) for name, weight, inputs, decode in table]
    yaml = encoding.to_yaml(msgspec.to_builtins(_limits())).encode()
    return [*made, Target("any YAML", 3, [yaml], _only_bytes(encoding.from_yaml))]


def _only_bytes(decode: Callable[[bytes], object]) -> Feed:
    return lambda data, _: decode(data)


def _limits() -> Timeouts:
    deadline = {"timeout_s": 5.0, "status": "ok", "reason": "fits", "p": 1e-9, "n": 300, "max_s": 2.0, "p99_s": 1.0}
    plain = {
        "schema": 2,
        "configuration": {"script": "train.py", "world_size": 2},
        "created": "now",
        "target_false_alarms": 0.1,
        "horizon_s": 2.6e6,
    }
    return msgspec.convert({**plain, "ranks": 2, "deadlines": {"data": deadline, "heartbeat": deadline}}, Timeouts)


# -- text on its way out ------------------------------------------------------------------------------


def _texts(folder: Path) -> list[Target]:
    """Text of any kind goes out, and comes back escaped: by file, by message, by the store, and in every view."""
    records = corpus.records()
    sink = RecordFile(folder / "texts" / "records.jsonl")
    pending: list[Record] = []

    class Taken:
        def take(self, record: Record) -> bool:
            pending.append(record)
            return True

    def there_and_back(_: bytes, chance: random.Random) -> None:
        record = _retold(chance.choice(records), chance)
        expected = encoding.cleaned(record)
        assert from_line(to_line(record)) == expected

    def emitted(_: bytes, chance: random.Random) -> None:
        record = _retold(chance.choice(records), chance)
        pending.clear()
        Emitter(record.origin, [Taken(), sink]).emit(record.event)
        (taken,) = pending
        assert encoding.cleaned(taken) is taken
        assert not sink.dropped

    def views(_: bytes, chance: random.Random) -> None:
        metrics, spans = MetricView(), SpanView()
        for record in chance.sample(records, 20):
            told = encoding.cleaned(_retold(record, chance))
            metrics.take(told)
            spans.take(told)

    return [
        Target("text there and back", 60, (), there_and_back, ()),
        Target("text of an event", 30, (), emitted, ()),
        Target("text in spans and metrics", 5, (), views, ()),
    ]


def _retold(record: Record, chance: random.Random) -> Record:
    """Return the record with other text wherever its type allows any."""

    def other(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            fields = {field.name: field for field in msgspec.structs.fields(type(value))}
            changed = {
                name: text(chance) if field.type is str and chance.random() < 0.5 else other(getattr(value, name))
                for name, field in fields.items()
            }
            return msgspec.structs.replace(value, **changed)
        if isinstance(value, tuple):
            return tuple(text(chance) if isinstance(item, str) else other(item) for item in value)
        return value

    retold: Record = other(record)
    return retold


# -- files -------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Target]:
    run = corpus.run_folder(folder / "files", is_launched=False)
    stem = "node-0"
    config = folder / "config.yaml"
    FaultToleranceConfig().to_yaml_file(config)
    limits = folder / timeouts_file.NAME
    timeouts_file.write(limits, _limits())
    state = run / "timings" / f"{stem}.hist"

    def goes_on(path: Path) -> None:
        """A monitor takes over the damaged files of the one before it, and keeps on."""
        recorder = Recorder(run, Header("job", "node", 0, 2), corpus.AT / 1e9)
        recorder.started("warm", corpus.AT / 1e9)
        recorder.add("data", 0.5, corpus.AT / 1e9 + 100)
        recorder.median("data")
        recorder.flush(corpus.AT / 1e9 + 200)

    def lines(kind: Kind) -> Callable[[Path], None]:
        def read(path: Path) -> None:
            source = FileLines(path, KnownFile("file", kind, rank=0, node="node", began_ns=corpus.AT), 4096)
            while (line := source.next()) is not None:
                line_text(line)
                encoding.to_json(entry_of(line, ()), str)

        return read

    def viewed(path: Path) -> None:
        metrics, spans = MetricView(), SpanView()
        for record in RecordTail(path).added():
            metrics.take(record)
            spans.take(record)

    def values(path: Path) -> None:
        for _ in single_durations.read_values(path):
            pass

    readable = (OSError, DecodeError)
    table: list[tuple[str, int, Path, Callable[[Path], object], tuple[type[Exception], ...]]] = [
        ("file of histograms", 16, state, durations.read_histograms, readable),
        ("file of single values", 8, run / "timings" / f"{stem}.jsonl", values, readable),
        ("files of a monitor before", 5, state, goes_on, ()),
        ("file of signs", 8, run / "timings" / f"{stem}.signs", rank_snapshot.read, readable),
        ("job.json", 8, run / "job.json", lambda path: read_job(path.parent), readable),
        ("file of limits", 3, limits, timeouts_file.read, (ConfigurationError,)),
        ("file of the configuration", 3, config, FaultToleranceConfig.from_yaml_file, (OSError, ConfigurationError)),
        ("record file in views", 3, run / "records" / f"{stem}.jsonl", viewed, ()),
        ("lines of records", 3, run / "records" / f"{stem}.jsonl", lines("record"), ()),
        ("lines of logs", 8, run / "logs" / f"{stem}.jsonl", lines("log"), ()),
        ("lines of output", 8, run / "output" / "0" / "0.out", lines("text"), ()),
        ("end of a log", 8, run / "output" / "0" / "0.err", lambda path: files.tail(path, 20), ()),
    ]  # fmt: skip
    return [Target(*row[:2], [row[2].read_bytes()], _in_place(row[2], row[3]), row[4]) for row in table]


def _in_place(path: Path, read: Callable[[Path], object]) -> Feed:
    """Feed a reader with a file that is as it was afterwards."""
    whole = path.read_bytes()

    def feed(data: bytes, _: random.Random) -> None:
        path.write_bytes(data)
        try:
            read(path)
        finally:
            path.write_bytes(whole)

    return feed


# -- runs --------------------------------------------------------------------------------------------

COMMANDS: dict[str, int] = {  # and weights
    "report": 2,
    "report --json": 1,
    "report --html {out}": 1,
    "report --incident 1": 1,
    "status": 2,
    "status --json": 1,
    "logs": 1,
    "logs --json": 1,
    "logs --level error --around 1": 1,
    "trace --output {out}": 1,
    "trace --format perfetto --output {out}": 1,
    "trace --incident 1": 1,
    "calibrate": 1,
}


def _runs(folder: Path) -> list[Target]:
    """Every command that reads a run, on runs of which one to three files are damaged."""
    runs = [corpus.run_folder(folder / name, name == "launched") for name in ("wrapped", "launched")]
    whole = [{path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} for run in runs]

    def told(command: str) -> Feed:
        def feed(_: bytes, chance: random.Random) -> None:
            known = chance.choice(whole)
            run = runs[whole.index(known)]
            damaged = chance.sample(sorted(known), chance.choice((1, 1, 2, 3)))
            kept = {path: known[path] for path in damaged}
            try:
                for path in damaged:
                    path.write_bytes(mutated(known[path], chance, [known[path]]))
                verb, *options = command.format(out=folder / "out").split()
                _call([verb, str(run), *options])
            finally:
                for path, data in kept.items():
                    path.write_bytes(data)

        return feed

    return [
        Target(f"resilience {command.split(' {')[0]}", weight, (), told(command), ())
        for command, weight in COMMANDS.items()
    ]


def _call(arguments: list[str]) -> None:
    """Run a command in this process; what it prints goes nowhere, but has to be encodable."""
    with open("/dev/null", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                status = main(arguments)
            except SystemExit as error:
                status = error.code  # type: ignore[assignment]
    assert status in range(5), f"{arguments} ended with {status}"
