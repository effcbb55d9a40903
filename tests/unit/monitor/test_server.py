"""What a rank's monitor does while its host fails, and with its rank's records."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from selectors import DefaultSelector
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from resilience.calibration.fitting import MONTH
from resilience.calibration.limits_file import SCHEMA, Deadline, RankGroupLimit, Timeouts, in_force
from resilience.core.limits import ClientLimits, SectionTimeouts, with_state
from resilience.core.observation import Doing, Observation
from resilience.core.silences import Shown, Silence
from resilience.core.standstills import Standstill
from resilience.core.watch import (
    AskRestart,
    CaptureEvidence,
    Decision,
    Finding,
    Watch,
    decide,
    exceeded,
    next_deadline,
)
from resilience.facts import events
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import NAME_BYTES
from resilience.facts.events import TelemetryDropped
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit, Interruption, InterruptionRecord
from resilience.facts.limits import Learned, Limit, Limits, Outside, Rule
from resilience.facts.phases import Phases
from resilience.facts.records import Record
from resilience.facts.seats import Seat
from resilience.monitor import client, connect, messages, page, server
from resilience.monitor.calling_rank import CallingRank
from resilience.monitor.connect import WorkerLink
from resilience.monitor.page import Closed, MonitorSide, Page, PageView, RankSide
from resilience.monitor.server import RankMonitor
from resilience.monitor.worker import WorkerMonitor
from resilience.system.background import WRITER
from resilience.system.channel import Channel, pair
from resilience.system.processes import Process
from resilience.system.stacks import Stacks
from resilience.telemetry import durations, single_durations
from resilience.telemetry.rank_snapshot import allowed
from resilience.telemetry.recording import RecordTail


def test_monitor_without_a_thread_for_the_mutex_keeps_the_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monitor: Any = RankMonitor.__new__(RankMonitor)
    monitor.page = None
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monitor._watch_mutex()
    assert monitor._death is None


class Clock:
    """The clock of a rank that stores into its page."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_ns(self) -> int:
        self.now += 0.001
        return int(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Side(MonitorSide):
    """The monitor's side of a page. The rank does something before a given read."""

    reads = 0
    at_read = -1

    def __init__(self, shared: Page, rank: RankSide) -> None:
        super().__init__(shared)
        self.rank = rank

    def read(self) -> PageView:
        self.reads += 1
        if self.reads == self.at_read:
            self.rank.leave("checkpoint")
        return super().read()


@pytest.fixture
def pipe() -> Iterator[int]:
    read_end, write_end = os.pipe()
    yield read_end
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("at_read", [1, 2, 3, 4])
def test_section_without_a_limit_may_end_at_any_moment_of_a_look(
    monkeypatch: pytest.MonkeyPatch, pipe: int, at_read: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(page, "time", clock)
    shared = Page.create()
    rank = RankSide(shared)
    side = Side(shared, rank)
    monitor = CallingRank(side, None, msgspec.defstruct("Rank", [("pidfd", int)])(pipe), Mock(), None).monitor
    monitor._watch = Watch(limits=Limits(rule=Rule(), sections={"checkpoint": Limit()}))

    def look() -> None:
        view = monitor.record_durations(clock.now)
        monitor._observation = monitor._observe(view)
        assert exceeded(monitor._watch.limits, monitor._observation, clock.now) == []

    rank.doing(Doing.FUNCTION)
    for step in range(20):
        clock.now += 1.0
        rank.step(step)
        look()
    rank.enter("checkpoint")
    for _ in range(100):
        clock.now += 10.0
        look()
    side.reads, side.at_read = 0, at_read
    for _ in range(2):
        look()


def test_snapshot_is_of_one_look_at_the_page_and_no_older_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Page.create()
    rank = RankSide(shared)

    class Restless(MonitorSide):
        """The rank enters a section before each read."""

        def read(self) -> PageView:
            rank.leave_if_open("data")
            rank.enter("data")
            return super().read()

    monitor = CallingRank(Restless(shared), None, Process(os.getpid()), Mock(), None).monitor
    shown = []

    def write(
        folder: None, origin: None, view: PageView, seen: Observation, limits: Limits, now: float, _: bool
    ) -> None:
        shown.append((view.open_sections[0].entered_at, seen.open_sections[0].seen_at, now))
        monitor.is_over = True

    monkeypatch.setattr(monitor._snapshots, "write", write)
    monitor._snapshots.due = 0.0
    monitor.run()
    assert [entered_at == seen_at <= now for entered_at, seen_at, now in shown] == [True, True]


def test_hang_is_reported_for_the_iteration_in_which_it_was_found(monkeypatch: pytest.MonkeyPatch, pipe: int) -> None:
    """The rank restarts while its stacks are taken: else its next iteration would be ended for it."""
    shared = Page.create()
    rank, receiver = RankSide(shared), Mock()
    rank.set_seat(Seat(3, 3, 4, 4, 0))
    rank.doing(Doing.FUNCTION)
    process = msgspec.defstruct("Rank", [("pidfd", int), ("pid", int)])(pipe, os.getpid())
    monitor = CallingRank(MonitorSide(shared), None, process, receiver, None).monitor
    monitor._observation = monitor._observe()

    def stacks_taken(thorough: bool) -> Stacks:
        rank.set_seat(Seat(3, 2, 4, 4, 1))
        return Stacks("none")

    monkeypatch.setattr(monitor.witness, "take_stacks", stacks_taken)
    monkeypatch.setattr(monitor.witness, "see", lambda silent_for: None)
    finding = Finding("step", "soft", 3.0, 3.1)
    monitor._perform(Decision(Watch(), (CaptureEvidence(finding), AskRestart(finding))))
    (record,) = receiver.interrupt.call_args.args
    assert (record.iteration, record.active_rank) == (0, None)


@pytest.mark.parametrize(
    ("stage", "status", "end"),
    [
        (None, 3, Exit(code=3)),
        (None, -signal.SIGINT, Exit(signal="SIGINT")),
        (None, 0, None),
        ("run", 3, None),  # the program ran when the record was made, and had ended when the page was read
    ],
)
def test_record_of_a_hang_shows_the_coming_exit_if_it_is_of_the_end(
    pipe: int, stage: str | None, status: int, end: Exit | None
) -> None:
    shared = Page.create()
    rank = RankSide(shared)
    rank.doing(Doing.FUNCTION)
    rank.ends(status)
    process = msgspec.defstruct("Rank", [("pidfd", int), ("pid", int)])(pipe, os.getpid())
    monitor = CallingRank(MonitorSide(shared), None, process, Mock(), None).monitor
    record = InterruptionRecord(0, Interruption.HARD_TIMEOUT, stage=stage)
    enriched = monitor.witness.enrich(record, monitor._observe(), Limits(rule=Rule()), "none")
    assert (enriched.exit, enriched.stage) == (end, stage or "ending")


def on_trial(limits: Limits, base: Limits) -> Limits:
    return msgspec.structs.replace(base, shadow=limits)


@pytest.mark.parametrize("is_shadow", [False, True])
def test_learned_limits_do_not_hold_after_ranks_were_lost_in_place(tmp_path: Path, pipe: int, is_shadow: bool) -> None:
    """Half of the ranks need twice as long for the same batch."""
    process = msgspec.defstruct("Rank", [("pidfd", int), ("pid", int)])(pipe, os.getpid())
    monitor = CallingRank(MonitorSide(Page.create()), None, process, Mock(), None).monitor
    origin = Origin("job", "n", "rank", os.getpid(), iteration=0, initial_rank=0, rank=0, world_size=8)
    deadlines = {"work": Deadline(2.0, "ok", "", 1e-6)}
    found = Timeouts(SCHEMA, Configuration("train.py", world_size=8), "", 1.0, MONTH, 8, deadlines)
    base = Limits(sections={"save": Limit(hard=60.0)})
    limits = in_force(found, base)
    limits = on_trial(limits, base) if is_shadow else limits
    monitor.open(origin, tmp_path, msgspec.structs.replace(limits, rule=Rule()))
    shown = []
    for active in (6, 6, 3):  # two ranks are spares
        monitor.take(Record(0, 0, 0, origin, events.IterationStarted(active, "active")))
        known = monitor._watch.limits
        shown.append(sorted((known.shadow or known).sections))
    assert WRITER.flush(60.0)
    assert shown == [["save", "work"], ["save", "work"], ["save"]]
    assert monitor._watch.limits.rule == Rule()


@pytest.mark.parametrize("is_shadow", [False, True])
def test_rank_that_takes_the_place_of_another_one_has_the_limit_of_all_ranks(
    tmp_path: Path, pipe: int, is_shadow: bool
) -> None:
    """Rank 0 saves for 20 s, the others for 1 s. Rank 8 is a spare. Rank 0 is lost, so rank 1 saves instead."""
    process = msgspec.defstruct("Rank", [("pidfd", int), ("pid", int)])(pipe, os.getpid())
    monitor = CallingRank(MonitorSide(Page.create()), None, process, Mock(), None).monitor
    groups = (RankGroupLimit("0", 100.0, "ok", ""), RankGroupLimit("1-7", 5.0, "ok", ""))
    deadlines = {"save": Deadline(100.0, "ok", "", 1e-6, groups=groups)}
    found = Timeouts(SCHEMA, Configuration("train.py", world_size=9), "", 1.0, MONTH, 9, deadlines)
    origin = Origin("job", "n", "rank", os.getpid(), iteration=0, initial_rank=1, rank=1, world_size=9)
    limits = in_force(found, Limits())
    monitor.open(origin, tmp_path, on_trial(limits, Limits()) if is_shadow else limits)
    shown = []
    for rank in (1, 0, 0, 1):
        moved = msgspec.structs.replace(origin, rank=rank)
        monitor.take(Record(0, 0, 0, moved, events.IterationStarted(8, "active")))
        assert monitor.recorder is not None
        known = monitor._watch.limits
        shown.append(((known.shadow or known).sections["save"].hard, monitor.recorder._learned["save"].timeout_s))
    assert WRITER.flush(60.0)
    assert shown == [(5.0, 5.0), (100.0, 100.0), (100.0, 100.0), (5.0, 5.0)]


LEARNED = Limits(
    sections={"work": Limit(hard=10.0)},
    outside={"work": Outside(Limit(hard=5.0), Phases((), 99))},
    learned={"work": Learned(10.0, 1.0, 2.0)},
)


def made_stale(monitor: RankMonitor, seconds: float = 8.0) -> None:
    """Let healthy occurrences take nearly as long as their learned limit, or longer."""
    assert monitor.recorder is not None
    monitor.recorder.take([Closed("work", seconds, 10.0 * number) for number in range(3)], [])
    monitor._write_timings()


def work_limits(monitor: RankMonitor) -> tuple[float | None, list[str]]:
    limits = monitor._watch.limits
    return limits.sections["work"].hard, list(limits.outside)


def test_learned_limit_that_no_longer_fits_stays_replaced_if_the_rank_sets_others(tmp_path: Path) -> None:
    """The rank sends all its limits with the one that it has calculated, and does not know of the replacement."""
    worker = Worker(tmp_path, LEARNED)
    worker.attach()
    made_stale(worker.monitor)
    shown = [work_limits(worker.monitor)]
    worker.worker.handle(messages.NewLimits(msgspec.structs.replace(LEARNED, heartbeat=Limit(hard=60.0))))
    shown.append(work_limits(worker.monitor))
    worker.close()
    assert shown == [(40.0, [])] * 2
    assert worker.monitor._watch.limits.heartbeat == Limit(hard=60.0)


def test_limit_on_trial_outside_known_phases_is_tried_and_replaces_none_that_holds(tmp_path: Path) -> None:
    worker = Worker(tmp_path, on_trial(LEARNED, Limits(sections={"work": Limit(hard=100.0)})))
    rank = worker.attach()
    rank.doing(Doing.FUNCTION)
    rank.step(1)
    made_stale(worker.monitor)
    worker.monitor.record_durations(time.monotonic())
    rank.enter("work")
    worker.monitor.suspicions.weigh(
        worker.monitor._watch.limits, worker.monitor._observe(), is_ending=False, now=time.monotonic() + 7.0
    )
    worker.close()
    told = [record.event for record in records(tmp_path)]
    assert [event.allowed_s for event in told if isinstance(event, events.TimeoutsShadowAlarm)] == [5.0]
    assert not any(isinstance(event, events.TimeoutsStale) for event in told)
    assert worker.monitor._watch.limits.sections["work"] == Limit(hard=100.0)


def test_calculated_limit_does_not_become_stale_like_the_learned_one_that_it_replaced(tmp_path: Path) -> None:
    worker = Worker(tmp_path, LEARNED)
    worker.attach()
    calculated = SectionTimeouts({"work": 20.0}, None, frozenset({"work"}))
    limits = with_state(LEARNED, ClientLimits(section_timeouts=calculated))
    worker.worker.handle(messages.NewLimits(limits))
    made_stale(worker.monitor)
    worker.close()
    assert work_limits(worker.monitor) == (20.0, [])
    assert not allowed(worker.monitor._watch.limits)[0].is_learned
    assert not any(isinstance(record.event, events.TimeoutsStale) for record in records(tmp_path))


def test_calculated_limit_replaces_also_a_stale_one(tmp_path: Path) -> None:
    worker = Worker(tmp_path, LEARNED)
    worker.attach()
    made_stale(worker.monitor)
    calculated = SectionTimeouts({"work": 20.0}, None, frozenset({"work"}))
    worker.worker.handle(messages.NewLimits(with_state(LEARNED, ClientLimits(section_timeouts=calculated))))
    worker.close()
    assert work_limits(worker.monitor) == (20.0, [])


def test_stale_learned_limit_stays_replaced_in_the_replacement_of_a_lost_monitor(
    tmp_path: Path,
) -> None:
    lost = Worker(tmp_path, LEARNED)
    rank = lost.attach()
    made_stale(lost.monitor)
    limits = msgspec.structs.replace(LEARNED, heartbeat=Limit(hard=60.0))  # as the rank knows them
    lost.worker.handle(messages.NewLimits(limits))
    lost.monitor.record_durations(time.monotonic())
    replacement = Worker(tmp_path, LEARNED)
    replacement.take_over(lost)
    rank.step(1)
    replacement.monitor.record_durations(time.monotonic())
    shown = work_limits(replacement.monitor), replacement.monitor._watch.limits.heartbeat
    replacement.close()
    lost.close()
    assert shown == ((40.0, []), Limit(hard=60.0))


def test_learned_limit_that_no_longer_fits_stays_replaced_for_the_next_worker(tmp_path: Path) -> None:
    worker = Worker(tmp_path, LEARNED)
    worker.attach()
    made_stale(worker.monitor)
    worker.close()
    following = Worker(tmp_path, LEARNED, raised=worker.monitor.raised)
    configured = Worker(tmp_path, Limits(sections={"work": Limit(hard=3.0)}), raised=worker.monitor.raised)
    for each in (following, configured):
        each.close()
    assert work_limits(following.monitor) == (40.0, [])
    assert work_limits(configured.monitor) == (3.0, [])


def test_replaced_limit_is_not_shortened_by_the_shorter_occurrences_of_a_later_worker(tmp_path: Path) -> None:
    first = Worker(tmp_path, LEARNED)
    first.attach()
    made_stale(first.monitor, 30.0)
    first.close()
    later = Worker(tmp_path / "later", LEARNED, raised=first.monitor.raised)
    later.attach()
    made_stale(later.monitor, 8.0)
    shown = work_limits(later.monitor)
    later.close()
    assert shown == (150.0, [])
    assert later.monitor.raised == {"work": 150.0}
    assert not any(isinstance(record.event, events.TimeoutsStale) for record in records(tmp_path / "later"))


def test_occurrence_near_a_learned_limit_raises_it_at_the_next_look(tmp_path: Path) -> None:
    worker = Worker(tmp_path, LEARNED)
    monitor = worker.monitor
    worker.attach()
    monitor.page.drain = lambda: ([Closed("work", 8.0, 10.0)], 0)
    monitor.record_durations(monitor._flush_at - 10.0)
    shown = work_limits(monitor)
    worker.close()
    assert shown == (40.0, [])


def test_learned_limit_that_no_longer_fits_stays_replaced_in_the_next_call(tmp_path: Path, pipe: int) -> None:
    process = msgspec.defstruct("Rank", [("pidfd", int), ("pid", int)])(pipe, os.getpid())
    monitor = CallingRank(MonitorSide(Page.create()), None, process, Mock(), None).monitor
    origin = Origin("job", "n", "rank", os.getpid(), initial_rank=0, rank=0, world_size=1)
    monitor.open(origin, tmp_path, LEARNED)
    made_stale(monitor)
    monitor.open(origin, tmp_path, LEARNED)
    assert WRITER.flush(60.0)
    assert work_limits(monitor) == (40.0, [])


class Worker:
    """A worker's monitor in this process, and programs that attach themselves."""

    def __init__(
        self,
        folder: Path,
        limits: Limits = Limits(),  # noqa: B008
        shown: Shown | None = None,
        raised: Mapping[str, float] | None = None,
        is_cold: bool = True,
    ) -> None:
        self.pid = os.getpid()
        origin = Origin("job", "n", "rank", self.pid, initial_rank=0, rank=0, world_size=1)
        assigned = messages.Assigned(self.pid, 0, origin, bytes(folder), limits, is_cold=is_cold)
        self.worker = WorkerMonitor(
            assigned, Process(self.pid), DefaultSelector(), lambda message, fds: None, shown=shown, raised=raised or {}
        )
        self.monitor = self.worker.monitor
        self._channels: list[Channel] = []

    def attach(self) -> RankSide:
        """Attach another program, and return its page."""
        shared = Page.create()
        self._attach(shared, is_new=True)
        return RankSide(shared)

    def take_over(self, earlier: Worker) -> None:
        """Continue with the page of a monitor that is lost."""
        shared = Page.attach(os.dup(earlier.worker._attached_page.fd))
        self._attach(shared, is_new=False, limits=earlier.worker._link and earlier.worker._link.limits)

    def _attach(self, shared: Page, is_new: bool, limits: Limits | None = None) -> None:
        ours, theirs = pair()
        self._channels.append(ours)
        link, dump = messages.Attachment(self.pid, is_locked=False, limits=limits), os.memfd_create("dump")
        self.worker.attach(link, shared, theirs, dump, is_new)

    @property
    def channel(self) -> Channel:
        """The end of the program that has attached last."""
        return self._channels[-1]

    def close(self) -> None:
        self.worker.release()
        for channel in self._channels:
            channel.close()


def test_each_program_of_a_worker_has_a_warm_up_of_its_own(tmp_path: Path) -> None:
    worker, counts = Worker(tmp_path), []
    for _ in range(2):
        rank = worker.attach()
        for _ in range(3):
            rank.enter("load")
            rank.leave("load")
        counts.append(worker.monitor._ended("load"))
        worker.monitor.record_durations(time.monotonic())
        counts.append(worker.monitor._ended("load"))
    worker.close()
    assert counts == [0, 3, 0, 3]


@pytest.mark.parametrize("is_attached", [True, False])
def test_refusal_of_another_process_does_not_excuse_the_attached_program_from_its_first_sign(
    tmp_path: Path, is_attached: bool
) -> None:
    """A process that is refused while no program is attached may be the rank's program."""
    worker = Worker(tmp_path, shown=Shown(rounds={0: 20}), is_cold=False)
    if is_attached:
        worker.attach()
    ours, theirs = pair()
    stranger = SimpleNamespace(
        peer=SimpleNamespace(pid=os.getppid(), uid=os.geteuid()), send=theirs.send, close=theirs.close
    )
    worker.worker.apply(stranger)  # type: ignore[arg-type]
    silence = worker.monitor.listener.silence(Rule(), 0.0)
    assert (silence is not None) == is_attached
    ours.close()
    worker.close()


def test_silence_is_suspected_once_however_often_the_host_stands_still_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tmp_path, Limits(rule=Rule(600.0, 60.0)))
    worker.attach()
    monitor, told = worker.monitor, list[events.Event]()
    monkeypatch.setattr(monitor, "emit", told.append)
    monkeypatch.setattr(monitor.witness, "look", events.WorkerSeen)
    silence = Silence("", 1000.0, 600.0, 1100.0)
    for standstills in ((), (Standstill(1010.0, 1012.0),), (Standstill(1010.0, 1012.0), Standstill(1020.0, 1023.0))):
        monitor._observation = Observation(doing=Doing.FUNCTION, since=1000.0, silence=silence, standstills=standstills)
        monitor._weigh_silence(1200.0)
    worker.close()
    assert [type(event) for event in told if isinstance(event, events.HangSuspected)] == [events.HangSuspected]


def test_monitor_that_replaces_a_lost_one_records_nothing_again(tmp_path: Path) -> None:
    lost = Worker(tmp_path)
    rank = lost.attach()
    for number in range(6000):
        rank.step(number)
        if number % 1000 == 0:
            lost.monitor.record_durations(time.monotonic())
    lost.monitor.record_durations(time.monotonic())
    lost.monitor._write_timings()
    assert WRITER.flush(60.0)
    rank.step(6000)
    replacement = Worker(tmp_path)
    replacement.take_over(lost)
    replacement.monitor.record_durations(time.monotonic())
    occurrences = replacement.monitor._ended("step")
    recorder = replacement.monitor.recorder
    assert recorder is not None
    recorder.close()
    replacement.close()
    state = durations.read_histograms(tmp_path / "timings" / "n-0.hist")
    lines, _ = single_durations.read_lines(tmp_path / "timings" / "n-0.jsonl")
    lost.close()
    assert (state.deadlines["step"].total.count, occurrences, state.first_step) == (6000, 6000, 0)
    assert sum(isinstance(line, durations.Started) for line in lines) == 1
    assert [line.j for line in lines if isinstance(line, durations.Value)].count(0) == 1
    assert [record.event for record in records(tmp_path) if isinstance(record.event, TelemetryDropped)] == []


def test_monitor_that_replaces_a_lost_one_counts_what_was_not_written(tmp_path: Path) -> None:
    lost = Worker(tmp_path)
    lost.monitor._flush_at = math.inf
    rank = lost.attach()
    for number in range(11):
        rank.step(number)
    lost.monitor.record_durations(time.monotonic())
    replacement = Worker(tmp_path)
    replacement.take_over(lost)
    replacement.close()
    lost.close()
    (dropped,) = [record.event for record in records(tmp_path) if isinstance(record.event, TelemetryDropped)]
    assert (dropped.signal, dropped.count) == ("timing", 10)


@pytest.mark.parametrize("note", [b"", b"\xc1", b"x" * (page.NOTE + 1)])
def test_monitor_that_finds_no_note_records_what_the_page_has(tmp_path: Path, note: bytes) -> None:
    lost = Worker(tmp_path)
    rank = lost.attach()
    for number in range(11):
        rank.step(number)
    lost.monitor.page.leave_note(note)
    replacement = Worker(tmp_path)
    replacement.take_over(lost)
    replacement.monitor.record_durations(time.monotonic())
    occurrences = replacement.monitor._ended("step")
    replacement.close()
    lost.close()
    assert occurrences == 10


def test_evidence_and_a_lost_agent_do_not_move_the_time_at_which_a_hang_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence took 3 s. Then the agent died, so the rank had a second instead of its grace."""
    worker, cut = Worker(tmp_path), Mock()
    hangs = Observation(doing=Doing.FUNCTION, step_at=10.0)
    found = decide(Watch(limits=Limits(step=Limit(hard=5.0))), hangs, 15.0).state
    signalled = decide(found, hangs, 18.0).state
    orphan = decide(signalled, msgspec.structs.replace(hangs, agent_lost_at=18.5), 18.5).state
    monkeypatch.setattr(worker.monitor.recorder, "cut", cut)
    worker.monitor._watch, worker.monitor.is_gone = orphan, True
    worker.monitor._close()
    worker.close()
    assert cut.call_args.args[2] == 15.0


def records(folder: Path) -> list[Record]:
    assert WRITER.flush(60.0)
    return RecordTail(folder / "records" / "n-0.jsonl").added()


@pytest.mark.parametrize("is_new", [False, True])
def test_limit_of_a_section_with_a_long_name_holds(tmp_path: Path, is_new: bool) -> None:
    name = "validation/" + "x" * NAME_BYTES
    limits = Limits(sections={name: Limit(hard=5.0)})
    worker = Worker(tmp_path, Limits() if is_new else limits)
    if is_new:
        worker.monitor.limit(limits)
    rank = worker.attach()
    rank.doing(Doing.FUNCTION)
    rank.enter(name)
    observation = worker.monitor._observe()
    worker.close()
    (finding,) = exceeded(worker.monitor._watch.limits, observation, time.monotonic() + 10.0)
    assert finding.limit == "section:" + name[:NAME_BYTES]


class Freezer:
    """A selector whose process is suspended while it waits."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def select(self, timeout: float) -> list[Any]:
        self._clock.now += timeout + self._seconds
        return []

    def register(self, *_: Any) -> None:
        """Nothing of the rank's is read."""

    unregister = register


def test_learned_limit_stays_if_the_node_is_suspended_within_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    monkeypatch.setattr(page, "time", clock)
    worker = Worker(tmp_path, Limits(learned={"step": Learned(timeout_s=1.0, median_s=0.1, p99_s=0.2)}))
    monkeypatch.setattr(server, "time", clock)
    rank, monitor = worker.attach(), worker.monitor
    rank.step(0)
    with monkeypatch.context() as suspended:
        suspended.setattr(monitor, "_selector", Freezer(clock, 7200.0))
        monitor._sleep(clock.now + 1.0)
    clock.now += 0.1
    rank.step(1)
    monitor.record_durations(clock.now)
    recorder = monitor.recorder
    assert recorder is not None
    stale = recorder.stale()
    monkeypatch.undo()
    worker.close()
    assert stale == []


@pytest.mark.parametrize("at", ["before it waits", "while it waits", "after it has waited"])
def test_no_limit_is_exceeded_wherever_the_monitor_was_when_the_job_was_suspended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(page, "time", clock)
    monkeypatch.setattr(server, "time", clock)
    worker = Worker(tmp_path, Limits(step=Limit(hard=10.0)))
    rank, monitor = worker.attach(), worker.monitor
    found: list[list[str]] = []

    def decide(state: Watch, seen: Any, now: float) -> Decision:
        found.append([finding.limit for finding in exceeded(state.limits, seen, now)])
        monitor.is_over = True
        return Decision(state)

    def sleep(due: float) -> None:
        clock.now += 7200.0 * (at == "before it waits")
        wait(due)
        clock.now += 7200.0 * (at == "after it has waited")

    rank.doing(Doing.FUNCTION)
    rank.step(0)
    monitor._flush_at = clock.now  # it has something to do, and looks
    wait = monitor._sleep
    with monkeypatch.context() as suspended:
        suspended.setattr(monitor, "_selector", Freezer(clock, 7200.0 * (at == "while it waits")))
        suspended.setattr(monitor, "_sleep", sleep)
        suspended.setattr(server, "decide", decide)
        worker.worker.run()
    monkeypatch.undo()
    worker._channels[0].close()  # the monitor has closed its own end
    assert found == [[]]


class Host:
    """The selector of a monitor. The host stands still at times; until then a rank steps."""

    def __init__(
        self, clock: Clock, rank: RankSide, steps_until: float, standstills: list[tuple[float, float]]
    ) -> None:
        self._clock, self._rank = clock, rank
        self._steps = [(at, 0.0) for at in (clock.now + 0.1 * n for n in range(400)) if at < steps_until]
        self._standstills = list(standstills)

    def select(self, timeout: float) -> list[Any]:
        until = self._clock.now + timeout
        while (happens := min(self._steps[:1] + self._standstills[:1], default=(math.inf, 0.0)))[0] <= until:
            at, seconds = happens
            self._clock.now = max(self._clock.now, at + seconds)
            if seconds:
                self._standstills.pop(0)
                self._steps = [(step + seconds, 0.0) for step, _ in self._steps]
            else:
                self._steps.pop(0)
                self._rank.step(int(at * 100.0))
        self._clock.now = max(self._clock.now, until)
        return []

    def register(self, *_: Any) -> None:
        """Nothing of the rank's is read."""

    unregister = register


@pytest.fixture
def found_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., float]:
    """When the monitor finds a hang on a host that stands still at times, in seconds from the first step."""

    def found_at(limit: float, steps_for: float, standstills: list[tuple[float, float]], until: float) -> float:
        clock = Clock()
        found = math.inf
        with monkeypatch.context() as virtual:
            virtual.setattr(page, "time", clock)
            virtual.setattr(server, "time", clock)
            worker = Worker(tmp_path, Limits(step=Limit(hard=limit)))
            rank, monitor = worker.attach(), worker.monitor
            began = clock.now

            def decide(state: Watch, seen: Any, now: float) -> Decision:
                nonlocal found
                if exceeded(state.limits, seen, now):
                    found = min(found, now - began)
                monitor.is_over = found < math.inf or now > began + until
                return Decision(state, (), min(now + 2.0, next_deadline(state, seen, now) or math.inf))

            rank.doing(Doing.FUNCTION)
            virtual.setattr(server, "FLUSH_EVERY", math.inf)
            monitor._flush_at, monitor._snapshots.due = clock.now, math.inf  # it has something to do, and looks
            at = [(began + begin, seconds) for begin, seconds in standstills]
            virtual.setattr(monitor, "_selector", Host(clock, rank, began + steps_for, at))
            virtual.setattr(server, "decide", decide)
            worker.worker.run()
        worker._channels[0].close()  # the monitor has closed its own end
        return found

    return found_at


