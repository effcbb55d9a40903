"""Whatever breaks, however the files are read: one incident, the right culprit, everybody else cleared."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.attribution.advice import ADVICE, advise, ranks_in_words
from resilience.attribution.culprits import SURE
from resilience.attribution.evidence import Evidence
from resilience.attribution.first_and_cascade import Interruptions
from resilience.attribution.incident import Incident, to_json, where
from resilience.attribution.incidents import fold
from resilience.attribution.restarts import restart_times
from resilience.attribution.symptoms import Class, category_of, is_inside
from resilience.attribution.verdict import Verdict, judge
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import (
    Collective,
    Detector,
    ExceptionInfo,
    Exit,
    FaultOrigin,
    Frame,
    Hang,
    Interruption,
    InterruptionRecord,
    ProcessInfo,
    ThreadStack,
)
from resilience.facts.records import Record
from resilience.facts.user_frames import user_frame
from resilience.history.completeness import Completeness
from resilience.history.history import History
from resilience.history.places import AT_ENTRY
from tests.support.record_streams import GONE, LOAD, LOADS, OTHER, TORCH, TRAIN, WAITS, WRAPPED, Fault, Job, Kind, job
from tests.support.torchrun_streams import in_cycle, stopped_in_restart, under_torchrun

# kind of fault -> what the account must call it, and whom it must blame ("fault": the rank of the plan)
EXPECTED: dict[str, tuple[str, str, str]] = {
    "exception": ("exception", "user_code", "fault"),
    "everywhere": ("common", "user_code", "all"),
    "left": ("left", "user_code", "fault"),
    "exit": ("exited", "user_code", "fault"),
    "kill": ("killed", "unknown", "fault"),
    "oom": ("out_of_memory", "host", "fault"),
    "term": ("told_to_stop", "scheduler", "fault"),
    "hang": ("input_stall", "storage", "fault"),
    "waited_for": ("hung", "user_code", "fault"),
    "stopped": ("stopped", "host", "fault"),
    "native": ("blocked_in_native_code", "user_code", "fault"),
    "busy": ("busy_without_progress", "user_code", "fault"),
    "stuck_abort": ("exception", "user_code", "other"),
    "finalize": ("exception", "user_code", "other"),
    "communication": ("communication", "unknown", "nobody"),
    "skipped": ("desynchronised", "user_code", "fault"),
    "monitor": ("monitor_lost", "host", "fault"),
}
RESTARTING = [kind for kind in get_args(Kind) if kind != "monitor"]


def only(told: Job) -> Incident:
    (incident,) = fold(told.records)
    return incident


def culprits(incident: Incident) -> set[int]:
    return {culprit.rank for culprit in incident.verdict.culprits}


def agents(told: Job, *stated: tuple[int, events.Event]) -> list[Record]:
    """Return what the agent of a job's node says, each some nanoseconds after its last record."""
    last = max(told.records, key=lambda record: record.mono_ns)
    origin = Origin(last.origin.job_id, last.origin.node, "agent", 7)
    return [
        Record(number, last.wall_ns + ago, last.mono_ns + ago, origin, event)  # type: ignore[arg-type]
        for number, (ago, event) in enumerate(stated)
    ]


# -- who, what, why ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_of_fault_is_one_incident_with_the_right_culprit(kind: Kind) -> None:
    what, category, whom = EXPECTED[kind]
    for seed in range(10):
        incident = only(job([Fault(kind, 1, 0)], world=4, spares=1, seed=seed))
        assert (incident.verdict.what, incident.category) == (what, category)
        expected = {"fault": {1}, "other": {0}, "all": {0, 1, 2, 3}, "nobody": set()}[whom]
        assert culprits(incident) == expected


@pytest.mark.parametrize(("kind", "what"), [("kill", "killed"), ("term", "told_to_stop"), ("left", "left")])
def test_ranks_that_torchrun_stops_in_their_restart_are_not_blamed(kind: Kind, what: str) -> None:
    (incident,) = fold(stopped_in_restart(job([Fault(kind, 3, 0)], world=4, seed=3), cause=3))
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(3, what)]
    assert incident.nodes.keys() == {3}
    assert any(cleared.ranks == (0, 1, 2) for cleared in incident.verdict.exonerated)


@pytest.mark.parametrize("after", [None, events.RestartEnded], ids=["in the restart", "after a restart in place"])
def test_incident_after_which_torchrun_starts_all_ranks_again_is_a_restart(after: type[events.Event] | None) -> None:
    """A restart in place takes less time than torchrun needs to see the death."""
    told = job([Fault("kill", 3, 0)], world=4, seed=3)
    stopped = stopped_in_restart(told, 3, after)
    again = in_cycle(job(world=4).records, 1)
    (incident,) = fold([*stopped, *again])
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(3, "killed")]
    assert any(cleared.ranks == (0, 1, 2) for cleared in incident.verdict.exonerated)
    assert (incident.status, incident.excluded, incident.next_world_size) == ("restarted", (), 4)
    assert incident.actions[-1] == "started again by the launcher: ranks 0-3"
    assert incident.restart is not None and incident.restart.ranks == 4
    assert incident.restart.max_s == pytest.approx(299.0, abs=0.2)  # the fault is 1 s after the entry
    by_layer = {times.layer: times for times in restart_times(History().take_all([*again, *stopped]))}
    assert (by_layer["launcher"].restarts, by_layer["launcher"].max_s) == (1, incident.restart.max_s)
    assert ("inprocess" in by_layer) == (after is not None)


@pytest.mark.parametrize(("by", "after_s"), [("SIGTERM", 0.1), ("SIGKILL", 35.0)])
@pytest.mark.parametrize(
    ("kind", "what"), [("kill", "killed"), ("exit", "exited"), ("term", "told_to_stop"), ("left", "left")]
)
def test_ranks_that_torchrun_stops_after_a_restart_in_place_belong_to_its_incident(
    kind: Kind, what: str, by: str, after_s: float
) -> None:
    """Also if torchrun does not start them again. A program may ignore SIGTERM until SIGKILL comes."""
    told = job([Fault(kind, 3, 0)], world=4, seed=3)
    stopped = stopped_in_restart(told, 3, events.RestartEnded, by, after_s)
    (incident,) = fold(under_torchrun(stopped))
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(3, what)]
    assert "the launcher stopped ranks 0-2" in incident.actions
    assert len(fold(stopped)) == 2  # nothing says that a launcher did it


