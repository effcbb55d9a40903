"""Rows of docs/side-by-side.md: one script under torchrun and under `resilience run`.

Both agents are forked from the fork server, where torch is imported already, and the scripts do not import it, so a
launch takes about a second. Whole programs with torch are compared in test_like_torchrun, which is slow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from resilience.facts import events
from tests.support import disks, etcd
from tests.support.ranks import Job, free_port
from tests.support.stops import kill, stop

LAUNCHERS = ("torchrun", "ours")
# What torchrun does alone changes only with the pin of torch.
ONE_OF_LAUNCHERS = [pytest.param("torchrun", marks=pytest.mark.slow), "ours"]
PREAMBLE = """
import json, os, pathlib, signal, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
here = pathlib.Path(os.environ["PLACE"])

def say(name, text=""):
    (here / f".{name}.{rank}").write_text(text)
    (here / f".{name}.{rank}").rename(here / f"{name}.{rank}")

def await_file(name, limit=60.0):
    until = time.monotonic() + limit
    while not (here / name).exists():
        if time.monotonic() > until:
            sys.exit(f"no {name}")
        time.sleep(0.005)

def write(mb):
    for block in range(mb * 16):
        sys.stdout.write("".join(f"{block:06} {line:04} " + "x" * 51 + "\\n" for line in range(1024)))
    sys.stdout.flush()
"""
PER_MB = 16 * 1024 * 64
NO_NODE_IS_LOST = "keep_alive_interval=1,keep_alive_max_attempt=600,last_call_timeout=600"


def agent(launcher: str, arguments: list[str], stdout: str = "", cwd: str = "") -> None:
    """Be an agent of torchrun or of ours. stdout: a named pipe to write to; cwd: folder to work in. SLOW_ANSWERS: a
    worker's traceback may be two minutes late."""
    if cwd:
        os.chdir(cwd)
    if stdout:
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
    if launcher == "torchrun":
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.run import main as torchrun

        monitors = LocalElasticAgent._monitor_workers

        def monitors_and_says_so(self: Any, *args: Any) -> Any:
            (Path(os.environ["PLACE"]) / f"monitors.{os.getpid()}").touch()
            return monitors(self, *args)

        LocalElasticAgent._monitor_workers = monitors_and_says_so  # a signal before that is another case
        forms = LocalElasticAgent._rendezvous

        def forms_and_says_so(self: Any, *args: Any) -> Any:
            used = self._worker_group.spec.max_restarts - self._remaining_restarts
            (Path(os.environ["PLACE"]) / f"has used {used} and forms a cycle.{os.getpid()}").touch()
            return forms(self, *args)

        LocalElasticAgent._rendezvous = forms_and_says_so
        torchrun(arguments)
    else:
        from resilience.launcher import agent as of_torchelastic
        from resilience.launcher import cycle_supervisor
        from resilience.launcher.main import main
        from resilience.monitor import starting

        if "SLOW_ANSWERS" in os.environ:
            cycle_supervisor.READY = of_torchelastic.SETTLE = 120.0
            starting.PROGRAM = "tests.process.patient_monitor"
        raise SystemExit(main(arguments))


