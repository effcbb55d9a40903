"""How long may a rank be silent if no limit is set?  Learned from the job's own silences while it runs.

A sign of life is a step, a heartbeat, or a section that opens or closes. A silence is the time between two signs. Its
kind is the innermost open section, "" if none is open. So an open section suspends the limit outside sections and has
its own limit.

A job pauses now and then: it evaluates, writes checkpoints, recompiles. The first pause of a kind is much longer than
any silence before it, and healthy. So the limit is generous (`Rule.first`) until the job has shown several kinds of
pause several times, one of them among the silences of this kind. After that it is FACTOR times the longest silence of
its kind, and at least `Rule.least`. Each cycle warms up: its first rounds teach nothing and have at least the generous
limit. Before a limit ends a rank, a suspicion is reported to the user. Before its first sign, a rank has a limit only
after a restart, and only if the job has shown rounds before it: whether any other program ever gives a sign is not
known.

The monitor passes in the signs from its shared page (`monitor.server`). `core.watch` applies the result besides the
limits that are set. Reasons and evidence: docs/decisions/hangs-are-noticed-by-default.md"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from resilience.core.standstills import Standstill
from resilience.facts.limits import Rule

Seconds = float

FACTOR = 10.0  # a learned limit is this many times the longest silence of its kind
ENOUGH = 3  # kinds of pause that a job must show, and how often each
PAUSE = 8.0  # a silence of at least this many median rounds is a pause; random stragglers take 2 to 4 median rounds
FINENESS = 4  # classes of size within a factor of two
APART = 5  # classes between two kinds of pause of one section: at least a factor of two
WARM_UP = 5  # rounds at the start of a cycle: in real runs the slow rounds end after 2 to 5
START = 6.0  # times `Rule.first`, until the first round is over: healthy first steps of 960 s were observed
SAFE = 2.0  # times the longest silence of its kind: no limit is shorter, learned or not
SAME = 1e-8  # seconds: signs this close are one sign, reported twice
SUSPECT = 0.75  # of the limit: a suspicion is reported then at the latest
STANDSTILL = 30.0  # seconds: a standstill of the monitor that lasted longer within one silence is not learned


class SignOfLife(msgspec.Struct, frozen=True):
    """A sign of life. name: of the section. opened_at: when a closing section opened. failed: an exception left the
    section, so the silence before it says nothing about a healthy job."""

    at: Seconds
    what: Literal["step", "heartbeat", "opened", "closed", "other"]
    name: str = ""
    opened_at: Seconds = 0.0
    failed: bool = False


class PauseInSection(msgspec.Struct, frozen=True):
    """An open section."""

    name: str
    at: Seconds


class SilencesOfKind(msgspec.Struct, frozen=True):
    """All silences of one kind. sizes: their number by class of size."""

    longest: Seconds = 0.0
    sizes: dict[int, int] = {}

    @property
    def count(self) -> int:
        return sum(self.sizes.values())


NONE = SilencesOfKind()


class Shown(msgspec.Struct, frozen=True):
    """The silences by kind, and the rounds by class of size, of all cycles after their warm-ups."""

    silences: dict[str, SilencesOfKind] = {}
    rounds: dict[int, int] = {}


class Hearing(msgspec.Struct, frozen=True):
    """What is known about one rank. All fields except `shown` belong to the present cycle.

    counts: number of signs, by (what, name). start, early: the longest silence before the first round ended, and in the
    rest of the warm-up, by kind. last: time of the last sign. round_at: when the last round ended. suspected: start of
    the silence for which a suspicion was reported. is_expected: the first sign must come, because the job has shown
    rounds before this cycle."""

    shown: Shown = Shown()
    is_expected: bool = False
    counts: dict[tuple[str, str], int] = {}
    start: dict[str, Seconds] = {}
    early: dict[str, Seconds] = {}
    open: tuple[PauseInSection, ...] = ()
    last: Seconds | None = None
    round_at: Seconds = 0.0
    suspected: Seconds | None = None


class Silence(msgspec.Struct, frozen=True):
    """The present silence and its limit. allowed: the limit. suspect_at: when to report a suspicion. longest: the
    longest earlier silence of its kind. is_learned: whether the limit follows from that. is_before_first_sign: whether
    the rank has shown nothing yet in this cycle."""

    kind: str
    since: Seconds
    allowed: Seconds
    suspect_at: Seconds
    longest: Seconds = 0.0
    is_learned: bool = False
    is_before_first_sign: bool = False


def begin_cycle(shown: Shown) -> Hearing:
    """Return the state after a restart. shown: by the job before it."""
    return Hearing(shown=shown, is_expected=bool(shown.rounds))


def begin(hearing: Hearing) -> Hearing:
    """Return the state when another part of a cycle begins: what the job has shown, and no sign of life. After
    a restart only the first part with signs must show them: after its training a worker may show none."""
    return hearing if hearing.last is None else Hearing(shown=hearing.shown)


def hear(
    hearing: Hearing,
    signs: Iterable[SignOfLife],
    still_open: tuple[PauseInSection, ...],
    standstills: Iterable[Standstill] = (),
) -> Hearing:
    """Return the state after the signs since the last look. still_open: the sections that are open now. standstills: of
    the monitor."""
    opened = list(hearing.open)
    last, rounds, round_at = hearing.last, rounds_of(hearing.counts), hearing.round_at
    counts = defaultdict(int, hearing.counts)
    start, early = dict(hearing.start), dict(hearing.early)
    healthy: defaultdict[str, list[Seconds]] = defaultdict(list)
    durations: list[Seconds] = []  # of rounds
    for sign in _in_order(hearing, signs, still_open):
        if last is not None and sign.at > last + SAME and not sign.failed:
            kind, seconds = _kind(opened), sign.at - last - _stood_still(standstills, last, sign.at)
            if rounds >= WARM_UP:
                healthy[kind].append(seconds)
            else:
                longest = early if rounds else start
                longest[kind] = max(longest.get(kind, 0.0), seconds)
        last = sign.at if last is None else max(last, sign.at)
        if sign.what == "opened":
            opened.append(PauseInSection(sign.name, sign.at))
        elif sign.what == "closed":
            opened = [section for section in opened if section != PauseInSection(sign.name, sign.opened_at)]
        if sign.what in ("step", "heartbeat", "closed"):
            counts[sign.what, sign.name] += 1
            before, rounds = rounds, rounds_of(counts)
            if rounds != before or rounds == 0:
                if before >= WARM_UP:
                    durations.append(sign.at - round_at)
                round_at = sign.at
    return msgspec.structs.replace(
        hearing,
        shown=_with(hearing.shown, healthy, durations),
        counts=dict(counts),
        start=start,
        early=early,
        open=still_open,
        last=last,
        round_at=round_at,
    )


def at_start(rule: Rule, rounds: int) -> Seconds:
    """Return the least limit of a silence after a start, until the job's pauses are known. rounds: that have ended."""
    return START * rule.first if rounds < 1 else rule.first