def test_stops_by_torchrun_that_interrupt_two_iterations_belong_to_one_incident() -> None:
    """Rank 0 ends first, and the others restart in place once more before they end, too."""
    told = job([Fault("kill", 3, 0), Fault("term", 0, 1)], world=4, seed=3)
    end = max(record.wall_ns for record in told.records if isinstance(record.event, events.RestartEnded))
    first = [record for record in told.records if record.wall_ns <= end]
    last = {record.origin.initial_rank: record for record in first if record.origin.iteration == 2}
    stops = []
    for rank in (1, 2):
        ended = InterruptionRecord(rank, Interruption.TERMINATED, exit=Exit(signal="SIGTERM"), iteration=2)
        stops.append(msgspec.structs.replace(last[rank], event=events.RankInterrupted(ended)))
    (incident,) = fold(under_torchrun([*first, *stops]))
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(3, "killed")]
    assert "the launcher stopped ranks 0-2" in incident.actions


def test_spares_and_a_cycle_that_nobody_enters_are_no_restarts_of_ranks_by_torchrun() -> None:
    stopped = stopped_in_restart(job([Fault("kill", 3, 0)], world=4, spares=1, seed=3), cause=3)
    entered, failed = in_cycle(job(world=4, spares=1).records, 2), in_cycle(job(world=4).records, 1)
    at_entry = [record for record in failed if isinstance(record.event, events.CallStarted)]
    lost = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"))
    at_entry.append(msgspec.structs.replace(at_entry[1], event=events.RankInterrupted(lost)))
    history = History().take_all([*stopped, *at_entry, *entered])
    assert [(times.restarts, times.ranks) for times in restart_times(history)] == [(1, 4)]
    first, second = fold([*stopped, *at_entry, *entered])
    assert (first.status, first.restart, second.status) == ("restarted", None, "restarted")
    assert second.restart is not None and second.restart.ranks == 4


@pytest.mark.parametrize(
    ("code", "signal", "exited", "blamed"),
    [(0, None, 1, {1}), (None, "SIGTERM", 1, set()), (0, None, 3, set())],
)
def test_worker_that_ends_with_status_0_in_the_middle_is_blamed_unless_its_agent_ended_it(
    code: int | None, signal: str | None, exited: int, blamed: set[int]
) -> None:
    """Its agent takes status 0 for an end that was expected."""
    told = job([Fault("exit", 1, 0)], world=4)
    cycle = ((0, events.CycleStarted("first", 0, 3)), (2, events.CyclePhaseEnded("run", "completed", 1.0)))
    records = agents(told, *cycle, (exited, events.WorkerExited(1, 1, 7, code, signal, True)))
    found = fold([*told.records, *sorted(records, key=lambda record: record.mono_ns)])
    assert {culprit.rank for incident in found for culprit in incident.verdict.culprits} == blamed
    interruptions = Interruptions(History().take_all(records).cycles.nodes)
    for record in told.records:
        interruptions.take(record)
    counted = interruptions.counted()
    assert counted["terminated", "user_code", "first"] == len(blamed)


@pytest.mark.parametrize("end", [None, Exit()])
def test_process_whose_exit_status_nobody_saw_is_not_said_to_have_ended_by_user_code(end: Exit | None) -> None:
    """It was killed together with its monitor, or its monitor could not read its exit status."""
    told = job([Fault("kill", 1, 0)], world=4, seed=3)
    for record in told.records:
        if isinstance(record.event, events.RankInterrupted) and record.event.record.exit is not None:
            unseen = msgspec.structs.replace(record.event.record, exit=end, message="rank and monitor died together")
            break
    else:
        pytest.fail("no process ended")
    (incident,) = fold(
        [
            msgspec.structs.replace(each, event=events.RankInterrupted(unseen)) if each is record else each
            for each in told.records
        ]
    )
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(1, "ended_unseen")]
    assert (incident.category, category_of(unseen)) == ("unknown", "unknown")
    assert incident.advice[0] == ADVICE["ended_unseen"]


@pytest.mark.parametrize(("stage", "type_"), [("ending", "ValueError"), ("run", None)])
def test_error_of_a_rank_that_takes_long_to_end_is_read_from_its_last_lines(stage: str, type_: str | None) -> None:
    lines = ("Traceback (most recent call last):", '  File "/home/me/train.py", line 3, in train', "ValueError: bad")
    hung = InterruptionRecord(1, Interruption.HARD_TIMEOUT, stage=stage, log_tail=lines)
    origin = Origin("job", "node", "monitor", 7, initial_rank=1, layer="launcher")
    history = History().take_all([Record(0, 5, 5, origin, events.RankInterrupted(hung))])
    ((seen,),) = [part.seen for parts in history.cycles.nodes.values() for part in parts.values()]
    assert (seen.record.exception.type if seen.record.exception is not None else None) == type_


def test_line_of_a_hang_is_from_the_ranks_own_stack_if_another_rank_was_first() -> None:
    late = InterruptionRecord(
        1, Interruption.SOFT_TIMEOUT, detector=Detector("step", 6.0), stacks=(ThreadStack("MainThread", (TRAIN,)),)
    )
    stacks = {1: (TRAIN, LOAD)}
    assert where(1, [late], stacks, first=0) == LOAD
    assert where(1, [late], stacks, first=1) == TRAIN
    assert where(1, [late], {}, first=0) == TRAIN


def two_limits(word: Hang, answered_ns: int, looked_ns: int) -> Incident:
    """Rank 1 is stopped, and rank 0 waits for it. Both exceed their limit at the same moment. Rank 0's own monitor
    writes what it saw before it takes the message in which rank 0 answers."""
    origins = [Origin("job", "node", "monitor", 7, initial_rank=rank, rank=rank, iteration=0) for rank in (0, 1)]

    def silent(rank: int, word: Hang, state: str, stack: tuple[Frame, ...] = ()) -> events.RankInterrupted:
        stacks = (ThreadStack("MainThread", stack),) if stack else ()
        process = ProcessInfo(state, 0.0, 0.1)
        return events.RankInterrupted(
            InterruptionRecord(
                rank,
                Interruption.SOFT_TIMEOUT,
                detector=Detector("watchdog", 2.0),
                iteration=0,
                stage="run",
                hang=word,
                process=process,
                stacks=stacks,
            )
        )

    answer = events.IterationDecided(by=1, stack=WAITS, hang="in_collective")
    stream: list[tuple[int, int, events.Event]] = [
        (0, 1, events.IterationStarted(2, "active")),
        (1, 1, events.IterationStarted(2, "active")),
        (1, 100, silent(1, "stopped", "T")),
        (1, 101, events.InterruptionArrived(1, Interruption.SOFT_TIMEOUT, 0, 1)),
        (0, looked_ns, silent(0, word, "S", (TRAIN,))),
        (0, answered_ns, answer),
        (0, looked_ns + 20, events.InterruptionArrived(0, Interruption.SOFT_TIMEOUT, 0, 2)),
    ]
    (incident,) = fold(Record(number, at, at, origins[rank], event) for number, (rank, at, event) in enumerate(stream))
    return incident