class Launched(NamedTuple):
    """One launch. place: where its workers write their files."""

    job: Job
    place: Path
    launcher: str

    def wait(self) -> int | None:
        """Wait for the only agent. Return its exit status."""
        (status,) = self.wait_all()
        return status

    def wait_all(self) -> list[int | None]:
        """Wait for all agents. Return their exit statuses."""
        return [ended.code for ended in self.job.wait_ranks(90.0)]

    def said(self, name: str, rank: int = 0) -> str:
        """Wait until a worker has said this. Return its text."""
        path = self.place / f"{name}.{rank}"
        self.job.await_sign_file(path, 90.0)
        return path.read_text()

    def send(self, number: signal.Signals, agent: int = 0) -> None:
        """Send an agent a signal that its workers get. torchrun loses one that comes while it starts a worker, though
        the worker may run already."""
        self.await_monitoring(agent)
        self.job.signal(agent, number)

    def await_monitoring(self, agent: int = 0) -> None:
        """Wait until an agent of torchrun watches its workers. Ours may get a signal at any time."""
        if self.launcher == "torchrun":
            self.said("monitors", self.job.pids[agent])

    def await_end_of_cycle(self, *nodes: str) -> None:
        """Wait until agents of ours have ended their first cycle."""
        until = time.monotonic() + 60.0
        while not set(nodes) <= {record.origin.node for record in self.job.of(events.CycleEnded)}:
            assert time.monotonic() < until
            time.sleep(0.01)

    @property
    def shown(self) -> str:
        return (self.job.folder / f"{self.job.key}-0.1").read_text()

    @property
    def errors(self) -> str:
        return (self.job.folder / f"{self.job.key}-0.2").read_text()


Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    """Return a function that starts a job. agents: its nodes, all on this host; the first one hosts the store. conf: of
    the rendezvous."""

    def begin(
        launcher: str,
        script: str,
        *options: str,
        nproc: int = 1,
        agents: int = 1,
        program: str = "",
        stdout: str = "",
        cwd: str = "",
        conf: str = "",
        **env: str,
    ) -> Launched:
        def own(number: int) -> dict[str, str]:
            is_host = f"is_host={int(number == 0)}"
            return {"RESILIENCE_NODE": f"node{number}", "PET_RDZV_CONF": f"{is_host},{conf}" if conf else is_host}

        place = tmp_path / launcher
        place.mkdir(exist_ok=True)
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        job = start(
            agents,
            f"{__name__}:agent",
            env={"PLACE": str(place), "OMP_NUM_THREADS": "1", **env},
            env_of=own,
            are_agents=True,
            launcher=launcher,
            arguments=[
                *([] if "--rdzv-id" in options else ["--standalone"]),
                "--nproc-per-node",
                str(nproc),
                *options,
                *(program.split() or [str(path)]),
            ],
            stdout=stdout,
            cwd=cwd,
        )
        return Launched(job, place, launcher)

    return begin


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "small", "size=4m") as folder:
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "read-only", "ro") as folder:
        yield folder


# -- the account never harms the job ------------------------------------------------------------------


@pytest.mark.slow
def test_full_disk_ends_a_worker_of_torchrun_that_is_redirected_to_it_and_none_of_ours(
    launch: Launch, small: Path
) -> None:
    script = "write(8)\nsay('written')"
    theirs = launch("torchrun", script, "--log-dir", str(small), "--redirects", "3")
    assert theirs.wait() == 1
    assert not (theirs.place / "written.0").exists()
    shutil.rmtree(next(small.iterdir()))
    ours = launch("ours", script, "--min-free-disk-mb", "1", RESILIENCE_RUN_DIR=str(small))
    assert ours.wait() == 0
    ours.said("written")


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_job_completes_in_a_working_directory_that_can_only_be_read(
    launch: Launch, read_only: Path, launcher: str
) -> None:
    job = launch(launcher, "print('ran')", cwd=str(read_only), RESILIENCE_RUN_DIR="runs")
    assert job.wait() == 0
    assert job.shown == "ran\n"


def test_folder_that_cannot_be_made_fails_the_job_of_torchrun_and_not_ours(launch: Launch) -> None:
    theirs = launch("torchrun", "say('ran')", "--log-dir", "/dev/null/logs", "--redirects", "3")
    assert theirs.wait() == 1
    assert not (theirs.place / "ran.0").exists()
    ours = launch("ours", "say('ran')", RESILIENCE_RUN_DIR="/dev/null/runs")
    assert ours.wait() == 0
    ours.said("ran")
    assert "/dev/null/runs" in ours.errors and "records go to" in ours.errors


