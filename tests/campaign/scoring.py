"""What do the outcomes say?  Shares with 95 % intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from tests.campaign.cases import HARMLESS, Case
from tests.campaign.contestants import CONTESTANTS
from tests.campaign.running import Measures, Outcome

NAMED = 0.5  # a rank that is named with more than this is accused


@dataclass(frozen=True)
class Share:
    """`good` of `count` cases, and Wilson's 95 % interval."""

    good: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        z, n, p = 1.959964, self.count, self.good / self.count
        middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))

    def __str__(self) -> str:
        if not self.count:
            return "-"
        low, high = self.interval
        return f"{self.good} of {self.count} ({100 * low:.0f}-{100 * high:.0f} %)"


def is_first(outcome: Outcome) -> bool:
    return outcome.verdict.rank in outcome.case.firsts(outcome.struck)


def is_right_class(outcome: Outcome) -> bool:
    return outcome.verdict.what in outcome.case.guilty(outcome.struck).get(outcome.verdict.rank or 0, ())


def guilty_ranks(outcome: Outcome) -> set[int]:
    """Return the ranks that may be named. Nothing has happened to a rank that only lost its monitor, so a verdict that
    says anything else of it names a healthy rank."""
    guilty, rank = set(outcome.case.guilty(outcome.struck)), outcome.verdict.rank
    return guilty - {rank} if is_harmless(outcome) and not is_right_class(outcome) else guilty


def names_all(outcome: Outcome) -> bool:
    """Return True if the verdicts name every guilty rank, in whatever place and incident."""
    return guilty_ranks(outcome) <= {rank for rank, confidence in outcome.verdict.blamed if confidence >= NAMED}


def accused(outcome: Outcome) -> list[int]:
    """Return the healthy ranks that are named with a confidence above NAMED."""
    guilty = guilty_ranks(outcome)
    return [rank for rank, confidence in outcome.verdict.blamed if confidence > NAMED and rank not in guilty]


def is_passed(outcome: Outcome) -> bool:
    """Return True if a case is as it has to be: the job comes to its end with the right parameters, no healthy rank is
    accused or lost, nothing harmless restarts it, and where one rank is the truth it is named, with its class. A killed
    monitor need not be named, but nothing else may be said of its rank, however unsure."""
    held = outcome.recovered and outcome.is_equal and outcome.is_injected and not outcome.orphans
    if not held or accused(outcome) or outcome.measures.healthy_lost:
        return False
    if outcome.case.is_harmless:
        has_other_class = outcome.verdict.rank in outcome.case.guilty(outcome.struck) and not is_right_class(outcome)
        return not (outcome.measures.restarts or has_other_class)
    return bool(outcome.case.ambiguous) or (is_first(outcome) and is_right_class(outcome))


COLUMNS: tuple[tuple[str, Callable[[Sequence[Outcome]], Share]], ...] = (
    ("recovered", lambda all_: Share(sum(each.recovered for each in all_), len(all_))),
    ("state bit-equal", lambda all_: Share(sum(each.is_equal for each in all_), len(all_))),
    ("culprit first, of answered", lambda all_: _share(is_first, answered(all_))),
    ("class right, of answered", lambda all_: _share(is_right_class, answered(all_))),
    ("all guilty ranks named, of two or more", lambda all_: _share(names_all, shared_guilt(all_))),
    ("unknown", lambda all_: Share(sum(each.verdict.is_unknown for each in judged(all_)), len(judged(all_)))),
    ("healthy rank accused", lambda all_: _share(lambda each: bool(accused(each)), confident(all_))),
    ("wedged", lambda all_: Share(sum(each.is_wedged for each in all_), len(all_))),
    ("processes left", lambda all_: Share(sum(each.orphans > 0 for each in all_), len(all_))),
    ("healthy rank lost", lambda all_: _known(all_, lambda each: each.measures.healthy_lost)),
    ("harmless event restarted", lambda all_: _known(harmless(all_), lambda each: each.measures.restarts)),
)

MEASURES: tuple[tuple[str, Callable[[Measures], float | None]], ...] = (
    ("time to detect, s", lambda measures: measures.detect_s),
    ("time to recover, s", lambda measures: measures.recover_s),
    ("steps lost", lambda measures: measures.steps_repeated),
)