@pytest.mark.parametrize("word", ["on_lock", "in_loop", "in_kernel", "in_call"])
def test_rank_that_its_monitor_saw_only_after_the_restart_had_freed_it_is_cleared(word: Hang) -> None:
    incident = two_limits(word, answered_ns=110, looked_ns=120)
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(1, "stopped")]
    assert any(0 in cleared.ranks for cleared in incident.verdict.exonerated)


@pytest.mark.parametrize("word", ["on_lock", "in_loop", "in_kernel", "holds_gil"])
def test_hang_that_its_monitor_saw_before_the_rank_answered_stands(word: Hang) -> None:
    """The signal that asks for the stacks may end the hang, and the rank then waits like the others."""
    incident = two_limits(word, answered_ns=120, looked_ns=110)
    assert 0 in culprits(incident)


@pytest.mark.parametrize(("method", "is_ended"), [("faulthandler", False), ("own-thread", True), ("own-thread", False)])
def test_rank_that_runs_again_is_cleared_if_the_signal_to_a_hung_one_may_have_freed_it(
    method: str, is_ended: bool
) -> None:
    """Rank 1 holds the interpreter's lock in a call that any signal ends. Rank 0 had waited for it until its own limit,
    and goes on when its monitor looks."""
    origins = [Origin("job", "node", "monitor", 7, initial_rank=rank, rank=rank, iteration=0) for rank in (0, 1)]
    record = InterruptionRecord(
        1,
        Interruption.HARD_TIMEOUT if is_ended else Interruption.SOFT_TIMEOUT,
        detector=Detector("watchdog", 3.0),
        iteration=0,
        stage="run",
        hang="holds_gil",
        process=ProcessInfo("S", 0.0, 1.0),
        stacks=(ThreadStack("MainThread", (TRAIN,)),),
        stack_method=method,
    )
    again = msgspec.structs.replace(
        record,
        rank=0,
        interruption=Interruption.SOFT_TIMEOUT,
        hang="runs_again",
        process=ProcessInfo("R", 0.5, 1.0, runnable_s=0.5),
        stack_method="own-thread",
    )
    stream: list[tuple[int, int, events.Event]] = [
        (0, 1, events.IterationStarted(2, "active")),
        (1, 1, events.IterationStarted(2, "active")),
        (1, 100, events.RankInterrupted(record)),
        (1, 101, events.InterruptionArrived(1, record.interruption, 0, 1)),
        (0, 110, events.RankInterrupted(again)),
        (0, 111, events.InterruptionArrived(0, again.interruption, 0, 2)),
        (0, 112, events.IterationDecided(by=1, stack=(TRAIN,), hang="runs_again")),
    ]
    if is_ended:
        stream.append((1, 105, events.RankSignalled(("SIGTERM", "SIGCONT"), "watchdog")))
    (incident,) = fold(Record(number, at, at, origins[rank], event) for number, (rank, at, event) in enumerate(stream))
    may_be_freed = is_ended or method == "faulthandler"
    assert culprits(incident) == ({1} if may_be_freed else {0, 1})


def test_hang_has_the_same_fingerprint_wherever_the_code_is_installed() -> None:
    incident = only(job([Fault("hang", 1, 0)], world=4))
    assert incident.where is not None
    marks = {
        msgspec.structs.replace(incident, where=Frame(f"{folder}/data.py", line, function)).fingerprint
        for folder, line in (("/home/me", 7), ("/scratch/job 17/src", 7), ("/home/me", 8))
        for function in ("load",)
    }
    assert len(marks) == 1
    other = msgspec.structs.replace(incident, where=Frame("/home/me/data.py", 7, "unpack"))
    assert other.fingerprint not in marks


@given(
    kinds=st.lists(st.sampled_from(RESTARTING), min_size=1, max_size=4),
    world=st.integers(4, 9),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_interruption_is_one_incident_and_every_rank_is_either_blamed_or_cleared(
    kinds: list[Kind], world: int, seed: int, data: st.DataObject
) -> None:
    alive = list(range(1, world))
    faults = []
    for iteration, kind in enumerate(kinds):
        rank = data.draw(st.sampled_from(alive))
        if len(alive) > 3:
            alive.remove(rank)
        else:
            kind = "exception"
        faults.append(Fault(kind, rank, iteration, step=10 * (iteration + 1)))
    told = job(faults, world=world, spares=0, seed=seed)
    incidents = fold(told.interleaved(seed))
    assert [incident.iteration for incident in incidents] == list(range(len(faults)))
    for incident, fault in zip(incidents, faults, strict=True):
        what, category, whom = EXPECTED[fault.kind]
        assert (incident.verdict.what, incident.category) == (what, category)
        if whom == "fault":
            assert culprits(incident) == {fault.rank}
        cleared = [rank for group in incident.verdict.exonerated for rank in group.ranks]
        assert len(cleared) == len(set(cleared))
        assert not set(cleared) & culprits(incident)
        assert len(set(cleared) | culprits(incident)) == incident.world_size
        assert all(group.reason for group in incident.verdict.exonerated)


@given(seed=st.integers(0, 10_000), order=st.permutations(range(5)))
@settings(max_examples=40, deadline=None)
def test_order_between_files_does_not_change_the_account(seed: int, order: list[int]) -> None:
    kinds = get_args(Kind)
    faults = [Fault(kinds[seed % len(kinds)], 1, 0), Fault("exception", 2, 1, 20)]
    told = job(faults, world=4, spares=1, seed=seed)
    by_file = [record for rank in order for record in told.files[rank]]
    expected = fold(told.records)
    assert fold(by_file) == expected
    assert fold(told.interleaved(seed)) == expected


@given(cut=st.integers(0, 400), seed=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_any_beginning_of_an_account_can_be_folded(cut: int, seed: int) -> None:
    told = job([Fault("kill", 1, 0), Fault("hang", 2, 1, 20)], seed=seed)
    records = told.interleaved(seed)[:cut]
    assert len(fold(records)) <= 2


def test_undisturbed_job_has_no_incident() -> None:
    assert fold(job().records) == ()


def test_first_mover_is_the_dead_rank_though_another_one_reported_first() -> None:
    told = job([Fault("kill", 2, 0)], seed=0)
    told.files = {rank: [_by(record, 3) for record in records] for rank, records in told.files.items()}
    incident = only(told)
    assert (incident.verdict.first, incident.reported_first) == (2, 3)


def _by(record: Record, first: int) -> Record:
    if isinstance(record.event, events.IterationDecided):
        return msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, by=first))
    return record


