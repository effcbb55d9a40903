"""Restarts of groups that behave like NCCL's: asynchronous, freed by their abort only, which takes its time.

The ranks run `tests.process.accelerated`; how the groups behave is told in `tests.support.asynchronous`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from resilience.attribution.incidents import fold
from resilience.facts import events
from tests.process import accelerated
from tests.support.ranks import Finished, Job

pytestmark = pytest.mark.timeout(900)  # together they may take longer than 300 s on a busy machine

Start = Callable[..., Job]
LONG = 6.0  # seconds that an abort takes; no other limit of the default Wrapper is that short
IMPATIENT = {"RESILIENCE_ABORT_WAIT": "1"}
SHORT = {"soft_timeout": 4.0, "hard_timeout": 12.0, "progress_watchdog_interval": 0.25, "termination_grace_time": 0.5}


def target(body: Callable[..., Any]) -> str:
    return f"{body.__module__}:{body.__name__}"


def happened(rank: Finished) -> list[str]:
    return [what for what, _ in rank.value["diary"]]


def outcomes(job: Job, rank: int) -> Counter[str]:
    """How the aborts of a rank's groups ended."""
    return Counter(record.event.outcome for record in job.of(events.AbortGroup, rank=rank))  # type: ignore[attr-defined]


@pytest.mark.parametrize("frees_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_abort_of_every_group_is_waited_for_before_groups_are_built_again(start: Start, frees_first: bool) -> None:
    job = start(2, target(accelerated.abort_several_groups), abort={"abort_s": LONG, "frees_first": frees_first})
    ranks = job.wait(200)
    assert not job.of(events.RankSignalled)
    assert [rank.value["iteration"] for rank in ranks] == [1, 1], ranks
    for number, rank in enumerate(ranks):
        assert happened(rank)[:9] == ["built"] * 3 + ["abort began"] * 3 + ["abort ended"] * 3
        assert "refused" not in happened(rank)
        told = [record.event for record in job.of(events.AbortGroup, rank=number)]
        assert [(event.backend, event.outcome, event.duration_s >= LONG) for event in told] == [
            ("asynchronous", "aborted", True)
        ] * 3
        assert len({event.group for event in told}) == 3


def test_rank_is_not_ended_while_its_abort_runs_though_it_is_silent_past_hard_timeout(start: Start) -> None:
    # Rank 0 is silent from the start: 10 s until the restart, 15 s of abort; hard_timeout is 24 s.
    job = start(
        2,
        target(accelerated.abort_several_groups),
        abort={"abort_s": 15.0},
        only=0,
        hang=True,
        timeouts=SHORT | {"soft_timeout": 10.0, "hard_timeout": 24.0},
        env={"RESILIENCE_ABORT_WAIT": "23.5"},
    )
    ranks = job.wait(200)
    assert not job.of(events.RankSignalled)
    assert [rank.value["iteration"] for rank in ranks] == [1, 1], ranks
    assert outcomes(job, 0) == {"aborted": 3}


@pytest.mark.parametrize(("kind", "outcome"), [("hangs", "timed out"), ("fails", "failed")])
def test_group_whose_abort_hangs_or_fails_is_left_behind(start: Start, kind: str, outcome: str) -> None:
    job = start(
        2,
        target(accelerated.abort_several_groups),
        abort={kind: [1], "frees_first": True, "refuses": False},
        env={"RESILIENCE_ABORT_WAIT": "4"},
    )
    ranks = job.wait(200)
    assert [rank.value["iteration"] for rank in ranks] == [1, 1], ranks
    for number, rank in enumerate(ranks):
        assert outcomes(job, number) == {"aborted": 2, outcome: 1}
        assert "shut down while it was being aborted" not in happened(rank)
    [error] = {record.event.error for record in job.of(events.AbortGroup) if record.event.outcome == outcome}  # type: ignore[attr-defined]
    assert ("unhandled cuda error" in error) is (outcome == "failed")


def test_job_restarts_until_a_late_abort_has_ended_if_it_is_refused_groups_meanwhile(start: Start) -> None:
    job = start(2, target(accelerated.build_beside_an_abort_that_hangs), refusals=3, env=IMPATIENT)
    ranks = job.wait(200)
    assert [rank.value["iteration"] for rank in ranks] == [4, 4], ranks
    assert happened(ranks[0]) == ["built", "abort began", *["refused"] * 3, "abort ended", "built", "shut down"]
    assert outcomes(job, 0) == {"timed out": 1}
    assert not job.of(events.RankSignalled)


def test_abort_that_never_ends_restarts_the_job_until_max_iterations_and_names_its_rank(start: Start) -> None:
    job = start(2, target(accelerated.build_beside_an_abort_that_hangs), refusals=None, most=5, env=IMPATIENT)
    assert [rank.type for rank in job.wait(200)] == ["RestartAbort"] * 2
    first, *others = fold(job.records())
    assert [culprit.rank for culprit in first.verdict.culprits] == [1]
    refused = [incident.verdict for incident in others if incident.iteration < 5]
    assert [[culprit.rank for culprit in verdict.culprits] for verdict in refused] == [[]] * 4
    assert [[candidate.rank for candidate in verdict.candidates] for verdict in refused] == [[0]] * 4
    for iteration in range(1, 5):
        own = {told.rank: told.exception for told in job.interruptions(iteration) if told.origin == "own"}
        assert list(own) == [0]
        assert "a communicator is being aborted" in str(own[0])
    assert not job.of(events.RankSignalled)


def test_rank_that_its_own_abort_keeps_from_building_groups_is_excluded_by_its_fault_counter(start: Start) -> None:
    """Not before hard_timeout: until then the abort may only be slow. Rank 1 fails once, too."""
    job = start(
        2,
        target(accelerated.build_beside_an_abort_that_hangs),
        refusals=None,
        faults=1,
        timeouts=SHORT,
        env=IMPATIENT,
    )
    excluded, other = job.wait(200)
    assert excluded.type == "FaultCounterExceeded"
    (aborted,) = job.of(events.AbortGroup, rank=0)
    last = job.of(events.RankInterrupted, rank=0)[-1]
    ran_s = (last.mono_ns - aborted.mono_ns) / 1e9 + aborted.event.duration_s  # type: ignore[attr-defined]
    assert ran_s >= SHORT["hard_timeout"]
    assert other.value["iteration"] == last.origin.iteration + 1
    assert not job.of(events.RankSignalled)


def test_rank_that_an_abort_past_its_limit_does_not_free_has_until_hard_timeout(start: Start) -> None:
    job = start(
        2,
        target(accelerated.abort_several_groups),
        abort={"hangs": [2]},
        only=0,
        timeouts=SHORT,
        env={"RESILIENCE_ABORT_WAIT": "4"},
    )
    ended, other = job.wait(200)
    assert ended.signal is not None
    assert other.value["iteration"] == 1
    assert outcomes(job, 0) == {"aborted": 2, "timed out": 1}
    signalled = job.of(events.RankSignalled, rank=0)[0]
    assert signalled.event.reason in ("leave", "watchdog")  # type: ignore[attr-defined]
    interrupted = job.of(events.IterationDecided, rank=0)[0]
    assert (signalled.mono_ns - interrupted.mono_ns) / 1e9 > SHORT["hard_timeout"] - SHORT["soft_timeout"]


def test_group_that_came_into_being_after_the_abort_is_aborted_too(start: Start) -> None:
    job = start(2, target(accelerated.build_a_group_during_the_abort))
    ranks = job.wait(200)
    assert not job.of(events.RankSignalled)
    assert [rank.value["iteration"] for rank in ranks] == [1, 1], ranks
    assert ("abort ended", 2) in ranks[0].value["diary"]
    assert outcomes(job, 0) == {"aborted": 3}


@pytest.mark.parametrize("frees_first", [True, False])
def test_errors_of_aborted_groups_count_as_nobodys_fault(start: Start, frees_first: bool) -> None:
    ranks = start(4, target(accelerated.count_faults), faults=3, frees_first=frees_first).wait(200)
    assert [rank.value for rank in ranks] == [{"iteration": 3, "faults": faults} for faults in (0, 3, 0, 0)]


def test_ddp_survives_restarts(start: Start) -> None:
    undisturbed = start(3, target(accelerated.train_ddp), restarts=0, steps=6).wait(200)
    job = start(3, target(accelerated.train_ddp), restarts=6, steps=6)
    ranks = job.wait(200)
    assert not job.of(events.RankSignalled)
    assert [rank.value["iteration"] for rank in ranks] == [6] * 3, ranks
    assert {tuple(rank.value["weights"]) for rank in ranks} == {tuple(undisturbed[0].value["weights"])}
    assert all(not {"refused", "shut down while it was being aborted"} & set(happened(rank)) for rank in ranks)


@pytest.mark.parametrize(("own", "inside"), [(None, "0"), ("1", "1")])
def test_nccls_watchdog_raises_nothing_unless_the_user_wants_it(start: Start, own: str | None, inside: str) -> None:
    env = {} if own is None else {"TORCH_NCCL_RETHROW_CUDA_ERRORS": own}
    [rank] = start(1, target(accelerated.tell_environment), env=env).wait(60)
    assert rank.value == [inside, own]
