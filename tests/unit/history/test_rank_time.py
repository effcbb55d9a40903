"""Each second of each rank is productive or lost by one cause, the same in the report and on the dashboards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilience.attribution.cost import times
from resilience.attribution.incidents import incidents_of
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.history.wrapped_rank import WrappedRank
from resilience.telemetry.metrics import MetricView
from tests.fixtures.count import count
from tests.support import launch_streams, record_streams
from tests.support.agreement import LOST, PRODUCTIVE, assert_same_seconds, seconds_counted
from tests.support.launch_streams import launched
from tests.support.nested_streams import BEFORE_STEP_S, REPEATED, call_another_before, nested
from tests.support.node_stories import NodeStory
from tests.support.record_streams import job
from tests.support.torchrun_streams import stopped_in_restart


def test_one_silent_rank_of_eight_costs_the_time_of_all_eight_in_report_and_metrics() -> None:
    records = launched([launch_streams.Fault("hang", 5)], nodes=2, ranks=4).records
    spent = times(History().take_all(records))
    assert spent.ranks == 8
    assert spent.hang_s == pytest.approx(2.01)
    assert_same_seconds(records)


def test_silence_of_a_rank_on_another_node_is_lost_here_too() -> None:
    records = launched([launch_streams.Fault("hang", 5)], nodes=2, ranks=4).of_node("node0")
    assert seconds_counted(records)["hang"] == pytest.approx(4 * 2.01)


@given(
    kinds=st.lists(st.sampled_from(get_args(launch_streams.Kind)), max_size=3),
    nodes=st.integers(2, 3),
    signs=st.booleans(),
    cut=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_launched_jobs_have_the_same_seconds_in_report_and_metrics(
    kinds: list[launch_streams.Kind], nodes: int, signs: bool, cut: int
) -> None:
    assume(kinds.count("node") < nodes)
    told = launched([launch_streams.Fault(kind, 1) for kind in kinds], nodes=nodes, ranks=2, signs=signs)
    records = told.interleaved(0)
    assert_same_seconds(records)
    assert_same_seconds(records[: len(records) - cut])


@given(
    kinds=st.lists(st.sampled_from(get_args(record_streams.Kind)), max_size=2, unique=True),
    world=st.integers(4, 6),
    spares=st.integers(0, 1),
    cut=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_wrapped_jobs_have_the_same_seconds_in_report_and_metrics(
    kinds: list[record_streams.Kind], world: int, spares: int, cut: int
) -> None:
    faults = [record_streams.Fault(kind, 1 + n, n, 10 * (n + 1)) for n, kind in enumerate(kinds)]
    records = job(faults, world=world, spares=spares).interleaved(0)
    assert_same_seconds(records)
    assert_same_seconds(records[: len(records) - cut])


@pytest.mark.parametrize("kind", ["kill", "raise", "hang", "membership"])
def test_wrapped_workers_of_a_launcher_have_the_same_seconds_in_report_and_metrics(kind: launch_streams.Kind) -> None:
    records = nested([launch_streams.Fault(kind, 1)], nodes=2).records
    spent = times(History().take_all(records))
    assert spent.startup_s == pytest.approx(0.26 + 1.5, abs=0.01)  # until the function was entered
    assert_same_seconds(records)


def test_silence_that_the_launcher_found_is_lost_by_ranks_in_a_wrapped_function_too() -> None:
    """The Wrapper's own limits are longer, so it has no record of the hang."""
    told = nested([launch_streams.Fault("hang", 1)], nodes=2)
    spent = times(History().take_all(told.records))
    assert spent.hang_s == pytest.approx(2.01)
    assert seconds_counted(told.of_node("node1"))["hang"] == pytest.approx(2 * 2.01)


def test_silence_that_wrapper_and_launcher_both_found_is_lost_once() -> None:
    told = nested([launch_streams.Fault("hang", 1)])
    found = next(r for r in told.files["node0", 1] if isinstance(r.event, events.RankFellSilent))
    origin = msgspec.structs.replace(found.origin, layer="inprocess", iteration=0, pid=600)
    told.files["node0", 1].insert(-1, msgspec.structs.replace(found, origin=origin))
    spent = History().take_all(told.records).spent()
    assert [spent[rank].hang / 1e9 for rank in (0, 1)] == pytest.approx([2.01, 2.01])


