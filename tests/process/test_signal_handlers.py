"""A signal handler of the program that raises in the middle of a restart, or while the program's last words are
printed, costs no rank and hides no error. Torch's handler of SIGCHLD is one: it raises an error for each process of a
data loader that was lost, mostly when another error has told of it already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution.incidents import fold
from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.process.launching import Launched, launcher
from tests.support.ranks import Job

Start = Callable[..., Job]


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Callable[..., Launched]:
    return launcher(start, tmp_path)


@pytest.mark.parametrize(("again", "completed_in"), [pytest.param(False, 1, marks=pytest.mark.slow), (True, 2)])
def test_handler_that_raises_during_a_restart_costs_no_rank(start: Start, again: bool, completed_in: int) -> None:
    job = start(2, "tests.process.handling:handler_raises", again=again)
    first, second = job.wait(120.0)
    assert (first.error, second.error) == ("", "")
    assert first.value == (completed_in, 2)  # put off, it is called again when the function runs
    assert second.value == (completed_in, 0)
    assert not job.of(events.RankLeft)
    deferred = [(record.origin.initial_rank, record.event) for record in job.of(events.SignalDeferred)]
    assert {(rank, event.signal, event.error) for rank, event in deferred} == {
        (0, "SIGCHLD", "RuntimeError: a process of mine is lost")
    }


def test_exception_of_a_handler_that_no_function_gets_any_more_reaches_the_caller(start: Start) -> None:
    job = start(1, "tests.process.handling:handler_raises_after_the_function")
    (rank,) = job.wait()
    assert rank.value == "preempted"
    assert [record.event.outcome for record in job.of(events.CallEnded)] == ["completed"]
    assert [record.event.signal for record in job.of(events.SignalDeferred)] == ["SIGUSR1"]


def test_exception_of_a_put_off_handler_does_not_replace_that_of_the_call(start: Start) -> None:
    job = start(1, "tests.process.handling:handler_raises_after_ctrl_c")
    (rank,) = job.wait()
    assert rank.value["raised"] == "KeyboardInterrupt"
    (note,) = rank.value["notes"]  # of the second call of the handler, when the wrapped call was over
    assert "RuntimeError: a process of mine is lost (call 2)" in note.splitlines()[0] and "in lost" in note
    (deferred,) = [record.event for record in job.of(events.SignalDeferred)]
    assert (deferred.signal, deferred.error) == ("SIGUSR1", "RuntimeError: a process of mine is lost (call 1)")
    assert [frame.function for frame in deferred.stack] == ["lost"]


def test_handler_that_has_given_its_signal_back_costs_no_rank_when_it_is_called_again(start: Start) -> None:
    job = start(1, "tests.process.handling:handler_gives_its_signal_back")
    (rank,) = job.wait()
    assert rank.value == 2  # it was called again in iteration 1


@pytest.mark.parametrize(
    ("signal_name", "set_handler_in", "place", "error"),
    [
        ("SIGTERM", "program", "function", "SystemExit"),
        ("SIGTERM", "call", "function", "SystemExit"),
        ("SIGTERM", "program", "hook", "SystemExit"),
        ("SIGINT", "program", "function", "KeyboardInterrupt"),
    ],
)
def test_signal_that_ends_a_rank_while_it_cleans_up_after_an_interruption_is_not_lost(
    start: Start, signal_name: str, set_handler_in: str, place: str, error: str
) -> None:
    target = "tests.process.handling:signalled_in_cleanup"
    job = start(2, target, signal_name=signal_name, set_handler_in=set_handler_in, place=place)
    others, signalled = job.wait(120.0)
    assert others.value == (1, 1)
    assert signalled.type == error
    (record,) = [record.event.record for record in job.of(events.RankInterrupted, rank=1)]
    assert record.exception is not None
    assert (record.exception.type, record.interruption, record.origin) == (error, Interruption.BASE_EXCEPTION, "own")
    (left,) = [record.event for record in job.of(events.RankLeft)]
    assert left.error.startswith(error)
    assert [ended.event.outcome for ended in job.of(events.CallEnded, rank=1)] == ["left"]
    (incident,) = fold(job.records())
    ended_by = "hook_failed" if place == "hook" else "left"
    assert [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits] == [(0, "exception"), (1, ended_by)]


@pytest.mark.parametrize("limit", [60.0, 0.0], ids=["may go on", "is replaced"])
@pytest.mark.parametrize(
    ("how", "set_handler_in", "error"),
    [
        ("signal, in cleanup", "program", "SystemExit: 143"),
        ("signal, in cleanup", "call", "SystemExit: 143"),
        ("ctrl-c, in cleanup", "program", "KeyboardInterrupt"),
        ("abort, in cleanup", "program", "RestartAbort"),
        ("signal, in handler", "program", "SystemExit: 143"),
        ("signal, in handler", "call", "SystemExit: 143"),
    ],
)
def test_rank_that_is_interrupted_while_it_leaves_for_a_signal_or_gives_up_has_left(
    start: Start, how: str, set_handler_in: str, limit: float, error: str
) -> None:
    target = "tests.process.handling:interrupted_while_leaving"
    job = start(2, target, how=how, set_handler_in=set_handler_in, limit=limit)
    others, leaver = job.wait(120.0)
    is_called_again = how.endswith("handler") and not limit
    assert others.value == (2 if is_called_again else 1, 1)
    assert leaver.type in error
    (left,) = [record.event for record in job.of(events.RankLeft)]
    assert left.error.strip(": ") == error
    (record,) = [record.event.record for record in job.of(events.RankInterrupted, rank=1)]
    assert record.interruption == Interruption.BASE_EXCEPTION
    assert record.origin == "own" or how.startswith("abort")
    assert [record.event.signal for record in job.of(events.SignalDeferred)] == ["SIGTERM"] * is_called_again


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
def test_exit_that_the_caller_of_the_function_handles_ends_no_rank(start: Start, error: str) -> None:
    job = start(2, "tests.process.handling:restarts_while_the_caller_handles", error=error)
    assert [rank.value for rank in job.wait()] == [(1, 2), (1, 2)]


def test_function_that_is_interrupted_finds_its_own_signal_handler(start: Start) -> None:
    job = start(2, "tests.process.handling:gives_its_signal_back_if_it_is_still_its_own")
    assert [rank.value for rank in job.wait()] == [(1, True), (1, True)]


def test_exit_that_user_code_makes_of_an_interruption_restarts_the_rank(start: Start) -> None:
    job = start(2, "tests.process.handling:exits_when_interrupted")
    assert [rank.value for rank in job.wait()] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("exit", "function"),
        pytest.param("exit", "hook", marks=pytest.mark.slow),
        ("exit, later", "function"),
        pytest.param("abort", "function", marks=pytest.mark.slow),
    ],
)
def test_exit_that_user_code_makes_of_the_aborts_cut_restarts_the_rank(start: Start, how: str, place: str) -> None:
    job = start(2, "tests.process.handling:exits_when_cut", how=how, place=place)
    assert [rank.value for rank in job.wait(120.0)] == [(1, 2), (1, 2)]
    (incident,) = fold(job.records())
    assert [culprit.rank for culprit in incident.verdict.culprits] == [0]


def test_rank_that_gives_up_of_its_own_during_the_abort_has_left(start: Start) -> None:
    others, leaver = start(2, "tests.process.handling:exits_when_cut", how="abort of its own", place="function").wait()
    assert (others.value, leaver.type) == ((1, 1), "RestartAbort")


@pytest.mark.parametrize("end", ["killed", pytest.param("failed", marks=pytest.mark.slow)])
def test_exit_that_user_code_makes_of_a_lost_peer_restarts_the_rank(start: Start, end: str) -> None:
    job = start(3, "tests.process.handling:exits_after_a_lost_peer", end=end, how="exit")
    size = 2 if end == "killed" else 3
    assert [rank.value for rank in job.wait(120.0)][1:] == [(1, size), (1, size)]
    (incident,) = fold(job.records())
    assert [culprit.rank for culprit in incident.verdict.culprits] == [0]


def test_ctrl_c_that_user_code_makes_an_exit_of_after_a_lost_peer_ends_the_rank(start: Start) -> None:
    job = start(3, "tests.process.handling:exits_after_a_lost_peer", end="killed", how="exit after ctrl-c")
    _, signalled, other = job.wait(120.0)
    assert (signalled.type, other.value) == ("SystemExit", (1, 1))


def test_handler_that_raises_while_an_error_is_printed_hides_it_from_nobody(launch: Callable[..., Launched]) -> None:
    job = launch(
        """
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        stderr = sys.stderr

        class Losing:  # a process is lost with the first word of the traceback
            def write(self, text):
                if child.poll() is None:
                    child.kill()
                    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
                return stderr.write(text)

            def flush(self):
                stderr.flush()

        def lost(*_):
            raise RuntimeError("a process of mine is lost")

        if cycle == 0:
            signal.signal(signal.SIGCHLD, lost)
            sys.stderr = Losing()
            raise ValueError("the first error")
        child.kill()
        """,
        nproc=1,
        SLOW_ANSWERS="yes",
    )
    assert job.wait() == [0], job.job.output()
    (error,) = [each.event.record.exception for each in job.job.of(events.RankInterrupted)]
    assert (error.type, error.message) == ("ValueError", "the first error")
    assert [frame.function for frame in error.stack] == ["<module>"]
