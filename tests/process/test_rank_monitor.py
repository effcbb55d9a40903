"""Rank monitors under the launcher: what they notice of real workers, and what they survive."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from resilience.attribution.symptoms import Class, symptom
from resilience.core import hang_kind
from resilience.errors import MonitorError
from resilience.facts import events
from resilience.facts.interruptions import Hang, Interruption
from resilience.facts.limits import First, Learned, Limit, Limits
from resilience.integrations import stored_limits
from resilience.launcher import monitors
from resilience.launcher.monitors import PROBE_LIMIT, MonitorGone
from resilience.monitor import connect, messages, starting
from resilience.system import processes
from tests.process import patient_monitor
from tests.process.watched import Node, await_line, let_on, node
from tests.support.account import Account
from tests.support.pids import has_ended
from tests.support.server import ROOT
from tests.support.stops import stop

WAIT = "print('here', flush=True); input()"


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(starting, "PROGRAM", patient_monitor.__name__)
    monkeypatch.setattr(monitors, "PROBE_LIMIT", 120.0)
    with node(tmp_path) as made:
        yield made


def test_worker_that_never_attaches_is_watched_for_its_end(one: Node) -> None:
    worker = one.start(WAIT)
    await_line(worker)
    let_on(worker)
    gone = one.hear(messages.Gone)
    assert (gone.worker_pid, gone.exit.code, gone.goodbye) == (worker.pid, 0, True)
    assert one.said(messages.Found) == []
    crashing = one.start("import os; os.kill(os.getpid(), 9)")
    gone = one.hear(messages.Gone, lambda gone: gone.worker_pid == crashing.pid)
    assert (gone.exit.signal, gone.goodbye) == ("SIGKILL", False)
    (found,) = one.said(messages.Found)
    assert found.ended
    assert (found.record.interruption, found.record.pid) == (Interruption.TERMINATED, crashing.pid)


def test_worker_whose_start_time_the_agent_could_not_read_is_watched(
    one: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(processes, "state", lambda pid: None)
        worker = one.start(WAIT)
    await_line(worker)
    let_on(worker)
    gone = one.hear(messages.Gone)
    assert (gone.worker_pid, gone.exit.code, gone.goodbye) == (worker.pid, 0, True)


def test_first_sign_of_life_attaches_and_a_stalled_step_is_found(one: Node) -> None:
    code = "import resilience, threading; resilience.step(7); print('here', flush=True); threading.Event().wait()"
    worker = one.start(code)
    assert one.hear(messages.Connected).link.pid == worker.pid
    await_line(worker)
    await_state(one, worker, "S")
    one.monitors.limit(Limits(step=Limit(None, 0.5), signal="SIGKILL"))
    found = one.hear(messages.Found)
    assert (found.ended, found.record.step, found.record.stack_method) == (False, 7, "own-thread")
    assert found.record.stacks[0].frames[-1].function == "wait"
    gone = one.hear(messages.Gone)
    assert (gone.exit.signal, gone.goodbye) == ("SIGKILL", False)
    assert [record.event.limit for record in one.records(events.RankFellSilent)] == ["step"]


def await_state(one: Node, worker: subprocess.Popen[str], state: str) -> None:
    one.wait_until(lambda: (seen := processes.state(worker.pid)) is not None and seen.state == state)


# -- hangs ----------------------------------------------------------------------------------------------------------

READ = "import ctypes, os; empty, keep = os.pipe(); space = ctypes.create_string_buffer(1)\n"
STUCK = "\ndef stuck():\n    print('here', flush=True)\n    "
HANGS = {
    "lock": "import threading; lock = threading.Lock(); lock.acquire()" + STUCK + "lock.acquire()",
    "loop": STUCK + "while True: pass",
    "native": READ + "read = ctypes.CDLL(None).read" + STUCK + "read(empty, space, 1)",
    "gil": READ + "read = ctypes.PyDLL(None).read" + STUCK + "read(empty, space, 1)",
    "stopped": "import os, signal" + STUCK + "os.kill(os.getpid(), signal.SIGSTOP)",
}
STATES = {"loop": "R", "stopped": "T"}  # of the main thread, where it does not sleep

WORDS: dict[str, tuple[Hang, Class]] = {
    "lock": ("on_lock", "waits_for_lock"),
    "loop": ("in_loop", "busy_without_progress"),
    "native": ("in_call", "hung"),
    "gil": ("holds_gil", "blocked_in_native_code"),
    "stopped": ("stopped", "stopped"),
}


@pytest.mark.parametrize("how", HANGS)
def test_hang_is_found_at_its_limit_and_told_apart(one: Node, tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"  # whose lines can be read
    script.write_text(f"import resilience\n{HANGS[how]}\nresilience.heartbeat()\nstuck()")
    worker = one.start(f"import runpy; runpy.run_path({str(script)!r})")
    await_line(worker)
    await_state(one, worker, STATES.get(how, "S"))
    one.monitors.limit(Limits(heartbeat=Limit(None, 1.0), signal="SIGKILL"))
    record = one.hear(messages.Found).record
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"
    assert (record.pid, record.interruption) == (worker.pid, Interruption.HARD_TIMEOUT)
    assert record.detector is not None and record.process is not None
    assert record.detector.name == "heartbeat"
    (silent,) = one.records(events.RankFellSilent)
    assert silent.event.silent_for_s >= 1.0
    assert (record.hang, symptom(record).what) == WORDS[how]
    assert record.message.endswith(hang_kind.WORDS[WORDS[how][0]])
    if how != "stopped":  # what is stopped answers only py-spy, which is not everywhere
        assert record.stacks[0].frames[-1].function == "stuck"
    assert (record.process.state == "T") is (how == "stopped")
    names = [type(record.event) for record in one.account.records()]
    assert (
        names.index(events.EvidenceCaptured) < names.index(events.RankInterrupted) < names.index(events.RankSignalled)
    )


def test_loop_of_heartbeats_in_a_section_is_no_call_that_does_not_return(one: Node, tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # whose lines can be read
    script.write_text(
        "import resilience, time\nwith resilience.section('step'):\n"
        "    while True:\n        resilience.heartbeat()\n        time.sleep(0.02)"
    )
    one.start(
        f"import runpy; runpy.run_path({str(script)!r})", Limits(sections={"step": Limit(None, 5.0)}, signal="SIGKILL")
    )
    record = one.hear(messages.Found).record
    assert record.hang is None and record.stacks
    assert record.message.startswith("section 'step' not left for 5") and record.message.endswith(", limit 5 s")
    one.hear(messages.Gone)


def test_gravest_of_all_open_sections_is_found(one: Node) -> None:
    sections = {"outer": Limit(None, 50.0), "inner": Limit(None, 0.5), "last": Limit(None, 60.0)}
    code = (
        "import resilience, time\n"
        "with resilience.section('outer'), resilience.section('inner'), resilience.section('last'):\n"
        "    print('here', flush=True); time.sleep(60)"
    )
    await_line(one.start(code))  # all three are open
    one.monitors.limit(Limits(sections=sections, signal="SIGKILL"))
    record = one.hear(messages.Found).record
    assert record.detector is not None and record.detector.name == "section:inner"
    assert {section.name: section.limit_s for section in record.open_sections} == {
        "outer": 50.0,
        "inner": 0.5,
        "last": 60.0,
    }


def test_time_outside_of_sections_and_the_first_heartbeat_have_limits(one: Node) -> None:
    code = "import resilience, time\nwith resilience.section('a'): pass\ntime.sleep(60)"
    one.start(code, Limits(out_of_section=Limit(None, 0.5), signal="SIGKILL"))
    first = one.hear(messages.Found).record.detector
    assert first is not None and first.name == "out_of_section"
    one.hear(messages.Gone)
    announced = "from resilience.monitor import connect; import time; connect.attach().arm(); time.sleep(60)"
    worker = one.start(announced, Limits(initial_heartbeat=Limit(None, 0.5), signal="SIGKILL"))
    second = one.hear(messages.Found, lambda found: found.record.pid == worker.pid).record.detector
    assert second is not None and second.name == "initial_heartbeat"


def test_what_is_slow_at_first_only_has_its_time(one: Node) -> None:
    code = (
        "import resilience, time\n"
        "for pause in (1.0, 1.0, 60.0):\n"
        "    with resilience.section('step'): time.sleep(pause)"
    )
    limits = Limits(
        sections={"step": Limit(None, 0.4)}, warmup={"step": Limit(None, 30.0)}, warmup_occurrences=2, signal="SIGKILL"
    )
    one.start(code, limits)
    one.hear(messages.Gone)
    (silent,) = one.records(events.RankFellSilent)
    assert (silent.event.limit, silent.event.allowed_s) == ("section:step", 0.4)


def test_limits_may_be_changed_while_it_runs(one: Node) -> None:
    beat = "import resilience; resilience.heartbeat(); print('beat', flush=True); input()"
    worker = one.start(beat)
    await_line(worker)
    one.monitors.limit(Limits(heartbeat=Limit(None, 0.3), signal="SIGKILL"))
    assert one.hear(messages.Found).record.pid == worker.pid
    one.hear(messages.Gone)
    itself = (
        "from resilience.monitor import connect\n"
        "from resilience.core.watch import Limit, Limits\n"
        "link = connect.attach(); link.page.heartbeat()\n"
        "link.limit(Limits(heartbeat=Limit(None, 0.3), signal='SIGKILL')); input()"
    )
    other = one.start(itself)
    assert one.hear(messages.Found, lambda found: found.record.pid == other.pid)


def test_rank_that_lives_on_after_the_signal_is_killed(one: Node) -> None:
    code = "import resilience, signal, time; signal.signal(15, signal.SIG_IGN); resilience.step(1); time.sleep(60)"
    one.start(code, Limits(step=Limit(None, 0.5), grace=0.5))
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"
    signalled = [record.event.signals for record in one.records(events.RankSignalled)]
    assert signalled == [("SIGTERM", "SIGCONT"), ("SIGKILL",)]


# -- what the agent wants and hears ---------------------------------------------------------------------------------


def test_worker_whose_limits_are_too_long_for_a_message_is_watched_without_learned_ones(one: Node) -> None:
    names = [f"validation/{number:03}" for number in range(400)]
    learned = Limits(
        sections=dict.fromkeys([*names, "step"], Limit(None, 600.0)),
        first={name: First(16, {"cold": Limit(None, 600.0), "warm": Limit(None, 600.0)}) for name in names},
        learned={name: Learned(600.0, 1.0, 2.0) for name in names},
        unlearned=Limits(sections={"step": Limit(None, 0.3)}, signal="SIGKILL"),
    )
    code = "from resilience.monitor import connect; connect.attach().page.enter('step'); input()"
    with pytest.warns(UserWarning, match="too long for a message; left out: all learned limits"):
        worker = one.start(code, learned)
    assert one.hear(messages.Found).record.pid == worker.pid
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"


def test_dismissed_worker_is_no_interruption(one: Node) -> None:
    worker = one.start("import resilience; resilience.step(1); input()", Limits(step=Limit(None, 600.0)))
    one.hear(messages.Connected)
    one.monitors.dismiss("another rank failed")
    one.monitors.limit(Limits(step=Limit(None, 0.1)))
    worker.kill()
    assert one.hear(messages.Gone).goodbye
    assert one.said(messages.Found) == [] and one.records(events.RankInterrupted) == []


def test_monitor_outlives_its_workers_and_stays_lean(tmp_path: Path) -> None:
    with node(tmp_path) as one:  # the program itself, as it is shipped
        assert_lean(one)


def assert_lean(one: Node) -> None:
    first = one.monitors.pid(0)
    for _ in range(3):
        worker = one.start("import resilience; resilience.step(1)")
        one.hear(messages.Gone, lambda gone, pid=worker.pid: gone.worker_pid == pid)
    assert one.monitors.pid(0) == first
    assert one.said(messages.Found) == []
    memory = Path(f"/proc/{first}/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in memory if line.startswith(("Private_Dirty", "Private_Clean")))
    shared_when_many = sum(int(line.split()[1]) for line in memory if line.startswith("Private_Clean"))
    assert (private - shared_when_many) / 1024 <= 15.0
    assert "libtorch" not in Path(f"/proc/{first}/maps").read_text()
    deadline = time.monotonic() + 20.0
    while len(os.listdir(f"/proc/{first}/fd")) > 12:  # it lets go of what was its worker's once it has told its end
        assert time.monotonic() < deadline, os.listdir(f"/proc/{first}/fd")
        time.sleep(0.01)


def test_request_of_the_rank_reaches_the_agent(one: Node) -> None:
    code = "from resilience.monitor import connect; connect.attach().request('ExcludeThisNode', 'bad memory'); input()"
    worker = one.start(code)
    assert one.hear(messages.Requested) == messages.Requested("ExcludeThisNode", "bad memory", 0, worker.pid)


def test_end_of_its_output_is_in_the_record(one: Node, tmp_path: Path) -> None:
    out, err = tmp_path / "0.out", tmp_path / "0.err"
    out.write_text("".join(f"step {number}\n" for number in range(500)))
    err.write_text("Traceback\nValueError: no\n")
    worker = one.run(WAIT)
    one.assign(worker.pid, output=(str(out), str(err)))
    await_line(worker)
    worker.kill()
    one.hear(messages.Gone)
    (record,) = [record.event.record for record in one.records(events.RankInterrupted)]
    assert len(record.log_tail) == 200
    assert record.log_tail[-3:] == ("step 499", "Traceback", "ValueError: no")


# -- who may attach -------------------------------------------------------------------------------------------------


def test_worker_may_come_before_the_monitor_knows_of_it(one: Node) -> None:
    worker = one.run("import resilience; print('here', flush=True); resilience.step(1); input()")
    await_line(worker)
    one.assign(worker.pid, Limits(step=Limit(None, 0.5), signal="SIGKILL"))
    assert one.hear(messages.Found).record.pid == worker.pid


def test_foreign_process_is_refused_and_counted(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = one.start("import resilience; resilience.step(1); input()")
    one.hear(messages.Connected)
    with pytest.raises(MonitorError, match="does not belong to worker"):
        connect.attach(one.monitors.socket(0))  # this process is no descendant of the worker
    dropped = one.await_record(events.TelemetryDropped)
    assert "foreign connection" in dropped.event.reason
    worker.kill()
    one.hear(messages.Gone)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_folder_lets_him_in(one: Node) -> None:
    path = Path(one.monitors.socket(0))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "from resilience.system.channel import connect\n"
        "import resilience.monitor.messages as m, resilience.monitor.page\n"
        "os.setuid(65534)\n"
        "print('ready', flush=True); input()\n"
        "print(m.decode_for_rank(connect(os.environ['RESILIENCE_MONITOR_SOCKET'], 60).receive(60)).why, flush=True)"
    )
    worker = one.start(code)
    await_line(worker)
    path.parent.chmod(0o711)
    path.chmod(0o666)
    let_on(worker)
    assert "belongs to user 65534" in await_line(worker)


def test_messages_that_make_no_sense_are_refused_and_counted(one: Node) -> None:
    code = (
        "from resilience.monitor import connect, messages\n"
        "from resilience.system.channel import LIMIT\n"
        "link = connect.attach(); raw = link.channel._socket; raw.setblocking(True)\n"
        "raw.setsockopt(1, 7, 1 << 20)\n"
        "for data in [b'x'] * 500 + [b'y' * (LIMIT + 1)]: raw.send(data)\n"
        "link.send(messages.HostStore(1)); link.request('Continue'); link.page.step(1); input()"
    )
    worker = one.start(code, Limits(step=Limit(None, 2.5), signal="SIGKILL"))
    one.hear(messages.Requested)
    assert one.hear(messages.Found).record.pid == worker.pid
    one.hear(messages.Gone)
    dropped = [record.event for record in one.records(events.TelemetryDropped)]
    assert sum(event.count for event in dropped) == 502
    assert len(dropped) <= 10
    assert any("more than" in event.reason for event in dropped)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("is_daemon", [True, False])
def test_worker_of_a_data_loader_is_not_taken_for_the_rank_and_a_spawned_rank_is(
    one: Node, method: str, is_daemon: bool
) -> None:
    in_child = "import resilience; resilience.step(7); ready.set(); leave.wait()"
    code = (
        "import multiprocessing, resilience\n"
        f"context = multiprocessing.get_context({method!r})\n"
        "events = {'ready': context.Event(), 'leave': context.Event()}\n"
        f"child = context.Process(target=exec, args=({in_child!r}, events), daemon={is_daemon})\n"
        "child.start(); events['ready'].wait()\n"
        "print(child.pid, flush=True); input()\n"
        "events['leave'].set(); child.join()\n"
        "resilience.step(1); input()"
    )
    worker = one.start(code)
    child = int(await_line(worker))
    if not is_daemon:
        one.hear(messages.Connected, lambda message: message.link.pid == child)
    let_on(worker)
    one.hear(messages.Connected, lambda message: message.link.pid == worker.pid)
    pids = [message.link.pid for message in one.said(messages.Connected)]
    assert pids == ([worker.pid] if is_daemon else [child, worker.pid])


def test_program_that_a_worker_starts_is_watched_and_the_first_alone(one: Node) -> None:
    script = (
        "import resilience, subprocess, sys\n"
        "resilience.step(3)\n"
        "code = 'from resilience.monitor import connect\\ntry: connect.attach()\\nexcept Exception as e: print(e)'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout, flush=True)\n"
        "input()"
    )
    wrapper = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {script!r}]).returncode)"
    worker = one.start(wrapper, Limits(step=Limit(None, 600.0), signal="SIGKILL"))
    link = one.hear(messages.Connected).link
    assert link.pid != worker.pid
    assert "already attached" in await_line(worker)
    one.monitors.limit(Limits(step=Limit(None, 0.5), signal="SIGKILL"))
    found = one.hear(messages.Found)
    assert found.record.stacks[0].frames[-1].function == "<module>"  # of the program, not of its starter
    one.hear(messages.Gone)
    one.wait_until(lambda: (seen := processes.state(link.pid)) is None or seen.state == "Z")  # killed with its starter


def test_program_that_a_worker_starts_is_watched_once_the_worker_has_left_its_monitor(one: Node) -> None:
    child = "import resilience; resilience.step(3); input()"
    code = (
        "import subprocess, sys; from resilience.fault_tolerance import RankMonitorClient\n"
        "client = RankMonitorClient(); client.init_workload_monitoring(); client.shutdown_workload_monitoring()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); print(child.pid, flush=True); child.wait()"
    )
    pid = int(await_line(one.start(code)))
    one.hear(messages.Connected, lambda message: message.link.pid == pid)


def test_worker_that_had_no_descriptor_left_attaches_at_a_later_sign_of_life(one: Node) -> None:
    code = (
        "import resilience, resource; from resilience.monitor import client; client.LOOK_AGAIN = 0.0\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard)); resilience.step(1)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)); resilience.step(2); input()"
    )
    one.start(code)
    assert one.await_record(events.WorkerProgressed).event.step == 2


@pytest.mark.parametrize("left", [0, 1, 2, 4])
def test_monitor_with_few_descriptors_left_watches_its_worker_later(one: Node, left: int) -> None:
    one.wait_until(lambda: one.monitors.is_monitored(0))
    monitor = one.monitors.pid(0)
    assert monitor is not None
    usual = leave_descriptors(monitor, left)
    worker = one.start(WAIT)
    for is_suspicion in (False, True):  # the second answer comes after an attempt to watch the worker
        one.monitors.look(is_suspicion=is_suspicion)
        one.hear(
            messages.Looked,
            lambda looked, now=is_suspicion: (looked.worker_pid, looked.is_suspicion) == (worker.pid, now),
        )
    resource.prlimit(monitor, resource.RLIMIT_NOFILE, usual)
    await_line(worker)
    let_on(worker)
    gone = one.hear(messages.Gone, lambda gone: gone.worker_pid == worker.pid)
    assert (gone.exit.code, one.monitors.pid(0)) == (0, monitor)


@pytest.mark.parametrize("left", [2, 4, 5])
def test_monitor_with_few_descriptors_left_outlives_a_program_that_attaches(one: Node, left: int) -> None:
    first = (
        "import resilience, time; from resilience.monitor import connect; input(); resilience.step(3)\n"
        "while connect.latest() is not None and not connect.latest().channel.is_closed(): time.sleep(0.01)"
    )
    code = (
        "import subprocess, sys; print('up', flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {first!r}]); print('tried', flush=True); input()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import resilience; resilience.step(4); input()'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    worker = one.start(code)
    await_line(worker)
    one.await_record(events.MonitorStarted, lambda started: started.rank_pid == worker.pid)
    monitor = one.monitors.pid(0)
    assert monitor is not None
    usual = leave_descriptors(monitor, left)
    let_on(worker)
    assert await_line(worker) == "tried"
    resource.prlimit(monitor, resource.RLIMIT_NOFILE, usual)
    let_on(worker)
    pid = int(await_line(worker))
    one.hear(messages.Connected, lambda message: message.link.pid == pid)
    assert one.monitors.pid(0) == monitor


def test_rank_that_cannot_read_stored_limits_is_on_record_with_the_file_and_the_error(
    one: Node, tmp_path: Path
) -> None:
    file = tmp_path / stored_limits.FILE
    file.mkdir()  # which cannot be read as a file
    code = (
        "import sys, logging; from resilience.integrations.watching import Watching\n"
        f"Watching(False, True, None, None, 'job').begin({str(tmp_path)!r}, 1, 2); print('here', flush=True); input()"
    )
    worker = one.start(code)
    unread = one.await_record(events.TimeoutsUnread).event
    assert unread == events.TimeoutsUnread(str(file), f"IsADirectoryError: [Errno 21] Is a directory: '{file}'")
    assert await_line(worker) == "here"
    let_on(worker)
    assert one.hear(messages.Gone).exit.code == 0
    assert len(one.records(events.TimeoutsUnread)) == 1


ATTACHES = (
    "import subprocess, sys; print('up', flush=True); input()\n"
    "code = 'from resilience.fault_tolerance import RankMonitorClient; '\n"
    "code += 'RankMonitorClient().init_workload_monitoring(); print(0, flush=True); input()'\n"
    "subprocess.run([sys.executable, '-c', code], stderr=subprocess.STDOUT)"
)


def test_monitor_without_a_free_descriptor_uses_no_processor_while_a_program_waits(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with ExitStack() as stack:
        with stderr_to(printed):
            one = stack.enter_context(node(tmp_path / "run"))
        worker = one.start(ATTACHES)
        monitor = monitor_of(one, worker)
        usual = leave_descriptors(monitor, 0)
        let_on(worker)
        one.wait_until(lambda: "programs that attach have to wait: Too many open files" in printed.read_text())
        used = cpu_s(monitor)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(2.0)
        assert cpu_s(monitor) - used < 0.5
        one.monitors.look(is_suspicion=False)
        one.hear(messages.Looked)  # it serves its agent meanwhile
        resource.prlimit(monitor, resource.RLIMIT_NOFILE, usual)
        assert await_line(worker) == "0"
    assert printed.read_text().count("have to wait") == 1


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Let processes that are started in the body write their stderr to a file."""
    usual = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(usual, 2)
        os.close(usual)


