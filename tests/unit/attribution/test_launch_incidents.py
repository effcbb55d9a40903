"""A cycle that failed is one incident: who was first, what it cost, how long each leg took, in any order of files."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.attribution import launch_incidents, wrapped_ranks
from resilience.attribution.culprits import SURE
from resilience.attribution.evidence import Evidence
from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident, to_json
from resilience.attribution.incidents import fold, incidents_of
from resilience.attribution.notes import note
from resilience.attribution.stack_groups import stack_groups
from resilience.attribution.waterfall import waterfall
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Detector, ExceptionInfo, Exit, Interruption, InterruptionRecord, ThreadStack
from resilience.facts.records import Record
from resilience.facts.user_frames import user_frame
from resilience.history.history import History
from resilience.history.iterations import Iteration
from tests.support import record_streams
from tests.support.launch_streams import ECHO, LEG_S, STEP_S, TRACEBACK, Fault, Kind, Launched, launched
from tests.support.nested_streams import nested
from tests.support.record_streams import LOADS, WAITS

# kind of fault -> interruption, class, category
EXPECTED: dict[Kind, tuple[str, str, str]] = {
    "kill": ("terminated", "killed", "unknown"),
    "raise": ("terminated", "exception", "user_code"),
    "hang": ("hard_timeout", "input_stall", "storage"),
    "node": ("unresponsive", "node_lost", "host"),
    "exhausted": ("terminated", "killed", "unknown"),
}
WISHED = set(get_args(Kind)) - set(EXPECTED)


def only(told: Launched) -> Incident:
    (incident,) = fold(told.records)
    return incident


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_failure_is_one_incident_with_the_right_culprit(kind: Kind) -> None:
    incident = only(launched([Fault(kind, 2)], nodes=2))
    assert (incident.kind, incident.verdict.what, incident.category) == EXPECTED[kind]
    assert incident.verdict.first == 2
    assert {culprit.rank for culprit in incident.verdict.culprits} == {2}
    assert (incident.layer, incident.cycle, incident.world_size) == ("launcher", 0, 4)
    assert incident.status == ("ended" if kind == "exhausted" else "restarted")
    cleared = {rank for group in incident.verdict.exonerated for rank in group.ranks}
    assert cleared == {0, 1, 3}


def test_monitors_that_a_node_lost_in_a_cycle_are_one_incident() -> None:
    lost = [(0, 0), (0, 1), (0, 1), (0, 2), (1, 1)]
    incidents = fold(launched([Fault("kill", 3)], nodes=2, lost_monitors=lost).records)
    named = [[(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] for incident in incidents]
    lost_by = [[(0, "monitor_lost"), (1, "monitor_lost")], [(2, "monitor_lost")]]
    assert named == [*lost_by, [(3, "killed")], [(1, "monitor_lost")]]
    assert [incident.cycle for incident in incidents] == [0, 0, 0, 1]
    assert "rank 1 lost 2 monitors" in incidents[0].actions


@pytest.mark.parametrize("is_replaced", [False, True])
def test_monitor_that_did_not_answer_and_was_replaced_is_no_incident(is_replaced: bool) -> None:
    records = [
        msgspec.structs.replace(record, event=events.MonitorLost(501, "it did not answer", is_replaced))
        if isinstance(record.event, events.MonitorLost)
        else record
        for record in launched(lost_monitors=[(0, 1)]).records
    ]
    assert [incident.verdict.what for incident in fold(records)] == ([] if is_replaced else ["monitor_lost"])


def test_lost_monitor_has_no_part_in_the_restart_for_a_hang_of_the_same_cycle() -> None:
    told = launched([Fault("hang", 1)], lost_monitors=[(0, 0)])
    watched = next(record for record in told.files["node0", 0] if isinstance(record.event, events.MonitorStarted))
    look = msgspec.structs.replace(watched, event=events.WorkerSeen("in_collective", WAITS, 7))
    history = History().take_all([*told.records, look])
    lost, hung = incidents_of(history)
    assert (waterfall(history, lost), stack_groups(history, lost)) == (None, [])
    assert waterfall(history, hung) is not None and stack_groups(history, hung) != []


@pytest.mark.parametrize("is_watched", [True, False])
def test_lost_monitor_says_whether_another_one_watches_the_rank(is_watched: bool) -> None:
    told = launched(lost_monitors=[(0, 1)])
    records = [record for record in told.records if is_watched or record.origin.pid != 1501]
    (incident,) = fold(records)
    done = "another monitor watches rank 1" if is_watched else "rank 1 continued without a monitor"
    assert incident.actions == (done,)
    assert ("no longer detected" in incident.advice[0]) is not is_watched


def test_node_lost_before_it_recorded_its_workers_has_the_ranks_that_no_other_node_has() -> None:
    told = launched([Fault("node", 2)], nodes=2)
    told.files = {
        (node, rank): [record for record in records if node == "node0" or record.origin.cycle != 0]
        for (node, rank), records in told.files.items()
    }
    incident = only(told)
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(2, "node_lost")]
    assert incident.excluded == (2, 3)


@pytest.mark.parametrize("kind", sorted(WISHED))
def test_what_somebody_asked_for_is_no_incident(kind: Kind) -> None:
    assert fold(launched([Fault(kind, 1)], nodes=2).records) == ()


@given(kinds=st.lists(st.sampled_from(("kill", "raise", "hang")), min_size=1, max_size=4), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_order_of_files_does_not_matter(kinds: list[Kind], seed: int) -> None:
    told = launched([Fault(kind, number % 4) for number, kind in enumerate(kinds)], nodes=2)
    incidents = fold(told.records)
    assert incidents == fold(told.interleaved(seed))
    assert [(incident.cycle, incident.verdict.first) for incident in incidents] == [
        (number, number % 4) for number in range(len(kinds))
    ]


def test_neighbour_that_saw_its_connection_close_only_followed() -> None:
    incident = only(launched([Fault("raise", 2)], nodes=2))
    assert incident.chief is not None and incident.chief.exception is not None
    assert (incident.chief.exception.type, incident.chief.exception.message) == ("ValueError", "bad batch")
    assert incident.where is not None and incident.where.function == "next_batch"
    assert incident.verdict.cascade == (3,)
    reasons = {rank: group.reason for group in incident.verdict.exonerated for rank in group.ranks}
    assert reasons[3] == "its error came out of a communication call, which also fails when a peer ends"


def with_tail(told: Launched, rank: int, lines: tuple[str, ...], end: Exit | None = None) -> list[Record]:
    """The records, with other last lines of a rank that ended, and perhaps another end."""
    changed: list[Record] = []
    for record in told.records:
        event = record.event
        if isinstance(event, events.RankInterrupted) and event.record.rank == rank:
            ended = msgspec.structs.replace(event.record, log_tail=lines, exit=end or event.record.exit)
            event = events.RankInterrupted(ended)
        elif isinstance(event, events.WorkerExited) and event.worker_rank == rank and not event.expected and end:
            event = msgspec.structs.replace(event, code=end.code, signal=end.signal)
        changed.append(msgspec.structs.replace(record, event=event))
    return changed


def test_error_that_a_program_raised_for_a_closed_connection_only_followed() -> None:
    lines = (
        *ECHO,
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 70, in main',
        "TrainingError: step 100 failed",
    )
    (incident,) = fold(with_tail(launched([Fault("raise", 2)], nodes=2), 3, lines))
    assert [culprit.rank for culprit in incident.verdict.culprits] == [2]
    assert incident.verdict.cascade == (3,)
    (alone,) = fold(with_tail(launched([Fault("raise", 1)], ranks=4), 1, lines))
    assert alone.verdict.culprits == ()


def test_hang_that_is_older_than_the_death_which_ended_the_cycle_is_its_cause() -> None:
    told = launched([Fault("kill", 0)])
    monitor = told.files["node0", 1]
    at = next(number for number, record in enumerate(monitor) if isinstance(record.event, events.WorkerProgressed))
    hung = InterruptionRecord(1, Interruption.SOFT_TIMEOUT, detector=Detector("step", 2.0), hang="on_lock")
    monitor.insert(at + 1, msgspec.structs.replace(monitor[at], event=events.RankInterrupted(hung)))
    incident = only(told)
    assert [culprit.rank for culprit in incident.verdict.culprits] == [1, 0]
    assert incident.chief is not None
    assert (incident.chief.rank, incident.reported_first) == (1, 0)


def test_job_of_one_rank_blames_it_for_a_closed_connection() -> None:
    (incident,) = fold(with_tail(launched([Fault("raise", 0)], ranks=1), 0, ECHO))
    assert [(culprit.rank, culprit.confidence) for culprit in incident.verdict.culprits] == [(0, SURE)]


NOT_A_NUMBER = (
    *TRACEBACK[:2],
    '  File "/opt/lib/python3.11/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward',
    "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
)
RESET = (
    *TRACEBACK[:3],
    '  File "/usr/lib/python3.11/http/client.py", line 279, in _read_status',
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)


@pytest.mark.parametrize("lines", [NOT_A_NUMBER, RESET])
def test_first_rank_to_end_with_an_ambiguous_error_is_the_only_candidate(
    lines: tuple[str, ...],
) -> None:
    """Without a Wrapper, nothing tells such an error from that of a lost peer."""
    (incident,) = fold(with_tail(launched([Fault("raise", 1)], ranks=4), 1, lines))
    verdict = incident.verdict
    assert (verdict.culprits, [culprit.rank for culprit in verdict.candidates]) == ((), [1])
    assert {rank for group in verdict.exonerated for rank in group.ranks} == {0, 2, 3}


@pytest.mark.parametrize("traceback", [TRACEBACK, ECHO])
@pytest.mark.parametrize("end", [Exit(signal="SIGKILL"), Exit(signal="SIGKILL", oom=True), Exit(code=7)])
def test_error_that_a_program_handled_before_it_ended_is_not_the_cause_of_its_end(
    traceback: tuple[str, ...], end: Exit
) -> None:
    lines = ("retrying sample 17", *traceback, *("step 100 loss 2.1",) * 20)
    (incident,) = fold(with_tail(launched([Fault("kill", 1)]), 1, lines, end))
    (plain,) = fold(with_tail(launched([Fault("kill", 1)]), 1, (), end))
    assert incident.verdict == plain.verdict
    assert incident.fingerprint == plain.fingerprint
    assert incident.chief is not None and incident.chief.exception is None


def test_signal_is_the_cause_of_an_end_though_a_traceback_was_printed_last() -> None:
    killed = Exit(signal="SIGKILL")
    (incident,) = fold(with_tail(launched([Fault("kill", 1)]), 1, TRACEBACK, killed))
    assert [culprit.what for culprit in incident.verdict.culprits] == ["killed"]


def test_legs_of_the_restart_are_timed_by_node_and_worker() -> None:
    incident = only(launched([Fault("kill", 2)], nodes=2))
    legs = {phase.name: phase.took for phase in incident.phases}
    assert list(legs) == ["detect", "stop", "gate", "rendezvous", "spawn", "import"]
    for name, seconds in LEG_S.items():
        assert (legs[name].max_s, legs[name].ranks) == (seconds, 2)
        assert legs[name].node in ("node0", "node1")
    assert legs["import"].ranks == 4 and legs["import"].node == ""
    assert incident.restart is not None
    assert incident.restart.max_s == pytest.approx(sum(LEG_S.values()) + 0.4, abs=0.001)
    assert incident.restart.max_s == pytest.approx(sum(took.max_s for took in legs.values()), abs=0.001)


def test_cost_counts_silence_restart_and_steps_done_again() -> None:
    cost = only(launched([Fault("hang", 1)])).cost
    assert (cost.hang_s, cost.lost_steps) == (2.01, 10)
    assert cost.restart_s == pytest.approx(sum(LEG_S.values()) + 0.41, abs=0.001)
    assert cost.rework_s == pytest.approx(10 * STEP_S, rel=0.01)
    silent = only(launched([Fault("kill", 1)], signs=False)).cost
    assert (silent.lost_steps, silent.hang_s, silent.rework_s) == (None, None, None)


def test_actions_tell_what_was_done() -> None:
    incident = only(launched([Fault("hang", 1)], nodes=2))
    assert incident.actions == (
        "stacks taken by faulthandler of rank 1",
        "SIGKILL sent to rank 1 (heartbeat)",
        "ranks 0, 2-3 stopped",
        "started again (warm): ranks 0-3 on 2 nodes",
    )
    lost = only(launched([Fault("node", 2)], nodes=2))
    assert lost.actions[1:] == ("node node1 left behind", "started again (warm): ranks 0-1 on 1 node")
    assert (lost.excluded, lost.next_world_size) == ((2, 3), 2)


def test_actions_name_the_ranks_that_were_not_looked_at_before_a_rank_was_stopped() -> None:
    told = launched([Fault("hang", 1)], nodes=3)
    decided = next(r for r in told.files["node0", None] if isinstance(r.event, events.RestartDecided))
    looked = events.OthersSeen(1, missing=(0,), elsewhere=4)
    told.files["node0", None].append(msgspec.structs.replace(decided, event=looked))
    assert "not looked at before anything was stopped: ranks 0, 2-5" in only(told).actions


def test_rank_that_had_completed_was_not_stopped() -> None:
    told = launched([Fault("kill", 2)], nodes=2)
    file = told.files["node0", None]
    (ended,) = (
        r for r in file if isinstance(r.event, events.WorkerExited) and r.event.worker_rank == 0 and not r.origin.cycle
    )
    (ran,) = (
        r for r in file if isinstance(r.event, events.CyclePhaseEnded) and r.event.phase == "run" and not r.origin.cycle
    )
    completed = msgspec.structs.replace(ended.event, code=0, signal=None)
    file.remove(ended)
    file.insert(file.index(ran), msgspec.structs.replace(ended, mono_ns=ran.mono_ns - 1000, event=completed))
    incident = only(told)
    assert ("had completed", (0,)) in [(group.reason, group.ranks) for group in incident.verdict.exonerated]
    assert incident.actions[0] == "ranks 1, 3 stopped"


def test_ranks_of_a_lost_node_are_cleared_as_lost_with_it() -> None:
    cleared = {group.reason: group.ranks for group in only(launched([Fault("node", 2)], nodes=2)).verdict.exonerated}
    assert cleared["was lost with its node"] == (3,)


def test_job_that_a_lost_node_ended_has_ended_though_that_node_recorded_no_end() -> None:
    told = launched([Fault("node", 2)], nodes=2)
    records = []
    for record in told.records:
        match record.event:
            case events.RestartDecided():
                event: events.Event = msgspec.structs.replace(record.event, verdict="stop")
            case events.CycleEnded():
                event = msgspec.structs.replace(record.event, outcome="exhausted")
            case _:
                event = record.event
        if record.origin.cycle == 0:
            records.append(msgspec.structs.replace(record, event=event))
    ended = next(record for record in records if isinstance(record.event, events.CycleEnded))
    over = msgspec.structs.replace(ended, sequence=10_000, event=events.JobEnded("exhausted", 1, "no restart is left"))
    (incident,) = fold([*records, over])
    assert incident.status == "ended"


def test_steps_that_only_the_end_of_the_cycle_tells_are_done_again_too() -> None:
    """The rank that failed reported fewer steps than others of its node, or none."""
    told = launched([Fault("kill", 1)])
    records = [
        msgspec.structs.replace(
            record, event=events.RankInterrupted(msgspec.structs.replace(record.event.record, step=None))
        )
        if isinstance(record.event, events.RankInterrupted)
        else record
        for record in told.records
    ]
    (incident,) = fold(records)
    assert incident.cost.lost_steps == 10


def test_same_failure_again_is_named() -> None:
    incidents = fold(launched([Fault("raise", 1)] * 3).records)
    assert [incident.same_as for incident in incidents] == [(), (1,), (1, 2)]
    assert "3 times now" in incidents[2].advice[1]


def test_cycle_that_is_being_ended_is_unfinished() -> None:
    told = launched([Fault("kill", 1)]).interleaved(0)
    until = next(n for n, record in enumerate(told) if isinstance(record.event, events.CycleEnded))
    (incident,) = fold(told[: until + 1])
    assert incident.status == "unfinished"


def test_torn_records_raise_nothing() -> None:
    for kind in EXPECTED:
        records = launched([Fault(kind, 1), Fault("hang", 1)], nodes=2).records
        for number in range(0, len(records), 7):
            for incident in fold([*records[:number], *records[number + 5 :]]):
                msgspec.json.encode(to_json(incident))


# -- with a Wrapper inside -----------------------------------------------------------------------


def test_death_that_a_wrapper_coped_with_is_its_incident_alone() -> None:
    told = launched(ranks=4)
    wrapped = record_streams.job([record_streams.Fault("kill", 1, 0)], world=3, spares=1)
    died = next(record.event for record in wrapped.files[1] if isinstance(record.event, events.RankInterrupted))
    monitor, agent = told.files["node0", 1], told.files["node0", None]
    seen = msgspec.structs.replace(died.record, iteration=None)
    monitor.insert(2, msgspec.structs.replace(monitor[1], event=events.RankInterrupted(seen)))
    at = next(n for n, record in enumerate(agent) if isinstance(record.event, events.WorkerExited))
    killed = events.WorkerExited(1, 1, 101, None, "SIGKILL", False)
    agent.insert(at, msgspec.structs.replace(agent[at], event=killed))
    (incident,) = fold([*of_node(wrapped.records), *told.records])
    assert (incident.layer, incident.verdict.first, incident.status) == ("inprocess", 1, "restarted")


def test_wrapper_that_was_cut_off_by_the_launcher_belongs_to_its_incident() -> None:
    told = launched([Fault("hang", 1)], ranks=3)
    wrapped = record_streams.job([record_streams.Fault("exception", 2, 0)], world=3)
    cut: list[Record] = []
    for rank, records in wrapped.files.items():
        started = (n for n, r in enumerate(records) if isinstance(r.event, events.IterationStarted))
        at = max(started)
        stopped = InterruptionRecord(rank, Interruption.TERMINATED, exit=Exit(signal="SIGTERM"), pid=1000 + rank)
        lost = (events.RankInterrupted(stopped), events.IterationEnded("lost", 1.0, "monitor"))
        cut += [*records[: at + 1], *(msgspec.structs.replace(records[at], event=event) for event in lost)]
    incidents = fold([*of_node(cut), *told.records])
    assert [(incident.layer, incident.verdict.first) for incident in incidents] == [("inprocess", 2), ("launcher", 1)]
    assert [record.interruption.value for record in incidents[1].records] == ["hard_timeout", "terminated"]


def test_death_for_which_a_wrapper_and_then_the_launcher_restart_blames_its_node_once() -> None:
    told = launched([Fault("kill", 1)], ranks=3)
    wrapped = record_streams.job([record_streams.Fault("kill", 1, 0)], world=3)
    starts = [r for r in wrapped.records if isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1]
    inside = of_node([r for r in wrapped.records if r.origin.iteration != 1 or r in starts])
    (alone,) = fold(inside)
    assert judged(alone).nodes == ("node0",)
    verdict = msgspec.structs.replace(starts[0], event=judged(alone))
    for records, nodes in ((inside, ("node0",)), ([*inside, verdict], ())):
        (incident,) = fold([*records, *told.records])
        assert (incident.layer, judged(incident).rank, judged(incident).nodes) == ("launcher", 1, nodes)


def with_ranks_that_give_up(of_rank: dict[int, int], last: int) -> list[Record]:
    """Return the records of three ranks of which rank 1 was killed, and the others gave up one after the other.

    of_rank: rank -> in which iteration it gave up. last: the last iteration that rank 2 began."""
    wrapped = record_streams.job([record_streams.Fault("kill", 1, 0)], world=3).records
    records = [record for record in wrapped if record.origin.iteration in (None, 0)]
    starts = [r for r in wrapped if isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1]
    error = ExceptionInfo("resilience.errors.RestartAbort", "too few ranks are left", "f")
    for start in starts:
        rank = start.origin.initial_rank
        for iteration in range(1, (last if rank == 2 else 1) + 1):
            began = msgspec.structs.replace(start, origin=msgspec.structs.replace(start.origin, iteration=iteration))
            records.append(began)
            if of_rank.get(rank) == iteration:
                gone = InterruptionRecord(rank, Interruption.BASE_EXCEPTION, exception=error, iteration=iteration)
                ends = (events.RankInterrupted(gone), events.CallEnded("failed", iteration + 1, 1.0, "RestartAbort"))
                records += [msgspec.structs.replace(began, event=end) for end in ends]
    return of_node(records)


@pytest.mark.parametrize("last", [1, 2])
def test_rank_that_only_gives_up_before_the_launcher_restarts_is_part_of_its_incident(last: int) -> None:
    """Rank 0 gives up in iteration 1. Rank 2 may have begun iteration 2 before the agent stopped it."""
    told = launched([Fault("kill", 1)], ranks=3)
    (incident,) = fold([*with_ranks_that_give_up({0: 1}, last), *told.records])
    assert (incident.layer, [culprit.rank for culprit in incident.verdict.culprits]) == ("launcher", [1])


@pytest.mark.parametrize("last", [1, 2])
def test_ranks_that_give_up_one_after_the_other_end_one_incident(last: int) -> None:
    (incident,) = fold(with_ranks_that_give_up({0: 1, 2: last}, last))
    assert (incident.status, [culprit.rank for culprit in incident.verdict.culprits]) == ("ended", [1])
    assert {r.rank for r in incident.records if r.interruption is Interruption.BASE_EXCEPTION} == {0, 2}


def test_rank_that_gives_up_and_for_which_the_launcher_restarts_takes_along_the_fault_before() -> None:
    """Rank 2 has left another call, of which no iteration began."""
    told = [with_status(record, 1) for record in launched([Fault("raise", 1)], ranks=3).records]
    wrapped = record_streams.job([record_streams.Fault("exception", 2, 0)], world=3).records
    records = [record for record in wrapped if record.origin.iteration in (None, 0)]
    starts = [r for r in wrapped if isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1]
    error = ExceptionInfo("resilience.errors.RestartAbort", "too few ranks are left", "f")
    gone = InterruptionRecord(1, Interruption.BASE_EXCEPTION, exception=error, iteration=1)
    for start in starts:
        records.append(start)
        if start.origin.initial_rank == 1:
            ends = (events.RankInterrupted(gone), events.RankLeft("RestartAbort"))
            records += [msgspec.structs.replace(start, event=end) for end in ends]
        if start.origin.initial_rank == 2:
            origin = msgspec.structs.replace(start.origin, call=1, iteration=None)
            records.append(msgspec.structs.replace(start, origin=origin, event=events.RankLeft("SystemExit")))
    (incident,) = fold([*of_node(records), *told])
    assert (incident.layer, [culprit.rank for culprit in incident.verdict.culprits]) == ("launcher", [2])


LEFT, THEN = ("inprocess", "left"), "launcher"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("raise", 3, [("launcher", "left")]),
        ("raise", 4, [LEFT, (THEN, "exited")]),
        ("raise", None, [LEFT, (THEN, "exception")]),
        ("kill", None, [LEFT, (THEN, "killed")]),
    ],
    ids=["the same status", "another status", "another exception", "a signal"],
)
def test_end_of_a_process_whose_rank_had_left_its_function_is_the_same_incident(
    kind: Kind, code: int | None, expected: list[tuple[str, str]]
) -> None:
    """The rank left with SystemExit: 3. code: with which its process ended, without a traceback."""
    told = launched([Fault(kind, 1)], ranks=3).records
    wrapped = record_streams.job([record_streams.Fault("left", 1, 0)], world=3)
    starts = [r for r in wrapped.records if isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1]
    inside = of_node([r for r in wrapped.records if r.origin.iteration != 1 or r in starts])
    if code is not None:
        told = [with_status(record, code) for record in told]
    incidents = fold([*inside, *told])
    assert [(incident.layer, incident.verdict.what) for incident in incidents] == expected
    assert all(incident.verdict.first == 1 for incident in incidents)


@pytest.mark.parametrize(
    ("type_", "message", "code", "expected"),
    [
        ("SystemExit", "3", 3, True),
        ("SystemExit", "3", 1, False),
        ("SystemExit", "no data", 1, True),
        ("SystemExit", "no data", 3, False),
        ("SystemExit", "\N{SUPERSCRIPT TWO}", 1, True),
        ("SystemExit", "9" * 5000, 255, False),
        ("KeyboardInterrupt", "", 1, True),
    ],
)
def test_exit_status_is_that_of_an_exception_of_any_text(type_: str, message: str, code: int, expected: bool) -> None:
    raised = ExceptionInfo(type_, message, "mark")
    left = InterruptionRecord(1, Interruption.BASE_EXCEPTION, exception=raised)
    end = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(code=code))
    assert launch_incidents.is_end_after(left, end) is expected


def with_status(record: Record, code: int) -> Record:
    """Return a record in which the process of rank 1 ended with this status and wrote nothing."""
    event = record.event
    if isinstance(event, events.RankInterrupted) and event.record.rank == 1:
        ended = msgspec.structs.replace(event.record, exit=Exit(code=code), exception=None, log_tail=())
        event = events.RankInterrupted(ended)
    elif isinstance(event, events.WorkerExited) and event.worker_rank == 1 and not event.expected:
        event = msgspec.structs.replace(event, code=code)
    return msgspec.structs.replace(record, event=event)


def of_node(records: list[Record]) -> list[Record]:
    """Records of a Wrapper whose ranks are workers of a launched job."""
    return [msgspec.structs.replace(r, origin=msgspec.structs.replace(r.origin, node="node0")) for r in records]


# -- who waited for whom ------------------------------------------------------------------------------


def later(record: Record, seconds: float, event: events.Event, **place: object) -> Record:
    """A record of this event on the same rank, so many seconds later."""
    shift = round(seconds * 1e9)
    origin = msgspec.structs.replace(record.origin, **place)
    return Record(0, record.wall_ns + shift, record.mono_ns + shift, origin, event)


def waiting(record: Record) -> Record:
    """The record; if it is of a limit that a rank exceeded, the rank waited in a collective."""
    event = record.event
    if isinstance(event, events.RankInterrupted) and event.record.interruption is Interruption.HARD_TIMEOUT:
        stack = (ThreadStack("MainThread", WAITS),)
        event = events.RankInterrupted(
            msgspec.structs.replace(event.record, stacks=stack, open_sections=(), hang="in_collective")
        )
    return msgspec.structs.replace(record, event=event)


def waited(told: Launched, looks: dict[int, events.WorkerSeen]) -> list[Record]:
    """The records, with a first mover that waited in a collective, and where the others were then."""
    made: list[Record] = []
    for record in told.records:
        event = record.event
        made.append(waiting(record))
        if isinstance(event, events.WorkerExited) and event.expected and event.worker_rank in looks:
            origin = msgspec.structs.replace(
                record.origin, role="monitor", layer="launcher", initial_rank=event.worker_rank
            )
            made.append(msgspec.structs.replace(record, origin=origin, event=looks[event.worker_rank]))
    return made


@pytest.mark.parametrize(
    ("look", "what", "category"),
    [
        (events.WorkerSeen("on_lock", LOADS, 7), "waits_for_lock", "user_code"),
        (events.WorkerSeen("stopped", (), 7), "stopped", "host"),
        (events.WorkerSeen("holds_gil", LOADS, 7), "blocked_in_native_code", "user_code"),
        (events.WorkerSeen("in_loop", LOADS, 7), "busy_without_progress", "user_code"),
        (events.WorkerSeen("in_call", LOADS, 7), "hung", "user_code"),  # it was somewhere else
    ],
)
def test_rank_that_others_wait_for_is_blamed_although_another_exceeded_its_limit(
    look: events.WorkerSeen, what: str, category: str
) -> None:
    waits = events.WorkerSeen("in_collective", WAITS, 7)
    (incident,) = fold(waited(launched([Fault("hang", 2)], nodes=2), {0: look, 1: waits, 3: waits}))
    assert (incident.reported_first, incident.verdict.first) == (2, 0)
    assert incident.where == user_frame(look.stack)  # of the rank that is blamed, not of the one that reported
    assert [(culprit.rank, culprit.what, culprit.rule) for culprit in incident.verdict.culprits] == [(0, what, 7)]
    assert (incident.verdict.what, incident.category) == (what, category)
    cleared = {rank for group in incident.verdict.exonerated for rank in group.ranks}
    assert cleared == {1, 2, 3}


def ended(look: events.WorkerSeen) -> list[Record]:
    """Rank 2 waited for rank 0, whose program was over. Its interpreter had not shut down."""
    waits = events.WorkerSeen("in_collective", WAITS, 7)
    return waited(launched([Fault("hang", 2)], nodes=2), {0: look, 1: waits, 3: waits})


def test_rank_that_others_waited_for_after_its_program_had_exited_is_judged_by_its_exit_status() -> None:
    (incident,) = fold(ended(events.WorkerSeen("in_call", LOADS, 7, exit=Exit(code=3), log_tail=("no data",))))
    assert (incident.kind, incident.verdict.what, incident.verdict.first) == ("terminated", "exited", 0)
    assert [(culprit.rank, culprit.rule) for culprit in incident.verdict.culprits] == [(0, 1)]
    assert incident.verdict.candidates == ()
    assert judged(incident).sentence == "rank 0 failed first (exit code 3)"
    cleared = {rank for group in incident.verdict.exonerated for rank in group.ranks}
    assert cleared == {1, 2, 3}


def test_rank_that_others_waited_for_after_its_program_had_raised_is_judged_by_its_exception() -> None:
    look = events.WorkerSeen("in_call", LOADS, 7, exit=Exit(code=1), log_tail=tuple(TRACEBACK))
    (incident,) = fold(ended(look))
    assert (incident.kind, incident.verdict.what, incident.verdict.first) == ("exception", "exception", 0)


def test_failure_that_is_seen_only_after_a_hung_rank_was_signalled_is_not_the_first() -> None:
    """The look at rank 0 comes after the signal to rank 1 on its node: its collective may have failed by that."""
    look = events.WorkerSeen("in_call", LOADS, 7, exit=Exit(code=1), log_tail=tuple(TRACEBACK))
    (incident,) = fold(waited(launched([Fault("hang", 1)], nodes=1), {0: look}))
    assert incident.kind != "exception"
    assert not [culprit for culprit in incident.verdict.culprits if culprit.what in ("exception", "exited")]


@pytest.mark.parametrize("code", [3, None])
def test_limit_that_fires_while_a_failed_program_shuts_down_is_no_hang(code: int | None) -> None:
    """Without an exit status nothing says that the program failed."""
    made: list[Record] = []
    for record in launched([Fault("hang", 2)], nodes=2).records:
        event = record.event
        if isinstance(event, events.RankInterrupted) and event.record.interruption is Interruption.HARD_TIMEOUT:
            end = None if code is None else Exit(code=code)
            shown = msgspec.structs.replace(event.record, stage="ending", exit=end, open_sections=())
            event = events.RankInterrupted(shown)
        made.append(msgspec.structs.replace(record, event=event))
    (incident,) = fold(made)
    assert incident.verdict.first == 2
    if code is None:
        assert (incident.kind, incident.verdict.culprits[0].rule) == ("hard_timeout", 7)
    else:
        assert (incident.kind, incident.verdict.what) == ("terminated", "exited")
        assert judged(incident).sentence == "rank 2 failed first (exit code 3)"


@pytest.mark.parametrize(("look_after_s", "culprit"), [(-0.2, 3), (0.2, 1)])
def test_earlier_of_a_ranks_own_account_and_the_launchers_look_at_it_counts(look_after_s: float, culprit: int) -> None:
    """A look that is later than the account sees what the rank does in the Wrapper's restart."""
    job = nested([Fault("hang", 2)], ranks=4)
    entered = [r for r in job.records if isinstance(r.event, events.IterationStarted) and r.origin.cycle == 0]
    records = list(job.records)
    for record in entered:
        rank = record.origin.initial_rank
        stack, hang = (LOADS, "on_lock") if rank == 1 else (WAITS, "in_collective")
        look = (LOADS, "on_lock") if rank == 3 else (WAITS, "in_collective")
        records += [
            later(record, 1.0, events.IterationDecided(by=0, stack=stack, hang=hang)),
            later(record, 1.0 + look_after_s, events.WorkerSeen(look[1], look[0]), role="monitor", layer="launcher"),
        ]
    (incident,) = fold(sorted(map(waiting, records), key=lambda record: record.mono_ns))
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(culprit, "waits_for_lock")]
    assert incident.where == user_frame(LOADS)


