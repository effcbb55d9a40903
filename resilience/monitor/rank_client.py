"""The rank's side of the compatible API: heartbeats, sections, limits calculated from them, requests.

A thin layer over this process's link to its monitor (`monitor.connect`). A sign of life is a store into the page;
`resilience.section` and `resilience.heartbeat` count alike. Within a Wrapper's call a sign of life is stored into the
Wrapper's page as well, so that both monitors see it. `core.limits` calculates limits from the longest times
observed. The maxima are first combined over ranks, so that all ranks have the same limits."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from resilience.core import limits as calculation
from resilience.core.limits import ClientLimits, HeartbeatTimeouts, Observed, SectionTimeouts
from resilience.errors import ConfigurationError, ConfigurationTypeError, MonitorError, RankMonitorClientError
from resilience.facts.deadlines import OUT_OF_SECTION, of_section, recorded_name
from resilience.facts.limits import Limits
from resilience.monitor import connect, messages, refit
from resilience.monitor.config import FIELDS, FaultToleranceConfig, checked, from_limits
from resilience.monitor.page import COPY, RankSide
from resilience.system import rank_reductions

_FIRST, _GAP, _OUTSIDE, _SECTION = "first", "gap", "outside", "section:"  # names under which ranks combine their maxima

Method = Literal["nvrx", "fit"]  # how limits of sections are calculated; the first is that of the compatible API


class WorkloadAction(Enum):
    """A rank's requests to the launcher.

    Continue: nothing; the request is recorded. ExcludeThisNode: this node leaves; the other nodes continue with a
    spare or without it. ShutdownWorkload: all ranks stop and are not started again."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@dataclasses.dataclass
class WorkloadControlRequest:
    """A rank's request to the launcher. description: a text for people, in the records."""

    action: WorkloadAction
    description: str = "<not set>"

    def __post_init__(self) -> None:
        if not isinstance(self.action, WorkloadAction):
            raise ConfigurationError(
                f"action is {self.action!r}, expected one of {', '.join(map(str, WorkloadAction))}"
            )


