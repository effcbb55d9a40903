"""Status and report name the same rank for the last fault, whatever decided who was first."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.attribution.symptoms import CLASSES
from resilience.facts import events
from resilience.facts.identity import Origin, Role
from resilience.facts.interruptions import Detector, Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import CycleHistory
from resilience.history.places import AT_ENTRY, judged_place
from resilience.status import first_read, last_fault
from resilience.status.last_fault import LastFault
from resilience.status.state import Now, Watcher
from tests.support import launch_streams, nested_streams, record_streams
from tests.support.agreement import written
from tests.support.record_streams import STARTED_NS, Fault

KINDS = get_args(record_streams.Kind)
BEFORE = Fault("exception", 2, 0, 5)  # an earlier fault, of another rank


def now_of(folder: Path) -> Now:
    now = Watcher(folder, lambda: 1.7e9 + 3600.0).look()
    assert now is not None
    return now


def with_verdicts(records: list[Record], incidents: tuple[Incident, ...]) -> list[Record]:
    """Return the records with those that the monitor of rank 0, or the first agent, writes after each restart."""
    made = list(records)
    for incident in incidents:
        role = "agent" if incident.layer == "launcher" else "monitor"
        writer = [
            record
            for record in records
            if record.origin.role == role and (role == "agent" or record.origin.initial_rank == 0)
        ][-1]
        origin = msgspec.structs.replace(writer.origin, attempt=incident.attempt)
        if role == "monitor":
            origin = msgspec.structs.replace(origin, call=incident.call, iteration=incident.iteration + 1)
        made.append(msgspec.structs.replace(writer, origin=origin, event=judged(incident)))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "only the ends of files are read"])
def test_status_and_report_name_the_same_rank_once_the_verdict_is_on_record(
    kind: record_streams.Kind, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        monkeypatch.setattr(first_read, "HEAD", 1 << 10)
        monkeypatch.setattr(first_read, "TAIL", 2 << 10)
        monkeypatch.setattr(last_fault, "FIRST", 4 << 10)
    records = record_streams.job([BEFORE, Fault(kind, 1, 1, 20)], world=4, spares=1).records
    incidents = fold(records)
    failure = now_of(written(with_verdicts(records, incidents), tmp_path / "run")).failure
    last = [incident for incident in incidents if incident.verdict.first is not None][-1]
    assert failure is not None
    assert failure.rank == (last.verdict.first_blamed if last.verdict.culprits else last.verdict.first)
    assert ("no rank is to blame" in failure.what) == (not last.verdict.culprits)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"waited_for", "communication", "skipped", "monitor"}))
def test_status_and_report_name_the_same_rank_before_the_verdict_is_on_record(
    kind: record_streams.Kind, tmp_path: Path
) -> None:
    records = record_streams.job([BEFORE, Fault(kind, 1, 1, 20)], world=4, spares=1).records
    incidents = fold(records)
    failure = now_of(written(records, tmp_path / "run")).failure
    assert failure is not None
    assert failure.rank == [each for each in incidents if each.verdict.culprits][-1].verdict.first_blamed


def test_rank_that_the_others_waited_for_has_the_class_and_the_time_of_its_incident(tmp_path: Path) -> None:
    """No record of its own says what it did: the one who waited reported."""
    records = record_streams.job([BEFORE, Fault("waited_for", 1, 1, 20)], world=4).records
    incident = fold(records)[-1]
    own = [record for record in records if not is_own_fault(record, 1)]
    failure = now_of(written(with_verdicts(own, (incident,)), tmp_path / "run")).failure
    assert failure is not None and incident.detected_wall_ns is not None
    assert (failure.rank, failure.what) == (1, "hanging")
    assert failure.ago_s == pytest.approx(1.7e9 + 3600.0 - incident.detected_wall_ns / 1e9)


def is_own_fault(record: Record, rank: int) -> bool:
    event = record.event
    return isinstance(event, events.RankInterrupted) and event.record.rank == rank


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["kill", "raise", "hang"])
def test_status_and_report_name_the_same_rank_for_a_restart_by_the_launcher(
    kind: launch_streams.Kind, is_nested: bool, tmp_path: Path
) -> None:
    faults = [launch_streams.Fault("kill", 1), launch_streams.Fault(kind, 0)]
    told = (nested_streams.nested if is_nested else launch_streams.launched)(faults, nodes=2)
    incidents = fold(told.records)
    for number, records in enumerate((told.records, with_verdicts(told.records, incidents))):
        failure = now_of(written(records, tmp_path / f"run{number}")).failure
        assert failure is not None
        assert failure.rank == incidents[-1].verdict.first_blamed


@pytest.mark.parametrize("is_decided", [True, False])
def test_hang_after_the_loss_of_a_monitor_is_the_last_fault_before_a_decision_and_after_it(
    is_decided: bool, tmp_path: Path
) -> None:
    told = launch_streams.launched([launch_streams.Fault("hang", 0)], lost_monitors=[(0, 1)])
    records = told.interleaved(0)
    hung = next(number for number, record in enumerate(records) if is_own_fault(record, 0))
    shown = records if is_decided else records[: hung + 1]
    assert (failure := now_of(written(shown, tmp_path / "run")).failure) is not None
    assert failure.rank == 0


@pytest.mark.parametrize(("rank", "iteration"), [(1, None), (0, 3)])
def test_verdict_after_the_loss_of_a_monitor_is_shown_and_not_that_loss(
    rank: int, iteration: int | None, tmp_path: Path
) -> None:
    """On a cycle, or on an iteration of a Wrapper in it. No record of an interruption names the rank."""
    told = launch_streams.launched(is_running=True, lost_monitors=[(0, 1)])
    last = told.files["node0", None][-1]
    call = None if iteration is None else 0
    verdict = events.IncidentJudged("a rank hung", "hung", 0, iteration, rank, 0.7, (), call)
    judgement = msgspec.structs.replace(
        last,
        sequence=last.sequence + 1,
        wall_ns=last.wall_ns + 10**9,
        origin=msgspec.structs.replace(last.origin, initial_rank=None),
        event=verdict,
    )
    failure = now_of(written([*told.records, judgement], tmp_path / "run")).failure
    assert failure is not None
    assert (failure.rank, failure.what) == (rank, CLASSES["hung"])


def test_lost_monitor_has_no_part_in_a_verdict_that_names_no_rank(tmp_path: Path) -> None:
    told = launch_streams.launched(is_running=True, lost_monitors=[(0, 1)])
    last = told.files["node0", None][-1]
    judgement = msgspec.structs.replace(
        last,
        sequence=last.sequence + 1,
        origin=msgspec.structs.replace(last.origin, initial_rank=None),
        event=events.IncidentJudged("the job's store was lost", "store_lost", 0, None, None, None, (), None),
    )
    failure = now_of(written([*told.records, judgement], tmp_path / "run")).failure
    assert failure is not None
    assert (failure.rank, failure.what) == (1, "its monitor was lost: its channel closed")


def test_monitor_that_the_launcher_lost_is_the_last_fault_if_no_rank_has_one(tmp_path: Path) -> None:
    told = launch_streams.launched(lost_monitors=[(0, 1)])
    failure = now_of(written(told.records, tmp_path / "run")).failure
    assert failure is not None
    assert (failure.rank, failure.what) == (1, "its monitor was lost: its channel closed")


def of_process(role: Role, rank: int | None, at_s: float, *happened: events.AnyEvent) -> list[Record]:
    """Records of the agent, or of a launched worker's monitor."""
    origin = Origin("job", "node0", role, 7 + (rank or 0), initial_rank=rank, layer="launcher")
    at_ns = STARTED_NS + round(at_s * 1e9)
    return [Record(at_ns + number, at_ns, at_ns, origin, event) for number, event in enumerate(happened)]


