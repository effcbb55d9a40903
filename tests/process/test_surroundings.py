"""A job runs whatever state its launcher was started in (signals, descriptors, folder, terminals), and whatever its
script looks like."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.launcher.warm_start import FIRST_LIMIT
from tests.support.account import Account
from tests.support.server import ROOT

RESILIENCE = [sys.executable, "-m", "resilience.cli"]
NO_TERMINALS = """
import errno, os, sys
from resilience.cli import main

def refuse():
    raise OSError(errno.ENOSPC, "no terminal is left")

os.openpty = refuse
sys.exit(main())
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


@contextlib.contextmanager
def running(
    folder: Path,
    script: str,
    *options: str,
    program: list[str] = RESILIENCE,
    cwd: Path | None = None,
    prepare: Callable[[], None] | None = None,
    stdout: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `resilience run` on a script. prepare: runs in the new process before the launcher."""
    path = folder / "script.py"
    path.write_text(script)
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{ROOT}",
        "RESILIENCE_RUN_DIR": str(folder / "runs"),
        "RESILIENCE_JOB_ID": "job",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        child = subprocess.Popen(
            [*program, "run", "--nproc-per-node", "1", "--max-restarts", "0", *options, str(path)],
            env=env,
            cwd=cwd or folder,
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=err,
            preexec_fn=prepare,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def how(folder: Path) -> list[tuple[str, str]]:
    """Return how each worker was started, and why not warm."""
    started = [record.event for record in Account(folder / "runs" / "job").records()]
    return [(event.how, event.why_cold) for event in started if isinstance(event, events.WorkerStarted)]


def said(folder: Path) -> str:
    return (folder / "err").read_text()


def test_events_of_torchelastic_that_are_not_read_do_not_stop_the_job_and_are_counted(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):  # it is full
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    options = ("--event-log-handler", "console")
    with running(tmp_path, "", *options, prepare=lambda: os.dup2(writing, 2) and None) as child:
        assert child.wait(120) == 0
    os.close(reading)
    os.close(writing)
    recorded = [record.event for record in Account(tmp_path / "runs" / "job").records()]
    dropped = [event for event in recorded if isinstance(event, events.TelemetryDropped)]
    (event,) = [event for event in dropped if "torchelastic" in event.reason]
    assert event.signal == "log" and event.count >= 3


@pytest.mark.parametrize("options", [(), pytest.param(("--cold",), marks=pytest.mark.slow)])
def test_job_of_a_parent_that_ignores_sigchld_ends_as_its_workers_do(tmp_path: Path, options: tuple[str, ...]) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with running(tmp_path, "import signal\nprint(signal.getsignal(17).name)", *options, prepare=ignore) as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert (tmp_path / "out").read_text() == "SIG_DFL\n"


def test_job_on_a_host_without_free_terminals_writes_to_pipes(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    with running(tmp_path, "print('here')", program=[sys.executable, "-c", NO_TERMINALS], stdout=terminal) as child:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: its other end is closed
            while piece := os.read(screen, 4096):
                shown += piece
        assert child.wait(120) == 0, said(tmp_path)
    os.close(screen)
    assert b"here" in shown


@pytest.mark.parametrize("closed", [pytest.param((1,), marks=pytest.mark.slow), (0, 1, 2)])
def test_job_runs_with_closed_standard_streams(tmp_path: Path, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for fd in closed:
            os.close(fd)

    with running(tmp_path, "import os\nos.write(1, b'out')\nos.write(2, b'err')", prepare=close) as child:
        assert child.wait(120) == 0, said(tmp_path)
    (out,) = (tmp_path / "runs").glob("job/output/0/0.out")
    assert (out.read_text(), out.with_suffix(".err").read_text()) == ("out", "err")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LC_ALL", "C"),
        pytest.param("PYTHONIOENCODING", "latin-1", marks=pytest.mark.slow),
        pytest.param("PYTHONIOENCODING", "utf-8:replace", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("closed", [(), (0,), (1,)])
def test_workers_streams_treat_odd_bytes_as_those_of_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, closed: tuple[int, ...]
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    show = "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n    print(s.encoding, s.errors)"

    def close() -> None:
        for fd in closed:
            os.close(fd)

    with running(tmp_path, show, prepare=close) as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert how(tmp_path) == [("warm", "")]
    (out,) = (tmp_path / "runs").glob("job/output/0/0.out")
    fresh = subprocess.run([sys.executable, "-c", show], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert out.read_bytes() == fresh.stdout


def obey_permissions() -> None:
    """Let file permissions apply to the programs that this process executes, also if the user is root."""
    if os.geteuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0


@pytest.mark.slow
def test_script_with_a_deep_syntax_tree_is_run(tmp_path: Path) -> None:
    with running(tmp_path, f"print(0{' + 1' * 330})") as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert (tmp_path / "out").read_text() == "330\n"
    assert how(tmp_path) == [("warm", "")]


@pytest.mark.parametrize(("mode", "expected"), [(0o311, "warm"), pytest.param(0o000, "cold", marks=pytest.mark.slow)])
def test_job_runs_in_a_folder_that_it_may_not_read(tmp_path: Path, mode: int, expected: str) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()

    def prepare() -> None:
        os.chdir(folder)
        folder.chmod(mode)
        obey_permissions()

    with running(tmp_path, "print('here')", prepare=prepare) as child:
        assert child.wait(120) == 0, said(tmp_path)
    folder.chmod(0o700)
    assert (tmp_path / "out").read_text() == "here\n"
    ((kind, why),) = how(tmp_path)
    assert kind == expected, why


IN_A_ROOT_FOLDER = """
root=$1; shift
mount -t tmpfs none "$root"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$root"; elif [ -d "$entry" ]; then
        mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"
    fi
done
for name in msgspec queue signal struct; do echo "raise SystemExit('a file of the root folder')" >"$root/$name.py"; done
exec chroot "$root" "$@"
"""


def test_modules_of_a_user_in_the_root_folder_keep_no_process_of_the_launcher_from_starting(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("ROOT FOLDERS WITH FILES ARE NOT TESTED HERE: run as root with CAP_SYS_ADMIN")
    root, command = tmp_path / "root", tmp_path / "resilience.command"
    root.mkdir()
    command.write_text("import sys\nfrom resilience.cli import main\nsys.exit(main())\n")
    program = ["unshare", "--mount", "bash", "-ec", IN_A_ROOT_FOLDER, "bash", str(root), sys.executable, str(command)]
    with running(tmp_path, "import os\nprint(os.getcwd(), os.path.exists('queue.py'))", program=program) as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert (tmp_path / "out").read_text() == "/ True\n"
    records = [record.event for record in Account(tmp_path / "runs" / "job").records()]
    assert not [event for event in records if isinstance(event, events.MonitorLost | events.DrainLost)]
    assert [event for event in records if isinstance(event, events.MonitorEnded)]


def test_program_that_may_not_be_executed_is_named_as_such(tmp_path: Path) -> None:
    with running(tmp_path, "", "--no-python", "--cold") as child:  # the script is not executable
        assert child.wait(120) == 1
    assert f"Permission denied: '{tmp_path / 'script.py'}'" in said(tmp_path)


def test_sitecustomize_that_reads_local_rank_has_it_in_each_worker(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'LOCAL_RANK' in os.environ: os.environ['MY_DEVICE'] = os.environ['LOCAL_RANK']\n"
    )
    with running(tmp_path, "import os\nprint(os.environ.get('MY_DEVICE'))") as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert (tmp_path / "out").read_text() == "0\n"
    ((way, why),) = how(tmp_path)
    assert way == "cold"
    assert f"{tmp_path / 'sitecustomize.py'} names LOCAL_RANK" in why


@pytest.mark.slow
def test_sigterm_ends_the_wait_for_a_slow_preload(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    with running(tmp_path, "", "--preload", "slow_to_import") as child:
        deadline = time.monotonic() + 120.0
        while not any(
            isinstance(record.event, events.RendezvousCompleted)
            for record in Account(tmp_path / "runs" / "job").records()
        ):
            assert child.poll() is None and time.monotonic() < deadline, said(tmp_path)
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 128 + signal.SIGTERM
    (spawn,) = [
        record.event.duration_s
        for record in Account(tmp_path / "runs" / "job").records()
        if isinstance(record.event, events.CyclePhaseEnded) and record.event.phase == "spawn"
    ]
    assert spawn < FIRST_LIMIT


TEED = """
import sys
for _ in range(2000): print("x" * 99)
sys.exit(3)
"""


def test_unread_tee_blocks_neither_a_restart_nor_the_end_of_the_agent(tmp_path: Path) -> None:
    reading, writing = os.pipe()  # nobody reads; it holds a third of what one worker writes
    tee = ("--tee", "1", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"))
    with running(tmp_path, TEED, *tee, stdout=writing) as child:
        os.close(writing)
        assert child.wait(120) == 1, said(tmp_path)
    os.close(reading)
    began = [record.event for record in Account(tmp_path / "runs" / "job").records()]
    assert [event.why for event in began if isinstance(event, events.CycleStarted)] == ["first", "failure"]
    logs = [path.stat().st_size for path in (tmp_path / "logs").rglob("stdout.log")]
    assert logs == [200_000, 200_000]
    assert said(tmp_path).count("the end of the workers' stdout is not shown here, the reader was too slow; see") == 2


NAMES = """
import os, socket, sys, threading
from resilience.cli import main

def fully_qualified(name=""):
    with open("lookups", "a") as lookups:
        lookups.write("asked\\n")
    {answer}

socket.getfqdn = fully_qualified
os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"  # its server tells events too
sys.exit(main())
"""
FAIL_ONCE = "import os, sys\nsys.exit(os.environ['RESILIENCE_CYCLE'] == '0')"


def test_job_needs_no_name_service(tmp_path: Path) -> None:
    program = [sys.executable, "-c", NAMES.format(answer="threading.Event().wait()")]
    with running(tmp_path, FAIL_ONCE, "--max-restarts", "1", program=program) as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert not (tmp_path / "lookups").exists()


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("return 'node7.example'", "node7.example"),
        pytest.param("threading.Event().wait()", socket.gethostname(), marks=pytest.mark.slow),
    ],
)
def test_events_of_torchelastic_name_the_host_after_one_question_to_the_name_service(
    tmp_path: Path, answer: str, name: str
) -> None:
    program = [sys.executable, "-c", NAMES.format(answer=answer)]
    options = ("--event-log-handler", "console", "--max-restarts", "1")
    with running(tmp_path, FAIL_ONCE, *options, program=program) as child:
        assert child.wait(120) == 0, said(tmp_path)
    assert (tmp_path / "lookups").read_text().count("asked") == 1
    told = [json.loads(line) for line in said(tmp_path).splitlines() if line.startswith('{"name": ')]
    assert {"torchelastic.worker.status.START", "watchdog started"} < {event["name"] for event in told}
    assert {event["metadata"]["hostname"] for event in told} == {name}
