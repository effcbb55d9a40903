"""Verdicts of the attribution rules over evidence that is written down by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import msgspec
import pytest

import resilience
from resilience.attribution.advice import advise
from resilience.attribution.culprits import NAMED, SURE, UNSURE
from resilience.attribution.evidence import Evidence
from resilience.attribution.verdict import Verdict, judge
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
    OpenSection,
    ProcessInfo,
    ThreadStack,
)

RANKS = frozenset(range(4))
STEP = Frame("/home/me/train.py", 20, "train")
BACKWARD = (STEP, Frame("/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward"))
LOADS = (STEP, Frame("/home/me/data.py", 7, "load"))
BARRIER = (
    Frame("/home/me/train.py", 31, "train"),
    Frame("/site-packages/torch/distributed/distributed_c10d.py", 5000, "barrier"),
)
CLOSED = ExceptionInfo("RuntimeError", "Connection closed by peer", "f", BACKWARD)


def silent(rank: int, stack: tuple[Frame, ...], **known: object) -> InterruptionRecord:
    """The record of a rank whose watchdog limit was exceeded."""
    return InterruptionRecord(
        rank,
        Interruption.SOFT_TIMEOUT,
        detector=Detector("watchdog", 60.0),
        stacks=(ThreadStack("MainThread", stack),),
        **known,  # type: ignore[arg-type]
    )


def blamed(seen: Evidence) -> list[tuple[int, str]]:
    return [(culprit.rank, culprit.what) for culprit in judge(seen).culprits]


@pytest.mark.parametrize("reporters", [(0,), (0, 2), (0, 2, 3)])
def test_ranks_that_wait_in_backward_are_cleared_and_the_one_that_is_elsewhere_is_blamed(
    reporters: tuple[int, ...],
) -> None:
    """DDP's reducer waits in C++: no frame of torch.distributed shows it."""
    records = tuple(silent(rank, BACKWARD, hang="in_collective") for rank in reporters)
    stacks = dict.fromkeys(RANKS, BACKWARD) | {1: LOADS}
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, answered=RANKS)
    assert blamed(seen) == [(1, "hung")]
    assert judge(seen).culprits[0].confidence > 0.5


def test_rank_that_saw_itself_wait_is_cleared_although_its_monitor_looked_late() -> None:
    restarting = (STEP, Frame("/site-packages/resilience/inprocess/_runtime/call.py", 396, "_failed"))
    records = (silent(2, LOADS, hang="on_lock"), silent(0, restarting, hang="in_call"))
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {2: "on_lock"}
    seen = Evidence(records, first=2, active=RANKS, stacks=stacks, hangs=hangs, answered=RANKS)
    assert blamed(seen) == [(2, "waits_for_lock")]


@pytest.mark.parametrize(("word", "in_time"), [("in_loop", "busy_without_progress"), ("in_call", "hung")])
def test_hang_of_a_culprit_is_what_it_was_before_its_restart(word: Hang, in_time: str) -> None:
    """Its monitor looked when it already restarted, and computed or waited for the others."""
    restarting = (STEP, Frame("/site-packages/resilience/inprocess/_runtime/call.py", 396, "_failed"))
    process = ProcessInfo("R", cpu_s_delta=0.5 if word == "in_loop" else 0.0, over_s=0.5)
    late = InterruptionRecord(
        *(2, Interruption.SOFT_TIMEOUT),
        detector=Detector("step", 3.0),
        iteration=4,
        process=process,
        hang=word,
        stacks=(ThreadStack("MainThread", restarting),),
    )
    records = (silent(0, BACKWARD, hang="in_collective"), late)
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {2: "on_lock"}
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, hangs=hangs, answered=RANKS)
    assert blamed(msgspec.structs.replace(seen, freed_before_look=frozenset({(2, 4)}))) == [(2, "waits_for_lock")]
    assert blamed(msgspec.structs.replace(seen, freed_before_look=frozenset({(2, 3)}))) == [(2, in_time)]
    assert blamed(seen) == [(2, in_time)]  # the monitor looked before the rank's abort


def test_culprit_in_a_call_that_does_not_return_is_not_called_busy_for_its_restart() -> None:
    busy = ProcessInfo("R", cpu_s_delta=0.5, over_s=0.5)
    limit = Detector("step", 3.0)
    late = InterruptionRecord(2, Interruption.SOFT_TIMEOUT, detector=limit, hang="in_loop", process=busy)
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {2: "in_call"}
    seen = Evidence((late,), first=2, active=RANKS, stacks=stacks, hangs=hangs, answered=RANKS)
    assert blamed(msgspec.structs.replace(seen, freed_before_look=frozenset({(2, None)}))) == [(2, "hung")]


@pytest.mark.parametrize(
    ("account", "what"), [("in_loop", "busy_without_progress"), ("in_kernel", "blocked_in_kernel")]
)
@pytest.mark.parametrize("word", ["in_loop", "in_call", "on_lock", None])
def test_culprit_is_blamed_by_its_own_account_whatever_its_monitor_saw_later(
    account: Hang, what: str, word: Hang | None
) -> None:
    process = ProcessInfo("R", cpu_s_delta=0.5, over_s=0.5) if word == "in_loop" else ProcessInfo("S")
    limit = Detector("step", 3.0)
    late = InterruptionRecord(2, Interruption.SOFT_TIMEOUT, detector=limit, hang=word, process=process)
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {2: account}
    seen = Evidence((late,), first=2, active=RANKS, stacks=stacks, hangs=hangs, answered=RANKS)
    assert blamed(msgspec.structs.replace(seen, freed_before_look=frozenset({(2, None)}))) == [(2, what)]


def test_culprit_that_runs_again_in_its_restart_is_blamed_for_what_it_waited_for_before() -> None:
    late = InterruptionRecord(2, Interruption.SOFT_TIMEOUT, detector=Detector("step", 3.0), hang="runs_again")
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {2: "on_lock"}
    seen = Evidence((late,), first=2, active=RANKS, stacks=stacks, hangs=hangs, answered=RANKS, late=frozenset({2}))
    assert blamed(msgspec.structs.replace(seen, freed_before_look=frozenset({(2, None)}))) == [(2, "waits_for_lock")]


@pytest.mark.parametrize(
    "known",
    [
        {"collectives": (Collective(1, 3, "all_reduce", left=False),)},  # its page showed so
        {"hangs": {3: "in_collective"}},  # it has seen so itself
    ],
)
def test_rank_whose_stack_could_not_be_taken_is_not_blamed_for_waiting(known: dict[str, object]) -> None:
    """On a busy host the thread that is asked for stacks does not answer in time."""
    waits = InterruptionRecord(
        3,
        Interruption.SOFT_TIMEOUT,
        detector=Detector("step", 3.0),
        last_collectives=known.get("collectives", ()),  # type: ignore[arg-type]
    )
    hangs: dict[int, Hang] = known.get("hangs", {})  # type: ignore[assignment]
    records = (waits, silent(1, LOADS, hang="on_lock"))
    verdict = judge(Evidence(records, first=3, active=RANKS, stacks={1: LOADS}, hangs=hangs, answered=RANKS))
    assert [(each.rank, each.what) for each in verdict.culprits] == [(1, "waits_for_lock")]
    assert [each.ranks for each in verdict.exonerated if 3 in each.ranks] == [(3,)]


@pytest.mark.parametrize("is_cause_seen", [True, False])
def test_rank_that_a_restart_freed_before_the_look_is_not_blamed_beside_a_seen_cause(is_cause_seen: bool) -> None:
    """It was in backward when it answered, like the others. If no rank was seen elsewhere, it may be the cause."""
    limit = Detector("step", 3.0)
    freed = InterruptionRecord(3, Interruption.SOFT_TIMEOUT, detector=limit, stack_method="none: it has restarted")
    records = (silent(1, LOADS, hang="on_lock"), freed) if is_cause_seen else (freed,)
    stacks = dict.fromkeys(RANKS, BACKWARD) | ({1: LOADS} if is_cause_seen else {})
    freed_ranks = frozenset({(3, None)})
    seen = Evidence(records, first=records[0].rank, active=RANKS, stacks=stacks, freed_before_look=freed_ranks)
    seen = msgspec.structs.replace(seen, answered=RANKS)
    assert blamed(seen) == ([(1, "waits_for_lock")] if is_cause_seen else [(3, "hung")])


