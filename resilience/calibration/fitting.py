"""How long may a healthy rank be silent?  A limit with a stated rate of false alarms, or a refusal with its reason.

A timeout is a trade-off: if it is too short, a healthy job is restarted; if it is too long, every hang costs that much.
`fit` uses the observed durations of one deadline. It finds modes, bounds the tail of each one from its largest values,
adds the shift between runs and the drift within them, and returns a limit that one occurrence exceeds with probability
p at most. If the data cannot support that claim, the result says what is missing and claims nothing. This is plain
float arithmetic without a library, because it also runs inside a job. `calibrate.timings` reads and writes the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from resilience.calibration.pool import Pool, pooled
from resilience.calibration.quantiles import student
from resilience.calibration.tails import (
    CLUSTERED,
    FEWEST_EVENTS,
    count_of,
    credible,
    exp,
    quantile,
    split,
    tails_of,
    top_group,
)
from resilience.calibration.unended import Cut, Unended
from resilience.facts.in_words import count

Status = Literal["ok", "tentative", "short", "provisional", "insufficient"]

MONTH = 30 * 24 * 3600.0  # seconds
FEWEST = 30  # durations needed for any limit
ENOUGH, SOME = 20_000, 5_000  # durations for a stated rate, and for a tentative one
FEW_BUT_COVERED = 100  # durations that suffice if n * p >= COVERED: the data themselves show the rate
COVERED = 0.3
FARTHEST = 1e4  # 1 / (n p): how far beyond the data the tail is extrapolated
FACTOR = 5.0  # the rule of thumb: this many times the maximum
FLOOR, TENTATIVE_FLOOR, SHORT_FLOOR = 1.5, 2.0, 2.0  # times the maximum
FEW_FLOOR = 3.0  # times the maximum, for the status `short` from fewer durations than SHORT
SHORT = 500  # durations for a limit that claims only what counting shows
SHORT_SHARE = 0.1  # of one occurrence in n: how often the tail may exceed such a limit
NEAR_TOP = 1.5  # values within this factor of the maximum belong to its mode
RUNS_AGREE = 1.25  # largest ratio of the medians of two runs of one configuration
UNKNOWN_SHIFT = math.log(1.1)  # between runs, if two were observed
UNSEEN_SHIFT = math.log(RUNS_AGREE)  # between runs, if one was observed: as much as agreeing runs may differ
FEWEST_EPISODES = 5  # events that a mode needs if it comes in episodes


class Mode(msgspec.Struct, frozen=True):
    """A cluster of durations: median in seconds, share of all durations, count."""

    median: float
    share: float
    count: int


class Timeout(msgspec.Struct, frozen=True):
    """The limit of one deadline, and how reliable it is.

    timeout_s: None if no limit can be given. p: the requested probability of a false alarm per occurrence. model_upper,
    distribution_free_upper: upper bounds of the probability that an occurrence exceeds timeout_s, from the fitted tail
    and from counting alone; model_upper is only claimed if the status is `ok` or `tentative`. level_s: the result of
    the fit alone. killed_s: without an answer, the longest occurrence that did not end by itself and that may
    have been healthy. warnings: for the user."""

    timeout_s: float | None
    status: Status
    reason: str
    p: float
    n: int = 0
    runs: int = 0
    max_s: float = 0.0
    median_s: float = 0.0
    level_s: float | None = None
    model_upper: float | None = None
    distribution_free_upper: float | None = None
    modes: tuple[Mode, ...] = ()
    censored: int = 0
    excluded_hangs: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    killed_s: float = 0.0


def fit(
    durations_by_run: Sequence[Sequence[float]],
    p: float,
    confidence: float = 0.95,
    censored: Iterable[Cut] = (),
    *,
    min_timeout: float = 1.0,
    max_timeout: float | None = None,
) -> Timeout:
    """Return the limit that a healthy occurrence exceeds with probability p at most.

    durations_by_run: seconds, one sequence per run, in order, without warm-up, each the maximum over ranks of that
    occurrence. p: in (0, 1). confidence: of each tail bound and of the rate by counting. censored: occurrences that did
    not end by themselves. min_timeout, max_timeout: seconds, bounds of the limit.
    Raises: ValueError for durations that are not positive and finite, p or confidence outside (0, 1)."""
    for run in durations_by_run:
        for seconds in run:
            if not (0.0 < seconds < math.inf):
                raise ValueError(f"a duration is {seconds!r}, expected seconds above 0 and finite")
    return fit_pool(pooled(durations_by_run), p, confidence, censored, min_timeout=min_timeout, max_timeout=max_timeout)


def fit_pool(
    pool: Pool,
    p: float,
    confidence: float = 0.95,
    censored: Iterable[Cut] = (),
    *,
    min_timeout: float = 1.0,
    max_timeout: float | None = None,
    fewest_short: int = SHORT,
    runs: int | None = None,
    per_occurrence: int = 1,
) -> Timeout:
    """Like `fit`, for durations that were pooled before, for example from histograms. fewest_short: durations needed
    for the status `short`. runs: number of runs, if the pool does not keep them apart. per_occurrence: durations in the
    pool for each occurrence, one of each rank; p is for one duration, and what may be claimed depends on the number of
    occurrences."""
    if not 0.0 < p < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"p is {p!r} and confidence {confidence!r}, expected both between 0 and 1")
    values, runs = pool.descending, len(pool.run_medians) if runs is None else runs
    unended = Unended.of(censored, NEAR_TOP * pool.longest)
    if pool.n < FEWEST * per_occurrence:
        return _too_few(pool, p, runs, unended)
    n, top, median = pool.n + unended.exposure, pool.longest, quantile(values, 0.5)
    modes = split(values, pool.tops)
    tails = [tail for mode in modes for tail in credible(tails_of(mode, confidence, pool.tops, n))]
    shift = run_shift(pool.run_medians) + max(0.0, pool.drift)
    level = exp(max(tail.level(p, n) for tail in tails) + shift)
    flaw = _flaw(pool, values, n)
    occurrences, p_of_occurrence = n // per_occurrence, min(1.0, p * per_occurrence)
    status, reason = _status(flaw, top, occurrences, runs, p_of_occurrence, level, fewest_short)
    counted = exp(max(tail.level(SHORT_SHARE / n, n) for tail in tails) + shift)
    timeout = {
        "ok": max(level, FLOOR * top),
        "tentative": max(level, TENTATIVE_FLOOR * top),
        "short": min(max(counted, (SHORT_FLOOR if occurrences >= SHORT else FEW_FLOOR) * top), FACTOR * top),
    }.get(status, FACTOR * top)
    timeout, warnings = _above_unknown(max(timeout, min_timeout), top, unended)
    timeout, cap_warnings = _capped(timeout, top, max_timeout)
    if cap_warnings and status in ("ok", "tentative") and timeout < level:
        status, reason = "provisional", f"max_timeout {max_timeout:g} s is below the {level:.4g} s that p needs"
    elif cap_warnings and status == "short":
        status, reason = "provisional", f"max_timeout {max_timeout:g} s is below the limit that few durations allow"
    return Timeout(
        timeout_s=timeout,
        status=status,
        reason=reason,
        p=p,
        n=n,
        runs=runs,
        max_s=top,
        median_s=median,
        level_s=level,
        model_upper=_claimed(max(tail.probability(math.log(timeout) - shift, n) for tail in tails), n),
        distribution_free_upper=_by_counting(pool, values, n, confidence) if timeout >= top else 1.0,
        modes=tuple(Mode(quantile(mode, 0.5), count_of(mode) / n, count_of(mode)) for mode in reversed(modes)),
        censored=unended.exposure,
        excluded_hangs=unended.hangs,
        warnings=(*warnings, *cap_warnings),
    )


def _too_few(pool: Pool, p: float, runs: int, unended: Unended) -> Timeout:
    """Return the answer for fewer durations than any limit needs."""
    return Timeout(
        None,
        "insufficient",
        f"{count(pool.n, 'duration')}, at least {FEWEST} are needed",
        p,
        pool.n,
        runs,
        max_s=pool.longest,
        median_s=quantile(pool.descending, 0.5) if pool.n else 0.0,
        excluded_hangs=unended.hangs,
        warnings=unended.warnings,
        killed_s=max(unended.unknown, default=0.0),
    )


def _capped(timeout: float, top: float, max_timeout: float | None) -> tuple[float, tuple[str, ...]]:
    """Return the limit, at most max_timeout, and a warning if that is shorter. top: the longest duration. All in
    seconds."""
    if max_timeout is None or timeout <= max_timeout:
        return timeout, ()
    return max_timeout, (f"capped at {max_timeout:g} s, which is {max_timeout / top:.2g} times the maximum",)


def _above_unknown(timeout: float, top: float, unended: Unended) -> tuple[float, tuple[str, ...]]:
    """Return the limit and warnings. Occurrences of unknown health raise it, because they may have been healthy.

    Otherwise a limit that is too short would confirm itself. They are no evidence of durations beyond those that ended
    by themselves, so the limit stays within the rule of thumb for these."""
    if not unended.unknown:
        return timeout, unended.left_out
    longest, bound = max(unended.unknown), FACTOR * top
    raised = max(timeout, min(FLOOR * longest, bound))
    is_one, is_raised = len(unended.unknown) == 1, raised > timeout
    effect = ("raises" if is_one else "raise") if is_raised else ("does not raise" if is_one else "do not raise")
    most = f"to {bound:.4g} s at most, {FACTOR:g} times the longest healthy one"
    return raised, (f"{unended.in_words}; {unended.they} {effect} the limit ({most})", *unended.left_out)


def _by_counting(pool: Pool, values: Sequence[tuple[float, int]], n: int, confidence: float) -> float:
    """Return the upper bound of the probability of an event that none of n occurrences showed, if such events come in
    episodes as long as those of the slowest mode."""
    near, events = _near_top(pool, values, n)
    return min(1.0, -math.log(1.0 - confidence) / n * near / events)


def _near_top(pool: Pool, values: Sequence[tuple[float, int]], n: int) -> tuple[int, float]:
    """Return how many durations are near the maximum, and how many independent events they are."""
    top = values[0][0]
    near = sum(count for value, count in itertools.takewhile(lambda entry: entry[0] >= top / NEAR_TOP, values))
    return near, pool.tops.events(top / NEAR_TOP, top, near, n)


def _claimed(probability: float, n: int) -> float:
    """Return the smallest probability that can be claimed: a tail is extrapolated at most FARTHEST times the data."""
    return min(1.0, max(probability, 1.0 / (n * FARTHEST)))


# -- what may be claimed -------------------------------------------------------------------------


def run_shift(medians: Sequence[float]) -> float:
    """Return how far another run may lie above the slowest of these (log): the upper 95 % prediction bound of a normal
    variable, from the spread of the medians."""
    runs = len(medians)
    if runs < 2:
        return UNSEEN_SHIFT
    logs = [math.log(median) for median in medians]
    mean = sum(logs) / runs
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / (runs - 1))
    bound = mean + student(0.95, runs - 1) * deviation * math.sqrt(1 + 1 / runs) - max(logs)
    return max(UNKNOWN_SHIFT if runs == 2 else 0.0, bound)


def unlike_runs(runs: int, confidence: float = 0.95) -> float:
    """Return the largest share of runs that may show an event that none of `runs` runs showed."""
    return float(1.0 - (1.0 - confidence) ** (1.0 / runs))


def _status(flaw: str, top: float, n: int, runs: int, p: float, level: float, fewest_short: int) -> tuple[Status, str]:
    """Return the status of the limit and its reason. flaw: why the data predict nothing, empty if they do. top: the
    longest duration."""
    if flaw:
        return "provisional", flaw
    some, enough = _needed(p)
    if not (missing := _missing(top, n, p, level)):
        if n >= enough and runs >= 2:
            return "ok", f"{n} durations in {runs} runs"
        if n >= enough:
            return "tentative", "one run only; a second run of the same configuration is needed for a sure rate"
        if n >= some:
            return "tentative", f"{n} durations, {enough} are needed for a sure rate"
        sure = f"a tentative rate, {enough} for a sure one" if some < enough else "a rate"
        missing = f"{n} durations, {some} are needed for {sure}"
    return ("short" if n >= fewest_short and runs >= 2 else "provisional"), missing


def _needed(p: float) -> tuple[int, int]:
    """Return how many durations are needed for a tentative rate of p, and for a sure one: a fixed number, or fewer if
    they show the rate themselves, and enough to extrapolate to it."""
    shown = max(FEW_BUT_COVERED, math.ceil(COVERED / p))
    extrapolated = math.ceil(1.0 / (p * FARTHEST))
    return max(extrapolated, min(SOME, shown)), max(extrapolated, min(ENOUGH, shown))


def _flaw(pool: Pool, values: Sequence[tuple[float, int]], n: int) -> str:
    """Return why the largest observed durations do not predict future ones, empty if they do."""
    top, runs = values[0][0], len(pool.run_medians)
    near, events = _near_top(pool, values, n)
    spread = max(pool.run_medians) / min(pool.run_medians)
    if (lone := top_group(values, pool.tops, n)) is not None and lone[1] < events:
        near, events = lone
    is_clustered = near >= CLUSTERED * events
    if round(events) < (FEWEST_EPISODES if is_clustered else FEWEST_EVENTS):
        times = {1: "once", 2: "twice"}.get(round(events), f"{round(events)} times")
        episodes = f", {near} occurrences in a row or nearly so" if is_clustered else ""
        return f"the slowest mode ({top:.4g} s) was seen {times} only{episodes}; observe runs in which it comes again"
    if spread > RUNS_AGREE:
        return (
            f"the runs differ: medians from {min(pool.run_medians):.4g} s to {max(pool.run_medians):.4g} s, limit: "
            f"a factor of {RUNS_AGREE}; calibrate each configuration separately"
        )
    if top > NEAR_TOP * pool.first_half_max:
        return (
            f"the maximum still rises: {pool.first_half_max:.4g} s in the first half of the data, {top:.4g} s in all; "
            "observe further runs"
        )
    if sum(longest >= top / NEAR_TOP for longest in pool.run_maxima) == 1 < runs:
        return f"the slowest mode ({top:.4g} s) was seen in one of {runs} runs only; observe further runs"
    return ""


def _missing(top: float, n: int, p: float, level: float) -> str:
    """Return why no rate of p can be stated although the data have no flaw, empty if it can be stated."""
    if n * p * FARTHEST < 1.0:
        return (
            f"p is {p:.2g} and {n} durations were observed: {1 / (n * p):.2g} times as many would be needed to see it, "
            f"and the tail is extrapolated {FARTHEST:g} times at most; "
            f"{_needed(p)[0]} durations are needed"
        )
    if level > FACTOR * top:
        return f"the tail is too heavy: p needs {level:.4g} s, above {FACTOR:g} times the maximum"
    return ""


def trial_probability(
    alarms: float, deadlines: int, horizon_s: float, every_s: float, observed_ranks: int = 1, ranks: int = 1
) -> float:
    """Return p for one occurrence of one deadline.

    alarms: false alarms allowed in the whole job within the horizon. every_s: mean seconds between two occurrences. A
    false alarm restarts the job, so one occurrence is one trial for all ranks together. If the job has more ranks than
    were observed, an alarm is likelier in proportion. This is a union bound, valid for any dependence."""
    trials = max(1.0, horizon_s / every_s)
    return min(0.5, alarms / deadlines / trials * min(1.0, observed_ranks / ranks))


def fit_first(
    maxima: Sequence[float],
    p: float,
    confidence: float = 0.95,
    censored: Iterable[Cut] = (),
    *,
    runs: int = 1,
    min_timeout: float = 1.0,
    max_timeout: float | None = None,
) -> Timeout:
    """Return the limit of first occurrences after a start. maxima: one value per start, the slowest of its warm-up.
    runs: number of runs with these starts. The other arguments are those of `fit`.

    Restarts are rare, so the rule of thumb applies until there are enough of them for `fit`."""
    if not maxima:
        return Timeout(None, "insufficient", "no start was observed", p)
    pool = pooled([maxima])  # a run has few starts: its median says little
    if pool.n >= FEWEST:
        return fit_pool(pool, p, confidence, censored, min_timeout=min_timeout, max_timeout=max_timeout, runs=runs)
    top = max(maxima)
    reason = f"{count(len(maxima), 'start')} observed, {_needed(p)[0]} are needed before a rate can be stated"
    middle = sorted(maxima)[len(maxima) // 2]
    unended = Unended.of(censored, NEAR_TOP * top)
    timeout, warnings = _above_unknown(FACTOR * top, top, unended)
    timeout, cap_warnings = _capped(max(timeout, min_timeout), top, max_timeout)
    return Timeout(
        timeout_s=timeout,
        status="provisional",
        reason=reason,
        p=p,
        n=len(maxima),
        runs=runs,
        max_s=top,
        median_s=middle,
        excluded_hangs=unended.hangs,
        warnings=(*warnings, *cap_warnings),
    )


def fit_unended(cuts: Iterable[Cut], p: float, longest_s: float, *, max_timeout: float | None = None) -> Timeout:
    """Return the limit of first occurrences none of which ended by itself: no answer, unless a limit ended some. These
    may have been healthy, so the limit is longer than they lasted, and at least longest_s. Other cuts say nothing: no
    healthy occurrence bounds the limit, and it would follow each of them.

    longest_s: the longest limit of other occurrences. longest_s, max_timeout: seconds."""
    unended = Unended.of((cut for cut in cuts if cut.end != "cut"), 0.0)
    reason = "no first occurrence ended by itself"
    if not unended.killed:
        return Timeout(None, "insufficient", reason, p, excluded_hangs=unended.hangs, warnings=unended.left_out)
    needed_s = max(longest_s, FLOOR * max(unended.killed))
    timeout = needed_s if max_timeout is None else min(needed_s, max_timeout)
    warnings = [f"{unended.in_words}; the limit is {FLOOR:g} times as long, or that of other occurrences"]
    if timeout < needed_s:
        warnings = [unended.in_words, f"capped at {max_timeout:g} s, {needed_s:.4g} s may be needed"]
    warnings += unended.left_out
    return Timeout(timeout, "provisional", reason, p, excluded_hangs=unended.hangs, warnings=tuple(warnings))
