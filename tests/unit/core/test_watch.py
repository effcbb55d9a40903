"""Watching one rank: what is noticed, when, and what follows.

Tests whose one argument is `watcher` are also given to every mutant of the module (tests/mutate.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

from resilience.core import watch
from resilience.core.observation import Doing, Observation, Sign, Suspicion
from resilience.core.silences import Silence
from resilience.core.standstills import Standstill
from resilience.core.watch import (
    UNENDED,
    AskRestart,
    CaptureEvidence,
    Command,
    Decision,
    Finding,
    Finish,
    Kill,
    NoteUnknown,
    Represent,
    SendSignal,
    StandIn,
    Watch,
)
from resilience.facts.deadlines import Start
from resilience.facts.limits import NO_LIMIT, First, Learned, Limit, Limits, Outside, Rule
from resilience.facts.phases import Phases

SOFT, HARD, GRACE = 5.0, 9.0, 2.0
BOTH = Limit(SOFT, HARD)
START = 10.0

Observe = Callable[[float], Observation]


@pytest.fixture
def watcher() -> ModuleType:
    return watch


def watch_over(
    watcher: ModuleType, limits: Limits, observe: Observe | Observation, start: float = START, until: float = 100.0
) -> list[tuple[float, Command]]:
    """Look whenever the decision before wants it; return what was commanded, and when."""
    state, now, commands = Watch(limits=limits), start, []
    for _ in range(200):
        seen = observe(now) if callable(observe) else observe
        decision: Decision = watcher.decide(state, seen, now)
        commands += [(now, command) for command in decision.commands]
        state = decision.state
        if decision.wake_at is None or decision.wake_at > until:
            return commands
        assert decision.wake_at > now or decision.commands, f"it spins at {now}"
        now = decision.wake_at
    pytest.fail("it looks more often than it has reason to")


def without_notes(commands: list[tuple[float, Command]]) -> list[tuple[float, Command]]:
    return [(at, command) for at, command in commands if not isinstance(command, NoteUnknown)]


def found(commands: list[tuple[float, Command]]) -> set[str]:
    """The names of all limits that were found exceeded."""
    return {command.finding.limit for _, command in commands if isinstance(command, AskRestart | SendSignal | Kill)}


def limits_of(**limits: Any) -> Limits:
    return msgspec.structs.replace(Limits(grace=GRACE), **limits)


def in_function(**signs: Any) -> Observation:
    return msgspec.structs.replace(Observation(doing=Doing.FUNCTION, since=START), **signs)


# What is silent from START on, and the limit that notices. Everything else is alive, or not armed.
SILENT: dict[str, tuple[Limits, Observation]] = {
    "watchdog": (limits_of(watchdog=BOTH), in_function(since=0.0, watchdog_at=START)),
    "store": (limits_of(store=BOTH), Observation(doing=Doing.WAITING, store_due_at=START)),
    "ping": (limits_of(ping=BOTH), in_function(ping_at=START)),
    "step": (limits_of(step=BOTH), in_function(step_at=START)),
    "heartbeat": (limits_of(heartbeat=BOTH), in_function(heartbeat_at=START)),
    "initial_heartbeat": (limits_of(initial_heartbeat=BOTH), in_function(heartbeats_from=START)),
    "section:data": (limits_of(sections={"data": BOTH}), in_function(open_sections=(Sign("data", START),))),
    "out_of_section": (limits_of(out_of_section=BOTH), in_function(section_left_at=START)),
    "leave": (limits_of(leave=BOTH), in_function(since=0.0, interrupted_at=START)),
    "hook:abort": (limits_of(leave=BOTH), in_function(since=0.0, interrupted_at=START, is_in_abort_hook=True)),
    "hook:finalize": (limits_of(hook=BOTH), Observation(doing=Doing.HOOK, hook="finalize", since=START)),
}


# -- limits ------------------------------------------------------------------------------------------------------


def test_each_limit_is_enforced_to_the_moment(watcher: ModuleType) -> None:
    for name, (limits, seen) in SILENT.items():
        soft, hard = Finding(name, "soft", SOFT, SOFT), Finding(name, "hard", HARD, HARD)
        assert without_notes(watch_over(watcher, limits, seen)) == [
            (START + SOFT, CaptureEvidence(soft)),
            (START + SOFT, AskRestart(soft)),
            (START + HARD, CaptureEvidence(hard)),
            (START + HARD, AskRestart(hard)),
            (START + HARD, SendSignal(hard)),
            (START + HARD + GRACE, Kill(hard)),
        ]


def test_hook_that_waits_for_the_abort_hook_is_not_blamed_for_it(watcher: ModuleType) -> None:
    cases = ((0.25, 0.5, "abort"), (0.75, 0.5, "terminate"), (0.25, None, "terminate"))
    for began, interrupted_at, hook in cases:
        seen = Observation(
            doing=Doing.HOOK, hook="terminate", since=began, interrupted_at=interrupted_at, is_in_abort_hook=True
        )
        (finding,) = watcher.exceeded(limits_of(hook=Limit(hard=HARD)), seen, START + HARD)
        assert finding.limit == f"hook:{hook}"


def test_process_that_stands_still_while_it_waits_for_the_store_has_the_limit_of_any_other(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=BOTH, store=Limit(hard=50.0 * HARD))
    stopped = Observation(doing=Doing.WAITING, store_due_at=START, watchdog_at=0.0, ran_at=START)
    assert [(at, type(command)) for at, command in without_notes(watch_over(watcher, limits, stopped))] == [
        (START + HARD, CaptureEvidence),
        (START + HARD, AskRestart),
        (START + HARD, SendSignal),
        (START + HARD + GRACE, Kill),
    ]


def test_limit_that_is_not_set_never_fires(watcher: ModuleType) -> None:
    for _, seen in SILENT.values():
        assert watch_over(watcher, limits_of(), seen) == []


def test_soft_or_hard_alone(watcher: ModuleType) -> None:
    seen = in_function(step_at=START)
    soft = watch_over(watcher, limits_of(step=Limit(soft=SOFT)), seen)
    assert [(at, type(command)) for at, command in soft] == [
        (START + SOFT, CaptureEvidence),
        (START + SOFT, AskRestart),
    ]
    hard = watch_over(watcher, limits_of(step=Limit(hard=HARD)), seen)
    assert [at for at, _ in hard] == [START + HARD] * 3 + [START + HARD + GRACE]


def test_rank_that_shows_life_is_left_alone(watcher: ModuleType) -> None:
    limits = limits_of(
        watchdog=BOTH, ping=BOTH, step=BOTH, heartbeat=BOTH, sections={"data": BOTH}, out_of_section=BOTH
    )

    def observe(now: float) -> Observation:
        beat = now - 4.0
        return in_function(
            watchdog_at=beat, ping_at=beat, step_at=beat, heartbeat_at=beat, open_sections=(Sign("data", beat),)
        )

    assert watch_over(watcher, limits, observe) == []


def test_deadline_is_noticed_although_its_sum_is_not_exact(watcher: ModuleType) -> None:
    """Found by simulation: (since + limit) - since may be less than the limit, and the monitor span."""
    since = 4.1
    assert (since + 60.0) - since < 60.0
    limits = limits_of(step=Limit(60.0, None))
    commands = watch_over(watcher, limits, in_function(since=0.0, step_at=since), start=since)
    assert [at for at, _ in commands] == [since + 60.0] * 2


def test_entering_the_function_counts_as_bytecode(watcher: ModuleType) -> None:
    for watchdog_at in (None, 1.0):
        seen = in_function(watchdog_at=watchdog_at)
        assert without_notes(watch_over(watcher, limits_of(watchdog=Limit(SOFT)), seen))[0][0] == START + SOFT


@pytest.mark.parametrize("doing", [Doing.FUNCTION, Doing.WAITING, Doing.HOOK])
def test_rank_is_not_ended_while_its_abort_may_still_run(watcher: ModuleType, doing: Doing) -> None:
    interrupted_at = START + HARD - 1.0
    silent = Observation(doing=doing, since=START, interrupted_at=interrupted_at)
    limits = limits_of(watchdog=Limit(None, HARD), hook=Limit(None, HARD), abort=5.0)
    at, command = watch_over(watcher, limits, silent)[0]
    assert (at, type(command)) == (interrupted_at + 5.0, CaptureEvidence)
    # An abort that is over long before the limit changes nothing.
    early = msgspec.structs.replace(silent, interrupted_at=START + 1.0)
    assert watch_over(watcher, limits, early)[0][0] == START + HARD


def test_time_to_leave_begins_with_the_interruption_or_with_entering_after_it(watcher: ModuleType) -> None:
    for since, interrupted_at in ((1.0, START), (START, 1.0)):
        seen = in_function(since=since, interrupted_at=interrupted_at)
        assert watch_over(watcher, limits_of(leave=Limit(None, HARD)), seen)[0][0] == START + HARD


def test_rank_that_left_without_a_goodbye_is_represented_once_although_it_lives(watcher: ModuleType) -> None:
    seen = in_function(has_left=True, watchdog_at=START)
    assert watch_over(watcher, limits_of(watchdog=BOTH), seen) == [(START, Represent())]
    state = watcher.decide(Watch(), seen, START).state
    gone = msgspec.structs.replace(seen, is_gone=True)
    assert watcher.decide(state, gone, START + 1.0).commands == (Finish(),)
    assert watcher.decide(Watch(), gone, START + 1.0).commands == (StandIn(),)


def test_rank_that_said_goodbye_is_weighed_no_more_although_it_is_still_inside(watcher: ModuleType) -> None:
    for left in (False, True):
        seen = in_function(said_goodbye=True, has_left=left, watchdog_at=START, is_stuck=True)
        assert watch_over(watcher, limits_of(watchdog=BOTH), seen) == []


def test_hook_after_the_goodbye_has_its_limit_until_the_rank_has_left(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=BOTH, hook=Limit(None, HARD))
    seen = Observation(doing=Doing.HOOK, hook="completion", since=START, watchdog_at=1.0, said_goodbye=True)
    decisions = watch_over(watcher, limits, seen)
    assert decisions[0][0] == START + HARD
    assert found(decisions) == {"hook:completion"}
    assert watch_over(watcher, limits, msgspec.structs.replace(seen, has_left=True)) == []
    gone = msgspec.structs.replace(seen, is_gone=True)
    assert watcher.decide(Watch(limits), gone, START + HARD).commands == (Finish(),)


def test_rank_that_waits_for_the_store_has_that_limit_alone(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=BOTH, hook=BOTH, ping=BOTH, store=Limit(None, 50.0))
    for doing in (Doing.WAITING, Doing.HOOK, Doing.FUNCTION):
        seen = Observation(doing=doing, since=2.0, watchdog_at=1.0, ping_at=1.0, store_due_at=START)
        assert watch_over(watcher, limits, seen, until=START + 49.0) == []
        assert watch_over(watcher, limits, seen)[0][0] == START + 50.0
        outside = msgspec.structs.replace(seen, doing=Doing.OUTSIDE)
        assert watch_over(watcher, limits, outside) == []


def test_wait_for_the_store_that_a_hook_chose_counts_towards_its_limit_until_the_answer_is_due(
    watcher: ModuleType,
) -> None:
    limits = limits_of(watchdog=BOTH, hook=Limit(None, HARD), store=Limit(None, 50.0))
    seen = Observation(doing=Doing.HOOK, hook="finalize", since=START)
    for due in (START + HARD, START + HARD + 5.0):
        decisions = watch_over(watcher, limits, msgspec.structs.replace(seen, store_due_at=due))
        assert decisions[0][0] == START + HARD
        assert found(decisions) == {"hook:finalize"}
    late_store = msgspec.structs.replace(seen, store_due_at=START + HARD - 0.5)
    assert found(watch_over(watcher, limits, late_store)) == {"store"}
    no_hook = msgspec.structs.replace(seen, doing=Doing.WAITING, store_due_at=START + HARD)
    assert found(watch_over(watcher, limits, no_hook)) == {"store"}
    no_limit = msgspec.structs.replace(limits, hook=Limit())
    assert found(watch_over(watcher, no_limit, msgspec.structs.replace(seen, store_due_at=START))) == {"store"}


def test_only_what_the_rank_is_doing_is_weighed(watcher: ModuleType) -> None:
    everything = limits_of(
        watchdog=BOTH, ping=BOTH, step=BOTH, heartbeat=BOTH, leave=BOTH, hook=Limit(None, HARD), out_of_section=BOTH
    )
    old: dict[str, Any] = dict.fromkeys(
        ("ping_at", "step_at", "heartbeat_at", "section_left_at", "interrupted_at"), 1.0
    )
    outside = Observation(doing=Doing.OUTSIDE, since=START, **old)
    assert watch_over(watcher, everything, outside) == []
    waiting = Observation(doing=Doing.WAITING, since=START, **old)
    assert found(watch_over(watcher, everything, waiting)) == {"watchdog"}
    hook = Observation(doing=Doing.HOOK, hook="initialize", since=START, **old)
    assert watch_over(watcher, everything, hook)[0][0] == START + HARD
    assert found(watch_over(watcher, everything, hook)) == {"hook:initialize"}


def test_first_heartbeat_and_later_ones_have_limits_of_their_own(watcher: ModuleType) -> None:
    limits = limits_of(heartbeat=Limit(1.0), initial_heartbeat=Limit(50.0))
    assert watch_over(watcher, limits, in_function(since=0.0, heartbeats_from=START))[0][0] == START + 50.0
    assert watch_over(watcher, limits, in_function(heartbeat_at=START))[0][0] == START + 1.0
    assert watch_over(watcher, limits, in_function()) == []  # nobody announced any


def test_heartbeat_before_the_announcement_is_not_the_first_one(watcher: ModuleType) -> None:
    """A program may send some while it sets up, an hour before it announces them: then the first one is waited for."""
    limits = limits_of(heartbeat=Limit(1.0), initial_heartbeat=Limit(50.0))
    early = in_function(since=0.0, heartbeat_at=2.0, heartbeats_from=START)
    assert watch_over(watcher, limits, early)[0][0] == START + 50.0
    later = in_function(since=0.0, heartbeat_at=START + 20.0, heartbeats_from=START)
    assert watch_over(watcher, limits, later)[0][0] == START + 21.0


def test_default_limit_between_heartbeats_holds_only_for_heartbeats_that_were_announced(watcher: ModuleType) -> None:
    """A few heartbeats in a long evaluation are no promise of more, while steps show that the rank is well."""
    default = limits_of(heartbeat=Limit(hard=50.0), initial_heartbeat=Limit(hard=70.0), defaults=("heartbeat",))
    beaten = in_function(heartbeat_at=START)
    assert found(watch_over(watcher, default, beaten)) == set()
    assert found(watch_over(watcher, default, in_function(heartbeats_from=0.0, heartbeat_at=START))) == {"heartbeat"}
    warm_up = msgspec.structs.replace(default, warmup_heartbeat=Limit(hard=30.0), warmup_occurrences=2)
    for gaps, limits_found in ((1, {"heartbeat"}), (2, set())):
        seen = in_function(heartbeat_at=START, heartbeat_gaps=gaps)
        assert found(watch_over(watcher, warm_up, seen)) == limits_found
    learned = msgspec.structs.replace(default, learned={"heartbeat": Learned(50.0, 1.0, 2.0)})
    for set_limit in (msgspec.structs.replace(default, defaults=()), learned):
        assert found(watch_over(watcher, set_limit, beaten)) == {"heartbeat"}


def test_default_limit_between_heartbeats_stays_a_default_if_only_the_first_gaps_are_learned(
    watcher: ModuleType,
) -> None:
    """A file of limits may have too few gaps between heartbeats for more than a limit of the first ones."""
    first = {"heartbeat": First(1, dict.fromkeys(get_args(Start), Limit(hard=20.0)))}
    default = limits_of(heartbeat=Limit(hard=50.0), defaults=("heartbeat",), first=first)
    assert found(watch_over(watcher, default, in_function(heartbeat_at=START, heartbeat_gaps=1))) == set()
    assert found(watch_over(watcher, default, in_function(heartbeat_at=START, heartbeat_gaps=0))) == {"heartbeat"}
    promised = in_function(heartbeats_from=0.0, heartbeat_at=START, heartbeat_gaps=1)
    assert found(watch_over(watcher, default, promised)) == {"heartbeat"}


def test_sections_are_signs_of_a_rank_that_never_sends_the_heartbeats_it_announced(watcher: ModuleType) -> None:
    limits = limits_of(initial_heartbeat=Limit(50.0))
    at = START + 20.0
    for signs in ({"section_left_at": at}, {"open_sections": (Sign("data", START, 1), Sign("save", at, 1))}):
        assert watch_over(watcher, limits, in_function(heartbeats_from=START, **signs))[0][0] == at + 50.0
    inner = in_function(heartbeats_from=START, open_sections=(Sign("train", START),), section_left_at=at)
    assert watch_over(watcher, limits, inner)[0][0] == at + 50.0
    before = in_function(heartbeats_from=START, section_left_at=START - 5.0)
    assert watch_over(watcher, limits, before)[0][0] == START + 50.0


def test_default_first_heartbeat_limit_is_ignored_if_steps_or_sections_are_reported(
    watcher: ModuleType,
) -> None:
    """A section without a limit may stay open for hours. A limit that is set or learned is meant."""
    ruled = limits_of(sections={"save": Limit()}, initial_heartbeat=Limit(hard=50.0), rule=Rule(600.0, 60.0))
    default = msgspec.structs.replace(ruled, defaults=("initial_heartbeat",))
    learned = msgspec.structs.replace(default, learned={"initial_heartbeat": Learned(50.0, 1.0, 2.0)})
    in_save = in_function(heartbeats_from=START, open_sections=(Sign("save", START),))
    after_save = in_function(heartbeats_from=START, section_left_at=START)
    stepping = in_function(heartbeats_from=START, step_at=START)
    for seen in (in_save, after_save, stepping):
        assert found(watch_over(watcher, default, seen)) == set()
        for limits in (ruled, learned, msgspec.structs.replace(default, rule=None)):  # else nothing would find a hang
            assert found(watch_over(watcher, limits, seen)) == {"initial_heartbeat"}
    setting_up = in_function(heartbeats_from=START, section_left_at=START - 1.0)
    for seen in (in_function(heartbeats_from=START), setting_up):
        assert found(watch_over(watcher, default, seen)) == {"initial_heartbeat"}


def test_first_occurrences_have_limits_of_their_own(watcher: ModuleType) -> None:
    limits = limits_of(
        sections={"data": Limit(SOFT), "save": Limit(SOFT)},
        heartbeat=Limit(SOFT),
        warmup={"data": Limit(30.0), "new": Limit(50.0)},
        warmup_heartbeat=Limit(40.0),
        warmup_occurrences=2,
    )

    def first(**signs: Any) -> float:
        return watch_over(watcher, limits, in_function(**signs))[0][0] - START

    for occurrence, data in ((1, 30.0), (2, 30.0), (3, SOFT)):
        assert first(open_sections=(Sign("data", START, occurrence),)) == data
        assert first(open_sections=(Sign("save", START, occurrence),)) == SOFT
    assert first(open_sections=(Sign("new", START, 2),)) == 50.0
    assert watch_over(watcher, limits, in_function(open_sections=(Sign("new", START, 3),))) == []
    assert [first(heartbeat_at=START, heartbeat_gaps=gaps) for gaps in (0, 1, 2)] == [40.0, 40.0, SOFT]
    unlimited = limits_of(sections={"data": Limit(SOFT)}, warmup={"data": Limit()}, warmup_occurrences=1)
    assert watch_over(watcher, unlimited, in_function(open_sections=(Sign("data", START, 1),))) == []


def test_first_occurrences_after_each_kind_of_start_have_learned_limits_of_their_own(watcher: ModuleType) -> None:
    by_start = {"cold": Limit(30.0), "warm": Limit(5.0)}
    deadlines = ("data", "step", "heartbeat", "out_of_section", "initial_heartbeat")
    limits = limits_of(
        sections={"data": Limit(SOFT)},
        step=Limit(SOFT),
        heartbeat=Limit(SOFT),
        out_of_section=Limit(SOFT),
        initial_heartbeat=Limit(SOFT),
        first={name: First(2, by_start) for name in deadlines},
    )

    def first(**signs: Any) -> float:
        return watch_over(watcher, limits, in_function(**signs))[0][0] - START

    for start, allowed in (("cold", 30.0), ("warm", 5.0), ("iteration", SOFT)):
        assert first(start=start, open_sections=(Sign("data", START, 2),)) == allowed
        assert first(start=start, open_sections=(Sign("data", START, 3),)) == SOFT
        assert first(start=start, step_at=START, step_gaps=1) == allowed
        assert first(start=start, step_at=START, step_gaps=2) == SOFT
        assert first(start=start, heartbeat_at=START, heartbeat_gaps=1) == allowed
        assert first(start=start, section_left_at=START, outside_gaps=1) == allowed
        assert first(start=start, heartbeats_from=START) == allowed


def test_short_limit_outside_phases_applies_to_a_cold_start_with_aligned_phases(
    watcher: ModuleType,
) -> None:
    short = Outside(Limit(2.0), Phases((100,), 500))
    limits = limits_of(sections={"data": Limit(SOFT)}, step=Limit(SOFT), outside={"data": short, "step": short})

    def data(occurrence: int, **signs: Any) -> float:
        known = {"start": "cold", "aligned": frozenset({"data"}), **signs}
        seen = in_function(open_sections=(Sign("data", START, occurrence),), **known)
        return watch_over(watcher, limits, seen)[0][0] - START

    assert data(10) == 2.0
    assert data(101) == data(501) == SOFT  # in the phase, and where nothing is known
    assert data(10, start="warm") == data(10, aligned=frozenset({"step"})) == SOFT
    at_step_10 = in_function(step_at=START, step_gaps=9, start="cold", aligned=frozenset({"step"}))
    assert watch_over(watcher, limits, at_step_10)[0][0] == START + 2.0
    unlearned = limits_of(step=Limit(SOFT))
    assert watch_over(watcher, unlearned, at_step_10)[0][0] == START + SOFT


def test_learned_first_limits_go_before_the_warm_up(watcher: ModuleType) -> None:
    limits = limits_of(
        heartbeat=Limit(SOFT),
        first={"heartbeat": First(1, {"cold": Limit(30.0)})},
        warmup_heartbeat=Limit(40.0),
        warmup_occurrences=3,
    )
    for gaps, allowed in ((0, 30.0), (1, SOFT)):
        seen = in_function(start="cold", heartbeat_at=START, heartbeat_gaps=gaps)
        assert watch_over(watcher, limits, seen)[0][0] == START + allowed


def test_learned_limits_do_not_hold_for_a_program_that_is_over(watcher: ModuleType) -> None:
    known = Learned(1.0, 0.1, 0.2)
    limits = limits_of(step=Limit(1.0), heartbeat=Limit(1.0), learned={"step": known, "heartbeat": known})
    seen = in_function(doing=Doing.ENDING, step_at=START, heartbeat_at=START)
    assert watch_over(watcher, limits, seen) == []
    by_hand = limits_of(step=Limit(1.0), heartbeat=Limit(1.0), learned={"heartbeat": known})
    assert watch_over(watcher, by_hand, seen)[0][0] == START + 1.0
    of_first = limits_of(step=Limit(1.0), first={"step": First(2, {"cold": Limit(1.0)})})
    assert watch_over(watcher, of_first, in_function(doing=Doing.ENDING, step_at=START)) == []
    ruled = limits_of(step=Limit(1.0), learned={"step": known}, rule=Rule(8.0, 4.0))
    silent = msgspec.structs.replace(seen, silence=Silence("", START, 8.0, START + 6.0))
    assert watch_over(watcher, ruled, silent)[0][0] == START + 8.0


def test_step_limit_is_at_least_that_of_the_rule_in_the_first_steps_after_a_start(watcher: ModuleType) -> None:
    def ends(gaps: int, limit: Limit, **limits: Any) -> list[float]:
        seen = in_function(step_at=START, step_gaps=gaps)
        commands = watch_over(watcher, limits_of(step=limit, **limits), seen, until=4000.0)
        return [at - START for at, command in commands if isinstance(command, AskRestart | SendSignal)]

    set_by_hand: dict[str, Any] = {"warmup_occurrences": 3, "rule": Rule(50.0, 40.0)}
    for gaps, allowed in ((0, 300.0), (1, 50.0), (2, 50.0), (3, HARD)):
        assert ends(gaps, Limit(hard=HARD), **set_by_hand) == [allowed] * 2
    assert ends(0, Limit(hard=400.0), **set_by_hand) == [400.0] * 2
    assert ends(1, Limit(hard=100.0), **set_by_hand) == [100.0] * 2  # between the rule's two
    assert ends(0, BOTH, **set_by_hand) == [300.0, 304.0, 304.0]  # in a Wrapper; the time between both stays
    assert ends(0, Limit(200.0), **set_by_hand) == [300.0]
    # Compilation takes as long if the rule is off: then its defaults count.
    assert ends(0, Limit(hard=60.0), warmup_occurrences=3) == [3600.0] * 2
    # Learned limits know the first occurrences.
    assert ends(0, Limit(hard=HARD), learned={"step": Learned(HARD, 1.0, 2.0)}, **set_by_hand) == [HARD] * 2
    assert ends(0, NO_LIMIT, warmup_occurrences=3) == []
    shuts_down = in_function(doing=Doing.ENDING, step_at=START)
    assert watch_over(watcher, limits_of(step=Limit(SOFT), warmup_occurrences=3), shuts_down)[0][0] == START + SOFT


def test_step_limit_has_first_steps_only_if_the_rule_allows_them_more(watcher: ModuleType) -> None:
    set_by_hand: dict[str, Any] = {"warmup_occurrences": 3, "rule": Rule(50.0, 40.0)}
    assert watcher.first_steps(limits_of(step=Limit(hard=HARD), **set_by_hand)) == 3
    assert watcher.first_steps(limits_of(step=Limit(hard=400.0), **set_by_hand)) == 0
    assert watcher.first_steps(limits_of(step=Limit(hard=400.0), warmup_occurrences=3)) == 3  # the rule's defaults


def test_warm_up_of_a_section_is_none_of_the_step_though_it_has_its_name(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(SOFT), warmup={"step": Limit(50.0)}, warmup_occurrences=3, rule=Rule(30.0))
    assert watch_over(watcher, limits, in_function(step_at=START, step_gaps=1))[0][0] == START + 30.0


def test_warm_up_of_heartbeats_is_none_of_a_section_of_that_name(watcher: ModuleType) -> None:
    limits = limits_of(warmup_heartbeat=Limit(SOFT), warmup_occurrences=3)
    assert found(watch_over(watcher, limits, in_function(open_sections=(Sign("heartbeat", START),)))) == set()
    usual = limits_of(heartbeat=Limit(SOFT), warmup_occurrences=3)
    assert watch_over(watcher, usual, in_function(heartbeat_at=START))[0][0] == START + SOFT


def test_shorter_limit_of_a_warm_up_is_not_slept_through(watcher: ModuleType) -> None:
    limits = limits_of(sections={"data": Limit(50.0)}, warmup={"data": Limit(2.0)}, warmup_occurrences=1)

    def observe(now: float) -> Observation:
        return in_function(open_sections=() if now < START + 3.0 else (Sign("data", START + 3.0, 1),))

    asked = watch_over(watcher, limits, observe)[0][0]
    assert START + 5.0 <= asked <= START + 7.0
    beating = limits_of(heartbeat=Limit(50.0), warmup_heartbeat=Limit(2.0), warmup_occurrences=1)

    def beat(now: float) -> Observation:
        return in_function() if now < START + 3.0 else in_function(heartbeat_at=START + 3.0)

    asked = watch_over(watcher, beating, beat)[0][0]
    assert START + 5.0 <= asked <= START + 7.0


def test_time_between_sections_counts_only_while_none_is_open(watcher: ModuleType) -> None:
    limits = limits_of(out_of_section=Limit(SOFT))
    unlimited = in_function(open_sections=(Sign("other", START),), section_left_at=START)
    assert not any(isinstance(command, AskRestart) for _, command in watch_over(watcher, limits, unlimited))


def test_gravest_of_several_findings_is_named(watcher: ModuleType) -> None:
    limits = limits_of(
        watchdog=Limit(1.0, 100.0), ping=Limit(10.0, 40.0), step=Limit(50.0, 60.0), heartbeat=Limit(30.0, 40.0)
    )
    seen = in_function(since=0.0, watchdog_at=0.0, ping_at=0.0, step_at=0.0, heartbeat_at=0.0)

    def first(now: float) -> Finding:
        command = watcher.decide(Watch(limits=limits), seen, now).commands[0]
        assert isinstance(command, CaptureEvidence)
        return command.finding

    assert first(31.0) == Finding("watchdog", "soft", 1.0, 31.0)  # by how many times its limit
    assert first(41.0) == Finding("ping", "hard", 40.0, 41.0)  # hard before soft; the name settles a tie
    assert first(101.0).limit == "ping"


def test_rank_that_its_abort_did_not_free_is_ended_at_once(watcher: ModuleType) -> None:
    stuck = in_function(since=1.0, interrupted_at=START - 2.0, is_stuck=True)
    commands = watch_over(watcher, limits_of(leave=Limit(None, 90.0)), stuck)
    assert [at for at, _ in commands] == [START] * 3 + [START + GRACE]
    assert commands[2][1] == SendSignal(Finding("abort", "hard", 0.0, 2.0))
    never_told = watch_over(watcher, limits_of(), in_function(since=START - 3.0, is_stuck=True))
    assert never_told[2][1] == SendSignal(Finding("abort", "hard", 0.0, 3.0))


# -- restarts ----------------------------------------------------------------------------------------------------


def test_restart_is_asked_for_once_an_iteration(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(soft=SOFT))

    def observe(now: float) -> Observation:
        return in_function(step_at=START if now < 40.0 else 40.0, iteration=0 if now < 40.0 else 1)

    asked = [at for at, command in watch_over(watcher, limits, observe) if isinstance(command, AskRestart)]
    assert len(asked) == 2
    assert asked[0] == START + SOFT
    assert 40.0 + SOFT <= asked[1] <= 40.0 + 2 * SOFT  # nobody announced the step of iteration 1


# -- the end of a rank -------------------------------------------------------------------------------------------


def test_grace_is_kept_however_often_the_monitor_looks(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD))
    seen = in_function(step_at=START)
    state = Watch(limits=limits)
    kills: list[float] = []
    for tick in range(600):
        now = START + tick / 20
        decision: Decision = watcher.decide(state, seen, now)
        state = decision.state
        kills += [now for command in decision.commands if isinstance(command, Kill)]
    assert len(kills) == 1
    assert kills[0] == pytest.approx(START + HARD + 0.05 + GRACE)  # from the signal on, in the second look


def test_rank_that_recovers_after_it_was_terminated_is_ended_all_the_same(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD))

    def observe(now: float) -> Observation:
        return in_function(step_at=START if now <= START + HARD else now)

    assert isinstance(watch_over(watcher, limits, observe)[-1][1], Kill)


def test_gone_rank_is_stood_in_for_exactly_once(watcher: ModuleType) -> None:
    for goodbye, what in ((False, StandIn()), (True, Finish())):
        state = Watch(limits=limits_of(step=BOTH))
        commands: list[Command] = []
        for tick in range(100):
            seen = in_function(step_at=START, is_gone=tick > 3, said_goodbye=goodbye)
            decision: Decision = watcher.decide(state, seen, START + tick)
            state = decision.state
            commands += decision.commands
        assert commands == [what]
        assert decision.wake_at is None


def test_death_of_a_terminated_rank_ends_the_escalation(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD))

    def observe(now: float) -> Observation:
        return in_function(step_at=START, is_gone=now > START + HARD)

    kinds = [type(command) for _, command in watch_over(watcher, limits, observe)]
    assert kinds == [CaptureEvidence, AskRestart, SendSignal, StandIn]


EVIDENCE, LOOK = watch.EVIDENCE, watch.LOOK


def test_rank_past_a_hard_limit_is_signalled_once_the_others_are_on_record(watcher: ModuleType) -> None:
    for seen_after in (0.0, 0.1, EVIDENCE - 2 * LOOK):

        def observe(now: float, after: float = seen_after) -> Observation:
            return in_function(step_at=START, are_others_seen=now > START + HARD + after)

        commands = watch_over(watcher, limits_of(step=Limit(hard=HARD), signal="SIGUSR1"), observe)
        finding = Finding("step", "hard", HARD, HARD)
        assert [command for _, command in commands] == [
            CaptureEvidence(finding),
            AskRestart(finding),
            SendSignal(finding, "SIGUSR1"),
            Kill(finding),
        ]
        captured, asked, ended, killed = (at for at, _ in commands)
        assert captured == asked == START + HARD
        assert asked + seen_after < ended <= asked + seen_after + 2 * LOOK
        assert killed == ended + GRACE


def test_others_are_waited_for_no_longer_than_the_evidence_may_take(watcher: ModuleType) -> None:
    unseen = in_function(step_at=START, are_others_seen=False)
    times = [at for at, _ in watch_over(watcher, limits_of(step=Limit(hard=HARD)), unseen)]
    ended = START + HARD + EVIDENCE
    assert times == [START + HARD, START + HARD, ended, ended + GRACE]


def test_rank_is_not_looked_at_more_often_than_needed_while_the_others_are_waited_for(watcher: ModuleType) -> None:
    unseen = in_function(step_at=START, are_others_seen=False)
    decision: Decision = watcher.decide(Watch(limits=limits_of(step=Limit(hard=HARD))), unseen, START + HARD)
    assert decision.wake_at == START + HARD  # at once: the evidence took its time
    decision = watcher.decide(decision.state, unseen, START + HARD)
    assert (decision.commands, decision.wake_at) == ((), START + HARD + LOOK)
    decision = watcher.decide(decision.state, unseen, START + HARD + EVIDENCE - LOOK / 2)
    assert (decision.commands, decision.wake_at) == ((), START + HARD + EVIDENCE)


def test_nothing_is_waited_for_where_the_others_have_been_interrupted(watcher: ModuleType) -> None:
    limits = limits_of(leave=Limit(hard=HARD))
    seen = in_function(since=0.0, interrupted_at=START, are_others_seen=False)
    times = [at for at, _ in watch_over(watcher, limits, seen)]
    assert times == [START + HARD] * 3 + [START + HARD + GRACE]


def test_rank_that_restarts_while_its_evidence_is_taken_is_not_signalled(watcher: ModuleType) -> None:
    """Neither if there are others whose positions are waited for, nor if there are none, nor if it was to leave."""
    limits = limits_of(step=Limit(hard=HARD), leave=Limit(hard=HARD))
    for seen in (
        in_function(step_at=START),
        in_function(step_at=START, are_others_seen=False),
        in_function(since=0.0, interrupted_at=START, are_others_seen=False),
    ):
        found: Decision = watcher.decide(Watch(limits=limits), seen, START + HARD)
        assert [type(command) for command in found.commands] == [CaptureEvidence, AskRestart]
        restarted = in_function(iteration=1, since=START + HARD, step_at=START + HARD)
        assert watcher.decide(found.state, restarted, START + HARD + 0.1).commands == ()


def test_rank_that_completes_while_its_evidence_is_taken_is_not_signalled(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD))
    for seen in (
        Observation(doing=Doing.WAITING, since=START, said_goodbye=True),
        Observation(doing=Doing.OUTSIDE, said_goodbye=True),
        Observation(doing=Doing.OUTSIDE, said_goodbye=True, has_left=True),
    ):
        found: Decision = watcher.decide(Watch(limits=limits), in_function(step_at=START), START + HARD)
        assert watcher.decide(found.state, seen, START + HARD + 0.1).commands == ()


FOUND, LATER = START + HARD, START + HARD + 0.05
LEAVES = Observation(doing=Doing.HOOK, hook="abort", since=LATER, interrupted_at=LATER)
WAITS = Observation(doing=Doing.WAITING, since=START)
ASKS = Observation(doing=Doing.WAITING, since=START, store_due_at=LATER, ran_at=START)
MOVES = (  # limit, observation when it is exceeded, and when the evidence is taken
    ("step", in_function(step_at=START), LEAVES),
    ("leave", in_function(interrupted_at=START), LEAVES),
    ("hook", Observation(doing=Doing.HOOK, hook="abort", since=START), LEAVES),
    ("watchdog", WAITS, msgspec.structs.replace(WAITS, watchdog_at=LATER)),
    ("watchdog", ASKS, msgspec.structs.replace(ASKS, ran_at=LATER)),
    ("watchdog", in_function(since=START), in_function(since=START, watchdog_at=LATER, interrupted_at=LATER)),
)
STANDS_STILL = (
    in_function(step_at=START, interrupted_at=LATER),  # the limit of steps is not in force any more
    in_function(step_at=LATER),  # nothing may end this function
    in_function(step_at=START, interrupted_at=LATER, watchdog_at=LATER),
    in_function(step_at=START, interrupted_at=LATER, store_due_at=LATER),
    in_function(step_at=START, interrupted_at=LATER, standstills=(Standstill(START, LATER - 8.0),)),
    Observation(doing=Doing.OUTSIDE, since=LATER),  # of a program that enters a Wrapper: its agent counts it as hung
)


def test_rank_that_moves_on_while_its_evidence_is_taken_is_not_signalled(watcher: ModuleType) -> None:
    """Once in an iteration: a rank that stands still again is signalled."""
    for limit, before, after in MOVES:
        limits = limits_of(**{limit: Limit(hard=HARD)})
        found: Decision = watcher.decide(Watch(limits=limits), before, FOUND)
        assert _kinds(found) == [CaptureEvidence, AskRestart]
        assert _kinds(watcher.decide(found.state, before, FOUND + 0.1)) == [SendSignal]
        spared: Decision = watcher.decide(found.state, after, FOUND + 0.1)
        assert (spared.commands, spared.state.kill_at) == ((), None)
        stuck = msgspec.structs.replace(spared.state, limits=limits_of(step=Limit(hard=HARD)))
        again: Decision = watcher.decide(stuck, in_function(step_at=START), FOUND + 0.2)
        moved = msgspec.structs.replace(LEAVES, since=FOUND + 0.3)
        assert _kinds(watcher.decide(again.state, moved, FOUND + 0.4)) == [SendSignal]


def test_rank_that_does_not_move_on_while_its_evidence_is_taken_is_signalled(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD), watchdog=Limit(5.0, 10 * HARD), leave=Limit(hard=HARD))
    for after in STANDS_STILL:
        found: Decision = watcher.decide(Watch(limits=limits), in_function(step_at=START), FOUND)
        assert _kinds(watcher.decide(found.state, after, FOUND + 0.1)) == [SendSignal]
    ran = msgspec.structs.replace(ASKS, watchdog_at=LATER)  # not the thread that shows that the process runs
    found = watcher.decide(Watch(limits=limits_of(watchdog=Limit(hard=HARD))), ASKS, FOUND)
    assert _kinds(watcher.decide(found.state, ran, FOUND + 0.1)) == [SendSignal]


def _kinds(decision: Decision) -> list[type[Command]]:
    return [type(command) for command in decision.commands]


def test_rank_past_the_limit_of_a_hook_is_signalled_though_it_has_completed(watcher: ModuleType) -> None:
    seen = Observation(doing=Doing.HOOK, hook="finalize", since=START, said_goodbye=True)
    kinds = [type(command) for _, command in watch_over(watcher, limits_of(hook=Limit(hard=HARD)), seen)]
    assert kinds == [CaptureEvidence, AskRestart, SendSignal, Kill]


def test_rank_that_restarts_while_the_others_are_waited_for_is_not_signalled(watcher: ModuleType) -> None:
    """A limit of the next iteration counts as ever."""
    restarts = START + HARD + LOOK

    def observe(now: float) -> Observation:
        if now < restarts:
            return in_function(step_at=START, are_others_seen=False)
        return in_function(iteration=1, since=restarts, step_at=restarts)

    commands = watch_over(watcher, limits_of(step=Limit(hard=HARD)), observe, until=restarts + HARD - 1.0)
    assert [type(command) for _, command in commands] == [CaptureEvidence, AskRestart]
    kinds = [type(command) for _, command in watch_over(watcher, limits_of(step=Limit(hard=HARD)), observe)]
    assert kinds == [CaptureEvidence, AskRestart] * 2 + [SendSignal, Kill]


def test_loss_of_the_agent_ends_the_wait_for_the_others(watcher: ModuleType) -> None:
    unseen = in_function(step_at=START, are_others_seen=False)
    limits = limits_of(step=Limit(hard=HARD), signal="SIGUSR1")
    waiting: Decision = watcher.decide(Watch(limits=limits), unseen, START + HARD)
    lost = msgspec.structs.replace(unseen, agent_lost_at=START + HARD)
    finding = Finding("step", "hard", HARD, HARD)
    ended: Decision = watcher.decide(waiting.state, lost, START + HARD + 0.1)
    assert ended.commands == (SendSignal(finding),)
    killed_at = START + HARD + 1.0
    assert ended.wake_at == killed_at
    assert watcher.decide(ended.state, lost, START + HARD + 0.2).commands == ()
    assert watcher.decide(ended.state, lost, killed_at).commands == (Kill(finding),)


def test_rank_that_ends_while_the_others_are_waited_for_is_not_signalled(watcher: ModuleType) -> None:
    def observe(now: float) -> Observation:
        return in_function(step_at=START, are_others_seen=False, is_gone=now > START + HARD + 0.1)

    kinds = [type(command) for _, command in watch_over(watcher, limits_of(step=Limit(hard=HARD)), observe)]
    assert kinds == [CaptureEvidence, AskRestart, StandIn]


def test_rank_past_its_limit_is_ended_by_the_configured_signal(watcher: ModuleType) -> None:
    limits = limits_of(step=Limit(hard=HARD), signal="SIGUSR1")
    commands = watch_over(watcher, limits, in_function(step_at=START))
    assert commands[2][1] == SendSignal(Finding("step", "hard", HARD, HARD), "SIGUSR1")


def test_rank_without_agent_is_ended_whatever_it_does(watcher: ModuleType) -> None:
    for seen in (in_function(step_at=START), Observation(since=START), in_function(is_dismissed=True)):
        orphan = msgspec.structs.replace(seen, agent_lost_at=START)
        commands = watch_over(watcher, limits_of(step=BOTH, signal="SIGUSR1"), orphan, start=START + 0.25)
        finding = Finding("agent", "hard", 0.0, 0.25)
        assert commands == [(START + 0.25, SendSignal(finding, "SIGTERM")), (START + 1.0, Kill(finding))]


def test_rank_that_ends_with_its_agent_is_signalled_with_what_it_has_started_and_stood_in_for(
    watcher: ModuleType,
) -> None:
    gone = in_function(is_gone=True, agent_lost_at=START)
    finding = Finding("agent", "hard", 0.0, 0.25)
    decision: Decision = watcher.decide(Watch(limits=limits_of()), gone, START + 0.25)
    assert decision.commands == (SendSignal(finding, "SIGTERM"),)
    assert watcher.decide(decision.state, gone, START + 0.25).commands == (StandIn(),)


def test_loss_of_the_agent_shortens_a_grace_and_prolongs_none(watcher: ModuleType) -> None:
    step = Finding("step", "hard", HARD, HARD)
    for kill_at, killed_at in ((START + 9.0, START + 1.0), (START + 0.5, START + 0.5)):
        state = Watch(limits=limits_of(), kill_at=kill_at, finding=step)
        decision: Decision = watcher.decide(state, in_function(agent_lost_at=START), START)
        assert (decision.commands, decision.wake_at) == ((SendSignal(step),), killed_at)
        assert watcher.decide(decision.state, in_function(agent_lost_at=START), killed_at).commands == (Kill(step),)


def test_dismissed_rank_exceeds_no_limit_and_its_end_is_none_of_the_jobs(watcher: ModuleType) -> None:
    limits = limits_of(step=BOTH)
    assert watch_over(watcher, limits, in_function(step_at=START, is_dismissed=True)) == []
    gone = in_function(step_at=START, is_dismissed=True, is_gone=True)
    assert watch_over(watcher, limits, gone) == [(START, Finish())]
    late = Watch(limits=limits, kill_at=START + 2.0, finding=Finding("step", "hard", HARD, HARD))
    kill = watcher.decide(late, in_function(is_dismissed=True), START + 2.0).commands
    assert kill == (Kill(Finding("step", "hard", HARD, HARD)),)  # what was begun is finished


def test_nothing_follows_the_kill_but_the_end(watcher: ModuleType) -> None:
    state = Watch(limits=limits_of(step=BOTH), kill_at=0.0, finding=Finding("step", "hard", 1.0, 1.0), ended_by=1.0)
    for seen in (in_function(step_at=0.0), in_function(agent_lost_at=0.0)):
        assert watcher.decide(state, seen, 1000.0) == Decision(state)


def test_rank_that_sigkill_does_not_end_is_represented_once_if_others_wait_for_it(watcher: ModuleType) -> None:
    finding = Finding("step", "hard", HARD, HARD)
    state = Watch(limits=limits_of(step=BOTH), kill_at=START, finding=finding)
    hung = in_function(step_at=0.0, is_awaited=True)
    killed: Decision = watcher.decide(state, hung, START)
    assert (killed.commands, killed.wake_at) == ((Kill(finding),), START + UNENDED)
    early: Decision = watcher.decide(killed.state, hung, START + UNENDED - 0.01)
    assert (early.commands, early.wake_at) == ((), START + UNENDED)
    late: Decision = watcher.decide(killed.state, hung, START + UNENDED)
    assert late.commands == (Represent(),)
    for seen in (hung, msgspec.structs.replace(hung, agent_lost_at=START)):
        assert watcher.decide(late.state, seen, START + 1000.0) == Decision(late.state)
    gone = msgspec.structs.replace(hung, is_gone=True)
    assert watcher.decide(killed.state, gone, START + UNENDED).commands == (StandIn(),)
    assert watcher.decide(late.state, gone, START + 1000.0).commands == (Finish(),)
    unawaited: Decision = watcher.decide(state, in_function(step_at=0.0), START)
    assert (unawaited.commands, unawaited.wake_at) == ((Kill(finding),), None)
    assert watcher.decide(unawaited.state, in_function(step_at=0.0), START + 1000.0) == Decision(unawaited.state)


# -- what cannot be known ----------------------------------------------------------------------------------------


def test_unknown_progress_is_noted_once_an_iteration(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=BOTH)

    def observe(now: float) -> Observation:
        return in_function(watchdog_at=now, iteration=0 if now < 40.0 else 1, since=START if now < 40.0 else 40.0)

    commands = watch_over(watcher, limits, observe)
    assert commands[0] == (START + SOFT, NoteUnknown(SOFT))
    assert len(commands) == 2
    assert 40.0 + SOFT <= commands[1][0] <= 40.0 + 2 * SOFT


def test_progress_is_known_where_something_is_armed_with_a_limit(watcher: ModuleType) -> None:
    for name, sign in (("ping", "ping_at"), ("step", "step_at"), ("heartbeat", "heartbeat_at")):
        for limit, is_known in ((Limit(50.0), True), (Limit(None, 50.0), True), (Limit(), False)):
            limits = limits_of(watchdog=BOTH, **{name: limit})

            def observe(now: float, sign: str = sign) -> Observation:
                return in_function(watchdog_at=now, **{sign: now})

            assert (watch_over(watcher, limits, observe) == []) is is_known


def test_progress_is_not_missed_where_none_is_expected(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=BOTH, leave=Limit(None, 500.0))
    for changes in (
        {"doing": Doing.WAITING},
        {"doing": Doing.HOOK, "hook": "finalize"},
        {"doing": Doing.OUTSIDE},
        {"interrupted_at": START},
    ):

        def observe(now: float, changes: dict[str, Any] = changes) -> Observation:
            return in_function(watchdog_at=now, **changes)

        assert watch_over(watcher, limits, observe) == []
    assert watch_over(watcher, limits_of(watchdog=Limit(None, HARD)), lambda now: in_function(watchdog_at=now)) == []


# -- over many seeds ---------------------------------------------------------------------------------------------

NAMES = ("watchdog", "store", "ping", "hook", "leave", "step", "heartbeat", "initial_heartbeat", "out_of_section")
Row = tuple[float, Limit]


def test_no_rank_is_ended_within_its_limits_and_none_beyond_them_is_missed(watcher: ModuleType) -> None:
    for seed in range(400):
        rng = Random(seed)
        _follow(watcher, rng, _draw_limits(rng))


def _follow(watcher: ModuleType, rng: Random, limits: Limits) -> None:
    """Live through a random life, looking when asked to and now and then besides."""
    state, now, seen = Watch(limits=limits), 0.0, Observation()
    over = False
    for _ in range(60):
        seen = _go_on(rng, seen, now)
        decision: Decision = watcher.decide(state, seen, now)
        assert not (over and decision.commands)
        over = over or seen.is_gone
        _check(limits, state, seen, now, decision)
        state = decision.state
        step = rng.choice((0.5, 1.0, 2.0, 4.0))
        now = min(now + step, math.inf if decision.wake_at is None else decision.wake_at)


def _draw_limits(rng: Random) -> Limits:
    def limit() -> Limit:
        soft, more = rng.choice((None, 1.0, 2.0, 4.0)), rng.choice((None, 0.5, 2.0, 6.0))
        return Limit(soft, None if more is None else (soft or 1.0) + more)

    return Limits(
        **{name: limit() for name in NAMES},
        sections={"a": limit(), "b": limit()},
        grace=rng.choice((0.5, 3.0)),
        abort=rng.choice((0.0, 3.0)),
    )


def _go_on(rng: Random, seen: Observation, now: float) -> Observation:
    """What may have changed when somebody looks again."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.15:
        doing = rng.choice(list(Doing))
        changes = {"doing": doing, "since": now, "hook": "h" if doing is Doing.HOOK else ""}
    if rng.random() < 0.05:
        changes |= {"iteration": seen.iteration + 1, "interrupted_at": None, "ping_at": None, "step_at": None}
    for name in ("watchdog_at", "ping_at", "step_at", "heartbeat_at"):
        if rng.random() < 0.3:
            changes[name] = now
    if rng.random() < 0.1:
        changes["interrupted_at"] = now
    if rng.random() < 0.2:
        changes["open_sections"] = tuple(Sign(name, now) for name in ("a", "b", "c") if rng.random() < 0.4)
        changes["section_left_at"] = now
    changes["is_stuck"] = seen.is_stuck or rng.random() < 0.01
    changes["are_others_seen"] = rng.random() < 0.5
    if rng.random() < 0.2:
        changes["store_due_at"] = rng.choice((None, None, now, now + 1.0, now + 5.0))
    if rng.random() < 0.1:
        changes |= {"has_left": rng.random() < 0.3, "said_goodbye": rng.random() < 0.3}
    if seen.is_gone or rng.random() < 0.02:
        changes |= {"is_gone": True, "said_goodbye": seen.said_goodbye if seen.is_gone else rng.random() < 0.5}
    return msgspec.structs.replace(seen, **changes)


