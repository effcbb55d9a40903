"""A run folder is enough to say how a job is doing: states, steps, sections against their limits, restarts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilience.attribution.incidents import fold
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import ExceptionInfo, Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record, from_line, to_line
from resilience.history.history import History
from resilience.report.condensed import report
from resilience.run_folder.load import Reader
from resilience.status import first_read, last_fault, state
from resilience.status.state import FaultNow, Now, RankNow, Section, Watcher, order
from resilience.status.view import status_lines
from resilience.system.render import plain
from resilience.telemetry import rank_snapshot
from resilience.telemetry.metrics import MetricView
from tests.support import large_run, record_streams
from tests.support.agreement import written
from tests.support.launch_streams import Fault, Kind, Launched, launched
from tests.support.nested_streams import nested
from tests.support.node_stories import NodeStory
from tests.support.record_streams import STARTED_NS
from tests.support.torchrun_streams import in_cycle, stopped_in_restart, under_torchrun

START = STARTED_NS / 1e9


def now_of(folder: Path, after: float = 60.0) -> Now:
    now = Watcher(folder, lambda: START + after).look()
    assert now is not None
    return now


def show(
    folder: Path, rank: int, node: str = "node0", cycle: int = 1, alive_at: float | None = None, **more: float
) -> None:
    """Leave signs as a monitor does. Its monotonic clock is at 100 when the job begins."""
    origin = Origin("job", node, "monitor", 500 + rank, cycle=cycle, initial_rank=rank, world_size=4)
    opened = tuple(
        rank_snapshot.SnapshotSection(name, 100.0 + at, 60.0 if name == "data" else None) for name, at in more.items()
    )
    made = rank_snapshot.RankSnapshot(
        origin, "run", 158.0, START - 100, step=7 + rank, step_at=157.0, heartbeat_at=157.5, sections=opened
    )
    made = msgspec.structs.replace(made, alive_at=alive_at)
    assert rank_snapshot.write(folder, made)


def test_running_job_shows_ranks_states_steps_and_sections(tmp_path: Path) -> None:
    folder = launched([Fault("kill", 1)], nodes=2, is_running=True).write(tmp_path / "run")
    for rank in range(4):
        show(folder, rank, f"node{rank // 2}", epoch=10.0, data=50.0)
    now = now_of(folder)
    assert (now.phase, now.cycle, now.restarts, now.restarts_left) == ("running", 1, 1, 9)
    assert (now.world_size, now.nodes, now.states) == (4, 2, {"active": 4})
    assert [rank.step for rank in now.ranks] == [7, 8, 9, 10]
    first = now.ranks[0]
    assert first.section is not None
    assert (first.section.name, first.sections) == ("data", 2)
    # It was open when its monitor looked; from then on it may have ended.
    assert first.section.open_s == pytest.approx(8.0) and first.section.share == pytest.approx(8 / 60)
    assert first.silent_s == pytest.approx(0.5) and first.shown_s == pytest.approx(2.0)
    assert now.failure is not None
    assert (now.failure.rank, now.failure.what) == (1, "process 1001 ended (SIGKILL)")


def agent_killed(limit: str = "agent") -> Launched:
    """A job whose agent was killed: its monitors have ended the workers. limit: why, as they recorded it."""
    told = launched([Fault("kill", 1)], is_running=True)
    for rank in range(2):
        last = told.files["node0", rank][-1]
        for event in (
            events.RankSignalled(("SIGTERM", "SIGCONT"), limit),
            events.RankExited(False, signal="SIGTERM"),
        ):
            told.files["node0", rank].append(msgspec.structs.replace(last, event=event))
    return told


def test_job_whose_monitors_ended_all_ranks_for_want_of_an_agent_is_lost_at_once(tmp_path: Path) -> None:
    """The report says so too: two views of one fact."""
    folder = agent_killed().write(tmp_path / "run")
    now = now_of(folder, after=60.0)
    assert (now.phase, now.is_well) == ("lost", False)
    assert "all ranks ended" in now.detail
    assert now_of(folder, after=now.since_s - now.last_record_s).phase == "lost"
    assert report(Reader(folder)).end == "ranks 0-1 lost; the launcher recorded no end"


def test_job_whose_ranks_have_ended_is_lost_once_its_agent_had_time_to_record_it(tmp_path: Path) -> None:
    folder = agent_killed("section:train").write(tmp_path / "run")
    now = now_of(folder, after=60.0)
    assert (now.phase, now.is_well) == ("lost", False)
    assert "all ranks ended" in now.detail
    assert now_of(folder, after=(now.since_s - now.last_record_s) + 1.0).phase == "running"
    assert report(Reader(folder)).end == "ranks 0-1 lost; the launcher recorded no end"


def test_job_of_which_one_agent_was_killed_is_not_lost_while_another_one_may_decide(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.monitor("a", 0, 20.0, events.RankSignalled(("SIGTERM", "SIGCONT"), "agent"))
    told.monitor("a", 0, 20.1, events.RankExited(False, signal="SIGTERM"))
    raised = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(code=1), pid=1001)
    told.monitor("b", 1, 20.1, events.RankInterrupted(raised))
    told.exited("b", 20.2, 1, code=1, expected=False)
    folder = told.write(tmp_path / "run")
    assert now_of(folder, after=20.5).phase == "running"
    incidents = report(Reader(folder)).incidents
    assert [incident.status for incident in incidents] == ["unfinished"]
    assert now_of(folder, after=26.0).phase == "lost"


def test_job_that_shows_no_sign_of_life_is_lost(tmp_path: Path) -> None:
    folder = launched(is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0)
    assert now_of(folder, after=600.0).phase == "running"  # a program that shows nothing new is none that is dead
    show(folder, 0, cycle=0, alive_at=160.0)
    assert now_of(folder, after=80.0).phase == "running"
    now = now_of(folder, after=600.0)
    assert (now.phase, now.is_well, now.detail) == (
        "lost",
        False,
        "no sign of life for 9 min 00 s; expected every 4 s",
    )


def touched(folder: Path, after: float) -> None:
    """Give all files this time of change, as the clock of the file server has it."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        os.utime(path, (START + after, START + after))


