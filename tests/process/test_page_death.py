"""The page across processes: it outlives its rank, tells of its death, and belongs to nobody else."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import pytest

from resilience.core.observation import Doing
from resilience.errors import ConfigurationError
from resilience.facts.seats import Seat
from resilience.monitor import client
from resilience.monitor import page as page_module
from resilience.monitor.page import SIZE, MonitorSide, Page, RankSide
from tests.process.children import LIMIT, child, hear, hold

SEQUENCE = 1  # the word that is odd while a state is being written
SHORT = 0.05  # seconds: how long a monitor waits for the death of a rank that lives


def seat(iteration: int, rank: int = 0, world_size: int = 1) -> Seat:
    return Seat(initial_rank=rank, rank=rank, world_size=world_size, active_world_size=world_size, iteration=iteration)


@pytest.fixture
def page() -> Page:
    return Page.create()


# -- death --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_killed_rank_is_noticed_and_its_page_can_still_be_read(page: Page, number: signal.Signals) -> None:
    def body(line: Connection) -> None:
        rank = RankSide(page)
        rank.lock_life()
        rank.set_seat(seat(2))
        rank.doing(Doing.FUNCTION)
        rank.step(17)
        rank.enter("data")
        hold(line)

    monitor = MonitorSide(page)
    with child(body) as rank:
        rank.hear()
        assert not monitor.wait_for_death(SHORT)
        rank.send_signal(number)
        assert monitor.wait_for_death(LIMIT)
        assert os.WTERMSIG(rank.wait()) == number
    view = monitor.read()
    assert (view.iteration, view.doing, view.step, view.goodbye_call) == (2, Doing.FUNCTION, 17, None)
    assert [section.name for section in view.open_sections] == ["data"]
    assert monitor.wait_for_death(0.0)  # and it stays dead


def test_rank_that_leaves_says_goodbye_first(page: Page) -> None:
    def body(line: Connection) -> None:
        rank = RankSide(page)
        rank.lock_life()
        rank.say_goodbye(0)

    monitor = MonitorSide(page)
    with child(body):
        assert monitor.wait_for_death(LIMIT)
    assert monitor.read().goodbye_call == 0


def test_rank_that_has_not_locked_its_page_yet_is_not_taken_for_dead(page: Page) -> None:
    def body(line: Connection) -> None:
        rank = RankSide(page)
        hold(line, "started")
        rank.lock_life()
        hold(line, "locked")

    monitor = MonitorSide(page)
    with child(body) as rank:
        rank.hear()
        assert not monitor.wait_for_death(SHORT)
        rank.tell()
        assert rank.hear() == "locked"
        assert not monitor.wait_for_death(SHORT)
        rank.tell()
        assert monitor.wait_for_death(LIMIT)


def test_stopped_rank_is_not_dead(page: Page) -> None:
    def body(line: Connection) -> None:
        RankSide(page).lock_life()
        hold(line)

    monitor = MonitorSide(page)
    with child(body) as rank:
        rank.hear()
        rank.send_signal(signal.SIGSTOP)
        assert not monitor.wait_for_death(SHORT)
        rank.send_signal(signal.SIGCONT)
        rank.tell()
        assert monitor.wait_for_death(LIMIT)


def test_rank_that_becomes_another_program_is_gone(page: Page) -> None:
    def body(line: Connection) -> None:
        RankSide(page).lock_life()
        hold(line)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])

    monitor = MonitorSide(page)
    with child(body) as rank:
        rank.hear()
        rank.tell()
        assert monitor.wait_for_death(LIMIT)


def test_death_is_told_to_every_monitor_in_turn(page: Page) -> None:
    def body(line: Connection) -> None:
        RankSide(page).lock_life()

    with child(body) as rank:
        rank.wait()
    assert MonitorSide(page).wait_for_death(LIMIT)
    assert MonitorSide(Page.attach(page.fd)).wait_for_death(LIMIT)


def test_exception_at_any_point_of_the_lock_leaves_the_process_able_to_attach_again() -> None:
    """Such as a signal handler's. The thread's list of locks must not run through memory that is no longer mapped."""

    class Interrupt(BaseException):
        pass

    def attach() -> None:
        page = Page.create()
        rank = RankSide(page)
        page.close()
        rank.lock_life()

    def interrupted_at(point: int) -> bool:
        points = itertools.count()

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename != page_module.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and is_locking(frame) and next(points) == point:
                raise Interrupt
            return trace

        sys.settrace(trace)
        try:
            attach()
        except Interrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def is_locking(frame: FrameType | None) -> bool:
        return frame is not None and (frame.f_code is RankSide.lock_life.__code__ or is_locking(frame.f_back))

    def body(line: Connection) -> None:
        written = []
        for point in itertools.count():
            if not interrupted_at(point):
                break
            others = mmap.mmap(-1, SIZE)  # takes the page's place if that was unmapped
            attach()
            if any(others[:]):
                written.append(point)
        line.send((point, written))

    with child(body) as rank:
        points, written = rank.hear()
        assert points > 20 and written == []


# -- children of the rank ------------------------------------------------------------------------------


def test_forked_child_of_a_rank_writes_into_no_page_and_its_end_is_no_death(page: Page) -> None:
    """A DataLoader's worker inherits everything its rank had open."""

    def worker(line: Connection) -> None:
        client.heartbeat()
        client.step(99)
        hear(line)
        with contextlib.suppress(ConfigurationError):
            client.section("mine").__enter__()

    def body(line: Connection) -> None:
        rank = RankSide(page)
        rank.lock_life()
        client.activate(rank)
        client.step(1)
        told: list[str] = []
        rank.on_progress = told.append
        section = client.section("data")
        section.__enter__()
        beat = rank.heartbeat

        def inherit(line: Connection) -> None:
            beat()
            rank.ping()
            rank.doing(Doing.WAITING)
            rank.say_goodbye(0)
            section.__exit__(None, None, None)  # the section that its parent has open
            line.send(told)
            worker(line)

        with child(inherit) as inner:
            assert inner.hear() == ["section"]  # nothing is told in its name
            inner.tell()
            assert inner.wait() == 0
        hold(line)

    monitor = MonitorSide(page)
    with child(body) as rank:
        rank.hear()
        assert not monitor.wait_for_death(SHORT)
        view = monitor.read()
        rank.tell()
        assert monitor.wait_for_death(LIMIT)
    assert (view.step, view.heartbeat_at, view.ping_at, view.doing) == (1, None, None, Doing.OUTSIDE)
    assert view.goodbye_call is None
    assert [section.name for section in view.open_sections] == ["data"]
    finished, lost = monitor.drain()
    assert ([entry.is_step for entry in finished], lost) == ([True], 0)  # the rank's own step