def _rows(limits: Limits, seen: Observation) -> dict[str, Row]:
    """What is weighed, as the docstring of Limits says it: name to (last sign of life, limit)."""
    is_over = seen.said_goodbye and seen.doing is not Doing.HOOK
    if seen.doing in (Doing.OUTSIDE, Doing.STARTING) or seen.has_left or is_over:
        return {}
    if seen.store_due_at is not None:
        rows = {"store": (seen.store_due_at, limits.store)}
        hook = limits.hook.hard
        if seen.doing is Doing.HOOK and hook is not None and seen.since + hook <= seen.store_due_at:
            rows[f"hook:{seen.hook}"] = (seen.since, Limit(hard=hook))
        return rows
    if seen.doing is Doing.HOOK:
        return {f"hook:{seen.hook}": (seen.since, limits.hook)}
    rows = {"watchdog": (max(seen.since, seen.watchdog_at or 0.0), limits.watchdog)}
    if seen.doing in (Doing.FUNCTION, Doing.ENDING):
        has_beaten = seen.heartbeat_at is not None and seen.heartbeat_at >= (seen.heartbeats_from or 0.0)
        signs = {
            "leave": (None if seen.interrupted_at is None else max(seen.interrupted_at, seen.since), limits.leave),
            "ping": (seen.ping_at, limits.ping),
            "step": (seen.step_at, limits.step),
            "heartbeat": (seen.heartbeat_at if has_beaten else None, limits.heartbeat),
            "initial_heartbeat": (
                None if has_beaten else seen.heartbeats_from,
                limits.initial_heartbeat,
            ),
            "out_of_section": (None if seen.open_sections else seen.section_left_at, limits.out_of_section),
        }
        rows |= {name: (at, limit) for name, (at, limit) in signs.items() if at is not None}
        rows |= {
            f"section:{section.name}": (section.seen_at, limits.sections.get(section.name, Limit()))
            for section in seen.open_sections
        }
    return rows