def test_rank_that_the_end_of_another_one_freed_is_no_cause_of_a_wait() -> None:
    limit = Detector("step", 3.0)
    again = InterruptionRecord(1, Interruption.SOFT_TIMEOUT, detector=limit, hang="runs_again")
    unseen = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, detector=limit)
    seen = Evidence((again, unseen), first=1, active=RANKS, stacks=dict.fromkeys(RANKS, BACKWARD), answered=RANKS)
    seen = msgspec.structs.replace(seen, late=frozenset({1}), freed_before_look=frozenset({(0, None)}))
    assert blamed(seen) == [(0, "hung")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CLOSED, [(2, "went_on")]),
        (ExceptionInfo("ValueError", "bad batch", "f", LOADS), [(1, "exception")]),
    ],
)
def test_rank_that_takes_long_to_end_after_an_error_is_judged_by_the_error(
    error: ExceptionInfo, expected: list[tuple[int, str]]
) -> None:
    """Rank 2 ended with status 0. Ranks 1 and 3 raised, and waited for the processes of their data loaders."""
    ending = [
        silent(rank, (STEP,), hang="in_loop", stage="ending", exception=raised)
        for rank, raised in ((1, error), (3, CLOSED))
    ]
    hangs: dict[int, Hang] = {0: "in_collective", 1: "in_loop", 3: "in_loop"}
    records = (silent(0, BACKWARD, hang="in_collective"), *ending)
    seen = Evidence(records, first=0, active=RANKS, hangs=hangs, returned=frozenset((2,)))
    assert blamed(seen) == expected


def test_rank_that_held_the_interpreters_lock_is_blamed_though_it_waits_for_the_others_by_now() -> None:
    stacks = dict.fromkeys(RANKS, BACKWARD)
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective")
    seen = Evidence(
        (silent(1, LOADS, hang="holds_gil"),),
        first=1,
        active=RANKS,
        stacks=stacks | {1: LOADS},
        hangs=hangs,
        answered=RANKS,
    )
    assert blamed(seen) == [(1, "blocked_in_native_code")]


@pytest.mark.parametrize("word", ["in_call", "on_lock"])
@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("data", "input_stall"),
        ("load_batch", "input_stall"),
        ("save_checkpoint", "storage_stall"),
        ("load_checkpoint", "storage_stall"),
        ("load_ckpt", "storage_stall"),
        ("save_data", "storage_stall"),
        ("step", "hung"),
        ("", "hung"),
    ],
)
def test_hang_has_the_same_class_whichever_rank_is_noticed_first(section: str, what: str, word: Hang) -> None:
    what = "waits_for_lock" if (what, word) == ("hung", "on_lock") else what
    names = (section,) if section else ()
    stacks = dict.fromkeys(RANKS, BACKWARD) | {1: LOADS}
    sections = dict.fromkeys(RANKS, ("step",)) | {1: names}
    own = silent(1, LOADS, hang=word, open_sections=tuple(OpenSection(name, 60.0) for name in names))
    waits = silent(0, BACKWARD, hang="in_collective", open_sections=(OpenSection("step", 60.0),))
    late = silent(1, BARRIER[:1], hang=word)  # made when the restart had begun: the rank has left its section
    for records in ((own,), (waits,), (waits, own), (own, waits), (waits, late)):
        first = records[0].rank
        seen = Evidence(records, first=first, active=RANKS, stacks=stacks, sections=sections, answered=RANKS)
        seen = msgspec.structs.replace(seen, hangs={1: word})
        assert blamed(seen) == [(1, what)], records


def test_rank_in_a_barrier_is_blamed_if_all_others_wait_in_backward() -> None:
    records = tuple(silent(rank, BACKWARD, hang="in_collective") for rank in (0, 2, 3))
    stacks = dict.fromkeys(RANKS, BACKWARD) | {1: BARRIER}
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, answered=RANKS)
    assert blamed(seen) == [(1, "desynchronised")]


def test_of_two_ranks_that_wait_in_different_places_neither_is_blamed_with_confidence() -> None:
    records = (silent(0, BACKWARD, hang="in_collective"),)
    stacks = {0: BACKWARD, 1: BARRIER}
    seen = Evidence(records, first=0, active=frozenset((0, 1)), stacks=stacks, answered=frozenset((0, 1)))
    verdict = judge(seen)
    assert (verdict.what, verdict.culprits) == ("unknown", ())
    assert [candidate.rank for candidate in verdict.candidates] == [0, 1]


def test_no_decision_of_a_running_job_rests_on_a_verdict() -> None:
    """What decides has to be at hand in time, and is named in docs/account.md; a verdict is only said."""
    package = Path(resilience.__file__).parent
    readers = {
        str(path.relative_to(package))
        for layer in ("core", "facts", "calibration", "inprocess", "launcher", "monitor", "system")
        for path in (package / layer).rglob("*.py")
        if re.search(r"attribution\.(verdict|incident|incidents|launch_incidents) import", path.read_text())
    }
    assert readers == {"inprocess/_runtime/telling.py", "launcher/telling.py"}


@pytest.mark.parametrize("is_first", [True, False])
def test_lost_monitor_is_no_cause_of_another_ranks_hang(is_first: bool) -> None:
    lost = InterruptionRecord(3, Interruption.MONITOR_PROCESS_EXCEPTION, "its monitor is gone")
    hung = silent(1, LOADS, hang="in_call")
    records = (lost, hung) if is_first else (hung, lost)
    seen = Evidence(records, first=records[0].rank, active=RANKS, stacks={1: LOADS}, answered=RANKS)
    assert blamed(seen) == [(1, "hung")]
    assert judge(seen).first == 1


