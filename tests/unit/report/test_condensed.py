"""The report says how the run ended, what it lost, and what is worth knowing beside the incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.report.condensed import Launched, Note, Report, as_json, report
from resilience.run_folder.load import Run
from tests.support import launch_streams
from tests.support.launch_streams import launched
from tests.support.nested_streams import nested
from tests.support.record_streams import STARTED_NS, Fault, Job, job


def report_of(told: Job) -> Report:
    return report(Run(Path("run"), None, tuple(told.records), ()))


def test_header_tells_world_versions_and_times() -> None:
    found = report_of(job(world=3, spares=1))
    assert (found.job_id, found.functions, found.world_size, found.nodes) == ("job", ("train.main",), 4, ("node",))
    assert found.versions == {"resilience": "0.1.0", "torch": "2.13.0", "Python": "3.11.7"}
    assert found.started_wall_ns is not None and found.last_wall_ns is not None
    assert STARTED_NS <= found.started_wall_ns < found.last_wall_ns
    assert (found.calls, found.iterations, found.incidents) == (1, 1, ())
    assert found.end == "completed on ranks 0-3"


def test_end_tells_who_completed_who_was_lost_and_who_left() -> None:
    found = report_of(job([Fault("kill", 1, 0), Fault("left", 2, 1, 20)], world=3, spares=2))
    assert (found.completed, found.lost, found.open) == ((0, 3, 4), (1,), ())
    assert [(left.rank, left.error) for left in found.left] == [(2, "SystemExit: 3")]
    assert found.end == "completed on ranks 0, 3-4; rank 1 lost; rank 2 left with an error"


def test_run_that_is_under_way_has_no_end() -> None:
    told = job(world=2)
    told.files[1] = [record for record in told.files[1] if not isinstance(record.event, events.CallEnded)]
    told.files[1] = [record for record in told.files[1] if not isinstance(record.event, events.RankExited)]
    assert report_of(told).end == "completed on rank 0; no end recorded for rank 1: running, or cut off"


def test_rank_of_which_only_the_monitors_start_is_on_record_has_no_recorded_end() -> None:
    told = job([Fault("kill", 2, 0)], world=4)
    told.files[0] = told.files[0][:1]
    cut = report_of(told)
    assert (cut.completed, cut.lost, cut.open, cut.is_ended) == ((1, 3), (2,), (0,), False)
    waiting = report_of(Job({rank: records[:1] for rank, records in told.files.items()}))
    assert waiting.end == "no end recorded for ranks 0-3: running, or cut off"
    gone = msgspec.structs.replace(told.files[3][0], event=events.RankExited(goodbye=True, code=0))
    assert report_of(Job({3: [told.files[3][0], gone]})).open == ()


def test_run_without_records_has_no_end() -> None:
    assert not report(Run(Path("run"), None, (), ())).is_ended


def test_completed_job_that_lost_a_node_has_ended_though_nobody_saw_its_ranks_end() -> None:
    """The launcher goes on without them. They have a number that the last cycle does not have."""
    for node in (0, 1):
        told = nested([launch_streams.Fault("node", 2 * node)], nodes=2, has_steps=True)
        found = report(Run(Path("run"), None, tuple(told.records), ()))
        assert (found.completed, found.lost, found.open, found.is_ended) == ((0, 1), (), (), True)
        assert found.end == "completed on ranks 0-1; the launcher: completed, exit status 0"


def test_rank_whose_node_lost_power_is_lost_once_the_others_have_gone_on_without_it() -> None:
    """Its own monitor is gone too. The one of rank 2, on another node, records that it stood in."""
    told = job([Fault("kill", 3, 0)], world=4)
    lost = told.files.pop(3)
    ended = next(number for number, record in enumerate(lost) if isinstance(record.event, events.RankExited))
    stood_in = next(record for record in lost if isinstance(record.event, events.RankStoodInFor))
    told.files[3] = [placed(record, node="off") for record in lost[:ended]]
    assert report_of(told).open == (3,)
    told.files[2].append(placed(stood_in, initial_rank=2, rank=2, pid=502))
    found = report_of(told)
    assert (found.completed, found.lost, found.open, found.is_ended) == ((0, 1, 2), (3,), (), True)


@pytest.mark.parametrize("lost", ["a", "z"])
def test_completed_job_that_torchrun_continued_without_a_node_has_ended(lost: str) -> None:
    """Ranks 2 and 3 are 0 and 1 then. The files come in the order of the nodes' names."""
    before = job(world=4).files
    again = job(world=2, started_ns=STARTED_NS + 10**12).files
    unended = [record for rank in range(4) for record in before[rank] if not isinstance(record.event, _ENDS)]
    records = [placed(record, node=lost if record.origin.initial_rank in (0, 1) else "b") for record in unended]
    records += [placed(record, node="b", cycle=1) for rank in (0, 1) for record in again[rank]]
    records.sort(key=lambda record: record.origin.node)
    found = report(Run(Path("run"), None, tuple(records), ()))
    assert (found.completed, found.lost, found.open, found.is_ended) == ((0, 1), (), (), True)