def _held_until(limits: Limits, seen: Observation) -> float:
    """No hard limit ends the rank before."""
    return 0.0 if seen.interrupted_at is None else seen.interrupted_at + limits.abort


def _hard(limits: Limits, seen: Observation, now: float) -> dict[str, float]:
    """Return how many times over each hard limit is exceeded."""
    hard = {
        name: (now - at) / limit.hard
        for name, (at, limit) in _rows(limits, seen).items()
        if limit.hard and now >= max(at + limit.hard, _held_until(limits, seen))
    }
    if seen.is_stuck and not seen.is_outside:
        hard["abort"] = math.inf
    return hard


def _has_moved_on(before: Watch, seen: Observation) -> bool:
    """Return True if the rank is on its way to the next iteration, and has shown that since the finding."""
    is_on_its_way = seen.interrupted_at is not None or seen.doing in (Doing.WAITING, Doing.HOOK)
    ran_at = seen.ran_at if seen.store_due_at is not None else seen.watchdog_at
    is_about_running = before.finding is not None and before.finding.limit == "watchdog"
    moments = [seen.since] + [ran_at] * (is_about_running and ran_at is not None)
    return is_on_its_way and before.spared_in != seen.iteration and max(moments) > before.found_at


def _check(limits: Limits, before: Watch, seen: Observation, now: float, decision: Decision) -> None:
    kinds = [type(command) for command in decision.commands]
    if before.is_over:
        assert kinds == []
        return
    if seen.is_gone:
        assert kinds == [Finish if seen.said_goodbye or before.is_represented else StandIn]
        return
    if seen.has_left and not seen.said_goodbye and not before.is_represented:
        assert kinds == [Represent]
        return
    is_through = seen.has_left or (seen.said_goodbye and seen.doing is not Doing.HOOK)
    if before.signal_at is not None and (
        is_through or before.signal_in != seen.iteration or _has_moved_on(before, seen)
    ):
        before = msgspec.structs.replace(before, signal_at=None, kill_at=None, finding=None)
    if before.signal_at is not None:
        is_due = now >= before.signal_at or seen.are_others_seen
        assert kinds == [SendSignal] * is_due
        if is_due:
            assert decision.wake_at == now + limits.grace
        return
    if before.kill_at is not None:
        is_due = now >= before.kill_at and before.ended_by is None
        assert kinds == [Kill] * is_due
        if not is_due and before.ended_by is None:
            assert decision.wake_at == before.kill_at
        return
    rows = _rows(limits, seen)
    hard = _hard(limits, seen, now)
    soft = {
        name: (now - at) / limit.soft for name, (at, limit) in rows.items() if limit.soft and now >= at + limit.soft
    }
    if hard:
        assert kinds == [CaptureEvidence, AskRestart]
        assert hard[decision.commands[0].finding.limit] == max(hard.values())  # type: ignore[union-attr]
        assert decision.wake_at == now
        return
    if soft and before.asked_in != seen.iteration:
        assert kinds == [CaptureEvidence, AskRestart]
        assert soft[decision.commands[0].finding.limit] == max(soft.values())  # type: ignore[union-attr]
    else:
        assert kinds in ([], [NoteUnknown])
    _check_wake(limits, decision.state, seen, now, decision.wake_at, rows)