SIGCHLD = Frame("/venv/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", 73, "handler")
ENGINE = Frame("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward")
LOADING = (Frame("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 9, "_try_get_data"), LOAD)


@pytest.mark.parametrize(
    ("error", "category", "is_own"),
    [
        (
            ExceptionInfo(
                "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", "", (*LOADS, SIGCHLD)
            ),
            "host",
            True,
        ),
        (ExceptionInfo("ConnectionResetError", "[Errno 104] Connection reset by peer", "", LOADING), "host", True),
        (ExceptionInfo("EOFError", "", "", LOADING), "host", True),
        (ExceptionInfo("ConnectionResetError", "[Errno 104] Connection reset by peer", "", LOADS), "network", False),
        (
            ExceptionInfo("ValueError", "Caught ValueError in DataLoader worker process 0.", "", LOADING),
            "user_code",
            True,
        ),
    ],
)
def test_lost_process_of_a_data_loader_is_no_lost_rank(error: ExceptionInfo, category: str, is_own: bool) -> None:
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=error)
    assert category_of(record) == category
    assert bool(judge(Evidence((record,), active=frozenset((0, 1)))).culprits) is is_own


def test_order_of_arrival_decides_between_two_exceptions_and_the_clock_does_not() -> None:
    def raised(rank: int, name: str) -> InterruptionRecord:
        error = ExceptionInfo(name, "mine", name, LOADS)
        at = {0: 2, 1: 1}[rank]  # rank 1's clock says that it was earlier
        return InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, detected_wall_ns=at)

    seen = Evidence((raised(0, "KeyError"), raised(1, "TypeError")), first=0, active=frozenset(range(4)))
    verdict = judge(seen)
    assert [culprit.rank for culprit in verdict.culprits] == [0]
    assert verdict.cascade == (1,)
    by_store = tuple(
        msgspec.structs.replace(record, arrival_order=2 - record.rank)
        for record in (raised(0, "KeyError"), raised(1, "TypeError"))
    )
    assert [c.rank for c in judge(Evidence(by_store, active=frozenset(range(4)))).culprits] == [1]


def test_faults_of_their_own_on_two_ranks_are_both_blamed_and_arrival_says_which_was_first() -> None:
    def raised(rank: int, origin: FaultOrigin) -> InterruptionRecord:
        error = ExceptionInfo("KeyError", "mine", f"of rank {rank}", LOADS)
        return InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, origin=origin)

    records = (raised(0, "own"), raised(1, "own"), raised(2, "consequence"), raised(3, "communication"))
    verdict = judge(Evidence(records, first=1, active=frozenset(range(4))))
    assert [culprit.rank for culprit in verdict.culprits] == [1, 0]
    assert (verdict.first, verdict.cascade) == (1, (2, 3))


def test_settled_error_of_a_communication_call_is_blamed_unless_another_rank_went_on() -> None:
    error = ExceptionInfo("RuntimeError", GONE, "f", WAITS)
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=error, origin="own")
    waits = dict.fromkeys(range(1, 4), WAITS)
    alone = judge(Evidence((record,), first=0, active=frozenset(range(4)), stacks=waits))
    assert (alone.what, alone.first, alone.culprits) == ("unknown", None, ())
    assert [(candidate.rank, candidate.confidence) for candidate in alone.candidates] == [(0, 0.4)]
    seen = Evidence((record,), first=0, active=frozenset(range(4)), stacks=waits, returned=frozenset((2,)))
    assert [(culprit.rank, culprit.what) for culprit in judge(seen).culprits] == [(2, "went_on")]


@pytest.mark.parametrize("spares", [0, 2])
def test_rank_that_alone_was_active_is_blamed_for_an_error_of_a_communication_call(spares: int) -> None:
    error = ExceptionInfo("RuntimeError", GONE, "f", WAITS)
    told = [
        msgspec.structs.replace(
            record, event=events.RankInterrupted(msgspec.structs.replace(record.event.record, exception=error))
        )
        if isinstance(record.event, events.RankInterrupted)
        else record
        for record in job([Fault("exception", 0, 0)], world=1, spares=spares).records
    ]
    (incident,) = fold(told)
    assert [(culprit.rank, culprit.confidence) for culprit in incident.verdict.culprits] == [(0, SURE)]


def test_places_told_by_the_store_win_over_what_ranks_saw_first() -> None:
    def place(rank: int) -> Origin:
        return Origin("job", "node", "rank", 100 + rank, iteration=0, initial_rank=rank, rank=rank, world_size=8)

    records = [Record(0, 1, 1, place(rank), events.IterationStarted(8, "active")) for rank in range(8)]
    for rank, position in ((0, 2), (1, 1)):
        error = ExceptionInfo("ValueError", "mine", f"of rank {rank}", LOADS)
        seen = InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, iteration=0)
        arrived = events.InterruptionArrived(rank, Interruption.EXCEPTION, 0, position)
        records += [Record(1, 2, 2, place(rank), events.RankInterrupted(seen)), Record(2, 3, 3, place(rank), arrived)]
    (incident,) = fold(records)
    assert (culprits(incident), incident.reported_first) == ({1}, 1)
    assert {record.rank: record.arrival_order for record in incident.records} == {0: 2, 1: 1}


def test_two_deaths_at_once_are_two_culprits_of_one_incident() -> None:
    deaths = (
        InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"), pid=101),
        InterruptionRecord(2, Interruption.TERMINATED, exit=Exit(signal="SIGSEGV"), pid=102),
    )
    verdict = judge(Evidence(deaths, first=2, active=frozenset(range(8))))
    assert [(culprit.rank, culprit.what) for culprit in verdict.culprits] == [(2, "crashed"), (1, "killed")]


def test_one_exception_and_one_death_at_once_are_both_blamed_if_the_exception_came_first() -> None:
    error = ExceptionInfo("ValueError", "mine", "f", LOADS)
    records = (
        InterruptionRecord(1, Interruption.EXCEPTION, exception=error),
        InterruptionRecord(2, Interruption.TERMINATED, exit=Exit(signal="SIGSEGV")),
    )
    assert {c.rank for c in judge(Evidence(records, first=1, active=frozenset(range(8)))).culprits} == {1, 2}
    assert {c.rank for c in judge(Evidence(records, first=2, active=frozenset(range(8)))).culprits} == {2}


def test_lost_node_is_blamed_with_all_its_ranks() -> None:
    records = tuple(
        InterruptionRecord(rank, Interruption.UNRESPONSIVE, detector=Detector("peer", 30.0)) for rank in (2, 3)
    )
    verdict = judge(Evidence(records, first=2, active=frozenset(range(8))))
    assert (verdict.what, verdict.category) == ("node_lost", "host")
    assert [culprit.rank for culprit in verdict.culprits] == [2, 3]


