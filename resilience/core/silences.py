"""How long may a rank be silent where nobody has set a limit?  Learned from the job's own silences while it runs.

A sign of life is a step, a heartbeat, or a section that opens or closes. A silence is the time between two signs. Its
kind is the innermost section that is open meanwhile, "" where none is. So an open section suspends the limit that
holds outside sections, and has its own.

A job pauses now and then: it evaluates, writes checkpoints, compiles again. The first pause of a kind is much longer
than any silence before it, and healthy. So the limit is generous (`Rule.first`) until the job has shown several kinds
of pause several times. From then on it is FACTOR times the longest silence of its kind, and at least `Rule.least`.
Each cycle warms up: its first rounds teach nothing, and have the generous limit at least. Before a limit ends a rank
there is a suspicion, which a person gets to read.

The monitor feeds it with the signs that its page shows (`monitor.server`), and `core.watch` weighs the result beside
the limits that somebody has set. Reasons and evidence: docs/decisions/hangs-are-noticed-by-default.md"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Seconds = float

FACTOR = 10.0  # a learned limit: so many times the longest silence of its kind
ENOUGH = 3  # kinds of pause that a job has to show, and how often each
PAUSE = 8.0  # a silence is a pause from so many times the median round on; random stragglers take 2 to 4 times that
FINENESS = 4  # classes of size within a factor of two
APART = 5  # classes between two kinds of pause of one section: a factor of two at least
WARM_UP = 5  # rounds at the start of a cycle: on real runs the slow ones are gone after 2 to 5
START = 6.0  # times `Rule.first`, until the first round is over: first steps of 960 s were seen, all healthy
SAFE = 2.0  # times the longest silence of its kind: no limit is shorter, learned or not
SAME = 1e-8  # seconds: the same sign, told twice
SUSPECT = 0.75  # of the limit: a suspicion is told then at the latest
STANDSTILL = 30.0  # seconds between two looks: the monitor did not run, so the rank may not have run either


class Rule(msgspec.Struct, frozen=True):
    """The settings, in seconds. first: the limit until enough is known. least: the shortest learned limit.
    margin: from asking all ranks to restart to ending the rank; None ends it at once."""

    first: Seconds = 600.0
    least: Seconds = 60.0
    margin: Seconds | None = None


class Sign(msgspec.Struct, frozen=True):
    """A sign of life. name: of the section. opened_at: of one that closes. failed: an exception left it, so the
    silence before it says nothing about a healthy job."""

    at: Seconds
    what: Literal["step", "heartbeat", "opened", "closed", "other"]
    name: str = ""
    opened_at: Seconds = 0.0
    failed: bool = False


class Open(msgspec.Struct, frozen=True):
    """An open section."""

    name: str
    at: Seconds


class Silences(msgspec.Struct, frozen=True):
    """All silences of one kind. sizes: how many there were, by class of size."""

    longest: Seconds = 0.0
    sizes: dict[int, int] = {}

    @property
    def count(self) -> int:
        return sum(self.sizes.values())


NONE = Silences()


class Shown(msgspec.Struct, frozen=True):
    """What the job has shown after its warm-ups, in all cycles: silences by kind, and rounds by class of size."""

    silences: dict[str, Silences] = {}
    rounds: dict[int, int] = {}


class Hearing(msgspec.Struct, frozen=True):
    """What is known of one rank. All but `shown` is of the present cycle.

    counts: of signs, by what they are. start, early: the longest silence before the first round was over, and
    in the rest of the warm-up, by kind. last: the last sign. round_at: when the last round ended. suspected: the
    silence, by its beginning, of which a suspicion was told."""

    shown: Shown = Shown()
    counts: dict[tuple[str, str], int] = {}
    start: dict[str, Seconds] = {}
    early: dict[str, Seconds] = {}
    open: tuple[Open, ...] = ()
    last: Seconds | None = None
    round_at: Seconds = 0.0
    looked_at: Seconds = math.inf
    suspected: Seconds | None = None


class Silence(msgspec.Struct, frozen=True):
    """The present silence, and what it may come to. allowed: the limit. suspect_at: when to tell a suspicion.
    longest: the longest one of its kind before. is_learned: whether the limit follows from that."""

    kind: str
    since: Seconds
    allowed: Seconds
    suspect_at: Seconds
    longest: Seconds = 0.0
    is_learned: bool = False


def begin(hearing: Hearing) -> Hearing:
    """Return what is known when a cycle begins: what the job has shown, and no sign of life."""
    return Hearing(shown=hearing.shown)


def hear(hearing: Hearing, signs: Iterable[Sign], still_open: tuple[Open, ...], now: Seconds) -> Hearing:
    """Take the signs since the last look. still_open: the sections that are open now."""
    opened = list(hearing.open)
    last, rounds, round_at = hearing.last, rounds_of(hearing.counts), hearing.round_at
    counts = defaultdict(int, hearing.counts)
    start, early = dict(hearing.start), dict(hearing.early)
    healthy: defaultdict[str, list[Seconds]] = defaultdict(list)
    durations: list[Seconds] = []  # of rounds
    for sign in _in_order(hearing, signs, still_open):
        if last is not None and sign.at > last + SAME and not sign.failed:
            kind, seconds = _kind(opened), sign.at - last
            if rounds >= WARM_UP:
                healthy[kind].append(seconds)
            else:
                known = early if rounds else start
                known[kind] = max(known.get(kind, 0.0), seconds)
        last = sign.at if last is None else max(last, sign.at)
        if sign.what == "opened":
            opened.append(Open(sign.name, sign.at))
        elif sign.what == "closed":
            opened = [section for section in opened if section != Open(sign.name, sign.opened_at)]
        if sign.what in ("step", "heartbeat", "closed"):
            counts[sign.what, sign.name] += 1
            before, rounds = rounds, rounds_of(counts)
            if rounds != before or rounds == 0:
                if before >= WARM_UP:
                    durations.append(sign.at - round_at)
                round_at = sign.at
    if last is not None and last == hearing.last:
        last += _standstill(hearing, now)
    return msgspec.structs.replace(
        hearing,
        shown=_with(hearing.shown, healthy, durations),
        counts=dict(counts),
        start=start,
        early=early,
        open=still_open,
        last=last,
        round_at=round_at,
        looked_at=now,
    )


def present(rule: Rule, hearing: Hearing, since: Seconds) -> Silence | None:
    """Return the present silence, None before the first sign. since: no silence began before that."""
    if hearing.last is None:
        return None
    kind = _kind(hearing.open)
    shown = hearing.shown.silences.get(kind, NONE)
    rounds = rounds_of(hearing.counts)
    longest = max(shown.longest, hearing.early.get(kind, 0.0))
    if rounds < WARM_UP:
        longest = max(longest, hearing.start.get(kind, 0.0))
    generous = max(rule.first, SAFE * longest)
    allowed, suspect_after = generous, min(SUSPECT * generous, max(rule.least, FACTOR * longest))
    if rounds < 1:
        allowed, suspect_after = max(START * rule.first, generous), generous
    is_known = shown.count >= ENOUGH and has_shown_its_pauses(hearing.shown)
    if is_known:
        learned = max(rule.least, FACTOR * shown.longest)
        allowed = learned if rounds >= WARM_UP else max(allowed, learned)
        suspect_after = SUSPECT * allowed
    begun = max(hearing.last, since)
    return Silence(kind, begun, allowed, begun + suspect_after, longest, is_known and rounds >= WARM_UP)


def suspect(hearing: Hearing, silence: Silence, now: Seconds) -> tuple[Hearing, bool]:
    """Return whether to tell a suspicion now: once in each silence."""
    if now < silence.suspect_at or hearing.suspected == silence.since:
        return hearing, False
    return msgspec.structs.replace(hearing, suspected=silence.since), True


def has_shown_its_pauses(shown: Shown) -> bool:
    """Whether ENOUGH kinds of pause are known, each seen ENOUGH times."""
    return kinds_of_pause(shown) >= ENOUGH


def kinds_of_pause(shown: Shown) -> int:
    """Return how many kinds of pause were seen ENOUGH times.

    A pause is at least PAUSE times as long as the median round. Pauses of different sections are of different
    kinds; so are those of one section, or outside sections, of which the sizes lie a factor of two apart."""
    if not shown.rounds:
        return 0
    smallest = _median(shown.rounds) + round(FINENESS * math.log2(PAUSE))
    return sum(_groups(silences.sizes, smallest) for silences in shown.silences.values())


def rounds_of(counts: Mapping[tuple[str, str], int]) -> int:
    """Return how many times the training loop has gone round: steps, else heartbeats, else the section that was
    closed most often. The first one only says that the loop begins."""
    steps, beats = counts.get(("step", ""), 0), counts.get(("heartbeat", ""), 0)
    return max(0, (steps or beats or max(counts.values(), default=0)) - 1)


def _in_order(hearing: Hearing, signs: Iterable[Sign], still_open: tuple[Open, ...]) -> list[Sign]:
    """Return the signs by time, with the openings that no look has shown before."""
    told = list(signs)
    sections = [*still_open, *(Open(sign.name, sign.opened_at) for sign in told if sign.what == "closed")]
    fresh = [Sign(section.at, "opened", section.name) for section in sections if section not in hearing.open]
    return sorted([*fresh, *told], key=lambda sign: sign.at)


def _kind(opened: Iterable[Open]) -> str:
    return max(opened, key=lambda section: section.at, default=Open("", 0.0)).name


def _standstill(hearing: Hearing, now: Seconds) -> Seconds:
    """Return for how long the monitor did not look, which is no silence of the rank: the whole node stood still."""
    gap = now - hearing.looked_at
    return gap if gap > STANDSTILL else 0.0


def _with(shown: Shown, healthy: Mapping[str, list[Seconds]], rounds: list[Seconds]) -> Shown:
    """Add silences that ended well, and rounds."""
    if not healthy and not rounds:
        return shown
    silences = dict(shown.silences)
    for kind, durations in healthy.items():
        known = silences.get(kind, NONE)
        silences[kind] = Silences(max(known.longest, *durations), _counted(known.sizes, durations))
    return Shown(silences, _counted(shown.rounds, rounds))


def _counted(sizes: Mapping[int, int], durations: list[Seconds]) -> dict[int, int]:
    return dict(Counter(sizes) + Counter(map(_class, durations)))


def _class(seconds: Seconds) -> int:
    return math.floor(FINENESS * math.log2(max(seconds, 1e-9)))


def _median(sizes: Mapping[int, int]) -> int:
    """Return the class of the median."""
    left = sum(sizes.values()) / 2
    for number in sorted(sizes):
        left -= sizes[number]
        if left <= 0:
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