def ended(rank: int, by: str | int, at_s: float, **known: object) -> InterruptionRecord:
    """The record of a process that ended by a signal or with a code."""
    end = Exit(signal=by) if isinstance(by, str) else Exit(code=by)
    return InterruptionRecord(
        rank,
        Interruption.TERMINATED,
        exit=end,
        detected_wall_ns=round(at_s * 1e9),
        **known,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("at_s", [100.0, 99.5, 130.0])
def test_rank_that_is_told_to_stop_when_another_one_has_died_only_follows(at_s: float) -> None:
    """A launcher ends the others; their monitors may notice it before the first one's does."""
    seen = Evidence((ended(0, "SIGTERM", at_s), ended(1, "SIGKILL", 100.0)), first=0, active=frozenset({0, 1}))
    assert blamed(seen) == [(1, "killed")]
    assert judge(seen).first == 1
    (cleared,) = judge(seen).exonerated
    assert (cleared.ranks, cleared.reason) == ((0,), "was asked to stop after another rank's process died")


@pytest.mark.parametrize(
    ("at_s", "known", "is_of_torchrun"),
    [
        (135.0, {}, True),
        (135.0, {"exit": Exit(signal="SIGKILL", oom=True)}, False),
        (102.0, {}, False),  # torchrun leaves them 30 s
        (160.0, {}, False),
    ],
)
def test_rank_that_torchrun_kills_because_it_does_not_end_only_follows(
    at_s: float, known: dict[str, Exit], is_of_torchrun: bool
) -> None:
    killed = msgspec.structs.replace(ended(0, "SIGKILL", at_s), **known)
    seen = Evidence((ended(1, "SIGSEGV", 100.0), killed), first=1, active=RANKS, kills_late=True)
    assert [rank for rank, _ in blamed(seen)] == ([1] if is_of_torchrun else [1, 0])
    assert [rank for rank, _ in blamed(msgspec.structs.replace(seen, kills_late=False))] == [1, 0]


def test_most_ranks_are_not_most_of_those_whose_records_are_there() -> None:
    """Two ranks raise the same; of two more nothing is on record."""
    full = ExceptionInfo("OSError", "No space left on device", "f", (STEP,))
    records = tuple(InterruptionRecord(rank, Interruption.EXCEPTION, exception=full, origin="own") for rank in (0, 1))
    seen = Evidence(records, first=0, active=frozenset((0, 1)))
    assert judge(seen).what == "common"
    verdict = judge(msgspec.structs.replace(seen, size=4))
    assert (verdict.what, [culprit.rank for culprit in verdict.culprits]) == ("exception", [0, 1])


@pytest.mark.parametrize("size", [None, 4])
def test_no_rank_is_odd_while_the_place_of_another_one_is_not_on_record(size: int | None) -> None:
    three = frozenset(range(3))
    records = tuple(silent(rank, BARRIER, hang="in_collective") for rank in sorted(three))
    seen = Evidence(records, first=0, active=three, stacks=dict.fromkeys(three, BARRIER), answered=three, size=size)
    assert judge(seen).what == ("communication" if size is None else "hung")
    lacks = {blind.rule: blind.lacks for blind in judge(seen).rules_blind}
    assert lacks.get(8) == (None if size is None else "where 1 of 4 active ranks were")


def test_hang_of_which_no_start_is_on_record_is_judged_too() -> None:
    assert judge(Evidence((silent(0, BARRIER, hang="in_collective"),), first=0)).what == "hung"


def test_rank_that_is_stopped_is_blamed_though_its_place_among_the_collectives_is_unknown() -> None:
    """A healthy rank has used more groups since than a record names: it only seems to be behind."""
    pending = Collective(1, 5, "all_reduce", False, members=(0, 1, 3), is_recorded=True)
    later = Collective(2, 9, "all_reduce", True, members=(1, 1, 2), is_recorded=True)
    seen = Evidence(
        (silent(0, BARRIER, hang="in_collective"),),
        first=0,
        active=frozenset(range(3)),
        stacks={0: BARRIER, 1: LOADS},
        hangs={2: "stopped"},
        collectives={0: (pending,), 1: (later,)},
    )
    assert blamed(seen) == [(2, "stopped")]


@pytest.mark.parametrize(("error_s", "node", "is_sure"), [(0.0, "b", True), (3.0, "b", False), (3.0, "a", True)])
def test_order_of_two_ends_counts_only_as_far_as_the_clocks_of_their_nodes_are_known(
    error_s: float, node: str, is_sure: bool
) -> None:
    """A rank was asked to stop 4 s before another one died, or after it if the clock of its node is behind."""
    errors = dict.fromkeys("ab", round(error_s * 1e9))
    records = ended(0, "SIGTERM", 96.0, node=node), ended(1, "SIGKILL", 100.0, node="a")
    seen = Evidence(records, first=1, active=frozenset({0, 1}), clock_errors=errors)
    assert ((0, "told_to_stop") in blamed(seen)) == is_sure
    candidates = [] if is_sure else [(0, "told_to_stop", UNSURE)]
    assert [(each.rank, each.what, each.confidence) for each in judge(seen).candidates] == candidates
    assert not judge(seen).exonerated


@pytest.mark.parametrize(("error_s", "is_older"), [(0.0, True), (30.0, False)])
def test_hang_is_older_than_an_exception_only_if_the_clocks_of_their_nodes_show_it(
    error_s: float, is_older: bool
) -> None:
    hung = silent(1, LOADS, hang="on_lock", silent_for_s=60.0, detected_wall_ns=100 * 10**9, node="b")
    raised = InterruptionRecord(
        0,
        Interruption.EXCEPTION,
        exception=ExceptionInfo("ValueError", "x", "f", (STEP,)),
        origin="own",
        detected_wall_ns=150 * 10**9,
        arrival_order=1,
        node="a",
    )
    errors = dict.fromkeys("ab", round(error_s * 1e9))
    seen = Evidence((raised, hung), first=0, active=frozenset({0, 1}), clock_errors=errors)
    assert [rank for rank, _ in blamed(seen)] == ([1, 0] if is_older else [0])
    assert [each.rank for each in judge(seen).candidates] == ([] if is_older else [1])


def test_rank_that_was_told_to_stop_long_before_another_one_died_is_blamed() -> None:
    seen = Evidence((ended(0, "SIGTERM", 90.0), ended(1, "SIGKILL", 100.0)), first=0, active=frozenset({0, 1}))
    assert (0, "told_to_stop") in blamed(seen)


def test_program_that_exits_with_143_has_obeyed_a_signal_as_the_others_have() -> None:
    stopped = [ended(rank, "SIGTERM", 100.0 + rank / 100) for rank in (0, 1, 3)]
    verdict = judge(Evidence((*stopped, ended(2, 143, 100.3)), first=0, active=RANKS))
    assert (verdict.what, verdict.category) == ("common", "scheduler")
    assert {culprit.what for culprit in verdict.culprits} == {"told_to_stop"}
    assert blamed(Evidence((ended(1, "SIGKILL", 100.0), ended(2, 143, 100.3)), first=1, active=RANKS)) == [
        (1, "killed")
    ]


@pytest.mark.parametrize("signal", ["SIGPIPE", "SIGXCPU", "SIGALRM"])
def test_signal_by_which_nobody_stops_a_rank_is_no_request_to_stop(signal: str) -> None:
    verdict = judge(Evidence((ended(0, signal, 100.0),), first=0, active=RANKS))
    assert [(each.rank, each.what, each.confidence) for each in verdict.culprits] == [(0, "exited", 0.95)]
    assert verdict.category == "user_code"
    both = Evidence((ended(0, signal, 100.0), ended(1, "SIGKILL", 100.5)), first=0, active=RANKS)
    assert [culprit.rank for culprit in judge(both).culprits] == [0, 1]


@pytest.mark.parametrize("stage", ["run", "initialize"])
@pytest.mark.parametrize("origin", ["own", "communication"])
def test_error_of_a_communication_call_is_no_sure_fault_in_a_hook_either(stage: str, origin: FaultOrigin) -> None:
    """The hook waits in a barrier for the rank that is elsewhere, as its function might."""
    timed_out = ExceptionInfo("RuntimeError", "Timed out waiting for recv", "f", BARRIER)
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=timed_out, stage=stage, origin=origin)
    stacks = dict.fromkeys(RANKS, BARRIER) | {3: LOADS}
    assert blamed(Evidence((record,), first=0, active=RANKS, stacks=stacks, answered=RANKS)) == []
    killed = Evidence((record, ended(1, "SIGKILL", 100.0)), first=0, active=RANKS, stacks=stacks)
    assert blamed(killed) == [(1, "killed")]


def test_rank_that_only_reported_is_not_the_first_that_is_blamed() -> None:
    seen = Evidence((silent(1, BARRIER),), first=1, active=RANKS, stacks=dict.fromkeys(RANKS, BARRIER))
    verdict = judge(seen)
    assert (verdict.first, verdict.first_blamed, verdict.culprits) == (1, None, ())


def test_rank_that_died_while_it_restarted_told_nobody_to_stop() -> None:
    """Rank 3 only passed on that rank 2 had gone. Rank 1 had answered before it was killed, 0.2 s later."""
    stopped = msgspec.structs.replace(ended(2, "SIGTERM", 100.0), arrival_order=3)
    killed = msgspec.structs.replace(ended(1, "SIGKILL", 100.2), arrival_order=4)
    echo = InterruptionRecord(3, Interruption.EXCEPTION, exception=CLOSED, origin="consequence", arrival_order=1)
    verdict = judge(Evidence((killed, stopped, echo), first=3, active=RANKS, answered=frozenset({0, 1, 3})))
    assert [(culprit.rank, culprit.what) for culprit in verdict.culprits] == [(2, "told_to_stop"), (1, "killed")]
    assert verdict.first == 2


