"""A restart in place counts once it is one: another iteration follows, and the launcher does not end it at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin, Role
from resilience.facts.records import Record
from resilience.report.condensed import report
from resilience.run_folder.load import Run, load
from resilience.telemetry.iteration_counts import SETTLED_S, IterationCounts
from tests.fixtures.jobs import JOBS, unpacked
from tests.support.record_streams import Fault, Kind, job


def record(
    event: events.AnyEvent, seconds: float, iteration: int | None = None, role: Role = "rank", cycle: int = 0
) -> Record:
    rank = None if role == "agent" else 0
    origin = Origin("job", "node", role, 1, cycle=cycle, iteration=iteration, initial_rank=rank)
    return Record(0, 0, round(seconds * 1e9), origin, event)


AGENT = record(events.CycleStarted("first", 0, 3), 0.0, role="agent")
STARTED = record(events.IterationStarted(2, "active"), 1.0, 0)
INTERRUPTED = record(events.IterationEnded("interrupted", 9.0), 10.0, 0)
NEXT = record(events.IterationStarted(2, "active"), 11.0, 1)


def counted(records: list[Record], now: float) -> dict[str, int]:
    counts = IterationCounts()
    for each in records:
        counts.take(each)
    return counts.counted(round(now * 1e9))


@pytest.mark.parametrize("agent", [[], [AGENT]], ids=["wrapper", "launcher"])
def test_interrupted_iteration_alone_is_no_restart(agent: list[Record]) -> None:
    assert counted([*agent, STARTED, INTERRUPTED], 1000.0) == {}


def test_without_a_launcher_the_next_iteration_is_enough() -> None:
    assert counted([STARTED, INTERRUPTED, NEXT], 11.0) == {"interrupted": 1}


def test_under_the_launcher_the_next_iteration_must_last() -> None:
    records = [AGENT, STARTED, INTERRUPTED, NEXT]
    assert counted(records, 11.0 + SETTLED_S - 0.001) == {}
    assert counted(records, 11.0 + SETTLED_S) == {"interrupted": 1}


def test_iteration_that_the_launcher_ends_at_once_was_no_restart() -> None:
    lost = record(events.IterationEnded("lost", 0.1, "monitor"), 11.1, 1, "monitor")
    assert counted([AGENT, STARTED, INTERRUPTED, NEXT, lost], 1000.0) == {}
    lost = record(events.IterationEnded("lost", 60.0, "monitor"), 11.0 + SETTLED_S, 1, "monitor")
    assert counted([AGENT, STARTED, INTERRUPTED, NEXT, lost], 1000.0) == {"interrupted": 1}


def sized(record: Record, world_size: int) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, world_size=world_size))


def test_next_iteration_with_all_ranks_was_a_restart_as_the_launcher_has_nothing_to_end() -> None:
    lost = record(events.IterationEnded("lost", 0.1, "monitor"), 11.1, 1, "monitor")
    for order in itertools.permutations([AGENT, sized(STARTED, 2), INTERRUPTED, sized(NEXT, 2), lost]):
        assert counted(list(order), 11.2) == {"interrupted": 1}
    assert counted([AGENT, sized(STARTED, 2), INTERRUPTED, sized(NEXT, 1), lost], 11.2) == {}


def test_next_iteration_in_which_a_rank_dies_by_itself_was_a_restart() -> None:
    lost = record(events.IterationEnded("lost", 4.0, "monitor"), 15.0, 1, "monitor")
    for is_stopped, count in ((False, {"interrupted": 1}), (True, {})):
        died = record(events.WorkerExited(0, 0, 1, None, "SIGKILL", is_stopped), 15.1, role="agent")
        for order in itertools.permutations([AGENT, sized(STARTED, 2), INTERRUPTED, sized(NEXT, 1), lost, died]):
            assert counted(list(order), 16.0) == count


@pytest.mark.parametrize("name", JOBS)
def test_recorded_jobs_have_as_many_restarts_in_place_as_their_report(name: str, tmp_path: Path) -> None:
    """The launcher of wrapper-in-launcher undid the second one: 16 ms after it had begun, it ended all workers."""
    run = load(unpacked(name, tmp_path))
    nodes: dict[str, IterationCounts] = {}
    for each in run.records:
        nodes.setdefault(each.origin.node, IterationCounts()).take(each)
    reported = sum(times.restarts for times in report(run).restarts if times.layer == "inprocess")
    most = max((counts.counted(None).get("interrupted", 0) for counts in nodes.values()), default=0)
    assert most == reported


@pytest.mark.parametrize("kinds", [*itertools.product(("exception", "kill", "hang"), repeat=2)])
def test_jobs_have_as_many_restarts_in_place_as_their_report(kinds: tuple[Kind, Kind]) -> None:
    told = job([Fault(kind, rank, rank - 1) for rank, kind in enumerate(kinds, 1)], spares=2)
    counts = IterationCounts()
    for each in told.records:
        counts.take(each)
    (reported,) = report(Run(Path("run"), None, tuple(told.records), ())).restarts
    assert counts.counted(None)["interrupted"] == reported.restarts == 2


def test_next_iteration_that_ranks_end_was_a_restart() -> None:
    records = [AGENT, STARTED, INTERRUPTED, NEXT, record(events.IterationEnded("completed", 1.0), 12.0, 1)]
    for order in itertools.permutations(records):
        assert counted(list(order), 12.0) == {"interrupted": 1, "completed": 1}


def test_all_but_the_last_iteration_count() -> None:
    later = [
        record(events.IterationEnded("interrupted", 0.1), 11.1, 1),
        record(events.IterationStarted(2, "active"), 11.2, 2),
    ]
    assert counted([AGENT, STARTED, INTERRUPTED, NEXT, *later], 11.3) == {"interrupted": 1}
    assert counted([AGENT, STARTED, INTERRUPTED, NEXT, *later], 60.0) == {"interrupted": 2}


def test_restarts_by_torchrun_count_as_they_are_incidents_of_the_report() -> None:
    """Each cycle is a new call. The last one has failed for good, or torchrun has not started the ranks again yet."""
    records = []
    for cycle in range(6):
        records.append(record(events.IterationStarted(2, "active"), 300.0 * cycle, 0, cycle=cycle))
        records.append(record(events.IterationEnded("interrupted", 9.0), 300.0 * cycle + 10.0, 0, cycle=cycle))
    assert counted(records, 2000.0) == counted(records[::-1], 2000.0) == {"interrupted": 5}
    # Under our launcher these are cycles, which it counts itself.
    assert counted([AGENT, *records], 2000.0) == {}


def test_damaged_start_of_an_iteration_that_lacks_its_number_counts_as_none() -> None:
    start = record(events.IterationStarted(2, "active"), 1.0)
    assert counted([start], 2.0) == counted([], 2.0)
    assert counted([start, STARTED, INTERRUPTED, NEXT], 12.0) == counted([STARTED, INTERRUPTED, NEXT], 12.0)
