"""How a job ended on a node follows from its records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.status.state import Watcher
from resilience.telemetry.final_state import FinalState
from tests.support.agreement import written
from tests.support.record_streams import Fault, Job, Kind, job
from tests.support.torchrun_streams import stopped_in_restart

AGENT = Origin("job", "n0", "agent", 1)


def rank(number: int, call: int = 0) -> Origin:
    return Origin("job", "n0", "monitor", 10 + number, call=call, initial_rank=number)


def state(*told: tuple[Origin, events.Event]) -> FinalState:
    made = FinalState()
    for number, (origin, event) in enumerate(told):
        made.take(Record(number, 10**18 + number, number, origin, event))
    return made


STARTED = events.CallStarted("train", 2, "1", "2", "3", "h", "forked")
COMPLETED, LEFT = events.CallEnded("completed", 1, 1.0), events.CallEnded("left", 1, 1.0, "RuntimeError")
KILLED = events.RankExited(goodbye=False, signal="SIGKILL")


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        ("completed", "completed"),
        ("failed", "failed"),
        ("exhausted", "failed"),
        ("shutdown", "failed"),
        ("preempted", "stopped"),
        ("excluded", "left"),
    ],
)
def test_agent_says_how_the_job_ended(verdict: events.CycleOutcome, outcome: str) -> None:
    assert state((AGENT, events.JobEnded(verdict, 1))).outcome == outcome


def test_node_that_was_told_to_leave_has_left_and_the_job_may_go_on() -> None:
    asked = events.StopRequested("SIGTERM", 30.0, leaves=True)
    assert state((AGENT, asked), (AGENT, events.JobEnded("preempted", 143))).outcome == "left"


def met(group_rank: int) -> events.RendezvousCompleted:
    return events.RendezvousCompleted(group_rank, 2, 4, "deterministic", "host:1")


@pytest.mark.parametrize(
    ("group_ranks", "is_first"), [((), False), ((0,), True), ((1,), False), ((1, 0), True), ((0, 1), False)]
)
def test_first_node_under_the_launcher_is_that_of_the_newest_cycle(
    group_ranks: tuple[int, ...], is_first: bool
) -> None:
    assert state(*((AGENT, met(number)) for number in group_ranks)).is_first is is_first


def test_agent_that_came_back_is_not_first_until_it_has_a_place() -> None:
    back = msgspec.structs.replace(AGENT, pid=2)
    assert not state((AGENT, met(0)), (back, events.CycleStarted("first", 0, 3))).is_first
    assert state((AGENT, met(1)), (back, met(0))).is_first


def test_first_node_without_the_launcher_is_that_of_rank_0_in_the_newest_iteration() -> None:
    """Three ranks on a node each; rank 0 is lost, so that the rank of initial rank 1 becomes 0."""
    told = job([Fault("kill", 0, 0)], world=3)
    nodes = [FinalState() for _ in range(3)]
    firsts: list[list[int]] = []
    for record in told.records:
        assert record.origin.initial_rank is not None
        nodes[record.origin.initial_rank].take(record)
        first = [number for number, node in enumerate(nodes) if node.is_first]
        if not firsts or first != firsts[-1]:
            firsts.append(first)
    assert firsts == [[], [0], [0, 1]]


def test_replaced_agent_with_the_same_pid_that_waits_as_a_spare_has_not_left() -> None:
    made = state((AGENT, events.CycleStarted("first", 0, 3)), (AGENT, events.JobEnded("excluded", 0)))
    assert made.outcome == "left"
    made.take(Record(0, 10**18 + 9, 9, AGENT, events.CyclePhaseStarted("rendezvous")))
    assert made.outcome is None


def test_calls_say_nothing_of_the_end_under_the_launcher() -> None:
    told = [(AGENT, events.CycleStarted("first", 0, 3)), (rank(0), STARTED), (rank(0), LEFT)]
    assert state(*told).outcome is None


def test_wrapped_job_has_ended_once_no_rank_is_in_a_call() -> None:
    begun = [(rank(0), STARTED), (rank(1), STARTED)]
    assert state(*begun, (rank(0), COMPLETED)).outcome is None
    assert state(*begun, (rank(0), COMPLETED), (rank(1), LEFT)).outcome == "completed"
    assert state(*begun, (rank(0), LEFT), (rank(1), LEFT)).outcome == "failed"
    assert state(*begun, (rank(0), KILLED), (rank(1), KILLED)).outcome == "failed"


ASKED = events.RankExited(goodbye=False, signal="SIGTERM")
OBEYED = events.RankExited(goodbye=False, code=143)
SIGNALLED = events.RankSignalled(("SIGTERM",), "hard_timeout")
STOPS = [
    ("stopped", [(0, ASKED), (1, ASKED)]),
    ("stopped", [(0, ASKED), (1, OBEYED)]),
    ("completed", [(0, ASKED), (1, COMPLETED)]),
    ("failed", [(0, ASKED), (1, KILLED)]),
    ("failed", [(0, LEFT), (1, ASKED)]),  # torchrun or a scheduler stops the others after a failure
    ("failed", [(0, SIGNALLED), (0, ASKED), (1, ASKED)]),  # its own monitor ended the rank for a hang
]


@pytest.mark.parametrize(("outcome", "ends"), STOPS)
def test_ranks_that_all_obeyed_a_signal_were_stopped_in_every_view(
    outcome: str, ends: list[tuple[int, events.Event]], tmp_path: Path
) -> None:
    told = [(rank(0), STARTED), (rank(1), STARTED), *((rank(number), event) for number, event in ends)]
    assert state(*told).outcome == outcome
    records = [Record(number, 10**18 + number, number, *entry) for number, entry in enumerate(told)]
    Job({number: [r for r in records if r.origin.initial_rank == number] for number in (0, 1)}).write(tmp_path / "run")
    now = Watcher(tmp_path / "run", lambda: 10.0**9 + 60).look()
    assert now is not None and (now.phase, now.outcome) == ("ended", outcome)
    found = report(load(tmp_path / "run"))
    assert (found.end == "ranks 0-1 asked to stop") == (outcome == "stopped")


@pytest.mark.parametrize(("after_s", "outcome"), [(10.0, "failed"), (3600.0, "stopped")])
@pytest.mark.parametrize("kind", ["kill", "exit", "left"])
def test_ranks_that_outlived_a_fault_long_before_they_were_asked_to_stop_have_not_failed(
    kind: Kind, after_s: float, outcome: str, tmp_path: Path
) -> None:
    """Soon after a fault, torchrun or a scheduler stops the other ranks for it."""
    records = stopped_in_restart(job([Fault(kind, 2, 0)], world=3), 2, events.RestartEnded, after_s=after_s)
    made = FinalState()
    for record in sorted(records, key=lambda record: record.mono_ns):
        made.take(record)
    assert (made.outcome, made.has_failed) == (outcome, outcome == "failed")
    folder = written(records, tmp_path / "run")
    now = Watcher(folder, lambda: max(record.wall_ns for record in records) / 1e9 + 60).look()
    assert now is not None and (now.phase, now.outcome) == ("ended", outcome)


def test_stopped_ranks_that_torchrun_may_start_again_have_left() -> None:
    made = FinalState(may_begin_again=True)
    for number, (origin, event) in enumerate([(rank(0), STARTED), (rank(0), ASKED)]):
        made.take(Record(number, 10**18 + number, number, origin, event))
    assert (made.outcome, made.has_failed) == ("left", False)


def test_rank_that_died_with_its_monitor_does_not_keep_its_node_in_the_job() -> None:
    """Only the monitor of another rank says so."""
    begun = [(rank(0), STARTED), (rank(1), STARTED), (rank(0), COMPLETED)]
    excluded = (rank(0), events.RankStoodInFor(1, "excluded", 0.01))
    assert state(*begun[:2], excluded).outcome is None
    assert state(*begun[:2], excluded, begun[2]).outcome == "completed"
    assert state(*begun, (rank(0), events.RankStoodInFor(1, "completed", 0.01))).outcome is None


def test_next_call_of_the_function_begins_anew() -> None:
    first = [(rank(0), STARTED), (rank(0), LEFT)]
    assert state(*first, (rank(0, 1), STARTED)).outcome is None
    assert state(*first, (rank(0, 1), STARTED), (rank(0, 1), COMPLETED)).outcome == "completed"


def test_recorded_job_that_was_restarted_has_completed() -> None:
    made = FinalState()
    for record in job([Fault("exception", 1, 0)]).records:
        made.take(record)
    assert made.outcome == "completed"


def test_ranks_that_torchrun_may_start_again_have_not_failed_for_good() -> None:
    made = FinalState(may_begin_again=True)
    told = [(rank(0), STARTED), (rank(1), STARTED), (rank(0), KILLED), (rank(1), KILLED)]
    for number, (origin, event) in enumerate(told):
        made.take(Record(number, 10**18 + number, number, origin, event))
    assert (made.outcome, made.has_failed) == (None, True)
    made.take(Record(9, 10**18 + 9, 9, Origin("job", "n0", "rank", 20, cycle=1, initial_rank=0), STARTED))
    assert (made.outcome, made.has_failed) == (None, False)
    made.take(Record(10, 10**18 + 10, 10, Origin("job", "n0", "rank", 20, cycle=1, initial_rank=0), COMPLETED))
    assert made.outcome == "completed"