def test_rank_that_had_died_loses_nothing_to_a_later_hang() -> None:
    """Its Wrapper has handled its death, and its place is idle until the launcher finds the hang of another rank."""
    told = nested([launch_streams.Fault("hang", 1)], ranks=3)
    records = told.files["node0", 2]
    entered = next(
        n for n, r in enumerate(records) if isinstance(r.event, events.StageStarted) and r.event.stage == "run"
    )
    run = records[entered]
    origin = msgspec.structs.replace(run.origin, role="monitor", pid=602)
    exited = events.RankExited(False, signal="SIGKILL")
    died = msgspec.structs.replace(run, origin=origin, mono_ns=run.mono_ns + 5 * 10**8, event=exited)
    records.insert(entered + 1, died)
    before, after = (History().take_all(made).spent() for made in (nested([], ranks=3).records, told.records))
    assert [after[rank].hang / 1e9 for rank in range(3)] == pytest.approx([2.01, 2.01, 0.0])
    assert after[2].productive / 1e9 == pytest.approx(0.5 + before[2].productive / 1e9)


def test_import_of_a_launched_worker_is_start_up_and_not_productive() -> None:
    records = launched(is_running=True).records
    spent = times(History().take_all(records))
    assert spent.startup_s == pytest.approx(
        sum(launch_streams.LEG_S[leg] for leg in ("gate", "rendezvous", "spawn")) + 0.4, abs=0.01
    )
    assert spent.productive_s == pytest.approx(0.0, abs=0.001)


def _crash_while_loading(cycles: int, seconds: float) -> NodeStory:
    """A job works for 98 s; then its worker fails while it loads, again and again."""
    story = NodeStory()
    story.join("a", 0, 1, size=1)
    story.start("a", 1.0)
    story.exited("a", 100.0, 0, 1, False)
    story.stop("a", 100.0, "failed", ran=98.0, step=90, failed_node="a")
    now = 100.2
    for cycle in range(1, cycles + 1):
        story.join("a", now, now + 1, cycle=cycle, why="failure", size=1)
        story.spawn("a", now + 1, [0], cycle=cycle, signs=False)
        story.exited("a", now + seconds, 0, 1, False, cycle)
        story.stop("a", now + seconds, "failed", cycle, ran=seconds - 1, failed_node="a")
        now += seconds + 0.2
    return story


def test_time_in_which_a_program_that_has_shown_progress_before_loads_in_vain_is_lost() -> None:
    records = _crash_while_loading(3, 300.0).records
    spent = times(History().take_all(records))
    assert spent.productive_s == pytest.approx(98.0, abs=1.0)
    assert spent.restart_s == pytest.approx(900.0, abs=5.0)
    assert_same_seconds(records)


def _crash_loop_without_signals(cycles: int, seconds: float) -> NodeStory:
    """The worker of a job fails in each cycle, and has never sent a signal of progress."""
    story = NodeStory()
    now = 0.0
    for cycle in range(cycles):
        story.join("a", now, now + 1, cycle=cycle, why="failure" if cycle else "first", size=1)
        story.spawn("a", now + 1, [0], cycle=cycle, signs=False)
        story.exited("a", now + seconds, 0, 1, False, cycle)
        story.stop("a", now + seconds, "failed", cycle, ran=seconds - 1, failed_node="a")
        now += seconds + 0.2
    return story


def test_time_of_workers_that_failed_without_a_signal_is_unknown_and_not_productive() -> None:
    """Four times the program loads for 5 minutes and crashes."""
    records = _crash_loop_without_signals(4, 300.0).records
    spent = times(History().take_all(records))
    assert spent.productive_s == 0
    assert spent.unknown_s == pytest.approx(1200.0, abs=6.0)
    assert spent.ettr is None
    counters = seconds_counted(records)
    assert counters["work"] == 0
    assert sum(counters.values()) < 10.0