@pytest.mark.slow
def test_hung_disk_blocks_a_redirected_worker_of_torchrun_but_not_ours(launch: Launch, tmp_path: Path) -> None:
    script = """
    say("up", str(os.getpid()))
    await_file("go")
    print("more", flush=True)
    say("printed")
    """
    with disks.freezing(tmp_path / "disk") as disk:
        for launcher in LAUNCHERS:
            folder = str(disk.folder / launcher)
            options = ("--log-dir", folder, "--redirects", "3") if launcher == "torchrun" else ("--run-dir", folder)
            job = launch(launcher, script, *options)
            worker = psutil.Process(int(job.said("up")))
            disk.freeze()
            (job.place / "go").touch()
            if launcher == "torchrun":
                until = time.monotonic() + 60.0
                while worker.status() != psutil.STATUS_DISK_SLEEP:
                    assert time.monotonic() < until, worker.status()
                    time.sleep(0.01)
                assert not (job.place / "printed.0").exists()
            else:
                job.said("printed")
            disk.thaw()
            assert job.wait() == 0
            job.said("printed")


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_stopped_agent_blocks_no_write(launch: Launch, launcher: str) -> None:
    job = launch(launcher, "say('up')\nawait_file('go')\nwrite(2)\nsay('written')")
    job.said("up")
    job.job.signal(0, signal.SIGSTOP)
    (job.place / "go").touch()
    job.said("written")
    job.job.signal(0, signal.SIGCONT)
    assert job.wait() == 0
    assert len(job.shown) == 2 * PER_MB


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_killed_agent_loses_nothing_that_was_written(launch: Launch, launcher: str) -> None:
    job = launch(launcher, "say('up')\nawait_file('go')\nwrite(2)\nsay('written')\nawait_file('end')")
    job.said("up")
    job.job.signal(0, signal.SIGSTOP)
    (job.place / "go").touch()
    job.said("written")
    job.job.signal(0, signal.SIGKILL)
    assert job.wait() is None
    until = time.monotonic() + 60.0
    while len(job.shown) < 2 * PER_MB:
        assert time.monotonic() < until
        time.sleep(0.01)
    (job.place / "end").touch()


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_stdout_and_stderr_stay_apart(launch: Launch, launcher: str) -> None:
    job = launch(launcher, "print('out')\nprint('err', file=sys.stderr)")
    assert job.wait() == 0
    assert job.shown == "out\n"
    assert "err" in job.errors.splitlines()


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
@pytest.mark.parametrize("tee", [(), ("--tee", "1")])
def test_filters_of_duplicated_lines_hide_nothing_with_and_without_tee(
    launch: Launch, tmp_path: Path, launcher: str, tee: tuple[str, ...]
) -> None:
    filters = ("--duplicate-stdout-filters", "apple", "--duplicate-stderr-filters", "apple")
    logs = ("--log-dir", str(tmp_path / "logs")) if "--tee" in tee else ()
    job = launch(launcher, "print('apple')\nprint('pear')", *filters, *tee, *logs)
    assert job.wait() == 0
    assert [line.rpartition(":")[2] for line in job.shown.splitlines()] == ["apple", "pear"]
    duplicated = [path.read_text() for path in (tmp_path / "logs").rglob("filtered_stdout.log")]
    assert [line.rpartition(":")[2] for line in duplicated] == (["apple\n"] if "--tee" in tee else [])