def test_job_whose_nodes_clocks_are_behind_is_not_lost_while_its_files_change(tmp_path: Path) -> None:
    folder = launched(is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0, alive_at=160.0)  # a minute after the start
    touched(folder, 598.0)
    assert now_of(folder, after=600.0).phase == "running"
    assert now_of(folder, after=590.0).phase == "running"  # the file server's clock may be ahead
    assert now_of(folder, after=640.0).phase == "lost"
    orphaned = agent_killed("section:train").write(tmp_path / "orphaned")
    touched(orphaned, 598.0)
    assert now_of(orphaned, after=600.0).phase == "running"
    assert now_of(orphaned, after=604.0).phase == "lost"


def test_job_that_waits_for_a_node_between_two_cycles_is_not_lost(tmp_path: Path) -> None:
    """Its workers are gone, so no monitor has anything to report until the next cycle."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 20.0, failed="b", silently=True)
    told.agent("a", 20.2, events.CyclePhaseStarted("rendezvous"))
    folder = told.write(tmp_path / "run")
    for rank, node in enumerate("ab"):
        show(folder, rank, node, cycle=0, alive_at=119.0)
    now = now_of(folder, after=300.0)
    assert (now.phase, now.is_well, now.detail) == ("restarting", True, "")


@pytest.mark.parametrize("outcome", ["completed", "exhausted", "shutdown", "preempted"])
def test_job_has_ended_as_its_last_cycle_though_no_agent_recorded_its_end(
    tmp_path: Path, outcome: events.CycleOutcome
) -> None:
    """No other cycle follows. The agents were killed, or the disk was full. The report says so too."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    for rank, node in enumerate("ab"):
        told.exited(node, 20.0, rank)
        told.stop(node, 20.0, outcome)
    folder = told.write(tmp_path / "run")
    for rank, node in enumerate("ab"):
        show(folder, rank, node, cycle=0, alive_at=119.0)
    assert now_of(folder, after=21.0).phase == "running"  # an agent may record it yet
    for after in (26.0, 300.0):
        now = now_of(folder, after)
        assert (now.phase, now.outcome, now.is_well) == ("ended", outcome, outcome == "completed")
        assert now.detail == "not all agents recorded the end of the job"
    end = f"the launcher: {outcome}: not all agents recorded the end of the job"
    assert report(Reader(folder)).end.endswith(end)
    assert ended_in_metrics(told, "a") == {
        {"exhausted": "failed", "shutdown": "failed", "preempted": "stopped"}.get(outcome, outcome)
    }


def ended_in_metrics(told: NodeStory, node: str) -> set[str]:
    """Return how the job ended by a node's metrics, a minute after its last record."""
    records = told.of_node(node)
    view = MetricView(lambda: records[-1].mono_ns + 60 * 10**9)
    for record in records:
        view.take(record)
    return {labels[0] for name, labels in view.samples() if name == "resilience_ended_timestamp_seconds"}


@pytest.mark.parametrize("is_seen_by_agent", [True, False])
def test_job_has_completed_if_all_ranks_have_though_its_agent_was_killed(
    tmp_path: Path, is_seen_by_agent: bool
) -> None:
    """Status, report and metrics say so alike."""
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=2)
    told.spawn("a", 1.0, [0, 1])
    for rank in range(2):
        told.monitor("a", rank, 20.0, events.RankExited(goodbye=True, code=0))
        if is_seen_by_agent:
            told.exited("a", 20.0, rank)
    folder = told.write(tmp_path / "run")
    for rank in range(2):
        show(folder, rank, "a", cycle=0, alive_at=119.0)
    now, found = now_of(folder, after=60.0), report(Reader(folder))
    assert (now.phase, now.outcome, now.is_well) == ("ended", "completed", True)
    assert now.detail == "all ranks completed, but no agent recorded the end of the job"
    assert found.end == f"completed on ranks 0-1; the launcher: completed: {now.detail}"
    assert found.is_ended and found.launched is not None
    assert (found.launched.outcome, found.launched.exit_code) == ("completed", None)
    assert ended_in_metrics(told, "a") == {"completed"}


def test_job_has_not_completed_if_a_rank_ended_because_it_was_told_to(tmp_path: Path) -> None:
    """Its agent was killed, and its monitor ended it; a program may then end with status 0."""
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.spawn("a", 1.0, [0])
    told.monitor("a", 0, 20.0, events.RankSignalled(("SIGTERM", "SIGCONT"), "agent"))
    told.monitor("a", 0, 20.1, events.RankExited(goodbye=True, code=0))
    folder = told.write(tmp_path / "run")
    assert now_of(folder, after=60.0).outcome is None
    assert report(Reader(folder)).launched.outcome is None  # type: ignore[union-attr]
    assert ended_in_metrics(told, "a") == set()