def present(rule: Rule, hearing: Hearing, since: Seconds, is_ending: bool = False) -> Silence | None:
    """Return the present silence, None if no sign is expected. since: the earliest possible start of the silence.
    is_ending: the program is over and its interpreter shuts down, about which the job's pauses say nothing."""
    if hearing.last is None:
        allowed = rule.first if is_ending else at_start(rule, 0)
        is_owed = hearing.is_expected
        suspect_at = since + min(rule.first, SUSPECT * allowed)
        return Silence("", since, allowed, suspect_at, is_before_first_sign=True) if is_owed else None
    kind = _kind(hearing.open)
    shown = hearing.shown.silences.get(kind, NONE)
    rounds = rounds_of(hearing.counts)
    longest = max(shown.longest, hearing.early.get(kind, 0.0))
    if rounds < WARM_UP:
        longest = max(longest, hearing.start.get(kind, 0.0))
    generous = max(rule.first, SAFE * longest)
    allowed, suspect_after = generous, SUSPECT * generous
    if is_ending:
        begun = max(hearing.last, since)
        return Silence(kind, begun, allowed, begun + suspect_after, longest)
    suspect_after = min(suspect_after, max(rule.least, FACTOR * longest))
    if rounds < 1:
        allowed, suspect_after = max(at_start(rule, rounds), generous), generous
    is_known = has_shown_its_pauses(hearing.shown) and has_paused(hearing.shown, kind)
    if is_known:
        learned = max(rule.least, FACTOR * shown.longest)
        allowed = learned if rounds >= WARM_UP else max(allowed, learned)
        suspect_after = SUSPECT * allowed
    begun = max(hearing.last, since)
    return Silence(kind, begun, allowed, begun + suspect_after, longest, is_known and rounds >= WARM_UP)


