"""Is this rank alive?  Compares one rank's signs of life with its limits.

A monitor observes its rank (shared page, process, peers) and calls `decide`. Past a soft limit, all ranks are asked to
restart. Past a hard limit, the rank is terminated and, after a grace, killed. A dead rank gets a stand-in, and a rank
whose agent is lost is ended. `decide` first finds all exceeded limits, then picks the gravest. Before a hung rank is
signalled, the positions of the other ranks are recorded within EVIDENCE seconds, because their later positions are no
evidence. This module knows no pages, signals or stores: `monitor.server` observes and acts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from resilience.core.observation import Doing, Observation, Sign
from resilience.core.silences import SUSPECT, Silence, at_start
from resilience.core.standstills import since_standstills
from resilience.facts import deadlines
from resilience.facts.deadlines import HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, STEP, deadline_of_limit, of_section
from resilience.facts.limits import NO_LIMIT, Limit, Limits, Rule

Seconds = float


class Finding(msgspec.Struct, frozen=True):
    """An exceeded limit."""

    limit: str
    severity: Literal["soft", "hard"]
    allowed: Seconds
    silent_for: Seconds


class AskRestart(msgspec.Struct, frozen=True, tag=True):
    """Report the finding to the store; every rank then restarts."""

    finding: Finding


class CaptureEvidence(msgspec.Struct, frozen=True, tag=True):
    """Take stacks and process state before any signal is sent to the rank."""

    finding: Finding


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    """Send `signal`, then SIGCONT: a stopped rank acts on the signal only once it is continued."""

    finding: Finding
    signal: str = "SIGTERM"


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Send SIGKILL."""

    finding: Finding


class NoteUnknown(msgspec.Struct, frozen=True, tag=True):
    """Record that progress is unknown: no limit on progress is armed, and the function has run for longer than the
    watchdog's limit."""

    running_for: Seconds


class StandIn(msgspec.Struct, frozen=True, tag=True):
    """The rank is dead: close its records and represent it until it is excluded."""


class Represent(msgspec.Struct, frozen=True, tag=True):
    """The rank left the call but was interrupted before it could write that to the store. Its process still lives:
    represent it until it is excluded."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The rank left cleanly or was ended on purpose: nothing is left to watch."""


Command = AskRestart | CaptureEvidence | SendSignal | Kill | NoteUnknown | StandIn | Represent | Finish


class Watch(msgspec.Struct, frozen=True):
    """The state of the watch over one rank: what has been done so far."""

    limits: Limits = Limits()
    asked_in: int | None = None  # the iteration in which a restart was requested
    noted_in: int | None = None  # the iteration in which unknown progress was noted
    signal_at: Seconds | None = None  # the latest time at which it will be terminated
    signal_in: int | None = None  # and the iteration whose limit was exceeded
    found_at: Seconds = 0.0  # and when that was noticed
    spared_in: int | None = None  # the iteration in which it moved on before it was terminated
    kill_at: Seconds | None = None  # set while it is being terminated
    finding: Finding | None = None  # why it is being terminated
    is_orphan: bool = False
    ended_by: Seconds | None = None  # of a killed rank: the time by which it must have ended
    is_represented: bool = False  # although it still lives
    is_over: bool = False


class Decision(msgspec.Struct, frozen=True):
    """The next state, the commands in order, and the latest time for the next look (None: only on the next event)."""

    state: Watch
    commands: tuple[Command, ...] = ()
    wake_at: Seconds | None = None


BETWEEN_SIGNS = frozenset((STEP, HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, "ping"))
ABORT_STUCK = "abort"  # name of the limit for a rank that its own abort could not free
ABORT_HOOK = deadlines.limit_name("hook", "abort")  # name of the limit for a rank whose abort hook does not return
AGENT_LOST = "agent"  # name of the limit for a rank whose agent is gone
EVIDENCE = 0.3  # most seconds between the evidence of a hung rank and the first signal to it
LOOK = 0.005  # seconds between two looks during that time
UNENDED = 10.0  # seconds between SIGKILL and the moment from which nobody waits for the rank's end
ORPHAN_GRACE = 1.0  # seconds between SIGTERM and SIGKILL for a rank without an agent


