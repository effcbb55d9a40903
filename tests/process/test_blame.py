"""A rank is at fault for what it did, and for nothing that another rank's fault or our own abort brought about."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution.incidents import fold
from resilience.cli import main
from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process import blaming
from tests.process.launching import launcher
from tests.process.told import culprits as told_culprits
from tests.support.ranks import Job
from tests.support.stops import stop

Start = Callable[..., Job]


def target(function: Callable[..., object]) -> str:
    return f"{blaming.__name__}:{function.__name__}"


def culprits(job: Job) -> list[set[int]]:
    """Whom the account blames, incident by incident."""
    return [{culprit.rank for culprit in incident.verdict.culprits} for incident in fold(job.records())]


def origins(job: Job) -> dict[int, set[str | None]]:
    """Whose fault each rank's exceptions are, over all iterations."""
    found: dict[int, set[str | None]] = {}
    for told in job.interruptions():
        if told.exception is not None:
            found.setdefault(told.rank, set()).add(told.origin)
    return found


def test_fault_inside_group_building_counts_for_its_rank_alone(start: Start) -> None:
    job = start(4, target(blaming.build_groups), faults=3, most=2)
    ranks = job.wait()
    assert [rank.value for rank in ranks] == [3, None, 3, 3]
    assert ranks[1].type == "FaultCounterExceeded"
    assert culprits(job) == [{1}] * 3
    found = origins(job)
    assert found.pop(1) == {"own"}
    assert all(told == {"consequence"} for told in found.values()), found


def test_survivors_of_a_killed_rank_are_cleared(start: Start) -> None:
    job = start(4, target(blaming.reduce_with_a_dying_rank))
    assert [rank.value for rank in job.wait()] == [1, None, 1, 1]
    assert culprits(job) == [{1}]
    assert all(told == {"consequence"} for told in origins(job).values())


def test_lone_error_of_a_communication_call_is_the_ranks_own_and_excludes_it_not(start: Start) -> None:
    """Of the verdict it is a candidate only: a peer that cannot report may have caused it."""
    job = start(3, target(blaming.reduce_what_gloo_refuses))
    assert [rank.value for rank in job.wait()] == [(1, []), (1, ["RuntimeError"]), (1, [])]
    assert origins(job).pop(1) == {"own"}
    assert {str(whose) for rank, found in origins(job).items() if rank != 1 for whose in found} <= {"consequence"}
    (incident,) = fold(job.records())
    assert incident.verdict.culprits == ()
    assert [(each.rank, each.confidence) for each in incident.verdict.candidates] == [(1, 0.4)]


def test_error_of_an_aborted_communicator_is_nobodys_fault(start: Start) -> None:
    job = start(3, target(blaming.be_aborted), faults=3)
    assert [rank.value for rank in job.wait()] == [3, 3, 3]
    assert culprits(job) == [{1}] * 3
    assert origins(job) == {0: {"consequence"}, 1: {"own"}, 2: {"consequence"}}