def ended_early(told: NodeStory, how: str) -> None:
    """The agent ends both workers, the second one with status 0, for another cycle or a stop."""
    is_asked, is_bad = how in ("asked to stop", "asked to leave"), how == "exit 1"
    if is_asked:
        told.agent("a", 19.0, events.StopRequested("SIGTERM", 30.0, leaves=how == "asked to leave"))
    if how == "decided":
        told.agent("a", 19.0, events.RestartDecided("restart", "rank 0 exited", "rank 0 exited", 0, 1, 9))
    if how == "stopped":
        told.agent("a", 19.0, events.CyclePhaseEnded("run", "completed", 18.0))
    for rank in range(2):
        told.exited("a", 20.0, rank, code=int(is_bad and rank == 0), expected=not (is_bad and rank == 0))
    if how in ("interrupted", "failed"):
        told.stop("a", 20.0, "interrupted" if how == "interrupted" else "failed")


@pytest.mark.parametrize(
    "how", ["interrupted", "failed", "decided", "exit 1", "stopped", "asked to stop", "asked to leave"]
)
def test_job_has_not_completed_if_its_agent_ended_the_workers_though_their_calls_completed(
    tmp_path: Path, how: str
) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=2)
    told.spawn("a", 1.0, [0, 1])
    for rank in range(2):
        told.wrapper("a", rank, 2.0, events.CallStarted("train", 2, "1", "2", "3", "h", "forked"))
        told.wrapper("a", rank, 18.0, events.CallEnded("completed", 1, 16.0))
    ended_early(told, how)
    assert ended_in_metrics(told, "a") == set()
    found = report(Reader(told.write(tmp_path / "run")))
    assert found.launched is not None and found.launched.outcome is None