def test_rank_that_never_comes_to_the_end_is_blamed_and_who_waits_is_not() -> None:
    waits = InterruptionRecord(0, Interruption.UNRESPONSIVE, detector=Detector("completion_barrier", 120.0))
    seen = Evidence((waits,), first=0, active=frozenset(range(4)), returned=frozenset((0, 1, 2)))
    verdict = judge(seen)
    assert [(culprit.rank, culprit.what) for culprit in verdict.culprits] == [(3, "missed_completion")]
    assert verdict.cascade == (0,)


@pytest.mark.parametrize("how", ["returned", "behind"])
def test_rank_that_went_on_while_others_waited_for_it_is_found_by_their_echoes(how: str) -> None:
    echo = InterruptionRecord(0, Interruption.EXCEPTION, exception=ExceptionInfo("RuntimeError", GONE, "f", WAITS))
    stacks: dict[int, tuple[Frame, ...]] = {0: (WRAPPED,), 1: WAITS, 2: (WRAPPED, OTHER), 3: WAITS}
    seen = Evidence((echo,), first=0, active=frozenset(range(4)), stacks=stacks)
    if how == "returned":
        seen = msgspec.structs.replace(seen, returned=frozenset((2,)))
    else:
        members = (0, 1, 4)
        entered = {rank: (Collective(1, 9, "all_reduce", rank == 0, members),) for rank in (0, 1, 3)}
        behind = {2: (Collective(1, 8, "all_reduce", True, members),)}
        seen = msgspec.structs.replace(seen, collectives=entered | behind)
    verdict = judge(seen)
    assert [(culprit.rank, culprit.what) for culprit in verdict.culprits] == [(2, "went_on")]
    assert {rank for group in verdict.exonerated for rank in group.ranks} == {0, 1, 3}


UNSUPPORTED = ExceptionInfo("RuntimeError", "Invalid scalar type", "f", WAITS)
NAN = ExceptionInfo("RuntimeError", "returned nan values in its 0th output", "f", (TRAIN, ENGINE))


@pytest.mark.parametrize("error", [UNSUPPORTED, NAN])
@pytest.mark.parametrize("world", [2, 4])
def test_rank_that_only_computes_is_a_candidate_beside_one_that_raised_in_a_collective(
    error: ExceptionInfo, world: int
) -> None:
    """A wrong argument of the rank's own raises there too."""
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=error, origin="own")
    active = frozenset(range(world))
    stacks = dict.fromkeys(range(2, world), WAITS) | {0: (), 1: (TRAIN, OTHER)}
    verdict = judge(Evidence((record,), first=0, active=active, stacks=stacks, answered=active))
    assert (verdict.what, verdict.culprits) == ("unknown", ())
    assert [(candidate.rank, candidate.confidence) for candidate in verdict.candidates] == [(0, 0.4), (1, 0.4)]
    stacks = dict.fromkeys(range(1, world), (TRAIN, OTHER))
    verdict = judge(Evidence((record,), first=0, active=active, stacks=stacks, answered=active))
    assert len(verdict.candidates) == (2 if world == 2 else 1)  # nothing is wrong with most of the ranks


def test_echoes_alone_blame_nobody() -> None:
    echo = InterruptionRecord(0, Interruption.EXCEPTION, exception=ExceptionInfo("RuntimeError", GONE, "f", WAITS))
    seen = Evidence((echo,), first=0, active=frozenset(range(4)), stacks=dict.fromkeys((1, 2, 3), WAITS))
    assert judge(seen) == msgspec.structs.replace(judge(seen), what="unknown", category="unknown", culprits=())


def test_rank_that_left_its_collective_on_a_cut_connection_counts_as_waiting() -> None:
    """A rank that reports silence has often left the collective by the time all stacks are taken."""
    told = only(job([Fault("communication", 1, 0)]))
    stacks: dict[int, tuple[Frame, ...]] = dict.fromkeys(range(4), WAITS)
    stacks[1] = (WRAPPED,)
    seen = Evidence(told.records, first=1, active=frozenset(range(4)), stacks=stacks, answered=frozenset(range(4)))
    assert judge(seen).what == "communication"


def test_rank_that_does_not_answer_is_blamed_by_those_that_wait_for_it() -> None:
    told = only(job([Fault("waited_for", 1, 0)]))
    assert told.verdict.what == "hung"
    seen = Evidence(
        told.records,
        first=0,
        active=frozenset(range(4)),
        stacks=dict.fromkeys((0, 2, 3), WAITS),
        answered=frozenset((0, 2, 3)),
    )
    assert [culprit.rank for culprit in judge(seen).culprits] == [1]


def test_nobody_is_blamed_where_it_is_not_known_who_did_not_come() -> None:
    told = only(job([Fault("communication", 1, 0)]))
    verdict = judge(Evidence(told.records[:1], first=1, active=frozenset(range(4))))
    assert (verdict.what, verdict.culprits) == ("hung", ())
    assert {blind.rule for blind in verdict.rules_blind} >= {7, 8, 9, 10}


def test_incident_without_a_report_has_the_time_at_which_a_rank_learned_of_it() -> None:
    """The records of the rank that reported it are lost."""
    told = job([Fault("exception", 1, 0)])
    left = [record for record in told.records if not isinstance(record.event, events.RankInterrupted)]
    seen = min(record.wall_ns for record in left if isinstance(record.event, events.IterationDecided))
    (incident,) = fold(left)
    assert (incident.records, incident.detected_wall_ns, incident.since_wall_ns) == ((), seen, seen)


def test_lost_store_is_no_ranks_fault() -> None:
    told = job(world=4)
    lost = [
        Record(900, 1, 10**13, record.origin, events.StoreLost("connection refused"))
        for rank in range(4)
        for record in told.files[rank]
        if isinstance(record.event, events.IterationStarted)
    ]
    running = [
        record
        for record in told.records
        if not isinstance(record.event, (events.IterationEnded, events.CallEnded, events.RankExited))
    ]
    (incident,) = fold([*running, *lost])
    assert (incident.verdict.what, incident.category, incident.verdict.culprits) == ("store_lost", "host", ())
    assert incident.verdict.rules_fired == (16,)


