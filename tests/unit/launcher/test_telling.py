"""Which rank failed first, as the launcher's last message says it."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.launcher import telling
from resilience.system import call_with_timeout
from tests.support import record_streams
from tests.support.launch_streams import Fault, Kind, launched


def test_last_message_that_gets_no_thread_names_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    emitted: list[events.Event] = []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(call_with_timeout, "START_LIMIT", 0.0)
    origin = Origin("job", "node0", "agent", 1)
    assert telling.first_failure(tmp_path, origin, False, emitted.append, is_first_node=True) == (None, "")
    (failed,) = emitted
    assert isinstance(failed, events.AnalysisFailed)
    assert failed.reason.startswith("RuntimeError: ")


@pytest.mark.parametrize("is_first_node", [True, False])
def test_analysis_that_fails_costs_the_last_message_its_rank_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first_node: bool
) -> None:
    def fail(*_: object) -> None:
        raise ImportError("the package was replaced on disk")

    emitted: list[events.Event] = []
    monkeypatch.setattr(telling, "_incident", fail)
    origin = Origin("job", "node0", "agent", 1)
    assert telling.first_failure(tmp_path, origin, False, emitted.append, is_first_node) == (None, "")
    assert emitted == [events.AnalysisFailed("ImportError: the package was replaced on disk")]


def test_verdict_is_recorded_by_one_node_and_said_on_all(tmp_path: Path) -> None:
    folder = launched([Fault("exhausted", 1)]).write(tmp_path / "run")
    emitted: list[events.Event] = []
    origin = Origin("job", "node0", "agent", 1)
    answers = [telling.first_failure(folder, origin, False, emitted.append, is_first) for is_first in (True, False)]
    assert answers[0] == answers[1]
    assert "rank 1 failed first" in answers[0][1]
    assert [type(event) for event in emitted] == [events.IncidentJudged]


@pytest.mark.parametrize(("kind", "named"), [("membership", []), ("kill", [1])])
def test_lost_monitor_is_not_named_as_the_reason_why_a_cycle_ended(
    tmp_path: Path, kind: Kind, named: list[int]
) -> None:
    folder = launched([Fault(kind, 1)], ranks=3, lost_monitors=[(0, 2)]).write(tmp_path / "run")
    emitted: list[events.Event] = []
    telling.first_failure(folder, Origin("job", "node0", "agent", 1), False, emitted.append, is_first_node=True)
    assert [event.rank for event in emitted if isinstance(event, events.IncidentJudged)] == named


@pytest.mark.parametrize("restarts", [0, 2])
def test_restarts_in_place_are_those_of_the_calls_of_this_cycle(tmp_path: Path, restarts: int) -> None:
    faults = [record_streams.Fault("exception", 1, iteration, 13) for iteration in range(restarts)]
    stream = record_streams.job(faults)
    folder = stream.write(tmp_path / "run")
    node = next(iter(stream.files.values()))[0].origin.node
    origin = Origin("job", node, "agent", 1)
    assert telling.restarts_in_place(folder, origin) == restarts
    assert telling.restarts_in_place(folder, msgspec.structs.replace(origin, cycle=1)) == 0
    assert telling.restarts_in_place(tmp_path / "gone", origin) == 0