BEGINNINGS: dict[str, tuple[InterruptionRecord, ...]] = {
    "killed": (ended(3, "SIGKILL", 100.0),),
    "told to stop": (ended(3, "SIGTERM", 100.0),),
    "ended by its monitor": (silent(3, LOADS, detected_wall_ns=10**11), ended(3, "SIGKILL", 100.0)),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("at_s", [99.5, 100.1, 130.0])
def test_ranks_that_are_told_to_stop_while_they_restart_only_follow(beginning: str, at_s: float) -> None:
    """A launcher that does not know of restarts in place, such as torchrun, ends all ranks if one process ends."""
    stops = tuple(ended(rank, "SIGTERM", at_s, stage="barrier") for rank in (0, 1, 2))
    seen = Evidence(
        (*BEGINNINGS[beginning], *stops),
        first=3,
        active=RANKS,
        answered=frozenset({0, 1, 2}),
        signalled={3: "watchdog"} if beginning == "ended by its monitor" else {},
    )
    verdict = judge(seen)
    assert ({culprit.rank for culprit in verdict.culprits}, verdict.first) == ({3}, 3)
    (cleared,) = verdict.exonerated
    assert (cleared.ranks, cleared.reason) == ((0, 1, 2), "was asked to stop after another rank's process died")


def test_ranks_that_are_told_to_stop_after_one_that_broke_in_the_restart_only_follow() -> None:
    raised = InterruptionRecord(0, Interruption.EXCEPTION, exception=ExceptionInfo("ValueError", "bad", "f", LOADS))
    broken = ended(2, "SIGSEGV", 100.0, stage="health_check")
    stops = tuple(ended(rank, "SIGTERM", 100.1, stage="barrier") for rank in (0, 1, 3))
    assert blamed(Evidence((raised, broken, *stops), first=0, active=RANKS, answered=RANKS)) == [
        (0, "exception"),
        (2, "crashed"),
    ]


def test_ranks_that_are_told_to_stop_after_one_that_left_only_follow() -> None:
    """The end of its process is no interruption."""
    left = InterruptionRecord(
        3, Interruption.BASE_EXCEPTION, exception=ExceptionInfo("SystemExit", "3", "f", LOADS), detected_wall_ns=10**11
    )
    stops = tuple(ended(rank, "SIGTERM", 100.1, stage="barrier") for rank in (0, 1, 2))
    seen = Evidence((left, *stops), first=3, active=RANKS, answered=RANKS)
    assert blamed(msgspec.structs.replace(seen, left=frozenset({3}))) == [(3, "left")]
    assert len(blamed(seen)) == 4  # if no process ended, somebody else stopped them


def test_rank_that_is_told_to_stop_in_a_restart_long_before_another_one_dies_is_blamed() -> None:
    raised = InterruptionRecord(0, Interruption.EXCEPTION, exception=ExceptionInfo("ValueError", "bad", "f", LOADS))
    late = (ended(1, "SIGTERM", 100.0), ended(2, "SIGKILL", 105.0))
    assert blamed(Evidence((raised, *late), first=0, active=RANKS, answered=RANKS)) == [
        (0, "exception"),
        (1, "told_to_stop"),
        (2, "killed"),
    ]


def test_rank_that_is_told_to_stop_when_a_monitor_ended_another_one_only_follows() -> None:
    hung = silent(1, LOADS, detected_wall_ns=10**11, hang="on_lock")
    records = (hung, ended(1, "SIGKILL", 100.0), ended(0, "SIGTERM", 100.1))
    seen = Evidence(records, first=1, active=frozenset({0, 1}), signalled={1: "watchdog"})
    assert blamed(seen) == [(1, "waits_for_lock")]


def candidates(seen: Evidence) -> list[int]:
    return [candidate.rank for candidate in judge(seen).candidates]


QUIET = pytest.mark.parametrize("end", [1, 7, 0, "SIGABRT"])
"""Ends of which no reason is on record. NCCL's watchdog aborts ranks that wait for another one."""


@QUIET
def test_end_without_a_reason_is_named_if_all_other_ranks_are_fine_but_not_surely(end: str | int) -> None:
    seen = Evidence((ended(1, end, 100.0),), first=1, active=RANKS, stacks={0: BACKWARD, 2: BARRIER})
    (culprit,) = judge(seen).culprits
    assert culprit.rank == 1
    assert NAMED <= culprit.confidence < 0.7


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM"])
def test_end_that_no_other_rank_causes_is_sure_wherever_the_others_are(end: str) -> None:
    seen = Evidence((ended(1, end, 100.0),), first=1, active=RANKS, stacks={0: LOADS})
    assert [culprit.rank for culprit in judge(seen).sure] == [1]


@QUIET
@pytest.mark.parametrize("at_s", [100.05, 99.5, 130.0])
def test_end_without_a_reason_is_no_fault_if_another_rank_was_killed(end: str | int, at_s: float) -> None:
    records = (ended(1, "SIGKILL", 100.0), *(ended(rank, end, at_s) for rank in (0, 2, 3)))
    seen = Evidence(records, first=0, active=RANKS)
    assert blamed(seen) == [(1, "killed")]
    assert judge(seen).first == 1
    assert candidates(seen) == [0, 2, 3]


def test_end_without_a_reason_long_before_another_end_is_named_first() -> None:
    seen = Evidence((ended(0, 7, 90.0), ended(1, "SIGKILL", 100.0)), first=0, active=RANKS)
    assert blamed(seen) == [(0, "exited"), (1, "killed")]


@QUIET
def test_rank_that_raised_is_blamed_and_not_its_neighbour_that_ended_without_a_reason(end: str | int) -> None:
    error = ExceptionInfo("ValueError", "bad batch", "f", LOADS)
    raised = ended(1, 1, 100.0, exception=error)
    for first in (0, 1):
        seen = Evidence((raised, ended(0, end, 100.02)), first=first, active=RANKS)
        assert blamed(seen) == [(1, "exception")]
        assert candidates(seen) == [0]


@pytest.mark.parametrize("origin", ["own", "communication", None])
def test_only_active_rank_is_blamed_for_an_error_of_a_communication_call(origin: FaultOrigin | None) -> None:
    """No other rank can have caused it."""
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=CLOSED, origin=origin, arrival_order=1)
    alone = Evidence((record,), 0, frozenset((0,)), frozenset((1,)), is_alone=True)
    (culprit,) = judge(alone).culprits
    assert (culprit.rank, culprit.what, culprit.confidence) == (0, "exception", SURE)
    assert blamed(msgspec.structs.replace(alone, is_alone=False)) == []  # records of other ranks are missing
    abort = msgspec.structs.replace(record, origin="consequence")
    assert blamed(msgspec.structs.replace(alone, records=(abort,))) == []


@QUIET
def test_hung_rank_is_blamed_and_not_the_rank_that_ended_without_a_reason_before_its_limit(end: str | int) -> None:
    stopped = InterruptionRecord(1, Interruption.HARD_TIMEOUT, process=ProcessInfo("T", 0.0, 60.0), hang="stopped")
    seen = Evidence((ended(0, end, 100.0, arrival_order=1), stopped), first=0, active=RANKS)
    verdict = judge(seen)
    assert (verdict.what, verdict.category, verdict.first) == ("stopped", "host", 1)
    assert (blamed(seen), candidates(seen)) == ([(1, "stopped")], [0])


@QUIET
def test_rank_that_ended_without_a_reason_is_a_candidate_beside_one_that_was_elsewhere(end: str | int) -> None:
    """It may have waited for the other one until the timeout of its process group."""
    stacks = {1: LOADS, 2: BARRIER, 3: BARRIER}
    seen = Evidence((ended(0, end, 100.0, last_heartbeat_age_s=60.0),), first=0, active=RANKS, stacks=stacks)
    assert (blamed(seen), candidates(seen)) == ([], [0, 1])
    waited = msgspec.structs.replace(seen, records=(*seen.records, silent(2, BARRIER, hang="in_collective")))
    assert blamed(waited) == [(1, "hung")]
    assert candidates(waited) == [0]


def test_rank_that_ended_just_after_a_sign_of_life_waited_for_no_rank() -> None:
    record = ended(0, 7, 100.0, last_heartbeat_age_s=0.01)
    seen = Evidence((record,), first=0, active=frozenset((0, 1)), stacks={1: LOADS})
    assert blamed(seen) == [(0, "exited")]
    computing = Evidence((ended(0, 7, 100.0),), first=0, active=RANKS, stacks=dict.fromkeys((1, 2, 3), LOADS))
    assert blamed(computing) == [(0, "exited")]  # nothing is wrong with most of the ranks


@QUIET
def test_rank_that_did_not_end_is_a_candidate_too_if_most_ranks_ended_without_a_reason(end: str | int) -> None:
    records = tuple(ended(rank, end, 100.0) for rank in (0, 2, 3))
    seen = Evidence(records, first=0, active=RANKS)
    assert (blamed(seen), sorted(candidates(seen))) == ([], [0, 1, 2, 3])
    everybody = Evidence((*records, ended(1, end, 100.0)), first=0, active=RANKS)
    assert judge(everybody).what == "common"


# -- a hang that is older than a death ----------------------------------------------------------------


def exceeded(
    rank: int, at_s: float, hang: Hang, *stack: Frame, hard: bool = False, silent_for_s: float | None = None
) -> InterruptionRecord:
    """The record of a rank whose limit was exceeded, at a known moment."""
    record = msgspec.structs.replace(
        silent(rank, stack or (STEP,), hang=hang, silent_for_s=silent_for_s),
        detector=Detector("step", 60.0),
        detected_wall_ns=round(at_s * 1e9),
    )
    return msgspec.structs.replace(record, interruption=Interruption.HARD_TIMEOUT) if hard else record


def raised(rank: int, at_s: float) -> InterruptionRecord:
    """The record of an exception of the program's own, such as one for a peer that does not answer in time."""
    error = ExceptionInfo("TimeoutError", "no batch from rank 1", "f", LOADS)
    return InterruptionRecord(
        rank, Interruption.EXCEPTION, exception=error, origin="own", detected_wall_ns=round(at_s * 1e9), arrival_order=1
    )


