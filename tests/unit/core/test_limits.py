"""Limits that follow from the longest times seen."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core import limits
from resilience.core.limits import ClientLimits, HeartbeatTimeouts, Observed, SectionTimeouts, with_recorded_names
from resilience.errors import ConfigurationError, RankMonitorClientError
from resilience.facts.deadlines import EARLY, HEARTBEAT, OUT_OF_SECTION
from resilience.facts.limits import First, Learned, Limit, Limits, Outside
from resilience.facts.phases import Phases

SEEN = Observed(first_heartbeat=20.0, heartbeat_gap=4.0, outside=2.0, sections={"step": 3.0, "save": 30.0})
NOTHING = SectionTimeouts()


def sections_of(seen: Observed, current: SectionTimeouts = NOTHING, **how: Any) -> SectionTimeouts:
    return limits.section_timeouts(seen, current, 5.0, **how)


# -- heartbeats ---------------------------------------------------------------------------------------


def test_limits_of_heartbeats_are_the_longest_times_multiplied() -> None:
    made = limits.heartbeat_timeouts(SEEN, HeartbeatTimeouts(3600.0, 2700.0), 5.0)
    assert made == HeartbeatTimeouts(100.0, 20.0, were_calculated=True)
    assert made.are_valid


def test_first_heartbeat_is_not_expected_sooner_than_later_ones() -> None:
    made = limits.heartbeat_timeouts(Observed(0.001, 4.0), HeartbeatTimeouts(), 5.0)
    assert (made.initial, made.subsequent) == (20.0, 20.0)


@pytest.mark.parametrize("seen", [Observed(), Observed(first_heartbeat=1.0), Observed(heartbeat_gap=1.0)])
def test_too_few_heartbeats_are_said(seen: Observed) -> None:
    with pytest.raises(RankMonitorClientError, match="no rank has sent two heartbeats"):
        limits.heartbeat_timeouts(seen, HeartbeatTimeouts(), 5.0)


def test_calculated_limit_rises_at_once_and_falls_by_half_the_way() -> None:
    known = HeartbeatTimeouts(100.0, 20.0, were_calculated=True)
    slower = limits.heartbeat_timeouts(Observed(60.0, 8.0), known, 5.0)
    assert (slower.initial, slower.subsequent) == (300.0, 40.0)
    faster = limits.heartbeat_timeouts(Observed(4.0, 2.0), known, 5.0)
    assert (faster.initial, faster.subsequent) == (60.0, 15.0)
    configured = limits.heartbeat_timeouts(Observed(4.0, 2.0), HeartbeatTimeouts(100.0, 20.0), 5.0)
    assert (configured.initial, configured.subsequent) == (20.0, 10.0)


duration = st.floats(min_value=1e-6, max_value=1e5)


@given(duration, duration, st.floats(min_value=1.0, max_value=20.0), st.none() | duration)
def test_limit_covers_what_was_seen_whatever_was_known(
    first: float, gap: float, factor: float, known: float | None
) -> None:
    current = HeartbeatTimeouts(known, known, were_calculated=True)
    made = limits.heartbeat_timeouts(Observed(first, gap), current, factor)
    assert made.initial is not None and made.subsequent is not None
    assert made.initial >= max(first, gap) * factor and made.subsequent >= gap * factor
    assert made.initial >= limits.SHORTEST and made.subsequent >= limits.SHORTEST


# -- sections -----------------------------------------------------------------------------------------


def test_limits_of_all_sections_seen_by_default() -> None:
    made = sections_of(SEEN, SectionTimeouts({"other": 7.0, "step": 1.0}))
    assert made.section == {"other": 7.0, "save": 150.0, "step": 15.0}
    assert made.out_of_section == 10.0
    assert made.calculated_sections == {"save", "step"}
    assert made.is_out_of_section_calculated and made.are_valid


def test_limits_were_calculated_if_all_were() -> None:
    every = frozenset({"save", "step"})
    of = {"save": 1.0, "step": 2.0}
    assert SectionTimeouts(of, 1.0, every, True).were_calculated
    assert not SectionTimeouts(of, 1.0, frozenset({"save"}), True).were_calculated
    assert not SectionTimeouts(of, 1.0, every, False).were_calculated
    assert not SectionTimeouts().were_calculated


def test_only_selected_sections_change() -> None:
    made = sections_of(SEEN, SectionTimeouts({"save": 7.0}, 8.0), selected=["step"], with_outside=False)
    assert made == SectionTimeouts({"save": 7.0, "step": 15.0}, 8.0, frozenset({"step"}), False)
    none = sections_of(SEEN, selected=[])
    assert (none.section, none.out_of_section, none.calculated_sections) == ({}, 10.0, frozenset())


@pytest.mark.parametrize(
    ("seen", "how", "missing"),
    [
        (Observed(outside=1.0), {}, "any section"),
        (Observed(sections={"step": 1.0}), {}, "calc_out_of_section=False"),
        (SEEN, {"selected": ["step", "eval"]}, "'eval'"),
    ],
)
def test_what_was_not_seen_is_named(seen: Observed, how: dict[str, Any], missing: str) -> None:
    with pytest.raises(RankMonitorClientError, match=missing):
        sections_of(seen, **how)


def test_calculated_section_falls_slowly_and_a_configured_one_is_replaced() -> None:
    known = SectionTimeouts(
        {"step": 100.0, "save": 1000.0}, 30.0, frozenset({"step"}), is_out_of_section_calculated=True
    )
    made = sections_of(SEEN, known)
    assert made.section == {"save": 150.0, "step": 57.5}
    assert made.out_of_section == 20.0


def test_first_occurrences_keep_a_limit_that_covers_them_where_a_rated_one_leaves_them_out() -> None:
    made = limits.section_timeouts(SEEN, SectionTimeouts(), 5.0, fitted={"save": 40.0})
    assert (made.section["save"], made.first) == (40.0, {"save": 150.0})
    state = limits.ClientLimits(section_timeouts=made)
    enforced = limits.with_state(Limits(), state)
    assert enforced.first["save"].occurrences == EARLY
    assert set(enforced.first["save"].limits) == {"cold", "warm", "iteration"}
    assert enforced.first["save"].limits["warm"] == Limit(hard=150.0)
    assert limits.from_plain(limits.to_plain(state)) == state
    assert limits.section_timeouts(SEEN, made, 5.0).first == {}


def test_a_pause_of_the_host_is_no_hang_of_a_short_section() -> None:
    assert sections_of(Observed(outside=1e-4, sections={"step": 1e-3})).section["step"] == limits.SHORTEST


# -- all of them together -----------------------------------------------------------------------------

IN_FORCE = Limits(
    heartbeat=Limit(hard=9.0), initial_heartbeat=Limit(hard=90.0), sections={"step": Limit(hard=7.0)}, signal="SIGUSR1"
)


def test_limits_take_the_state_and_keep_the_rest() -> None:
    state = limits.configured(IN_FORCE)
    assert state == ClientLimits(HeartbeatTimeouts(90.0, 9.0), SectionTimeouts({"step": 7.0}))
    assert limits.with_state(IN_FORCE, state) == IN_FORCE
    changed = limits.with_state(
        IN_FORCE, ClientLimits(HeartbeatTimeouts(None, 3.0), SectionTimeouts({"save": None}, out_of_section=4.0))
    )
    assert changed == Limits(
        heartbeat=Limit(hard=3.0), sections={"save": Limit()}, out_of_section=Limit(hard=4.0), signal="SIGUSR1"
    )


def test_newly_calculated_limits_leave_out_all_others() -> None:
    timeouts = limits.section_timeouts(SEEN, SectionTimeouts({"data": 9.0}), 5.0, fitted={"save": 40.0, "step": 5.0})
    only = limits.newly_calculated(timeouts, ["save"], with_outside=False)
    assert only == SectionTimeouts({"save": 40.0}, None, frozenset({"save"}), first={"save": timeouts.first["save"]})
    assert limits.newly_calculated(timeouts, ["save"], with_outside=True).out_of_section == timeouts.out_of_section


FITTED = ClientLimits(section_timeouts=SectionTimeouts({"work": 4.0}, None, frozenset({"work"}), first={"work": 10.0}))
SLOWER = ClientLimits(section_timeouts=SectionTimeouts({"work": 150.0}, None, frozenset({"work"})))


def test_calculated_limit_replaces_all_earlier_ones_of_its_section() -> None:
    """Else the limit of the first occurrences, fitted or from a file, could end a rank long before the new limit."""
    early = First(EARLY, {"cold": Limit(hard=10.0)})
    file = Limits(
        first={"work": early, "save": early, "heartbeat": early},
        outside={"work": Outside(Limit(hard=3.0), Phases((100,), 500))},
    )
    for before in (file, limits.with_state(file, FITTED)):
        after = limits.with_state(before, SLOWER)
        assert (after.sections, after.first.keys(), after.outside) == (
            {"work": Limit(hard=150.0)},
            {"save", "heartbeat"},
            {},
        )
    heartbeats = ClientLimits(HeartbeatTimeouts(60.0, 30.0, True))
    assert limits.with_state(file, heartbeats).first.keys() == {"work", "save"}


def test_calculated_limit_does_not_restore_a_warm_up_limit_replaced_by_a_learned_one() -> None:
    short, early = Limit(hard=20.0), First(EARLY, {"cold": Limit(hard=100.0)})
    warm_up = Limits(warmup={"work": short, "save": short}, warmup_heartbeat=short, warmup_occurrences=5)
    learned = msgspec.structs.replace(warm_up, first={"work": early, "heartbeat": early})
    slower = ClientLimits(HeartbeatTimeouts(200.0, 150.0, True), SLOWER.section_timeouts)
    after = limits.with_state(learned, slower)
    assert (after.warmup, after.warmup_heartbeat) == ({"save": short}, None)
    assert limits.with_state(warm_up, slower).warmup == warm_up.warmup  # in force before, so it stays


def test_calculated_limit_is_no_learned_one_any_more() -> None:
    """Else it would count as calibrated, and as stale once durations do not agree with the calibrated ones."""
    learned = {name: Learned(9.0, 1.0, 2.0) for name in ("work", "save", OUT_OF_SECTION, HEARTBEAT)}
    sections = SectionTimeouts({"work": 20.0, "save": 9.0}, None, frozenset({"work"}))
    changed = limits.with_state(Limits(learned=learned), ClientLimits(section_timeouts=sections))
    assert changed.learned.keys() == {"save", OUT_OF_SECTION, HEARTBEAT}
    heartbeats = ClientLimits(HeartbeatTimeouts(9.0, 9.0, were_calculated=True))
    assert limits.with_state(changed, heartbeats).learned.keys() == {"save", OUT_OF_SECTION}


def test_calculated_limit_of_a_checkpoint_replaces_the_one_of_first_occurrences() -> None:
    assert limits.over(FITTED, SLOWER).section_timeouts == SLOWER.section_timeouts
    assert limits.over(SLOWER, FITTED).section_timeouts == FITTED.section_timeouts


def test_only_what_was_calculated_is_taken_from_a_checkpoint() -> None:
    loaded = ClientLimits(
        HeartbeatTimeouts(1.0, 2.0), SectionTimeouts({"step": 3.0, "save": 4.0}, 5.0, frozenset({"save"}))
    )
    now = limits.configured(IN_FORCE)
    merged = limits.over(now, loaded)
    assert merged.hb_timeouts == now.hb_timeouts
    assert merged.section_timeouts == SectionTimeouts({"save": 4.0, "step": 7.0}, None, frozenset({"save"}))
    calculated = ClientLimits(HeartbeatTimeouts(1.0, 2.0, True), SectionTimeouts({}, 5.0, frozenset(), True))
    merged = limits.over(now, calculated)
    assert merged.hb_timeouts == calculated.hb_timeouts
    assert merged.section_timeouts == SectionTimeouts({"step": 7.0}, 5.0, frozenset(), True)


def test_state_survives_json() -> None:
    state = ClientLimits(limits.heartbeat_timeouts(SEEN, HeartbeatTimeouts(), 5.0), sections_of(SEEN))
    plain = limits.to_plain(state)
    assert json.loads(json.dumps(plain)) == plain
    assert limits.from_plain(plain) == state
    assert limits.from_plain(limits.to_plain(ClientLimits())) == ClientLimits()


@pytest.mark.parametrize(
    "plain",
    [
        {"hb_timeouts": 3},
        {"hb_timeouts": {"initial": "long"}},
        {"section_timeouts": {"section": {}, "calculated_sections": ["step"]}},
        {"section_timeouts": {"section": {"step": -1.0}, "calculated_sections": ["step"]}},
        {"model": 3},
        {"current_timeouts": 3},
        {"current_timeouts": {}, "hb_timeouts": {}},
        {"current_timeouts": {"initial": 60.0, "later": 30.0}},
        {"current_timeouts": {"heartbeat": {"initial": 60.0}, "sections": {}}},
        {"current_timeouts": {"heartbeat": {"initial": 60.0, "limit": 30.0}}},
        {"current_timeouts": {"initial": "long", "subsequent": 30.0, "were_calculated": True}},
        {"current_timeouts": {"section": {"section": {}, "calculated_sections": ["step"]}}},
        {"current_timeouts": {"section": {"section": {}, "calculated_sections": [1, "step"]}}},
    ],
)
def test_what_is_no_state_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="not a state of a RankMonitorClient"):
        limits.from_plain(plain)


def test_value_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="it is a list, expected a dict"):
        limits.from_plain([])  # type: ignore[arg-type]


@pytest.mark.parametrize("plain", [{}, {"current_timeouts": {}}])
def test_empty_state_of_the_peer_is_a_state_without_limits(plain: dict[str, Any]) -> None:
    assert limits.from_plain(plain) == ClientLimits()


PEERS_KEYS = {"heartbeat", "section"}  # of the peer's nested state
PEERS_HEARTBEAT = {"initial": 300.0, "subsequent": 60.5, "were_calculated": True}
PEERS_SECTION: dict[str, Any] = {
    "section": {"setup": None, "save": 900.0, "step": 30.0},
    "out_of_section": 120.0,
    "calculated_sections": ["save", "step"],
    "is_out_of_section_calculated": True,
}


def test_flat_state_of_the_peer_is_converted() -> None:
    plain = {"current_timeouts": PEERS_HEARTBEAT}
    assert limits.from_plain(plain) == ClientLimits(HeartbeatTimeouts(300.0, 60.5, were_calculated=True))


@pytest.mark.parametrize("sections", [["save", "step"], {"save", "step"}])
def test_nested_state_of_the_peer_is_converted(sections: Any) -> None:
    section = {**PEERS_SECTION, "calculated_sections": sections}
    plain = {"current_timeouts": {"heartbeat": PEERS_HEARTBEAT, "section": section}}
    assert limits.from_plain(plain) == ClientLimits(
        HeartbeatTimeouts(300.0, 60.5, were_calculated=True),
        SectionTimeouts({"setup": None, "save": 900.0, "step": 30.0}, 120.0, frozenset({"save", "step"}), True),
    )


@pytest.mark.slow  # it changes with a release of the peer only
def test_states_of_the_peer_have_the_fields_of_its_own_source() -> None:
    """The source is read, not imported: that needs all that the peer depends on."""
    peer = importlib.util.find_spec("nvidia_resiliency_ext")
    if peer is None or peer.submodule_search_locations is None:
        pytest.skip("THE STATES OF THE PEER ITSELF ARE NOT READ HERE: it is not installed: `poe install-peer`")
    folder = Path(peer.submodule_search_locations[0], "fault_tolerance")
    fields: dict[str, list[str]] = {}
    keys: set[str] = set()
    for source in (folder / "data.py", folder / "rank_monitor_client.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef):
                fields[node.name] = [
                    ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)
                ]
            if isinstance(node, ast.FunctionDef) and node.name == "load_state_dict":
                keys |= {
                    key.value for key in ast.walk(node) if isinstance(key, ast.Constant) and key.value in PEERS_KEYS
                }
    assert fields["HeartbeatTimeouts"] == list(PEERS_HEARTBEAT)
    if "SectionTimeouts" in fields:  # from 0.3 on
        assert fields["SectionTimeouts"] == list(PEERS_SECTION)
        assert keys == PEERS_KEYS


def test_state_of_the_peer_that_has_one_kind_of_limits_leaves_the_other_alone() -> None:
    heartbeats = {"initial": 300.0, "subsequent": 60.0, "were_calculated": True}
    assert limits.from_plain({"current_timeouts": {"heartbeat": heartbeats}}).section_timeouts == SectionTimeouts()
    section = {"section": {"step": 30.0}, "calculated_sections": ["step"]}
    loaded = limits.from_plain({"current_timeouts": {"section": section}})
    assert limits.over(ClientLimits(HeartbeatTimeouts(9.0, 8.0)), loaded).hb_timeouts == HeartbeatTimeouts(9.0, 8.0)


def test_limit_of_the_peer_is_never_below_the_shortest_one_of_ours() -> None:
    section = {"section": {"step": 0.05}, "out_of_section": 0.2, "calculated_sections": ["step"]}
    loaded = limits.from_plain({"current_timeouts": {"section": section}}).section_timeouts
    assert (loaded.section, loaded.out_of_section) == ({"step": limits.SHORTEST}, limits.SHORTEST)


def test_limits_have_the_names_under_which_sections_are_observed() -> None:
    name = "validation/" + "é" * 40
    short = "validation/" + "é" * 26
    own = Limits(sections={name: Limit(hard=5.0)}, warmup={name: Limit(hard=9.0)})
    limits = with_recorded_names(msgspec.structs.replace(own, shadow=own))
    for each in (limits, limits.shadow):
        assert each is not None
        assert (list(each.sections), list(each.warmup)) == ([short], [short])
    assert with_recorded_names(limits) == limits
