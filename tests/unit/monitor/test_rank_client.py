"""The compatible client: what it stores, what it tells the monitor, what it refuses."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from resilience.core.limits import ClientLimits, HeartbeatTimeouts, SectionTimeouts, configured, from_plain, to_plain
from resilience.core.restart import ENTRY
from resilience.errors import ConfigurationError, ConfigurationTypeError, RankMonitorClientError
from resilience.facts.deadlines import NAME_BYTES
from resilience.facts.limits import Limit, Limits, Rule
from resilience.monitor import client, connect, messages, refit
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.monitor.rank_client import RankMonitorClient, WorkloadAction, WorkloadControlRequest
from resilience.system import rank_reductions
from resilience.system.channel import Channel, pair

LIMITS = Limits(
    heartbeat=Limit(hard=60.0),
    initial_heartbeat=Limit(hard=600.0),
    sections={"step": Limit(hard=30.0)},
    safety_factor=4,
)
SECOND = 1_000_000_000


@dataclass
class Monitor:
    """The monitor's end of a link."""

    page: Page
    channel: Channel
    link: connect.WorkerLink

    def hear(self) -> list[Any]:
        """What the rank has said since the last call."""
        heard: list[Any] = []
        while (data := self.channel.receive(0.0)) is not None:
            heard.append(messages.decode_for_monitor(data))
        return heard

    @property
    def side(self) -> MonitorSide:
        return MonitorSide(self.page)

    def starts_again(self, limits: Limits) -> None:
        """The job starts again, with these limits."""
        self.link.limits, self.link.client_limits = limits, configured(limits)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    page, (ours, theirs) = Page.create(), pair()
    link = connect.WorkerLink(RankSide(page), ours, messages.Welcome(rank=0, world_size=1, limits=LIMITS))
    link.resume()
    monkeypatch.setattr(connect, "attach", lambda: link)
    yield Monitor(page, theirs, link)
    ours.close()
    theirs.close()


@pytest.fixture
def begun(monitor: Monitor) -> RankMonitorClient:
    made = RankMonitorClient()
    made.init_workload_monitoring()
    monitor.hear()
    return made


def seen(monitor: Monitor, *, first: int = 0, gap: int = 0, outside: int = 0, **sections: int) -> None:
    """Let the rank have seen these longest times, in seconds."""
    page = monitor.link.page
    page.longest = {name: taken * SECOND for name, taken in sections.items()}
    page.longest_gap, page.longest_outside = gap * SECOND, outside * SECOND
    page.first_heartbeat = first


# -- beginning and end --------------------------------------------------------------------------------


def test_beginning_announces_heartbeats_under_the_configured_limits(monitor: Monitor) -> None:
    made = RankMonitorClient()
    assert not made.is_initialized
    made.init_workload_monitoring()
    assert made.is_initialized
    (armed,) = monitor.hear()
    assert isinstance(armed, messages.Armed)
    assert made.hb_timeouts == HeartbeatTimeouts(600.0, 60.0)
    assert made.section_timeouts == SectionTimeouts({"step": 30.0})


def test_configuration_is_known_from_the_beginning_on(monitor: Monitor) -> None:
    made = RankMonitorClient()
    assert made.cfg is None
    made.init_workload_monitoring()
    assert made.cfg is not None
    assert (made.cfg.rank_section_timeouts, made.cfg.rank_heartbeat_timeout) == ({"step": 30.0}, 60.0)
    assert (made.cfg.safety_factor, made.cfg.num_warmup_iterations) == (4.0, 0)
    (armed,) = monitor.hear()
    assert isinstance(armed, messages.Armed)


def test_number_of_warm_up_iterations_is_told_to_the_monitor(monitor: Monitor) -> None:
    made = RankMonitorClient()
    with pytest.raises(ConfigurationError, match="num_warmup_iterations is -1"):
        made.init_workload_monitoring(num_warmup_iters=-1)
    made.init_workload_monitoring(num_warmup_iters=7)
    assert made.cfg is not None and made.cfg.num_warmup_iterations == 7
    told, armed = monitor.hear()
    assert told == messages.NewLimits(msgspec.structs.replace(LIMITS, warmup_occurrences=7))
    assert isinstance(armed, messages.Armed)


