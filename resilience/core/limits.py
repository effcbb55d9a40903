"""Which limits follow from a rank's observed durations?  The largest duration times a safety factor.

This is the rule of the compatible API. It is simple, and equal on all ranks once their maxima are combined. It is
generous, because its rate of false alarms is unknown (`calibration.fitting` states one). A recalculated limit rises at
once but falls only half the way, so one quiet hour does not make it tight. The observations come from the shared page;
`monitor.rank_client` sends the limits to the monitor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

import msgspec

from resilience.errors import ConfigurationError, DecodeError, RankMonitorClientError
from resilience.facts.deadlines import (
    EARLY,
    HEARTBEAT,
    INITIAL_HEARTBEAT,
    OUT_OF_SECTION,
    Start,
    of_section,
    recorded_name,
)
from resilience.facts.encoding import from_builtins
from resilience.facts.limits import First, Limit, Limits

_PEERS = "current_timeouts"  # the one key in the state of nvidia-resiliency-ext's client
SHORTEST = 1.0  # seconds: a pause of a loaded host or a garbage collection may take much of it


class HeartbeatTimeouts(msgspec.Struct, frozen=True):
    """Limits of heartbeats in seconds, None: never fires. initial: to the first one; subsequent: between two.
    were_calculated: by a client, from observed times; else they are configured."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool = False

    @property
    def are_valid(self) -> bool:
        """Return True if both are set."""
        return self.initial is not None and self.subsequent is not None


class SectionTimeouts(msgspec.Struct, frozen=True):
    """Limits of sections in seconds, None: never fires.

    section: by name, while the section is open. out_of_section: while none is open. calculated_sections: names of those
    that a client calculated from observed times; the others are configured. is_out_of_section_calculated: the same for
    out_of_section. first: limits of the first occurrences after a start, by name of the section, or `out_of_section`;
    others have no separate limit for these."""

    section: dict[str, float | None] = {}
    out_of_section: float | None = None
    calculated_sections: frozenset[str] = frozenset()
    is_out_of_section_calculated: bool = False
    first: dict[str, float] = {}

    @property
    def were_calculated(self) -> bool:
        """Return True if all limits were calculated, those of sections and the one of the time between."""
        return self.calculated_sections == self.section.keys() and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """Return True if all limits are set, those of sections and the one of the time between."""
        return self.out_of_section is not None and None not in self.section.values()


class Observed(msgspec.Struct, frozen=True):
    """The longest observed durations in seconds; None: not observed. first_heartbeat: from the announcement of
    heartbeats to the first one. outside: between two sections. lasting: what has not ended yet, by deadline."""

    first_heartbeat: float | None = None
    heartbeat_gap: float | None = None
    outside: float | None = None
    sections: Mapping[str, float] = {}
    lasting: Mapping[str, float] = {}


def heartbeat_timeouts(observed: Observed, current: HeartbeatTimeouts, safety_factor: float) -> HeartbeatTimeouts:
    """Return limits that cover the observed durations. The first heartbeat gets at least the limit of later ones.

    Raises: RankMonitorClientError before two heartbeats were observed."""
    if observed.first_heartbeat is None or observed.heartbeat_gap is None:
        raise RankMonitorClientError(
            "limits of heartbeats cannot be calculated yet: no rank has sent two heartbeats; call this later, or with "
            "skip_if_not_ready=True"
        )
    known = current if current.were_calculated else HeartbeatTimeouts()
    return HeartbeatTimeouts(
        initial=_covering(max(observed.first_heartbeat, observed.heartbeat_gap), safety_factor, known.initial),
        subsequent=_covering(observed.heartbeat_gap, safety_factor, known.subsequent),
        were_calculated=True,
    )


def section_timeouts(
    observed: Observed,
    current: SectionTimeouts,
    safety_factor: float,
    selected: Collection[str] | None = None,
    with_outside: bool = True,
    fitted: Mapping[str, float] | None = None,
) -> SectionTimeouts:
    """Return limits that cover the observed durations. Limits that are not calculated stay unchanged.

    fitted: limits with a stated rate (`calibration.fitting`), used instead where they exist. They exclude the first
    occurrences after a start, which keep limits that cover all observed durations. They cover what still lasts too.

    selected: names of sections, by default the observed ones. with_outside: also the time between two sections.
    Raises: RankMonitorClientError if a selected duration was not observed yet."""
    names = sorted(observed.sections if selected is None else set(selected))
    missing = [repr(name) for name in names if name not in observed.sections]
    if not names and selected is None:
        missing.append("any section")
    if with_outside and observed.outside is None:
        missing.append("the time between two sections (calc_out_of_section=False leaves it out)")
    if missing:
        raise RankMonitorClientError(
            f"limits of sections cannot be calculated yet: no rank has finished {', '.join(missing)}; call this later, "
            "or with skip_if_not_ready=True"
        )
    limits, first = dict(current.section), dict(current.first)

    def chosen(deadline: str, longest: float, known: float | None, rated: float | None) -> float:
        first.pop(deadline, None)
        if rated is None:
            return _covering(longest, safety_factor, known)
        first[deadline] = max(_covering(longest, safety_factor, None), rated)
        return max(rated, _covering(observed.lasting.get(deadline, 0.0), safety_factor, None))

    for name in names:
        known = limits.get(name) if name in current.calculated_sections else None
        limits[name] = chosen(of_section(name), observed.sections[name], known, (fitted or {}).get(name))
    outside = current.out_of_section
    if with_outside and observed.outside is not None:
        known = outside if current.is_out_of_section_calculated else None
        outside = chosen(OUT_OF_SECTION, observed.outside, known, (fitted or {}).get(OUT_OF_SECTION))
    return SectionTimeouts(
        section=dict(sorted(limits.items())),
        out_of_section=outside,
        calculated_sections=current.calculated_sections.union(names),
        is_out_of_section_calculated=current.is_out_of_section_calculated or with_outside,
        first=dict(sorted(first.items())),
    )