_ENDS = (events.CallEnded, events.IterationEnded, events.RankExited, events.MonitorEnded)


def placed(record: Record, **place: Any) -> Record:
    """Return a record with another origin."""
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, **place))


def while_the_launcher_restarts(last: type[events.Event]) -> Report:
    """The report of a job of which rank 1 was killed, up to a record of the agent."""
    told = sorted(launched([launch_streams.Fault("kill", 1)]).records, key=lambda record: record.wall_ns)
    kinds = [(type(record.event), record.origin.cycle) for record in told]
    first = kinds.index((events.RestartDecided, 0)) if last is events.RestartDecided else kinds.index((last, 1))
    records = told[: first + 1]
    of_monitor = next(record for record in records if record.origin.initial_rank == 0)
    stopped = msgspec.structs.replace(of_monitor, event=events.RankExited(False, signal="SIGTERM"))
    return report(Run(Path("run"), None, (*records, stopped), ()))


def test_ranks_that_the_launcher_stops_for_a_restart_are_neither_lost_nor_going_on() -> None:
    found = while_the_launcher_restarts(events.RestartDecided)
    assert (found.lost, found.open, found.is_ended) == ((1,), (0,), False)  # rank 1 was killed
    (incident,) = found.incidents
    assert incident.status == "unfinished"
    assert not any("continued" in action for action in incident.actions)


def test_workers_of_the_next_cycle_are_named_once_they_have_started() -> None:
    (incident,) = while_the_launcher_restarts(events.CycleStarted).incidents
    assert not any("started again" in action for action in incident.actions)
    (incident,) = while_the_launcher_restarts(events.WorkerStarted).incidents
    assert any("started again" in action for action in incident.actions)


def test_empty_run_says_so() -> None:
    found = report(Run(Path("runs/x"), None, (), ()))
    assert (found.job_id, found.end, found.lost_s) == ("x", "no records", None)


def test_job_that_ends_before_its_first_cycle_says_how_the_launcher_ended() -> None:
    """Its agent had waited for the other nodes."""
    origin = Origin("job", "node0", "agent", 7)
    told: list[events.Event] = [events.CyclePhaseStarted("rendezvous"), events.JobEnded("failed", 1, "no place")]
    records = tuple(Record(number, 10**18, number, origin, event) for number, event in enumerate(told))
    found = report(Run(Path("runs/x"), None, records, ()))
    assert found.end == "the launcher: failed, exit status 1: no place"
    assert found.is_ended and found.launched is not None and found.launched.cycles == 0


def test_job_that_waits_for_its_nodes_has_no_end_though_one_of_them_has_left() -> None:
    told = [(node, events.CyclePhaseStarted("rendezvous")) for node in ("node0", "node1")]
    told += [("node1", events.JobEnded("preempted", 143))]
    records = tuple(
        Record(number, 10**18, number, Origin("job", node, "agent", int(node[-1])), event)
        for number, (node, event) in enumerate(told)
    )
    found = report(Run(Path("runs/x"), None, records, ()))
    assert (found.is_ended, found.end) == (False, "the launcher recorded no end")


def test_losses_are_summed_over_the_incidents() -> None:
    found = report_of(job([Fault("exception", 1, 0), Fault("hang", 1, 1, 23)]))
    assert found.lost_steps == 3
    assert found.lost_s == sum(incident.cost.lost_s or 0 for incident in found.incidents)


