"""What a person at the terminal of a running job reads."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.core.cycle import CycleDecision
from resilience.facts import events
from resilience.facts.events import Event
from resilience.facts.identity import Origin
from resilience.facts.interruptions import ExceptionInfo, Frame, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.launcher import console as console_module
from resilience.launcher.console import LONGEST, Console
from tests.support.launch_streams import Fault, launched

Read = Callable[[], list[str]]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def read(descriptor: int) -> list[str]:
    parts = []
    while True:
        try:
            parts.append(os.read(descriptor, 1 << 20))
        except BlockingIOError:
            return b"".join(parts).decode().splitlines()


def record(event: Event, cycle: int = 0, initial_rank: int | None = None) -> Record:
    origin = Origin(job_id="job", node="a", role="agent", pid=1, cycle=cycle, initial_rank=initial_rank)
    return Record(sequence=0, wall_ns=0, mono_ns=0, origin=origin, event=event)  # type: ignore[arg-type]


def met(group_rank: int) -> Record:
    return record(events.RendezvousCompleted(group_rank, 2, 16, "deterministic", "a:1"))


def shown(pipe: tuple[int, int], *records: Record, level: int = 20) -> list[str]:
    console = Console(level, Path("/runs/job"), pipe[1])
    assert all(console.take(each) for each in records)
    return read(pipe[0])


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (events.CycleStarted("first", 0, 10), "16 ranks on 2 nodes; records in /runs/job"),
        (
            events.CycleStarted("membership", 1, 10),
            "all workers restart after a change of nodes: 16 ranks on 2 nodes",
        ),
        (events.NodeUnhealthy("disk", "12 MiB free"), "node a is unhealthy (disk): 12 MiB free"),
        (events.NodeWarned("disk", "12 MiB free"), "node a: warning (disk): 12 MiB free"),
        (events.NodeExcluded("bad memory"), "node a leaves the job: bad memory"),
        (events.ControlRequested("Stop", "", 1), "local rank 1 asks for Stop"),
        (events.ControlRequested("Stop", "enough", 1), "local rank 1 asks for Stop: enough"),
        (
            events.StopRequested("SIGTERM to rank 1", 30.0),
            "the job stops (SIGTERM to rank 1); workers that call resilience.stop_requested() have at most 30 s for a "
            "last checkpoint, then all workers get the signal",
        ),
        (
            events.StopRequested("SIGTERM to rank 1", 30.0, leaves=True),
            "this node leaves (SIGTERM to rank 1); workers that call resilience.stop_requested() have at most 30 s for "
            "a last checkpoint, then all workers get the signal",
        ),
        (events.MonitorLost(7, "killed"), "monitor 7 of rank 3 is gone (killed); a new monitor starts"),
        (
            events.ModulesPreloaded((), ("wandb",), "2 threads run"),
            "wandb cannot be preloaded (2 threads run); each worker imports it",
        ),
        (
            events.ModulesTooLate(("transformers",), 20.0),
            "transformers is still being imported (--preload) after 20 s; workers start without it",
        ),
        (
            events.ModulesTooLate(("transformers", "datasets"), 20.0),
            "transformers, datasets are still being imported (--preload) after 20 s; workers start without them",
        ),
        (
            events.VariablesTooLate(3, "torch", ("TORCH_LOGS", "TORCH_TRACE")),
            "rank 3 set TORCH_LOGS, TORCH_TRACE before it imported torch, but a warm worker imports torch in advance: "
            "no effect in this cycle; from the next cycle on, workers start cold. Set it for the launcher, or use "
            "--cold",
        ),
        (
            events.OutputLost("file", "/runs/job/output/0/0.out", 9, "No space left on device"),
            "workers' output cannot be kept in /runs/job/output/0/0.out: No space left on device; the terminal still "
            "shows it",
        ),
        (
            events.OutputLost("file", "/runs/job/output/0/3.out", 9, "No space left on device", is_shown=False),
            "workers' output cannot be kept in /runs/job/output/0/3.out: No space left on device",
        ),
        (
            events.TimeoutsUnlearned(world_size=4, least_world_size=6, most_world_size=8),
            "learned limits hold for 6 to 8 ranks, not for the 4 of this cycle: configured limits hold",
        ),
        (
            events.StoreProcessLost(7, "SIGKILL", False, True),
            "process 7, which hosts this node's stores, is gone (SIGKILL); a new process replaces it",
        ),
        (
            events.StoreProcessStopped(7),
            "process 7, which hosts this node's stores, was stopped; it continues now",
        ),
        (events.WorkersNotForked("it is silent"), "workers start cold this time: it is silent"),
        (events.ExportFailed("prometheus", "no port", is_at_start=True), "export of metrics failed: no port"),
        (events.ExportFailed("otlp", "no endpoint", is_at_start=True), "export of spans failed: no endpoint"),
        (
            events.ExportFailed("otlp", "no endpoint", is_at_start=True, signal="metric"),
            "export of metrics failed: no endpoint",
        ),
        (
            events.ExportStarted("prometheus", "http://node0:9401", "9400 is taken"),
            "metrics are served at http://node0:9401: 9400 is taken",
        ),
        (events.ZygoteLost("it is dead"), "workers start cold from now on: it is dead"),
    ],
)
def test_what_matters_is_a_sentence(pipe: tuple[int, int], event: Event, line: str) -> None:
    assert shown(pipe, met(0), record(event, initial_rank=3)) == [f"resilience run: {line}"]


def test_console_of_the_second_node_does_not_print_what_all_nodes_know(pipe: tuple[int, int]) -> None:
    assert shown(pipe, met(1), record(events.CycleStarted("first", 0, 10))) == []


def test_newcomer_in_the_first_place_says_why_the_jobs_workers_have_restarted(pipe: tuple[int, int]) -> None:
    console = Console(20, Path("/runs/job"), pipe[1])
    console.cause = CycleDecision("preempted", "b", again="membership")
    for each in (met(0), record(events.CycleStarted("first", 0, 10))):
        console.take(each)
    assert read(pipe[0]) == ["resilience run: 16 ranks on 2 nodes after a change of nodes; records in /runs/job"]
    assert console.cause is None


def test_small_steps_and_the_end_are_no_news(pipe: tuple[int, int]) -> None:
    steps = [events.CyclePhaseStarted("spawn"), events.WorkerStarted(0, 0, 5, "warm"), events.JobEnded("completed", 0)]
    assert shown(pipe, met(0), *map(record, steps), level=10) == []


def test_what_is_watched_for_hangs_is_reported_once_after_the_first_line(pipe: tuple[int, int]) -> None:
    told = [events.HangsWatched({"step": 9.0}, 600.0, 60.0), events.CycleStarted("first", 0, 10)]
    told.append(events.CycleStarted("membership", 1, 10))
    first, line, second = shown(pipe, met(0), *map(record, told))
    assert first.startswith("resilience run: 16 ranks") and "after a change of nodes" in second
    assert line.startswith(
        "resilience run: hang detection: once a rank has reported progress, 600 s without another report end it"
    )
    assert line.endswith("set: step 9 s")


def test_other_nodes_do_not_tell_what_is_watched(pipe: tuple[int, int]) -> None:
    told = [events.HangsWatched({}, 600.0, 60.0), events.CycleStarted("first", 0, 10)]
    assert shown(pipe, met(1), *map(record, told)) == []


def test_ranks_that_fall_silent_together_are_one_line(pipe: tuple[int, int]) -> None:
    console = Console(20, Path("/runs/job"), pipe[1])
    suspicion = events.HangSuspected("save", 61.0, 3.0, 600.0, False, "in_loop", (Frame("train.py", 7, "save"),))
    for rank in (3, 1, 2):
        console.suspected(rank, suspicion)
    assert read(pipe[0]) == [
        "resilience run: rank 3 has been silent in section 'save' for 1 min 01 s, the longest silence before was 3 s "
        "(running, in a loop, at train.py:7 in save); it is ended after 10 min 00 s; if it is healthy, set "
        "RESILIENCE_HANG_FIRST_LIMIT or RESILIENCE_DETECT_HANGS=0"
    ]


@pytest.mark.parametrize(("level", "count"), [(10, 3), (20, 3), (30, 2), (40, 1), (50, 0)])
def test_level_says_from_where_on(pipe: tuple[int, int], level: int, count: int) -> None:
    told = [events.CycleStarted("first", 0, 10), events.ZygoteLost("dead"), events.MonitorLost(7, "killed")]
    assert len(shown(pipe, met(0), *map(record, told), level=level)) == count


FAILED = InterruptionRecord(3, Interruption.EXCEPTION, exception=ExceptionInfo("ValueError", "bad\nbatch", "f"))


def test_failure_without_a_restart_is_a_line_of_its_own(pipe: tuple[int, int]) -> None:
    Console(20, Path("/runs/job"), pipe[1]).found(FAILED)
    assert read(pipe[0]) == []  # the line of the restart names it
    Console(20, Path("/runs/job"), pipe[1], restarts_all=False).found(FAILED)
    assert read(pipe[0]) == ["resilience run: rank 3 failed (ValueError: bad batch)"]


def test_restart_is_one_line_with_the_verdict_of_the_account(pipe: tuple[int, int], tmp_path: Path) -> None:
    launched([Fault("kill", rank=1)], is_running=True).write(tmp_path)
    console = Console(20, tmp_path, pipe[1])
    console.repeats = 2
    for each in (record(events.CycleEnded("failed", 1.0, "rank 0 reported first")), met(0)):
        console.take(each)
    console.take(record(events.CycleStarted("failure", 1, 10), cycle=1))
    assert await_lines(pipe[0]) == [
        "resilience run: restart 1 of 10: rank 1 on node0 failed first (SIGKILL), the same failure 2 times in a row, "
        "16 ranks on 2 nodes"
    ]


def test_restart_without_readable_records_is_reported_as_the_agents_agreed(
    pipe: tuple[int, int], tmp_path: Path
) -> None:
    console = Console(20, tmp_path / "missing", pipe[1])
    console.take(met(0))
    console.take(record(events.CycleEnded("failed", 1.0, "rank 0: SIGKILL")))
    console.take(record(events.CycleStarted("failure", 1, 10), cycle=1))
    assert await_lines(pipe[0]) == ["resilience run: restart 1 of 10: rank 0: SIGKILL, 16 ranks on 2 nodes"]


DECIDED = events.RestartDecided("restart", "f", "node b is lost", 1, 9, 1)
JOINS, JOINED = events.CyclePhaseStarted("rendezvous"), events.CyclePhaseEnded("rendezvous", "completed", 9.0)
STARTED = events.CycleStarted("failure", 1, 10)


@pytest.mark.parametrize(
    "order",
    [(DECIDED, events.CycleEnded("failed", 1.0), JOINS), (JOINS, DECIDED)],
    ids=["its own cycle", "a cycle that lost all its agents"],
)
def test_restart_that_waits_for_nodes_is_reported_meanwhile(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[Event, ...]
) -> None:
    monkeypatch.setattr(console_module, "SOON", 0.01)
    console = Console(20, tmp_path, pipe[1])
    for event in order:
        console.take(record(event))
    assert await_lines(pipe[0]) == ["resilience run: node b is lost; waiting for the nodes of the next cycle"]


def test_start_that_waits_for_nodes_is_reported_meanwhile(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "LATE", 0.01)
    Console(20, tmp_path, pipe[1], hosts_store=False).take(record(JOINS))
    Console(20, tmp_path, pipe[1]).take(record(JOINS))
    assert await_lines(pipe[0]) == ["resilience run: waiting for the other nodes of the job (0.01 s so far)"]


class Timers:
    """In place of `threading.Timer`: lists what the timers that run would print."""

    def __init__(self) -> None:
        self.running: list[Timers] = []
        self.daemon = False
        self.texts: tuple[str, ...] = ()

    def __call__(self, seconds: float, call: object, texts: tuple[str, ...]) -> Timers:
        timer = Timers()
        timer.running, timer.texts = self.running, texts
        return timer

    def start(self) -> None:
        self.running.append(self)

    def cancel(self) -> None:
        self.running.remove(self)


def test_node_waits_for_others_from_the_end_of_its_workers_until_the_next_rendezvous_is_over(
    tmp_path: Path, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers()
    monkeypatch.setattr(threading, "Timer", timers)
    console = Console(50, tmp_path, pipe[1])

    def waits(*told: Event) -> list[tuple[str, ...]]:
        for event in told:
            console.take(record(event))
        return [timer.texts for timer in timers.running]

    assert waits(JOINS) == [("",)]  # of the job's start
    console.take(met(0))
    assert waits(JOINED, events.CycleStarted("first", 0, 10)) == []
    assert waits(DECIDED, events.CyclePhaseStarted("stop"), events.CycleEnded("failed", 1.0)) == []
    assert waits(JOINS) == [("node b is lost",)]
    assert waits(JOINED, STARTED) == []
    assert waits(JOINS) == []  # for a change of nodes: no failure led to it
    other = events.RestartDecided("restart", "f", "rank 9: SIGKILL", 2, 8, 1)
    assert waits(JOINED, STARTED, other, JOINS) == [("rank 9: SIGKILL",)]


def test_quiet_console_says_only_what_output_is_missing(pipe: tuple[int, int], tmp_path: Path) -> None:
    console = Console(10, tmp_path, pipe[1], restarts_all=False, quiet=True)
    for each in (met(0), record(events.CycleStarted("first", 0, 10)), record(events.ZygoteLost("dead"))):
        console.take(each)
    console.found(FAILED)
    console.completed("done")
    console.last_words("failed")
    assert read(pipe[0]) == []
    console.losses(["7 bytes are missing"])
    assert read(pipe[0]) == ["resilience run: 7 bytes are missing"]


def await_lines(descriptor: int) -> list[str]:
    """Lines, once there are any: a thread of the console's writes them."""
    with select.epoll() as poll:
        poll.register(descriptor, select.EPOLLIN)
        assert poll.poll(60.0)
    return read(descriptor)


def test_a_reader_that_stalls_loses_lines_knows_it_and_holds_nobody(pipe: tuple[int, int]) -> None:
    console = Console(20, Path("/runs/job"), pipe[1])
    found = record(events.ZygoteLost("x" * 2000))
    for _ in range(1000):
        console.take(found)
    lines = read(pipe[0])
    assert 10 < len(lines) < 1000
    assert {len(line) + 1 for line in lines} == {LONGEST}
    console.take(found)
    (line,) = read(pipe[0])
    assert line.startswith(f"resilience run: ({1000 - len(lines)} lines not shown) workers start cold")


def test_a_terminal_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    console = Console(20, Path("/runs/job"), writing)
    console.take(record(events.ZygoteLost("dead")))
    os.close(writing)
    console.take(record(events.ZygoteLost("dead")))