BAD_BATCH = ExceptionInfo("ValueError", "bad batch", "f2")
GIVEN_UP = ExceptionInfo("resilience.errors.RestartAbort", "too few ranks are left", "f")
HANG_OF_RANK_1 = [
    events.WorkerSeen("on_lock", LOADS) if rank == 1 else events.WorkerSeen("in_collective", WAITS) for rank in range(4)
]


def test_last_iteration_of_an_earlier_call_is_an_incident_of_its_own() -> None:
    """Rank 0 had waited for a lock when the first call failed. In the next call, rank 1 hangs, and the launcher ends
    the cycle."""
    job = nested([Fault("hang", 2)], ranks=4)
    entered = [r for r in job.records if isinstance(r.event, events.IterationStarted) and r.origin.cycle == 0]
    records = [in_call(1, record) if is_of_a_call(record) else record for record in job.records]
    for record in entered:
        rank = record.origin.initial_rank or 0
        stack, hang = (WAITS, "in_collective") if rank else (LOADS, "on_lock")
        records += [
            later(record, -0.09, events.IterationStarted(4, "active")),
            later(record, -0.08, events.IterationDecided(by=0, stack=stack, hang=hang)),
            later(record, -0.07, events.IterationEnded("interrupted", 0.1)),
            later(record, -0.06, events.CallEnded("failed", 1, 1.0, "RestartAbort")),
            later(record, 1.0, HANG_OF_RANK_1[rank], role="monitor", layer="launcher"),
        ]
    incidents = fold(sorted(map(waiting, records), key=lambda record: record.mono_ns))
    assert [incident.layer for incident in incidents] == ["inprocess", "launcher"]
    assert incidents[0].verdict.culprits == ()  # nothing tells why the first call failed
    assert [(each.rank, each.what) for each in incidents[1].verdict.culprits] == [(1, "waits_for_lock")]