def test_job_has_completed_though_a_node_that_waits_for_a_place_was_asked_to_stop(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.spawn("a", 1.0, [0])
    told.agent("b", 10.0, events.CyclePhaseStarted("rendezvous"))
    told.agent("b", 15.0, events.StopRequested("SIGTERM", 30.0))
    told.exited("a", 20.0, 0)
    assert ended_in_metrics(told, "a") == {"completed"}
    now = now_of(told.write(tmp_path / "run"), after=60.0)
    assert (now.phase, now.outcome) == ("ended", "completed")


def test_job_has_completed_if_one_agent_says_so_and_the_other_one_lost_its_power(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.exited("a", 20.0, 0)
    told.stop("a", 20.0)
    told.agent("a", 21.0, events.JobEnded("completed", 0))
    folder = told.write(tmp_path / "run")
    now = now_of(folder, after=60.0)
    assert (now.phase, now.outcome) == ("ended", "completed")
    assert "the launcher: completed, exit status 0" in report(Reader(folder)).end


def test_job_whose_agent_has_come_back_and_waits_has_not_ended(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.spawn("a", 1.0, [0])
    told.exited("a", 20.0, 0, None)
    told.stop("a", 20.0, "preempted")
    told.new_agent("a", 11)
    told.agent("a", 30.0, events.CyclePhaseStarted("rendezvous"))
    assert ended_in_metrics(told, "a") == set()
    assert now_of(told.write(tmp_path / "run"), after=60.0).outcome is None


def test_job_of_which_one_node_completed_and_one_agent_recorded_nothing_has_not_ended(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.exited("a", 20.0, 0)
    told.stop("a", 20.0)
    assert now_of(told.write(tmp_path / "run"), after=30.0).phase == "running"


def test_job_ends_as_the_nodes_that_it_did_not_lose(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.agent("a", 19.9, events.RestartDecided("stop", "lost b", "node b is lost", 0, 0, 1, lost_node="b"))
    told.stop("a", 20.0, "exhausted")
    now = now_of(told.write(tmp_path / "run"), after=30.0)
    assert (now.phase, now.outcome) == ("ended", "exhausted")


def test_attempts_are_apart(tmp_path: Path) -> None:
    """A folder of an older version may hold several."""
    told = launched([Fault("exhausted", 1)])
    later = launched(is_running=True)
    for key, records in later.files.items():
        told.files[key] += [
            msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, attempt=1))
            for record in records
        ]
    now = now_of(told.write(tmp_path / "run"))
    assert (now.phase, now.attempt, now.outcome, now.failure) == ("running", 1, None, None)
    assert now.states == {"active": 2}


@pytest.mark.parametrize(("alive_at", "open_s", "silent_s"), [(188.0, 38.0, 30.5), (159.0, 9.0, 1.5), (None, 8.0, 0.5)])
def test_rank_is_silent_and_its_section_open_as_long_as_its_monitor_saw_it(
    alive_at: float | None, open_s: float, silent_s: float, tmp_path: Path
) -> None:
    """A monitor that cannot write, on a full disk or because it is stopped, says nothing of a healthy rank."""
    folder = launched(is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0, alive_at=alive_at, data=50.0)
    rank = now_of(folder, after=90.0).ranks[0]
    assert rank.section is not None
    assert (rank.section.open_s, rank.silent_s) == (pytest.approx(open_s), pytest.approx(silent_s))
    assert rank.section.share == pytest.approx(open_s / 60)
    shown_s = 190.0 - (alive_at or 158.0)
    assert rank.shown_s == pytest.approx(shown_s)
    lines = " ".join(plain(line) for line in status_lines(now_of(folder, after=90.0), 80, 12))
    assert ("nothing new of rank 0: no monitor writes" in lines) == (shown_s > 12.0)


def test_monitor_that_writes_no_more_is_found_whatever_clock_the_reader_has(tmp_path: Path) -> None:
    folder = launched(is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0, alive_at=159.0)
    show(folder, 1, cycle=0, alive_at=160.0)
    assert now_of(folder, after=74.0).old == (0, 1)
    touched(folder, 74.0)
    assert now_of(folder, after=74.0).old == ()  # the nodes' clocks are behind
    show(folder, 1, cycle=0, alive_at=172.0)
    touched(folder, 74.0)
    assert now_of(folder, after=74.0).old == (0,)


def test_rank_whose_monitor_writes_no_more_is_marked_and_gives_the_job_no_step(tmp_path: Path) -> None:
    folder = launched(is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0, alive_at=159.0)
    show(folder, 1, cycle=0, alive_at=172.0)
    touched(folder, 74.0)
    now = now_of(folder, after=74.0)
    assert [(rank.rank, rank.is_old) for rank in now.ranks] == [(0, True), (1, False)]
    text = "\n".join(plain(line) for line in status_lines(now, 80, 12))
    assert re.search(r"^  step +8$", text, re.MULTILINE)
    assert [line.split()[-2:] for line in text.splitlines() if line.strip().startswith("0 ")] == [["old", "15.0s"]]


def test_steps_are_shown_with_their_age_while_no_monitor_writes(tmp_path: Path) -> None:
    folder = launched(is_running=True).write(tmp_path / "run")
    for rank in range(2):
        show(folder, rank, cycle=0, alive_at=159.0)
    text = "\n".join(plain(line) for line in status_lines(now_of(folder, after=74.0), 80, 12))
    assert re.search(r"^  step +7 to 8, 15 s ago$", text, re.MULTILINE)


def test_signs_of_the_worker_before_do_not_count(tmp_path: Path) -> None:
    folder = launched([Fault("kill", 1)], is_running=True).write(tmp_path / "run")
    show(folder, 0, cycle=0, data=50.0)
    show(folder, 1, data=50.0)
    now = now_of(folder)
    assert [rank.step for rank in now.ranks] == [None, 8]
    assert [rank.sections for rank in now.ranks] == [0, 1]


def test_without_signs_states_are_known_all_the_same(tmp_path: Path) -> None:
    now = now_of(launched(is_running=True).write(tmp_path / "run"))
    assert now.states == {"active": 2}
    assert [(rank.step, rank.section, rank.silent_s) for rank in now.ranks] == [(None, None, None)] * 2


@pytest.mark.parametrize(
    ("kind", "outcome"), [("exhausted", "exhausted"), ("preempt", "preempted"), ("kill", "completed")]
)
def test_end_is_the_launchers(kind: Kind, outcome: str, tmp_path: Path) -> None:
    now = now_of(launched([Fault(kind, 0)], nodes=2).write(tmp_path / "run"))
    assert (now.phase, now.outcome, now.is_well) == ("ended", outcome, outcome == "completed")


@pytest.mark.parametrize("has_newcomer", [True, False])
def test_job_that_lost_a_node_ends_with_the_nodes_that_stayed(has_newcomer: bool, tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 20.0, failed="b", silently=True)
    told.join("a", 20.2, 25.0, cycle=1, why="failure")
    if has_newcomer:
        told.join("c", 22.0, 25.0, cycle=1, group=1)
    told.agent("d", 1.0, events.CyclePhaseStarted("rendezvous"))  # a spare that never got a place
    nodes = "ac" if has_newcomer else "a"
    told.start(nodes, 25.0, cycle=1)
    folder = told.write(tmp_path / "running")
    assert now_of(folder).phase == "running"
    told.finish(nodes, 40.0, cycle=1)
    now = now_of(told.write(tmp_path / "ended"))
    assert (now.phase, now.outcome, now.is_well) == ("ended", "completed", True)


def test_job_that_a_lost_node_ended_is_over(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    lost = events.RestartDecided("stop", "lost b", "node b is lost", 0, 0, 1, lost_node="b")
    told.agent("a", 19.9, lost)
    told.stop("a", 20.0, "exhausted")
    told.agent("a", 20.2, events.JobEnded("exhausted", 1, "node b is lost"))
    now = now_of(told.write(tmp_path / "run"))
    assert (now.phase, now.outcome) == ("ended", "exhausted")


def test_ranks_that_the_launcher_went_on_without_are_not_shown(tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 20.0, failed="b", silently=True)
    told.join("a", 20.2, 25.0, cycle=1, why="failure", size=1)
    told.start("a", 25.0, cycle=1)
    now = now_of(told.write(tmp_path / "run"))
    assert (now.phase, now.world_size, now.nodes, now.states) == ("running", 1, 1, {"active": 1})


def test_rank_that_moved_is_shown_on_its_present_node_in_any_order_of_files(tmp_path: Path) -> None:
    """Node c is lost, and node a takes its place: the file of c is read last."""
    told = NodeStory()
    told.join("bc", 0.0, 1.0)
    told.start("bc", 1.0)
    told.break_off("bc", 20.0, failed="c", silently=True)
    told.join("b", 20.2, 25.0, cycle=1, why="failure")
    told.join("a", 22.0, 25.0, cycle=1, group=1)
    told.start("ba", 25.0, cycle=1)
    folder = told.write(tmp_path / "run")
    show(folder, 1, "a", cycle=1)
    moved = now_of(folder).ranks[1]
    assert (moved.node, moved.pid, moved.step, moved.state) == ("a", 2001, 8, "active")


def test_each_phase_shows_as_it_comes(tmp_path: Path) -> None:
    """Records arrive one by one; a watcher sees the job start, run, restart, run and end."""
    told = launched([Fault("hang", 1)])
    watcher = Watcher(tmp_path, lambda: START)
    (tmp_path / "records").mkdir()
    names = {"agent": "node0-agent.jsonl", **{str(rank): f"node0-{rank}.jsonl" for rank in range(2)}}
    for name in names.values():
        (tmp_path / "records" / name).touch()
    assert watcher.look() is None
    seen: list[tuple[str, str]] = []
    for record in told.interleaved(0):
        rank = record.origin.initial_rank
        with (tmp_path / "records" / names["agent" if rank is None else str(rank)]).open("ab") as file:
            file.write(to_line(record))
        now = watcher.look()
        assert now is not None
        states = ", ".join(sorted(now.states))
        if not seen or seen[-1] != (now.phase, states):
            seen.append((now.phase, states))
    assert [phase for number, (phase, _) in enumerate(seen) if not number or seen[number - 1][0] != phase] == [
        "starting",
        "running",
        "restarting",
        "starting",
        "running",
        "ended",
    ]
    assert ("running", "active, suspect") in seen


@pytest.mark.parametrize("kind", get_args(record_streams.Kind))
def test_job_without_the_launcher(kind: record_streams.Kind, tmp_path: Path) -> None:
    told = record_streams.job([record_streams.Fault(kind, 1, 0)], spares=1)
    now = now_of(told.write(tmp_path / "run"))
    assert (now.phase, now.outcome) == ("ended", "completed") or kind == "monitor"
    assert (now.cycle, now.restarts, now.iterations) == (None, None, told.iterations - 1)
    for rank, records in told.files.items():
        ended = next(
            n for n, r in enumerate(records) if isinstance(r.event, events.StageEnded) and r.event.stage == "run"
        )
        told.files[rank] = records[:ended]
    assert now_of(told.write(tmp_path / "live")).phase == "running"


@pytest.mark.parametrize("said", ["silent", "stood in for"])
def test_ranks_of_a_lost_node_are_out_of_a_job_without_the_launcher(said: str, tmp_path: Path) -> None:
    """The lost node records nothing of its end, and its files may be read before or after the others'."""
    records = [record for record in record_streams.job(world=4).records if record.origin.initial_rank != 3]
    lost = [record for record in record_streams.job(world=4).files[3] if record.mono_ns <= records[0].mono_ns + 10**9]
    moved = [
        msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, node=node))
        for record, node in ((record, "a-node" if said == "silent" else "z-node") for record in lost)
        if not isinstance(record.event, events.CallEnded | events.RankExited | events.MonitorEnded)
    ]
    monitors = next(record for record in records if record.origin.role == "monitor")
    event = (
        events.NodeFellSilent("lost", 30.0, 30.0, (3,))
        if said == "silent"
        else events.RankStoodInFor(3, "excluded", 0.1)
    )
    told = msgspec.structs.replace(monitors, event=event, sequence=10_000)
    folder = written([*records[:-2], told, *records[-2:], *moved], tmp_path / "run")
    now = now_of(folder, after=600.0)
    assert now.states["excluded"] == 1
    assert (now.phase, now.outcome) == ("ended", "completed")


@pytest.mark.parametrize("lost", ["a", "z"])
def test_job_that_torchrun_continued_without_a_node_ends_with_the_ranks_of_its_last_cycle(
    lost: str, tmp_path: Path
) -> None:
    """Node b has ranks 0 and 1, as it had before. The lost node has no record of the end of ranks 2 and 3."""
    whole = record_streams.job(world=4).files
    again = record_streams.job(world=2, started_ns=STARTED_NS + 10**10).files
    records = [record for rank in (0, 1) for record in (*whole[rank], *_in_cycle_1(again[rank]))]
    records = [_on(record, "b") for record in records]
    ends = (events.CallEnded, events.IterationEnded, events.RankExited, events.MonitorEnded)
    records += [_on(record, lost) for rank in (2, 3) for record in whole[rank] if not isinstance(record.event, ends)]
    now = now_of(written(records, tmp_path / "run"))
    assert (now.phase, now.outcome, now.world_size) == ("ended", "completed", 2)
    assert not [rank for rank in now.ranks if rank.rank > 1]


@pytest.mark.parametrize(
    ("left", "after", "phase"), [(1, 4.0, "restarting"), (1, 600.0, "ended"), (0, 4.0, "ended"), (None, 4.0, "ended")]
)
def test_job_that_torchrun_may_start_again_is_restarting(
    left: int | None, after: float, phase: str, tmp_path: Path
) -> None:
    """Rank 3 died, the others restarted in place, and torchrun stopped them: the last fault is that of rank 3."""
    died = record_streams.job([record_streams.Fault("kill", 3, 0)], world=4, seed=3)
    stopped = stopped_in_restart(died, 3, events.RestartEnded)
    now = now_of(written(stopped if left is None else under_torchrun(stopped, left), tmp_path / "run"), after)
    assert (now.phase, now.restarts, now.restarts_left) == (phase, None if left is None else 0, left)
    assert now.failure is not None
    assert now.failure.rank == (2 if left is None else 3)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_torchrun_went_on_without_do_not_decide_how_the_job_ended(world: int, tmp_path: Path) -> None:
    """A rank died in the first cycle. The second one has 2 ranks, which are asked to stop."""
    died = stopped_in_restart(record_streams.job([record_streams.Fault("kill", 1, 0)], world=world), 1)
    asked = in_cycle(stopped_in_restart(record_streams.job(world=2), -1, events.IterationStarted), 1)
    folder = written(under_torchrun(died, 2) + under_torchrun(asked, 1), tmp_path / "run")
    for after in (310.0, 600.0):
        now = now_of(folder, after)
        assert (now.phase, now.outcome) == ("ended", "stopped")


def test_rank_that_was_excluded_in_an_earlier_cycle_of_torchrun_is_awaited_in_this_one(tmp_path: Path) -> None:
    """Rank 2 died with its monitor in the first cycle, and torchrun started it again."""
    whole = record_streams.job([record_streams.Fault("kill", 2, 0)], world=3)
    excluded = next(record for record in whole.files[2] if isinstance(record.event, events.RankStoodInFor))
    by = msgspec.structs.replace(excluded.origin, initial_rank=0, pid=500)
    whole.files[0].append(msgspec.structs.replace(excluded, origin=by))
    again = stopped_in_restart(record_streams.job(world=3), 2, events.IterationStarted)
    running = [record for record in again if record.origin.initial_rank != 2 or record.origin.iteration is None]
    records = stopped_in_restart(whole, 2) + whole.files[0][-1:] + in_cycle(running, 1)
    assert now_of(written(under_torchrun(records, 1), tmp_path / "run"), 600.0).phase == "running"


def _in_cycle_1(records: list[Record]) -> list[Record]:
    return [msgspec.structs.replace(each, origin=msgspec.structs.replace(each.origin, cycle=1)) for each in records]


def _on(record: Record, node: str) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, node=node))