def _check_wake(
    limits: Limits, after: Watch, seen: Observation, now: float, wake_at: float | None, rows: dict[str, Row]
) -> None:
    """It is awake in time for every deadline, also for that of a limit which is armed in the next moment."""
    every = [getattr(limits, name) for name in NAMES] + list(limits.sections.values())
    moments = [now + value for limit in every for value in (limit.soft, limit.hard) if value is not None]
    held = _held_until(limits, seen)
    moments += [max(at + limit.hard, held) for at, limit in rows.values() if limit.hard is not None]
    if after.asked_in != seen.iteration:
        moments += [at + limit.soft for at, limit in rows.values() if limit.soft is not None]
    if moments:
        assert wake_at is not None and now < wake_at <= min(moments)


# -- limits that nobody has set ----------------------------------------------------------------------

RULE = Rule(first=600.0, least=60.0)


OF_THE_RULE = Silence("", START, 600.0, START + 60.0)


def silent(kind: str = "", **signs: Any) -> Observation:
    """A rank in its function whose last sign of life came at START."""
    return in_function(silence=Silence(kind, START, 600.0, START + 60.0), **signs)


def test_rank_without_any_limit_is_ended_past_the_limit_of_the_rule(watcher: ModuleType) -> None:
    commands = watch_over(watcher, limits_of(rule=RULE), silent(), until=1000.0)
    ((at, end),) = [(at, command) for at, command in commands if isinstance(command, SendSignal)]
    assert (at, end.finding.limit, end.finding.allowed) == (START + 600.0, "silence", 600.0)