def decide(watch: Watch, observation: Observation, now: Seconds) -> Decision:
    """Return what to do about one rank, given the present observation."""
    if watch.is_over:
        return Decision(watch)
    if observation.agent_lost_at is not None and not watch.is_orphan and watch.ended_by is None:
        return _end_orphan(watch, observation.agent_lost_at, now)
    if observation.is_gone:
        over = msgspec.structs.replace(watch, is_over=True)
        is_accounted_for = observation.said_goodbye or observation.is_dismissed or watch.is_represented
        return Decision(over, (Finish() if is_accounted_for else StandIn(),))
    if observation.has_left and not observation.said_goodbye and not watch.is_represented:
        return Decision(msgspec.structs.replace(watch, is_represented=True), (Represent(),))
    if watch.signal_at is not None and _goes_on(watch, observation):
        watch = msgspec.structs.replace(watch, signal_at=None, kill_at=None, finding=None, spared_in=watch.signal_in)
    if watch.kill_at is not None:
        return _escalate(watch, observation, now)
    if observation.is_dismissed:
        return Decision(watch)
    findings = exceeded(watch.limits, observation, now)
    hard = [finding for finding in findings if finding.severity == "hard"]
    if hard:
        gravest = max(hard, key=_gravity)
        # Never at once: while the evidence is taken, the rank may restart after all. And once the iteration is
        # interrupted, the other ranks are already leaving their positions: nothing is to be waited for.
        signal_at = now if observation.interrupted_at is not None else now + EVIDENCE
        times = {"found_at": now, "signal_at": signal_at, "kill_at": signal_at + watch.limits.grace}
        state = msgspec.structs.replace(watch, finding=gravest, signal_in=observation.iteration, **times)
        return Decision(state, (CaptureEvidence(gravest), AskRestart(gravest)), now)
    if findings and watch.asked_in != observation.iteration:
        gravest = max(findings, key=_gravity)
        state = msgspec.structs.replace(watch, asked_in=observation.iteration)
        return Decision(state, (CaptureEvidence(gravest), AskRestart(gravest)), next_deadline(state, observation, now))
    wake_at = next_deadline(watch, observation, now)
    note_at = _note_at(watch, observation)
    if note_at is not None and now >= note_at:
        state = msgspec.structs.replace(watch, noted_in=observation.iteration)
        return Decision(state, (NoteUnknown(now - observation.since),), wake_at)
    return Decision(watch, (), min((moment for moment in (wake_at, note_at) if moment is not None), default=None))


def _goes_on(watch: Watch, observation: Observation) -> bool:
    """Return True if a rank that is about to be signalled need not be: it has restarted, completed or left. A rank on
    its way to the next iteration is spared once if it has moved. A function that is not interrupted is never spared,
    because nothing else may end it."""
    assert watch.finding is not None
    is_through = observation.has_left or (observation.said_goodbye and observation.doing is not Doing.HOOK)
    if is_through or watch.signal_in != observation.iteration:
        return True
    is_leaving = observation.interrupted_at is not None or observation.doing in (Doing.WAITING, Doing.HOOK)
    if not is_leaving or watch.spared_in == observation.iteration:
        return False
    ran_at = observation.watchdog_at if observation.store_due_at is None else observation.ran_at
    has_run = watch.finding.limit == "watchdog" and ran_at is not None and ran_at > watch.found_at
    return has_run or observation.since > watch.found_at


def _note_at(watch: Watch, observation: Observation) -> Seconds | None:
    """Return when to note that progress is unknown; None if it is known, already noted, or not expected."""
    soft = watch.limits.watchdog.soft
    is_running = observation.doing is Doing.FUNCTION and observation.interrupted_at is None
    if soft is None or not is_running or observation.is_outside or watch.noted_in == observation.iteration:
        return None
    return None if shows_progress(watch.limits, observation) else observation.since + soft


def _end_orphan(watch: Watch, lost_at: Seconds, now: Seconds) -> Decision:
    """Return the decision to end a rank whose agent is lost. Nothing is left to restart it, so it ends at once and in
    any case. Its process may already be gone; processes that it started end with it."""
    kill_at = lost_at + ORPHAN_GRACE
    finding = watch.finding or Finding(AGENT_LOST, "hard", 0.0, now - lost_at)
    state = msgspec.structs.replace(
        watch,
        is_orphan=True,
        finding=finding,
        signal_at=None,
        kill_at=kill_at if watch.kill_at is None else min(kill_at, watch.kill_at),
    )
    return Decision(state, (SendSignal(finding),), state.kill_at)