def test_first_signal_after_crashes_shows_that_the_earlier_cycles_were_loading() -> None:
    story = _crash_loop_without_signals(2, 300.0)
    before = seconds_counted(story.records)
    story.join("a", 600.4, 601.4, cycle=2, why="failure", size=1)
    story.spawn("a", 601.4, [0], cycle=2)
    story.exited("a", 702.5, 0, 0, True, 2)
    story.stop("a", 702.5, cycle=2)
    spent = times(History().take_all(story.records))
    assert spent.unknown_s == 0
    assert spent.startup_s == pytest.approx(300.0, abs=0.5)
    assert spent.restart_s == pytest.approx(302.5, abs=0.5)
    assert spent.productive_s == pytest.approx(100.0, abs=0.5)
    assert before <= seconds_counted(story.records)
    assert_same_seconds(story.records)


def test_loading_of_a_rank_that_got_another_number_is_known_by_the_signals_of_its_former_one(tmp_path: Path) -> None:
    """Node a is lost. Rank 1, on node b, is rank 0 then, and crashes while it loads."""
    story = NodeStory()
    story.join("ab", 0.0, 1.0)
    story.start("ab", 1.0)
    story.break_off("ab", 100.0, failed="a", silently=True)
    story.join("b", 100.2, 120.0, cycle=1, why="failure", size=1)
    story.spawn("b", 120.0, [0], cycle=1, signs=False)
    story.exited("b", 420.0, 0, 1, False, 1)
    story.stop("b", 420.0, "failed", 1, ran=299.0, failed_node="b")
    spent = History().take_all(story.records).spent()
    assert sum(of_rank.unknown for of_rank in spent.values()) == 0
    assert sum(of_rank.restart for of_rank in spent.values()) / 1e9 == pytest.approx(320.0, abs=0.5)
    assert count(story.write(tmp_path / "run"))["spent"]["restart"] == pytest.approx(320.0, abs=0.5)
    assert_same_seconds(story.records)


def test_silence_that_ended_a_cycle_without_signals_is_lost_and_the_rest_is_unknown() -> None:
    records = launched([launch_streams.Fault("hang", 0)], signs=False).records
    first = [record for record in records if record.origin.cycle == 0]
    spent = times(History().take_all(first))
    assert spent.hang_s == pytest.approx(2.01)
    assert spent.productive_s == 0
    assert spent.unknown_s == pytest.approx(launch_streams.LAST_STEP * launch_streams.STEP_S, abs=0.1)
    assert_same_seconds(first)


def test_program_without_signals_that_completes_has_worked_since_its_start() -> None:
    """The cycle that failed before may have been loading."""
    spent = times(History().take_all(launched([launch_streams.Fault("kill", 0)], signs=False).records))
    assert spent.productive_s == pytest.approx(2.0, abs=0.01)
    assert spent.unknown_s == pytest.approx(launch_streams.LAST_STEP * launch_streams.STEP_S, abs=0.1)
    assert spent.ettr is not None


def test_worker_that_exits_with_0_because_it_was_stopped_has_not_completed() -> None:
    """Rank 0 crashes while all load; rank 1 has a handler for SIGTERM that exits with 0."""
    story = NodeStory()
    story.join("a", 0, 1)
    story.spawn("a", 1.0, [0, 1], signs=False)
    story.exited("a", 300.0, 0, 1, False)
    story.exited("a", 300.05, 1, 0, True)
    story.stop("a", 300.01, "failed", ran=298.8, failed_node="a")
    assert times(History().take_all(story.records)).productive_s == 0


def test_hang_of_a_restarted_worker_before_its_first_sign_is_silence_and_no_restart() -> None:
    story = _crash_while_loading(0, 0.0)
    story.join("a", 100.2, 101.2, cycle=1, why="failure", size=1)
    story.spawn("a", 101.2, [0], cycle=1, signs=False)
    story.exited("a", 121.0, 0, None, False, 1)
    story.stop("a", 121.0, "failed", 1, ran=19.8, silent_for_s=18.0, failed_node="a")
    spent = times(History().take_all(story.records))
    assert spent.hang_s == pytest.approx(18.0, abs=0.1)
    assert spent.restart_s == pytest.approx(3.0, abs=0.5)
    assert spent.total_s == pytest.approx(121.0, abs=0.5)
    assert spent.productive_s == pytest.approx(98.0, abs=1.0)
    assert_same_seconds(story.records)


