"""`resilience run` and the fault matrix: processes that end, hang, stop or are too slow, and what is said of it.

Each test injects one fault, sees the job through, and reads the account: one incident, of the right class and
the right rank, with what the process could still tell. The table in docs/faults.md names these tests."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution.symptoms import main_stack
from resilience.facts import events
from resilience.facts.interruptions import Exit
from resilience.run_folder.load import load
from resilience.system import processes
from resilience.telemetry.metrics import MetricView
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.told import cleared, counted, culprits, only_incident, told
from tests.support.agreement import assert_same_seconds
from tests.support.ranks import Job

Launch = Callable[..., Launched]
AT_WORK = """
import resilience
resilience.step(5)
print("about to go")
"""
GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""


SLOW = pytest.mark.slow  # like one that is always run, and there are many


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    begin = launcher(start, tmp_path)

    def launch(script: str, *options: str, **more: object) -> Launched:
        return begin(textwrap.dedent(script), *options, **more)

    return launch


# -- processes that end -------------------------------------------------------------------------------

ENDS = {
    "exit": ("os._exit(7)", "exited", "user_code", Exit(code=7)),  # F05
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "unknown", Exit(signal="SIGKILL", oom=False)),  # F06
    "usr1": ("os.kill(os.getpid(), signal.SIGUSR1)", "told_to_stop", "scheduler", Exit(signal="SIGUSR1")),  # F08
    "int": ("os.kill(os.getpid(), signal.SIGINT)", "told_to_stop", "scheduler", Exit(signal="SIGINT")),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "unknown", Exit(signal="SIGSEGV")),  # F09
    "abort": ("os.abort()", "crashed", "unknown", Exit(signal="SIGABRT")),
    "bus": ("os.kill(os.getpid(), signal.SIGBUS)", "crashed", "unknown", Exit(signal="SIGBUS")),
    "fpe": ("os.kill(os.getpid(), signal.SIGFPE)", "crashed", "unknown", Exit(signal="SIGFPE")),
}
MORE = ("usr1", "int", "abort", "bus", "fpe")


@pytest.mark.parametrize("how", ["exit", "kill", *(pytest.param(how, marks=SLOW) for how in ("segv", *MORE))])
def test_process_that_ends_in_a_step_is_one_incident_with_its_end_and_its_last_words(launch: Launch, how: str) -> None:
    code, what, category, end = ENDS[how]
    job = launch(
        AT_WORK + f"def break_down(): {code}\n"
        "if cycle == 0 and rank == 1: break_down()\n"
        "if cycle == 0: await_file('never')\n"
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (incident.kind, incident.verdict.what, incident.category) == ("terminated", what, category)
    assert (culprits(incident), cleared(incident)) == ([(1, what)], [0])
    assert (incident.status, incident.next_world_size, incident.cost.lost_steps) == ("restarted", 2, 0)
    chief = incident.chief
    assert chief is not None and chief.exit == end
    assert (chief.rank, chief.step, "about to go" in chief.log_tail) == (1, 5, True)
    if what == "crashed":
        assert main_stack(chief)[-1].function == "break_down"
    assert counted(job) == {"terminated": 1}


def test_exit_with_0_in_a_step_is_blamed_when_the_others_fail_of_it(launch: Launch) -> None:  # F05
    job = launch(
        GLOO + AT_WORK + "import torch\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if cycle == 0 and rank == 1: os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (incident.verdict.what, culprits(incident), cleared(incident)) == ("went_on", [(1, "went_on")], [0])
    chief = incident.chief
    assert chief is not None and chief.exception is not None and chief.rank == 0
    assert [record.event.code for record in job.of(events.WorkerExited) if record.event.worker_rank == 1] == [0, 0]


@pytest.mark.slow
def test_rank_that_is_through_while_another_one_fails_runs_again_and_is_cleared(launch: Launch) -> None:  # F47
    job = launch("say('through')\nif cycle == 0 and rank == 0:\n    await_file('through.0.1')\n    sys.exit(9)")
    assert job.wait() == [0]
    incident = only_incident(job)
    assert culprits(incident) == [(0, "exited")]
    assert {group.reason: group.ranks for group in incident.verdict.exonerated}.keys() <= {
        "had completed",
        "stayed within the limits",
    }
    assert {path.name for path in job.folder.glob("through.*")} == {f"through.{c}.{r}" for c in (0, 1) for r in (0, 1)}


# -- signals ------------------------------------------------------------------------------------------


def test_sigterm_to_agent_and_all_workers_at_once_is_one_preemption_and_no_failure(launch: Launch) -> None:  # F07
    job = launch("say('up'); await_file('never')", SLOW_ANSWERS="yes")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    for pid in (*(job.worker_pid(rank) for rank in range(2)), job.job.pids[0]):
        os.kill(pid, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    found = told(job)
    assert found.launched is not None
    assert (found.launched.outcome, found.launched.restarts_used, found.incidents) == ("preempted", 0, ())


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=SLOW)])
def test_schedulers_warning_stops_the_job_in_good_order(launch: Launch, number: signal.Signals) -> None:  # F08
    job = launch(
        """
        import resilience
        resilience.stop_requested()
        say("up")
        while not resilience.stop_requested():
            time.sleep(0.005)
        say("saved")
        """,
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGUSR1",
    )
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(0, number)
    assert job.wait() == [128 + number]
    assert {path.name for path in job.folder.glob("saved.*")} == {"saved.0.0", "saved.0.1"}
    assert told(job).incidents == ()
    assert [record.event.source.split()[0] for record in job.of(events.StopRequested)] == [number.name]


@pytest.mark.parametrize(
    "handled", ["SIGTERM,SIGINT,SIGHUP,SIGQUIT", pytest.param("SIGTERM,SIGUSR1", marks=pytest.mark.slow)]
)
def test_terminal_that_closes_ends_no_job_that_was_started_by_nohup(launch: Launch, handled: str) -> None:  # F08
    script = f"""
        assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == {handled!r}
        say('up')
        await_file('go')
        """
    job = launch(script, "--signals-to-handle", handled, NOHUP="yes")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(0, signal.SIGHUP)
    (job.folder / "go").touch()
    assert job.wait() == [0]
    assert (told(job).incidents, job.of(events.StopRequested)) == ((), [])


# -- hangs --------------------------------------------------------------------------------------------

HANGS = """
import ctypes, threading
import resilience
resilience.heartbeat()
resilience.step(cycle)  # each time a little further, for these are no repetitions
empty, keep = os.pipe()
space, lock = ctypes.create_string_buffer(1), threading.Lock()