def newly_calculated(timeouts: SectionTimeouts, names: Collection[str], with_outside: bool) -> SectionTimeouts:
    """Return the limits of these sections alone, and if `with_outside` the one of the time between two sections."""
    deadlines = {*map(of_section, names), *((OUT_OF_SECTION,) if with_outside else ())}
    return SectionTimeouts(
        section={name: timeouts.section[name] for name in names},
        out_of_section=timeouts.out_of_section if with_outside else None,
        calculated_sections=frozenset(names),
        is_out_of_section_calculated=with_outside,
        first={deadline: limit for deadline, limit in timeouts.first.items() if deadline in deadlines},
    )


def _covering(longest: float, safety_factor: float, known: float | None) -> float:
    limit = max(longest * safety_factor, SHORTEST)
    return limit if known is None else max(limit, (limit + known) / 2)


# -- all of them together -------------------------------------------------------------------------


class ClientLimits(msgspec.Struct, frozen=True):
    """The limits that a rank's clients know. A checkpoint stores those of one client."""

    hb_timeouts: HeartbeatTimeouts = HeartbeatTimeouts()
    section_timeouts: SectionTimeouts = SectionTimeouts()


def with_recorded_names(limits: Limits) -> Limits:
    """Return the limits with the names under which the rank's sections are observed."""
    changed: Limits = msgspec.structs.replace(
        limits,
        sections={recorded_name(name): limit for name, limit in limits.sections.items()},
        warmup={recorded_name(name): limit for name, limit in limits.warmup.items()},
        shadow=None if limits.shadow is None else with_recorded_names(limits.shadow),
    )
    return changed


def configured(limits: Limits) -> ClientLimits:
    """Return the limits in force, as far as a client can calculate them."""
    section = {name: limit.hard for name, limit in sorted(limits.sections.items())}
    return ClientLimits(
        HeartbeatTimeouts(limits.initial_heartbeat.hard, limits.heartbeat.hard),
        SectionTimeouts(section, limits.out_of_section.hard),
    )


def with_state(limits: Limits, state: ClientLimits) -> Limits:
    """Return `limits` with the limits of `state` in place of its own.

    A calculated limit replaces all learned ones of its deadline. The warm-up limits that these had replaced do not come
    back: they may be shorter."""
    calculated = _calculated(state)
    replaced = calculated & {*limits.first, *limits.outside}
    changed: Limits = msgspec.structs.replace(
        limits,
        initial_heartbeat=Limit(hard=state.hb_timeouts.initial),
        heartbeat=Limit(hard=state.hb_timeouts.subsequent),
        sections={name: Limit(hard=limit) for name, limit in state.section_timeouts.section.items()},
        out_of_section=Limit(hard=state.section_timeouts.out_of_section),
        first={
            **{deadline: first for deadline, first in limits.first.items() if deadline not in calculated},
            **{
                deadline: First(EARLY, dict.fromkeys(get_args(Start), Limit(hard=limit)))
                for deadline, limit in state.section_timeouts.first.items()
            },
        },
        outside={deadline: outside for deadline, outside in limits.outside.items() if deadline not in calculated},
        learned={deadline: learned for deadline, learned in limits.learned.items() if deadline not in calculated},
        warmup={name: limit for name, limit in limits.warmup.items() if of_section(name) not in replaced},
        warmup_heartbeat=None if HEARTBEAT in calculated & limits.first.keys() else limits.warmup_heartbeat,
        defaults=() if state.hb_timeouts.were_calculated else limits.defaults,
    )
    return changed


def _calculated(state: ClientLimits) -> set[str]:
    """Return the deadlines whose limits were calculated."""
    heartbeats = (HEARTBEAT, INITIAL_HEARTBEAT) if state.hb_timeouts.were_calculated else ()
    outside = (OUT_OF_SECTION,) if state.section_timeouts.is_out_of_section_calculated else ()
    return {*heartbeats, *outside, *map(of_section, state.section_timeouts.calculated_sections)}