def test_program_that_is_unknown_for_want_of_a_descriptor_waits_and_is_not_refused(one: Node) -> None:
    worker = one.start(ATTACHES)
    monitor = monitor_of(one, worker)
    before = len(os.listdir(f"/proc/{monitor}/fd"))
    usual = leave_descriptors(monitor, 1)  # for the connection: none is left to read whose child the program is
    let_on(worker)
    one.wait_until(lambda: len(os.listdir(f"/proc/{monitor}/fd")) > before)
    resource.prlimit(monitor, resource.RLIMIT_NOFILE, usual)
    assert await_line(worker) == "0"
    one.hear(messages.Connected)


def monitor_of(one: Node, worker: subprocess.Popen[str]) -> int:
    """Return the pid of the monitor, once it watches a worker that prints a line."""
    await_line(worker)
    one.await_record(events.MonitorStarted, lambda started: started.rank_pid == worker.pid)
    monitor = one.monitors.pid(0)
    assert monitor is not None
    return monitor


def cpu_s(pid: int) -> float:
    state = processes.state(pid)
    assert state is not None
    return state.cpu_s


def leave_descriptors(monitor: int, number: int) -> tuple[int, int]:
    """Let the monitor open this many more files. Return its usual limits."""
    usual = resource.prlimit(monitor, resource.RLIMIT_NOFILE)
    in_use = {int(fd) for fd in os.listdir(f"/proc/{monitor}/fd")}
    free = [fd for fd in range(3, 1000) if fd not in in_use]
    resource.prlimit(monitor, resource.RLIMIT_NOFILE, (free[number], usual[1]))
    return usual