def test_fault_after_which_one_rank_gave_up_is_no_part_of_a_later_incident() -> None:
    """The other ranks went on for two more iterations before rank 1 hung and the launcher ended the cycle."""
    job = nested([Fault("hang", 2)], ranks=4)
    entered = [r for r in job.records if isinstance(r.event, events.IterationStarted) and r.origin.cycle == 0]
    records = [in_iteration(3, record) if is_of_a_call(record) else record for record in job.records]
    wrong = InterruptionRecord(3, Interruption.EXCEPTION, exception=BAD_BATCH, iteration=0, stage="run", origin="own")
    gone = InterruptionRecord(0, Interruption.BASE_EXCEPTION, exception=GIVEN_UP, iteration=1)
    for record in entered:
        rank = record.origin.initial_rank or 0
        happened = [
            (0, events.IterationStarted(4, "active")),
            *([(0, events.RankInterrupted(wrong))] if rank == 3 else []),
            (0, events.IterationDecided(by=3, stack=WAITS, hang="in_collective")),
            (1, events.IterationStarted(4, "active")),
            *([(1, events.RankInterrupted(gone))] if rank == 0 else []),
            *([] if rank == 0 else [(1, events.IterationDecided(by=0, stack=WAITS, hang="in_collective"))]),
            *([] if rank == 0 else [(2, events.IterationStarted(4, "active"))]),
        ]
        for number, (iteration, event) in enumerate(happened):
            records.append(later(record, -0.09 + 0.01 * number, event, iteration=iteration))
        records.append(later(record, 1.0, HANG_OF_RANK_1[rank], iteration=None, role="monitor", layer="launcher"))
    incidents = fold(sorted(map(waiting, records), key=lambda record: record.mono_ns))
    named = [[(each.rank, each.what) for each in incident.verdict.culprits] for incident in incidents]
    assert named == [[(3, "exception")], [(1, "waits_for_lock")]]