@pytest.mark.usefixtures("monitor")
def test_beginning_twice_is_an_error(begun: RankMonitorClient) -> None:
    with pytest.raises(RankMonitorClientError, match="already initialized"):
        begun.init_workload_monitoring()


def test_without_a_launcher_the_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENCE_MONITOR_SOCKET", raising=False)
    made = RankMonitorClient()
    with pytest.raises(RankMonitorClientError, match="start the script by `resilience run`"):
        made.init_workload_monitoring()
    assert not made.is_initialized


def test_rank_without_a_descriptor_left_is_not_monitored(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connect, "attach", no_descriptor)
    with pytest.raises(RankMonitorClientError, match=r"the workload cannot be monitored: .* Too many open files"):
        RankMonitorClient().init_workload_monitoring()


CALLS: list[Callable[[RankMonitorClient], object]] = [
    RankMonitorClient.send_heartbeat,
    lambda made: made.start_section("step"),
    lambda made: made.end_section("step"),
    lambda made: made.discard_section("step"),
    RankMonitorClient.end_all_sections,
    RankMonitorClient.calculate_and_set_hb_timeouts,
    RankMonitorClient.calculate_and_set_section_timeouts,
    lambda made: made.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue)),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_a_monitor_is_refused_before_and_after(
    call: Callable[[RankMonitorClient], object], begun: RankMonitorClient
) -> None:
    with pytest.raises(RankMonitorClientError, match=r"call init_workload_monitoring\(\) first"):
        call(RankMonitorClient())
    begun.shutdown_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match=r"call init_workload_monitoring\(\) first"):
        call(begun)


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_a_monitor_is_refused_after_another_client_has_closed_the_link(
    call: Callable[[RankMonitorClient], object], monitor: Monitor, begun: RankMonitorClient
) -> None:
    other = RankMonitorClient()
    other.init_workload_monitoring()
    other.shutdown_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match=r"another client.* has ended .*call init_workload_monitoring\(\)"):
        call(begun)
    assert monitor.side.read().heartbeat_at is None


def test_rank_goes_on_without_an_error_when_its_monitor_is_gone(monitor: Monitor, begun: RankMonitorClient) -> None:
    monitor.channel.close()
    begun.send_heartbeat()
    begun.start_section("step")
    begun.end_section("step")
    begun.start_section("save")
    begun.discard_section("save")
    begun.end_all_sections()
    assert begun.is_initialized


def test_signs_of_life_of_a_forked_child_go_nowhere_and_are_no_error(
    monitor: Monitor, begun: RankMonitorClient
) -> None:
    """A data loader's worker may use the client that it has inherited."""
    monitor.link.forget()  # as in the child
    monitor.link.page.let_go()
    begun.send_heartbeat()
    begun.start_section("load")
    begun.start_section("load")
    begun.end_section("load")
    begun.end_section("load")
    begun.discard_section("opened by the parent")
    begun.end_all_sections()
    assert not begun.is_initialized
    assert monitor.side.read().heartbeat_at is None


def test_end_of_what_has_not_begun_or_has_ended_does_nothing(begun: RankMonitorClient) -> None:
    RankMonitorClient().shutdown_workload_monitoring()
    for _ in range(2):
        begun.shutdown_workload_monitoring()
    assert not begun.is_initialized


def test_end_closes_the_sections_and_keeps_the_line(monitor: Monitor, begun: RankMonitorClient) -> None:
    begun.start_section("step")
    begun.shutdown_workload_monitoring()
    assert not begun.is_initialized
    assert monitor.side.read().open_sections == ()
    assert monitor.hear()[-1] == messages.EndedMonitoring()


# -- signs of life ------------------------------------------------------------------------------------


def test_heartbeat_is_in_the_page(monitor: Monitor, begun: RankMonitorClient) -> None:
    assert monitor.side.read().heartbeat_at is None
    begun.send_heartbeat()
    assert monitor.side.read().heartbeat_at is not None


def test_sections_nest_and_overlap_and_all_are_closed(monitor: Monitor, begun: RankMonitorClient) -> None:
    begun.start_section("step")
    begun.start_section("save")
    begun.end_section("step")
    assert [entry.name for entry in monitor.side.read().open_sections] == ["save"]
    begun.start_section("data")
    begun.end_all_sections()
    assert monitor.side.read().open_sections == ()