def _terminated(watch: Watch, finding: Finding, now: Seconds) -> Decision:
    """Return the decision to send the first signal to the rank. Its grace begins."""
    state = msgspec.structs.replace(watch, signal_at=None, kill_at=now + watch.limits.grace, finding=finding)
    return Decision(state, (SendSignal(finding, watch.limits.signal),), state.kill_at)


def _escalate(watch: Watch, observation: Observation, now: Seconds) -> Decision:
    """Return the next step against a rank past a hard limit: once the others' positions are recorded it is terminated,
    and after its grace it is killed. After that only its end is awaited. SIGKILL may never end it: it is stuck in the
    kernel, or the init process of its container. Then the other ranks go on without it."""
    assert watch.kill_at is not None and watch.finding is not None
    if watch.signal_at is not None:
        if observation.are_others_seen or now >= watch.signal_at:
            return _terminated(watch, watch.finding, now)
        return Decision(watch, (), min(watch.signal_at, now + LOOK))
    if watch.ended_by is not None:
        if watch.is_represented or not observation.is_awaited:
            return Decision(watch)
        if now < watch.ended_by:
            return Decision(watch, (), watch.ended_by)
        return Decision(msgspec.structs.replace(watch, is_represented=True), (Represent(),))
    if now < watch.kill_at:
        return Decision(watch, (), watch.kill_at)
    ended_by = now + UNENDED
    state = msgspec.structs.replace(watch, ended_by=ended_by)
    return Decision(state, (Kill(watch.finding),), ended_by if observation.is_awaited else None)


def _gravity(finding: Finding) -> tuple[float, str]:
    return (finding.silent_for / finding.allowed if finding.allowed > 0 else float("inf"), finding.limit)


def exceeded(limits: Limits, observation: Observation, now: Seconds) -> list[Finding]:
    """Return all exceeded limits, at most one finding per limit (hard rather than soft)."""
    findings = []
    suspicion = observation.suspicion if limits.ends_suspects else None
    if observation.is_stuck and not observation.is_outside:
        findings.append(Finding(ABORT_STUCK, "hard", 0.0, now - (observation.interrupted_at or observation.since)))
    for name, last_sign, limit in _rows(limits, observation):
        since = since_standstills(observation.standstills, last_sign)
        # The same sum as in next_deadline: now - since >= limit can be False at exactly that time.
        if limit.hard is not None and now >= _ends_at(limits, observation, since + limit.hard):
            findings.append(Finding(name, "hard", limit.hard, now - since))
        elif limit.soft is not None and now >= since + limit.soft:
            findings.append(Finding(name, "soft", limit.soft, now - since))
        elif suspicion is not None and suspicion.limit == name and abs(suspicion.began - last_sign) < 0.001:
            findings.append(Finding(name, "hard", suspicion.allowed, now - since))
    return findings


def _ends_at(limits: Limits, observation: Observation, moment: Seconds) -> Seconds:
    """Return when a hard limit that is exceeded at `moment` ends the rank: not while its abort may still run."""
    return moment if observation.interrupted_at is None else max(moment, observation.interrupted_at + limits.abort)


def in_force(limits: Limits, observation: Observation) -> list[tuple[str, Seconds, Limit]]:
    """Return (name, start of the silence, limit) for each limit that applies to the rank's present activity. A silence
    is shorter by the time in which the rank's host stood still."""
    rows, standstills = _rows(limits, observation), observation.standstills
    return [(name, since_standstills(standstills, since), limit) for name, since, limit in rows]


def last_signs(limits: Limits, observation: Observation) -> dict[str, Seconds]:
    """Return the last sign of life for each limit that applies. It says which silence this is, however long the host
    has stood still in it."""
    return {name: since for name, since, _ in _rows(limits, observation)}