def test_time_of_a_restarted_worker_that_still_loads_is_lost_while_it_loads() -> None:
    told = _crash_while_loading(1, 300.0).records
    records = [each for each in told if not (each.origin.cycle == 1 and isinstance(each.event, _ENDS))]
    view = MetricView(lambda: max(each.mono_ns for each in records) + 3600 * 10**9)
    for record in records:
        view.take(record)
    assert view.samples()[LOST, ("restart",)] > 3600


_ENDS = (events.WorkerExited, events.CycleEnded, events.CyclePhaseEnded)


def test_running_program_without_signals_has_unknown_time_and_no_productive_share() -> None:
    records = [each for each in launched(signs=False).records if not isinstance(each.event, (*_ENDS, events.JobEnded))]
    history, later = History().take_all(records), max(each.mono_ns for each in records) + 36_000 * 10**9
    spent = history.spent(lambda _: later)
    assert all(of_rank.unknown / 1e9 == pytest.approx(36_000, rel=0.01) for of_rank in spent.values())
    assert sum(of_rank.work for of_rank in spent.values()) == 0
    assert times(history).ettr is None


def test_time_between_two_cycles_of_another_launcher_is_restart() -> None:
    """torchrun starts the workers again 300 s after their last record."""
    once = record_streams.job(world=2).records
    later = max(record.mono_ns for record in once) - min(record.mono_ns for record in once) + 300 * 10**9
    again = [
        msgspec.structs.replace(
            record,
            origin=msgspec.structs.replace(record.origin, cycle=1),
            mono_ns=record.mono_ns + later,
            wall_ns=record.wall_ns + later,
        )
        for record in once
    ]
    one, both = times(History().take_all(once)), times(History().take_all([*once, *again]))
    assert one.restart_s == 0
    assert both.restart_s == pytest.approx(300.0 + one.startup_s, abs=0.01)
    assert both.startup_s == pytest.approx(one.startup_s)
    assert both.productive_s == pytest.approx(2 * one.productive_s)
    assert_same_seconds([*once, *again])


@pytest.mark.parametrize("shift", [0, 2], ids=["same numbers", "other numbers"])
def test_time_between_two_cycles_of_another_launcher_is_restart_whatever_numbers_ranks_have(shift: int) -> None:
    """torchrun loses node a. Node b, which had ranks 2 and 3, goes on alone 300 s later, with ranks 0 and 1."""
    files = record_streams.job(world=4).files
    once = [_elsewhere(record, 0, "a" if rank < 2 else "b") for rank, of_rank in files.items() for record in of_rank]
    alone = [_elsewhere(record, 1, "b", -shift) for rank in (2, 3) for record in files[rank]]
    of_b = [record.mono_ns for record in once if record.origin.node == "b"]
    later = max(of_b) - min(record.mono_ns for record in alone) + 300 * 10**9
    again = [
        msgspec.structs.replace(record, mono_ns=record.mono_ns + later, wall_ns=record.wall_ns + later)
        for record in alone
    ]
    before, after = (History().take_all(records).spent() for records in (once, [*once, *again]))
    assert sum(of_rank.restart for of_rank in before.values()) == 0
    in_cycle_0, in_both = (sum(of_rank.startup for of_rank in spent.values()) for spent in (before, after))
    assert in_both == in_cycle_0
    assert sum(of_rank.restart for of_rank in after.values()) / 1e9 == pytest.approx(2 * 300.0, abs=0.1)
    assert_same_seconds([*once, *again])