def test_store_that_died_with_the_monitor_that_hosted_it_is_lost_though_ranks_had_answered() -> None:
    """One rank notices only the end of its monitor. All ranks leave, because the store does not answer."""
    told = job([Fault("monitor", 0, 0)], world=2)
    where = {rank: next(r for r in told.files[rank] if isinstance(r.event, events.StageStarted)) for rank in (0, 1)}
    until = next(n for n, r in enumerate(told.files[0]) if isinstance(r.event, events.RankInterrupted))
    broken = list(told.files[0][: until + 1])
    broken += [record for record in told.files[1] if record.mono_ns <= broken[-1].mono_ns]
    for rank, at in where.items():
        error = ExceptionInfo("resilience.errors.StoreError", "the store did not answer", "feed")
        left = InterruptionRecord(rank, Interruption.BASE_EXCEPTION, "the store did not answer", error, iteration=0)
        after = msgspec.structs.replace(at, wall_ns=at.wall_ns + 10**9, mono_ns=at.mono_ns + 10**9)
        for number, event in enumerate((events.IterationDecided(by=0), events.RankInterrupted(left))):
            broken.append(msgspec.structs.replace(after, sequence=1000 + number, event=event))
    (incident,) = fold(broken)
    assert (incident.verdict.what, incident.verdict.culprits) == ("store_lost", ())


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("RuntimeError: CUDA error: device-side assert triggered", "accelerator"),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp", "accelerator"),
        ("OSError: [Errno 28] No space left on device", "storage"),
        ("MemoryError: ", "host"),
        ("OSError: [Errno 98] Address already in use", "network"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "network"),
        ("OSError: [Errno 101] Network is unreachable", "network"),
        ("RuntimeError: Xid 79: GPU has fallen off the bus", "accelerator"),
        ("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])", "storage"),
        ("ZeroDivisionError: division by zero", "user_code"),
        ("KeyError: 'taxid'", "user_code"),
        ("ValueError: invalid hexidecimal literal", "user_code"),
        ("KeyError: 'checkpoint'", "user_code"),
        ("torch.utils.checkpoint.CheckpointError: recomputed values have different metadata", "user_code"),
        ("ValueError: the network is too deep for this input", "user_code"),
    ],
)
def test_exception_has_the_category_that_its_words_show(text: str, category: str) -> None:
    name, _, message = text.partition(": ")
    error = ExceptionInfo(name, message, "f")
    assert category_of(InterruptionRecord(0, Interruption.EXCEPTION, exception=error)) == category


# -- once each ---------------------------------------------------------------------------------


def test_death_between_two_iterations_is_reported_once_where_it_interrupted() -> None:
    """The rank was taken along into iteration 1, which its stand-in interrupted with a record of iteration 0."""
    told = job([Fault("exception", 0, 0), Fault("kill", 2, 1, 20)])
    files = {
        rank: [_moved(record) for record in records] if rank == 2 else records for rank, records in told.files.items()
    }
    first, second = fold([record for records in files.values() for record in records])
    assert culprits(first) == {0}
    assert culprits(second) == {2}
    assert sum(r.interruption is Interruption.TERMINATED for i in (first, second) for r in i.records) == 1


def _moved(record: Record) -> Record:
    if isinstance(record.event, events.RankInterrupted) and record.event.record.exit is not None:
        moved = msgspec.structs.replace(record.event.record, iteration=0)
        return msgspec.structs.replace(record, event=events.RankInterrupted(moved))
    return record


def test_rank_ended_by_its_monitor_that_dies_an_iteration_later_is_no_fault_of_its_own() -> None:
    told = job([Fault("exception", 0, 0), Fault("kill", 2, 1, 20)])
    seen = next(record for record in told.files[2] if isinstance(record.event, events.IterationDecided))
    told.files[2].append(msgspec.structs.replace(seen, event=events.RankSignalled(("SIGTERM", "SIGCONT"), "watchdog")))
    first, second = fold(told.records)
    assert any("SIGTERM, SIGCONT sent to rank 2" in action for action in first.actions)
    assert (second.verdict.what, second.verdict.first, second.verdict.culprits) == ("ended_by_monitor", 2, ())
    assert not any("sent to" in action for action in second.actions)


def test_hung_rank_that_dies_one_iteration_after_its_hang_explains_both_restarts() -> None:
    """Its monitor had it ended for the hang; it went on into iteration 1 and died there, before the monitor knew."""
    told = job([Fault("hang", 2, 0), Fault("kill", 2, 1, 20)])
    records = [_moved(record) for record in told.files[2]]
    hung = next(record for record in records if isinstance(record.event, events.RankInterrupted))
    for event in (
        events.RankSignalled(("SIGTERM", "SIGCONT"), "watchdog"),
        events.InterruptionArrived(2, Interruption.SOFT_TIMEOUT, 0, 1),
        events.InterruptionArrived(2, Interruption.TERMINATED, 1, 1),
    ):
        records.append(msgspec.structs.replace(hung, event=event))
    first, second = fold([record for records in (told.files | {2: records}).values() for record in records])
    assert [record.interruption for record in first.records if record.rank == 2] == [Interruption.SOFT_TIMEOUT]
    assert (second.verdict.what, second.verdict.first) == ("ended_by_monitor", 2)
    assert [(record.rank, record.arrival_order) for record in second.records if record.exit is not None] == [(2, 1)]


def test_death_that_arrives_in_two_iterations_counts_where_it_interrupted() -> None:
    """The others froze the ranks of iteration 0 after the stand-in's record had arrived there, and before the dead rank
    was listed as terminated. So they took it along, and its stand-in interrupted iteration 1."""
    told = job([Fault("exception", 0, 0), Fault("kill", 2, 1, 20)])
    records = [_moved(record) for record in told.files[2]]
    seen = next(record for record in records if isinstance(record.event, events.RankInterrupted))
    for iteration, position in ((0, 2), (1, 1)):
        arrived = events.InterruptionArrived(2, Interruption.TERMINATED, iteration, position)
        records.append(msgspec.structs.replace(seen, event=arrived))
    first, second = fold([record for records in (told.files | {2: records}).values() for record in records])
    assert (culprits(first), culprits(second)) == ({0}, {2})
    assert second.verdict.what == "killed"


def test_death_seen_by_two_monitors_is_one_record() -> None:
    told = job([Fault("kill", 2, 0)])
    seen = next(record for record in told.files[2] if isinstance(record.event, events.RankInterrupted))
    neighbour = msgspec.structs.replace(seen, origin=told.files[0][0].origin)
    (incident,) = fold([*told.records, neighbour])
    assert [record.rank for record in incident.records if record.exit is not None] == [2]


def test_death_before_ranks_have_met_is_an_incident_of_its_own() -> None:
    origin = Origin("job", "node", "monitor", 1, initial_rank=1, world_size=2)
    death = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(code=1), pid=7, iteration=AT_ENTRY)
    started = msgspec.structs.replace(origin, initial_rank=0, iteration=0, role="rank")
    records = [
        Record(0, 1, 1, origin, events.RankInterrupted(death)),
        Record(0, 2, 2, started, events.IterationStarted(1, "active")),
    ]
    (incident,) = fold(records)
    assert (incident.iteration, incident.status, culprits(incident)) == (AT_ENTRY, "restarted", {1})
    assert "started without it: rank 0" in incident.actions