def test_suspect_rank_comes_first_then_the_one_nearest_its_limit() -> None:
    ranks = now_ranks()
    assert [rank.rank for rank in order(ranks)] == [3, 2, 1, 0]


def now_ranks() -> tuple[RankNow, ...]:
    return (
        RankNow(0, "n", "active", silent_s=1.0),
        RankNow(1, "n", "active", silent_s=3.0),
        RankNow(2, "n", "active", section=Section("data", 50.0, 60.0)),
        RankNow(3, "n", "suspect"),
    )


def test_newest_fault_is_reported(tmp_path: Path) -> None:
    now = now_of(launched([Fault("raise", 1), Fault("hang", 0)], nodes=2).write(tmp_path / "run"), after=20.0)
    assert isinstance(now.failure, FaultNow)
    assert (now.failure.rank, now.failure.what) == (0, "process 2000 ended (SIGKILL)")


def test_torn_and_foreign_files_are_no_hindrance(tmp_path: Path) -> None:
    told: Launched = launched(is_running=True)
    folder = told.write(tmp_path / "run")
    (folder / "records" / "node0-7.jsonl").write_bytes(b"\xff\xfe garbage\n{")
    (folder / "timings").mkdir()
    (folder / "timings" / "node0-0.signs").write_bytes(b"{")
    now = now_of(folder)
    assert (now.states, now.damaged) == ({"active": 2}, 1)


