"""What the logger `resilience` says about a restart."""

from __future__ import annotations

import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import FaultOrigin, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.telemetry.standard import StandardLog


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (events.IterationDecided(3, is_own=True), "rank 3 failed"),
        (events.IterationDecided(3), "rank 3 was reported first"),  # perhaps it only waited for the one that failed
        (events.IterationDecided(), "another rank failed"),
    ],
)
def test_first_record_names_the_rank_that_failed_only_if_it_shows_its_own_fault(
    seen: events.IterationDecided, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin("job", "node", "rank", 7, iteration=2, initial_rank=0)
    log = StandardLog()
    for event in (seen, events.IterationEnded("interrupted", 1.0)):
        log.take(Record(0, 5, 5, origin, event))
    assert caplog.messages == [f"rank 0 restarts after iteration 2: {reason}"]


@pytest.mark.parametrize(
    ("fault_origin", "reason"),
    [
        ("own", "this rank failed: RuntimeError: boom"),
        (None, "this rank failed: RuntimeError: boom"),
        ("communication", "rank 1 failed"),
        ("consequence", "rank 1 failed"),
    ],
)
def test_rank_that_only_lost_its_peer_does_not_say_that_it_failed(
    fault_origin: FaultOrigin | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin("job", "node", "rank", 7, iteration=0, initial_rank=0)
    interruption = InterruptionRecord(
        rank=0, interruption=Interruption.EXCEPTION, message="RuntimeError: boom", origin=fault_origin
    )
    log = StandardLog()
    seen = (
        events.RankInterrupted(interruption),
        events.IterationDecided(1, is_own=True),
        events.IterationEnded("interrupted", 1.0),
    )
    for event in seen:
        log.take(Record(0, 5, 5, origin, event))
    assert caplog.messages == [f"rank 0 restarts after iteration 0: {reason}"]


@pytest.mark.parametrize("policy", ["", "any-failed"])
def test_wrapper_says_what_is_known_of_its_file_of_limits_unless_the_launcher_has(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILIENCE_RESTART_POLICY", policy)
    monkeypatch.delenv("RESILIENCE_QUIET", raising=False)
    origin = Origin("job", "node", "rank", 7, initial_rank=0)
    for note in ("", "it holds no limit"):
        StandardLog().take(Record(0, 5, 5, origin, events.TimeoutsLoaded("limits.yaml", 0, True, False, note)))
    said = "" if policy else "resilience: RESILIENCE_TIMEOUTS=limits.yaml: it holds no limit\n"
    assert capsys.readouterr().err == said