@pytest.mark.parametrize("word", ["stopped", "holds_gil", "on_lock"])
@pytest.mark.parametrize(
    "death", [ended(0, "SIGTERM", 100.0), ended(0, "SIGKILL", 100.0), ended(0, "SIGSEGV", 100.0), raised(0, 100.0)]
)
def test_rank_that_hung_before_another_one_died_is_blamed_first(death: InterruptionRecord, word: Hang) -> None:
    hung = (exceeded(1, 90.0, word), exceeded(1, 150.0, word, hard=True))  # its soft limit, and its hard one
    verdict = judge(Evidence((death, *hung), first=0, active=RANKS, stacks=dict.fromkeys((2, 3), BARRIER)))
    assert [culprit.rank for culprit in verdict.culprits] == [1, 0]
    assert verdict.first == 1
    assert 11 in verdict.rules_fired


@pytest.mark.parametrize("at_s", [100.5, 160.0, None])
def test_rank_whose_limit_was_not_exceeded_before_the_death_is_not_blamed_beside_it(at_s: float | None) -> None:
    """It may have waited for the rank that died. Monitors of two nodes may be a second apart."""
    hung = exceeded(1, at_s or 0.0, "on_lock")
    hung = hung if at_s else msgspec.structs.replace(hung, detected_wall_ns=None)
    assert blamed(Evidence((ended(0, "SIGKILL", 100.0), hung), first=0, active=RANKS)) == [(0, "killed")]


def test_hang_between_two_deaths_may_follow_from_the_first_one() -> None:
    records = (ended(0, "SIGKILL", 50.0), exceeded(1, 90.0, "on_lock"), ended(2, "SIGKILL", 100.0))
    assert blamed(Evidence(records, first=0, active=RANKS)) == [(0, "killed"), (2, "killed")]


@pytest.mark.parametrize("word", ["stopped", "holds_gil", "on_lock"])
@pytest.mark.parametrize("death", [ended(0, "SIGTERM", 90.0), ended(0, "SIGKILL", 90.0), raised(0, 90.0)])
def test_rank_that_lived_long_after_another_ones_end_is_blamed_for_its_hang_too(
    death: InterruptionRecord, word: Hang
) -> None:
    """Its last sign of life came 50 s after the end, so that did not stop it."""
    for order in (1, -1):
        records = (death, exceeded(1, 200.0, word, silent_for_s=60.0))[::order]
        verdict = judge(Evidence(records, first=0, active=RANKS))
        assert [culprit.rank for culprit in verdict.culprits] == [0, 1]
        assert verdict.first == 0
        assert 11 in verdict.rules_fired


@pytest.mark.parametrize("silent_for_s", [None, 101.0, 110.0, 150.0])
def test_hang_that_began_within_the_reach_of_a_death_may_follow_from_it(silent_for_s: float | None) -> None:
    """Its limit was exceeded at 200 s. It began at most 10 s after the death, or nothing says when."""
    hung = exceeded(1, 200.0, "on_lock", silent_for_s=silent_for_s)
    assert blamed(Evidence((ended(0, "SIGTERM", 90.0), hung), first=0, active=RANKS)) == [(0, "told_to_stop")]


def test_hang_has_to_lie_outside_the_reach_of_each_death() -> None:
    between = exceeded(1, 140.0, "on_lock", silent_for_s=20.0)  # after the first death, and before the second one
    records = (ended(0, "SIGTERM", 90.0), between, ended(2, "SIGKILL", 150.0))
    assert blamed(Evidence(records, first=0, active=RANKS)) == [
        (0, "told_to_stop"),
        (2, "killed"),
        (1, "waits_for_lock"),
    ]
    sooner = msgspec.structs.replace(records[2], detected_wall_ns=round(115e9))
    assert blamed(Evidence((*records[:2], sooner), first=0, active=RANKS)) == [(0, "told_to_stop"), (2, "killed")]


@pytest.mark.parametrize("word", ["in_collective", "in_call", "in_loop"])
def test_rank_that_may_wait_for_the_dead_one_is_not_blamed_however_late_it_hangs(word: Hang) -> None:
    stack = BARRIER if word == "in_collective" else (STEP,)
    waits = exceeded(1, 200.0, word, *stack, silent_for_s=60.0)
    assert blamed(Evidence((ended(0, "SIGKILL", 90.0), waits), first=0, active=RANKS)) == [(0, "killed")]


@QUIET
def test_end_without_a_reason_is_not_explained_by_a_hang_that_began_long_after_it(end: str | int) -> None:
    hung = exceeded(1, 200.0, "stopped", silent_for_s=60.0)
    seen = Evidence((ended(0, end, 90.0, arrival_order=1), hung), first=0, active=RANKS)
    assert (blamed(seen), candidates(seen)) == ([(0, judge(seen).what), (1, "hung")], [])
    sooner = msgspec.structs.replace(seen, records=(seen.records[0], exceeded(1, 155.0, "stopped", silent_for_s=60.0)))
    assert (blamed(sooner), candidates(sooner)) == ([(1, "hung")], [0])


@pytest.mark.parametrize("word", ["in_collective", "in_call", "in_loop"])
def test_rank_that_may_have_waited_for_the_rank_that_died_later_is_not_blamed(word: Hang) -> None:
    stack = BARRIER if word == "in_collective" else (STEP,)
    waited = exceeded(1, 90.0, word, *stack)
    assert blamed(Evidence((ended(0, "SIGKILL", 100.0), waited), first=0, active=RANKS)) == [(0, "killed")]


@pytest.mark.parametrize("word", ["in_collective", "in_call"])
def test_rank_that_waited_past_a_limit_and_hung_after_the_death_is_not_blamed_for_it(word: Hang) -> None:
    """The death ended its wait. Where it hung then says nothing about the time before."""
    waited = exceeded(1, 80.0, word, *(BARRIER if word == "in_collective" else ()))
    records = (ended(0, "SIGKILL", 100.0), waited, exceeded(1, 120.0, "on_lock", hard=True))
    assert blamed(Evidence(records, first=0, active=RANKS)) == [(0, "killed")]


def test_rank_in_a_call_is_blamed_before_a_later_death_if_the_others_waited_for_it_alone() -> None:
    entered = {rank: waits_at(9) for rank in (0, 2, 3)} | {1: waits_at(8, left=True)}
    records = (ended(0, "SIGKILL", 100.0), exceeded(1, 90.0, "in_call"))
    seen = Evidence(records, first=0, active=RANKS, stacks=dict.fromkeys((2, 3), BARRIER), collectives=entered)
    assert blamed(seen) == [(1, "hung"), (0, "killed")]


@QUIET
def test_hung_rank_is_blamed_and_a_rank_that_waited_and_then_ended_is_a_candidate(
    end: str | int,
) -> None:
    """NCCL's watchdog aborts a rank that has waited for too long."""
    records = (ended(0, end, 100.0, arrival_order=1), exceeded(0, 90.0, "in_collective", *BARRIER))
    stacks = {0: BARRIER, 1: LOADS, 2: BARRIER, 3: BARRIER}
    for order in (records, records[::-1]):
        seen = Evidence(order, first=0, active=RANKS, stacks=stacks, hangs={1: "on_lock"})
        assert (blamed(seen), candidates(seen)) == ([(1, "waits_for_lock")], [0])
        assert judge(seen).first == 1


@QUIET
def test_rank_that_others_waited_for_before_it_ended_without_a_reason_is_named_once(end: str | int) -> None:
    waited = exceeded(0, 90.0, "in_collective", *BARRIER)
    records = (ended(0, end, 100.0, arrival_order=1), waited, ended(1, end, 100.0))
    seen = Evidence(records, first=0, active=RANKS, stacks=dict.fromkeys((0, 2, 3), BARRIER) | {1: LOADS})
    assert (blamed(seen), candidates(seen)) == ([(1, "hung")], [0])


def test_lost_monitor_is_blamed_where_nothing_else_is_on_record() -> None:
    lost = InterruptionRecord(3, Interruption.MONITOR_PROCESS_EXCEPTION, "its monitor is gone")
    assert blamed(Evidence((lost,), first=3, active=RANKS, answered=RANKS)) == [(3, "monitor_lost")]