def _rows(limits: Limits, observation: Observation) -> list[tuple[str, Seconds, Limit]]:
    """Return (name, last sign of life, limit) for each limit that applies."""
    if observation.is_outside:
        return []
    if observation.doing is Doing.STARTING:
        if limits.rule is None or observation.silence is None:
            return []
        return [_silence_row(limits, limits.rule, observation.silence)]
    if observation.store_due_at is not None:
        rows = [("store", observation.store_due_at, limits.store)]
        if observation.ran_at is not None:  # a stopped process waits for nothing
            rows.append(("watchdog", observation.ran_at, Limit(hard=limits.watchdog.hard)))
        if observation.doing is Doing.HOOK and limits.hook.hard is not None:
            hook_ends_at = observation.since + limits.hook.hard
            if hook_ends_at <= observation.store_due_at:  # so the hook is to blame, not the store
                rows.append((_hook_name(observation), observation.since, Limit(hard=limits.hook.hard)))
        return rows
    if observation.doing is Doing.HOOK:
        return [(_hook_name(observation), observation.since, limits.hook)]
    # The start of the present activity proves that the main thread ran.
    ran_at = observation.since if observation.watchdog_at is None else max(observation.since, observation.watchdog_at)
    rows = [("watchdog", ran_at, limits.watchdog)]
    if observation.doing is Doing.WAITING:
        return rows
    if observation.interrupted_at is not None:
        name = ABORT_HOOK if observation.is_in_abort_hook else "leave"
        rows.append((name, max(observation.interrupted_at, observation.since), limits.leave))
    if observation.ping_at is not None:
        rows.append(("ping", observation.ping_at, limits.ping))
    if observation.step_at is not None:
        rows.append((STEP, observation.step_at, _step_limit(limits, observation)))
    beaten_at, announced_at = observation.heartbeat_at, observation.heartbeats_from
    if beaten_at is not None and (announced_at is None or beaten_at >= announced_at):
        usual = heartbeat_limit(limits, are_announced=announced_at is not None)
        limit = _for_occurrence(limits, observation, HEARTBEAT, observation.heartbeat_gaps + 1, usual)
        rows.append((HEARTBEAT, beaten_at, limit))
    elif announced_at is not None and _is_first_heartbeat_owed(limits, observation, announced_at):
        limit = _for_occurrence(limits, observation, INITIAL_HEARTBEAT, 1, limits.initial_heartbeat)
        rows.append((INITIAL_HEARTBEAT, _silent_from(observation, announced_at), limit))
    for section in observation.open_sections:
        limit = section_limit(limits, observation, section)
        rows.append((deadlines.limit_name("section", section.name), section.seen_at, limit))
    if not observation.open_sections and observation.section_left_at is not None:
        usual, gap = limits.out_of_section, observation.outside_gaps + 1
        limit = _for_occurrence(limits, observation, OUT_OF_SECTION, gap, usual)
        rows.append((OUT_OF_SECTION, observation.section_left_at, limit))
    if observation.doing is Doing.ENDING:
        return _rows_at_end(limits, observation, rows)
    is_set = any(_is_set(limits, section) for section in observation.open_sections)  # may be set to no limit
    is_set = is_set or observation.interrupted_at is not None or bool(_watched(rows) - defaults(limits))
    if limits.rule is not None and observation.silence is not None and not is_set:
        rows.append(_silence_row(limits, limits.rule, observation.silence))
    return rows


def heartbeat_limit(limits: Limits, are_announced: bool) -> Limit:
    """Return the usual limit between heartbeats. A program may send some without announcing them, in a long evaluation
    only; the default limit must not end it later, in its next long stretch of steps."""
    return limits.heartbeat if are_announced or HEARTBEAT not in defaults(limits) else NO_LIMIT


def _is_first_heartbeat_owed(limits: Limits, observation: Observation, announced_at: Seconds) -> bool:
    """Return True if the limit of the first heartbeat applies. The default does not once the program shows other signs
    of life and the rule watches these: a section without a limit may be open for hours."""
    signs = (observation.step_at, observation.section_left_at)
    has_shown_other = any(at is not None and at >= announced_at for at in signs)
    is_watched = limits.rule is not None and (bool(observation.open_sections) or has_shown_other)
    return INITIAL_HEARTBEAT not in defaults(limits) or not is_watched


def defaults(limits: Limits) -> set[str]:
    """Return the names of the limits that were neither set by the user nor learned. A learned limit of first
    occurrences says nothing about later ones; an initial heartbeat has no later ones."""
    learned = limits.learned.keys() | (limits.first.keys() & {INITIAL_HEARTBEAT})
    return {name for name in limits.defaults if name not in learned}