def test_two_ranks_that_fail_at_the_same_moment_are_both_at_fault(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(3, target(blaming.fail_together), failing=[1, 2])
    for rank in (1, 2):
        job.await_sign("ready", rank=rank)
    store_host = job.monitor_pid(0)
    stop(store_host)  # neither learns of the other's fault before it has failed itself
    try:
        job.let_on("ready")
        for rank in (1, 2):
            job.await_record(events.RankInterrupted, rank=rank, role="rank")
    finally:
        os.kill(store_host, signal.SIGCONT)
    assert [rank.value for rank in job.wait()] == [0, 1, 1]
    assert culprits(job) == [{1, 2}]
    assert origins(job) == {1: {"own"}, 2: {"own"}}
    assert not job.of(events.RankLeft)
    assert main(["report", str(job.run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "too low to exclude a node, but FaultCounter counts the exception against ranks 1-2" in text
    assert "count against a rank" not in text


def test_rank_that_was_killed_is_blamed_though_the_others_then_give_up(start: Start) -> None:
    job = start(4, target(blaming.give_up_below), least=4)
    assert [rank.type for rank in job.wait()] == ["RestartAbort", "", "RestartAbort", "RestartAbort"]
    (incident,) = fold(job.records())
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(1, "killed")]
    assert incident.verdict.culprits[0].confidence >= 0.9
    assert {rank for group in incident.verdict.exonerated for rank in group.ranks} == {0, 2, 3}
    assert incident.status == "ended"


def test_hook_that_fails_after_a_rank_was_killed_is_a_consequence(start: Start) -> None:
    job = start(4, target(blaming.fail_in_finalize))
    job.wait()
    (incident,) = fold(job.records())
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(1, "killed")]


def test_rank_that_dies_in_the_restart_after_a_hang_does_not_hide_the_rank_that_hung(start: Start) -> None:
    job = start(4, target(blaming.die_in_the_restart_after_a_hang))
    assert [rank.value for rank in job.wait()] == [1, 1, None, 1]
    (incident,) = fold(job.records())
    assert incident.verdict.first == 1
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(1, "waits_for_lock"), (2, "exited")]


def test_rank_that_was_asked_to_stop_is_not_blamed_for_a_later_hang_of_another_rank(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(3, target(blaming.end_then_hang))
    assert [rank.value for rank in job.wait()] == [2, 2, None]
    assert main(["report", str(job.run), "--json"]) == 0
    verdicts = [incident["verdict"] for incident in json.loads(capsys.readouterr().out)["incidents"]]
    named = [[(each["rank"], each["what"]) for each in verdict["culprits"]] for verdict in verdicts]
    assert named == [[(2, "told_to_stop")], [(1, "waits_for_lock")]]
    assert [verdict["first"] for verdict in verdicts] == [2, 1]


def test_rank_that_was_killed_is_blamed_though_the_others_give_up_under_the_launcher(
    start: Start, tmp_path: Path
) -> None:
    job = launcher(start, tmp_path)(
        "from resilience.inprocess import Wrapper\n"
        "from resilience.inprocess.initialize import RetryController\n"
        "import torch, torch.distributed as dist\n"
        "@Wrapper(initialize=RetryController(min_active_world_size=3))\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    if cycle == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "train()\n",
        *("--ft-restart-policy", "min-healthy"),
        nproc=3,
    )
    assert job.wait(120) == [0]
    (incident,) = report(load(job.job.run)).incidents
    assert told_culprits(incident) == [(1, "killed")]


def test_rank_that_was_stopped_and_then_killed_by_its_monitor_was_stopped(start: Start, tmp_path: Path) -> None:
    """With a Wrapper inside the launcher too, where two monitors see the end that one of them brought about."""
    job = launcher(start, tmp_path)(
        "from datetime import timedelta\n"
        "from resilience.inprocess import Wrapper\n"
        "import torch, torch.distributed as dist\n"
        "@Wrapper(soft_timeout=timedelta(seconds=6), hard_timeout=timedelta(seconds=9))\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    if cycle == 0 and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "train()\n",
        nproc=2,
    )
    assert job.wait(120) == [0]
    (incident,) = report(load(job.job.run)).incidents
    assert told_culprits(incident) == [(1, "stopped")]


def test_call_that_returns_when_it_is_signalled_is_known_by_what_it_was_before(start: Start) -> None:
    """It holds the interpreter's lock. The signal that asks for its stacks ends it, maybe before the restart."""
    job = start(2, target(blaming.sleep_with_the_lock))
    job.wait(120)
    (incident,) = fold(job.records())
    assert [(each.rank, each.what) for each in incident.verdict.culprits] == [(1, "blocked_in_native_code")]
    chief = incident.chief
    assert chief is not None and chief.process is not None
    assert (chief.hang, chief.process.state) == ("holds_gil", "S")