def test_fault_of_a_cycle_in_which_ranks_gave_up_one_after_the_other_is_one_incident() -> None:
    """Rank 3 raised. Ranks 0, 1 and 2 gave up in the next three iterations, and the agent saw rank 0 exit first."""
    told = launched([Fault("raise", 0)], ranks=4)
    wrapped = record_streams.job([record_streams.Fault("exception", 3, 0)], world=4).records
    records = [record for record in wrapped if record.origin.iteration in (None, 0)]
    for start in (r for r in wrapped if isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1):
        rank = start.origin.initial_rank or 0
        for iteration in range(1, min(rank, 2) + 2):
            began = in_iteration(iteration, start)
            gone = InterruptionRecord(rank, Interruption.BASE_EXCEPTION, exception=GIVEN_UP, iteration=iteration)
            ends = (events.RankInterrupted(gone), events.CallEnded("failed", iteration + 1, 1.0, "RestartAbort"))
            records += [began, *(msgspec.structs.replace(began, event=end) for end in ends if iteration == rank + 1)]
    (incident,) = fold([*of_node(records), *told.records])
    assert incident.layer == "launcher"
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(3, "exception")]


def is_of_a_call(record: Record) -> bool:
    origin = record.origin
    return origin.layer != "launcher" and origin.cycle == 0 and origin.rank is not None and origin.iteration == 0


