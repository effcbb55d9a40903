"""Readers of files: those of a run folder, of limits, of settings and of durations from other tools."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

from resilience.calibrate.tables import read_table
from resilience.core import limits as limits_of_clients
from resilience.errors import ConfigurationError, DecodeError
from resilience.facts import encoding
from resilience.integrations.stored_limits import FILE as STORED
from resilience.integrations.stored_limits import LimitsFile
from resilience.monitor.config import FaultToleranceConfig
from resilience.run_folder.clocks import clocks
from resilience.run_folder.entries import entry_of
from resilience.run_folder.lines import FileLines, Kind, KnownFile, line_text
from resilience.run_folder.load import Reader
from resilience.system import files, timeouts_file
from resilience.telemetry import durations, rank_snapshot, single_durations
from resilience.telemetry.durations import Header, Recorder
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.recording import RecordTail, read_job
from resilience.telemetry.spans import SpanView
from resilience.telemetry.targets import FOLDER as TARGETS
from resilience.telemetry.targets import Targets, announced
from tests.fuzz import corpus
from tests.fuzz.target import Feed, Target


def file_targets(folder: Path) -> list[Target]:
    """Return a target for each kind of file. folder: an empty one."""
    run = corpus.run_folder(folder / "files", is_launched=False)
    stem = "node-0"
    config = folder / "config.yaml"
    FaultToleranceConfig().to_yaml_file(config)
    limits = folder / timeouts_file.NAME
    timeouts_file.write(limits, corpus.timeouts())
    state = run / "timings" / f"{stem}.hist"
    launched = corpus.run_folder(folder / "launched", is_launched=True) / "records"
    table, packed = folder / "table.csv", folder / "table.csv.gz"
    table.write_bytes(corpus.table())
    packed.write_bytes(gzip.compress(corpus.table()))
    stored = LimitsFile(folder, world_size=2)
    known = limits_of_clients.ClientLimits(
        limits_of_clients.HeartbeatTimeouts(30.0, 10.0, were_calculated=True),
        limits_of_clients.SectionTimeouts({"data": 5.0}, 60.0, frozenset({"data"}), True, {"data": 20.0}),
    )
    stored.write(limits_of_clients.to_plain(known), is_on_trial=False)
    node = Targets(run, "node")
    node.announce("node:9400")
    (announcement,) = (run.parent / TARGETS).iterdir()

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

    def whole_run(path: Path) -> None:
        for _ in Reader(run).records:
            pass

    def compared(path: Path) -> None:
        clocks({name: sorted(launched.glob(f"{name}-*.jsonl")) for name in ("node0", "node1")})

    def kept_limits(path: Path) -> None:
        """A training starts with the limits that the one before it has kept."""
        if (plain := stored.read()) is not None:
            limits_of_clients.from_plain(plain)

    readable = (OSError, DecodeError)
    table: list[tuple[str, float, Path, Callable[[Path], object], tuple[type[Exception], ...]]] = [
        ("file of histograms", 16, state, durations.read_histograms, readable),
        ("file of single values", 8, run / "timings" / f"{stem}.jsonl", values, readable),
        ("many single values at once", 8, run / "timings" / f"{stem}.jsonl", single_durations.read_lines, readable),
        ("files of a monitor before", 5, state, goes_on, ()),
        ("file of signs", 8, run / "timings" / f"{stem}.signs", rank_snapshot.read, readable),
        ("job.json", 8, run / "job.json", lambda path: read_job(path.parent), readable),
        ("file of limits", 2, limits, timeouts_file.read, (ConfigurationError,)),
        ("file of the configuration", 3, config, FaultToleranceConfig.from_yaml_file, (OSError, ConfigurationError)),
        ("table of durations", 5, table, read_table, (ConfigurationError,)),
        ("packed table of durations", 3, packed, read_table, (ConfigurationError,)),
        ("limits of the run before", 8, folder / STORED, kept_limits, (OSError, ValueError)),
        ("announcement of a node", 8, announcement, lambda path: announced(run), ()),
        ("records of two clocks", 3, launched / "node0-agent.jsonl", compared, ()),
        ("record file in views", 3, run / "records" / f"{stem}.jsonl", viewed, ()),
        ("records of a run", 3, run / "records" / f"{stem}.jsonl", whole_run, ()),
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