@pytest.mark.parametrize("ahead_s", [0, 40], ids=["same clocks", "clock of b ahead"])
def test_node_that_another_launcher_left_out_of_a_cycle_counts_from_the_end_of_that_cycle(ahead_s: int) -> None:
    """torchrun goes on without node b, and starts a cycle with it 300 s after the first one: b repeats nothing then."""
    once = []
    for record in stopped_in_restart(job([record_streams.Fault("kill", 3, 0, step=20)], world=4), 3):
        once.append(record)
        if record.event == events.StageStarted("run"):
            once.append(msgspec.structs.replace(record, event=events.FirstStepReported(0, 0.0)))
    began_ns, ended_ns = min(record.mono_ns for record in once), max(record.mono_ns for record in once)

    def cycle(number: int, nodes: str, later_ns: int) -> list[Record]:
        moved = []
        for record in once:
            node = "ab"[(record.origin.initial_rank or 0) // 2]
            mono_ns, wall_ns = (later_ns + 5 * 10**14, later_ns + ahead_s * 10**9) if node == "b" else [later_ns] * 2
            if node in nodes:
                moved.append(_elsewhere(record, number, node))
                moved[-1] = msgspec.structs.replace(
                    moved[-1], mono_ns=record.mono_ns + mono_ns, wall_ns=record.wall_ns + wall_ns
                )
        return moved

    alone_s, lasts_s = 100, (ended_ns - began_ns) / 1e9
    records = [*cycle(0, "ab", 0), *cycle(1, "a", alone_s * 10**9), *cycle(2, "ab", 300 * 10**9)]
    spent = History({"b": ahead_s * 10**9}).take_all(records).spent()
    assert spent[2].restart / 1e9 == pytest.approx(300 - alone_s - lasts_s, abs=0.5)
    assert spent[0].restart / 1e9 == pytest.approx(300 - 2 * lasts_s, abs=0.5)
    assert (spent[0].rework > 0, spent[2].rework) == (True, 0)


def _elsewhere(record: Record, cycle: int, node: str, shift: int = 0) -> Record:
    """Return a record of another cycle and node. shift: what is added to the numbers of the rank."""
    origin = record.origin
    assert origin.initial_rank is not None
    numbers = {"initial_rank": origin.initial_rank + shift, "rank": origin.rank and origin.rank + shift}
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(origin, cycle=cycle, node=node, **numbers))


@pytest.mark.parametrize("node", ["here", "elsewhere"])
def test_place_of_a_rank_that_died_with_its_monitor_is_idle(node: str) -> None:
    """Nobody but a monitor of another rank can say so; on another node it has another monotonic clock."""
    told = record_streams.job([record_streams.Fault("kill", 1, 0)], world=4)
    exited = next(n for n, each in enumerate(told.files[1]) if isinstance(each.event, events.RankExited))
    stood_in = [each for each in told.files[1] if isinstance(each.event, events.RankStoodInFor)]
    by = next(each.origin for each in told.files[0] if each.origin.role == "monitor")
    apart = 0 if node == "here" else 5 * 10**14
    others = [
        msgspec.structs.replace(
            each,
            sequence=900 + each.sequence,
            mono_ns=each.mono_ns + apart,
            origin=msgspec.structs.replace(
                by, iteration=each.origin.iteration, node=by.node if node == "here" else "another"
            ),
        )
        for each in stood_in
    ]
    whole = History().take_all(told.records).spent()[1]
    both = [*told.files[0], *others, *told.files[1][:exited], *told.files[2], *told.files[3]]
    spent = History().take_all(both).spent()[1]
    assert spent.idle > 0
    assert spent.work / 1e9 == pytest.approx(whole.work / 1e9, abs=2.0)


def test_work_that_is_done_again_is_lost_by_every_rank() -> None:
    """Each fault comes 10 steps after the last checkpoint."""
    spent = times(History().take_all(launched([launch_streams.Fault("kill", 1)], nodes=2).records))
    assert spent.rework_s == pytest.approx(10 * launch_streams.STEP_S, rel=0.01)