# -- times, cost, words ------------------------------------------------------------------------


def test_phases_and_restart_have_median_and_the_slowest_rank() -> None:
    told = job([Fault("exception", 1, 0)])
    for number, record in enumerate(told.files[3]):
        if isinstance(record.event, events.StageEnded) and record.event.stage == "abort":
            told.files[3][number] = msgspec.structs.replace(
                record, event=msgspec.structs.replace(record.event, duration_s=0.5)
            )
    incident = only(told)
    assert [phase.name for phase in incident.phases] == list(events.PHASES)
    abort = next(phase.took for phase in incident.phases if phase.name == "abort")
    assert (abort.median_s, abort.max_s, abort.slowest, abort.ranks) == (0.004, 0.5, 3, 4)
    assert incident.restart is not None
    assert incident.restart.ranks == 4


def test_spare_that_waits_does_not_count_for_how_long_resuming_took() -> None:
    told = job([Fault("exception", 1, 0)], world=3, spares=1)
    for number, record in enumerate(told.files[3]):
        if isinstance(record.event, events.RestartEnded):
            late = msgspec.structs.replace(record.event, duration_s=100.0)
            told.files[3][number] = msgspec.structs.replace(record, event=late)
    incident = only(told)
    assert incident.restart is not None
    assert incident.restart.max_s < 1


def test_cost_is_silence_restart_and_steps_done_again() -> None:
    first, second = fold(job([Fault("exception", 1, 0, step=10), Fault("hang", 1, 1, step=23)]).records)
    assert (first.cost.lost_steps, first.cost.rework_s) == (0, 0.0)
    assert second.cost.lost_steps == 3  # from step 20 again
    assert second.cost.hang_s == 3.01
    a_step = 1.0 / 13  # 13 steps in the second before the hang
    assert second.cost.rework_s == pytest.approx(3 * a_step, rel=0.05)
    assert second.cost.lost_s == pytest.approx(3.01 + (second.cost.restart_s or 0) + 3 * a_step, rel=0.05)


def test_silence_of_a_rank_ends_with_its_first_limit_though_a_later_one_ends_the_rank() -> None:
    """The other ranks restart from the first limit on, so the rest of its silence is part of their restart."""
    told = job([Fault("hang", 1, 0)], world=4)
    place, soft = next(
        (place, record)
        for place, record in enumerate(told.files[1])
        if isinstance(record.event, events.RankInterrupted)
    )
    assert isinstance(soft.event, events.RankInterrupted)
    later_ns = 2 * 10**9
    hard = msgspec.structs.replace(
        soft.event.record,
        interruption=Interruption.HARD_TIMEOUT,
        detected_wall_ns=soft.wall_ns + later_ns,
        silent_for_s=5.01,
    )
    killed = msgspec.structs.replace(soft, wall_ns=soft.wall_ns + later_ns, event=events.RankInterrupted(hard))
    told.files[1].insert(place + 1, killed)
    incident = only(told)
    assert incident.chief is not None and incident.chief.interruption is Interruption.HARD_TIMEOUT
    assert incident.since_wall_ns is not None and incident.detected_wall_ns is not None
    assert incident.cost.hang_s == 3.01 == pytest.approx((incident.detected_wall_ns - incident.since_wall_ns) / 1e9)


def test_steps_done_again_are_known_if_the_function_loads_its_checkpoint_before_its_first_step() -> None:
    told = job([Fault("exception", 1, 0, step=10), Fault("hang", 1, 1, step=23)])
    whole = [incident.cost.lost_steps for incident in fold(told.records)]
    records: list[Record] = []
    for record in told.records:
        records.append(record)
        if isinstance(record.event, events.RestartEnded) and record.event.step is not None:
            loaded = msgspec.structs.replace(record.event, sign="section", step=None)
            records[-1] = msgspec.structs.replace(record, event=loaded)
            stepped = events.RestartStep(record.event.step)
            records.append(msgspec.structs.replace(record, event=stepped))
    assert [incident.cost.lost_steps for incident in fold(records)] == whole == [0, 3]


def test_repeated_steps_have_a_cost_if_the_job_began_with_a_checkpoint() -> None:
    told = job([Fault("hang", 1, 0, step=23)])
    records: list[Record] = []
    for record in told.records:
        event = record.event
        if isinstance(event, events.RestartEnded) and event.step is not None:
            event = msgspec.structs.replace(event, step=20)
        records.append(msgspec.structs.replace(record, event=event))
        if isinstance(event, events.StageStarted) and event.stage == "run" and record.origin.iteration == 0:
            first = events.FirstStepReported(10, 0.35)
            records.append(msgspec.structs.replace(record, event=first))
    (incident,) = fold(records)
    assert incident.cost.lost_steps == 3
    assert incident.cost.rework_s == pytest.approx(3 * (1.0 - 0.35) / 13, rel=0.05)  # 13 steps after it had loaded


@pytest.mark.parametrize("is_sample", [True, False])
def test_ranks_that_were_left_out_to_save_time_are_not_missing(is_sample: bool) -> None:
    """All ranks raise the same; a quarter of them is known."""
    told = job([Fault("exception", rank, 0) for rank in range(16)], world=16)
    known = [record for rank in range(4) for record in told.files[rank]]
    (incident,) = fold(known, completeness=Completeness(is_sample=is_sample))
    assert incident.verdict.what == ("common" if is_sample else "exception")


def test_rank_that_leaves_long_after_the_interruption_makes_no_step_longer() -> None:
    told = job([Fault("exception", 1, 0, step=10), Fault("hang", 1, 1, step=23)])
    records = list(told.records)
    (cost,) = {incident.cost.rework_s for incident in fold(records)} - {0.0}
    for place, record in enumerate(records):
        event = record.event
        if isinstance(event, events.StageEnded) and event.stage == "run" and record.origin.initial_rank == 2:
            late = msgspec.structs.replace(event, duration_s=event.duration_s + 30.0)  # in a `finally`
            records[place] = msgspec.structs.replace(record, event=late)
    assert [incident.cost.rework_s for incident in fold(records)] == [0.0, cost]


def test_hang_began_with_the_last_sign_of_life() -> None:
    incident = only(job([Fault("hang", 1, 0)]))
    assert incident.detected_wall_ns is not None and incident.since_wall_ns is not None
    assert incident.detected_wall_ns - incident.since_wall_ns == 3_010_000_000