def test_damage_at_both_ends_of_a_long_file_is_counted_and_the_cut_line_is_none(tmp_path: Path) -> None:
    folder = launched([Fault("hang", 0)] * 30).write(tmp_path / "run")
    path = max((folder / "records").iterdir(), key=lambda path: path.stat().st_size)
    assert path.stat().st_size > first_read.HEAD + first_read.TAIL
    assert now_of(folder).damaged == 0
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"torn", *lines[1:-2], b"\xff{", *lines[-2:]]))
    assert now_of(folder).damaged == 2


def test_ranks_without_a_file_are_named_once_all_that_started_have_one(tmp_path: Path) -> None:
    folder = launched([Fault("hang", 0)], nodes=2, is_running=True).write(tmp_path / "launched")
    assert now_of(folder, 90.0).absent == ()
    for path in (folder / "records").glob("node1-[0-9]*"):
        path.unlink()
    assert now_of(folder, 30.0).absent == ()
    now = now_of(folder, 90.0)
    assert (now.world_size, now.absent) == (4, (2, 3))
    text = " ".join(" ".join(plain(line) for line in status_lines(now, 80, 20)).split())
    assert "records no records of ranks 2-3, which must have run" in text
    wrapped = record_streams.job(world=4).write(tmp_path / "wrapped")
    assert now_of(wrapped, 90.0).absent == ()
    (wrapped / "records" / "node-2.jsonl").unlink()
    assert now_of(wrapped, 90.0).absent == (2,)


