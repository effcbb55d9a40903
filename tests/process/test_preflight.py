"""The health gate: real threads, real commands, checks that fail, raise and hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.launcher import preflight
from resilience.launcher.arguments import Options
from resilience.launcher.preflight import CommandCheck, Devices, Disk, PeriodicCheck, Preflight, PreflightFailure, Store
from resilience.system.health import nvml
from tests.process.children import child
from tests.support.pids import has_ended
from tests.support.signs import await_true

LONG = 600.0


class Checking:
    """A check that does what it is told."""

    is_warning = False

    def __init__(self, name: str, look: Callable[[], str], limit: float = LONG) -> None:
        self.name, self.look, self.limit = name, look, limit
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True


@pytest.fixture
def hang() -> Iterator[Callable[[], str]]:
    """A check's look that does not return before the test's end."""
    end = threading.Event()

    def look() -> str:
        end.wait()
        return ""

    yield look
    end.set()


def after(event: threading.Event) -> Callable[[], str]:
    """Return a check's look that finds nothing once this event is set."""

    def look() -> str:
        event.wait()
        return ""

    return look


def fail() -> str:
    raise OSError("no such device")


def is_there(pid: int) -> bool:
    return not has_ended(pid)


def await_end(*pids: int) -> None:
    """Wait until these are gone; end what is not."""
    try:
        await_true(lambda: not any(map(is_there, pids)))
    finally:
        for pid in filter(is_there, pids):
            os.kill(pid, signal.SIGKILL)


# -- the gate -----------------------------------------------------------------------------------------


def test_node_is_fit_if_no_check_finds_anything() -> None:
    assert Preflight([]).refusals() == []
    assert Preflight([Checking("a", lambda: ""), Checking("b", lambda: "")]).refusals() == []


def test_each_failed_check_is_reported_even_if_it_raises_or_hangs(hang: Callable[[], str]) -> None:
    hanging = Checking("hangs", hang, limit=0.05)
    well = Checking("well", lambda: "")
    told = Preflight([Checking("bad", lambda: "it is bad"), hanging, Checking("raises", fail), well]).refusals()
    assert told == [
        PreflightFailure("bad", "it is bad"),
        PreflightFailure("hangs", "no answer within 0.05 s"),
        PreflightFailure("raises", "OSError: no such device"),
    ]
    assert hanging.is_given_up and not well.is_given_up


def test_checks_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20.0)  # breaks, and so raises, if one runs after the other

    def look() -> str:
        both.wait()
        return ""

    assert Preflight([Checking("a", look), Checking("b", look)]).refusals() == []


def test_request_to_stop_ends_the_wait_and_refuses_nobody(hang: Callable[[], str]) -> None:
    hanging = Checking("hangs", hang)
    assert Preflight([hanging]).refusals(lambda: True) == []
    assert hanging.is_given_up


# -- disk and store -----------------------------------------------------------------------------------


def test_disk_needs_the_space_that_is_asked_for(tmp_path: Path) -> None:
    assert Preflight([Disk(tmp_path, 1)]).refusals() == []
    (refusal,) = Preflight([Disk(tmp_path, 1 << 40)]).refusals()
    assert refusal.check == "disk"
    assert f"expected {1 << 40} (--min-free-disk-mb)" in refusal.detail
    (gone,) = Preflight([Disk(tmp_path / "gone", 1)]).refusals()
    assert "FileNotFoundError" in gone.detail


@pytest.mark.parametrize(
    ("told", "says"), [({"f_flag": os.ST_RDONLY}, "read-only"), ({"f_favail": 0}, "no more files"), ({}, "")]
)
def test_disk_that_takes_no_file_is_refused(
    told: dict[str, int], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"f_bavail": 1 << 30, "f_frsize": 4096, "f_flag": 0, "f_files": 100, "f_favail": 5} | told
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(**seen))
    refusals = Preflight([Disk(tmp_path, 1)]).refusals()
    assert [says in refusal.detail for refusal in refusals] == ([True] if says else [])