def test_discarded_section_is_closed_and_its_duration_does_not_count(
    monitor: Monitor, begun: RankMonitorClient
) -> None:
    begun.start_section("save")
    begun.discard_section("save")
    assert monitor.side.read().open_sections == ()
    assert monitor.link.page.longest == {}
    assert [entry.failed for entry in monitor.side.drain()[0] if entry.name] == [True]
    with pytest.raises(RankMonitorClientError, match="'save' cannot be closed: it is not open"):
        begun.discard_section("save")


@pytest.mark.usefixtures("monitor")
def test_wrong_use_of_sections_is_an_error_in_the_rank(begun: RankMonitorClient) -> None:
    begun.start_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is already open"):
        begun.start_section("step")
    with pytest.raises(RankMonitorClientError, match=r"'save' cannot be closed.*; open sections: \['step'\]"):
        begun.end_section("save")
    with pytest.raises(RankMonitorClientError, match="must not be empty"):
        begun.start_section("")


def test_what_the_functions_show_counts_alike(
    monitor: Monitor, begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_page", monitor.link.page)
    for _ in range(2):
        client.heartbeat()
        with client.section("data"):
            pass
    assert begun.calculate_and_set_hb_timeouts()
    assert begun.calculate_and_set_section_timeouts()
    assert begun.section_timeouts.calculated_sections == {"data"}


# -- limits -------------------------------------------------------------------------------------------


def test_calculated_heartbeat_limits_are_told_to_the_monitor(monitor: Monitor, begun: RankMonitorClient) -> None:
    seen(monitor, first=begun._announced_ns + 20 * SECOND, gap=3)
    assert begun.calculate_and_set_hb_timeouts()
    assert begun.hb_timeouts == HeartbeatTimeouts(80.0, 12.0, were_calculated=True)
    (told,) = monitor.hear()
    assert told.limits == Limits(
        heartbeat=Limit(hard=12.0),
        initial_heartbeat=Limit(hard=80.0),
        sections={"step": Limit(hard=30.0)},
        safety_factor=4,
    )


def test_calculated_limits_cover_what_still_lasts(begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is alive, so no limit that it sets may be exceeded already."""
    for _ in range(2):
        begun.send_heartbeat()
        begun.start_section("step")
        begun.end_section("step")
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 60 * SECOND)
    assert begun.calculate_and_set_hb_timeouts() and begun.calculate_and_set_section_timeouts()
    assert begun.hb_timeouts.subsequent is not None and begun.hb_timeouts.subsequent >= 240.0
    assert begun.section_timeouts.out_of_section is not None and begun.section_timeouts.out_of_section >= 240.0
    begun.start_section("step")
    begun.start_section("epoch")
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 160 * SECOND)
    begun.calculate_and_set_section_timeouts(calc_out_of_section=False)
    limit = begun.section_timeouts.section["step"]
    assert limit is not None and limit >= 400.0
    assert begun.section_timeouts.calculated_sections == {"step"}  # no epoch has ended yet


def test_calculated_limits_cover_the_wait_for_the_slowest_rank(
    begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 still writes a checkpoint while the others are already in the collective, outside their sections."""
    for _ in range(2):
        begun.start_section("step")
        begun.end_section("step")
    now_ns, over_ranks = time.monotonic_ns, rank_reductions.over_ranks

    def combine(values: dict[str, float]) -> dict[str, float]:
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 60 * SECOND)
        return over_ranks(values)

    monkeypatch.setattr(rank_reductions, "over_ranks", combine)
    begun.calculate_and_set_section_timeouts()
    assert begun.section_timeouts.out_of_section is not None and begun.section_timeouts.out_of_section >= 240.0


def test_fitted_limits_cover_what_still_lasts(begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first occurrences only the fitted limit holds, and only durations that have ended are fitted."""
    monkeypatch.setattr(refit, "limits", lambda *arguments: {"step": 17.0, "out_of_section": 2.0})
    for _ in range(20):
        begun.start_section("step")
        begun.end_section("step")
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 60 * SECOND)
    assert begun.calculate_and_set_section_timeouts(method="fit")
    outside = begun.section_timeouts.out_of_section
    assert (begun.section_timeouts.section, outside is not None and outside >= 240.0) == ({"step": 17.0}, True)
    begun.start_section("step")
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 160 * SECOND)
    assert begun.calculate_and_set_section_timeouts(calc_out_of_section=False, method="fit")
    limit = begun.section_timeouts.section["step"]
    assert limit is not None and limit >= 400.0


def test_fit_that_fails_is_on_record_and_the_longest_times_give_the_limit(
    monitor: Monitor, begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(
        selected: object, ranks: int, rank: int, report: Callable[[str, Exception], object]
    ) -> dict[str, float]:
        report("step", OverflowError("math range error"))
        return {}

    monkeypatch.setattr(refit, "limits", failing)
    seen(monitor, outside=2, step=5)
    assert begun.calculate_and_set_section_timeouts(method="fit")
    assert begun.section_timeouts.section == {"step": 20.0}
    reports = [message for message in monitor.hear() if isinstance(message, messages.FitFailed)]
    assert reports == [messages.FitFailed("step", "OverflowError: math range error")]


def test_names_of_the_oldest_version_mean_the_limits_of_heartbeats(monitor: Monitor, begun: RankMonitorClient) -> None:
    assert begun.timeouts == begun.hb_timeouts
    assert begun.calculate_and_set_timeouts(skip_if_not_ready=True) is False
    seen(monitor, first=begun._announced_ns + 20 * SECOND, gap=3)
    assert begun.calculate_and_set_timeouts()
    assert begun.timeouts == HeartbeatTimeouts(80.0, 12.0, were_calculated=True)


def test_calculated_section_limits_are_told_to_the_monitor(monitor: Monitor, begun: RankMonitorClient) -> None:
    seen(monitor, outside=2, step=5, save=50)
    assert begun.calculate_and_set_section_timeouts(selected_sections=["save"], calc_out_of_section=False)
    assert begun.section_timeouts == SectionTimeouts({"save": 200.0, "step": 30.0}, None, frozenset({"save"}))
    assert begun.calculate_and_set_section_timeouts()
    assert begun.section_timeouts.section == {"save": 200.0, "step": 20.0}
    assert begun.section_timeouts.out_of_section == 8.0
    *_, told = monitor.hear()
    assert told.limits.sections == {"save": Limit(hard=200.0), "step": Limit(hard=20.0)}
    assert told.limits.out_of_section == Limit(hard=8.0)
    assert told.limits.heartbeat == LIMITS.heartbeat


def test_rule_of_the_compatible_api_is_the_default(
    monitor: Monitor, begun: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit, "limits", lambda *arguments: {"step": 17.0})
    seen(monitor, outside=2, step=5)
    assert begun.calculate_and_set_section_timeouts()
    assert begun.section_timeouts.section == {"step": 20.0}
    assert begun.calculate_and_set_section_timeouts(method="fit")
    assert begun.section_timeouts.section == {"step": 17.0}


def test_selected_sections_may_come_from_an_iterator(monitor: Monitor, begun: RankMonitorClient) -> None:
    seen(monitor, outside=2, step=5)
    assert begun.calculate_and_set_section_timeouts(iter(["step"]))  # type: ignore[arg-type]
    assert begun.section_timeouts.section == {"step": 20.0}


def test_wrong_arguments_are_refused_before_ranks_wait_for_each_other(begun: RankMonitorClient) -> None:
    with pytest.raises(ConfigurationError, match="method is 'foo', expected 'nvrx' or 'fit'"):
        begun.calculate_and_set_section_timeouts(method="foo")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationTypeError, match=r"selected_sections is 'step', .*write \['step'\]"):
        begun.calculate_and_set_section_timeouts("step")
    with pytest.raises(ConfigurationTypeError, match=r"selected_sections is \[1\], expected a collection of names"):
        begun.calculate_and_set_section_timeouts([1])  # type: ignore[list-item]
    with pytest.raises(ConfigurationTypeError, match=r"req is 'x' \(str\), expected a WorkloadControlRequest"):
        begun.send_workload_control_request("x")  # type: ignore[arg-type]


def test_too_little_seen_raises_or_is_skipped_and_changes_nothing(monitor: Monitor, begun: RankMonitorClient) -> None:
    before = begun.state_dict()
    assert begun.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
    assert begun.calculate_and_set_section_timeouts(skip_if_not_ready=True) is False
    with pytest.raises(RankMonitorClientError, match="cannot be calculated yet"):
        begun.calculate_and_set_hb_timeouts()
    with pytest.raises(RankMonitorClientError, match="cannot be calculated yet"):
        begun.calculate_and_set_section_timeouts()
    assert begun.state_dict() == before
    assert monitor.hear() == []


def test_heartbeats_that_came_before_the_announcement_do_not_make_a_limit_of_nothing(
    monitor: Monitor, begun: RankMonitorClient
) -> None:
    seen(monitor, first=begun._announced_ns - SECOND, gap=3)
    begun.calculate_and_set_hb_timeouts()
    assert begun.hb_timeouts.initial == 12.0


def test_announcement_that_a_monitor_does_not_get_is_a_warning(monitor: Monitor) -> None:
    monitor.channel.close()
    with pytest.warns(UserWarning, match="the first heartbeat has no limit"):
        RankMonitorClient().init_workload_monitoring()


def test_monitor_that_does_not_read_does_not_stop_the_rank(monitor: Monitor, begun: RankMonitorClient) -> None:
    seen(monitor, first=1, gap=3)
    monitor.channel.close()
    with pytest.warns(UserWarning, match="did not accept"):
        assert begun.calculate_and_set_hb_timeouts()
    assert begun.hb_timeouts.subsequent == 12.0
    begun.send_heartbeat()


MANY = {f"validation/{number:04}": 3 for number in range(4000)}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_limits_too_long_for_a_message_are_an_error_with_its_size_and_change_nothing(
    monitor: Monitor, begun: RankMonitorClient, is_loaded: bool
) -> None:
    sections = SectionTimeouts(dict.fromkeys(MANY, 9.0), None, frozenset(MANY))
    before, state = begun.state_dict(), to_plain(ClientLimits(section_timeouts=sections))
    seen(monitor, outside=2, **MANY)
    with pytest.raises(RankMonitorClientError, match=r"have \d{5,6} bytes, the maximum is 61440; the old ones stay"):
        begun.load_state_dict(state) if is_loaded else begun.calculate_and_set_section_timeouts()
    assert (begun.state_dict(), monitor.link.limits, monitor.hear()) == (before, LIMITS, [])


def test_client_whose_loaded_limits_are_too_long_for_a_message_does_not_begin(monitor: Monitor) -> None:
    made = RankMonitorClient()
    sections = SectionTimeouts(dict.fromkeys(MANY, 9.0), None, frozenset(MANY))
    made.load_state_dict(to_plain(ClientLimits(section_timeouts=sections)))
    with pytest.raises(RankMonitorClientError, match="bytes, the maximum is 61440"):
        made.init_workload_monitoring()
    assert not made.is_initialized and made.cfg is None
    assert (monitor.hear(), monitor.link.is_armed) == ([], False)


# -- several clients ----------------------------------------------------------------------------------


def limits_heard(monitor: Monitor) -> Limits:
    """The last limits that the monitor was told."""
    *_, last = (message.limits for message in monitor.hear() if isinstance(message, messages.NewLimits))
    assert isinstance(last, Limits)
    return last


def test_client_keeps_the_limits_that_another_one_has_calculated(monitor: Monitor) -> None:
    """Such as the program's own client, and the one of a callback."""
    monitor.starts_again(msgspec.structs.replace(LIMITS, defaults=("heartbeat", "initial_heartbeat"), rule=Rule()))
    first, second = RankMonitorClient(), RankMonitorClient()
    first.init_workload_monitoring()
    second.init_workload_monitoring()
    seen(monitor, first=first._announced_ns + 20 * SECOND, gap=3, outside=2, data=50, save=100)
    first.calculate_and_set_section_timeouts(["data"])
    first.calculate_and_set_hb_timeouts()
    second.calculate_and_set_section_timeouts(["save"], calc_out_of_section=False)
    limits = limits_heard(monitor)
    sections = {"data": Limit(hard=200.0), "save": Limit(hard=400.0), "step": Limit(hard=30.0)}
    assert (limits.sections, limits.out_of_section) == (sections, Limit(hard=8.0))
    assert (limits.heartbeat, limits.initial_heartbeat) == (Limit(hard=12.0), Limit(hard=80.0))
    assert first.section_timeouts == second.section_timeouts
    assert first.section_timeouts.calculated_sections == {"data", "save"}
    assert first.hb_timeouts == second.hb_timeouts == HeartbeatTimeouts(80.0, 12.0, were_calculated=True)


@pytest.mark.parametrize("is_before", [True, False])
def test_state_that_a_client_loads_keeps_the_limits_of_another_one(monitor: Monitor, is_before: bool) -> None:
    first, second = RankMonitorClient(), RankMonitorClient()
    first.init_workload_monitoring()
    seen(monitor, first=first._announced_ns + 20 * SECOND, gap=3, data=50)
    first.calculate_and_set_section_timeouts(["data"], calc_out_of_section=False)
    first.calculate_and_set_hb_timeouts()
    state = to_plain(ClientLimits(section_timeouts=SectionTimeouts({"save": 9.0}, None, frozenset({"save"}))))
    if is_before:
        second.load_state_dict(state)
    second.init_workload_monitoring()
    if not is_before:
        second.load_state_dict(state)
    limits = limits_heard(monitor)
    assert {name: limit.hard for name, limit in limits.sections.items()} == {"data": 200.0, "save": 9.0, "step": 30.0}
    assert limits.heartbeat == Limit(hard=12.0)
    assert first.section_timeouts == second.section_timeouts


def test_state_of_a_client_has_only_the_limits_that_it_has_calculated_or_loaded(monitor: Monitor) -> None:
    """A callback stores its state, and checks whether its own sections ended under their limits."""
    first, second = RankMonitorClient(), RankMonitorClient()
    first.init_workload_monitoring()
    second.init_workload_monitoring()
    seen(monitor, first=first._announced_ns + 20 * SECOND, gap=3, outside=2, data=50, save=100)
    first.calculate_and_set_section_timeouts(["data"])
    first.calculate_and_set_hb_timeouts()
    second.calculate_and_set_section_timeouts(["save"], calc_out_of_section=False)
    state = from_plain(second.state_dict())
    assert (state.hb_timeouts.were_calculated, state.section_timeouts.is_out_of_section_calculated) == (False, False)
    assert state.section_timeouts.calculated_sections == {"save"}
    own = from_plain(first.state_dict())
    assert own.section_timeouts.calculated_sections == {"data"} and own.hb_timeouts.were_calculated


def test_client_that_calculates_again_starts_from_the_limit_in_force(monitor: Monitor) -> None:
    first, second = RankMonitorClient(), RankMonitorClient()
    first.init_workload_monitoring()
    second.init_workload_monitoring()
    seen(monitor, step=50)
    first.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    seen(monitor, step=25)
    second.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert first.section_timeouts.section == second.section_timeouts.section == {"step": 150.0}


# -- state --------------------------------------------------------------------------------------------


def calculated(monitor: Monitor, made: RankMonitorClient) -> dict[str, Any]:
    seen(monitor, first=made._announced_ns + 20 * SECOND, gap=3, outside=2, save=50)
    made.calculate_and_set_hb_timeouts()
    made.calculate_and_set_section_timeouts()
    monitor.hear()
    state: dict[str, Any] = json.loads(json.dumps(made.state_dict()))
    assert state == made.state_dict()
    return state


@pytest.mark.parametrize("is_before", [True, False])
def test_calculated_limits_are_loaded_before_or_after_the_beginning(
    monitor: Monitor, begun: RankMonitorClient, is_before: bool
) -> None:
    state = calculated(monitor, begun)
    monitor.starts_again(LIMITS)
    other = RankMonitorClient()
    if is_before:
        other.load_state_dict(state)
        assert other.hb_timeouts == HeartbeatTimeouts(80.0, 12.0, were_calculated=True)
        other.init_workload_monitoring()
    else:
        other.init_workload_monitoring()
        assert other.hb_timeouts == HeartbeatTimeouts(600.0, 60.0)
        other.load_state_dict(state)
    assert other.state_dict() == state
    told = [message for message in monitor.hear() if isinstance(message, messages.NewLimits)]
    assert [message.limits for message in told] == [monitor.link.limits] != [LIMITS]
    assert monitor.link.limits.heartbeat == Limit(hard=12.0)


def test_what_was_only_configured_is_not_loaded(monitor: Monitor, begun: RankMonitorClient) -> None:
    state = begun.state_dict()
    monitor.starts_again(Limits(heartbeat=Limit(hard=5.0), sections={"step": Limit(hard=6.0)}))
    for is_before in (True, False):
        other = RankMonitorClient()
        if is_before:
            other.load_state_dict(state)
            assert other.state_dict() == state
        other.init_workload_monitoring()
        other.load_state_dict(state)
        assert other.hb_timeouts == HeartbeatTimeouts(None, 5.0)
        assert other.section_timeouts == SectionTimeouts({"step": 6.0})


@pytest.mark.parametrize("is_before", [True, False])
def test_state_of_the_peers_client_is_in_force(monitor: Monitor, is_before: bool) -> None:
    section = {"section": {"step": 9.0}, "out_of_section": 8.0, "calculated_sections": ["step"]}
    state = {"current_timeouts": {"section": section | {"is_out_of_section_calculated": True}}}
    made = RankMonitorClient()
    if is_before:
        made.load_state_dict(state)
    made.init_workload_monitoring()
    if not is_before:
        made.load_state_dict(state)
    (told,) = [message for message in monitor.hear() if isinstance(message, messages.NewLimits)]
    assert told.limits.sections == {"step": Limit(hard=9.0)}
    assert (told.limits.out_of_section, told.limits.heartbeat) == (Limit(hard=8.0), LIMITS.heartbeat)


@pytest.mark.parametrize("state", [{}, {"current_timeouts": {}}])
def test_empty_state_of_the_peers_client_changes_nothing(
    monitor: Monitor, begun: RankMonitorClient, state: dict[str, Any]
) -> None:
    begun.load_state_dict(state)
    assert monitor.hear() == []
    assert begun.hb_timeouts == HeartbeatTimeouts(600.0, 60.0)


def test_state_of_something_else_is_refused_and_changes_nothing(monitor: Monitor, begun: RankMonitorClient) -> None:
    before = begun.state_dict()
    with pytest.raises(ConfigurationError, match="it has model, optimizer, expected hb_timeouts, section_timeouts"):
        begun.load_state_dict({"model": {}, "optimizer": {}})
    assert (begun.state_dict(), monitor.hear()) == (before, [])


def test_state_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a state of a RankMonitorClient"):
        RankMonitorClient().load_state_dict({"hb_timeouts": "never"})


# -- requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", WorkloadAction)
def test_request_is_sent_by_its_name(monitor: Monitor, begun: RankMonitorClient, action: WorkloadAction) -> None:
    begun.send_workload_control_request(WorkloadControlRequest(action, "bad memory"))
    assert monitor.hear() == [messages.RankRequest(action.name, "bad memory")]


def test_request_may_be_described_by_an_exception(monitor: Monitor, begun: RankMonitorClient) -> None:
    request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, OSError("bad disk"))  # type: ignore[arg-type]
    begun.send_workload_control_request(request)
    assert monitor.hear() == [messages.RankRequest("ExcludeThisNode", "bad disk")]


def test_request_that_cannot_be_sent_is_an_error(monitor: Monitor, begun: RankMonitorClient) -> None:
    monitor.channel.close()
    with pytest.raises(RankMonitorClientError, match="ExcludeThisNode could not be sent"):
        begun.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode))


def test_request_for_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected one of"):
        WorkloadControlRequest("ExcludeThisNode")  # type: ignore[arg-type]


def test_calculated_limit_has_the_name_under_which_its_section_is_recorded(monitor: Monitor) -> None:
    rank_client = RankMonitorClient()
    rank_client.init_workload_monitoring()
    name = "validation/" + "x" * NAME_BYTES
    monitor.link.page.longest = {name: 3 * SECOND, name + "y": 5 * SECOND}
    rank_client.calculate_and_set_section_timeouts([name], calc_out_of_section=False, method="nvrx")
    assert rank_client.section_timeouts.section[name[:NAME_BYTES]] == 20.0


def test_program_without_a_wrapper_is_in_no_iteration() -> None:
    page, (ours, theirs) = Page.create(), pair()
    link = connect.WorkerLink(RankSide(page), ours, messages.Welcome(rank=3, world_size=4, limits=LIMITS))
    link.resume()
    view = MonitorSide(page).read()
    assert (view.iteration, view.initial_rank, view.rank, view.world_size) == (ENTRY, 3, 3, 4)
    ours.close()
    theirs.close()