def holds_gil(): ctypes.PyDLL(None).read(empty, space, 1)
def in_call(): ctypes.CDLL(None).read(empty, space, 1)
def on_lock(): lock.acquire(); lock.acquire()
def stopped(): os.kill(os.getpid(), signal.SIGSTOP)
def in_loop():
    while True: pass

hangs = [holds_gil, in_call, on_lock, stopped, in_loop]
if cycle < len(hangs): hangs[cycle]()
"""
WORDS = {  # F13, F16, F10, F18: the record's own word, and what it is called in the verdict
    "holds_gil": "blocked_in_native_code",
    "in_call": "hung",
    "on_lock": "waits_for_lock",
    "stopped": "stopped",
    "in_loop": "busy_without_progress",
}


def test_every_way_to_hang_is_found_and_told_apart(launch: Launch) -> None:
    # The last cycle does not hang: on a busy host it takes more than a second from its heartbeat to its end.
    job = launch(HANGS, "--ft-rank-heartbeat-timeout", "4", nproc=1)
    assert job.wait() == [0], job.output(stream=2)
    incidents = told(job).incidents
    chiefs = [incident.chief for incident in incidents]
    assert [chief.hang for chief in chiefs if chief is not None] == list(WORDS)
    assert [culprits(incident) for incident in incidents] == [[(0, what)] for what in WORDS.values()]
    for chief, word in zip(chiefs, WORDS, strict=True):
        assert chief is not None and chief.detector is not None and chief.process is not None
        assert (chief.detector.name, chief.exit) == ("heartbeat", None)
        assert (chief.process.state == "T") is (word == "stopped")
        if word != "stopped":  # what is stopped answers only py-spy, which is not everywhere
            assert main_stack(chief)[-1].function == word
    ends = [record.event.signal for record in job.of(events.WorkerExited)]
    assert ends == ["SIGKILL"] * len(WORDS) + [None]
    assert counted(job) == {"hard_timeout": len(WORDS)}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("os.kill(os.getpid(), 19)", "stopped"),
        pytest.param("lock.acquire()", "waits_for_lock", marks=SLOW),
        pytest.param("spin()", "busy", marks=SLOW),
    ],
)
def test_rank_waiting_in_a_collective_is_cleared_although_it_exceeded_its_limit(
    launch: Launch, how: str, what: str
) -> None:  # F10, F16, F18
    job = launch(
        GLOO + "import resilience, threading, torch\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "def spin():\n"
        "    while True: pass\n"
        "resilience.step(3)\n"
        "dist.all_reduce(torch.ones(1))\n"
        f"if cycle == 0 and rank == 1: say('hangs'); {how}\n"
        "if cycle == 0: await_file('hangs.0.1'); resilience.heartbeat()  # from now on silence counts, of rank 0\n"
        "dist.all_reduce(torch.ones(1))\n",
        "--ft-rank-heartbeat-timeout",
        "4",
        SLOW_ANSWERS="evidence",
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (incident.reported_first, incident.verdict.first) == (0, 1)
    ((rank, blamed),) = culprits(incident)
    assert (rank, blamed.startswith(what), cleared(incident)) == (1, True, [0])
    chief = next(record for record in incident.records if record.rank == 0)
    assert chief.hang == "in_collective"
    seen = {record.origin.initial_rank: record.event.hang for record in job.of(events.WorkerSeen)}
    assert seen.keys() == {1}


WAITS = {
    "work": ("pass", "dist.all_reduce(torch.ones(1), async_op=True).wait()", "<module>"),
    "backward": (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))",
        "model(torch.ones(1, 2)).sum().backward()",
        "_engine_run_backward",
    ),
}


@pytest.mark.parametrize("how", [pytest.param("work", marks=SLOW), "backward"])
def test_rank_waiting_without_a_visible_collective_frame_is_cleared(launch: Launch, how: str) -> None:  # F14
    before, wait, leaf = WAITS[how]
    job = launch(
        GLOO + "import resilience, threading, torch\n"
        "resilience.step(3)\n"
        f"{before}\n"
        f"for _ in range(2): {wait}\n"  # the second one arranges the buckets anew
        "if cycle == 0 and rank == 1: say('hangs'); threading.Event().wait()\n"
        "if cycle == 0: await_file('hangs.0.1'); resilience.heartbeat()\n"
        f"{wait}\n",
        *("--ft-rank-heartbeat-timeout", "1"),
        with_ddp=True,
        SLOW_ANSWERS="evidence",
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (culprits(incident), cleared(incident)) == ([(1, "waits_for_lock")], [0])
    waited = next(record for record in incident.records if record.rank == 0)
    assert (waited.hang, main_stack(waited)[-1].function) == ("in_collective", leaf)


ONE_WAITS = (
    GLOO + "import resilience, threading, torch\n"
    "resilience.step(3)\n"
    "dist.all_reduce(torch.ones(1))\n"
    "if cycle == 0 and rank == 1: say('hangs'); threading.Event().wait()\n"
    "if cycle == 0: await_file('hangs.0.1'); resilience.heartbeat()\n"
    "dist.all_reduce(torch.ones(1))\n"
)


def test_hung_rank_is_blamed_although_the_waiting_rank_is_on_another_node(launch: Launch) -> None:  # F16
    limit = ("--ft-rank-heartbeat-timeout", "1")
    job = launch(ONE_WAITS, *limit, nodes="2", agents=2, nproc=1, conf=NO_NODE_IS_LOST, SLOW_ANSWERS="yes")
    assert job.wait() == [0, 0]
    incident = only_incident(job)
    assert (incident.reported_first, culprits(incident)) == (0, [(1, "waits_for_lock")])
    nodes = {record.origin.initial_rank: record.origin.node for record in job.of(events.RankFellSilent)}
    nodes |= {record.origin.initial_rank: record.origin.node for record in job.of(events.WorkerSeen)}
    assert len(set(nodes.values())) == 2
    ended = [record.event.silent_for_s for record in job.of(events.CycleEnded) if record.origin.cycle == 0]
    assert len(ended) == 2 and all(silence is not None and silence >= 1.0 for silence in ended)  # lost on both nodes
    assert_same_seconds(list(load(job.job.run).records))


def test_node_is_blamed_for_a_rank_that_another_node_waited_for(launch: Launch) -> None:
    until_judged = "if cycle == 1: await_file('judged')\n"
    limit = ("--ft-rank-heartbeat-timeout", "1")
    job = launch(
        ONE_WAITS + until_judged, *limit, nodes="2", agents=2, nproc=1, conf=NO_NODE_IS_LOST, SLOW_ANSWERS="yes"
    )
    job.await_record(events.IncidentJudged)
    (job.folder / "judged").touch()
    assert job.wait() == [0, 0]
    (silent,) = {record.origin.node for record in job.of(events.RankFellSilent)}
    nodes = ["node0", "node1"]
    blamed: list[str] = []
    for node in nodes:
        view = MetricView()
        for record in job.of(events.IncidentJudged, node):
            view.take(record)
        blamed += [labels[0] for (name, labels), n in view.samples().items() if name == "resilience_blamed_total"]
    assert blamed == [node for node in nodes if node != silent]


def test_rank_that_beats_and_does_not_advance_is_found_by_the_step_limit(launch: Launch) -> None:  # F17
    job = launch(
        """
        import resilience
        step = 3
        while cycle == 0:
            resilience.heartbeat()
            resilience.step(step)
            step += rank == 0
            time.sleep(0.01)
        """,
        *("--ft-step-timeout", "4", "--ft-num-warmup-iterations", "0", "--ft-rank-heartbeat-timeout", "600"),
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (culprits(incident), cleared(incident)) == ([(1, "hung")], [0])
    chief = incident.chief
    assert chief is not None and chief.detector is not None
    assert (chief.detector.name, chief.step) == ("step", 3)


def test_loop_of_a_program_that_tells_nothing_is_called_unknown_and_nothing_restarts(launch: Launch) -> None:  # F18
    job = launch(
        "say('up')\nwhile True: pass", "--ft-step-timeout", "0.2", "--ft-rank-heartbeat-timeout", "0.2", nproc=1
    )
    job.await_worker("up.0.0")
    pid = job.worker_pid(0)
    until = time.monotonic() + 60.0
    while (state := processes.state(pid)) is not None and state.cpu_s < 0.5:  # longer than any of the limits
        assert time.monotonic() < until
        time.sleep(0.02)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    found = told(job)
    assert found.incidents == () and len(job.of(events.CycleStarted)) == 1
    assert [note.ranks for note in found.notes if note.what.startswith("progress unknown")] == [(0,)]


def test_restart_waits_for_processes_that_the_last_cycle_still_holds(launch: Launch) -> None:
    job = launch("if cycle == 0 and rank == 1: sys.exit(3)", "--max-restarts", "1", LACKS="processes for a moment")
    assert job.wait() == [0]
    assert [record.event.why for record in job.of(events.CycleStarted)] == ["first", "failure"]
    assert job.of(events.NodeUnhealthy) == []