def test_notes_tell_once_what_is_worth_knowing_of_which_ranks() -> None:
    told = job(world=3)
    for rank in (0, 2):
        told.files[rank] += [noted(told.files[rank][-1], events.RankProgressUnknown(3.0))] * 2
    told.files[1].append(noted(told.files[1][-1], events.AbortFailed("ValueError: no")))
    told.files[1].append(noted(told.files[1][-1], events.ExportStarted("prometheus", "http://x", "port 9 is taken")))
    told.files[1].append(noted(told.files[1][-1], events.ExportStarted("prometheus", "http://x")))
    told.files[0].append(noted(told.files[0][-1], events.HangSuspected("save", 61.0, 3.0, 600.0, False)))
    told.files[0].append(noted(told.files[0][-1], events.HangsWatched({"step": 9.0})))
    told.files[2].append(noted(told.files[2][-1], events.RankSuspected("section:train", 2.0, 1.5, 9.0)))
    waits = events.RankSuspected("section:train", 2.0, 1.5, 9.0, "in_collective")
    told.files[1].append(noted(told.files[1][-1], waits))
    told.files[2].append(noted(told.files[2][-1], events.TimeoutsShadowAlarm("step", 3.0, 3.1)))
    assert report_of(told).notes == (
        Note("no limit on progress was armed: a loop that makes no progress would go unnoticed", (0, 2)),
        Note(
            "a hang was suspected in section 'save', where no limit is set; a rank is ended there after 10 min 00 s",
            (0,),
        ),
        Note("hang detection: off; only these limits are in force: step 9 s", (0,)),
        Note("the abort hook raised: ValueError: no", (1,)),
        Note("metrics are served at http://x: port 9 is taken", (1,)),
        Note("a rank waited in a collective in train: longer than ever before (1.5 s); limit 9 s", (1,)),
        Note("a rank was late in train: longer than ever before (1.5 s); limit 9 s", (2,)),
        Note("a shadow limit would have ended a rank in step: 3 s (nothing was done)", (2,)),
    )


def noted(record: Record, event: events.AnyEvent) -> Record:
    return msgspec.structs.replace(record, event=event)


def test_json_holds_everything_and_what_is_computed() -> None:
    found = report_of(job([Fault("kill", 1, 0)], spares=1))
    plain = msgspec.json.decode(msgspec.json.encode(as_json(found)))
    assert plain["schema"] == 1
    assert plain["end"] == found.end
    (incident,) = plain["incidents"]
    assert incident["verdict"]["first"] == 1
    assert incident["cost"]["lost_s"] == found.lost_s
    assert incident["records"][0]["exit"] == {"signal": "SIGKILL", "oom": False}


def test_launched_job_tells_its_cycles_its_budget_and_its_end() -> None:
    told = launched([launch_streams.Fault("kill", 1), launch_streams.Fault("exhausted", 2)], nodes=2)
    found = report(Run(Path("run"), None, tuple(told.records), ()))
    assert found.launched == Launched(2, 1, 10, "exhausted", 1, "process 2002 ended (SIGKILL)")
    assert (found.lost, found.stopped, found.completed, found.open) == ((2,), (0, 1, 3), (), ())
    assert (found.world_size, found.attempts, [incident.layer for incident in found.incidents]) == (
        4,
        1,
        ["launcher", "launcher"],
    )
    plain = as_json(found)
    assert plain["times"]["ettr"] == found.times.ettr
    assert plain["launched"]["restarts_used"] == 1


def test_workers_that_were_replaced_count_by_their_last_cycle() -> None:
    told = launched([launch_streams.Fault("hang", 1)])
    found = report(Run(Path("run"), None, tuple(told.records), ()))
    assert (found.completed, found.lost, found.stopped) == ((0, 1), (), ())
    running = launched([launch_streams.Fault("hang", 1)], is_running=True)
    assert report(Run(Path("run"), None, tuple(running.records), ())).open == (0, 1)


def test_what_somebody_asked_for_is_noted() -> None:
    told = launched([launch_streams.Fault("membership"), launch_streams.Fault("preempt")])
    found = report(Run(Path("run"), None, tuple(told.records), ()))
    assert [note.what for note in found.notes] == [
        "a new cycle began because nodes joined or left",
        "the job was asked to stop: SIGTERM to the agent of node0",
    ]