def test_monitor_records_that_a_program_gave_up_attaching(one: Node) -> None:
    code = (
        "import os, socket; client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "client.connect(os.environ['RESILIENCE_MONITOR_SOCKET']); client.close(); input()"
    )
    worker = one.start(code)
    reason = f"process {worker.pid} gave up attaching; it is not watched until it tries again"
    one.await_record(events.TelemetryDropped, lambda event: event.reason == reason)


def test_client_that_has_left_stays_so_when_the_program_sends_its_first_step(one: Node) -> None:
    code = (
        "from resilience.fault_tolerance import RankMonitorClient\n"
        "client = RankMonitorClient(); client.init_workload_monitoring(); client.shutdown_workload_monitoring()\n"
        "import resilience; resilience.step(1)\n"
        "from resilience.monitor import connect; print(connect.current(), flush=True); input()"
    )
    assert await_line(one.start(code)) == "None"


def test_worker_that_becomes_another_program_is_still_watched(one: Node) -> None:
    again = "import resilience; resilience.step(1); print('here', flush=True); input()"
    code = (
        f"import os, resilience, sys; resilience.step(9); os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    )
    worker = one.start(code)
    await_line(worker)
    one.monitors.limit(Limits(step=Limit(None, 0.5), signal="SIGKILL"))
    found = one.hear(messages.Found)
    assert (found.ended, found.record.pid, found.record.step) == (False, worker.pid, 1)
    assert len(one.said(messages.Connected)) == 2
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"


def test_child_that_a_rank_forks_is_nobody(one: Node) -> None:
    code = (
        "import os, resilience, time; from resilience.monitor import connect\n"
        "resilience.step(1)\n"
        "if os.fork() == 0:\n"
        "    assert connect.current() is None\n"
        "    for n in range(100): resilience.step(n); resilience.heartbeat(); time.sleep(0.02)\n"
        "    os._exit(0)\n"
        "input()"
    )
    one.start(code, Limits(step=Limit(None, 1.0), signal="SIGKILL"))
    assert one.hear(messages.Found).record.step == 1
    assert len(one.said(messages.Connected)) == 1


def test_look_at_a_worker_that_does_not_hang_says_where_it_is(one: Node) -> None:
    worker = one.start(
        "import resilience, sys\nresilience.step(7)\nprint('here', flush=True)\n"
        "def wait(): sys.stdin.readline()\nwait()"
    )
    await_line(worker)
    await_state(one, worker, "S")
    one.monitors.look()
    assert one.hear(messages.Looked).worker_pid == worker.pid
    seen = one.await_record(events.WorkerSeen)
    assert (seen.event.hang, seen.event.step, seen.origin.initial_rank) == ("in_call", 7, 0)
    assert seen.event.stack[-1].function in ("wait", "<module>")  # on its way there
    let_on(worker)
    one.hear(messages.Gone)


def test_look_is_answered_if_the_worker_is_not_connected(one: Node) -> None:
    worker = one.start(WAIT)
    await_line(worker)
    one.monitors.look()
    assert one.hear(messages.Looked).worker_pid == worker.pid
    assert one.records(events.WorkerSeen) == []


# -- a monitor is lost ----------------------------------------------------------------------------------------------

STEPS = "import resilience, sys\nfor line in sys.stdin: resilience.step(int(line)); print(line.strip(), flush=True)"


def drive(worker: subprocess.Popen[str], step: int) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{step}\n")
    worker.stdin.flush()
    assert await_line(worker) == str(step)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_goes_on_when_its_monitor_is_lost_and_another_one_watches_it(
    one: Node, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    worker = one.start(STEPS, Limits(step=Limit(None, 600.0), signal="SIGKILL"))
    drive(worker, 1)
    one.hear(messages.Connected)
    lost = one.monitors.pid(0)
    assert lost is not None and one.monitors.is_monitored(0)
    os.kill(lost, number)
    with monkeypatch.context() as probed:
        if number == signal.SIGSTOP:
            probed.setattr(monitors, "PROBE_LIMIT", PROBE_LIMIT)
        said = one.hear(MonitorGone)
    assert (said.monitor_pid, said.worker_pid) == (lost, worker.pid)
    assert not one.monitors.is_monitored(0)
    drive(worker, 2)
    one.wait_until(lambda: one.monitors.pid(0) != lost and one.monitors.is_monitored(0))
    drive(worker, 3)
    one.monitors.limit(Limits(step=Limit(None, 0.3), signal="SIGKILL"))
    found = one.hear(messages.Found)
    assert (found.record.pid, found.record.step, found.record.stack_method) == (worker.pid, 3, "own-thread")
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"
    one.wait_until(lambda: has_ended(lost))


def test_end_of_a_rank_is_reported_although_its_monitor_was_stopped(one: Node) -> None:
    worker = one.start(STEPS)
    drive(worker, 1)
    one.hear(messages.Connected)
    monitor = one.monitors.pid(0)
    assert monitor is not None
    stop(monitor)
    worker.kill()
    os.kill(monitor, signal.SIGKILL)
    gone = one.hear(messages.Gone)  # the worker is not reaped yet
    assert (gone.worker_pid, gone.exit.signal) == (worker.pid, "SIGKILL")
    assert one.said(messages.Found)[0].record.step == 1


def test_monitor_that_is_lost_again_and_again_is_replaced_more_slowly(one: Node) -> None:
    lost = []
    for number in range(1, 3):
        one.wait_until(lambda: one.monitors.is_monitored(0))
        monitor = one.monitors.pid(0)
        assert monitor is not None
        os.kill(monitor, signal.SIGKILL)
        lost.append(monitor)
        one.wait_until(lambda number=number: len(one.said(MonitorGone)) == number)
    assert one.monitors.pid(0) is None  # now it takes its time
    one.wait_until(lambda: one.monitors.is_monitored(0))
    assert [said.monitor_pid for said in one.said(MonitorGone)] == lost


def test_long_temporary_folder_does_not_make_sockets_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with node(tmp_path) as made:
        made.start("import resilience; resilience.step(1); input()")
        made.hear(messages.Connected)
    assert list(long.iterdir()) == []


# -- the agent is lost ----------------------------------------------------------------------------------------------

AGENT = """
import os, pathlib, subprocess, sys, time
from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.launcher.monitors import Monitors
folder = pathlib.Path(sys.argv[1])
monitors = Monitors(folder, "node", 3)
monitors.start()
deaf = folder / "deaf"
CODES = ("import time; time.sleep(600)",
         "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); "
         f"pathlib.Path({str(deaf)!r}).touch(); time.sleep(600)",
         "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])")
pids = []
for number, code in enumerate(CODES):
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
    origin = Origin("job", "node", "rank", worker.pid, initial_rank=number, rank=number, world_size=3)
    monitors.assign(number, worker.pid, origin, Limits())
    pids += [worker.pid, monitors.pid(number)]
while not (deaf.exists() and all(map(monitors.is_monitored, range(3)))): monitors.poll(0.1)
print(*pids, monitors.socket(0), flush=True)
while True: monitors.poll(1.0)
"""


def test_no_orphan_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    agent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    *pids, path = await_line(agent).split()
    watched = [processes.Process(int(pid)) for pid in pids]
    agent.kill()
    agent.communicate()
    try:
        assert all(process.has_ended(60.0) for process in watched)
    finally:
        for process in watched:
            process.send(signal.SIGKILL)
            process.close()
    assert not Path(path).parent.exists()
    ends = [record for record in Account(tmp_path).records() if isinstance(record.event, events.RankExited)]
    assert sorted(record.event.signal for record in ends) == ["SIGKILL", "SIGTERM", "SIGTERM"]


def test_monitor_that_is_told_to_leave_lets_its_worker_alone(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        worker = made.start(WAIT)
        await_line(worker)
        path = Path(made.monitors.socket(0))
        made.monitors.close(10.0)
        assert worker.poll() is None
        assert not path.parent.exists()
