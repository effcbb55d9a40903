"""The others wait for one rank, in C++ where no frame shows it: that rank is named, and no other one."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.cli import main
from resilience.facts import events
from tests.process import waited_for
from tests.process.launching import Launched, launcher
from tests.process.told import cleared, culprits, only_incident
from tests.support.ranks import Job

Start = Callable[..., Job]
TRAIN = f"{waited_for.__name__}:{waited_for.train.__name__}"
LIMITS = {"RESILIENCE_STEP_TIMEOUT": "8", "RESILIENCE_HANG_FIRST_LIMIT": "8"}
SLOW = pytest.mark.slow  # like one that is always run, and there are many
WHAT = {"py_loop": "busy_without_progress", "sleep": "hung", "lock": "waits_for_lock", "barrier": "desynchronised"}


def of_wrapper(start: Start, world: int, **options: object) -> Incident:
    job = start(world, TRAIN, env=LIMITS, **options)
    assert [rank.value for rank in job.wait(180)] == [1] * world, job.output()
    (incident,) = fold(job.records())
    return incident


@pytest.mark.parametrize("how", [pytest.param("py_loop", marks=SLOW), pytest.param("sleep", marks=SLOW), "lock"])
def test_rank_that_hangs_while_others_wait_in_backward_is_named_alone(start: Start, how: str) -> None:
    incident = of_wrapper(start, 4, how=how, culprit=2)
    assert culprits(incident) == [(2, WHAT[how])]
    assert cleared(incident) == [0, 1, 3]
    assert incident.verdict.culprits[0].confidence >= 0.7


def test_lost_monitor_of_another_rank_is_no_cause_of_a_hang(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(4, TRAIN, env=LIMITS, how="lock", culprit=2, is_held=True)
    for rank in range(4):
        job.await_sign("before training", rank)
    os.kill(job.monitor_pid(3), signal.SIGKILL)
    job.await_record(events.MonitorLost, rank=3, role="rank")
    job.let_on("before training")
    assert [rank.value for rank in job.wait_ranks(180)] == [1] * 4, job.output()
    for rank in range(3):
        job.await_record(events.MonitorEnded, rank=rank, role="monitor")
    assert main(["report", str(job.run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (incident,) = told["incidents"]
    named = [(culprit["rank"], culprit["what"]) for culprit in incident["verdict"]["culprits"]]
    assert (named, incident["verdict"].get("candidates", [])) == ([(2, WHAT["lock"])], [])
    assert incident["verdict"]["first"] == 2
    lost = [note["ranks"] for note in told["notes"] if note["what"].startswith("a rank lost its monitor")]
    assert lost == [[3]]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("with_ddp", [True, pytest.param(False, marks=SLOW)])
def test_rank_that_enters_one_more_barrier_is_named_alone(start: Start, world: int, with_ddp: bool) -> None:
    """Of two ranks, only the numbers of their collectives tell which one it is. With DDP, torch's flight recorder has
    those of the other rank."""
    incident = of_wrapper(start, world, how="barrier", culprit=1, with_ddp=with_ddp)
    assert culprits(incident) == [(1, "desynchronised")]
    assert cleared(incident) == [rank for rank in range(world) if rank != 1]
    assert incident.verdict.culprits[0].confidence > 0.5


@pytest.mark.parametrize("how", ["lock", "barrier", "py_loop", pytest.param("sleep", marks=SLOW)])
def test_verdict_is_the_same_if_the_monitor_of_the_culprit_comes_late(start: Start, how: str) -> None:
    """It looks when its rank has already restarted."""
    job = start(2, TRAIN, env=LIMITS, how=how, culprit=1)
    job.await_sign("does not come", 1)
    late = job.monitor_pid(1)
    os.kill(late, signal.SIGSTOP)
    try:
        job.await_sign("restarted", 1)
    finally:
        os.kill(late, signal.SIGCONT)
    assert [rank.value for rank in job.wait(180)] == [1] * 2, job.output()
    (incident,) = fold(job.records())
    assert culprits(incident) == [(1, WHAT[how])]
    assert cleared(incident) == [0]


@pytest.mark.slow
def test_walk_over_transfers_ends_at_the_stage_that_hangs(start: Start) -> None:
    """Rank 2 waits for what rank 1 sends, the others for both: only rank 1 waits for nobody."""
    job = start(4, f"{waited_for.__name__}:{waited_for.pipeline.__name__}", env=LIMITS, how="lock", culprit=1)
    assert [rank.value for rank in job.wait(180)] == [1] * 4, job.output()
    (incident,) = fold(job.records())
    assert culprits(incident) == [(1, "waits_for_lock")]
    assert cleared(incident) == [0, 2, 3]
    # Of any rank: a monitor that comes late, when its rank has already restarted, adds none.
    waits = [each for seen in job.of(events.IterationDecided) for each in seen.event.collectives]
    assert {each.op for each in waits if each.is_transfer} == {"transfer"}


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Callable[..., Launched]:
    begin = launcher(start, tmp_path)

    def launch(script: str, *options: str, **more: object) -> Launched:
        return begin(textwrap.dedent(script), *options, **more)

    return launch


SCRIPT = """
import torch, torch.distributed as dist, resilience
from tests.process.waited_for import AT, STEPS, hang
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for step in range(STEPS):
    if cycle == 0 and step == AT and rank == 1:
        hang("{how}")
    model(torch.ones(2, 4)).sum().backward()
    resilience.step(step)
    resilience.heartbeat()