def in_call(call: int, record: Record) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, call=call))


def in_iteration(iteration: int, record: Record) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, iteration=iteration))


def test_nobody_is_blamed_where_all_wait_in_a_collective_or_nothing_was_seen() -> None:
    told = launched([Fault("hang", 2)], nodes=2)
    waits = events.WorkerSeen("in_collective", WAITS)
    for looks in ({0: waits, 1: waits, 3: waits}, {}):
        (incident,) = fold(waited(told, looks))
        assert incident.verdict.culprits == ()


def test_rank_whose_place_is_not_known_is_not_cleared_of_a_hang_that_no_rank_is_blamed_for() -> None:
    waits = events.WorkerSeen("in_collective", WAITS)
    (incident,) = fold(waited(launched([Fault("hang", 2)], nodes=2), {1: waits, 3: waits}))
    assert incident.verdict.culprits == incident.verdict.candidates == ()
    assert {rank for group in incident.verdict.exonerated for rank in group.ranks} == {1, 2, 3}


def test_node_of_which_the_agent_is_gone_is_lost_though_its_monitors_have_ended_its_workers() -> None:
    told = launched([Fault("node", 2)], nodes=2)
    (lost,) = fold(told.records)
    made = list(told.records)
    last = max(record.mono_ns for record in made)
    started = [r for r in made if isinstance(r.event, events.WorkerStarted) and r.origin.cycle == 0]
    for record in started:
        if record.event.worker_rank in (2, 3):
            rank, pid = record.event.worker_rank, record.event.worker_pid
            origin = msgspec.structs.replace(record.origin, role="monitor", layer="launcher", initial_rank=rank)
            died = InterruptionRecord(
                rank, Interruption.TERMINATED, "process ended (SIGTERM)", exit=Exit(signal="SIGTERM"), pid=pid
            )
            for event in (events.RankSignalled(("SIGTERM", "SIGCONT"), "agent"), events.RankInterrupted(died)):
                made.append(Record(0, record.wall_ns, last + 1, origin, event))
    (incident,) = fold(made)
    assert (incident.kind, incident.verdict) == (lost.kind, lost.verdict)