def test_time_in_which_the_host_stood_still_is_no_silence(watcher: ModuleType) -> None:
    limits = limits_of(watchdog=Limit(hard=50.0), step=Limit(soft=20.0, hard=40.0))
    seen = in_function(watchdog_at=START, step_at=START)
    assert found(watch_over(watcher, limits, seen, until=60.0)) == {"step"}
    standstills = Standstill(START - 10.0, START - 1.0), Standstill(START + 5.0, START + 1005.0)
    resumed = msgspec.structs.replace(seen, standstills=standstills)
    decided = watcher.decide(Watch(limits), resumed, START + 1006.0)
    assert (decided.commands, decided.wake_at) == ((), START + 1020.0)
    late = watcher.decide(Watch(limits), resumed, START + 1041.0)
    assert [type(command) for command in late.commands] == [CaptureEvidence, AskRestart]
    assert [command.finding.severity for command in late.commands] == ["hard"] * 2
    assert [command.finding.silent_for for command in late.commands] == [41.0] * 2


def test_hang_is_found_however_often_the_host_stands_still(watcher: ModuleType) -> None:
    standstills = tuple(Standstill(START + 100.0 * number, START + 100.0 * number + 8.0) for number in range(6))
    seen = in_function(step_at=START, standstills=standstills)
    commands = watch_over(watcher, limits_of(step=Limit(hard=600.0)), seen, until=1e5)
    assert next(at for at, command in commands if isinstance(command, AskRestart)) == START + 648.0