def test_store_that_fails_or_hangs_is_refused(hang: Callable[[], str]) -> None:
    assert Preflight([Store(lambda: "an answer")]).refusals() == []
    told = Preflight([Store(fail), Store(hang, limit=0.05)]).refusals()
    assert [refusal.check for refusal in told] == ["store", "store"]


def test_devices_are_asked_only_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "find", lambda: None)
    assert Preflight([Devices()]).refusals() == []
    monkeypatch.setattr(nvml, "find", lambda: "a library")
    monkeypatch.setattr(nvml, "faults", lambda library: ["GPU 0: lost", "GPU 3: lost"])
    assert Preflight([Devices()]).refusals() == [PreflightFailure("gpu", "GPU 0: lost; GPU 3: lost")]


# -- the user's command -------------------------------------------------------------------------------


def test_command_says_why_by_its_status_and_last_words() -> None:
    assert Preflight([CommandCheck("true && test 'a b' = 'a b'")]).refusals() == []
    (refusal,) = Preflight([CommandCheck("echo fan is broken; echo really >&2; exit 3")]).refusals()
    assert refusal.detail.endswith("exited with 3 (--health-check): fan is broken really")
    (secret,) = Preflight([CommandCheck("API_TOKEN=abc; exit 1")]).refusals()
    assert "API_TOKEN=***" in secret.detail
    (killed,) = Preflight([CommandCheck("kill -9 $$")]).refusals()
    assert "was killed by signal 9" in killed.detail
    (unknown,) = Preflight([CommandCheck("no-such-command-here")]).refusals()
    assert "exited with 127" in unknown.detail


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_command_runs_beside_files_with_names_of_pythons_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe_path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)  # an interpreter then leaves the current folder out by itself
    for name in ("types", "struct", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the program's own')")
    assert Preflight([CommandCheck("true")]).refusals() == []


def test_preflight_can_be_asked_again() -> None:
    asked = Preflight([CommandCheck("exit 1"), CommandCheck("exit 0")])
    assert [len(asked.refusals()) for _ in range(3)] == [1, 1, 1]


def test_late_command_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = CommandCheck(f"sleep 600 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait", limit=LONG)

    def is_running() -> bool:
        return pids.exists()

    assert Preflight([command]).refusals(is_running) == []  # told to stop once it runs
    await_end(*map(int, pids.read_text().split()))
    (late,) = Preflight([CommandCheck("sleep 600", limit=0.2)]).refusals()
    assert late.detail == "no answer within 0.2 s"


def test_command_that_leaves_something_running_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert Preflight([CommandCheck(f"sleep 600 & echo $! > {pid}")]).refusals() == []
    left = int(pid.read_text())
    assert is_there(left)
    os.kill(left, signal.SIGKILL)


def check_for_long(folder: Path, line: Connection) -> None:
    command = f"echo $$ > {folder}/new; mv {folder}/new {folder}/pid; exec sleep 600"
    Preflight([CommandCheck(command, limit=LONG)]).refusals()


