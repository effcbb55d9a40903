"""What the rank stores into its page is what the monitor reads from it."""

from __future__ import annotations

import dis
import os
import signal
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core.observation import Doing
from resilience.errors import ConfigurationError, ConfigurationTypeError, MonitorError
from resilience.facts.seats import Seat
from resilience.monitor import client
from resilience.monitor import page as page_module
from resilience.monitor.page import (
    _OPEN,
    COLLECTIVES,
    MOST_RISE,
    NAME_BYTES,
    NAMES,
    RING,
    SECTIONS,
    SIZE,
    MonitorSide,
    Page,
    RankSide,
)

SEAT = Seat(iteration=0, rank=1, world_size=4, active_world_size=3, initial_rank=2)


def both_sides() -> tuple[RankSide, MonitorSide]:
    page = Page.create()
    return RankSide(page), MonitorSide(page)


def names(monitor: MonitorSide) -> list[str]:
    return [section.name for section in monitor.read().open_sections]


# -- what a monitor sees ------------------------------------------------------------------------------


def test_fresh_page_shows_no_sign_of_life() -> None:
    _, monitor = both_sides()
    view = monitor.read()
    assert (view.doing, view.iteration, view.goodbye_call, view.left_call) == (Doing.OUTSIDE, -1, None, None)
    assert (view.watchdog_at, view.ping_at, view.heartbeat_at, view.step, view.step_at) == (None,) * 5
    assert (view.section_left_at, view.open_sections) == (None, ())
    assert monitor.drain() == ([], 0)
    assert monitor.collectives() == []


def test_seat_and_what_the_rank_does_are_seen() -> None:
    rank, monitor = both_sides()
    rank.set_seat(SEAT)
    rank.doing(Doing.HOOK, "finalize")
    view = monitor.read()
    assert (view.iteration, view.rank, view.world_size, view.active_world_size, view.initial_rank) == (0, 1, 4, 3, 2)
    assert (view.doing, view.hook) == (Doing.HOOK, "finalize")
    rank.doing(Doing.FUNCTION)
    later = monitor.read()
    assert (later.doing, later.hook) == (Doing.FUNCTION, "")
    assert later.since >= view.since > 0


def test_second_mapping_of_the_same_memory_sees_the_same() -> None:
    page = Page.create()
    RankSide(page).step(7)
    assert MonitorSide(Page.attach(os.dup(page.fd))).read().step == 7


def test_sign_of_each_kind_is_seen_alone() -> None:
    for sign, field in (("heartbeat", "heartbeat_at"), ("ping", "ping_at"), ("tick", "watchdog_at")):
        rank, monitor = both_sides()
        before = monitor.read()
        getattr(rank, sign)()
        after = monitor.read()
        changed = [name for name in after.__struct_fields__ if getattr(after, name) != getattr(before, name)]
        assert changed == [field]


def test_only_a_rise_of_the_step_is_progress() -> None:
    rank, monitor = both_sides()
    rank.step(0)
    first = monitor.read()
    assert (first.step, rank.step_value) == (0, 0)
    rank.step(0)
    assert monitor.read().step_at == first.step_at
    rank.step(3)
    rank.step(2)
    assert monitor.read().step == 3


def test_open_sections_are_seen_oldest_first_until_left() -> None:
    rank, monitor = both_sides()
    rank.enter("step")
    rank.enter("data")
    assert names(monitor) == ["step", "data"]
    assert monitor.read().section_left_at is None
    rank.leave("step")
    assert names(monitor) == ["data"]
    left_at = monitor.read().section_left_at  # a sign of life, though one is still open
    rank.leave("data")
    assert names(monitor) == []
    assert left_at is not None and (monitor.read().section_left_at or 0.0) > left_at


