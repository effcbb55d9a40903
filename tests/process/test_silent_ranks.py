"""Hangs are noticed where nobody has set a limit: under the launcher and in the Wrapper, by documented options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.core.silences import FACTOR, START
from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.process.launching import Launched, launcher
from tests.process.test_launcher_nodes import await_restart_line
from tests.support.ranks import Job

Launch = Callable[..., Launched]
Start = Callable[..., Job]

SOON = {"RESILIENCE_HANG_FIRST_LIMIT": "4"}

HANGS_ONCE = """
import resilience, threading
for n in range(40):
    silent_from_ns = time.monotonic_ns()
    {sign}
    if (cycle, rank, n) == (0, 1, 30):
        (here / "silent_from_ns").write_text(str(silent_from_ns))
        {hang}
    time.sleep(0.01)
"""
HELD = """
import itertools, resilience
for n in itertools.count() if cycle == 1 else ():
    resilience.step(n)
    if (here / "line").exists():
        break
    time.sleep(0.01)
"""
WAIT = "threading.Event().wait()"
SAVE = "with resilience.section('save'): threading.Event().wait()"
LOOP = "exec('while True: pass')"

PAUSES_ONCE = """
import resilience
for n in range(40):
    resilience.step(n)
    if (cycle, rank, n) == (0, 1, 30):
        time.sleep(3.0)
    time.sleep(0.01)
"""

SHOWS_ITS_PAUSES = """
import resilience, threading
longest_ns = 0
for n in range(120):
    resilience.step(n)
    time.sleep(0.01)
    if n % 30 == 8:
        with resilience.section("evaluation"):
            time.sleep(0.6)
    if n % 30 == 16:
        opened_ns = time.monotonic_ns()
        with resilience.section("checkpoint"):
            if (cycle, n) == (0, 106):
                (here / f"hung.{rank}").write_text(f"{opened_ns} {longest_ns}")
                threading.Event().wait()
            began_ns = time.monotonic_ns()
            time.sleep(0.6)
            longest_ns = max(longest_ns, time.monotonic_ns() - began_ns)
    if n % 30 == 24:
        time.sleep(0.6)
"""


HANGS_AT_ITS_START = """
import threading
if (cycle, rank) == (1, 1):
    {before}
    threading.Event().wait()
import resilience
for n in range(40):
    resilience.step(n)
    if (cycle, n) == (0, 30):
        say("shown")
        if rank == 0:
            await_file("shown.0.1")  # only a rank that has shown rounds has a limit before its first sign
            sys.exit(3)
    time.sleep(0.01)
"""


COULD_NOT_ATTACH = """
import socket
if cycle == 1:  # as a client does that has waited for an answer for too long
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(os.environ["RESILIENCE_MONITOR_SOCKET"])
    client.close()
    time.sleep(20.0)
    sys.exit(0)
import resilience
for n in range(40):
    resilience.step(n)
    if (rank, n) == (0, 30):
        sys.exit(3)
    time.sleep(0.01)