def test_negative_durations_are_taken_as_none() -> None:
    told = job([Fault("exception", 1, 0)])
    for records in told.files.values():
        for number, record in enumerate(records):
            event = record.event
            if isinstance(event, events.RestartEnded) or (
                isinstance(event, events.StageEnded) and event.stage == "restart"
            ):
                early = msgspec.structs.replace(event, duration_s=-1.7)
                records[number] = msgspec.structs.replace(record, event=early)
    incident = only(told)
    assert incident.restart is not None
    assert (incident.restart.median_s, incident.cost.restart_s) == (0.0, 0.0)


def test_actions_tell_who_left_and_who_stepped_in() -> None:
    incident = only(job([Fault("stopped", 1, 0)], world=3, spares=1))
    assert incident.excluded == (1,)
    assert incident.stepped_in == (3,)
    text = "; ".join(incident.actions)
    for part in ("SIGKILL sent to rank 1 (watchdog)", "rank 1 excluded", "rank 3 stepped in", "restarted in place"):
        assert part in text


def test_actions_name_the_ranks_that_were_not_looked_at_before_a_cut() -> None:
    told = job([Fault("hang", 1, 0)])
    hung = next(record for record in told.files[1] if isinstance(record.event, events.RankInterrupted))
    looked = msgspec.structs.replace(hung, event=events.OthersSeen(1, missing=(2, 3)))
    (incident,) = fold([*told.records, looked])
    assert "not looked at before anything was stopped: ranks 2-3" in incident.actions


@pytest.mark.parametrize("kind", ["exception", "kill", "hang"])
@pytest.mark.parametrize("progress", [0, 10])
def test_third_identical_failure_advises_against_another_restart(kind: Kind, progress: int) -> None:
    """If the job came further in between, it is the same failure all the same, but the next restart may help."""
    faults = [Fault(kind, number, number, 10 + progress * number) for number in range(3)]
    incidents = fold(job(faults, world=6).records)
    assert [incident.same_as for incident in incidents] == [(), (1,), (1, 2)]
    advice = [" ".join(incident.advice) for incident in incidents]
    assert ["3 times now" in text for text in advice] == [False, False, True]
    assert ["another restart will not help" in text for text in advice] == [False, False, not progress]


@pytest.mark.parametrize(
    ("kind", "slower", "is_repetition"), [("exception", 1, True), ("exception", 1000, False), ("kill", 1, False)]
)
def test_without_steps_only_an_early_repeated_exception_advises_against_restarts(
    kind: Kind, slower: int, is_repetition: bool
) -> None:
    """The restart budget counts a cycle that ran for 10 minutes as progress."""
    told = job([Fault(kind, rank, rank) for rank in range(3)], world=6).records
    began = min(record.wall_ns for record in told)
    records = []
    for record in told:
        event = record.event
        if isinstance(event, events.RankInterrupted):
            at = began + slower * ((event.record.detected_wall_ns or began) - began)
            event = events.RankInterrupted(msgspec.structs.replace(event.record, step=None, detected_wall_ns=at))
        records.append(msgspec.structs.replace(record, event=event))
    *_, last = fold(records)
    assert last.same_as == (1, 2)
    assert ("another restart will not help" in " ".join(last.advice)) is is_repetition


def test_swallowed_interruption_is_named_with_its_place() -> None:
    told = job([Fault("exception", 1, 0)])
    seen = next(record for record in told.files[2] if isinstance(record.event, events.IterationDecided))
    swallowed = events.InterruptSwallowed("/home/me/train.py", 7, "loop")
    (incident,) = fold([*told.records, msgspec.structs.replace(seen, event=swallowed)])
    assert any("/home/me/train.py:7 (loop)" in advice for advice in incident.advice)


def test_rank_without_a_monitor_goes_on_and_nothing_restarts() -> None:
    incident = only(job([Fault("monitor", 1, 0)]))
    assert (incident.status, incident.phases, incident.restart) == ("continued", (), None)
    assert incident.actions == ("rank 1 continued without a monitor",)


def test_interruption_without_an_end_is_unfinished() -> None:
    told = job([Fault("exception", 1, 0)])
    seen = [record for record in told.records if record.origin.iteration in (None, 0)]
    (incident,) = fold(seen)
    assert incident.status == "unfinished"


def test_incident_survives_json() -> None:
    incident = only(job([Fault("stopped", 1, 0)], spares=1))
    text = msgspec.json.encode(to_json(incident))
    assert msgspec.json.decode(text, type=Incident) == incident


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 7), "0-2, 7"),
        (range(10_000), "0-9999"),
        (range(0, 100, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … and 38 more"),
    ],
)
def test_ranks_are_worded_as_ranges(ranks: range, text: str) -> None:
    assert ranks_in_words(ranks) == text


def test_every_class_has_advice() -> None:
    assert set(ADVICE) == set(get_args(Class))
    for what in get_args(Class):
        assert advise(Verdict(what, "unknown"), 0, False, False, ())


def test_users_own_frame_is_found_between_libraries_and_ours() -> None:
    assert user_frame((WRAPPED, TRAIN, OTHER, TORCH)) == OTHER
    assert user_frame((Frame("/usr/lib/python3.11/threading.py", 1, "wait"), WRAPPED)) is None
    assert is_inside((WRAPPED, TRAIN, LOAD, Frame("/usr/lib/python3.11/threading.py", 1, "wait")))
    assert is_inside((WRAPPED, TRAIN, TORCH))
    assert not is_inside((TRAIN, WRAPPED, Frame("/usr/lib/python3.11/threading.py", 1, "wait")))


@pytest.mark.parametrize("script", ["/usr/local/bin/resilience", "/venv/bin/torchrun"])
def test_script_that_starts_a_command_is_no_code_of_the_users(script: str) -> None:
    assert user_frame((Frame(script, 8, "<module>"), WRAPPED)) is None
    assert user_frame((Frame(script, 8, "<module>"), WRAPPED, LOAD)) == LOAD
    assert user_frame((Frame("/home/me/bin/train", 8, "<module>"), WRAPPED)) is not None


@pytest.mark.parametrize("folder", ["/home/me/repository", "/venv/lib/python3.11/site-packages"])
def test_training_code_of_the_demo_counts_as_the_users(folder: str) -> None:
    strike = Frame(f"{folder}/resilience/demo/ranks.py", 90, "_strike")
    stack = (Frame(f"{folder}/resilience/cli/demo.py", 77, "run"), WRAPPED, strike)
    assert is_inside((*stack, Frame("/usr/lib/python3.11/threading.py", 1, "wait")))
    assert user_frame(stack) == strike


def test_a_thousand_ranks_fold_into_one_incident() -> None:
    incident = only(job([Fault("kill", 17, 0)], world=1000))
    assert culprits(incident) == {17}
    assert sum(len(group.ranks) for group in incident.verdict.exonerated) == 999