def test_section_that_ends_during_a_read_is_not_seen_as_ended_long_ago() -> None:
    rank, monitor = both_sides()
    rank.enter("load")
    rank.leave("load")
    rank.enter("checkpoint")

    class Words:
        """The rank's words. The rank leaves its section after its monitor has read the words before the slots."""

        def __getitem__(self, index: Any) -> Any:
            if not isinstance(index, slice):
                return rank._words[index]
            before = rank._words[:_OPEN].tolist()
            rank.leave("checkpoint")
            return memoryview(array("q", [*before, *rank._words[_OPEN : index.stop].tolist()]))

    before = monitor.read().section_left_at
    monitor._words = Words()  # type: ignore[assignment]
    view = monitor.read()
    assert view.open_sections == ()
    assert before is not None and view.section_left_at is not None and view.section_left_at > before


STORES = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_ATTR"}


def runs_without_interruption(writer: Any) -> list[list[dis.Instruction]]:
    """Return the parts of a function between two places at which CPython may run another thread or a signal handler."""
    parts: list[list[dis.Instruction]] = [[]]
    for instruction in dis.get_instructions(writer):
        if "CALL" in instruction.opname or "JUMP" in instruction.opname or instruction.is_jump_target:
            parts.append([])
        parts[-1].append(instruction)
    return parts


@pytest.mark.parametrize(
    "writer",
    [
        RankSide.enter,
        RankSide.leave_if_open,
        RankSide.step,
        RankSide.collective_entered,
        RankSide.doing,
        RankSide.asks_store,
        RankSide.store_answered,
        RankSide.set_seat,
        RankSide.forget_signs,
        RankSide.interrupt,
        RankSide._append,
        RankSide._begin_later,
        RankSide._sign_later,
        RankSide._forget_sections,
    ],
)
def test_no_other_thread_runs_between_the_first_and_the_last_store_of_a_writer(writer: Any) -> None:
    parts = runs_without_interruption(writer)
    writing = [
        part
        for part in parts
        if any(each.opname in STORES for each in part)
        and not any("ATTR" in each.opname and each.argval in ("longest", "longest_outside") for each in part)
    ]
    assert len(writing) == 1, [part[0].starts_line for part in writing]
    reading = [part for part in parts if any(each.argval in ("head", "_free") for each in part)]
    assert all(part in writing for part in reading), "it also reads there which place is the next one"


class Interrupted(Exception):
    pass