def ended(rank: int, at_s: float) -> events.RankInterrupted:
    at_ns = STARTED_NS + round(at_s * 1e9)
    message, end = f"process {rank} ended (SIGKILL)", Exit(signal="SIGKILL")
    return events.RankInterrupted(
        InterruptionRecord(rank, Interruption.TERMINATED, message, exit=end, detected_wall_ns=at_ns)
    )


def test_end_of_a_process_that_a_second_monitor_records_again_is_as_old_as_its_first_record(tmp_path: Path) -> None:
    records = [record for at_s in (3.0, 10.0) for record in of_process("monitor", 1, at_s, ended(1, at_s))]
    failure = now_of(written(records, tmp_path / "run")).failure
    assert failure is not None
    assert failure.ago_s == pytest.approx(1.7e9 + 3600.0 - STARTED_NS / 1e9 - 3.0)


def test_process_that_a_limit_ended_is_no_fault_beside_the_hang_of_another_rank(tmp_path: Path) -> None:
    """All wait for rank 2. The agent notices the end of rank 0 first."""
    hung = InterruptionRecord(2, Interruption.HARD_TIMEOUT, "no sign of life", detector=Detector("heartbeat", 3.0))
    signalled = events.RankSignalled(("SIGKILL",), "heartbeat")
    records = [
        *of_process("agent", None, 0.0, events.CycleStarted("first", 0, 3)),
        *of_process("monitor", 2, 3.0, events.RankInterrupted(hung), signalled),
        *of_process("monitor", 0, 3.1, signalled, ended(0, 3.2)),
        *of_process("agent", None, 3.3, events.WorkerExited(0, 0, 7, None, "SIGKILL", False)),
        *of_process("agent", None, 3.4, events.RestartDecided("restart", "mark", "rank 0 ended", 1, 2, 1)),
    ]
    failure = now_of(written(records, tmp_path / "run")).failure
    assert failure is not None
    assert (failure.rank, failure.what) == (2, "no sign of life")