def test_prefix_of_a_teed_line_names_role_rank_and_host_as_torchruns_since_2_14(launch: Launch, tmp_path: Path) -> None:
    template = "${role_name} ${rank} ${local_rank} ${hostname}: "
    logs = ("--tee", "1", "--log-dir", str(tmp_path / "logs"))
    job = launch("ours", "print('apple')", *logs, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template)
    assert job.wait() == 0
    assert job.shown == f"default 0 0 {socket.gethostname()}: apple\n"


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_reader_that_comes_late_and_is_slow_gets_every_byte(launch: Launch, tmp_path: Path, launcher: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = launch(launcher, "say('up')\nwrite(8)", stdout=str(pipe))
    size = 0
    with pipe.open("rb", buffering=0) as reading:
        job.said("up")
        while piece := reading.read(1 << 16):
            size += len(piece)
            time.sleep(0.002)
    assert job.wait() == 0
    assert size == 8 * PER_MB


@pytest.mark.slow
def test_reader_that_reads_nothing_stops_the_workers_of_torchrun_and_none_of_ours(
    launch: Launch, tmp_path: Path
) -> None:
    for launcher in LAUNCHERS:
        pipe = tmp_path / f"pipe of {launcher}"
        os.mkfifo(pipe)
        job = launch(launcher, "say('up')\nwrite(24)\nsay('written')", stdout=str(pipe))
        size = 0
        with pipe.open("rb", buffering=0) as reading:
            job.said("up")
            if launcher == "ours":
                job.said("written")
            else:
                assert not (job.place / "written.0").exists()  # a pipe holds 64 KiB of its 24 MiB
            while piece := reading.read(1 << 20):
                size += len(piece)
        assert job.wait() == 0
        job.said("written")
        assert (size == 24 * PER_MB) is (launcher == "torchrun")


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_second_launch_with_the_same_id_keeps_what_the_first_one_wrote(
    launch: Launch, tmp_path: Path, launcher: str
) -> None:
    logs = tmp_path / "logs"
    for number in range(2):
        options = ("--log-dir", str(logs), "--redirects", "3", *meeting("job"))
        assert launch(launcher, f"print('launch {number}')", *options).wait() == 0
    written = [path.read_text() for path in logs.rglob("stdout.log")]
    assert sorted(written) == ["launch 0\n", "launch 1\n"]
    if launcher == "ours":
        assert sorted(run.name for run in (tmp_path / "runs").glob("[!.]*")) == ["job", "job@1"]


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_two_launches_at_the_same_moment_keep_what_both_wrote(launch: Launch, tmp_path: Path, launcher: str) -> None:
    script = "print(os.environ['NUMBER'])\nsay('up' + os.environ['NUMBER'])\nawait_file('go')"
    options = ("--log-dir", str(tmp_path / "logs"), "--redirects", "3")
    jobs = [launch(launcher, script, *options, NUMBER=number, RESILIENCE_JOB_ID="job") for number in "01"]
    for number, job in enumerate(jobs):
        job.said(f"up{number}")
    (jobs[0].place / "go").touch()
    assert [job.wait() for job in jobs] == [0, 0]
    assert sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")) == ["0\n", "1\n"]
    if launcher == "ours":
        assert sorted(run.name for run in (tmp_path / "runs").glob("[!.]*")) == ["job", "job@1"]


@pytest.mark.parametrize("id", ["../../escaped", "team/job7"])
def test_folder_of_any_id_is_inside_the_given_one_but_torchrun_escapes_or_fails(
    launch: Launch, tmp_path: Path, id: str
) -> None:
    for launcher in LAUNCHERS:
        home = tmp_path / f"home of {launcher}"
        logs = home / "a" / "logs"
        logs.mkdir(parents=True)
        options = ("--log-dir", str(logs), "--redirects", "3", *meeting(id))
        job = launch(launcher, "print(os.environ['TORCHELASTIC_RUN_ID'])", *options, RESILIENCE_RUN_DIR=str(logs))
        status = job.wait()
        written = [(path.is_relative_to(logs), path.read_text()) for path in home.rglob("stdout.log")]
        if launcher == "ours":
            assert (status, written) == (0, [(True, f"{id}\n")])
            assert next(home.rglob("job.json")).is_relative_to(logs)
        else:
            assert (status, written) == ((0, [(False, f"{id}\n")]) if ".." in id else (1, []))


# -- what counts as a failure -------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_failed_worker_restarts_all_workers_and_those_that_have_completed_too(launch: Launch, launcher: str) -> None:
    script = """
    say(f"up {restarts}", f"{os.getpid()} {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
    if restarts == 0:
        await_file("up 0.0")  # of rank 0, which completes
        if rank: await_file("up 0.2")
        if rank == 1: sys.exit(3)
        if rank == 2: await_file("never")
    """
    job = launch(launcher, script, "--max-restarts", "1", nproc=3)
    assert job.wait() == 0
    for rank in range(3):
        (first, _), (second, most) = (job.said(f"up {count}", rank).split() for count in range(2))
        assert (first != second, most) == (True, "1")


@pytest.mark.slow
def test_exception_that_comes_again_ends_the_job_with_93_and_has_all_restarts_under_torchrun(launch: Launch) -> None:
    ends = {}
    for launcher in LAUNCHERS:
        script = "say(f'up {restarts}')\nraise ValueError('a bad batch')"
        job = launch(launcher, script, "--max-restarts", "4", SLOW_ANSWERS="yes")
        ends[launcher] = job.wait(), len(list(job.place.glob("up *")))
    assert ends == {"torchrun": (1, 5), "ours": (93, 3)}


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_error_file_is_kept_and_the_last_message_has_its_error(launch: Launch, launcher: str) -> None:
    script = """
    file = os.environ["TORCHELASTIC_ERROR_FILE"]
    extra = {"py_callstack": "ValueError: a bad batch", "timestamp": str(int(time.time()))}
    message = {"message": "ValueError: a bad batch", "extraInfo": extra}
    pathlib.Path(file).write_text(json.dumps({"message": message}))  # as torchelastic's `record` does
    say("file", file)
    raise ValueError("a bad batch")
    """
    job = launch(launcher, script, "--max-restarts", "0", SLOW_ANSWERS="yes")
    assert job.wait() == 1
    assert "ValueError: a bad batch" in Path(job.said("file")).read_text()
    before = "failed first (" if launcher == "ours" else "traceback : "
    assert f"{before}ValueError: a bad batch" in job.errors


def test_launchers_own_error_file_has_the_failed_workers_error_as_under_torchruns_record(
    launch: Launch, tmp_path: Path
) -> None:
    script = """
    if rank == 0: await_file("never")
    extra = {"py_callstack": "ValueError: a bad batch", "timestamp": "1790000000"}
    error = {"message": {"message": "ValueError: a bad batch", "extraInfo": extra}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
    sys.exit(3)
    """
    written = {}
    for launcher in LAUNCHERS:
        path = tmp_path / f"{launcher}.json"
        job = launch(launcher, script, "--max-restarts", "0", nproc=2, TORCHELASTIC_ERROR_FILE=str(path))
        assert job.wait() == 1
        written[launcher] = json.loads(path.read_text())
    assert written["ours"] == written["torchrun"]
    assert written["ours"]["message"]["errorCode"] == 3


@pytest.mark.parametrize("left", ["nothing", "text"])
def test_launchers_own_error_file_has_the_verdict_if_no_worker_left_a_legible_one(
    launch: Launch, tmp_path: Path, left: str
) -> None:
    path = tmp_path / "error.json"
    script = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('no JSON')\n" if left == "text" else ""
    job = launch("ours", script + "sys.exit(3)", "--max-restarts", "0", TORCHELASTIC_ERROR_FILE=str(path))
    assert job.wait() == 1
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "rank 0 failed first (exit code 3)"
    assert (message["errorCode"], message["extraInfo"]["timestamp"].isdecimal()) == (3, True)


def test_launcher_that_cannot_start_leaves_its_error_in_its_own_error_file(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert launch("ours", "", "--nnodes", "a", TORCHELASTIC_ERROR_FILE=str(path)).wait() == 2
    assert "--nnodes is 'a'" in json.loads(path.read_text())["message"]["message"]


def elastic_events(job: Launched) -> list[tuple[object, ...]]:
    """Return torchelastic's events about workers that a launcher has shown: state, rank, exit code, pid and error."""
    lines = [line[line.index("{") :] for line in job.errors.splitlines() if '"source": "WORKER"' in line]
    shown = []
    for metadata in (json.loads(line)["metadata"] for line in lines):
        more = json.loads(metadata["metadata"])
        ends = more["exit_code"], more["worker_pid"]
        shown.append((metadata["state"], metadata["global_rank"], *ends[0], *ends[1], metadata["raw_error"]))
    return shown


def test_torchs_events_have_the_start_of_a_worker_and_how_it_failed_as_under_torchrun(launch: Launch) -> None:
    shown = {}
    for launcher in LAUNCHERS:
        script = "say('up', str(os.getpid()))\nsys.exit(3)"
        job = launch(launcher, script, "--max-restarts", "0", "--event-log-handler", "console")
        assert job.wait() == 1
        pid = int(job.said("up"))
        shown[launcher] = [tuple("PID" if value == pid else value for value in event) for event in elastic_events(job)]
    assert shown["ours"] == shown["torchrun"]
    assert [event[:4] for event in shown["ours"]] == [("START", 0, None, None), ("FAILED", 0, 3, "PID")]
    assert "NoneType: None" not in job.errors


def test_torchs_events_tell_the_worker_that_failed_from_those_that_were_stopped(launch: Launch) -> None:
    script = "say('up')\nif rank == 0: await_file('never')\nawait_file('up.0')\nsys.exit(3 if restarts else 4)"
    job = launch("ours", script, "--max-restarts", "1", "--event-log-handler", "console", nproc=2)
    assert job.wait() == 1
    states = [event[:3] for event in elastic_events(job)]
    started = [("START", rank, None) for rank in range(2)]
    assert states == [*started, *started, ("TERMINATED", 0, None), ("FAILED", 1, 3)]


@pytest.mark.parametrize(
    "program",
    ["missing.py", *(pytest.param(each, marks=pytest.mark.slow) for each in ("broken.py", "-m missing"))],
)
def test_program_that_cannot_start_is_tried_once_but_torchrun_uses_all_restarts(
    launch: Launch, tmp_path: Path, program: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    theirs = launch("torchrun", "", "--max-restarts", "2", program=program)
    assert theirs.wait() == 1
    causes = ("No such file or directory", "SyntaxError: ", "No module named missing")
    assert sum(theirs.errors.count(words) for words in causes) == 3
    ours = launch("ours", "", "--max-restarts", "2", program=program)
    assert ours.wait() == 1
    assert len(ours.job.of(events.WorkerStarted)) == 1


def test_no_worker_outlives_the_launcher_where_torchruns_does(launch: Launch) -> None:
    script = """
    parent = os.getppid()
    say("up", str(os.getpid()))
    until = time.monotonic() + 60
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    say("orphaned")
    """
    for launcher in LAUNCHERS:
        job = launch(launcher, script)
        worker = psutil.Process(int(job.said("up")))
        agent = psutil.Process(job.job.pids[0])
        others = [each for each in agent.children(recursive=True) if each != worker]
        stop(*(each.pid for each in (agent, *others)))  # so that none acts on the death of another one
        kill((agent, *others))
        if launcher == "torchrun":
            job.said("orphaned")
        else:
            psutil.wait_procs([worker], timeout=60.0)
            assert not worker.is_running()
            assert not (job.place / "orphaned.0").exists()


def test_sigterm_whose_workers_end_with_0_is_143_and_1_under_torchrun(launch: Launch) -> None:
    script = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say("up")
    await_file("never")
    """
    statuses = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script)
        job.said("up")
        job.send(signal.SIGTERM)
        statuses[launcher] = job.wait()
    assert statuses == {"torchrun": 1, "ours": 143}
    assert "preempted cleanly" in job.errors


@pytest.mark.slow
def test_sigterm_to_all_agents_is_a_preemption_and_a_failure_under_torchrun(launch: Launch) -> None:
    script = "say(f'up {restarts}')\nawait_file('never')"
    for launcher in LAUNCHERS:
        job = launch(launcher, script, "--nnodes", "1:2", "--max-restarts", "1", *meeting("job"), agents=2)
        for rank in range(2):
            job.said("up 0", rank)
        for number in (1, 0):
            job.send(signal.SIGTERM, number)
        assert job.wait_all() == [143 if launcher == "ours" else 1] * 2
        assert not list(job.place.glob("up 1.*"))
    assert {record.event.outcome for record in job.job.of(events.JobEnded)} == {"preempted"}


@pytest.mark.slow
def test_sigterm_to_the_store_host_is_a_preemption_but_a_failure_under_torchrun(
    launch: Launch,
) -> None:
    for launcher in LAUNCHERS:
        script = "say(f'up {restarts}')\nawait_file('never')"
        job = launch(launcher, script, "--nnodes", "1:2", "--max-restarts", "1", *meeting("job"), agents=2)
        for rank in range(2):
            job.said("up 0", rank)
        job.send(signal.SIGTERM)
        assert job.wait_all() == [143 if launcher == "ours" else 1] * 2
        assert not list(job.place.glob("up 1.*"))
    assert "this node hosts the job's store: SIGTERM to it stops the whole job" in job.errors


@pytest.mark.slow
def test_sigterm_to_agents_that_form_a_cycle_is_a_preemption_and_a_failure_under_torchrun(launch: Launch) -> None:
    script = """
    def end(*_):
        await_file("end")
        sys.exit()
    if os.environ["RESILIENCE_NODE"] == "node2":
        signal.signal(signal.SIGTERM, end)
    say(f"up {restarts}")
    await_file("node2 is gone")
    sys.exit(3)  # as a collective operation without its peer
    """
    statuses = {}
    for launcher in LAUNCHERS:
        options = ("--nnodes", "1:3", "--max-restarts", "1", *meeting("job"))
        job = launch(launcher, script, *options, agents=3, conf=NO_NODE_IS_LOST)
        for rank in range(3):
            job.said("up 0", rank)
        job.send(signal.SIGTERM, 2)
        if launcher == "torchrun":
            (job.place / "end").touch()
            job.job.wait_rank(2)
            (job.place / "node2 is gone").touch()
            for pid in job.job.pids[:2]:
                job.said("has used 1 and forms a cycle", pid)
        else:
            job.await_end_of_cycle("node0", "node1")
        for number in (1, 0):
            job.job.signal(number, signal.SIGTERM)
        job.job.wait_rank(1)  # it waits for nobody
        (job.place / "end").touch()
        statuses[launcher] = job.wait_all()
        assert not list(job.place.glob("up 1.*"))
    assert statuses == {"torchrun": [1] * 3, "ours": [143] * 3}
    assert {record.event.outcome for record in job.job.of(events.JobEnded)} == {"preempted"}
    assert job.job.of(events.RestartDecided) == []


@pytest.mark.slow
@pytest.mark.skipif(bool(etcd.MISSING), reason=f"missing {', '.join(etcd.MISSING)}")
def test_sigterm_to_the_first_node_on_etcd_costs_a_restart_only_under_torchrun(launch: Launch, tmp_path: Path) -> None:
    script = """
    if os.environ["WORLD_SIZE"] == "1":
        say("is alone", str(restarts))
        sys.exit()
    say("up", os.environ["RESILIENCE_NODE"])
    await_file("first node is gone")
    sys.exit(3)  # as a collective operation without its peer
    """
    endpoint = f"127.0.0.1:{free_port()}"
    conf = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=20"
    ends = {}
    with etcd.running_etcd(tmp_path, endpoint):
        for launcher in LAUNCHERS:
            options = ("--nnodes", "1:2", "--max-restarts", "1", "--rdzv-id", launcher)
            meeting = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint)
            job = launch(launcher, script, *options, *meeting, agents=2, conf=conf)
            first, other = (int(job.said("up", rank).removeprefix("node")) for rank in range(2))
            job.send(signal.SIGTERM, first)
            job.job.wait_rank(first)
            if launcher == "torchrun":  # until then, the other node goes on as if nothing had happened
                (job.place / "first node is gone").touch()
            used = job.said("is alone")
            statuses = job.wait_all()
            ends[launcher] = used, statuses[first], statuses[other]
    assert ends == {"torchrun": ("1", 1, 0), "ours": ("0", 143, 0)}


def test_sigterm_to_a_worker_and_its_agent_is_a_preemption_and_a_failure_under_torchrun(launch: Launch) -> None:
    statuses = {}
    for launcher in LAUNCHERS:
        script = "say(f'up {restarts}', str(os.getpid()))\nawait_file('never')"
        job = launch(launcher, script, "--max-restarts", "1")
        worker, agent = int(job.said("up 0")), job.job.pids[0]
        job.await_monitoring()
        stop(agent)  # so that it finds both
        for pid in (worker, agent):
            os.kill(pid, signal.SIGTERM)
        os.kill(agent, signal.SIGCONT)
        statuses[launcher] = job.wait()
        assert not (job.place / "up 1.0").exists()
    assert statuses == {"torchrun": 1, "ours": 143}
    assert job.job.of(events.RestartDecided) == []


def test_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(launch: Launch) -> None:
    script = """
    signal.signal(signal.SIGTERM, lambda *_: say("SIGTERM"))
    say("up", str(os.getpid()))
    await_file("never")
    """
    statuses = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, "--shutdown-timeout", "1")
        worker = int(job.said("up"))
        job.send(signal.SIGTERM)
        statuses[launcher] = job.wait()
        job.said("SIGTERM")
        assert not psutil.pid_exists(worker)
    assert statuses == {"torchrun": 1, "ours": 143}


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1"])
def test_signal_to_the_agent_is_forwarded_so_its_handler_in_a_worker_runs(launch: Launch, name: str) -> None:
    script = """
    def save(number, _):
        say(f"saved {signal.Signals(number).name}")
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, save)
    say("up")
    try:
        await_file("never")
    except KeyboardInterrupt:
        say("saved SIGINT")
    """
    statuses = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", nproc=2)
        for rank in range(2):
            job.said("up", rank)
        job.send(signal.Signals[name])
        statuses[launcher] = job.wait()
        assert sorted(path.name for path in job.place.glob("saved *")) == [f"saved {name}.0", f"saved {name}.1"]
    assert statuses == {"torchrun": 1, "ours": 128 + signal.Signals[name]}
    assert "preempted cleanly" in job.errors


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_forwarded_signal_without_a_handler_ends_the_workers_and_is_no_failure(launch: Launch, name: str) -> None:
    job = launch("ours", "say('up')\nawait_file('never')", "--signals-to-handle", "SIGINT,SIGUSR1")
    job.said("up")
    job.send(signal.Signals[name])
    assert job.wait() == 128 + signal.Signals[name]
    (ended,) = [record.event for record in job.job.of(events.WorkerExited)]
    assert (ended.signal, ended.expected) == (name, True)
    assert job.job.of(events.RankInterrupted) == job.job.of(events.IncidentJudged) == []


def test_second_ctrl_c_kills_workers_that_survive_a_third_under_torchrun(launch: Launch) -> None:
    script = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: say(signal.Signals(number).name))
    parent = os.getppid()
    say("up")
    until = time.monotonic() + 80
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    say("orphaned")
    """
    statuses = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, "--shutdown-timeout", "600")
        heard = ("up", "SIGINT", "SIGTERM") if launcher == "torchrun" else ("up", "SIGINT")
        for name in heard:
            job.said(name)
            job.send(signal.SIGINT)
        statuses[launcher] = job.wait()
        if launcher == "torchrun":
            job.said("orphaned")
    assert statuses == {"torchrun": 1, "ours": 130}
    assert not (job.place / "orphaned.0").exists()
    assert [record.event.signal for record in job.job.of(events.WorkerExited)] == ["SIGKILL"]


# -- hangs are noticed by default ---------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ONE_OF_LAUNCHERS)
def test_first_pause_of_half_the_first_limit_ends_nothing(launch: Launch, launcher: str) -> None:
    script = """
    import resilience
    for n in range(40):
        resilience.step(n)
        if (rank, n) == (1, 30):
            time.sleep(5.0)
        time.sleep(0.01)
    say(f"end {restarts}")
    """
    options = ("--ft-hang-first-limit", "10") if launcher == "ours" else ()
    job = launch(launcher, script, "--max-restarts", "1", *options, nproc=2)
    assert job.wait() == 0
    assert sorted(path.name for path in job.place.glob("end *")) == ["end 0.0", "end 0.1"]
    if launcher == "ours":
        assert job.job.of(events.RankFellSilent) == []
        (told,) = [record.event for record in job.job.of(events.HangsWatched)]
        assert told.first_s == 10.0


# -- like a fresh interpreter -------------------------------------------------------------------------


@pytest.mark.slow  # each worker that starts cold imports torch
def test_variable_with_a_computed_name_takes_effect_a_cycle_later_than_in_torchrun(
    launch: Launch,
) -> None:
    script = """
    os.environ["TORCH_" + "LOGS"] = "+dynamo"
    import logging, torch
    say(f"has its effect {restarts}", str(logging.getLogger("torch._dynamo").getEffectiveLevel() <= logging.DEBUG))
    sys.exit(3 if restarts == 0 else 0)
    """
    effects = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, "--max-restarts", "1")
        assert job.wait() == 0
        effects[launcher] = [job.said(f"has its effect {cycle}") for cycle in (0, 1)]
    assert effects == {"torchrun": ["True", "True"], "ours": ["False", "True"]}