class RankMonitorClient:
    """Shows the rank's monitor that the rank is alive, and sets its limits. For a worker of `resilience run`.

    Signs of life and sections may come from any thread. Methods that calculate limits are collectives over all ranks
    if torch.distributed is initialised.

    Signs of life and sections raise no error when the monitor is lost: the training continues, and another monitor
    takes over under `resilience run`. They raise RankMonitorClientError if this client did not begin, or if a client
    of this process has ended the monitoring. In a forked child, which is not the rank, they do nothing.

    cfg: the settings of the rank's monitor; None until monitoring begins. Settings that concern only the launcher have
    their defaults there."""

    def __init__(self) -> None:
        self.cfg: FaultToleranceConfig | None = None
        self._own = ClientLimits()  # what this client has calculated or loaded; the others as they were configured
        self._link: connect.WorkerLink | None = None
        self._announced_ns = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            advice = "; read RANK, LOCAL_RANK and WORLD_SIZE from the environment" if name == "rank_info" else ""
            raise AttributeError(f"'RankMonitorClient' object has no attribute {name!r}{advice}", name=name, obj=self)

    @property
    def is_initialized(self) -> bool:
        """True if the rank is monitored through this client. All clients of a process share one link to the monitor."""
        return self._link is not None and self._link.is_open

    @property
    def hb_timeouts(self) -> HeartbeatTimeouts:
        """The limits of heartbeats in force, as far as this rank knows them; any of its clients may have set them."""
        return self._in_force.hb_timeouts

    @property
    def section_timeouts(self) -> SectionTimeouts:
        """The limits of sections in force, as far as this rank knows them; any of its clients may have set them."""
        return self._in_force.section_timeouts

    @property
    def timeouts(self) -> HeartbeatTimeouts:
        """The limits of heartbeats: `hb_timeouts`, by its name in nvidia-resiliency-ext 0.2."""
        return self.hb_timeouts

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Attach to the rank's monitor and announce heartbeats: the limit of the first one starts now.

        Limits loaded before are in force from now on. num_warmup_iters: replaces the setting
        `num_warmup_iterations` for this rank. Raises: RankMonitorClientError without a monitor, if this client is
        already initialized, or if the loaded limits are too long for a message; ConfigurationError for a number below
        0."""
        if num_warmup_iters is not None:
            num_warmup_iters = checked(FIELDS["num_warmup_iterations"], num_warmup_iters)
        if self.is_initialized:
            raise RankMonitorClientError(
                "this client is already initialized; call init_workload_monitoring() once, or shut it down before"
            )
        try:
            link = connect.attach()
        except (MonitorError, OSError) as error:  # OSError: no descriptor is left, for instance
            raise RankMonitorClientError(f"the workload cannot be monitored: {error}") from error
        base = link.limits
        if num_warmup_iters is not None:
            base = msgspec.structs.replace(base, warmup_occurrences=num_warmup_iters)
        loaded = self._own
        self._enforce(link, loaded, base)
        self._own = calculation.over(calculation.configured(base), loaded)
        self.cfg = from_limits(base)
        self._announced_ns = time.monotonic_ns()
        self._link = link
        if not link.arm() and not link.is_armed:
            warnings.warn("the rank's monitor does not read: the first heartbeat has no limit", stacklevel=2)

    def shutdown_workload_monitoring(self) -> None:
        """Leave the monitor: no limit applies any more. Where the process is, how it ends and that the job is asked to
        stop is still known. No effect if this client is not initialized."""
        link = self._link
        if link is None:
            return
        self._link = None
        if (wrapper_page := connect.wrapper_page) is not None:
            wrapper_page.leave_copies()
            wrapper_page.forget_signs()
        link.page.leave_all()
        link.end()

    # -- signs of life --------------------------------------------------------------------------

    def send_heartbeat(self) -> None:
        """Send a sign of life. Raises: RankMonitorClientError if this client is not initialized."""
        self._page().heartbeat()
        if (wrapper_page := connect.wrapper_page) is not None:
            wrapper_page.heartbeat(COPY)

    def start_section(self, section: str) -> None:
        """Open a section. Sections may nest and overlap.

        Raises: RankMonitorClientError if it or 64 others are already open, or this client is not initialized."""
        page = self._page()
        try:
            page.enter(section)
        except ConfigurationError as error:
            if page.is_let_go:
                return
            raise RankMonitorClientError(str(error), section=section) from error
        if (wrapper_page := connect.wrapper_page) is not None:
            with contextlib.suppress(ConfigurationError):  # `resilience.section` has opened it there, or very many
                wrapper_page.enter(section, COPY)

    def end_section(self, section: str) -> None:
        """Close a section. Raises: RankMonitorClientError if it is not open, or this client not initialized."""
        self._leave(section, failed=False)

    def discard_section(self, section: str) -> None:
        """Close a section that failed or was called off: no limit is calculated from its duration.

        Raises: RankMonitorClientError if it is not open, or this client not initialized."""
        self._leave(section, failed=True)

    def end_all_sections(self) -> None:
        """Close every open section. Raises: RankMonitorClientError if this client is not initialized."""
        self._page().leave_all()
        if (wrapper_page := connect.wrapper_page) is not None:
            wrapper_page.leave_all()

    # -- limits ---------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set the limits of heartbeats to the longest times of all ranks, times the safety factor.

        All ranks call it. skip_if_not_ready: if too little was observed, return False on all ranks instead of
        raising. Raises: RankMonitorClientError."""
        link = self._require_link()
        observed = self._observed(link)
        try:
            hb_timeouts = calculation.heartbeat_timeouts(observed, self.hb_timeouts, link.limits.safety_factor)
        except RankMonitorClientError:
            if skip_if_not_ready:
                return False
            raise
        self._enforce(link, ClientLimits(hb_timeouts))
        return True

    def calculate_and_set_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Call `calculate_and_set_hb_timeouts`; this is its name in nvidia-resiliency-ext 0.2."""
        return self.calculate_and_set_hb_timeouts(skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
        method: Method = "nvrx",
    ) -> bool:
        """Set limits of sections from the durations that all ranks have observed.

        All ranks call it with the same arguments. selected_sections: by default all that any rank has finished.
        calc_out_of_section: include the time between two sections. skip_if_not_ready: if too little was observed,
        return False on all ranks instead of raising. method: `nvrx` sets the longest times of all ranks, times the
        safety factor; `fit` sets limits with a stated rate of false alarms if this run and earlier ones in the same
        folder support that (`resilience calibrate` calls them `ok`), and otherwise those of `nvrx`.
        Raises: RankMonitorClientError; ConfigurationError."""
        link = self._require_link()
        if method not in get_args(Method):
            expected = " or ".join(map(repr, get_args(Method)))
            raise ConfigurationError(f"method is {method!r}, expected {expected}", option="method", value=method)
        selected = None if selected_sections is None else _recorded_names(selected_sections)
        observed = self._observed(link)
        try:
            fitted = refit.limits(selected, link.world_size, link.rank, link.fit_failed) if method == "fit" else None
            section_timeouts = calculation.section_timeouts(
                observed,
                self.section_timeouts,
                link.limits.safety_factor,
                selected,
                calc_out_of_section,
                fitted,
            )
        except RankMonitorClientError:
            if skip_if_not_ready:
                return False
            raise
        names = observed.sections if selected is None else selected
        calculated = calculation.newly_calculated(section_timeouts, names, calc_out_of_section)
        self._enforce(link, ClientLimits(section_timeouts=calculated))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return this client's limits for a checkpoint, in JSON types; the same on all ranks. Those that another client
        has calculated are in the state of that one."""
        return calculation.to_plain(self._own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply the limits of a checkpoint, now or when monitoring begins.

        Calculated limits are in force then; the others keep the job's present configuration. The state of a client of
        nvidia-resiliency-ext is converted. Raises: ConfigurationError if `state` is not a client's state;
        RankMonitorClientError if the limits are too long for a message."""
        loaded, link = calculation.from_plain(state), self._link
        if link is None or not link.is_open:
            self._own = loaded
        else:
            self._enforce(link, loaded)

    # -- requests -------------------------------------------------------------------------------

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask the launcher to exclude this node or to stop the job. Returns at once; the effect comes later.

        Raises: RankMonitorClientError if this client is not initialized or the monitor does not read;
        ConfigurationTypeError."""
        link = self._require_link()
        if not isinstance(req, WorkloadControlRequest):
            raise ConfigurationTypeError(
                f"req is {req!r} ({type(req).__name__}), expected a WorkloadControlRequest; write "
                "WorkloadControlRequest(WorkloadAction.ExcludeThisNode)",
                option="req",
                value=req,
            )
        if not link.request(req.action.name, str(req.description)):
            raise RankMonitorClientError(
                f"the request {req.action.name} could not be sent: the rank's monitor does not read; try again in a "
                "few seconds, when another monitor has replaced it"
            )

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _in_force(self) -> ClientLimits:
        link = self._link
        return link.client_limits if link is not None and link.is_open else self._own

    def _page(self) -> RankSide:
        """Return where signs of life are stored, whether a monitor reads them or not."""
        link = self._link
        if link is None or link.is_ended:
            raise self._not_ready()
        return link.page

    def _leave(self, section: str, failed: bool) -> None:
        page = self._page()
        try:
            page.leave(section, failed)
        except ConfigurationError as error:
            if page.is_let_go:
                return
            raise RankMonitorClientError(str(error), section=section) from error
        if (wrapper_page := connect.wrapper_page) is not None:
            wrapper_page.leave_copy(section, failed)

    def _enforce(self, link: connect.WorkerLink, calculated: ClientLimits, base: Limits | None = None) -> None:
        """Set the calculated ones of these limits, here and in the monitor. If the monitor does not read, the rank
        continues.

        base: all other limits, by default those in force. Raises: RankMonitorClientError if they are too long for a
        message; then nothing changes."""
        state = calculation.over(link.client_limits, calculated)
        new_limits = calculation.with_state(link.limits if base is None else base, state)
        is_new = new_limits != link.limits
        size = messages.bytes_of(new_limits) if is_new else 0
        if size > messages.MOST_LIMITS:
            raise RankMonitorClientError(
                f"the new limits have {size} bytes, the maximum is {messages.MOST_LIMITS}; the old ones stay in force: "
                f"set limits of fewer sections than {len(new_limits.sections)}"
            )
        link.client_limits, self._own = state, calculation.over(self._own, calculated)
        if is_new and not link.limit(new_limits):
            warnings.warn("the rank's monitor did not accept new limits; the old ones stay in force", stacklevel=3)

    def _observed(self, link: connect.WorkerLink) -> Observed:
        """Return the longest times of all ranks. A collective.

        What still lasts counts too, if any rank has finished its like: else the new limit might be exceeded already."""
        page = link.page
        longest_here = _longest(page.longest_gap, page.longest_outside, page.longest.copy())  # threads may change it
        if page.first_heartbeat:
            longest_here[_FIRST] = max(0, page.first_heartbeat - self._announced_ns) * 1e-9
        longest = rank_reductions.over_ranks(longest_here)
        ongoing = rank_reductions.over_ranks(_longest(*page.ongoing()))  # including the wait for the slowest rank
        longest = {name: max(taken, ongoing.get(name, 0.0)) for name, taken in longest.items()}
        lasting = {of_section(name): taken for name, taken in _of_sections(ongoing).items()}
        if _OUTSIDE in ongoing:
            lasting[OUT_OF_SECTION] = ongoing[_OUTSIDE]
        return Observed(
            first_heartbeat=longest.get(_FIRST),
            heartbeat_gap=longest.get(_GAP),
            outside=longest.get(_OUTSIDE),
            sections=_of_sections(longest),
            lasting=lasting,
        )

    def _require_link(self) -> connect.WorkerLink:
        if self._link is None or not self._link.is_open:
            raise self._not_ready()
        return self._link

    def _not_ready(self) -> RankMonitorClientError:
        is_ended = self._link is not None and self._link.is_ended
        reason = ": another client of this process has ended the monitoring" if is_ended else ""
        return RankMonitorClientError(f"this client is not initialized{reason}; call init_workload_monitoring() first")


def _recorded_names(sections: Collection[str]) -> list[str]:
    """Return the names under which these sections are recorded. Raises: ConfigurationTypeError."""
    names = list(sections)  # an iterator can be read only once
    if isinstance(sections, str) or not all(isinstance(name, str) for name in names):
        instead = f"; write [{sections!r}]" if isinstance(sections, str) else ""
        raise ConfigurationTypeError(
            f"selected_sections is {sections!r}, expected a collection of names{instead}",
            option="selected_sections",
            value=sections,
        )
    return [recorded_name(name) for name in names]


def _longest(gap: int, outside: int, sections: Mapping[str, int]) -> dict[str, float]:
    """Return durations in seconds, without zeros, by the names under which ranks combine them. All given in ns."""
    longest = {name: taken * 1e-9 for name, taken in ((_GAP, gap), (_OUTSIDE, outside)) if taken}
    for section, taken in sections.items():
        name = _SECTION + recorded_name(section)
        longest[name] = max(taken * 1e-9, longest.get(name, 0.0))
    return longest


def _of_sections(combined: Mapping[str, float]) -> dict[str, float]:
    """Return the durations of sections, by their names."""
    return {name.removeprefix(_SECTION): taken for name, taken in combined.items() if name.startswith(_SECTION)}