def test_silence_of_the_rule_is_weighed_without_the_time_in_which_the_host_stood_still(watcher: ModuleType) -> None:
    seen = silent(standstills=(Standstill(START + 5.0, START + 105.0),))
    weighed = watcher.weighed_silence(limits_of(rule=RULE), seen)
    assert (weighed.since, weighed.suspect_at, weighed.allowed) == (START + 100.0, START + 160.0, 600.0)


def test_worker_without_a_program_has_no_limit_but_the_rules(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE, watchdog=Limit(hard=50.0), step=Limit(hard=50.0), initial_heartbeat=Limit(hard=50.0))
    unstarted = msgspec.structs.replace(silent(), doing=Doing.STARTING)
    commands = watch_over(watcher, limits, unstarted, until=1000.0)
    ((at, end),) = [(at, command) for at, command in commands if isinstance(command, SendSignal)]
    assert (at, end.finding.limit) == (START + 600.0, "silence")
    assert found(watch_over(watcher, limits_of(), unstarted, until=1000.0)) == set()
    owes_none = msgspec.structs.replace(unstarted, silence=None)
    assert found(watch_over(watcher, limits, owes_none, until=1000.0)) == set()


def test_longer_limit_that_somebody_has_set_for_signs_holds_before_the_first_one(watcher: ModuleType) -> None:
    first = msgspec.structs.replace(OF_THE_RULE, is_before_first_sign=True)
    unstarted = msgspec.structs.replace(in_function(silence=first), doing=Doing.STARTING)
    for limits, ends in (
        ({"initial_heartbeat": Limit(hard=2000.0)}, 2000.0),
        ({"step": Limit(soft=1500.0)}, 1500.0),
        ({"heartbeat": Limit(hard=2000.0), "defaults": ("heartbeat",)}, 600.0),
        ({"step": Limit(hard=50.0)}, 600.0),
    ):
        commands = watch_over(watcher, limits_of(rule=RULE, **limits), unstarted, until=4000.0)
        assert [at for at, command in commands if isinstance(command, SendSignal)] == [START + ends]
    later = watch_over(watcher, limits_of(rule=RULE, step=Limit(hard=2000.0)), silent(), until=4000.0)
    assert [at for at, command in later if isinstance(command, SendSignal)] == [START + 600.0]