def test_what_most_ranks_fail_of_does_not_clear_the_first_reporter_with_a_fault_of_its_own() -> None:
    died = InterruptionRecord(2, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"), arrival_order=1)
    error = ExceptionInfo("RuntimeError", "too few ranks", "same")
    others = tuple(
        InterruptionRecord(rank, Interruption.BASE_EXCEPTION, exception=error, stage="initialize") for rank in (0, 1, 3)
    )
    seen = Evidence((died, *others), first=2, active=RANKS)
    verdict = judge(seen)
    assert verdict.first == 2
    assert (verdict.culprits[0].rank, verdict.culprits[0].what) == (2, "killed")
    assert 14 not in verdict.rules_fired


# -- faults within the restart ------------------------------------------------------------------------


def breaks(rank: int, how: str) -> InterruptionRecord:
    """The record of a rank that answered the interruption, and then broke."""
    match how:
        case "exit":
            return InterruptionRecord(rank, Interruption.TERMINATED, exit=Exit(code=7), stage="health_check")
        case "hook hangs":
            hook = Detector("hook:finalize", 12.0)
            return InterruptionRecord(rank, Interruption.HARD_TIMEOUT, detector=hook, stage="finalize")
        case "hook fails":
            error = ExceptionInfo("ValueError", "bad state", "f", (STEP,))
            return InterruptionRecord(
                rank, Interruption.BASE_EXCEPTION, exception=error, stage="finalize", origin="own"
            )
    detector = Detector("watchdog", 12.0)
    return InterruptionRecord(rank, Interruption.HARD_TIMEOUT, detector=detector, hang="holds_gil", stage="run")


@pytest.mark.parametrize("how", ["exit", "hook hangs", "hook fails", "holds the lock"])
@pytest.mark.parametrize("reporter", [0, 2])
def test_rank_that_breaks_in_the_restart_does_not_hide_the_rank_that_began_it(how: str, reporter: int) -> None:
    """Rank 1 hangs. Rank 2, which waited for it, breaks when all restart. It may have reported the hang itself."""
    later = breaks(2, how)
    records = (silent(reporter, BACKWARD, hang="in_collective"), later)
    hangs: dict[int, Hang] = {0: "in_collective", 1: "on_lock", 2: "in_collective", 3: "in_collective"}
    seen = Evidence(
        records,
        first=reporter,
        active=RANKS,
        stacks=dict.fromkeys(RANKS, BACKWARD) | {1: LOADS},
        hangs=hangs,
        answered=RANKS,
        after_answer=frozenset({(2, later.interruption)}),
    )
    verdict = judge(seen)
    assert (verdict.first, verdict.what) == (1, "waits_for_lock")
    is_hook = how.startswith("hook")  # which may have failed because the other rank was gone
    assert [culprit.rank for culprit in verdict.culprits] == ([1] if is_hook else [1, 2])
    assert any(2 in cleared.ranks for cleared in verdict.exonerated) is is_hook


def test_rank_that_exits_in_an_unexplained_restart_is_blamed_with_low_confidence() -> None:
    records = (silent(0, BACKWARD, hang="in_collective"), breaks(2, "exit"))
    seen = Evidence(records, first=0, active=RANKS, stacks=dict.fromkeys(RANKS, BACKWARD), answered=RANKS)
    verdict = judge(seen)
    assert [(culprit.rank, culprit.what) for culprit in verdict.culprits] == [(2, "exited")]
    assert verdict.culprits[0].confidence == NAMED


@pytest.mark.parametrize("how", ["exit", "hook hangs", "hook fails"])
def test_candidates_of_the_beginning_stand_beside_the_rank_that_breaks_in_the_restart(how: str) -> None:
    """Rank 1 or rank 3 hangs, nobody knows which. Rank 2, which waited as rank 0 did, breaks when all restart."""
    later = breaks(2, how)
    began = Evidence(
        (silent(0, BACKWARD, hang="in_collective"),),
        first=0,
        active=RANKS,
        stacks={0: BACKWARD, 1: LOADS, 2: BACKWARD, 3: (STEP,)},
        answered=RANKS,
        after_answer=frozenset({(2, later.interruption)}),
    )
    assert (blamed(began), candidates(began)) == ([], [1, 3])
    verdict = judge(msgspec.structs.replace(began, records=(*began.records, later)))
    assert verdict.first is None, "nothing says which rank began it"
    suspects = {culprit.rank for culprit in (*verdict.culprits, *verdict.candidates)}
    assert suspects == {1, 2, 3}
    assert all(culprit.rank == 2 and culprit.confidence == NAMED for culprit in verdict.culprits)
    assert bool(verdict.culprits) is how.startswith("hook"), "an end without a reason may follow from the hang"
    cleared = {rank for group in verdict.exonerated for rank in group.ranks}
    assert not (suspects & cleared or suspects & set(verdict.cascade))


def test_rank_that_is_a_candidate_already_is_named_once_when_it_breaks_in_the_restart() -> None:
    later = breaks(1, "hook hangs")
    seen = Evidence(
        (silent(0, BACKWARD, hang="in_collective"), later),
        first=0,
        active=RANKS,
        stacks={0: BACKWARD, 1: LOADS, 2: BACKWARD, 3: (STEP,)},
        answered=RANKS,
        after_answer=frozenset({(1, later.interruption)}),
    )
    assert (blamed(seen), candidates(seen)) == ([(1, "hook_hung")], [3])


def test_rank_that_could_not_be_freed_is_blamed_though_it_had_answered() -> None:
    """Its watcher answers while its main thread is in C code that no interrupt reaches."""
    record = InterruptionRecord(2, Interruption.HARD_TIMEOUT, detector=Detector("watchdog", 12.0), stage="run")
    records = (silent(0, BACKWARD, hang="in_collective"), record)
    stacks = dict.fromkeys(RANKS, BACKWARD) | {2: LOADS}
    after = frozenset({(2, Interruption.HARD_TIMEOUT)})
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, answered=RANKS, after_answer=after)
    assert blamed(seen) == [(2, "blocked_in_native_code")]


# -- collectives that ranks have entered --------------------------------------------------------------

ALL = (0, 1, 4)


def waits_at(seq: int, op: str = "gloo:all_reduce", left: bool = False, usual: str = "") -> tuple[Collective, ...]:
    return (Collective(1, seq, op, left, ALL, usual, is_recorded=True),)


def test_rank_that_has_not_come_to_the_collective_is_blamed_though_it_is_nowhere_to_be_seen() -> None:
    """Its stack is not known: the sequence numbers alone tell."""
    records = tuple(silent(rank, BACKWARD, hang="in_collective") for rank in (0, 2, 3))
    entered = {rank: waits_at(9) for rank in (0, 2, 3)} | {1: waits_at(8, left=True)}
    seen = Evidence(records, first=0, active=RANKS, collectives=entered, answered=RANKS)
    verdict = judge(seen)
    assert (blamed(seen), verdict.rules_fired) == ([(1, "hung")], (3, 10))
    assert 0.5 < verdict.culprits[0].confidence < SURE


def test_sequence_and_place_together_make_a_verdict_sure() -> None:
    entered = {rank: waits_at(9) for rank in (0, 2, 3)} | {1: waits_at(8, left=True)}
    stacks = dict.fromkeys(RANKS, BACKWARD) | {1: LOADS}
    for records in ((silent(0, BACKWARD, hang="in_collective"),), (silent(1, LOADS, hang="in_call"),)):
        seen = Evidence(
            records, first=records[0].rank, active=RANKS, stacks=stacks, collectives=entered, answered=RANKS
        )
        assert blamed(seen) == [(1, "hung")]
        assert judge(seen).culprits[0].confidence >= SURE


@pytest.mark.parametrize("world", [2, 4])
def test_rank_that_enters_one_more_barrier_is_blamed_alone(world: int) -> None:
    ranks = frozenset(range(world))
    entered = {rank: waits_at(9, usual="gloo:all_reduce") for rank in ranks}
    entered[1] = waits_at(9, "gloo:barrier", usual="gloo:all_reduce")
    stacks = dict.fromkeys(ranks, BACKWARD) | {1: BARRIER}
    records = (silent(0, BACKWARD, hang="in_collective"),)
    seen = Evidence(records, first=0, active=ranks, stacks=stacks, collectives=entered, answered=ranks)
    assert blamed(seen) == [(1, "desynchronised")]


def test_unknown_sequence_is_named() -> None:
    seen = Evidence((silent(0, BACKWARD, hang="in_collective"),), first=0, active=RANKS, answered=RANKS)
    blind = {each.rule: each.lacks for each in judge(seen).rules_blind}
    assert blind[10] == "the collectives that 4 of 4 ranks entered (sequence unknown)"


@pytest.mark.parametrize(("code", "has_hint"), [(137, True), (1, False)])
def test_exit_status_137_is_said_to_be_maybe_a_kill_for_memory(code: int, has_hint: bool) -> None:
    died = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(code=code))
    verdict = judge(Evidence((died,), first=1, active=RANKS))
    advice = advise(verdict, 0, False, False, (), {code})
    assert verdict.what == "exited"
    hints = [line for line in advice if "128 + 9" in line and "memory" in line and "the container's limit" in line]
    assert bool(hints) is has_hint


