"""Log lines: flat, complete, valid by their schema, and never in the way of the program."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import resilience
from resilience.facts.identity import Origin
from resilience.telemetry import log
from resilience.telemetry.log import LogLine, line_of
from resilience.telemetry.span import run_span_id, trace_id
from tests.support.record_streams import Fault, job

ORIGIN = Origin("job", "node", "rank", 7, attempt=1, cycle=2, iteration=3, initial_rank=4, rank=2, world_size=8)


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Lets loggers write to a file, as in a wrapped function; answers its lines."""
    path = tmp_path / "logs" / "node-4.jsonl"
    log.configure(path, lambda: {"origin": ORIGIN, "step": 17, "section": "data"})
    yield lambda: [json.loads(line) for line in path.read_bytes().splitlines()]
    log.configure(None, None)


def test_line_knows_job_rank_iteration_step_and_span(lines: Callable[[], list[dict[str, Any]]]) -> None:
    resilience.get_logger(run="a").bind(lr=0.1).info("loss fell", loss=1.5)
    (line,) = lines()
    assert line["event"] == "loss fell"
    assert (line["run"], line["lr"], line["loss"]) == ("a", 0.1, 1.5)
    found = msgspec.convert(line, LogLine)
    assert (found.job_id, found.attempt, found.cycle, found.iteration, found.step) == ("job", 1, 2, 3, 17)
    assert (found.rank, found.initial_rank, found.world_size, found.node, found.role) == (2, 4, 8, "node", "rank")
    assert (found.section, found.level, found.schema) == ("data", "info", 1)
    assert found.trace_id == format(trace_id(ORIGIN), "032x")
    assert found.span_id == format(run_span_id(ORIGIN, 3, 4), "016x")
    assert len(found.ts) == len("2026-11-21T06:05:21.123456Z")


def test_numbers_show_lost_lines(lines: Callable[[], list[dict[str, Any]]]) -> None:
    logger = resilience.get_logger()
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, level)("x")
    numbers = [line["seq"] for line in lines()]
    assert numbers == list(range(numbers[0], numbers[0] + 5))
    assert [line["level"] for line in lines()] == ["debug", "info", "warning", "error", "critical"]


def test_exception_is_logged_with_its_traceback(lines: Callable[[], list[dict[str, Any]]]) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        resilience.get_logger().exception("step failed")
    (line,) = lines()
    assert line["level"] == "error"
    assert "ValueError: bad" in line["exception"]


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


DEEP: list[object] = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        {1: 2, (3, 4): 5},
        b"\xff\x00",
        "\ud800",
        object(),
        Broken(),
        {1, 2},
        [Broken()],
        2**80,
        pytest.param(10**5000, id="huge"),
        pytest.param(DEEP, id="deep"),
    ],
)
def test_no_value_can_make_logging_raise(value: object, lines: Callable[[], list[dict[str, Any]]]) -> None:
    resilience.get_logger().info("odd", value=value)
    (line,) = lines()
    assert line["event"] == "odd"
    assert "value" in line


def test_message_that_has_no_text_is_a_line_all_the_same(lines: Callable[[], list[dict[str, Any]]]) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    resilience.get_logger().error(Unspeakable())
    (line,) = lines()
    assert line["event"] == "<no message: __str__ raised KeyError>"


def test_users_field_cannot_hide_ours(lines: Callable[[], list[dict[str, Any]]]) -> None:
    resilience.get_logger().info("x", rank="mine", ts="noon", schema="s")
    (line,) = lines()
    assert (line["rank"], line["rank_"], line["ts_"], line["schema"]) == (2, "mine", "noon", 1)


def test_context_that_breaks_costs_the_context_only(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise AttributeError("gone")

    path = tmp_path / "log.jsonl"
    log.configure(path, broken)
    resilience.get_logger().info("still here")
    log.configure(None, None)
    assert json.loads(path.read_bytes())["event"] == "still here"


def test_outside_a_wrapped_function_people_can_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    resilience.get_logger().warning("careful", left=3, path="/data")
    text = capsys.readouterr().err
    assert "warning" in text
    assert text.endswith("careful  left=3 path=/data\n")
    assert "{" not in text


def test_file_that_cannot_be_written_sends_lines_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Path("/proc/no-such-folder/log.jsonl"), lambda: {"origin": ORIGIN})
    resilience.get_logger().info("not lost", n=1)
    log.configure(None, None)
    assert "[rank 4] not lost  n=1" in capsys.readouterr().err


def test_stderr_that_is_closed_is_nobodys_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        resilience.get_logger().info("to nobody")


def test_users_own_span_is_named_if_they_use_opentelemetry(lines: Callable[[], list[dict[str, Any]]]) -> None:
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext

    with trace.use_span(NonRecordingSpan(SpanContext(5, 6, is_remote=False))):
        resilience.get_logger().info("inside")
    resilience.get_logger().info("outside")
    inside, outside = lines()
    assert (inside["trace_id"], inside["span_id"]) == (format(5, "032x"), format(6, "016x"))
    assert outside["trace_id"] == format(trace_id(ORIGIN), "032x")


def test_every_record_is_a_valid_log_line() -> None:
    for record in job([Fault("kill", 1, 0), Fault("hang", 2, 1, 20)]).records:
        line = line_of(record)
        found = msgspec.convert(line, LogLine)
        assert found.event == str(record.event.__struct_config__.tag)
        assert (found.seq, found.pid, found.initial_rank) == (
            record.sequence,
            record.origin.pid,
            record.origin.initial_rank,
        )
        assert b"\n" not in msgspec.json.encode(line)