def test_only_the_rule_or_a_longer_set_limit_holds_while_the_interpreter_shuts_down(watcher: ModuleType) -> None:
    signs = {"step_at": START, "heartbeat_at": START, "section_left_at": START, "doing": Doing.ENDING, "since": START}
    ending = silent(**signs)  # type: ignore[arg-type]
    announced = in_function(heartbeats_from=START, doing=Doing.ENDING, since=START + 7.0)
    longer = msgspec.structs.replace(ending, silence=msgspec.structs.replace(OF_THE_RULE, allowed=700.0))
    for limits, seen, ends in (
        ({"step": Limit(hard=50.0), "heartbeat": Limit(5.0, 9.0), "out_of_section": Limit(hard=5.0)}, ending, 600.0),
        ({"heartbeat": Limit(hard=2000.0)}, ending, 2000.0),
        ({"out_of_section": Limit(soft=2000.0)}, ending, 2000.0),
        ({"heartbeat": Limit(hard=2000.0), "defaults": ("heartbeat",)}, ending, 600.0),
        ({"step": Limit(hard=2000.0), "learned": {"step": Learned(2000.0, 1.0, 2.0)}}, ending, 600.0),
        ({"watchdog": Limit(hard=2000.0), "step": Limit(hard=50.0)}, ending, 600.0),
        ({"step": Limit(hard=50.0)}, longer, 700.0),
        ({}, ending, 600.0),
        ({"initial_heartbeat": Limit(hard=50.0)}, announced, 607.0),
        ({}, announced, None),
    ):
        commands = watch_over(watcher, limits_of(rule=RULE, **limits), seen, until=4000.0)
        ended = [(at, command.finding.limit) for at, command in commands if isinstance(command, SendSignal)]
        assert ended == ([] if ends is None else [(START + ends, "silence")])
    # Without the rule nothing but the set limits could notice a hang.
    own = limits_of(step=Limit(hard=50.0), heartbeat=Limit(hard=70.0), learned={"step": Learned(50.0, 1.0, 2.0)})
    assert found(watch_over(watcher, own, ending, until=1000.0)) == {"heartbeat"}
    longer_set = limits_of(rule=RULE, heartbeat=Limit(hard=2000.0))
    longer_silence = msgspec.structs.replace(OF_THE_RULE, allowed=2000.0, suspect_at=START + 1500.0)
    assert watcher.weighed_silence(longer_set, ending) == longer_silence
    with_margin = limits_of(rule=msgspec.structs.replace(RULE, margin=30.0))
    assert watcher.weighed_silence(with_margin, ending) == OF_THE_RULE
    both = limits_of(rule=RULE, watchdog=Limit(hard=30.0), step=Limit(hard=5.0))
    assert found(watch_over(watcher, both, ending, until=1000.0)) == {"watchdog"}