def test_program_started_by_a_rank_holds_neither_its_page_nor_its_life(page: Page) -> None:
    def body(line: Connection) -> None:
        RankSide(page).lock_life()
        listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
        line.send(listing.stdout)
        hear(line)

    monitor = MonitorSide(page)
    with child(body) as rank:
        listing = rank.hear()
        assert "pipe:" in listing and "resilience-page" not in listing
        assert not monitor.wait_for_death(SHORT)


# -- writers that are cut off --------------------------------------------------------------------------


def test_reader_never_sees_half_a_state(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(line: Connection) -> None:
        rank = RankSide(page)
        for number in itertools.count(1):
            if line.poll():
                break
            rank.set_seat(seat(number, rank=number, world_size=number))
            rank.step(number)
            sum(range(1000))  # a rank that did nothing but write would never let a reader through

    monkeypatch.setattr(page_module, "_READS", 10**6)  # it gives up on a rank that is cut off, not on a slow one
    monitor = MonitorSide(page)
    seen: set[int] = set()
    with child(body) as rank:
        while len(seen) < 100 or max(seen) < 50_000:
            assert not rank.line.poll()  # it writes on
            view = monitor.read()
            seen.add(view.iteration)
            if view.iteration > 0:
                assert {view.rank, view.world_size, view.initial_rank} == {view.iteration}
                assert view.step in (None, view.iteration)
        rank.tell()
        assert rank.wait() == 0


def test_interrupts_raised_anywhere_leave_page_and_rank_in_agreement(page: Page) -> None:
    """A handler that raises, as the interrupt of a restart does, thousands of times in tight loops."""

    class Interrupt(BaseException):
        pass

    def raise_interrupt(*_: object) -> None:
        raise Interrupt

    def body(line: Connection) -> None:
        rank, monitor = RankSide(page), MonitorSide(page)
        signal.signal(signal.SIGALRM, raise_interrupt)
        interrupts, disagreements = 0, []
        for round_number in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + round_number % 100 * 1e-6)
                while True:
                    rank.enter("outer")
                    rank.heartbeat()
                    rank.doing(Doing.HOOK, "hook")
                    rank.enter("inner")
                    rank.leave("outer")
                    rank.leave("inner", failed=True)
            except Interrupt:
                interrupts += 1
            except ConfigurationError as error:
                disagreements.append(str(error))
            signal.setitimer(signal.ITIMER_REAL, 0)
            shown = {section.name for section in monitor.read().open_sections}
            if shown != set(rank.open_sections):
                disagreements.append(f"shown {shown}, known {rank.open_sections}")
            if page.words[SEQUENCE] % 2:
                disagreements.append("left in the middle of writing")
            entries, _ = monitor.drain()
            disagreements.extend(str(entry) for entry in entries if entry.failed != (entry.name == "inner"))
            rank.leave_all()
            monitor.drain()
        line.send((interrupts, disagreements[:5]))
        hear(line)

    with child(body) as rank:
        interrupts, disagreements = rank.hear()
    assert disagreements == []
    assert interrupts > 2000


def test_rank_killed_while_it_writes_can_still_be_read(page: Page) -> None:
    page.words[SEQUENCE] += 1  # as a rank leaves it that dies between the two
    assert MonitorSide(page).read().doing is Doing.OUTSIDE
    rank = RankSide(page)
    rank.doing(Doing.WAITING)
    assert page.words[SEQUENCE] % 2 == 0  # the next writer puts it right
    assert MonitorSide(page).read().doing is Doing.WAITING