@pytest.mark.parametrize("kind", ["kill", "raise", "hang"])
def test_steps_of_a_wrapped_function_that_a_restart_by_the_launcher_repeats_are_rework(
    kind: launch_streams.Kind,
) -> None:
    """The function makes 40 steps a cycle; the next cycle goes on 10 steps before the fault."""
    records = nested([launch_streams.Fault(kind, 1)], nodes=2, has_steps=True).records
    history = History().take_all(records)
    (incident,) = incidents_of(history)
    assert incident.cost.lost_steps == REPEATED
    ran = launch_streams.LAST_STEP * launch_streams.STEP_S - 1.5 - BEFORE_STEP_S
    expected = REPEATED * ran / launch_streams.LAST_STEP
    assert incident.cost.rework_s == pytest.approx(expected, rel=0.05)
    assert not incident.has_unknown_rework
    assert times(history).rework_s == pytest.approx(expected, rel=0.05)
    assert_same_seconds(records)


def test_ranks_that_have_other_numbers_after_the_loss_of_a_node_repeat_steps_too() -> None:
    """Node 1 had ranks 2 and 3, and has ranks 0 and 1 after the loss of node 0."""
    told = nested([launch_streams.Fault("node", 0)], nodes=2, has_steps=True)
    spent = History().take_all(told.records).spent()
    assert [rank for rank in range(4) if spent[rank].rework] == [0, 1]
    assert_same_seconds(told.records)
    ahead = [
        msgspec.structs.replace(each, mono_ns=each.mono_ns + 10**15) if each.origin.node == "node0" else each
        for each in told.records
    ]
    assert History().take_all(ahead).spent() == spent  # clocks of two nodes are never compared


def test_rank_with_another_number_repeats_the_steps_of_its_own_place_on_the_node() -> None:
    """Rank 2 had come to step 8 and rank 3 to step 40; they are ranks 0 and 1 now, and go on with step 30."""
    told = nested([launch_streams.Fault("node", 0)], nodes=2, has_steps=True)
    told.files["node1", 2] = [
        msgspec.structs.replace(each, event=events.RankInterrupted(msgspec.structs.replace(each.event.record, step=8)))
        if isinstance(each.event, events.RankInterrupted) and each.event.record.step is not None
        else each
        for each in told.files["node1", 2]
    ]
    spent = History().take_all(told.records).spent()
    assert spent[0].rework == 0
    assert spent[1].rework / 1e9 == pytest.approx(0.525, rel=1e-4)


def test_rank_that_reports_no_first_step_goes_on_with_the_step_of_its_node() -> None:
    """All ranks step together."""
    told = nested([launch_streams.Fault("kill", 1)], has_steps=True)
    expected = History().take_all(told.records).spent()[0].rework
    told.files["node0", 0] = [
        each
        for each in told.files["node0", 0]
        if not (each.origin.cycle == 1 and isinstance(each.event, events.FirstStepReported))
    ]
    assert expected > 0
    assert History().take_all(told.records).spent()[0].rework == expected
    assert_same_seconds(told.records)


def test_steps_that_two_restarts_by_the_launcher_repeat_are_those_that_a_script_counts(tmp_path: Path) -> None:
    """The script shares no code with the package."""
    told = nested([launch_streams.Fault("kill", 1), launch_streams.Fault("kill", 0)], nodes=2, has_steps=True)
    counted_s = count(told.write(tmp_path / "run"))["spent"]["rework"]
    spent = times(History().take_all(told.records))
    assert spent.rework_s is not None and counted_s > 0
    assert spent.rework_s * spent.ranks == pytest.approx(counted_s, abs=1e-6)


