"""Promtail, Alloy and Vector send our log lines to Loki as the page says, by the configurations that we ship.

`tests.support.log_shippers` stands for the programs; `test_configurations` loads them if they are installed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import resilience
from resilience.facts.identity import Origin
from resilience.telemetry import log
from tests.support import log_shippers
from tests.support.log_shippers import Shipper
from tests.support.server import ROOT

ORIGIN = Origin("demo", "n0", "rank", 7, attempt=0, cycle=0, iteration=3, initial_rank=0, rank=0, world_size=1)
SHIPPED = ROOT / "dashboards" / "logs"
NEEDS_VRL = pytest.mark.skipif(
    find_spec("pyvrl") is None or sys.version_info < (3, 11),
    reason="vector.toml was not tried: needs tomllib (Python 3.11) and pyvrl, which has wheels up to Python 3.12",
)
READ = {"promtail.yaml": log_shippers.promtail, "config.alloy": log_shippers.alloy, "vector.toml": log_shippers.vector}
NAMES = [pytest.param(name, marks=NEEDS_VRL if name == "vector.toml" else ()) for name in READ]


def shipper(name: str) -> Shipper:
    return READ[name]((SHIPPED / name).read_text())


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """Log lines that a program wrote: plain, with fields of its own that have our names, and with an exception."""
    path = tmp_path / "demo" / "logs" / "n0-0.jsonl"
    log.configure(path, lambda: {"origin": ORIGIN, "step": 17})
    logger = resilience.get_logger(job="mine", message="of the user", level_="mine")
    logger.info("loss fell", loss=1.5, shape=[2, None, {"größe": 2**40}])
    logger.debug('"quoted", \\ and\nof two lines')
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("went wrong", node="mine", job_id=None)
    yield path
    log.configure(None, None)


@pytest.mark.parametrize("name", NAMES)
def test_loki_gets_the_line_at_its_time_with_few_labels(name: str, written: Path, tmp_path: Path) -> None:
    by = shipper(name)
    (pattern,) = by.patterns
    assert list(tmp_path.glob(pattern.removeprefix("/shared/resilience-runs/"))) == [written]
    assert by.url in (None, "http://loki:3100/loki/api/v1/push")
    lines = written.read_text().splitlines()
    assert len(lines) == 3
    for text in lines:
        line = json.loads(text)
        sent = by.send(text)
        assert sent.labels == {"job": "resilience", "level": line["level"], "job_id": "demo", "node": "n0"}
        at = datetime.fromisoformat(line["ts"].replace("Z", "+00:00"))
        assert sent.at_ns == (int(at.timestamp()) * 10**6 + at.microsecond) * 1000
        assert json.loads(sent.line) == line
        assert sent.metadata in ({}, {"trace_id": line["trace_id"]})


@pytest.mark.parametrize("name", NAMES)
def test_derived_field_of_the_docs_finds_the_trace_in_the_line_that_loki_gets(name: str, written: Path) -> None:
    (pattern,) = re.findall(r'`("trace_id":.*)`', (ROOT / "docs" / "integrations.md").read_text())
    for text in written.read_text().splitlines():
        assert re.findall(pattern, shipper(name).send(text).line) == [json.loads(text)["trace_id"]]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("promtail.yaml", "expressions:", "expression:"),
        ("promtail.yaml", "ts: ts", "ts: ts, ts: t"),
        ("promtail.yaml", "trace_id: trace_id}", "trace: trace_id}"),
        ("promtail.yaml", "RFC3339Nano", "RFC3339"),
        ("promtail.yaml", '- labels: {level: ""', "- labels: {lev-el: level"),
        ("config.alloy", "expressions =", "expression ="),
        ("config.alloy", "stage.labels", "stage.label"),
        ("config.alloy", 'values = {level = ""', 'level = {level = ""'),
        ("config.alloy", "loki.process.resilience.receiver", "loki.process.default.receiver"),
        ("config.alloy", "file_match.resilience.targets", "file_match.resilience.target"),
        ("config.alloy", "  endpoint {", "  endpoints {"),
        ("config.alloy", 'level = "level", ', 'level = "level" '),
        ("vector.toml", "include =", "includes ="),
        ("vector.toml", 'inputs = ["resilience_parsed"]', 'inputs = ["resilience"]'),
        ("vector.toml", "parse_json!", "parse_json"),
        ("vector.toml", "{{ level }}", "{{ lev"),
        ("vector.toml", '"%+"', '"%s"'),
    ],
)
def test_a_wrong_setting_of_a_shipper_is_noticed(name: str, right: str, wrong: str, written: Path) -> None:
    if name == "vector.toml" and NEEDS_VRL.args[0]:
        pytest.skip(NEEDS_VRL.kwargs["reason"])
    text = (SHIPPED / name).read_text()
    assert right in text
    with pytest.raises(ValueError):
        READ[name](text.replace(right, wrong)).send(written.read_text().splitlines()[0])


def test_docs_show_the_configurations_that_are_shipped() -> None:
    page = MarkdownIt().parse((ROOT / "docs" / "logs.md").read_text())
    shown = [token.content for token in page if token.type == "fence"]
    for name in READ:
        assert (SHIPPED / name).read_text() in shown, f"docs/logs.md shows another {name}"