def test_workers_get_torchruns_variables_and_only_the_place_of_their_store_differs(launch: Launch) -> None:
    script = """
    ends = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "RESTART_COUNT", "RUN_ID", "STORE")
    say("variables", json.dumps({name: value for name, value in os.environ.items() if name.endswith(ends)}))
    """
    seen = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, *meeting("job"), "--max-restarts", "3", nproc=2)
        assert job.wait() == 0
        seen[launcher] = [json.loads(job.said("variables", rank)) for rank in range(2)]
        for variables in seen[launcher]:
            assert variables.pop("MASTER_ADDR") and variables.pop("MASTER_PORT").isdecimal()
    assert seen["ours"] == seen["torchrun"]
    assert {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID"} <= set(seen["ours"][1])


def test_process_list_shows_the_ranks_variables_as_under_torchrun_and_the_rank_itself(launch: Launch) -> None:
    script = """
    shown = dict(part.split("=", 1) for part in open("/proc/self/environ").read().split("\\0") if "=" in part)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PLACE")
    say("environ", str([(name, shown.get(name) == os.environ[name]) for name in names]))
    say("title", open("/proc/self/cmdline").read().replace("\\0", " "))
    """
    shown = {}
    for launcher in LAUNCHERS:
        job = launch(launcher, script, nproc=2)
        assert job.wait() == 0
        shown[launcher] = [job.said("environ", rank) for rank in range(2)]
        titles = [job.said("title", rank) for rank in range(2)]
        assert all("script.py" in title for title in titles)
        assert ["rank 1" in title for title in titles] == [False, launcher == "ours"]
    assert shown["ours"] == shown["torchrun"]
    assert "False" not in shown["ours"][0]


def meeting(id: str) -> tuple[str, ...]:
    """Return the options of a rendezvous with this id."""
    return ("--rdzv-id", id, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