@pytest.mark.parametrize("silent_s", [0.0, 25.0, 35.0])
def test_rank_that_had_finished_repeats_its_work_and_not_the_time_in_which_it_was_idle(
    silent_s: float, tmp_path: Path
) -> None:
    """It had finished 30 s before the loss of another node, which was silent, was decided. All steps are repeated."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.exited("a", 20.0, 0)
    hang = InterruptionRecord(1, Interruption.HARD_TIMEOUT, detector=Detector("step", 1.0), silent_for_s=silent_s)
    told.monitor("b", 1, 50.0, events.RankInterrupted(hang))
    told.stop("a", 50.0, "failed", step=100, failed_node="b", silent_for_s=silent_s)
    before = History().take_all(told.records).spent()[0]
    told.join("a", 50.2, 55.0, cycle=1, why="failure", size=1)
    told.start("a", 55.0, cycle=1)
    told.finish("a", 75.0, cycle=1)
    history = History().take_all(told.records)
    (incident,) = incidents_of(history)
    worked_s = 20.0 - 2.1 - max(0.0, silent_s - 30.0)
    assert (before.work - before.hang) / 1e9 == pytest.approx(worked_s)
    assert history.spent()[0].rework / 1e9 == pytest.approx(worked_s)
    assert incident.cost.rework_s == pytest.approx(worked_s)
    assert count(told.write(tmp_path / "run"))["spent"]["rework"] == pytest.approx(worked_s)


@pytest.mark.parametrize("cycle", [0, 1])
def test_steps_after_a_second_wrapped_function_leave_the_rework_unknown(cycle: int) -> None:
    """Only the second one reports steps. The cycle after the restart may go on with either function."""
    told = nested([launch_streams.Fault("kill", 1)], has_steps=True)
    call_another_before(told, cycle)
    history = History().take_all(told.records)
    (incident,) = incidents_of(history)
    assert incident.has_unknown_rework
    assert times(history, has_unknown_rework=True).rework_s is None
    assert_same_seconds(told.records)


def test_silence_before_a_restart_by_the_launcher_does_not_slow_the_steps_down() -> None:
    with_hang, without = (
        times(History().take_all(nested([launch_streams.Fault(kind, 1)], has_steps=True).records)).rework_s
        for kind in ("hang", "kill")
    )
    assert with_hang == pytest.approx(without, rel=0.05)


@pytest.mark.parametrize("of", ["launcher", "wrapper"])
def test_time_at_work_grows_during_a_hang_which_is_lost_once_its_limit_has_fired(
    of: Literal["launcher", "wrapper"],
) -> None:
    """The counters that the dashboards' scenario of hangs (`hangs_hourly`) has too: nobody knows of a hang before."""
    records = launched([launch_streams.Fault("hang", 1)]).interleaved(0)
    if of == "wrapper":
        records = job([record_streams.Fault("hang", 1, 0)], world=2).interleaved(0)
    fired = next(n for n, each in enumerate(records) if isinstance(each.event, events.RankFellSilent))
    now = [records[fired].mono_ns]
    view = MetricView(lambda: now[0])
    for record in records[:fired]:
        view.take(record)
    at_work = []
    for _ in range(2):
        now[0] += 60 * 10**9
        samples = view.samples()
        at_work.append(samples[PRODUCTIVE, ()])
        assert (LOST, ("hang",)) not in samples
    assert at_work[1] - at_work[0] == pytest.approx(2 * 60.0)
    for record in records[fired:]:
        view.take(record)
    assert view.samples()[LOST, ("hang",)] > 2.0


@pytest.mark.parametrize("of", ["launcher", "wrapper"])
def test_a_counter_never_falls_while_records_come_in(of: Literal["launcher", "wrapper"]) -> None:
    faults = [launch_streams.Fault("hang", 1), launch_streams.Fault("kill", 0)]
    records = (launched(faults) if of == "launcher" else nested(faults, has_steps=True)).interleaved(0)
    now = [0]
    view, before = MetricView(lambda: now[0]), {}
    for record in records:
        now[0] = max(now[0], record.mono_ns)
        view.take(record)
        found = {key: value for key, value in view.samples().items() if key[0] in (PRODUCTIVE, LOST)}
        for key, value in before.items():
            assert found[key] >= value
        before = found