def without_store(told: Launched, *nodes: str) -> list[Record]:
    """The same, and these nodes' agents lost the job's store in the first cycle."""
    made = list(told.records)
    for node in nodes:
        last = [r for r in made if (r.origin.node, r.origin.role, r.origin.cycle) == (node, "agent", 0)][-1]
        made.append(msgspec.structs.replace(last, event=events.StoreLost("it did not answer")))
    return made


def test_node_that_is_cut_off_is_lost() -> None:
    told = launched([Fault("node", 2)], nodes=3)
    (lost,) = fold(told.records)
    (incident,) = fold(without_store(told, "node1"))
    assert (incident.kind, incident.verdict, incident.excluded) == (lost.kind, lost.verdict, (2, 3))


def test_where_most_nodes_are_cut_off_the_host_of_the_store_is_to_blame_and_none_of_them() -> None:
    (incident,) = fold(without_store(launched([Fault("node", 2)], nodes=3), "node1", "node2"))
    assert (incident.verdict.what, incident.category, incident.verdict.culprits) == ("store_lost", "host", ())
    assert incident.excluded == (2, 3, 4, 5)


def test_job_of_which_all_nodes_lost_the_store_has_ended() -> None:
    told = launched([Fault("exhausted", 0)], nodes=2)
    (incident,) = fold(without_store(told, "node0", "node1"))
    assert (incident.verdict.what, incident.status) == ("store_lost", "ended")