def _hook_name(observation: Observation) -> str:
    """Return the limit's name of the hook that the main thread runs, or of the abort hook for which it waits."""
    interrupted_at = observation.interrupted_at
    waits = observation.is_in_abort_hook and interrupted_at is not None and observation.since <= interrupted_at
    return ABORT_HOOK if waits else deadlines.limit_name("hook", observation.hook)


def _is_learned(limits: Limits, limit: str) -> bool:
    return deadline_of_limit(limit) in limits.learned or deadline_of_limit(limit) in limits.first


def _is_learned_for(limits: Limits, section: Sign) -> bool:
    return _is_learned(limits, deadlines.limit_name("section", section.name))


def _silence_row(limits: Limits, rule: Rule, silence: Silence) -> tuple[str, Seconds, Limit]:
    """Return the limit of the rule, which applies if no limit is set. Before the first sign, a longer limit
    that is set between two signs replaces it."""
    allowed, margin = silence.allowed, rule.margin
    if silence.is_before_first_sign:
        allowed = max([allowed, *_for_signs(limits)])
    limit = Limit(hard=allowed) if margin is None else Limit(allowed, allowed + margin)
    return deadlines.limit_name("silence", silence.kind), silence.since, limit


def _rows_at_end(
    limits: Limits, observation: Observation, rows: list[tuple[str, Seconds, Limit]]
) -> list[tuple[str, Seconds, Limit]]:
    """Return the limits that apply while the interpreter shuts down. rows: those that would apply in the function.

    No sign of life is due any more, so the rule's limit replaces the limits between two signs, unless a set one is
    longer. Sections that threads have open keep the limits that are set for them, also no limit. Without the rule all
    set limits hold to the end of the process, or nothing would notice a hang in it."""
    rule, silence = limits.rule, observation.silence
    rows = [row for row in rows if not _is_learned(limits, row[0])]
    if rule is None:
        return rows
    kept = [row for row in rows if row[0] not in BETWEEN_SIGNS]
    if any(_is_set(limits, section) and not _is_learned_for(limits, section) for section in observation.open_sections):
        return kept
    if silence is None and _watched(rows) & BETWEEN_SIGNS:  # the program has announced heartbeats and sent none
        silence = _owed_at_end(rule, observation)
    if silence is None:
        return kept
    set_limits = _moments(limit for name, _, limit in rows if name in BETWEEN_SIGNS - defaults(limits))
    silence = msgspec.structs.replace(silence, allowed=max([silence.allowed, *set_limits]))
    return [*kept, _silence_row(limits, rule, silence)]


def _owed_at_end(rule: Rule, observation: Observation) -> Silence:
    """Return the silence of a rank that has shown no sign of life while its interpreter shuts down."""
    return Silence("", observation.since, rule.first, observation.since + SUSPECT * rule.first)


def _moments(limits: Iterable[Limit]) -> list[Seconds]:
    return [moment for limit in limits for moment in (limit.soft, limit.hard) if moment is not None]


def _for_signs(limits: Limits) -> list[Seconds]:
    """Return the limits that are set between two signs of life, in seconds."""
    by_name = {HEARTBEAT: limits.heartbeat, INITIAL_HEARTBEAT: limits.initial_heartbeat, STEP: limits.step}
    return _moments(limit for name, limit in by_name.items() if name not in defaults(limits))


def weighed_silence(limits: Limits, observation: Observation) -> Silence | None:
    """Return the silence with the limit that ends it, if the rule applies to the rank's present activity."""
    for name, since, limit in in_force(limits, observation):
        if deadlines.parse_limit(name).kind == "silence" and limits.rule is not None:
            silence = observation.silence or _owed_at_end(limits.rule, observation)
            (allowed, *_) = _moments((limit,))
            suspect_after = silence.suspect_at - silence.since if allowed <= silence.allowed else SUSPECT * allowed
            changes = {"since": since, "suspect_at": since + suspect_after, "allowed": max(allowed, silence.allowed)}
            return msgspec.structs.replace(silence, **changes)
    return None


def _watched(rows: list[tuple[str, Seconds, Limit]]) -> set[str]:
    """Return the limits that would detect a function that runs but makes no progress."""
    return {name for name, _, limit in rows if limit.soft or limit.hard} - {"watchdog", "leave"}