def test_rank_that_may_have_been_asked_to_stop_in_the_restart_is_only_a_candidate() -> None:
    """By the clocks of two nodes nobody knows whether rank 0 was asked to stop because rank 1 had died."""
    error = ExceptionInfo("ValueError", "bad", "0" * 12)
    second = 1_000_000_000
    died = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"), node="b")
    asked = InterruptionRecord(0, Interruption.TERMINATED, exit=Exit(signal="SIGTERM"), node="a")
    records = (
        InterruptionRecord(2, Interruption.EXCEPTION, exception=error, node="a", detected_wall_ns=10 * second),
        msgspec.structs.replace(asked, detected_wall_ns=20 * second),
        msgspec.structs.replace(died, detected_wall_ns=25 * second),
    )
    errors = {"a": 10 * second, "b": 10 * second}
    verdict = judge(Evidence(records, first=2, active=RANKS, answered=RANKS, clock_errors=errors))
    assert [(each.rank, each.what) for each in verdict.culprits] == [(2, "exception"), (1, "killed")]
    assert [each.rank for each in verdict.candidates] == [0]
    assert all(each.confidence >= NAMED for each in verdict.culprits)


def test_only_followers_of_one_exception_are_said_to_have_followed() -> None:
    def raised(*ranks: int) -> Verdict:
        error = ExceptionInfo("ValueError", "bad", "0" * 12)
        records = tuple(
            InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, origin="own") for rank in ranks
        )
        return judge(Evidence(records, first=ranks[0], active=frozenset(range(8))))

    one, two = raised(1), raised(1, 2)
    assert (len(one.culprits), len(two.culprits)) == (1, 2)
    assert "only followed" in advise(one, 0, False, False, ())[0]
    assert "only followed" not in advise(two, 0, False, False, ())[0]


def test_only_a_verdict_of_nine_tenths_may_be_acted_on() -> None:
    died = InterruptionRecord(1, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"))
    node = InterruptionRecord(2, Interruption.UNRESPONSIVE, "node b is lost")
    verdict = judge(Evidence((died, node), first=1, active=RANKS))
    assert {culprit.rank for culprit in verdict.culprits} == {1, 2}
    assert {culprit.rank for culprit in verdict.sure} == {1}


def missed(rank: int) -> InterruptionRecord:
    """The record of a rank that completed, and waited in vain for the others."""
    return InterruptionRecord(rank, Interruption.UNRESPONSIVE, detector=Detector("completion_barrier", 120.0))


@pytest.mark.parametrize("is_known", [True, False])
def test_rank_that_completed_without_the_last_collective_is_blamed_not_those_waiting(
    is_known: bool,
) -> None:
    entered = {rank: waits_at(9) for rank in (1, 2, 3)} | {0: waits_at(8, left=True)}
    stacks = dict.fromkeys((1, 2, 3), BARRIER)
    seen = Evidence((missed(0),), first=0, active=RANKS, stacks=stacks, returned=frozenset((0,)), answered=RANKS)
    if is_known:
        seen = msgspec.structs.replace(seen, collectives=entered)
    assert blamed(seen) == [(0, "went_on")]
    assert {rank for cleared in judge(seen).exonerated for rank in cleared.ranks} == {1, 2, 3}


def test_rank_that_keeps_the_others_from_completing_is_found_by_what_they_wait_for() -> None:
    entered = {rank: waits_at(9) for rank in (0, 1, 2)} | {3: waits_at(8, left=True)}
    stacks = {1: BARRIER, 2: BARRIER, 3: LOADS}
    seen = Evidence((missed(0),), first=0, active=RANKS, stacks=stacks, returned=frozenset((0,)), answered=RANKS)
    assert blamed(msgspec.structs.replace(seen, collectives=entered)) == [(3, "hung")]
    assert blamed(seen) == [(3, "missed_completion")]
    assert blamed(msgspec.structs.replace(seen, hangs={3: "on_lock"})) == [(3, "waits_for_lock")]


def test_of_several_ranks_that_do_not_complete_each_is_a_candidate() -> None:
    seen = Evidence((missed(0),), first=0, active=RANKS, returned=frozenset((0, 1)))
    assert (blamed(seen), candidates(seen)) == ([], [2, 3])


def awaiting(behind: frozenset[int], ranks: frozenset[int] = RANKS, **known: object) -> Evidence:
    """The evidence of ranks that wait for those which have not joined their collective, and are elsewhere."""
    members = (0, 1, len(ranks))
    entered = {rank: (Collective(1, 9 - (rank in behind), "all_reduce", rank in behind, members),) for rank in ranks}
    stacks = {rank: LOADS if rank in behind else BARRIER for rank in ranks}
    first = min(ranks - behind)
    records = (silent(first, BARRIER, hang="in_collective"),)
    return Evidence(records, first, ranks, stacks=stacks, collectives=entered, answered=ranks, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [2, 15])
def test_of_several_ranks_that_have_not_joined_each_is_a_candidate(number: int) -> None:
    behind = frozenset(range(1, 1 + number))
    seen = awaiting(behind, frozenset(range(16)))
    assert (blamed(seen), candidates(seen)) == ([], sorted(behind))


@pytest.mark.parametrize("is_known", [True, False])
def test_rank_that_hangs_is_blamed_before_one_that_has_only_not_joined(is_known: bool) -> None:
    seen = awaiting(frozenset((2, 3)), hangs={2: "in_call", 3: "stopped"})
    if not is_known:
        seen = msgspec.structs.replace(seen, collectives={})
    assert blamed(seen) == [(3, "stopped")]
    assert NAMED < judge(seen).culprits[0].confidence < SURE


@pytest.mark.parametrize("is_known", [True, False])
def test_rank_without_an_answer_on_record_does_not_outrank_one_that_is_known_to_hang(is_known: bool) -> None:
    seen = awaiting(frozenset((1,)), hangs={1: "on_lock"})
    collectives = {rank: entered for rank, entered in seen.collectives.items() if rank != 3 and is_known}
    stacks = {rank: stack for rank, stack in seen.stacks.items() if rank != 3}
    seen = msgspec.structs.replace(seen, collectives=collectives, stacks=stacks, answered=RANKS - {3})
    assert blamed(seen) == [(1, "waits_for_lock")]


@pytest.mark.parametrize(("answered", "expected"), [((0, 1, 2), [3]), ((0, 1), [])])
def test_rank_without_an_answer_on_record_is_blamed_if_it_is_the_only_one(
    answered: tuple[int, ...], expected: list[int]
) -> None:
    stacks = dict.fromkeys(answered, BARRIER)
    records = (silent(0, BARRIER, hang="in_collective"),)
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, answered=frozenset(answered))
    assert [culprit.rank for culprit in judge(seen).culprits] == expected
    assert expected or candidates(seen) == [2, 3]


LOADER = (
    STEP,
    Frame("/site-packages/torch/utils/data/dataloader.py", 1243, "_try_get_data"),
    Frame("/usr/lib/python3.11/queue.py", 180, "get"),
    Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
)


@pytest.mark.parametrize("word", ["on_lock", "in_call"])
@pytest.mark.parametrize("first", [0, 1])
def test_rank_that_waits_for_its_data_loader_has_no_lock_that_is_never_released(word: Hang, first: int) -> None:
    """With pinned memory it waits for the queue of a thread. Without, it waits for a process."""
    stacks = dict.fromkeys(RANKS, BARRIER) | {1: LOADER}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {1: word}
    record = msgspec.structs.replace(silent(first, stacks[first], hang=hangs[first]), detector=Detector("step", 60.0))
    seen = Evidence((record,), first, RANKS, stacks=stacks, hangs=hangs, answered=RANKS)
    assert blamed(seen) == [(1, "input_stall")]
    assert judge(seen).category == "storage"
    calls = (*LOADER[:2], Frame("/home/me/data.py", 7, "load"), LOADER[-1])  # the loader runs user code itself
    own = Evidence((silent(1, calls, hang="on_lock"),), 1, RANKS, answered=RANKS)
    assert blamed(own) == [(1, "waits_for_lock")]


SAVES = (STEP, Frame("/site-packages/torch/distributed/checkpoint/filesystem.py", 472, "_write_files_from_queue"))
GATHERS = (STEP, Frame("/site-packages/torch/distributed/distributed_c10d.py", 3000, "gather_object"))