"""


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("py_loop", 4),
        pytest.param("barrier", 2, marks=SLOW),
        pytest.param("barrier", 4, marks=SLOW),
        *(pytest.param(how, 4, marks=SLOW) for how in ("sleep", "lock")),
    ],
)
def test_rank_that_the_others_wait_for_is_named_alone_under_the_launcher(
    launch: Callable[..., Launched], how: str, world: int
) -> None:
    limit = ("--ft-rank-heartbeat-timeout", "8")
    job = launch(SCRIPT.format(how=how), *limit, nproc=world, with_ddp=True, SLOW_ANSWERS="evidence")
    assert job.wait(180) == [0], job.job.output()
    incident = only_incident(job)
    assert culprits(incident) == [(1, WHAT[how])]
    assert cleared(incident) == [each for each in range(world) if each != 1]
    assert incident.verdict.culprits[0].confidence > 0.5


EXITS_SLOWLY = """
import threading
import torch, torch.distributed as dist, resilience
dist.init_process_group("gloo")
for step in range(4):
    resilience.step(step)
    dist.all_reduce(torch.ones(4))
if rank == 1:
    threading.Thread(target=await_file, args=("never",)).start()  # the interpreter joins it before it ends
    {end}
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("raise SystemExit('there is no data')", "rank 1 failed first (exit code 1)"),
        pytest.param("sys.exit(3)", "rank 1 failed first (exit code 3)", marks=SLOW),
        pytest.param("raise KeyboardInterrupt", "rank 1 failed first (SIGINT)", marks=SLOW),
        pytest.param("raise ValueError('bad')", "rank 1 failed first (ValueError: bad)", marks=SLOW),
    ],
)
def test_rank_whose_program_ended_while_the_others_wait_for_it_is_judged_by_its_end(
    launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str], end: str, sentence: str
) -> None:
    limit = {"RESILIENCE_HANG_FIRST_LIMIT": "4"}
    job = launch(EXITS_SLOWLY.format(end=end), "--max-restarts", "0", nproc=2, SLOW_ANSWERS="evidence", **limit)
    assert job.wait(180) == [1], job.job.output()
    incident = only_incident(job)
    assert [rank for rank, _ in culprits(incident)] == [1]
    assert judged(incident).sentence == sentence
    assert main(["report", str(job.account.folder)]) == 0
    verdict = capsys.readouterr().out.partition("   verdict")[2].partition("   cleared")[0]
    assert "hang" not in verdict and "rank 1" in verdict


LEAVES_AND_EXITS_SLOWLY = """
import threading
import torch, torch.distributed as dist
from resilience.fault_tolerance import RankMonitorClient
dist.init_process_group("gloo")
client = RankMonitorClient()
client.init_workload_monitoring()
try:
    for step in range(6):
        client.send_heartbeat()
        if (rank, step) == (1, 4):
            threading.Thread(target=await_file, args=("never",)).start()  # the interpreter joins it before it ends
            raise ValueError("bad")
        dist.all_reduce(torch.ones(4))
finally:
    client.shutdown_workload_monitoring()
"""


def test_rank_that_left_its_monitor_and_raised_is_named_if_its_process_does_not_end(
    launch: Callable[..., Launched],
) -> None:
    limit = ("--ft-rank-heartbeat-timeout", "4", "--max-restarts", "0")
    job = launch(LEAVES_AND_EXITS_SLOWLY, *limit, nproc=2, SLOW_ANSWERS="evidence")
    assert job.wait(180) == [1], job.job.output()
    assert judged(only_incident(job)).sentence == "rank 1 failed first (ValueError: bad)"


BUSY_AFTER_THE_END = """
import torch, torch.distributed as dist, resilience
from tests.process.waited_for import hang, spin
dist.init_process_group("gloo")
if cycle == 0:
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's may come before a slow rank is freed
    beats = 0
    while not (here / "go-on").exists():
        resilience.heartbeat()
        beats += 1
        if beats == 40:
            say("beat")  # by now the monitor has seen how little this rank computes
        time.sleep(0.05)
    if rank == 1:
        hang("barrier")
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        say("freed")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        spin()  # what it does about its peer's end takes long
"""


def test_what_a_rank_does_after_its_peer_was_ended_is_no_fault(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """The monitor of rank 0 comes too late to see where it waited."""
    job = launch(BUSY_AFTER_THE_END, "--ft-rank-heartbeat-timeout", "3", nproc=3, UNPROBED="yes")
    job.job.await_sign_file(tmp_path / "beat.0.0")
    late = job.job.monitor_pid(0)
    os.kill(late, signal.SIGSTOP)
    try:
        (tmp_path / "go-on").touch()
        job.job.await_record(events.RankExited, rank=1)
        job.job.await_sign_file(tmp_path / "freed.0.0")  # its connection closes only after the end is noticed
    finally:
        os.kill(late, signal.SIGCONT)
    assert job.wait(180) == [0], job.job.output()
    incident = only_incident(job)
    # The time in which the monitor stood still is no silence of rank 0. A busy machine may be so late that it is ended
    # for what it does afterwards, or that it heeds SIGTERM too late: a record of that end has no hang.
    hangs = [record.event.record.hang for record in job.job.of(events.RankInterrupted, rank=0)]
    assert {hang for hang in hangs if hang is not None} <= {"runs_again"}
    assert not {0, 2} & {rank for rank, _ in culprits(incident)}
