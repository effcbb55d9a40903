"""Where a program's signs of life go: to a Wrapper's page, to the launcher's, or nowhere."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from resilience.core.observation import Doing
from resilience.errors import MonitorError, RankMonitorClientError
from resilience.facts.limits import Limit, Limits, Rule
from resilience.facts.seats import Seat
from resilience.monitor import client, connect, messages
from resilience.monitor.listening import Listener
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.monitor.rank_client import RankMonitorClient
from resilience.system import collective_calls
from resilience.system.channel import Channel, pair

LIMIT = 60.0  # seconds
Linked = tuple[connect.WorkerLink, MonitorSide, Channel]


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not used the client yet."""
    monkeypatch.delenv("RESILIENCE_MONITOR_SOCKET", raising=False)
    for name, value in (
        ("_page", None),
        ("_launcher_link", None),
        ("_look_at", -math.inf),
        ("_failed_looks", 0),
        ("_checks_for_stop", False),
    ):
        monkeypatch.setattr(client, name, value)
    monkeypatch.setattr(connect, "_link", None)
    monkeypatch.setattr(connect, "wrapper_page", None)


@pytest.fixture
def linked(untouched: None) -> Iterator[Linked]:
    """A link to the launcher's monitor, as if it had been attached."""
    page = Page.create()
    ours, theirs = pair()
    link = connect.WorkerLink(RankSide(page), ours, messages.Welcome(rank=1, world_size=4, limits=Limits()))
    link.resume()
    connect._link = link
    connect.on_change(link)
    yield link, MonitorSide(page), theirs
    ours.close()
    theirs.close()


def heard(line: Channel) -> list[messages.FromRank]:
    found = []
    while (data := line.receive(0.0)) is not None:
        found.append(messages.decode_for_monitor(data))
    return found


def test_signs_go_nowhere_without_a_monitor() -> None:
    client.heartbeat()
    client.step(1)
    with client.section("data"):
        pass
    assert connect.current() is None


def test_monitor_that_cannot_be_reached_is_tried_once_and_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def attach() -> connect.WorkerLink:
        tried.append(1)
        raise MonitorError("gone")

    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.setattr(connect, "attach", attach)
    for number in range(3):
        client.step(number)
    assert tried == [1]


def test_monitor_that_did_not_answer_is_tried_again_briefly_and_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, tried = [1000.0], []

    def attach(**limits: float) -> connect.WorkerLink:
        tried.append((now[0] - 1000.0, limits))
        raise MonitorError("no answer")

    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.setattr(connect, "attach", attach)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(250):
        client.heartbeat()
        now[0] += 1.0
    brief = {"limit": client.LOOK_LIMIT, "turn_limit": client.LOOK_LIMIT}
    assert tried == [(0.0, {}), (client.LOOK_AGAIN, brief), (3 * client.LOOK_AGAIN, brief)]


def test_worker_of_a_data_loader_that_is_not_forked_does_not_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach() -> connect.WorkerLink:
        raise AssertionError

    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.setattr(connect, "attach", attach)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    client.step(1)
    client.heartbeat()
    with client.section("load"):
        pass
    assert not client.stop_requested()