def test_node_that_alone_is_cut_off_is_lost_though_it_had_most_ranks() -> None:
    told = launched([Fault("node", 2)], nodes=2)
    records = without_store(told, "node1")
    for number, record in enumerate(records):  # rank 1 ran on node1 too
        if 1 in (record.origin.initial_rank, worker_rank(record.event)):
            records[number] = msgspec.structs.replace(record, origin=on_node(record.origin, "node1"))
    (incident,) = fold(records)
    assert (incident.verdict.what, [culprit.rank for culprit in incident.verdict.culprits]) == ("node_lost", [1])


def test_node_that_died_while_another_one_was_cut_off_does_not_mean_that_the_store_was_lost() -> None:
    told = launched([Fault("node", 2)], nodes=3)
    died = [r for r in told.records if (r.origin.node, r.origin.cycle) != ("node2", 0) or not is_end(r.event)]
    (incident,) = fold(without_store(Launched({("all", None): died}), "node1"))
    assert (incident.verdict.what, incident.verdict.first) == ("node_lost", 2)


def with_lost_store_process(told: Launched, error: str, **lost: bool) -> list[Record]:
    """The records of a job whose rank 2 failed with an error, after a node had lost the process with its stores."""
    records = []
    for record in told.records:
        event = record.event
        if isinstance(event, events.RankInterrupted) and event.record.rank == 2:
            failure = msgspec.structs.replace(
                event.record, exception=ExceptionInfo(error, "Broken pipe", ""), log_tail=()
            )
            record = msgspec.structs.replace(record, event=events.RankInterrupted(failure))
        records.append(record)
        if isinstance(event, events.CycleStarted) and (record.origin.node, record.origin.cycle) == ("node0", 0):
            event = events.StoreProcessLost(7, "SIGKILL", **lost)
            records.append(msgspec.structs.replace(record, event=event))
    return records


@pytest.mark.parametrize("error", ["DistNetworkError", "DistStoreError"])
def test_rank_that_fails_because_its_store_is_gone_is_not_blamed(error: str) -> None:
    told = launched([Fault("raise", 2)], nodes=2)
    (incident,) = fold(with_lost_store_process(told, f"torch.distributed.{error}", is_cycle_store=True))
    assert (incident.verdict.what, incident.category, incident.verdict.culprits) == ("store_lost", "host", ())
    assert incident.verdict.candidates == ()


@pytest.mark.parametrize(
    ("error", "is_cycle_store"),
    [("ValueError", True), ("ConnectionResetError", True), ("torch.distributed.DistNetworkError", False)],
)
def test_loss_of_a_store_process_clears_no_rank_that_failed_for_another_reason(
    error: str, is_cycle_store: bool
) -> None:
    told = launched([Fault("raise", 2)], nodes=2)
    (incident,) = fold(with_lost_store_process(told, error, is_cycle_store=is_cycle_store))
    assert incident.verdict.what != "store_lost"
    assert {culprit.rank for culprit in (*incident.verdict.culprits, *incident.verdict.candidates)} == {2}


def test_rank_that_was_killed_is_blamed_though_another_rank_had_lost_its_store() -> None:
    told = launched([Fault("raise", 2)], nodes=2)
    records = []
    for record in with_lost_store_process(told, "torch.distributed.DistNetworkError", is_cycle_store=True):
        if isinstance(record.event, events.RankInterrupted) and record.event.record.rank == 3:
            end = msgspec.structs.replace(record.event.record, exit=Exit(signal="SIGSEGV"), exception=None, log_tail=())
            record = msgspec.structs.replace(record, event=events.RankInterrupted(end))
        records.append(record)
    (incident,) = fold(records)
    assert {culprit.rank for culprit in incident.verdict.culprits} == {3}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            events.StoreProcessLost(7, "SIGKILL", is_cycle_store=True),
            "the process that hosts a node's stores was lost, and the store of the workers with it: SIGKILL",
        ),
        (
            events.StoreProcessLost(7, "SIGKILL", is_job_store=True, is_cycle_store=True),
            "the process that hosts a node's stores was lost, and the job's store with it: SIGKILL",
        ),
        (events.StoreProcessLost(7, ""), "the process that hosts a node's stores was lost"),
        (
            events.StoreProcessStopped(7),
            "the process that hosts a node's stores had been stopped; the agent resumed it",
        ),
    ],
)
def test_what_happened_to_a_store_process_is_a_note(event: events.Event, text: str) -> None:
    assert note(event) == text