def _silent_from(observation: Observation, announced_at: Seconds) -> Seconds:
    """Return the start of the silence before the first heartbeat. Sections count as signs of life too."""
    left_at = announced_at if observation.section_left_at is None else observation.section_left_at
    return max(announced_at, left_at, *(section.seen_at for section in observation.open_sections))


def _is_set(limits: Limits, section: Sign) -> bool:
    return section.name in limits.sections or _is_warming_up(limits, section)


def _is_warming_up(limits: Limits, section: Sign) -> bool:
    """Return True if an open section has the limit of its warm-up. Learned limits take precedence."""
    deadline = of_section(section.name)
    is_first = section.occurrence <= limits.warmup_occurrences and section.name in limits.warmup
    return is_first and deadline not in limits.first and deadline not in limits.outside


def section_limit(limits: Limits, observation: Observation, section: Sign) -> Limit:
    """Return the limit of an open section."""
    usual = limits.sections.get(section.name, NO_LIMIT)
    if _is_warming_up(limits, section):
        return limits.warmup[section.name]
    return _for_occurrence(limits, observation, of_section(section.name), section.occurrence, usual)


def first_steps(limits: Limits) -> int:
    """Return how many steps after a start have more time than the limit for steps. A limit that is set by hand is for
    usual steps; the first ones compile. A learned limit knows its first steps."""
    is_shorter = min(_moments((limits.step,)), default=math.inf) < at_start(limits.rule or Rule(), 0)
    return limits.warmup_occurrences if is_shorter and not _is_learned(limits, STEP) else 0


def _step_limit(limits: Limits, observation: Observation) -> Limit:
    """Return the limit of the present gap between two steps. The first gaps after a start have at least the limit that
    the rule for silences has then, even if it is off."""
    gaps, limit = observation.step_gaps, limits.step
    if gaps >= first_steps(limits) or observation.doing is Doing.ENDING:
        return _for_occurrence(limits, observation, STEP, gaps + 1, limit)
    more = at_start(limits.rule or Rule(), gaps) - min(_moments((limit,)), default=math.inf)
    return limit if more <= 0.0 else Limit(limit.soft and limit.soft + more, limit.hard and limit.hard + more)


def _for_occurrence(limits: Limits, observation: Observation, deadline: str, occurrence: int, usual: Limit) -> Limit:
    """Return the limit of an occurrence, counted from 1."""
    first = limits.first.get(deadline)
    if first is not None and occurrence <= first.occurrences:
        return first.limits.get(observation.start, usual)
    outside = limits.outside.get(deadline)
    is_known = observation.start == "cold" and deadline in observation.aligned
    if outside is not None and is_known and outside.phases.is_outside(occurrence - 1):
        return outside.limit
    if first is not None:
        return usual
    is_warm_up = deadline == HEARTBEAT and occurrence <= limits.warmup_occurrences
    return limits.warmup_heartbeat if is_warm_up and limits.warmup_heartbeat is not None else usual


def next_deadline(watch: Watch, observation: Observation, now: Seconds) -> Seconds | None:
    """Return the earliest time at which a limit could be exceeded, None without limits.

    This includes limits that are not in force yet: a section may open at any moment, unannounced."""
    moments = [now + limit for limit in every_limit(watch.limits)]
    for _, since, limit in in_force(watch.limits, observation):
        if limit.hard is not None:
            moments.append(_ends_at(watch.limits, observation, since + limit.hard))
        if limit.soft is not None and watch.asked_in != observation.iteration:
            moments.append(since + limit.soft)
    return min(moments, default=None)


def every_limit(limits: Limits) -> list[Seconds]:
    """Return all limits that are set, in seconds."""
    fields = (
        limits.watchdog,
        limits.store,
        limits.ping,
        limits.hook,
        limits.leave,
        limits.step,
        limits.heartbeat,
        limits.initial_heartbeat,
        limits.out_of_section,
        *limits.sections.values(),
        *limits.warmup.values(),
        limits.warmup_heartbeat or NO_LIMIT,
        *(limit for first in limits.first.values() for limit in first.limits.values()),
        *(outside.limit for outside in limits.outside.values()),
    )
    own = [] if limits.rule is None else [limits.rule.least]
    return own + _moments(fields)


def shows_progress(limits: Limits, observation: Observation) -> bool:
    """Return True if any armed limit would detect a function that runs but makes no progress."""
    return bool(_watched(in_force(limits, observation)))