def test_command_ends_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with child(partial(check_for_long, tmp_path)) as agent:
        await_true((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert is_there(pid)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        await_end(pid)


# -- a node's checks ----------------------------------------------------------------------------------


def test_node_has_the_checks_it_was_given(tmp_path: Path) -> None:
    def names(**options: Any) -> list[str]:
        return [check.name for check in preflight.checks(tmp_path, fail, Options(**options))]

    assert names(health_check="true") == ["disk", "store", "gpu", "command"]
    assert names(min_free_disk_mb=0) == ["store", "gpu"]


# -- patrol -------------------------------------------------------------------------------------------


def patrolled(patrol: PeriodicCheck, now: float) -> PreflightFailure:
    """Look until the look that is under way has been answered, all at one moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = patrol.refusal(now)
        if found is not None:
            return found
        time.sleep(0.001)
    raise AssertionError("the patrol found nothing")


def test_patrol_looks_once_an_interval_and_tells_what_it_finds() -> None:
    begun: list[float] = []
    answers = iter(["", "", "lost"])
    now = 100.0

    def look() -> str:
        begun.append(now)
        return next(answers)

    patrol = PeriodicCheck(Checking("gpu", look), 5.0)
    while now < 110.0:
        assert patrol.refusal(now) is None
        await_idle()
        now += 1.0
    assert patrolled(patrol, now) == PreflightFailure("gpu", "lost")
    assert begun == [100.0, 105.0, 110.0]


def await_idle() -> None:
    """Wait until no look is under way."""
    for thread in threading.enumerate():
        if thread.name.startswith("resilience-preflight-"):
            thread.join(60)


def test_patrol_of_a_check_that_hangs_is_a_refusal_after_its_limit_and_is_not_repeated(
    hang: Callable[[], str],
) -> None:
    check = Checking("gpu", hang, limit=30.0)
    patrol = PeriodicCheck(check, 5.0)
    assert [patrol.refusal(float(now)) for now in range(30)] == [None] * 30
    assert not check.is_given_up
    assert patrol.refusal(30.0) == PreflightFailure("gpu", "no answer within 30 s")
    assert check.is_given_up
    assert [patrol.refusal(now) for now in (31.0, 100.0, 1000.0)] == [None] * 3
    assert sum(thread.name == "resilience-preflight-gpu" for thread in threading.enumerate()) == 1


def test_patrol_of_an_agent_that_was_stopped_leaves_the_check_time_to_answer() -> None:
    may_answer = threading.Event()
    check = Checking("gpu", after(may_answer), limit=30.0)
    patrol = PeriodicCheck(check, 5.0)
    assert [patrol.refusal(now) for now in (0.0, 40.0)] == [None, None]
    may_answer.set()
    await_idle()
    assert patrol.refusal(40.1) is None
    assert not check.is_given_up


def test_preflight_of_an_agent_that_was_stopped_leaves_its_checks_time_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_answer, was_stopped = threading.Event(), iter([0.0])
    now = time.monotonic
    monkeypatch.setattr(preflight, "monotonic", lambda: now() + next(was_stopped, 4000.0))

    def is_interrupted() -> bool:
        may_answer.set()  # the first look after the standstill
        return False

    checks = [Checking(name, after(may_answer), limit=30.0) for name in ("disk", "store")]
    assert Preflight(checks).refusals(is_interrupted) == []


def test_patrol_of_a_check_that_raises_is_a_refusal() -> None:
    assert patrolled(PeriodicCheck(Checking("gpu", fail), 5.0), 0.0) == PreflightFailure(
        "gpu", "OSError: no such device"
    )


# -- a host that can start no thread ------------------------------------------------------------------


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_check_that_gets_no_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert Preflight([Checking("disk", lambda: "", limit=0.2)]).refusals() == [
        PreflightFailure("disk", "RuntimeError: can't start new thread")
    ]


def test_check_without_a_thread_is_tried_again_and_has_its_limit_though_others_took_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, were_slow, may_answer = time.monotonic, iter([0.0]), threading.Event()
    monkeypatch.setattr(preflight, "LONGEST_GAP", 4000.0)
    monkeypatch.setattr(preflight, "monotonic", lambda: now() + next(were_slow, 4000.0))
    start, refused = threading.Thread.start, iter([True])
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (no_thread if next(refused, False) else start)(thread)
    )
    looks: list[int] = []

    def is_interrupted() -> bool:
        looks.append(len(looks))
        if len(looks) == 2:  # the first one after it got its thread
            may_answer.set()
        return False

    check = Checking("gpu", after(may_answer), limit=30.0)
    assert Preflight([check]).refusals(is_interrupted) == []
    assert not check.is_given_up


def test_patrol_that_gets_no_thread_is_no_refusal_and_is_tried_again_after_the_interval() -> None:
    patrol = PeriodicCheck(Checking("gpu", lambda: "lost"), 5.0)
    with pytest.MonkeyPatch.context() as host:
        host.setattr(threading.Thread, "start", no_thread)
        assert patrol.refusal(0.0) is None
    assert patrol.refusal(4.0) is None
    await_idle()
    assert patrol.refusal(4.5) is None  # no look has begun
    assert patrolled(patrol, 5.0) == PreflightFailure("gpu", "lost")