def over(configured: ClientLimits, loaded: ClientLimits) -> ClientLimits:
    """Return `configured`, overridden by the calculated limits of `loaded`. Limits that were only configured when
    `loaded` was saved are ignored, because the configuration may have changed since."""
    base, sections = configured.section_timeouts, loaded.section_timeouts
    calculated = {name: sections.section[name] for name in sections.calculated_sections}
    is_outside, replaced = sections.is_out_of_section_calculated, _calculated(loaded)
    merged = SectionTimeouts(
        section=dict(sorted({**base.section, **calculated}.items())),
        out_of_section=sections.out_of_section if is_outside else base.out_of_section,
        calculated_sections=base.calculated_sections.union(calculated),
        is_out_of_section_calculated=is_outside or base.is_out_of_section_calculated,
        first={**{name: limit for name, limit in base.first.items() if name not in replaced}, **sections.first},
    )
    heartbeats = loaded.hb_timeouts if loaded.hb_timeouts.were_calculated else configured.hb_timeouts
    return ClientLimits(heartbeats, merged)


def to_plain(state: ClientLimits) -> dict[str, Any]:
    """Return the state as values that JSON supports."""
    plain: dict[str, Any] = msgspec.to_builtins(state)
    plain["section_timeouts"]["calculated_sections"] = sorted(state.section_timeouts.calculated_sections)
    return plain


def from_plain(plain: Mapping[str, Any]) -> ClientLimits:
    """Read a result of `to_plain`, or the state of a client of nvidia-resiliency-ext, 0.2 or later.

    Limits of the latter below `SHORTEST` are raised to it. Raises: ConfigurationError for anything else."""
    if not isinstance(plain, Mapping):
        raise _no_state(f"it is a {type(plain).__name__}, expected a dict")
    unknown = sorted(map(str, set(plain) - {*ClientLimits.__struct_fields__, _PEERS}))
    if unknown:
        expected = ", ".join(ClientLimits.__struct_fields__)
        raise _no_state(f"it has {', '.join(unknown)}, expected {expected}; or {_PEERS}, of nvidia-resiliency-ext")
    if _PEERS in plain and len(plain) > 1:
        raise _no_state(f"it has both {_PEERS} of nvidia-resiliency-ext and fields of this package")
    try:
        state = _of_peer(plain[_PEERS]) if _PEERS in plain else from_builtins(dict(plain), ClientLimits)
    except (TypeError, DecodeError) as error:
        raise _no_state(str(error)) from error
    missing = set(state.section_timeouts.calculated_sections) - set(state.section_timeouts.section)
    if missing:
        raise _no_state(f"{sorted(missing)} are marked as calculated but have no limit")
    for limit in _limits_of(state):
        if limit is not None and not 0 < limit < math.inf:
            raise _no_state(f"a limit is {limit!r}, expected seconds above 0")
    return state


def _of_peer(timeouts: object) -> ClientLimits:
    """Convert the limits in the state of the peer's client: flat in 0.2, under two keys from 0.3 on.

    Raises: DecodeError, ConfigurationError."""
    if not isinstance(timeouts, Mapping):
        raise _no_state(f"{_PEERS} is a {type(timeouts).__name__}, expected a dict")
    if not timeouts:
        return ClientLimits()
    if not set(timeouts) <= {"heartbeat", "section"}:
        timeouts = {"heartbeat": timeouts}
    heartbeat = _fields(timeouts.get("heartbeat", {}), HeartbeatTimeouts)
    section = _fields(timeouts.get("section", {}), SectionTimeouts)
    heartbeat["were_calculated"] = bool(heartbeat.get("were_calculated"))  # 0.2 has None too
    if isinstance(section.get("calculated_sections"), Collection):  # a set, in a checkpoint of 0.3
        section["calculated_sections"] = sorted(section["calculated_sections"])
    state: ClientLimits = from_builtins({"hb_timeouts": heartbeat, "section_timeouts": section}, ClientLimits)
    heartbeats, sections = state.hb_timeouts, state.section_timeouts
    return ClientLimits(
        msgspec.structs.replace(
            heartbeats, initial=_not_too_short(heartbeats.initial), subsequent=_not_too_short(heartbeats.subsequent)
        ),
        msgspec.structs.replace(
            sections,
            section={name: _not_too_short(limit) for name, limit in sections.section.items()},
            out_of_section=_not_too_short(sections.out_of_section),
            first={},
        ),
    )


def _fields(values: object, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values as fields of `kind`. Raises: ConfigurationError if there are other fields."""
    if not isinstance(values, Mapping) or not set(values) <= set(kind.__struct_fields__):
        raise _no_state(f"{_PEERS} contains {values!r}, expected {', '.join(kind.__struct_fields__)}"[:500])
    return dict(values)


def _not_too_short(limit: float | None) -> float | None:
    return SHORTEST if limit is not None and 0 < limit < SHORTEST else limit


def _limits_of(state: ClientLimits) -> list[float | None]:
    sections = state.section_timeouts
    return [
        state.hb_timeouts.initial,
        state.hb_timeouts.subsequent,
        sections.out_of_section,
        *sections.section.values(),
        *sections.first.values(),
    ]


def _no_state(why: str) -> ConfigurationError:
    return ConfigurationError(f"this is not a state of a RankMonitorClient: {why}")