def test_short_standstill_of_the_host_ends_no_rank_whenever_it_begins(found_on: Callable[..., float]) -> None:
    for hundredths in range(0, 100, 7):
        began = 5.0 + hundredths / 100
        assert found_on(1.0, 20.0, [(began, 3.2)], until=12.0) == math.inf


def test_hang_on_a_host_that_stands_still_again_and_again_is_found(found_on: Callable[..., float]) -> None:
    standstills = [(595.0 * number, 8.0) for number in range(1, 10)]
    assert found_on(600.0, 1.0, standstills, until=5000.0) < 615.0


def test_user_learns_once_that_the_names_do_not_suffice(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    rank = worker.attach()
    for number in range(page.NAMES - 1):
        rank.enter(f"batch {number}")
        rank.leave(f"batch {number}")
    worker.monitor.record_durations(time.monotonic())
    reported = [worker.monitor._has_told_of_names]
    rank.enter("checkpoint")
    for _ in range(2):
        worker.monitor.record_durations(time.monotonic())
    worker.close()
    dropped = [
        record.event
        for record in RecordTail(tmp_path / "records" / "n-0.jsonl").added()
        if isinstance(record.event, TelemetryDropped)
    ]
    assert reported == [False] and len(dropped) == 1
    assert "more than 127 names" in dropped[0].reason


def test_no_first_signal_is_expected_of_a_program_on_a_new_node(tmp_path: Path) -> None:
    worker = Worker(tmp_path, shown=Shown(rounds={0: 20}))
    worker.monitor.record_durations(time.monotonic())
    ours, theirs = pair()
    WorkerLink(worker.attach(), ours, messages.Welcome(rank=3, world_size=4, limits=Limits())).resume()
    worker.monitor.record_durations(time.monotonic())
    silence = worker.monitor.listener.silence(Rule(), 0.0)
    worker.close()
    ours.close()
    theirs.close()
    assert silence is None


STRICT = Limits(
    sections={"step": Limit(hard=60.0), "epoch": Limit(hard=7200.0)},
    heartbeat=Limit(hard=60.0),
    initial_heartbeat=Limit(hard=60.0),
    out_of_section=Limit(hard=60.0),
)


class ProgramInWrapper:
    """A program that sends heartbeats to the launcher's monitor and calls a Wrapper's function."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name in ((client, "_page"), (connect, "wrapper_page"), (client, "_launcher_link")):
            monkeypatch.setattr(module, name, None)
        self.monitor, self.page = worker.monitor, worker.attach()
        welcome = messages.Welcome(rank=0, world_size=1, limits=STRICT)
        self.link = WorkerLink(self.page, worker.channel, welcome)
        self.link.resume()
        client._link_changed(self.link)

    def call(self) -> None:
        client.activate(RankSide(Page.create()))
        client.function_entered()

    def opened_hours_ago(self, hours: float) -> None:
        """Let the open sections have been opened earlier."""
        for name, (slot, entered) in self.page._open.items():
            self.page._words[slot + 1] = entered - int(hours * 3600e9)
            self.page._open[name] = slot, entered - int(hours * 3600e9)

    def waits_for_hours(self, hours: float) -> None:
        """Let the present wait have begun earlier."""
        self.page._words[page._AWAY] -= int(hours * 3600e9)

    def exceeded_in_an_hour(self) -> list[str]:
        return self.exceeded_in(3600.0)

    def exceeded_in(self, seconds: float) -> list[str]:
        self.monitor._receive()
        found = exceeded(STRICT, self.monitor._observe(), time.monotonic() + seconds)
        return sorted(finding.limit for finding in found)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramInWrapper]:
    worker = Worker(tmp_path, STRICT)
    yield ProgramInWrapper(worker, monkeypatch)
    worker.close()


@pytest.mark.parametrize("is_announced_before", [True, False])
def test_nothing_that_an_interruption_left_behind_ends_the_rank_later(
    program: ProgramInWrapper, is_announced_before: bool
) -> None:
    if is_announced_before:
        program.link.arm()
    program.call()
    if not is_announced_before:
        program.link.arm()
    program.page.heartbeat()
    program.page.enter("step")
    assert program.exceeded_in_an_hour() == ["heartbeat", "section:step"]
    client.function_interrupted()
    assert program.exceeded_in_an_hour() == []
    assert program.page.open_sections == () and program.page.longest == {}
    client.function_interrupted()
    client.function_entered()
    assert program.exceeded_in_an_hour() == (["initial_heartbeat"] if is_announced_before else [])
    program.page.enter("step")  # it may be opened again
    assert program.exceeded_in_an_hour() == ["initial_heartbeat", "section:step"]
    program.page.heartbeat()
    program.page.leave("step")
    assert program.exceeded_in_an_hour() == ["heartbeat", "out_of_section"]
    assert program.page.longest_gap == 0  # none reaches across the restart
    assert program.page.on_progress is None or program.page.on_progress == program.link._progressed


def test_second_interruption_before_any_sign_of_life_is_as_harmless_as_the_first(program: ProgramInWrapper) -> None:
    program.call()
    program.link.arm()
    for _ in range(3):
        client.function_interrupted()
        client.function_entered()
    client.function_interrupted()
    program.page.heartbeat()  # from a thread that has outlived the function
    assert program.exceeded_in_an_hour() == []
    client.function_entered()
    program.page.heartbeat()
    assert program.exceeded_in_an_hour() == ["heartbeat"]
    assert program.page.on_progress is None or program.page.on_progress == program.link._progressed


def test_rank_that_waits_as_a_spare_after_an_interruption_owes_no_heartbeats(program: ProgramInWrapper) -> None:
    program.link.arm()
    program.call()
    program.page.heartbeat()
    client.function_interrupted()
    program.page.heartbeat()  # from a thread that has outlived the function
    assert program.exceeded_in_an_hour() == []
    client.deactivate()  # the call is over, and the program owes them again
    assert program.exceeded_in_an_hour() == ["initial_heartbeat"]


def test_rank_whose_function_did_not_run_or_has_returned_owes_no_heartbeats(program: ProgramInWrapper) -> None:
    program.link.arm()
    program.call()
    client.function_left()
    assert program.exceeded_in_an_hour() == []
    client.deactivate()
    assert program.exceeded_in_an_hour() == ["initial_heartbeat"]


def test_rank_whose_call_is_over_without_an_interruption_owes_the_next_signs_from_then_on(
    program: ProgramInWrapper,
) -> None:
    program.link.arm()
    program.page.heartbeat()
    client.activate(RankSide(Page.create()))
    assert program.exceeded_in_an_hour() == []  # it waits for the others before the function is called
    client.function_entered()
    assert program.exceeded_in_an_hour() == ["heartbeat"]
    program.page.enter("step")
    program.page.leave("step")
    client.function_left()
    assert program.exceeded_in_an_hour() == []
    client.deactivate()
    assert program.exceeded_in_an_hour() == ["heartbeat", "out_of_section"]


def test_heartbeat_of_a_leftover_thread_starts_no_limit_after_the_function_returned(
    program: ProgramInWrapper,
) -> None:
    program.call()
    program.link.arm()
    client.function_interrupted()
    client.function_entered()
    client.function_left()
    program.page.heartbeat()
    assert program.exceeded_in_an_hour() == []


def test_section_that_a_function_left_open_is_closed_only_by_an_interruption(program: ProgramInWrapper) -> None:
    program.link.arm()
    program.call()
    program.page.enter("step")
    client.function_left()
    assert program.exceeded_in_an_hour() == [] and program.page.open_sections == ("step",)
    client.function_interrupted()
    assert program.page.open_sections == ()
    client.function_entered()
    assert program.exceeded_in_an_hour() == ["initial_heartbeat"]


def test_program_that_announces_heartbeats_again_after_an_interruption_is_watched_from_then_on(
    program: ProgramInWrapper,
) -> None:
    program.call()
    program.link.arm()
    client.function_interrupted()
    client.function_entered()
    program.link.arm()
    assert program.exceeded_in_an_hour() == ["initial_heartbeat"]


def test_section_in_which_a_wrapper_is_called_stays_open_over_an_interruption(program: ProgramInWrapper) -> None:
    program.page.enter("epoch")
    program.link.arm()
    program.call()
    program.page.enter("step")
    client.function_interrupted()
    assert program.page.open_sections == ("epoch",)
    client.function_entered()
    assert [entry.name for entry in program.monitor.page.read().open_sections] == ["epoch"]
    client.deactivate()
    program.page.leave("epoch")


@pytest.mark.parametrize("is_call_over", [False, True])
@pytest.mark.parametrize(("is_interrupted", "left"), [(False, 1800.0), (True, 7200.0)])
def test_wait_in_a_call_counts_in_no_section_and_an_interruption_begins_its_limit_anew(
    program: ProgramInWrapper, is_call_over: bool, is_interrupted: bool, left: float
) -> None:
    program.link.arm()
    program.page.enter("epoch")
    client.activate(RankSide(Page.create()))
    if is_interrupted:
        client.function_entered()
        client.function_interrupted()
    client.function_left()  # a spare, or it waits for the others
    program.opened_hours_ago(4.5)
    program.waits_for_hours(3.0)  # so it was in the section for 1.5 hours, and the limit is two hours
    assert "section:epoch" not in program.exceeded_in(0.0)
    if is_call_over:
        client.deactivate()
    else:
        client.function_entered()
    assert "section:epoch" not in program.exceeded_in(left - 60.0)
    assert "section:epoch" in program.exceeded_in(left)
    program.page.leave("epoch")
    assert program.page.longest == ({} if is_interrupted else {"epoch": pytest.approx(1.5 * 3600e9, abs=60e9)})
    durations = [entry for entry in program.monitor.page.drain()[0] if entry.name]
    assert [entry.failed for entry in durations] == [is_interrupted]


def test_wait_in_a_call_does_not_count_towards_the_first_heartbeat(program: ProgramInWrapper) -> None:
    program.link.arm()
    program.link._announced_at -= 3 * 3600.0 + 30.0
    client.activate(RankSide(Page.create()))
    program.waits_for_hours(3.0)
    client.function_entered()
    assert program.exceeded_in(0.0) == []
    assert program.exceeded_in(30.0) == ["initial_heartbeat"]


class FindingsReceiver:
    """Takes what the monitor has found."""

    def __init__(self) -> None:
        self.started_by: list[int | None] = []

    def started(self, origin: Origin) -> None:
        self.started_by.append(origin.rank)


class File:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def take(self, record: Record) -> bool:
        self.records.append(record)
        return True


@pytest.fixture
def monitor() -> Any:
    monitor: Any = RankMonitor.__new__(RankMonitor)
    monitor._open, monitor._receiver, monitor._file, monitor._emitter = {}, FindingsReceiver(), File(), None
    monitor._origin = Origin("job", "node", "monitor", 2, initial_rank=3)
    monitor.recorder = monitor._own_record = monitor._unlearned = None
    monitor._most_active = 0
    monitor._enrich = lambda record, process: msgspec.structs.replace(record, step=17)
    return monitor


def of_rank(event: events.AnyEvent) -> Record:
    return Record(1, 0, 0, Origin("job", "node", "rank", 1, initial_rank=3, rank=0, iteration=2), event)


def test_restart_is_announced_once_the_function_is_entered(monitor: Any) -> None:
    for event in (events.IterationStarted(2, "active"), events.StageStarted("initialize")):
        monitor.take(of_rank(event))
    assert monitor._receiver.started_by == []
    monitor.take(of_rank(events.StageStarted("run")))
    assert monitor._receiver.started_by == [0]


def test_restart_is_announced_although_a_hook_before_the_function_fails(monitor: Any) -> None:
    for event in (events.IterationStarted(2, "active"), events.StageEnded("initialize", "failed", 0.1)):
        monitor.take(of_rank(event))
    assert monitor._receiver.started_by == []
    monitor.take(of_rank(events.IterationEnded("interrupted", 0.1)))
    assert monitor._receiver.started_by == [0]


def test_restart_that_does_not_begin_is_not_announced(monitor: Any) -> None:
    for event in (events.IterationStarted(2, "active"), events.IterationEnded("left", 0.1)):
        monitor.take(of_rank(event))
    assert monitor._receiver.started_by == []


def test_state_of_this_rank_is_no_part_of_a_record_of_another_one(monitor: Any) -> None:
    for rank in (3, 5):
        monitor.take(of_rank(events.RankInterrupted(InterruptionRecord(rank, Interruption.EXCEPTION))))
    assert [record.event.record.step for record in monitor._file.records] == [17, None]
    assert monitor._own_record.rank == 3