def judged(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes in which one rank is the truth, the fault has struck, and the contestant gives verdicts."""
    outcomes = [each for each in outcomes if CONTESTANTS[each.contestant].gives_verdicts]
    return [
        each for each in outcomes if each.case.firsts(each.struck) and not is_harmless(each) and not each.case.ambiguous
    ]


def is_harmless(outcome: Outcome) -> bool:
    """Return True if nothing had to be noticed, of what struck."""
    faults = (outcome.case.fault, outcome.case.second)
    return all(fault in ("", *HARMLESS) for fault, did in zip(faults, outcome.struck, strict=True) if did)


def harmless(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if is_harmless(each)]


def answered(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [each for each in judged(outcomes) if not each.verdict.is_unknown]


def shared_guilt(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the answered outcomes in which more than one rank is guilty."""
    return [each for each in answered(outcomes) if len(guilty_ranks(each)) > 1]


def confident(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of contestants that say how sure they are: without that, no rank is accused."""
    return [each for each in outcomes if CONTESTANTS[each.contestant].states_confidence]


def _share(is_good: Callable[[Outcome], bool], outcomes: Sequence[Outcome]) -> Share:
    return Share(sum(map(is_good, outcomes)), len(outcomes))


def _known(outcomes: Iterable[Outcome], number: Callable[[Outcome], int | None]) -> Share:
    """Return the share of the outcomes of which the number is known that have one above 0."""
    numbers = [value for each in outcomes if (value := number(each)) is not None]
    return Share(sum(value > 0 for value in numbers), len(numbers))


def _spread(values: Sequence[float]) -> str:
    """Return median and 90th percentile."""
    if not values:
        return "-"
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
    return f"{median(ordered):.2g}, {high:.2g} ({len(ordered)})"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the shares of each contestant and mode as a table of Markdown."""
    keys = sorted({key for each in outcomes for key in _keys(each)})
    groups = [[each for each in outcomes if key in _keys(each)] for key in keys]
    lines = [_row("", keys), f"|---|{'---|' * len(keys)}", _row("cases", [str(len(each)) for each in groups])]
    lines += [_row(name, [str(share(each)) for each in groups]) for name, share in COLUMNS]
    lines += [_row(name, [_told(each, name) for each in groups]) for name in ("commit", "date")]
    for name, value in MEASURES:
        known = [[number for each in group if (number := value(each.measures)) is not None] for group in groups]
        lines.append(_row(name, [_spread(numbers) for numbers in known]))
    return "\n".join(lines) + "\n"


def _told(outcomes: Sequence[Outcome], name: str) -> str:
    """Return the commits or dates of these outcomes, "-" where an outcome has none."""
    return ", ".join(sorted({getattr(each, name) for each in outcomes}))


def _keys(outcome: Outcome) -> tuple[str, ...]:
    is_ours = outcome.contestant == "ours"
    return ("ours, all modes", f"ours, {outcome.case.mode}") if is_ours else (outcome.contestant,)


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def reliability(outcomes: Sequence[Outcome]) -> str:
    """Return, for each confidence that ours gave a rank, the share of these ranks that were broken, as a table."""
    lines = [_row("confidence", ["the rank was broken"]), "|---|---|"]
    lines += [_row(f"{level:g}", [str(share)]) for level, share in by_confidence(outcomes).items()]
    return "\n".join(lines) + "\n"


def by_confidence(outcomes: Iterable[Outcome]) -> dict[float, Share]:
    """Return, for each confidence that ours gave a rank, the share of these ranks that were broken. Every rank that a
    case blames counts, in whatever place and incident; whom a harmless event blames was not broken."""
    blamed = [
        (confidence, rank in guilty_ranks(each))
        for each in outcomes
        if each.contestant == "ours" and not each.case.ambiguous
        for rank, confidence in each.verdict.blamed
    ]
    return {
        level: Share(sum(is_broken for confidence, is_broken in blamed if confidence == level), count)
        for level, count in sorted(Counter(confidence for confidence, _ in blamed).items())
    }


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """Return how many cases of each fault each contestant recovered from, and named the right rank of, as a table."""
    names = sorted({each.contestant for each in outcomes})
    columns = [f"{name}: {what}" for name in names for what in ("recovered", "right rank")]
    lines = [_row("fault", columns), f"|---|{'---|' * len(columns)}"]
    for fault in sorted({_heading(each.case) for each in outcomes}):
        cells = []
        for name in names:
            cases = [each for each in outcomes if (each.contestant, _heading(each.case)) == (name, fault)]
            named = judged(cases)
            cells.append(f"{sum(each.recovered for each in cases)} of {len(cases)}" if cases else "-")
            cells.append(f"{sum(map(is_first, named))} of {len(named)}" if named else "-")
        lines.append(_row(fault, cells))
    return "\n".join(lines) + "\n"


def _heading(case: Case) -> str:
    """A pair is a row by itself, and so is a kind of training or a size that is not the usual one."""
    if case.second:
        return "two faults"
    if case.fault in HARMLESS:
        return case.fault
    return case.kind if case.kind != "ddp" else "8 ranks" if case.world == 8 else case.fault


def page(outcomes: Sequence[Outcome]) -> str:
    """Return all tables, as they stand in docs/benchmark.md."""
    return "\n".join((table(outcomes), by_fault(outcomes), reliability(outcomes)))