"""


ENDS_SLOWLY = """
import atexit, resilience, threading
for n in range(20):
    resilience.heartbeat()
    time.sleep(0.01)
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor().submit(time.sleep, {seconds})  # joined before other threads
atexit.register(time.sleep, {seconds})  # as a logger that uploads, and was begun after the first heartbeat
threading.Thread(target=time.sleep, args=({seconds},)).start()  # it is waited for before that
"""


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def delays_s(job: Launched, rank: int, cycle: int, silent_from_ns: int) -> list[float]:
    """Return how long after its last sign of life a rank got its signals and ended, by the clock of its host.

    silent_from_ns: read by the rank itself just before that sign."""
    ends = [
        record
        for record in job.account.records()
        if isinstance(record.event, events.RankSignalled | events.RankExited)
        and (record.origin.rank, record.origin.cycle) == (rank, cycle)
    ]
    assert isinstance(ends[-1].event, events.RankExited)
    delays = [(record.mono_ns - silent_from_ns) / 1e9 for record in ends]
    kinds = [type(record.event).__name__ for record in ends]
    print(f"rank {rank} in cycle {cycle}, seconds after its last sign of life:", list(zip(kinds, delays, strict=True)))
    return delays


@pytest.mark.parametrize(
    ("sign", "hang", "limit"),
    [
        ("resilience.step(n)", WAIT, "silence"),
        pytest.param("resilience.step(n)", LOOP, "silence", marks=pytest.mark.slow),
        pytest.param("resilience.heartbeat()", WAIT, "silence", marks=pytest.mark.slow),
        pytest.param("resilience.step(n)", SAVE, "silence:save", marks=pytest.mark.slow),
    ],
)
def test_launcher_ends_a_hung_rank_though_no_limit_is_set(launch: Launch, sign: str, hang: str, limit: str) -> None:
    job = launch(HANGS_ONCE.format(sign=sign, hang=hang), SLOW_ANSWERS="yes", **SOON)
    assert job.wait() == [0]
    (found,) = [record for record in job.of(events.RankFellSilent) if record.event.limit.startswith("silence")]
    assert (found.origin.rank, found.event.limit, found.event.allowed_s) == (1, limit, 4.0)
    delays = delays_s(job, 1, 0, int((job.folder / "silent_from_ns").read_text()))
    assert min(delays) >= 4.0
    # A machine that stands still for two seconds may have had it suspected before, and its successor after.
    *_, suspected = [
        record for record in job.of(events.HangSuspected) if (record.origin.rank, record.origin.cycle) == (1, 0)
    ]
    assert suspected.event.kind == limit.partition(":")[2]
    assert suspected.sequence < found.sequence
    assert suspected.event.stack
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


@pytest.mark.parametrize(
    "before", ["pass", pytest.param("import resilience; resilience.stop_requested()", marks=pytest.mark.slow)]
)
def test_worker_that_hangs_after_a_restart_before_its_first_sign_is_ended(launch: Launch, before: str) -> None:
    first_limit = 6.0  # the same limit counts for a program that ends, which takes seconds on a busy machine
    job = launch(HANGS_AT_ITS_START.format(before=before), RESILIENCE_HANG_FIRST_LIMIT=str(first_limit))
    assert job.wait(200.0) == [0]
    (found,) = [record for record in job.of(events.RankFellSilent) if record.event.limit.startswith("silence")]
    assert (found.origin.rank, found.origin.cycle, found.event.limit) == (1, 1, "silence")
    assert found.event.allowed_s == START * first_limit
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "failed", "completed"]


@pytest.mark.slow  # 22 s: it waits longer than the limit that must not end it
def test_worker_that_could_not_attach_to_its_monitor_runs_on_without_a_limit(launch: Launch) -> None:
    job = launch(COULD_NOT_ATTACH, RESILIENCE_HANG_FIRST_LIMIT="3")
    assert job.wait() == [0]
    assert [record for record in job.of(events.RankFellSilent) if record.origin.cycle == 1] == []
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


def test_terminal_says_what_is_watched_and_warns_before_a_rank_is_ended(launch: Launch) -> None:
    job = launch(HELD + HANGS_ONCE.format(sign="resilience.step(n)", hang=SAVE), SLOW_ANSWERS="yes", **SOON)
    await_restart_line(job, "restart 1 of 10")
    (job.folder / "line").touch()
    assert job.wait() == [0]
    said = job.output(stream=2)
    starts = said.index("4 s without another report end it (24 s before the second report)")
    warns = said.index("rank 1 has been silent in section 'save'")
    ends = said.index("rank 1 failed first (hung: silence:save limit 4 s")
    assert starts < warns < ends
    assert said.count("hang detection: ") == 1  # not again in the second cycle


@pytest.mark.parametrize(
    "how", ["flag", pytest.param("variable", marks=pytest.mark.slow), pytest.param("file", marks=pytest.mark.slow)]
)
def test_one_option_switches_it_off(launch: Launch, tmp_path: Path, how: str) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("fault_tolerance:\n  detect_hangs: false\n")
    options = {"flag": ["--no-ft-detect-hangs"], "variable": [], "file": ["--ft-cfg-path", str(settings)]}[how]
    off = {"RESILIENCE_DETECT_HANGS": "0"} if how == "variable" else {}
    job = launch(PAUSES_ONCE, *options, RESILIENCE_HANG_FIRST_LIMIT="1", **off)
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == job.of(events.HangSuspected) == []
    (told,) = [record.event for record in job.of(events.HangsWatched)]
    assert (told.first_s, told.least_s) == (None, None)
    assert "hang detection: off; no limit is set" in " ".join(job.output(stream=2).split())


def test_limit_that_somebody_has_set_holds_instead(launch: Launch) -> None:
    job = launch(PAUSES_ONCE, "--ft-step-timeout", "600", "--ft-hang-first-limit", "1")
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == job.of(events.HangSuspected) == []
    (told,) = [record.event for record in job.of(events.HangsWatched)]
    assert (told.limits["step"], told.first_s) == (600.0, 1.0)


def test_first_step_may_take_longer_than_the_limit_of_a_step(launch: Launch) -> None:
    job = launch("import resilience\nresilience.step(0)\ntime.sleep(3.0)\nresilience.step(1)", "--ft-step-timeout", "1")
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == []
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["completed"]


@pytest.mark.slow
def test_end_of_a_program_may_take_longer_than_the_limit_between_heartbeats(launch: Launch) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "3", "--ft-hang-least-limit", "1", "--ft-hang-first-limit", "60")
    job = launch(ENDS_SLOWLY.format(seconds=4), *limits)
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == job.of(events.HangSuspected) == []
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["completed"]


def test_rank_that_hangs_at_the_end_of_its_program_is_ended(launch: Launch) -> None:
    hangs = ENDS_SLOWLY.format(seconds="600 if (cycle, rank) == (0, 1) else 0")
    job = launch(hangs, "--ft-rank-heartbeat-timeout", "4", "--ft-hang-first-limit", "5")
    assert job.wait() == [0]
    (found,) = job.of(events.RankFellSilent)
    assert (found.origin.rank, found.event.limit, found.event.allowed_s) == (1, "silence", 5.0)


@pytest.mark.slow
def test_job_that_has_shown_its_pauses_has_shorter_limits(launch: Launch) -> None:
    job = launch(SHOWS_ITS_PAUSES, "--ft-hang-first-limit", "100", "--ft-hang-least-limit", "1")
    assert job.wait(120.0) == [0]
    found = {record.origin.rank: record for record in job.of(events.RankFellSilent)}
    assert {record.event.limit for record in found.values()} == {"silence:checkpoint"}
    suspected = {
        record.origin.rank: record.event
        for record in job.of(events.HangSuspected)
        if (record.origin.cycle, record.event.kind) == (0, "checkpoint")
    }
    for event in suspected.values():
        assert event.is_learned
        assert event.longest_s >= 0.6
        assert event.allowed_s == pytest.approx(FACTOR * event.longest_s)
    for (
        rank,
        record,
    ) in found.items():  # not before the learned limit; tests/unit/monitor/test_delay_of_a_kill.py: nor late
        silent_from_ns, longest_ns = map(int, (job.folder / f"hung.{rank}").read_text().split())
        assert record.event.allowed_s == suspected[rank].allowed_s >= FACTOR * longest_ns / 1e9
        assert min(delays_s(job, rank, 0, silent_from_ns)) >= suspected[rank].allowed_s


def wrapped(hangs: bool) -> int:
    """A function under the Wrapper of which rank 1 hangs in its first iteration."""
    import threading
    import time
    from datetime import timedelta

    import resilience
    from resilience.inprocess import CallWrapper, Wrapper

    @Wrapper(soft_timeout=timedelta(seconds=40), hard_timeout=timedelta(seconds=60))
    def train(call: CallWrapper | None = None) -> int:
        import os

        assert call is not None
        for n in range(40):
            resilience.step(n)
            if hangs and (call.iteration, os.environ["RANK"], n) == (0, "1", 30):
                while True:
                    threading.Event().wait(0.1)
            time.sleep(0.01)
        return call.iteration

    result: int = train()
    return result


def test_wrapper_restarts_all_ranks_where_one_is_silent_and_no_limit_is_set(start: Start) -> None:
    job = start(2, f"{__name__}:wrapped", hangs=True, env=SOON)
    assert [rank.value for rank in job.wait()] == [1, 1]
    (record,) = [record for record in job.interruptions(0) if record.interruption is Interruption.SOFT_TIMEOUT]
    assert (record.rank, record.detector and record.detector.name) == (1, "silence")
    *_, suspected = job.of(events.HangSuspected, rank=1)
    shown = (job.folder / f"{job.key}-1.2").read_text()  # stderr of the rank
    assert shown.count("rank 1 has been silent for ") == 1
    assert f"it is ended after {suspected.event.allowed_s:.3g} s" in shown
    (told,) = [record.event for record in job.of(events.HangsWatched)]
    assert told.first_s == 4.0


def test_wrapper_records_that_hang_detection_is_off(start: Start) -> None:
    job = start(2, f"{__name__}:wrapped", hangs=False, env={"RESILIENCE_DETECT_HANGS": "0"})
    assert [rank.value for rank in job.wait()] == [0, 0]
    (told,) = [record.event for record in job.of(events.HangsWatched)]
    assert told.first_s is None


def compiles() -> int:
    """A function under the Wrapper whose first step takes three times as long as the limit of a step."""
    import time

    import resilience
    from resilience.inprocess import CallWrapper, Wrapper

    @Wrapper()
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        resilience.step(0)
        time.sleep(3.0)
        resilience.step(1)
        return call.iteration

    result: int = train()
    return result


def test_wrapper_lets_the_first_step_take_longer_than_the_limit_of_a_step(start: Start) -> None:
    job = start(2, f"{__name__}:compiles", env={"RESILIENCE_STEP_TIMEOUT": "1"})
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert job.interruptions() == []