def test_status_shows_the_exit_status_of_a_program_that_had_failed_when_a_limit_fired(tmp_path: Path) -> None:
    ended = InterruptionRecord(1, Interruption.HARD_TIMEOUT, "no sign of life", exit=Exit(code=3), stage="ending")
    origin = Origin("job", "node0", "monitor", 7, initial_rank=1, layer="launcher")
    record = Record(0, 10**18, 5, origin, events.RankInterrupted(ended))
    failure = now_of(written([record], tmp_path / "run")).failure
    assert failure is not None
    assert (failure.rank, failure.what) == (1, "exit code 3")


def test_verdict_is_placed_by_its_own_call_and_not_by_that_of_its_writer() -> None:
    """torchrun started the ranks again after the second call of cycle 0; a rank in its first call wrote the verdict."""
    records = [
        msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, call=1))
        for record in record_streams.job([Fault("waited_for", 1, 0, 20)], world=4).records
    ]
    incident = fold(records)[-1]
    writer = msgspec.structs.replace(records[-1].origin, cycle=1, call=0, initial_rank=0)
    verdict = Record(10**6, records[-1].wall_ns + 1, records[-1].mono_ns + 1, writer, judged(incident))
    last = LastFault()
    for record in (*records, verdict):
        last.take(record)
    failure = last.newest(CycleHistory())
    assert failure is not None
    assert (failure.cycle, failure.call, failure.iteration) == ((0, 0), 1, 0) == ((0, 0), incident.call, 0)
    assert failure.rank == incident.verdict.first_blamed


def test_verdict_on_a_calls_entry_is_of_no_iteration() -> None:
    incident = msgspec.structs.replace(fold(record_streams.job([Fault("kill", 1, 0)]).records)[-1], iteration=AT_ENTRY)
    verdict = judged(incident)
    assert (verdict.call, verdict.iteration) == (0, None)


def test_verdict_is_looked_for_where_the_ranks_write_it() -> None:
    names = [Path(f"{name}.jsonl") for name in ("a-7", "a-agent", "b-10", "c-0", "odd")]
    assert [path.stem for path in sorted(names, key=last_fault._by_rank)] == ["c-0", "a-7", "b-10", "a-agent", "odd"]


def test_verdict_from_before_the_field_call_has_its_writers_call() -> None:
    """Iteration 1 failed after iteration 0 was judged, and its verdict is not on record."""
    faults = [Fault("exception", 1, 0), Fault("exception", 2, 1, 20)]
    records = record_streams.job(faults, world=4).records
    (told,) = with_verdicts([record for record in records if record.origin.role == "monitor"][:1], fold(records)[:1])[
        1:
    ]
    assert isinstance(told.event, events.IncidentJudged)
    old = msgspec.structs.replace(told, event=msgspec.structs.replace(told.event, call=None))
    last = LastFault()
    for record in (*records, old):
        last.take(record)
    failure = last.newest(CycleHistory())
    assert failure is not None
    assert (failure.rank, failure.iteration, failure.what) == (2, 1, "ValueError: bad batch")


@pytest.mark.parametrize(
    ("call", "iteration", "expected"),
    [(2, 3, (2, 3)), (2, None, (2, None)), (None, None, (None, None)), (None, 3, (7, 3)), (None, -1, (7, None))],
)
def test_place_of_a_verdict(call: int | None, iteration: int | None, expected: tuple[int | None, int | None]) -> None:
    verdict = events.IncidentJudged("", "killed", 0, iteration, call=call)
    assert judged_place(Origin("job", "node", "monitor", 5, call=7), verdict) == expected