def test_ending_rank_that_never_sent_announced_heartbeats_is_suspected_before_limit(
    watcher: ModuleType,
) -> None:
    announced = in_function(heartbeats_from=START, doing=Doing.ENDING, since=START + 7.0)
    for allowed in (50.0, 2000.0):
        limits = limits_of(rule=RULE, initial_heartbeat=Limit(hard=allowed))
        longer = max(allowed, 600.0)
        assert watcher.weighed_silence(limits, announced) == Silence(
            "", START + 7.0, longer, START + 7.0 + 0.75 * longer
        )
    assert watcher.weighed_silence(limits_of(rule=RULE), announced) is None  # no limit ends it
    by_user = limits_of(initial_heartbeat=Limit(hard=50.0))
    assert watcher.weighed_silence(by_user, announced) is None  # a limit that is set, without the rule


def test_section_that_a_thread_has_open_keeps_its_limit_while_the_interpreter_shuts_down(watcher: ModuleType) -> None:
    threads = silent("upload", doing=Doing.ENDING, step_at=START, open_sections=(Sign("upload", START),))
    learned = {"upload": Learned(50.0, 1.0, 2.0)}
    for limits, ended in (
        ({"sections": {"upload": Limit()}, "step": Limit(hard=50.0)}, set()),
        ({"sections": {"upload": Limit(hard=50.0)}}, {"section:upload"}),
        ({"sections": {"upload": Limit(hard=50.0)}, "learned": learned}, {"silence:upload"}),
        ({"sections": {"save": Limit()}}, {"silence:upload"}),
    ):
        assert found(watch_over(watcher, limits_of(rule=RULE, **limits), threads, until=4000.0)) == ended


def test_silence_in_a_section_is_named_for_it(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE)
    seen = silent("checkpoint", open_sections=(Sign("checkpoint", START),))
    assert found(watch_over(watcher, limits, seen, until=1000.0)) == {"silence:checkpoint"}


def test_limit_that_somebody_has_set_replaces_the_rule(watcher: ModuleType) -> None:
    for limits, signs in (
        ({"step": Limit(hard=5000.0)}, {"step_at": START}),
        ({"heartbeat": Limit(hard=5000.0)}, {"heartbeat_at": START}),
        ({"sections": {"save": Limit(hard=5000.0)}}, {"open_sections": (Sign("save", START),)}),
        ({"sections": {"save": Limit()}}, {"open_sections": (Sign("save", START),)}),
        ({"out_of_section": Limit(hard=5000.0)}, {"section_left_at": START}),
        ({"ping": Limit(hard=5000.0)}, {"ping_at": START}),
    ):
        own = limits_of(rule=RULE, **limits)
        seen = silent(**signs)  # type: ignore[arg-type]
        assert found(watch_over(watcher, own, seen, until=4000.0)) == set()
        assert watcher.weighed_silence(own, seen) is None


def test_warm_up_that_is_set_to_no_limit_replaces_the_rule(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE, warmup={"compile": Limit()}, warmup_occurrences=2)
    learned = msgspec.structs.replace(limits, first={"compile": First(1, {"cold": Limit()})})
    phased = msgspec.structs.replace(limits, outside={"compile": Outside(Limit(), Phases((100,), 500))})
    cases = ((2, limits, set()), (3, limits, {"silence"}), (2, learned, {"silence"}), (2, phased, {"silence"}))
    for occurrence, own, found_limits in cases:
        seen = silent(open_sections=(Sign("compile", START, occurrence),))
        assert found(watch_over(watcher, own, seen, until=1000.0)) == found_limits


def test_rule_holds_beside_a_limit_that_is_only_a_default(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE, heartbeat=Limit(hard=2700.0), defaults=("heartbeat",))
    assert found(watch_over(watcher, limits, silent(heartbeat_at=START), until=1000.0)) == {"silence"}
    learned = msgspec.structs.replace(limits, learned={"heartbeat": Learned(2700.0, 1.0, 2.0)})
    assert found(watch_over(watcher, learned, silent(heartbeat_at=START), until=1000.0)) == set()


def test_rule_holds_where_only_another_section_has_a_limit(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE, sections={"save": Limit(hard=5000.0)})
    assert found(watch_over(watcher, limits, silent(), until=1000.0)) == {"silence"}


def test_watchdog_of_the_main_thread_does_not_replace_the_rule(watcher: ModuleType) -> None:
    limits = limits_of(rule=RULE, watchdog=Limit(hard=5000.0))
    assert found(watch_over(watcher, limits, silent(watchdog_at=START), until=1000.0)) == {"silence"}


def test_rule_with_a_margin_asks_for_a_restart_first(watcher: ModuleType) -> None:
    limits = limits_of(rule=msgspec.structs.replace(RULE, margin=30.0))
    commands = watch_over(watcher, limits, silent(), until=1000.0)
    asked = [at for at, command in commands if isinstance(command, AskRestart)]
    ended = [at for at, command in commands if isinstance(command, SendSignal)]
    assert (asked[0], ended) == (START + 600.0, [START + 630.0])


def test_without_the_rule_a_silence_is_nothing(watcher: ModuleType) -> None:
    assert watch_over(watcher, limits_of(), silent(), until=10_000.0) == []


def test_interrupted_rank_is_not_ended_for_its_silence(watcher: ModuleType) -> None:
    assert found(watch_over(watcher, limits_of(rule=RULE), silent(interrupted_at=START + 1), until=5000.0)) == set()


def test_rule_counts_as_something_that_notices_a_lack_of_progress(watcher: ModuleType) -> None:
    assert watcher.shows_progress(limits_of(rule=RULE), silent())
    assert not watcher.shows_progress(limits_of(), silent())


def test_rule_is_weighed_where_nothing_else_is(watcher: ModuleType) -> None:
    for kind in ("", "save"):
        assert watcher.weighed_silence(limits_of(rule=RULE), silent(kind)) == silent(kind).silence
    assert watcher.weighed_silence(limits_of(), silent()) is None
    assert watcher.weighed_silence(limits_of(rule=RULE), in_function()) is None


def test_monitor_looks_again_before_a_learned_limit_could_end_a_rank(watcher: ModuleType) -> None:
    decision: Decision = watcher.decide(Watch(limits=limits_of(rule=RULE)), in_function(), START)
    assert decision.wake_at == START + RULE.least


# -- a rank that the others wait for ----------------------------------------------------------------


def suspected(suspicion: Suspicion | None, is_asked_for: bool = True) -> tuple[Limits, Observation]:
    limits = Limits(sections={"train": Limit(hard=60.0)}, grace=GRACE, ends_suspects=is_asked_for)
    seen = Observation(doing=Doing.FUNCTION, open_sections=(Sign("train", START),), suspicion=suspicion)
    return limits, seen


def test_confirmed_suspicion_ends_the_rank_at_once_and_only_if_asked_for(watcher: ModuleType) -> None:
    suspicion = Suspicion("section:train", START, 2.5)
    finding = Finding("section:train", "hard", 2.5, 4.0)
    at = START + 4.0
    expected = [(at, CaptureEvidence(finding)), (at, AskRestart(finding)), (at, SendSignal(finding))]
    for is_asked_for in (True, False):
        limits, seen = suspected(suspicion, is_asked_for)
        commands = watch_over(watcher, limits, seen, start=at, until=at + 1.0)
        assert commands == (expected if is_asked_for else [])


def test_confirmed_suspicion_is_about_one_limit_and_one_silence(watcher: ModuleType) -> None:
    for suspicion in (
        None,
        Suspicion("section:other", START, 2.5),
        Suspicion("section:train", START + 0.5, 2.5),
        Suspicion("section:train", START - 0.5, 2.5),
    ):
        limits, seen = suspected(suspicion)
        assert watcher.decide(Watch(limits=limits), seen, START + 4.0).commands == ()