def on_node(origin: Origin, node: str) -> Origin:
    return msgspec.structs.replace(origin, node=node)


def worker_rank(event: events.Event) -> int | None:
    return event.worker_rank if isinstance(event, events.WorkerStarted | events.WorkerExited) else None


def is_end(event: events.Event) -> bool:
    return isinstance(event, events.CycleEnded | events.RestartDecided)


def test_spare_that_is_cut_off_while_it_waits_is_no_part_of_an_incident() -> None:
    told = launched([Fault("raise", 2)], nodes=2)
    (plain,) = fold(told.records)
    agent = next(record for record in told.records if isinstance(record.event, events.CycleStarted))
    spare = on_node(agent.origin, "spare")
    lost = Record(1, agent.wall_ns, agent.mono_ns, spare, events.StoreLost("node spare could not reach it"))
    unfinished = [record for record in told.records if record.origin.cycle == 0 and not is_end(record.event)]
    (running,) = fold(unfinished)
    assert fold([*told.records, lost]) == (plain,)
    (incident,) = fold([*unfinished, lost])
    assert incident.verdict == running.verdict


def never_started(told: Launched, rank: int, called: int | None = None) -> list[Record]:
    """The same, and the Wrapper's call of one rank found no store; that of the rank `called` did."""
    made = list(told.records)
    last = max(record.mono_ns for record in made)
    agent = next(record for record in made if isinstance(record.event, events.CycleStarted))

    def add(initial_rank: int, event: events.CallStarted | events.StoreLost | events.CallEnded) -> None:
        origin = msgspec.structs.replace(
            agent.origin,
            role="rank",
            layer="inprocess",
            call=0,
            initial_rank=initial_rank,
            rank=initial_rank,
            world_size=4,
        )
        made.append(Record(0, agent.wall_ns, last + 1, origin, event))

    if called is not None:
        add(called, events.CallStarted("f", 4, "1", "1", "1", "h", "forked"))
    add(rank, events.StoreLost("StoreError: nobody hosts it"))
    add(rank, events.CallEnded("left", 0, 1.0, "StoreError: nobody hosts it"))
    return made


def test_rank_that_left_in_the_first_iteration_of_a_cycle_took_no_part_in_its_end() -> None:
    first, last = Iteration(), Iteration()
    first.started, first.world_size = dict.fromkeys(range(4), "active"), 4
    last.started, last.world_size = dict.fromkeys((0, 2, 3), "active"), 3
    evidence = wrapped_ranks._without_ranks_that_left_before(Evidence(active=frozenset(range(4))), [first, last])
    assert evidence.active == {0, 2, 3}


def test_where_no_rank_found_a_store_the_rank_that_says_so_first_is_not_to_blame() -> None:
    (incident,) = fold(never_started(launched([Fault("raise", 2)], nodes=2), 2))
    assert (incident.verdict.what, incident.category, incident.verdict.culprits) == ("store_lost", "host", ())


@pytest.mark.parametrize(("later_s", "noted"), [(-0.5, {"a process lost its store: it is gone": {1}}), (0.5, {})])
def test_store_that_the_launcher_ended_with_its_cycle_is_not_lost(later_s: float, noted: dict[str, set[int]]) -> None:
    """A monitor may see that before the launcher ends it, too."""
    told = launched([Fault("raise", 2)], nodes=2)
    ended = (record for record in told.records if isinstance(record.event, events.CyclePhaseEnded))
    ran = min((record for record in ended if record.event.phase == "run"), key=lambda record: record.wall_ns)
    wall_ns, mono_ns = (at + round(later_s * 1e9) for at in (ran.wall_ns, ran.mono_ns))
    origin = msgspec.structs.replace(
        ran.origin, role="monitor", layer="inprocess", call=0, initial_rank=1, rank=1, world_size=4
    )
    lost = Record(0, wall_ns, mono_ns, origin, events.StoreLost("it is gone"))
    agent = next(record for record in told.records if isinstance(record.event, events.CycleStarted))
    exited = events.WorkerExited(3, 3, 103, 3, None, False)
    # An end that the restart policy tolerates is no end of the run.
    tolerated = msgspec.structs.replace(agent, event=exited)
    history = History(notes=dict.fromkeys((events.StoreLost,), note)).take_all([tolerated, *told.records, lost])
    assert history.noted == noted
    (iteration,) = history.iterations.values()
    assert iteration.store_lost == (set() if not noted else {1})


def test_rank_that_alone_found_no_store_is_to_blame() -> None:
    (incident,) = fold(never_started(launched([Fault("raise", 2)], nodes=2), 2, called=0))
    assert [culprit.rank for culprit in incident.verdict.culprits] == [2]


def test_job_of_which_a_rank_and_the_agent_were_killed_together_has_ended() -> None:
    """As when memory runs out on the host: the monitors end the other workers, and no agent is left to record it."""
    told = launched(ranks=3, is_running=True)
    for rank, end in ((0, Exit(signal="SIGTERM")), (1, Exit(signal="SIGKILL", oom=True)), (2, Exit(signal="SIGTERM"))):
        died = InterruptionRecord(rank, Interruption.TERMINATED, "process ended", exit=end, pid=1000 + rank)
        ended: list[events.Event] = [events.RankExited(False, signal=end.signal), events.RankInterrupted(died)]
        if rank != 1:
            ended.insert(0, events.RankSignalled(("SIGTERM", "SIGCONT"), "agent"))
        last = told.files["node0", rank][-1]
        told.files["node0", rank] += [msgspec.structs.replace(last, event=event) for event in ended]
    incident = only(told)
    assert incident.status == "ended"
    assert "the other ranks continued" not in incident.actions
    assert 1 in {culprit.rank for culprit in incident.verdict.culprits}


@pytest.mark.parametrize(("reached", "is_repetition"), [((4, 10, 18), False), ((4, 4, 4), True)])
def test_steps_that_other_ranks_reached_in_a_cycle_are_progress_between_identical_failures(
    reached: tuple[int, ...], is_repetition: bool
) -> None:
    """The failing rank raises before its first step. The budget knows the highest step of all ranks."""
    records = []
    for record in launched([Fault("raise", 1)] * 3).records:
        event = record.event
        if isinstance(event, events.RankInterrupted):
            event = events.RankInterrupted(msgspec.structs.replace(event.record, step=None))
        elif isinstance(event, events.CycleEnded):
            event = msgspec.structs.replace(event, step=(*reached, None)[record.origin.cycle])
        records.append(msgspec.structs.replace(record, event=event))
    *_, last = fold(records)
    assert last.same_as == (1, 2)
    assert ("another restart will not help" in " ".join(last.advice)) is is_repetition
