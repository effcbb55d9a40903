"""Which interruptions does one node count as first?"""

from __future__ import annotations

import pytest

from resilience.attribution import first_and_cascade
from resilience.attribution.first_and_cascade import KEPT, Interruptions
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import ExceptionInfo, Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import CycleHistory
from tests.support.containers import size

CYCLES = KEPT + 44
DECIDED = events.RestartDecided("restart", "f", "rank 0: exit code 1", 1, 9, 1)
BAD = ExceptionInfo("ValueError", "bad", "mark")


@pytest.mark.parametrize(("by", "is_own", "place"), [(0, True, "cascade"), (0, False, "first"), (1, True, "first")])
def test_error_is_first_unless_another_nodes_rank_is_known_to_have_failed_before(
    by: int, is_own: bool, place: str
) -> None:
    """Rank 1 is alone on its node; the store has the record of rank `by` first."""
    failed = InterruptionRecord(1, Interruption.EXCEPTION, exception=BAD, origin="own")
    origin = Origin("job", "node1", "rank", 7, iteration=0, initial_rank=1)
    interruptions = Interruptions()
    for event in (
        events.IterationStarted(2, "active"),
        events.RankInterrupted(failed),
        events.IterationDecided(by, is_own=is_own),
    ):
        interruptions.take(Record(0, 5, 5, origin, event))
    ((labels, count),) = interruptions.counted().items()
    assert (labels[-1], count) == (place, 1)


@pytest.mark.parametrize(("fault_of", "place"), [(0, "cascade"), (1, "first"), (None, "first")])
def test_death_is_first_unless_the_store_had_the_fault_of_another_nodes_rank_before(
    fault_of: int | None, place: str
) -> None:
    """Rank 1 was alone on its node, so no rank there learned how the iteration was decided."""
    interruptions = Interruptions()
    of_rank = Origin("job", "node1", "rank", 7, iteration=0, initial_rank=1)
    of_monitor = Origin("job", "node1", "monitor", 8, iteration=0, initial_rank=1)
    interruptions.take(Record(0, 5, 5, of_rank, events.IterationStarted(2, "active")))
    for event in (
        events.RankInterrupted(InterruptionRecord(1, Interruption.TERMINATED, pid=7)),
        events.InterruptionArrived(1, Interruption.TERMINATED, 0, 2, fault_of),
        events.MonitorEnded(0),
    ):
        interruptions.take(Record(0, 6, 6, of_monitor, event))
    ((labels, count),) = interruptions.counted().items()
    assert (labels[-1], count) == (place, 1)


def test_launchers_record_of_a_counted_fault_stays_a_cascade_in_a_job_of_many_cycles() -> None:
    """In each cycle a rank raises an error out of its Wrapper, and so ends."""
    history = CycleHistory()
    interruptions = Interruptions(history.nodes)
    raised = InterruptionRecord(0, Interruption.EXCEPTION, exception=BAD, origin="own", pid=70)
    ended = InterruptionRecord(0, Interruption.TERMINATED, pid=70, exit=Exit(code=1))
    for cycle in range(CYCLES):
        of_agent = Origin("job", "node", "agent", 9, cycle=cycle)
        of_rank = Origin("job", "node", "rank", 70, cycle=cycle, iteration=0, initial_rank=0)
        of_monitor = Origin("job", "node", "monitor", 8, cycle=cycle, initial_rank=0, layer="launcher")
        told: list[tuple[Origin, events.Event]] = [
            (of_agent, events.CycleStarted("failure", cycle, 1000)),
            (of_agent, events.WorkerStarted(0, 0, 70, "cold")),
            (of_rank, events.IterationStarted(1, "active")),
            (of_rank, events.RankInterrupted(raised)),
            (of_rank, events.IterationDecided(0, is_own=True)),
            (of_monitor, events.RankInterrupted(ended)),
            (of_agent, events.WorkerExited(0, 0, 70, 1, None, False)),
            (of_agent, DECIDED),
            (of_agent, events.CycleEnded("failed", 1.0)),
        ]
        for origin, event in told:
            record = Record(0, cycle, cycle, origin, event)
            interruptions.take(record)
            if origin.is_launchers:
                history.take(record, cycle)
    for _ in range(2):
        counted = interruptions.counted()
        assert sorted((labels[0], labels[2], count) for labels, count in counted.items()) == [
            ("exception", "first", CYCLES),
            ("terminated", "cascade", CYCLES),
        ]


def test_death_on_record_in_two_iterations_stays_one_in_a_job_of_many_iterations() -> None:
    interruptions = Interruptions()
    for iteration in range(CYCLES):
        rank = int(iteration <= CYCLES - KEPT)  # the last iteration that is settled and the next one have one death
        died = InterruptionRecord(rank, Interruption.TERMINATED, pid=70 if rank else iteration)
        origin = Origin("job", "node", "monitor", 8, iteration=iteration, initial_rank=rank)
        for event in (events.RankInterrupted(died), events.MonitorEnded(0)):
            interruptions.take(Record(0, 5, 5, origin, event))
    for _ in range(2):
        assert sum(interruptions.counted().values()) == KEPT


@pytest.mark.parametrize("calls", [1, 40])
def test_counts_that_nobody_reads_take_no_more_memory_with_more_iterations(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """A job restarts in place all the time, and nothing scrapes its metrics."""
    monkeypatch.setattr(first_and_cascade, "KEPT", 4)
    interruptions, sizes = Interruptions(), []
    failed = InterruptionRecord(0, Interruption.EXCEPTION, exception=BAD, origin="own")
    for number in range(400):
        call, iteration = divmod(number, 400 // calls)
        origin = Origin("job", "node", "rank", 7, call=call, iteration=iteration, initial_rank=0)
        for event in (
            events.IterationStarted(1, "active"),
            events.RankInterrupted(failed),
            events.InterruptionArrived(0, Interruption.EXCEPTION, iteration, 1, 0),
            events.IterationDecided(0, is_own=True),
        ):
            interruptions.take(Record(0, 5, 5, origin, event))
        sizes.append(size(interruptions, set()))
    assert max(sizes[200:]) == max(sizes[:200])
    assert set(interruptions.counted().values()) == {400}


def test_late_fault_of_a_settled_iteration_that_had_its_first_one_is_a_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks failed on their own in the iteration. An exporter that takes over reads rank 1's file later."""
    monkeypatch.setattr(first_and_cascade, "KEPT", 4)
    interruptions, most = Interruptions(), 100
    late = most - 6
    for rank, iterations in ((0, range(most)), (1, range(late, late + 1))):
        failed = InterruptionRecord(rank, Interruption.EXCEPTION, exception=BAD, origin="own")
        for iteration in iterations:
            origin = Origin("job", "node", "rank", 7 + rank, iteration=iteration, initial_rank=rank)
            told = events.IterationStarted(2, "active"), events.RankInterrupted(failed)
            for event in (*told, events.IterationDecided(0, is_own=True)):
                interruptions.take(Record(0, 5, 5, origin, event))
        assert sum(interruptions.counted().values()) == most + rank
    assert {labels[2]: count for labels, count in interruptions.counted().items()} == {"first": most, "cascade": 1}