def test_record_files_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path) -> None:
    folder = launched([Fault("hang", 0)], nodes=2, is_running=True).write(tmp_path / "run")
    contents = {name: (folder / "records" / name).read_bytes() for name in ("node1-2.jsonl", "node1-agent.jsonl")}
    watcher = Watcher(folder, lambda: START + 90.0)
    for name in contents:
        (folder / "records" / name).unlink()
        (folder / "records" / name).mkdir()  # root may read any file
    now = watcher.look()
    assert now is not None
    assert now.unreadable == tuple(f"{name}: Is a directory" for name in contents)
    assert (now.absent, now.absent_agents, now.has_all_records) == ((), (), False)
    text = " ".join(" ".join(plain(line) for line in status_lines(now, 80, 20)).split())
    assert "records cannot be read, so what follows lacks them: node1-2.jsonl: Is a directory, node1-agent" in text
    for name, content in contents.items():
        (folder / "records" / name).rmdir()
        (folder / "records" / name).write_bytes(content)
    now = watcher.look()
    assert now is not None and (now.unreadable, now.has_all_records) == ((), True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_agents_without_a_file_are_named_once_all_that_started_have_one(nodes: int, tmp_path: Path) -> None:
    """A reader may see the first records of a monitor before those of its agent."""
    folder = launched(nodes=nodes, is_running=True).write(tmp_path / "run")
    assert now_of(folder, 90.0).absent_agents == ()
    last = f"node{nodes - 1}"
    (folder / "records" / f"{last}-agent.jsonl").unlink()
    early, late = now_of(folder, 30.0), now_of(folder, 90.0)
    assert (early.absent_agents, early.has_all_records) == ((), True)
    assert (late.absent_agents, late.has_all_records) == ((last,), False)


def test_agent_without_a_file_is_also_named_when_another_cycle_has_just_begun(tmp_path: Path) -> None:
    later_s = 10_000
    records = [
        record
        if record.origin.cycle == 0
        else msgspec.structs.replace(
            record, wall_ns=record.wall_ns + later_s * 10**9, mono_ns=record.mono_ns + later_s * 10**9
        )
        for record in launched([Fault("hang", 2)], nodes=2, is_running=True).records
    ]
    folder = written(records, tmp_path / "run")
    (folder / "records" / "node1-agent.jsonl").unlink()
    assert now_of(folder, later_s + 10.0).absent_agents == ("node1",)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_whose_workers_are_being_started_are_not_absent(tmp_path: Path, nodes: int) -> None:
    """Their monitors create the files. Of two nodes, only the first one runs its workers yet."""
    whole = launched(nodes=nodes, is_running=True).records
    last = f"node{nodes - 1}"
    began = next(n for n, each in enumerate(whole) if isinstance(each.event, events.WorkerStarted))
    begun = [
        n for n, each in enumerate(whole) if each.origin.node == last and isinstance(each.event, events.WorkerStarted)
    ]
    records = (
        whole[: began + 1]
        if nodes == 1
        else [each for n, each in enumerate(whole) if each.origin.node != last or n < begun[0]]
    )
    assert now_of(written(records, tmp_path / "run"), 90.0).absent == ()


def test_calls_that_are_over_are_the_end_of_the_job_unless_another_one_begins_soon(tmp_path: Path) -> None:
    """A Wrapper leaves nothing behind in a process: that this ends later is nowhere on record."""
    told = record_streams.job([record_streams.Fault("exception", 1, 0, 5)], world=3).records
    records = [record for record in told if not isinstance(record.event, events.RankExited)]
    last = (max(record.wall_ns for record in records) - STARTED_NS) / 1e9
    folder = written(records, tmp_path / "run")
    assert (now_of(folder, last + 1.0).phase, now_of(folder, last + 1.0).states) == ("running", {"active": 3})
    touched(folder, last + 40.0)  # the clocks of the nodes are 40 s behind
    assert now_of(folder, last + 40.0 + state.BETWEEN_CALLS).phase == "running"
    touched(folder, last)
    now = now_of(folder, last + state.BETWEEN_CALLS + 1.0)
    assert (now.phase, now.outcome, now.is_well, now.states) == ("ended", "completed", True, {})
    again = [record for record in records if record.origin.initial_rank == 0][:2]
    late = [
        msgspec.structs.replace(
            r, wall_ns=r.wall_ns + round(last * 1e9), origin=msgspec.structs.replace(r.origin, call=1)
        )
        for r in again
    ]
    with (folder / "records" / "node-0.jsonl").open("ab") as file:
        file.write(b"".join(map(to_line, late)))
    assert now_of(folder, last + 60.0).phase == "running"


def test_call_that_is_over_needs_no_monitor_to_say_so(tmp_path: Path) -> None:
    """The monitors are lost, so nothing but the end of the call is on record."""
    told = record_streams.job([record_streams.Fault("exception", 1, 0, 5)], world=3).records
    records = [record for record in told if not isinstance(record.event, events.RankExited | events.MonitorEnded)]
    last = (max(record.wall_ns for record in records) - STARTED_NS) / 1e9
    now = now_of(written(records, tmp_path / "run"), last + state.BETWEEN_CALLS + 1.0)
    assert (now.phase, now.outcome) == ("ended", "completed")


def two_calls(folder: Path) -> Path:
    """Rank 2 fails twice in the first call, rank 3 once in the second one, 100 s later."""
    first = record_streams.job([record_streams.Fault("exception", 2, 0), record_streams.Fault("exception", 2, 1)])
    second = record_streams.job([record_streams.Fault("exception", 3, 0)], started_ns=STARTED_NS + 100 * 10**9)
    later = [
        msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, call=1))
        for record in second.records
    ]
    return written([*first.records, *later], folder)