class FailingWords:
    """The words of a page, whose writer is interrupted after some stores."""

    def __init__(self, words: Any, stores: int) -> None:
        self.words = words
        self.stores = stores

    def __getitem__(self, index: Any) -> Any:
        return self.words[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.stores == 0:
            raise Interrupted
        self.stores -= 1
        self.words[index] = value


@pytest.mark.parametrize("stores", range(7))
def test_interrupted_page_write_never_gives_a_hook_the_start_time_of_the_function(
    monkeypatch: pytest.MonkeyPatch, stores: int
) -> None:
    hour = 3600.0
    clock = SimpleNamespace(
        seconds=1.0, monotonic_ns=lambda: int(clock.seconds * 1e9), monotonic=time.monotonic, sleep=lambda seconds: None
    )
    monkeypatch.setattr(page_module, "time", clock)
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    clock.seconds += hour
    rank._words = FailingWords(rank._words, stores)  # type: ignore[assignment]
    with suppress(Interrupted):
        rank.doing(Doing.HOOK, "abort")
    view = monitor.read()
    assert view.doing is Doing.FUNCTION or view.since == clock.seconds


class Clock:
    """The rank's clock, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(page_module, "time", self)
        self.sleep = time.sleep

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def durations(monitor: MonitorSide) -> dict[str, float]:
    return {
        entry.name or ("step" if entry.is_step else "heartbeat"): entry.duration
        for entry in monitor.drain()[0]
        if entry.duration and not entry.away
    }


def begin_function(rank: RankSide, clock: Clock) -> None:
    """The function shows all signs of life and opens a section. 5 s later it is left; another 100 s pass."""
    rank.doing(Doing.FUNCTION)
    rank.heartbeat()
    rank.step(1)
    rank.enter("data")
    rank.leave("data")
    rank.enter("epoch")
    clock.seconds += 5.0
    rank.doing(Doing.WAITING)
    clock.seconds += 100.0


def test_everything_that_lasts_over_a_wait_leaves_it_out(clock: Clock) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    rank.doing(Doing.HOOK, "initialize")
    clock.seconds += 10.0
    assert rank.ongoing() == (5e9, 0, {"epoch": 5e9})
    rank.doing(Doing.FUNCTION)
    clock.seconds += 2.0
    view, now = monitor.read(), clock.seconds
    times = (view.heartbeat_at, view.step_at, view.section_left_at, view.open_sections[0].entered_at)
    assert times == pytest.approx((now - 7.0,) * 4)
    rank.heartbeat()
    rank.step(2)
    rank.leave("epoch")
    assert durations(monitor) == {name: pytest.approx(7.0) for name in ("heartbeat", "step", "epoch")}
    assert (rank.longest["epoch"], rank.longest_gap) == (7e9, 7e9)


def test_what_ends_while_the_function_does_not_run_lasted_until_its_end(clock: Clock) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    rank.heartbeat()
    rank.step(2)
    rank.leave("epoch")
    assert durations(monitor) == {name: pytest.approx(5.0) for name in ("heartbeat", "step", "epoch")}


def test_time_outside_sections_that_a_hook_ends_lasted_until_the_end_of_the_function(clock: Clock) -> None:
    rank, _ = both_sides()
    rank.doing(Doing.FUNCTION)
    rank.enter("data")
    rank.leave("data")
    clock.seconds += 5.0
    rank.doing(Doing.WAITING)
    clock.seconds += 100.0
    rank.enter("hook")
    assert rank.longest_outside == 5e9


def test_section_in_a_hook_lasts_as_long_as_it_is_open(clock: Clock) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    rank.enter("load")
    clock.seconds += 3.0
    rank.leave("load")
    assert durations(monitor)["load"] == pytest.approx(3.0)


def test_what_a_hook_has_opened_counts_from_the_beginning_of_the_function(clock: Clock) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.HOOK, "initialize")
    rank.heartbeat()
    rank.enter("epoch")
    clock.seconds += 100.0
    rank.doing(Doing.FUNCTION)
    view = monitor.read()
    assert (view.heartbeat_at, view.open_sections[0].entered_at) == pytest.approx((clock.seconds,) * 2)


def test_section_over_an_interruption_has_failed_and_begins_anew_with_the_function(clock: Clock) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    rank.interrupt("epoch")
    rank.doing(Doing.FUNCTION)
    clock.seconds += 2.0
    rank.leave("epoch")
    (entry,) = [entry for entry in monitor.drain()[0] if entry.name == "epoch"]
    assert (entry.failed, entry.duration) == (True, pytest.approx(2.0))
    assert "epoch" not in rank.longest


def test_time_in_which_the_store_owes_an_answer_within_the_function_is_left_out(clock: Clock) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    rank.heartbeat()
    rank.enter("epoch")
    clock.seconds += 5.0
    rank.asks_store(1.0)
    clock.seconds += 100.0
    rank.store_answered()
    view = monitor.read()
    assert (view.heartbeat_at, view.open_sections[0].entered_at) == pytest.approx((clock.seconds - 6.0,) * 2)


def test_function_that_polls_the_store_for_ever_shows_no_life_by_that(clock: Clock) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    rank.heartbeat()
    rank.step(1)
    rank.enter("epoch")
    for _ in range(60):
        rank.asks_store(5.0)  # a wait with a timeout of 5 s
        clock.seconds += 5.5
        rank.store_answered()
    view = monitor.read()
    signs = (view.heartbeat_at, view.step_at, view.open_sections[0].entered_at)
    assert signs == pytest.approx((clock.seconds - 60 * 5.5,) * 3)


def test_signal_handler_that_raises_at_an_answer_of_the_store_leaves_none_due(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    rank.asks_store(1.0)
    clock.seconds += 100.0

    def interrupted(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(RankSide, "_leave_out", interrupted)
    with suppress(Interrupted):
        rank.store_answered()
    assert monitor.read().store_due_at is None


def test_section_over_an_interruption_begins_anew_once_and_has_failed_to_its_end(clock: Clock) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    rank.enter("epoch")
    rank.interrupt("epoch")
    for waited, runs in ((10.0, 3.0), (20.0, 4.0)):  # the second run ended by itself
        rank.doing(Doing.WAITING)
        clock.seconds += waited
        rank.doing(Doing.FUNCTION)
        clock.seconds += runs
    rank.leave("epoch")
    (closed,) = [entry for entry in monitor.drain()[0] if entry.name]
    assert (closed.duration, closed.failed) == (pytest.approx(7.0), True)


def test_section_that_a_thread_closes_beside_a_return_has_no_negative_duration(clock: Clock) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    slot, entered = rank._open["epoch"]
    rank._open["epoch"] = slot, entered + int(1e12)  # `now` of the thread is from before the function began again
    rank.leave("epoch")
    (closed,) = [entry for entry in monitor.drain()[0] if entry.name == "epoch"]
    assert closed.duration == 0.0


@pytest.mark.parametrize("stores", range(20))
def test_interrupted_end_of_a_wait_never_makes_a_section_seem_older_than_it_is(clock: Clock, stores: int) -> None:
    rank, monitor = both_sides()
    begin_function(rank, clock)
    words = rank._words
    rank._words = FailingWords(words, stores)  # type: ignore[assignment]
    with suppress(Interrupted):
        rank.doing(Doing.FUNCTION)
    rank._words = words
    rank.doing(Doing.FUNCTION)
    view = monitor.read()
    assert view.heartbeat_at is not None
    assert clock.seconds - 5.001 <= view.open_sections[0].entered_at <= clock.seconds
    assert clock.seconds - 5.001 <= view.heartbeat_at <= clock.seconds


@pytest.mark.parametrize("status", [0, 3, 255, -signal.SIGINT])
def test_exit_status_of_a_program_that_is_over_is_shown(status: int) -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.FUNCTION)
    assert monitor.read().exit_status is None
    rank.ends(status)
    view = monitor.read()
    assert (view.doing, view.exit_status) == (Doing.ENDING, status)


def test_exit_status_of_a_program_that_has_left_its_monitor_is_shown_and_no_limit_applies() -> None:
    rank, monitor = both_sides()
    rank.doing(Doing.OUTSIDE)
    rank.ends(3)
    view = monitor.read()
    assert (view.doing, view.exit_status) == (Doing.OUTSIDE, 3)


def test_leave_all_leaves_nothing_open() -> None:
    rank, monitor = both_sides()
    rank.enter("step")
    rank.enter("data")
    rank.leave_all()
    assert (names(monitor), rank.open_sections) == ([], ())


def test_new_iteration_forgets_the_signs_of_the_one_before() -> None:
    rank, monitor = both_sides()
    rank.set_seat(SEAT)
    rank.heartbeat()
    rank.ping()
    rank.step(12)
    rank.enter("left")
    rank.leave("left")
    rank.enter("stale")
    rank.set_seat(Seat(iteration=1, rank=0, world_size=3, active_world_size=3, initial_rank=2))
    view = monitor.read()
    assert (view.ping_at, view.heartbeat_at, view.step, view.step_at, view.section_left_at) == (None,) * 5
    assert view.open_sections == ()
    assert rank.step_value is None and "stale" not in rank.open_sections
    monitor.drain()
    rank.heartbeat()
    assert monitor.drain() == ([], 0)  # no gap from one iteration to the next
    for number in range(SECTIONS):
        rank.enter(f"section {number}")  # no slot was lost
    assert len(names(monitor)) == SECTIONS


@pytest.mark.parametrize("at", ["before", "meanwhile"])
def test_section_of_a_thread_may_end_when_the_main_thread_has_restarted(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, monitor = both_sides()
    rank.set_seat(SEAT)
    monkeypatch.setattr(client, "_page", rank)

    def restart() -> None:
        rank.set_seat(Seat(iteration=1, rank=1, world_size=4, active_world_size=3, initial_rank=2))
        rank.enter("batch")

    class Clock:
        """The clock that `leave` looks at. The main thread restarts at that moment."""

        monotonic = staticmethod(time.monotonic)

        def monotonic_ns(self) -> int:
            monkeypatch.setattr(page_module, "time", time)
            restart()
            return time.monotonic_ns()

    with client.section("batch"):
        if at == "before":
            restart()
        else:
            monkeypatch.setattr(page_module, "time", Clock())
    assert names(monitor) == ["batch"]
    rank.leave("batch")
    for number in range(SECTIONS):
        rank.enter(f"section {number}")  # no slot was lost
    assert len(names(monitor)) == SECTIONS


@pytest.mark.parametrize(
    ("doing", "answered_at", "since"),
    [
        (Doing.WAITING, 13.0, 13.0),  # asked at 10 s, which is also when the activity began: nothing of the wait counts
        (Doing.HOOK, 13.0, 10.0),  # the wait was allowed to take 5 s: all of it counts
        (Doing.HOOK, 17.0, 12.0),  # 2 s of lateness do not
    ],
)
def test_wait_for_the_store_counts_towards_a_hook_only_until_the_answer_is_due(
    monkeypatch: pytest.MonkeyPatch, doing: Doing, answered_at: float, since: float
) -> None:
    rank, monitor = both_sides()
    clock = SimpleNamespace(monotonic_ns=lambda: int(now * 1e9))
    monkeypatch.setattr(page_module, "time", clock)
    now = 10.0
    rank.doing(doing, "finalize" if doing is Doing.HOOK else "")
    rank.asks_store(5.0)
    assert monitor.read().store_due_at == pytest.approx(15.0)
    now = answered_at
    rank.store_answered()
    view = monitor.read()
    assert (view.since, view.watchdog_at) == pytest.approx((since, answered_at))
    assert view.store_due_at is None


def test_goodbye_and_leaving_name_their_call() -> None:
    rank, monitor = both_sides()
    rank.leave_call(0)
    assert (monitor.read().goodbye_call, monitor.read().left_call) == (None, 0)
    rank.say_goodbye(3)
    rank.leave_call(4)
    assert (monitor.read().goodbye_call, monitor.read().left_call) == (3, 4)


def test_each_kind_of_progress_calls_on_progress_once() -> None:
    rank, _ = both_sides()
    told: list[str] = []
    rank.on_progress = told.append
    rank.heartbeat()
    rank.step(1)
    rank.ping()
    rank.enter("data")
    rank.leave("data")
    rank.tick()
    assert told == ["heartbeat", "step", "ping", "section"]


def test_interruption_in_on_progress_leaves_no_section_open() -> None:
    rank, monitor = both_sides()

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    rank.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        rank.enter("data")
    assert (names(monitor), rank.open_sections) == ([], ())


# -- rings --------------------------------------------------------------------------------------------


def test_finished_sections_and_heartbeat_gaps_are_drained_once_in_order() -> None:
    rank, monitor = both_sides()
    rank.heartbeat()
    rank.enter("data")
    rank.leave("data")
    rank.heartbeat()
    rank.enter("step")
    rank.leave("step", failed=True)
    entries, lost = monitor.drain()
    assert [(entry.name, entry.failed) for entry in entries] == [("data", False), ("", False), ("step", True)]
    assert lost == 0
    assert all(0 <= entry.duration < 60 and entry.at > 0 for entry in entries)
    assert monitor.drain() == ([], 0)


@pytest.mark.parametrize("sign", ["heartbeat", "step"])
def test_heartbeat_or_step_inside_a_signal_handler_makes_no_negative_duration(
    monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    rank, monitor = both_sides()
    numbers = iter(range(100))

    def show() -> None:
        rank.heartbeat() if sign == "heartbeat" else rank.step(next(numbers))

    class Interrupting:
        """A clock. A signal handler runs after the first call, before its caller stores the time."""

        handlers = 0

        def monotonic_ns(self) -> int:
            now = time.monotonic_ns()
            if not self.handlers:
                self.handlers = 1
                show()
            return now

    show()
    monkeypatch.setattr(page_module, "time", Interrupting())
    rank.heartbeat() if sign == "heartbeat" else rank.step(50)
    entries, _ = monitor.drain()
    assert len(entries) >= 2
    assert all(entry.duration >= 0.0 for entry in entries), entries


def test_each_step_tells_by_how_much_the_number_rose() -> None:
    rank, monitor = both_sides()
    for number in (0, 10, 15, 1 << 40):
        rank.step(number)
    entries, _ = monitor.drain()
    assert [(entry.is_step, entry.failed, entry.rise) for entry in entries[1:]] == [
        (True, False, 10),
        (True, False, 5),
        (True, False, MOST_RISE),
    ]


def test_step_of_any_integer_type_is_one() -> None:
    torch = pytest.importorskip("torch")
    page = Page.create()
    rank, monitor = RankSide(page), MonitorSide(page)
    for number in range(3):
        rank.step(torch.tensor(number, dtype=torch.int32))
    assert monitor.read().step == 2
    entries, _ = monitor.drain()
    assert [entry.rise for entry in entries] == [1, 1, 1]


def test_each_higher_step_is_drained_once_with_the_time_since_the_one_before() -> None:
    rank, monitor = both_sides()
    for number in (3, 3, 2, 5):
        rank.step(number)
    entries, _ = monitor.drain()
    assert [(entry.name, entry.is_step) for entry in entries] == [("", True), ("", True)]
    first, second = entries
    assert first.duration == 0
    # Both times are of a clock that has run for hours, so their difference has lost a few bits.
    assert second.duration == pytest.approx(second.at - first.at, abs=1e-9)


def test_overrun_of_the_ring_is_counted_and_the_newest_are_kept() -> None:
    rank, monitor = both_sides()
    total = RING + 10
    for number in range(total):
        rank.enter(f"section {number % 50}")
        rank.leave(f"section {number % 50}")
    entries, lost = monitor.drain()
    assert len(entries) + lost == total
    # The place that the writer comes to next is never believed, since it may be at work there.
    assert len(entries) == RING - 1
    assert entries[-1].name == f"section {(total - 1) % 50}"
    assert entries[0].name == f"section {lost % 50}"
    assert monitor.drain() == ([], 0)


def test_collectives_tell_which_one_the_rank_is_in() -> None:
    rank, monitor = both_sides()
    first = rank.collective_entered(0, 41, "all_reduce")
    rank.collective_left(first)
    rank.collective_entered(1, 7, "barrier")
    done, inside = monitor.collectives()
    assert (done.group, done.sequence, done.operation) == (0, 41, "all_reduce")
    assert done.left_at is not None and done.left_at >= done.entered_at
    assert (inside.group, inside.sequence, inside.operation, inside.left_at) == (1, 7, "barrier", None)


def test_collective_that_is_forgotten_cannot_end_another() -> None:
    rank, monitor = both_sides()
    stuck = rank.collective_entered(0, 0, "all_reduce")
    for number in range(1, COLLECTIVES + 1):
        rank.collective_entered(0, number, "all_reduce")
    rank.collective_left(stuck)
    entries = monitor.collectives()
    assert all(entry.left_at is None for entry in entries)
    assert [entry.sequence for entry in entries] == list(range(2, COLLECTIVES + 1))


# -- names --------------------------------------------------------------------------------------------


def test_long_name_is_cut_at_a_whole_character() -> None:
    rank, monitor = both_sides()
    rank.enter("a" + "é" * NAME_BYTES)
    assert names(monitor) == ["a" + "é" * ((NAME_BYTES - 1) // 2)]
    rank.leave("a" + "é" * NAME_BYTES)


def test_names_beyond_the_table_share_the_last_place() -> None:
    rank, monitor = both_sides()
    for number in range(NAMES + 20):
        rank.enter(f"name {number}")
        rank.leave(f"name {number}")
    rank.enter("name 3")
    rank.enter("one more")
    assert names(monitor) == ["name 3", "(more)"]
    entries, _ = monitor.drain()
    assert [entry.name for entry in entries[NAMES - 2 : NAMES + 1]] == [f"name {NAMES - 2}", "(more)", "(more)"]


@pytest.mark.parametrize(("name", "error"), [("", ConfigurationError), (5, ConfigurationTypeError)])
def test_name_that_is_none_is_refused(name: str, error: type[Exception]) -> None:
    rank, monitor = both_sides()
    with pytest.raises(error, match="name must"):
        rank.enter(name)
    assert names(monitor) == []


def test_name_that_is_not_unicode_is_escaped() -> None:
    rank, monitor = both_sides()
    rank.enter("data \udcff")
    assert names(monitor) == ["data \\udcff"]


# -- misuse -------------------------------------------------------------------------------------------


def test_section_opened_twice_is_refused() -> None:
    rank, monitor = both_sides()
    rank.enter("data")
    with pytest.raises(ConfigurationError, match="section 'data' is already open"):
        rank.enter("data")
    assert names(monitor) == ["data"]
    rank.leave("data")
    rank.enter("data")  # not for good


def test_section_that_is_not_open_cannot_be_left() -> None:
    rank, _ = both_sides()
    rank.enter("data")
    with pytest.raises(ConfigurationError, match=r"'step' cannot be closed: it is not open; open sections: \['data'\]"):
        rank.leave("step")


def test_too_many_open_sections_are_refused() -> None:
    rank, monitor = both_sides()
    for number in range(SECTIONS):
        rank.enter(f"section {number}")
    with pytest.raises(ConfigurationError, match=f"{SECTIONS} sections are already open"):
        rank.enter("one more")
    assert len(names(monitor)) == SECTIONS


def test_page_of_another_layout_is_refused() -> None:
    page = Page.create()
    page.words[0] += 1
    with pytest.raises(MonitorError, match="layout"):
        Page.attach(page.fd)


def test_memory_that_is_no_page_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        with pytest.raises(MonitorError, match=f"has 0 bytes, expected {SIZE}"):
            Page.attach(fd)
    finally:
        os.close(fd)


# -- any order ----------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from("abcdef")),
        st.tuples(st.just("leave"), st.sampled_from("abcdef")),
        st.tuples(st.just("heartbeat"), st.just("")),
        st.tuples(st.just("step"), st.integers(0, 9)),
        st.tuples(st.just("seat"), st.integers(0, 9)),
        st.tuples(st.just("drain"), st.just("")),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_page_follows_a_simple_model_over_any_sequence_of_calls(operations: list[tuple[str, int | str]]) -> None:
    rank, monitor = both_sides()
    opened: list[str] = []
    finished: list[str] = []
    step: int | None = None
    has_beaten = False
    for operation, value in operations:
        match operation, value:
            case "enter", str(name) if name in opened:
                with pytest.raises(ConfigurationError):
                    rank.enter(name)
            case "enter", str(name):
                rank.enter(name)
                opened.append(name)
            case "leave", str(name) if name not in opened:
                with pytest.raises(ConfigurationError):
                    rank.leave(name)
            case "leave", str(name):
                rank.leave(name)
                opened.remove(name)
                finished.append(name)
            case "heartbeat", _:
                rank.heartbeat()
                if has_beaten:
                    finished.append("")
                has_beaten = True
            case "step", int(number):
                rank.step(number)
                if step is None or number > step:
                    finished.append("")
                    step = number
            case "seat", int(number):
                rank.set_seat(Seat(0, 0, 1, 1, iteration=number))
                opened, step, has_beaten = [], None, False
                finished.append(f"begins {number}")
            case "drain", _:
                entries, lost = monitor.drain()
                kinds = [entry.name if entry.begins is None else f"begins {entry.begins}" for entry in entries]
                assert (kinds, lost) == (finished, 0)
                finished = []
        view = monitor.read()
        assert [section.name for section in view.open_sections] == opened == list(rank.open_sections)
        assert view.step == step
        assert (view.heartbeat_at is not None) is has_beaten


# -- what user code calls -----------------------------------------------------------------------------


@pytest.fixture
def reached() -> Iterator[MonitorSide]:
    """The page that user code reaches during a test."""
    rank, monitor = both_sides()
    client.activate(rank)
    yield monitor
    client.deactivate()


def test_user_code_outside_a_call_reaches_nothing_and_runs_on() -> None:
    client.heartbeat()
    client.step(3)
    with client.section("data"):
        with client.section("data"):  # not even checked: a script runs without us as it would with us gone
            pass


def test_user_code_reaches_the_page_of_its_call(reached: MonitorSide) -> None:
    client.heartbeat()
    client.step(3)
    with client.section("data"):
        assert names(reached) == ["data"]
    view = reached.read()
    assert (view.step, view.heartbeat_at is None, view.open_sections) == (3, False, ())


def test_exception_closes_its_section_as_failed(reached: MonitorSide) -> None:
    with pytest.raises(KeyError):
        with client.section("data"):
            raise KeyError
    assert [(entry.name, entry.failed) for entry in reached.drain()[0]] == [("data", True)]


def test_section_entered_twice_fails_where_it_is_entered(reached: MonitorSide) -> None:
    with client.section("data"):
        with pytest.raises(ConfigurationError):
            with client.section("data"):
                raise AssertionError("not entered")
        assert names(reached) == ["data"]


def test_section_is_closed_where_it_was_opened(reached: MonitorSide) -> None:
    with client.section("data"):
        client.deactivate()
    assert names(reached) == []


def test_section_of_an_iteration_that_is_over_is_left_without_a_word(reached: MonitorSide) -> None:
    section = client.section("data")
    section.__enter__()
    assert client._page is not None
    client._page.set_seat(SEAT)
    section.__exit__(None, None, None)
    entries, _ = reached.drain()
    assert [entry.begins for entry in entries] == [SEAT.iteration]


# -- what the rank itself remembers -------------------------------------------------------------------


def test_longest_durations_are_those_that_the_monitor_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, monitor = both_sides()
    clock = accumulate(pause for pause in (1, 3, 2, 1) for _ in range(5))  # of each of the five calls of a round
    monkeypatch.setattr(page_module, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    for _ in range(4):
        rank.heartbeat()
        rank.enter("data")
        rank.enter("step")
        rank.leave("data")
        rank.leave("step")
    closed, _ = monitor.drain()
    seen = {name: max(entry.duration for entry in closed if entry.name == name) for name in ("", "data", "step")}
    assert {name: taken * 1e-9 for name, taken in rank.longest.items()} == {
        name: pytest.approx(seen[name]) for name in ("data", "step")
    }
    assert rank.longest_gap * 1e-9 == pytest.approx(seen[""])
    assert 0 < rank.longest_outside < rank.longest_gap
    assert rank.first_heartbeat > 0


def test_section_that_an_exception_left_has_no_duration_worth_keeping() -> None:
    rank, _ = both_sides()
    rank.enter("data")
    rank.leave("data", failed=True)
    assert rank.longest == {}