def test_rework_before_the_duration_of_a_step_is_known_counts_once_it_is() -> None:
    """A job that goes on from a checkpoint does not say with which step it began."""
    seen: list[tuple[float, events.Event]] = [
        (0.0, events.IterationStarted(4, "active")),
        (0.0, events.StageStarted("run")),
        (8.0, events.IterationDecided(0, step=108)),
        (9.0, events.RestartEnded("exception", 1.0, "step", 105)),
        (9.0, events.StageEnded("restart", "completed", 1.0)),
        (17.0, events.IterationDecided(0, step=113)),
        (18.0, events.RestartEnded("exception", 1.0, "step", 110)),
        (18.0, events.StageEnded("restart", "completed", 1.0)),
    ]
    assert rework_of(seen) == pytest.approx(6.0)  # 3 steps and 3 steps of 1 s


def restarted(
    began: float, reached: int, sign: Literal["step", "section"], step: int | None
) -> list[tuple[float, events.Event]]:
    """An interruption at `began`, when `reached` was the step; the rank goes on a second later."""
    return [
        (began, events.StageStarted("restart")),
        (began, events.IterationDecided(0, step=reached)),
        (began + 1.0, events.StageEnded("restart", "completed", 1.0)),
        (began + 1.0, events.RestartEnded("exception", 1.0, sign, step)),
    ]


def called(at: float) -> list[tuple[float, events.Event]]:
    started = events.CallStarted("f", 1, "", "", "", "", "forked")
    return [(at, started), (at, events.IterationStarted(1, "active")), (at, events.StageStarted("run"))]


def test_rework_in_a_call_does_not_depend_on_the_steps_of_an_earlier_call() -> None:
    """Each step takes a second, and the restart of the second call repeats all of its 1000 steps."""
    first = [*called(0.0), *restarted(100.0, 100, "step", 90), (201.0, events.CallEnded("completed", 2, 201.0))]
    second = [*called(201.0), *restarted(1201.0, 1000, "step", 0), (2202.0, events.CallEnded("completed", 2, 2001.0))]
    alone = rework_of([(at - 201.0, event) for at, event in second])
    assert alone == pytest.approx(1000.0)
    assert rework_of([*first, *second]) - rework_of(first) == pytest.approx(alone)


def test_restart_that_tells_no_step_leaves_no_wrong_speed_behind() -> None:
    """After the second restart it is not known from which step the rank went on."""
    seen = [*called(0.0), *restarted(100.0, 100, "step", 0)]  # 100 steps again
    seen += restarted(301.0, 200, "section", None)
    seen += restarted(402.0, 250, "step", 200)  # 50 steps again
    assert rework_of(seen) == pytest.approx(150.0)


def test_first_step_after_a_checkpoint_was_loaded_tells_the_rework() -> None:
    seen = [*called(0.0), *restarted(100.0, 100, "section", None), (105.0, events.RestartStep(0))]  # 100 steps
    seen += restarted(301.0, 200, "section", None)  # no step follows: the rework is not known
    seen += restarted(402.0, 250, "section", None)
    assert rework_of([*seen, (405.0, events.RestartStep(200))]) == pytest.approx(150.0)


def test_rework_of_a_job_that_began_with_a_checkpoint_is_known_after_its_only_restart() -> None:
    """It loads for 60 s, makes 20 steps in 20 s, and repeats 5 of them."""
    first = events.FirstStepReported(100, 60.0)
    seen = [*called(0.0), (60.0, first), *restarted(80.0, 120, "step", 115)]
    assert rework_of(seen) == pytest.approx(5.0)


def test_speed_before_a_hang_does_not_include_its_silence() -> None:
    silent = events.IterationDecided(0, step=120, silent_for_s=30.0)
    seen = [*called(0.0), (60.0, events.FirstStepReported(100, 60.0)), (110.0, silent)]
    seen += [
        (111.0, events.RestartEnded("hang", 1.0, "step", 115)),
        (111.0, events.StageEnded("restart", "completed", 1.0)),
    ]
    assert rework_of(seen) == pytest.approx(5.0)


def rework_of(seen: list[tuple[float, events.Event]]) -> float:
    """The rework of one rank, in seconds."""
    rank = WrappedRank("node0")
    for number, (at, event) in enumerate(seen):
        rank.take(Record(number, 0, round(at * 1e9), Origin("job", "node0", "rank", 1), event))
    return rank.spent_until(round(9999e9)).rework / 1e9