@pytest.mark.parametrize("is_reached", [True, False])
def test_heartbeat_of_a_signal_handler_while_the_program_attaches_neither_waits_nor_gives_up(
    is_reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page.create()
    ours, theirs = pair()
    link = connect.WorkerLink(RankSide(page), ours, messages.Welcome(rank=0, world_size=1, limits=Limits()))
    attempts = []

    def attach(path: str, deadline: float, turn_limit: float) -> connect.WorkerLink:
        attempts.append(path)
        if len(attempts) == 1:
            client.heartbeat()  # as a signal handler of this thread would
            if not is_reached:
                raise MonitorError("gone")
        return link

    def begin() -> None:
        with contextlib.nullcontext() if is_reached else pytest.raises(RankMonitorClientError):
            RankMonitorClient().init_workload_monitoring()
        client.heartbeat()

    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.setattr(connect, "_attach", attach)
    monkeypatch.setattr(connect, "_note_the_end", lambda link: None)
    program = threading.Thread(target=begin, daemon=True)
    program.start()
    program.join(LIMIT)
    assert not program.is_alive()
    assert (connect.current(), len(attempts)) == (link, 1 if is_reached else 2)
    assert MonitorSide(page).read().heartbeat_at is not None
    ours.close()
    theirs.close()


def test_signs_reach_the_launchers_monitor(linked: Linked) -> None:
    _, monitor, _ = linked
    client.heartbeat()
    client.step(5)
    with client.section("data"):
        assert [section.name for section in monitor.read().open_sections] == ["data"]
    view = monitor.read()
    assert (view.doing, view.rank, view.world_size, view.step) == (Doing.FUNCTION, 1, 4, 5)
    assert view.heartbeat_at is not None


def test_wrapper_takes_the_signs_while_its_function_runs_and_gives_them_back(linked: Linked) -> None:
    _, launchers, _ = linked
    page = Page.create()
    wrappers = MonitorSide(page)
    client.step(1)
    client.activate(RankSide(page))
    client.step(2)
    assert (wrappers.read().step, launchers.read().doing) == (2, Doing.OUTSIDE)  # the launcher's weighs nothing
    client.deactivate()
    view = launchers.read()
    assert (view.doing, view.step, view.step_at) == (Doing.FUNCTION, None, None)  # what is old is no silence
    client.step(3)
    assert (wrappers.read().step, launchers.read().step) == (2, 3)


def test_program_that_sends_heartbeats_itself_is_weighed_inside_of_a_wrapper_too(linked: Linked) -> None:
    link, launchers, line = linked
    link.arm()
    (armed,) = heard(line)
    assert isinstance(armed, messages.Armed)
    client.activate(RankSide(Page.create()))
    assert launchers.read().doing is Doing.OUTSIDE  # it waits for the others
    client.function_entered()
    assert launchers.read().doing is Doing.FUNCTION
    link.page.heartbeat()
    client.deactivate()
    assert launchers.read().heartbeat_at is not None


def test_announced_heartbeats_stay_announced_when_the_monitor_misses_a_second_announcement(linked: Linked) -> None:
    link, launchers, line = linked
    assert link.arm()
    line.close()
    assert not link.arm()
    client.activate(RankSide(Page.create()))
    assert launchers.read().doing is Doing.OUTSIDE  # it waits for the others
    client.function_entered()
    assert launchers.read().doing is Doing.FUNCTION


@pytest.mark.parametrize("is_attached_before", [True, False])
def test_program_that_announces_heartbeats_within_a_wrapper_is_watched_from_then_on(
    linked: Linked, is_attached_before: bool
) -> None:
    link, launchers, _ = linked
    if is_attached_before:
        client.step(1)
    else:
        connect.on_change(None)
    client.activate(RankSide(Page.create()))
    if not is_attached_before:
        connect.on_change(link)
    assert launchers.read().doing is Doing.OUTSIDE
    link.arm()
    assert launchers.read().doing is Doing.FUNCTION
    client.deactivate()
    assert launchers.read().doing is Doing.FUNCTION


def test_ended_link_leaves_nothing_to_be_weighed_and_is_not_looked_for_again(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, monitor, line = linked
    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    link.end()
    link.end()
    assert (connect.current(), monitor.read().doing) == (None, Doing.OUTSIDE)
    client.step(1)
    assert monitor.read().step is None
    assert heard(line) == [messages.EndedMonitoring()]


@pytest.fixture
def sigterm_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_takes_sigterm", True)


@pytest.mark.usefixtures("sigterm_taken")
def test_stop_of_the_job_is_seen_after_a_client_has_left(linked: Linked) -> None:
    link, monitor, _ = linked
    link.end()
    assert not client.stop_requested()
    assert monitor.request_stop()
    assert client.stop_requested()


@pytest.mark.usefixtures("sigterm_taken")
def test_page_of_a_later_client_shows_that_the_program_checks_for_a_stop(linked: Linked) -> None:
    client.stop_requested()
    page, (ours, theirs) = Page.create(), pair()
    connect.on_change(connect.WorkerLink(RankSide(page), ours, messages.Welcome(1, 4, Limits())))
    assert MonitorSide(page).request_stop()
    ours.close()
    theirs.close()


def test_section_that_was_opened_before_a_wrapper_is_closed_where_it_was_opened(linked: Linked) -> None:
    _, launchers, _ = linked
    with client.section("epoch"):
        client.activate(RankSide(Page.create()))
        client.deactivate()
    assert launchers.read().open_sections == ()


# -- a RankMonitorClient within a Wrapper's call -----------------------------------------------------


@pytest.fixture
def wrapped(linked: Linked) -> tuple[RankMonitorClient, MonitorSide]:
    """A client that begins within a Wrapper's call, and the Wrapper's monitor."""
    page = Page.create()
    client.activate(RankSide(page))
    own = RankMonitorClient()
    own.init_workload_monitoring()
    return own, MonitorSide(page)


def open_in(monitor: MonitorSide) -> list[str]:
    return [section.name for section in monitor.read().open_sections]


def test_signs_of_a_client_within_a_wrapper_reach_both_monitors(
    linked: Linked, wrapped: tuple[RankMonitorClient, MonitorSide]
) -> None:
    own, wrappers = wrapped
    for monitor in (wrappers, linked[1]):
        own.send_heartbeat()
        own.start_section("validation")
        own.start_section("save")
        own.send_heartbeat()
        assert open_in(monitor) == ["validation", "save"]
        own.end_section("validation")
        own.discard_section("save")
        assert open_in(monitor) == []
        entries = [(entry.name, entry.failed) for entry in monitor.drain()[0] if entry.begins is None]
        assert entries[-3:] == [("", False), ("validation", False), ("save", True)]
        assert monitor.read().heartbeat_at is not None
    client.deactivate()
    before = wrappers.read()
    own.send_heartbeat()
    own.start_section("validation")
    assert wrappers.read() == before and open_in(linked[1]) == ["validation"]


def test_silence_in_a_wrapper_ends_with_a_heartbeat_of_a_client(
    wrapped: tuple[RankMonitorClient, MonitorSide],
) -> None:
    """A validation of more than ten minutes, with a heartbeat after each batch, is no hang."""
    own, wrappers = wrapped
    page = connect.wrapper_page
    assert page is not None
    page.set_seat(Seat(0, 0, 1, 1, 0))
    page.doing(Doing.FUNCTION)
    client.step(1)
    own.start_section("validation")
    own.send_heartbeat()
    listener, view = Listener(), wrappers.read()
    listener.take(wrappers.drain()[0], view, is_healthy=True)
    silence = listener.silence(Rule(), view.since)
    assert silence is not None and silence.since == view.heartbeat_at


def test_client_that_shuts_down_within_a_wrapper_leaves_no_limit_there_either(
    wrapped: tuple[RankMonitorClient, MonitorSide],
) -> None:
    own, wrappers = wrapped
    page = connect.wrapper_page
    assert page is not None
    page.set_seat(Seat(0, 0, 1, 1, 0))
    page.doing(Doing.FUNCTION)
    for _ in range(2):
        own.send_heartbeat()
        own.start_section("save")
        own.end_section("save")
    listener = Listener()
    listener.take(wrappers.drain()[0], wrappers.read(), is_healthy=True)
    assert listener.silence(Rule(), 0.0) is not None
    own.shutdown_workload_monitoring()
    view = wrappers.read()
    assert view.last_sign_at is None
    listener.take(wrappers.drain()[0], view, is_healthy=True)
    assert listener.silence(Rule(), 0.0) is None


def test_collectives_stay_on_the_wrappers_page_if_a_client_shuts_down(
    linked: Linked, wrapped: tuple[RankMonitorClient, MonitorSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[object] = []
    monkeypatch.setattr(collective_calls, "note_in", noted.append)
    wrapped[0].shutdown_workload_monitoring()
    assert set(noted) <= {connect.wrapper_page}
    client.deactivate()
    assert noted[-1] is linked[0].page  # the monitor may ask which ones this rank has entered


def test_client_closes_no_section_that_the_program_has_opened_itself_in_a_wrapper(
    linked: Linked, wrapped: tuple[RankMonitorClient, MonitorSide]
) -> None:
    own, wrappers = wrapped
    with client.section("save"):
        own.start_section("save")
        own.start_section("step")
        own.end_section("save")
        assert open_in(wrappers) == ["save", "step"]
        own.shutdown_workload_monitoring()
        assert open_in(wrappers) == ["save"]
    assert open_in(wrappers) == []


def test_client_that_ends_all_sections_ends_those_of_the_wrapper_too(
    linked: Linked, wrapped: tuple[RankMonitorClient, MonitorSide]
) -> None:
    own, wrappers = wrapped
    own.start_section("step")
    with client.section("save"):
        own.end_all_sections()
    assert open_in(wrappers) == open_in(linked[1]) == []


def test_only_one_of_two_monitors_records_what_a_client_shows(
    linked: Linked, wrapped: tuple[RankMonitorClient, MonitorSide]
) -> None:
    """They share the files of durations."""
    own, wrappers = wrapped
    own.start_section("step")
    with client.section("data"):
        assert [section.is_copy for section in wrappers.read().open_sections] == [True, False]
        assert [section.is_copy for section in linked[1].read().open_sections] == [False]
    own.end_section("step")
    for _ in range(2):
        own.send_heartbeat()
    shown = [(entry.name, entry.is_copy) for entry in wrappers.drain()[0] if entry.begins is None]
    assert shown == [("data", False), ("step", True), ("", True)]
    assert not any(entry.is_copy for entry in linked[1].drain()[0])


def test_rank_sets_limits_and_asks(linked: Linked) -> None:
    link, _, line = linked
    limits = Limits(step=Limit(None, 5.0))
    assert link.limit(limits) and link.limits == limits
    assert link.request("Continue", "all is well")
    assert heard(line) == [messages.NewLimits(limits), messages.RankRequest("Continue", "all is well")]


def test_attaching_without_a_launcher_says_what_to_do() -> None:
    with pytest.raises(MonitorError, match="resilience run"):
        connect.attach()
    with pytest.raises(MonitorError, match="cannot be reached"):
        connect.attach("/nowhere/at/all")
