"""How long is a restart by the launcher that a Wrapper had begun, before its monitor ended the hung rank?"""

from __future__ import annotations

import msgspec
import pytest

from resilience.attribution.cost import times
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.facts import events
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.history import History
from tests.support.agreement import assert_agree
from tests.support.launch_streams import Fault, Launched
from tests.support.nested_streams import nested

SILENT_S = 0.4
LATER_S = 2.0  # from the first limit to the end of the rank
HUNG = 1


def ended_at_a_later_limit() -> Launched:
    """A rank in a wrapped function exceeds a limit, and its monitor ends it later."""
    told = nested([Fault("kill", HUNG)], has_steps=True)
    hung = InterruptionRecord(
        HUNG, Interruption.SOFT_TIMEOUT, detector=Detector("watchdog", SILENT_S), iteration=0, silent_for_s=SILENT_S
    )
    silent = events.RankFellSilent("watchdog", "soft", SILENT_S, SILENT_S)
    add(told, HUNG, LATER_S, silent, "monitor")
    add(told, HUNG, LATER_S, events.RankInterrupted(hung), "monitor")
    for rank in (0, HUNG):
        decided = events.IterationDecided(HUNG, silent_for_s=SILENT_S)
        add(told, rank, LATER_S, decided)
    return told


def add(
    told: Launched, rank: int, before_s: float, event: events.Event, role: str = "rank", iteration: int = 0
) -> None:
    """Add a record of a wrapped rank, or of its monitor, so long before the end of the hung rank."""
    records = told.files["node0", rank]
    entry = next(
        record for record in records if isinstance(record.event, events.StageStarted) and record.event.stage == "run"
    )
    at_ns = end_of(told).mono_ns - round(before_s * 1e9)
    origin = msgspec.structs.replace(entry.origin, iteration=iteration, role=role)
    wall_ns = entry.wall_ns + at_ns - entry.mono_ns
    records.append(msgspec.structs.replace(entry, origin=origin, mono_ns=at_ns, wall_ns=wall_ns, event=event))
    records.sort(key=lambda record: record.mono_ns)


def end_of(told: Launched) -> Record:
    return next(record for record in told.files["node0", HUNG] if isinstance(record.event, events.RankExited))


def only(told: Launched) -> Incident:
    """Return the incident of the launcher."""
    (incident,) = (incident for incident in fold(told.records) if incident.layer == "launcher")
    return incident


def restart_s(incident: Incident) -> float:
    assert incident.restart is not None
    return incident.restart.max_s


WITHOUT_HANG_S = restart_s(only(nested([Fault("kill", HUNG)], has_steps=True)))


def test_restart_of_a_rank_that_a_later_limit_ends_counts_from_the_first_limit() -> None:
    told = ended_at_a_later_limit()
    incident = only(told)
    assert incident.cost.hang_s == SILENT_S
    assert restart_s(incident) == pytest.approx(WITHOUT_HANG_S + LATER_S, abs=0.01)
    phases = {phase.name: phase.took.max_s for phase in incident.phases}
    assert phases["detect"] == pytest.approx(LATER_S, abs=0.01)
    spent = times(History().take_all(told.records))
    assert spent.restart_s == pytest.approx(restart_s(incident), abs=0.01)  # as in the sum of all times
    assert_agree(told.records)
    assert_agree(told.interleaved(1))


def test_rank_that_ends_after_the_others_went_on_without_it_is_a_new_failure() -> None:
    told = ended_at_a_later_limit()
    add(told, 0, LATER_S / 2, events.IterationStarted(1, "active"), iteration=1)
    assert restart_s(only(told)) == pytest.approx(WITHOUT_HANG_S, abs=0.01)


def test_rank_that_ends_after_its_call_is_a_new_failure() -> None:
    told = ended_at_a_later_limit()
    add(told, HUNG, LATER_S / 2, events.CallEnded("failed", 1, 1.0))
    assert restart_s(only(told)) == pytest.approx(WITHOUT_HANG_S, abs=0.01)
