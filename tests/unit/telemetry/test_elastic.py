"""What torchelastic says of itself becomes records, and reaches whoever listened before."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from torch.distributed.elastic import events as theirs
from torch.distributed.elastic import metrics
from torch.distributed.elastic.events import handlers

from resilience.facts import events
from resilience.system import terminal
from resilience.telemetry.elastic import CONSOLE, GROUP, bridged


@pytest.fixture
def told() -> list[events.Event]:
    return []


class Users(metrics.MetricHandler):  # type: ignore[misc]  # torch's
    """A handler that the user has configured."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.seen.append((metric_data.name, metric_data.value))


@pytest.fixture
def users() -> Iterator[Users]:
    before, made = metrics.getStream(GROUP).handler, Users()
    metrics.configure(made, GROUP)
    yield made
    metrics.configure(before, GROUP)


def test_values_are_reported_and_the_users_handler_has_them_too(told: list[events.Event], users: Users) -> None:
    @metrics.prof  # type: ignore[untyped-decorator]  # torch's
    def call() -> None:
        metrics.put_metric("mine", 3)
        metrics.put_metric("elsewhere", 3, "another group")

    with bridged(told.append, "null"):
        call()
    names = [event.name for event in told if isinstance(event, events.ElasticMeasured)]
    assert [name.rpartition(".call.")[2] for name in names] == ["mine", "success", "duration.ms"]
    assert [name for name, _ in users.seen] == names
    call()
    assert len(told) == 3  # nobody listens any more
    assert len(users.seen) == 6
    assert metrics.getStream(GROUP).handler is users


def test_events_are_reported_with_what_they_hold(told: list[events.Event]) -> None:
    metadata = {"state": "FAILED", "global_rank": 3, "duration_ms": 250.0, "raw_error": "x" * 900}
    with bridged(told.append, "null"):
        theirs.record(theirs.Event("torchelastic.worker.status.FAILED", theirs.EventSource.WORKER, 0, metadata))
        theirs.record(theirs.Event("bare", theirs.EventSource.AGENT))
    theirs.record(theirs.Event("late", theirs.EventSource.AGENT))
    assert told == [
        events.ElasticTold("torchelastic.worker.status.FAILED", "WORKER", "FAILED", 3, 0.25, "x" * 500),
        events.ElasticTold("bare", "AGENT", ""),
    ]


def record_at_the_console(handler: logging.Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record an event for stderr, where torch has this handler for it."""
    monkeypatch.setitem(handlers._log_handlers, CONSOLE, handler)
    monkeypatch.setattr(theirs, "_events_loggers", {})
    logger = logging.getLogger(f"torchelastic-events-{CONSOLE}")
    monkeypatch.setattr(logger, "handlers", [])
    with bridged(lambda event: None, CONSOLE):
        theirs.record(theirs.Event("bare", theirs.EventSource.AGENT), CONSOLE)
    assert handlers._log_handlers[CONSOLE] is handler


class UsersHandler(logging.StreamHandler[io.StringIO]):
    """A handler of the user's, which derives from the class of torch's."""


@pytest.mark.parametrize("kind", [UsersHandler, logging.StreamHandler])
def test_users_handler_for_the_console_has_the_events(
    kind: type[logging.StreamHandler[io.StringIO]], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    record_at_the_console(kind(written), monkeypatch)
    assert json.loads(written.getvalue())["name"] == "bare"


def test_format_of_torchs_handler_for_the_console_is_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[mine] %(message)s"))
    monkeypatch.setattr(terminal, "stream", lambda descriptor: descriptor)
    record_at_the_console(handler, monkeypatch)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("[mine] {")


@pytest.mark.parametrize("text", ["no json", "[]", '"text"', "{}", '{"name": 1, "metadata": 2}'])
def test_what_is_no_event_is_left_out(text: str, told: list[events.Event]) -> None:
    with bridged(told.append, "null"):
        theirs._get_or_create_logger("null").info(text)
    assert told == []