@pytest.mark.parametrize(("word", "what"), [("in_call", "storage_stall"), ("in_kernel", "blocked_in_kernel")])
@pytest.mark.parametrize("first", [0, 1])
def test_rank_that_hangs_in_a_checkpoint_is_blamed_not_the_ranks_in_gather(word: Hang, what: str, first: int) -> None:
    stacks = dict.fromkeys(RANKS, GATHERS) | {1: SAVES}
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, "in_collective") | {1: word}
    process = ProcessInfo("D" if word == "in_kernel" and first == 1 else "S", 0.0, 60.0)
    sections = (OpenSection("checkpoint", 60.0),)
    record = silent(first, stacks[first], hang=hangs[first], process=process, open_sections=sections)
    of_ranks = dict.fromkeys(RANKS, ("checkpoint",))
    seen = Evidence((record,), first, RANKS, stacks=stacks, hangs=hangs, sections=of_ranks, answered=RANKS)
    assert blamed(seen) == [(1, what)]
    assert judge(seen).category == "storage"


def test_rank_that_computes_in_torch_distributed_does_not_wait_there() -> None:
    computes = (STEP, Frame("/site-packages/torch/distributed/tensor/_dispatch.py", 440, "dispatch"))
    stacks = dict.fromkeys(RANKS, BARRIER) | {1: computes}
    records = (silent(0, BARRIER, hang="in_collective"),)
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, hangs={1: "in_loop"}, answered=RANKS)
    assert blamed(seen) == [(1, "busy_without_progress")]
    own = silent(1, computes, hang="in_loop", process=ProcessInfo("R", 60.0, 60.0, runnable_s=60.0))
    own = msgspec.structs.replace(own, detector=Detector("step", 60.0))
    assert blamed(msgspec.structs.replace(seen, records=(own,), first=1, hangs={})) == [(1, "busy_without_progress")]


@pytest.mark.parametrize("reporter", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_rank_that_left_a_failed_collective_and_waits_in_the_next_one_is_out_of_step(world: int, reporter: int) -> None:
    ranks = frozenset(range(world))
    entered = {rank: (Collective(1, 9 if rank == 0 else 8, "all_reduce", False, (0, 1, world)),) for rank in ranks}
    stacks = dict.fromkeys(ranks, BARRIER)
    records = (silent(reporter, BARRIER, hang="in_collective"),)
    seen = Evidence(records, first=reporter, active=ranks, stacks=stacks, collectives=entered, answered=ranks)
    assert blamed(seen) == ([(0, "desynchronised")] if world > 2 else [])
    assert candidates(seen) == ([] if world > 2 else [0, 1])


def test_rank_that_calls_the_same_collective_from_another_line_is_not_out_of_step() -> None:
    """As where only rank 0 calls the function that logs."""
    logs = (Frame("/home/me/train.py", 33, "log"), BARRIER[-1])
    stacks = dict.fromkeys(RANKS, BARRIER) | {0: logs}
    records = (silent(0, logs, hang="in_collective"),)
    seen = Evidence(records, first=0, active=RANKS, stacks=stacks, answered=RANKS)
    assert blamed(seen) == [(0, "desynchronised")]
    known = msgspec.structs.replace(seen, collectives={rank: waits_at(9) for rank in RANKS})
    assert (blamed(known), candidates(known), judge(known).what) == ([], [], "communication")


@pytest.mark.parametrize(
    ("word", "what", "category"),
    [("stopped", "stopped", "host"), ("holds_gil", "blocked_in_native_code", "user_code")],
)
@pytest.mark.parametrize("is_awaited", [True, False])
def test_rank_that_cannot_run_is_blamed_and_not_one_that_is_in_a_call_until_its_limit(
    word: Hang, what: str, category: str, is_awaited: bool
) -> None:
    """Rank 0 waits for rank 1 in a store, and the others wait for rank 0."""
    calls = (Frame("/home/me/train.py", 50, "wait_for_peer"),)
    hangs: dict[int, Hang] = {1: word, 2: "in_collective"}
    entered = {rank: waits_at(9 - (rank == 0), left=rank == 0) for rank in (0, 2, 3)} if is_awaited else {}
    for kind in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT):
        record = msgspec.structs.replace(
            silent(0, calls, hang="in_call"), interruption=kind, detector=Detector("step", 60.0)
        )
        stacks = {0: calls, 1: LOADS, 2: BARRIER, 3: BARRIER}
        seen = Evidence((record,), first=0, active=RANKS, stacks=stacks, hangs=hangs, collectives=entered)
        assert (blamed(seen), candidates(seen)) == ([(1, what)], [0])
        assert (judge(seen).category, judge(seen).first) == (category, 1)
        assert judge(seen).culprits[0].confidence < SURE


@pytest.mark.parametrize("word", ["in_kernel", "in_loop", "on_lock", "in_call"])
def test_rank_that_may_be_at_work_does_not_excuse_one_that_is_in_a_call_until_its_limit(word: Hang) -> None:
    record = silent(0, LOADS, hang="in_call")
    seen = Evidence((record,), first=0, active=RANKS, stacks={0: LOADS, 1: LOADS}, hangs={1: word}, answered=RANKS)
    assert blamed(seen) == [(0, "hung")]


@pytest.mark.parametrize("is_late", [True, False])
def test_rank_that_runs_again_is_cleared_only_if_the_end_of_another_one_may_have_freed_it(is_late: bool) -> None:
    """Otherwise it computes now and then, which may be a hang too."""
    waits = silent(1, BARRIER, hang="in_collective")
    again = silent(0, (STEP,), hang="runs_again", process=ProcessInfo("R", 0.5, 1.0, runnable_s=0.5))
    again = msgspec.structs.replace(again, detector=Detector("heartbeat", 3.0))
    late = frozenset((0,)) if is_late else frozenset[int]()
    seen = Evidence((waits, again), first=1, active=frozenset((0, 1)), late=late)
    assert blamed(seen) == ([] if is_late else [(0, "busy_without_progress")])


@pytest.mark.parametrize(("word", "cpu_s"), [("in_loop", 60.0), ("in_call", 0.0)])
@pytest.mark.parametrize("reporters", [(0,), (0, 1, 3), (2, 0, 1, 3)])
def test_rank_that_has_not_joined_is_blamed_not_the_ranks_waiting_for_their_device(
    word: Hang, cpu_s: float, reporters: tuple[int, ...]
) -> None:
    """NCCL's collectives run on the device. A rank waits for it where it reads a result, and may use a processor."""
    reads = (Frame("/home/me/train.py", 41, "log_loss"),)
    hangs: dict[int, Hang] = dict.fromkeys(RANKS, word) | {2: "in_call"}
    stacks = dict.fromkeys(RANKS, reads) | {2: LOADS}
    processes = dict.fromkeys(RANKS, ProcessInfo("S", cpu_s, 60.0, runnable_s=cpu_s)) | {2: ProcessInfo("S", 0.0, 60.0)}
    records = tuple(
        msgspec.structs.replace(
            silent(rank, stacks[rank], hang=hangs[rank], process=processes[rank]), detector=Detector("step", 60.0)
        )
        for rank in reporters
    )
    entered = dict.fromkeys(RANKS, waits_at(9)) | {2: waits_at(8, left=True)}
    seen = Evidence(records, reporters[0], RANKS, stacks=stacks, hangs=hangs, collectives=entered, answered=RANKS)
    assert blamed(seen) == [(2, "hung")]
    assert {rank for cleared in judge(seen).exonerated for rank in cleared.ranks} == {0, 1, 3}


def operations(evidence: Evidence) -> int:
    """Return how many operations of the interpreter a verdict takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        judge(evidence)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("share", ["all raised", "all exited", "half exited, half raised"])
def test_work_of_a_verdict_grows_with_the_ranks_and_not_with_their_square(share: str) -> None:
    def evidence(ranks: int) -> Evidence:
        raised = [
            InterruptionRecord(rank, Interruption.EXCEPTION, exception=CLOSED, origin="own", arrival_order=rank + 1)
            for rank in range(ranks)
        ]
        exited = [
            InterruptionRecord(rank, Interruption.TERMINATED, exit=Exit(code=1), detected_wall_ns=rank + 1)
            for rank in range(ranks)
        ]
        half = [*exited[: ranks // 2], *raised[ranks // 2 :]]
        records = {"all raised": raised, "all exited": exited}.get(share, half)
        return Evidence(records=tuple(records), first=0, active=frozenset(range(ranks)))

    assert operations(evidence(400)) < 2.3 * operations(evidence(200))