def test_last_fault_of_a_second_call_is_not_one_of_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_read, "TAIL", 1 << 20)  # the faults of both calls are read
    now = now_of(two_calls(tmp_path / "run"), 200.0)
    assert now.failure is not None
    assert (now.failure.rank, now.failure.ago_s < 100.0) == (3, True)


def test_fault_of_a_second_call_is_read_further_back_from_its_own_iteration(tmp_path: Path) -> None:
    """The first call has a fault of the same iteration."""
    folder = two_calls(tmp_path / "run")
    paths = sorted((folder / "records").iterdir())
    records = [from_line(line) for path in paths for line in path.read_bytes().splitlines()]
    known = last_fault.LastFault()
    for record in records:
        if record.origin.call == 0:
            known.take(record)
    known.look_back((0, 0, 1, 1), paths)
    fault = known.newest(History().cycles)
    assert fault is not None
    assert (fault.rank, fault.call, fault.iteration) == (3, 1, 0)


@pytest.mark.parametrize("skew_s", [-60, 0, 60])
def test_last_fault_has_the_order_of_the_store_and_not_of_two_nodes_clocks(tmp_path: Path, skew_s: int) -> None:
    """In iteration 1 rank 0 fails first, and rank 1 on the other node a moment later. Before, rank 1 failed."""
    told = [(0, 1, 1, 10.0), (1, 0, 1, 20.0), (1, 1, 2, 20.1)]  # iteration, rank, position in the store, seconds
    records = []
    for number, (iteration, rank, position, at_s) in enumerate(told):
        wall_ns = STARTED_NS + round((at_s + rank * skew_s) * 1e9)
        origin = Origin("job", f"node{rank}", "rank", 7 + rank, iteration=iteration, initial_rank=rank, world_size=2)
        failed = InterruptionRecord(
            rank,
            Interruption.EXCEPTION,
            exception=ExceptionInfo("ValueError", f"bad {rank}", "mark"),
            origin="own",
            detected_wall_ns=wall_ns,
        )
        for event in (
            events.IterationStarted(2, "active"),
            events.RankInterrupted(failed),
            events.InterruptionArrived(rank, Interruption.EXCEPTION, iteration, position),
            events.IterationDecided(int(iteration == 0), is_own=True),
        ):
            records.append(Record(number, wall_ns, wall_ns - STARTED_NS, origin, event))
    failure = now_of(written(records, tmp_path / "run"), 200.0).failure
    assert failure is not None and (failure.rank, failure.what) == (0, "ValueError: bad 0")
    assert [incident.verdict.first for incident in fold(records)] == [1, 0]


def test_restarts_in_place_of_all_calls_of_a_cycle_are_counted(tmp_path: Path) -> None:
    assert now_of(two_calls(tmp_path / "run"), 200.0).iterations == 3


@given(
    kinds=st.lists(st.sampled_from(["kill", "raise", "hang", "membership"]), min_size=1, max_size=4),
    is_nested=st.booleans(),
    cut=st.integers(0, 60),
)
@settings(max_examples=25, deadline=None)
def test_beginning_and_end_of_each_file_say_what_the_whole_files_say(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Kind], is_nested: bool, cut: int
) -> None:
    faults = [Fault(kind, 1) for kind in kinds]
    told = nested(faults, nodes=2) if is_nested else launched(faults, nodes=2)
    # The last fault may be further up: of a launched job it is read from the ends only.
    assert_same_from_ends(told.interleaved(0), cut, tmp_path_factory.mktemp("run"), failure=None)


@given(kind=st.sampled_from(get_args(record_streams.Kind)), cut=st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_beginning_and_end_of_a_wrappers_files_say_what_the_whole_files_say(
    tmp_path_factory: pytest.TempPathFactory, kind: record_streams.Kind, cut: int
) -> None:
    assume(kind != "monitor")  # that a rank lost its monitor long ago is not told again
    faults = [record_streams.Fault("exception", 2, 0, 5), record_streams.Fault(kind, 1, 1, 20)]
    told = record_streams.job([*faults, record_streams.Fault("exception", 0, 2, 30)], world=4, spares=1)
    assert_same_from_ends(told.interleaved(0), cut, tmp_path_factory.mktemp("run"))


def assert_same_from_ends(records: list[Record], cut: int, folder: Path, **same: None) -> None:
    folder = written(records[: len(records) - cut], folder / "run")
    with pytest.MonkeyPatch.context() as patched:
        whole = now_of(folder)
        patched.setattr(first_read, "HEAD", 1 << 10)
        patched.setattr(first_read, "TAIL", 2 << 10)
        patched.setattr(last_fault, "FIRST", 4 << 10)
        ends = now_of(folder)
    same["restarts_left"] = None
    assert msgspec.structs.replace(ends, **same) == msgspec.structs.replace(whole, **same)


def test_look_at_a_large_run_reads_a_small_part_of_it(tmp_path: Path) -> None:
    folder = large_run.write(tmp_path / "run", world=100)
    tails = [first_read.opened(path) for path in (folder / "records").iterdir()]
    size = sum(path.stat().st_size for path in (folder / "records").iterdir())
    read = sum(len(to_line(record)) for _, records in tails for record in records)
    assert read < size / 10