def suspect(hearing: Hearing, silence: Silence, now: Seconds) -> tuple[Hearing, bool]:
    """Return the state, and True if a suspicion must be reported now: once in each silence."""
    if now < silence.suspect_at or hearing.suspected == silence.since:
        return hearing, False
    return msgspec.structs.replace(hearing, suspected=silence.since), True


def has_shown_its_pauses(shown: Shown) -> bool:
    """Return True if ENOUGH kinds of pause are known, each observed ENOUGH times."""
    return kinds_of_pause(shown) >= ENOUGH


def kinds_of_pause(shown: Shown) -> int:
    """Return how many kinds of pause were observed ENOUGH times.

    A pause is at least PAUSE times as long as the median round. Pauses of different sections are different kinds. So
    are pauses of one section, or outside sections, whose sizes are a factor of two apart."""
    return sum(_kinds_in(shown, kind) for kind in shown.silences)


def has_paused(shown: Shown, kind: str) -> bool:
    """Return True if a kind of pause was observed ENOUGH times among the silences of this kind. Pauses elsewhere say
    nothing about it: a job that has written checkpoints in a section has not recompiled outside it."""
    return _kinds_in(shown, kind) > 0


def _kinds_in(shown: Shown, kind: str) -> int:
    if not shown.rounds:
        return 0
    smallest = _median(shown.rounds) + round(FINENESS * math.log2(PAUSE))
    return _groups(shown.silences.get(kind, NONE).sizes, smallest)


def rounds_of(counts: Mapping[tuple[str, str], int]) -> int:
    """Return how many rounds the training loop has completed: steps, else heartbeats, else closings of the section that
    closed most often. The first one does not count: it only marks the start of the loop."""
    steps, beats = counts.get(("step", ""), 0), counts.get(("heartbeat", ""), 0)
    return max(0, (steps or beats or max(counts.values(), default=0)) - 1)


def _in_order(
    hearing: Hearing, signs: Iterable[SignOfLife], still_open: tuple[PauseInSection, ...]
) -> list[SignOfLife]:
    """Return the signs by time, with the openings that no earlier look has shown."""
    reported = list(signs)
    sections = [*still_open, *(PauseInSection(sign.name, sign.opened_at) for sign in reported if sign.what == "closed")]
    openings = [SignOfLife(section.at, "opened", section.name) for section in sections if section not in hearing.open]
    return sorted([*openings, *reported], key=lambda sign: sign.at)


def _kind(opened: Iterable[PauseInSection]) -> str:
    return max(opened, key=lambda section: section.at, default=PauseInSection("", 0.0)).name


def _stood_still(standstills: Iterable[Standstill], begin: Seconds, end: Seconds) -> Seconds:
    """Return for how long the monitor stood still within a silence, without standstills that may be its own alone."""
    within = (min(end, standstill.ended) - max(begin, standstill.began) for standstill in standstills)
    return sum(seconds for seconds in within if seconds > STANDSTILL)


def _with(shown: Shown, healthy: Mapping[str, list[Seconds]], rounds: list[Seconds]) -> Shown:
    """Add silences that ended well, and rounds."""
    if not healthy and not rounds:
        return shown
    silences = dict(shown.silences)
    for kind, durations in healthy.items():
        known = silences.get(kind, NONE)
        silences[kind] = SilencesOfKind(max(known.longest, *durations), _counted(known.sizes, durations))
    return Shown(silences, _counted(shown.rounds, rounds))


def _counted(sizes: Mapping[int, int], durations: list[Seconds]) -> dict[int, int]:
    return dict(Counter(sizes) + Counter(map(_class, durations)))


def _class(seconds: Seconds) -> int:
    return math.floor(FINENESS * math.log2(max(seconds, 1e-9)))


def _median(sizes: Mapping[int, int]) -> int:
    """Return the class of the median."""
    remaining = sum(sizes.values()) / 2
    for number in sorted(sizes):
        remaining -= sizes[number]
        if remaining <= 0:
            return number
    return 0


def _groups(sizes: Mapping[int, int], smallest: int) -> int:
    """Count groups of neighbouring classes that have ENOUGH members."""
    groups: list[int] = []
    before = None
    for number in sorted(number for number in sizes if number >= smallest):
        if before is None or number - before >= APART:
            groups.append(0)
        groups[-1] += sizes[number]
        before = number
    return sum(count >= ENOUGH for count in groups)
