"""Which limits do these runs support?  From what was observed to one limit for each deadline.

Runs of one configuration are put together, warm-up after each start is a deadline of its own, the target
is shared out among all deadlines, and `core.calibration` answers for each. The backtest holds that to
account: fit on some runs, count on the one left out, beside the rule of thumb."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from resilience.analysis import timings
from resilience.analysis.timings import Input, Observed, Run
from resilience.core import calibration, timeouts
from resilience.core.calibration import FACTOR, MONTH, Pool, Timeout, fit_first, fit_pool, quantile
from resilience.core.timeouts import FIRST, Deadline, Timeouts
from resilience.errors import ConfigurationError

RESTARTS_PER_MONTH = 100.0  # expected, where nothing else is said
EMA = 0.5  # weight of the newer value in the compatible rule
SIGNIFICANT = 0.05


class Target(msgspec.Struct, frozen=True):
    """What is asked for. false_alarms: of the whole job within horizon_s, at `ranks` ranks (0: as observed).
    min_timeout, max_timeout: seconds. is_pooled: put configurations together that differ."""

    false_alarms: float = 1.0
    horizon_s: float = MONTH
    ranks: int = 0
    min_timeout: float = 1.0
    max_timeout: float | None = None
    confidence: float = 0.95
    is_pooled: bool = False
    restarts_per_month: float = RESTARTS_PER_MONTH


DEFAULT = Target()
Progress = Callable[[str, int, int], None]


def calibrate(
    given: Input, target: Target = DEFAULT, previous: Timeouts | None = None, progress: Progress | None = None
) -> Timeouts:
    """Return a limit for each deadline of these runs. Raises: ConfigurationError."""
    runs = check(given.runs, target)
    observed = max(run.ranks for run in runs)
    ranks = target.ranks or observed
    warm = {name: calibration.warm_up(starts) for name, starts in _starts(runs).items()}
    names = sorted(warm)
    made: dict[str, Deadline] = {}
    for number, name in enumerate(names):
        if progress is not None:
            progress(name, number, len(names))
        seen = [run.deadlines[name] for run in runs if name in run.deadlines]
        seconds = sum(run.seconds for run in runs if name in run.deadlines)
        every = seconds / max(1, sum(each.n for each in seen))
        share = target.false_alarms / (2 * len(names))
        p = calibration.trial_probability(share, 1, target.horizon_s, every, observed, ranks)
        pool = timings.pool(seen, warm[name])
        fitted = fit_pool(
            pool,
            p,
            target.confidence,
            [cut for each in seen for cut in each.cuts],
            min_timeout=target.min_timeout,
            max_timeout=target.max_timeout,
        )
        if pool.n:  # else it came once a start, and is a first occurrence only
            p99 = quantile(pool.descending, 0.99)
            made[name] = timeouts.deadline(fitted, every, observed, seconds / 3600, p99)
        made[name + FIRST] = _first(name, seen, warm[name], share, target, observed, ranks, seconds)
    if progress is not None:
        progress("", len(names), len(names))
    return Timeouts(
        schema=timeouts.SCHEMA,
        fingerprint=runs[0].fingerprint,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        target_false_alarms=target.false_alarms,
        horizon_s=target.horizon_s,
        ranks=ranks,
        deadlines=made if previous is None else timeouts.succeed(made, previous.deadlines),
        sources=tuple(given.sources),
        warmup_occurrences=max(warm.values(), default=0),
    )


def check(runs: Sequence[Run], target: Target) -> list[Run]:
    """Return the runs that count. Raises: ConfigurationError for none, empty ones, or several configurations."""
    if not runs:
        raise ConfigurationError("no runs were given; name run folders or tables of timings")
    for run in runs:
        if not run.deadlines:
            raise ConfigurationError(
                f"run {run.name} holds no timings; it recorded none yet, or --section left none of it"
            )
    marks = sorted({run.fingerprint for run in runs})
    if len(marks) > 1 and not target.is_pooled:
        raise ConfigurationError(
            f"the runs are of {len(marks)} configurations ({', '.join(marks[:4])}{', …' if len(marks) > 4 else ''}); "
            "calibrate each by itself, or say --pool if they are equal in all that matters for durations"
        )
    return list(runs)


def _starts(runs: Sequence[Run]) -> dict[str, list[list[float]]]:
    starts: dict[str, list[list[float]]] = defaultdict(list)
    for run in runs:
        for name, seen in run.deadlines.items():
            starts[name] += seen.starts
    return starts


def _first(
    name: str,
    seen: Sequence[Observed],
    warm: int,
    share: float,
    target: Target,
    observed: int,
    ranks: int,
    seconds: float,
) -> Deadline:
    """Return the limit of the first occurrences after a start."""
    every = MONTH / target.restarts_per_month
    p = calibration.trial_probability(share, 1, target.horizon_s, every, observed, ranks)
    maxima = [max(start[:warm]) for each in seen for start in each.starts if start]
    fitted = fit_first(maxima, p, min_timeout=target.min_timeout)
    p99 = max(maxima, default=0.0)
    return timeouts.deadline(fitted, every, observed, seconds / 3600, p99)


# -- the backtest ----------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """One answer, tested on data that it was not fitted on. nvrx: the limit of the compatible rule, 5 times
    the maximum of each run, averaged. exposure: durations tested on; plain: that exceeded the maximum."""

    configuration: str
    deadline: str
    left_out: str
    status: str
    p: float
    n: int
    timeout_s: float
    nvrx_s: float
    max_s: float
    exposure: int
    exceeded: int
    nvrx_exceeded: int
    plain_exceeded: int

    @property
    def is_rated(self) -> bool:
        """Whether the answer states a rate."""
        return self.status in ("ok", "tentative")

    @property
    def is_worse(self) -> bool:
        """Whether it was exceeded significantly more often than stated (binomial, 5 %)."""
        return self.is_rated and self.exceeded > 0 and at_least(self.exceeded, self.exposure, self.p) < SIGNIFICANT


def backtest(runs: Sequence[Run], target: Target, most: int | None = None) -> Iterator[Held]:
    """Fit on all runs of a configuration but one, count on that one; of a single run the first 60 %, and
    count on the rest.

    most: durations to fit on; deadlines that have fewer are left out."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        for name in run.deadlines:
            groups["pooled" if target.is_pooled else run.fingerprint, name].append(run)
    share = {mark: sum(1 for other, _ in groups if other == mark) for mark, _ in groups}
    for (mark, name), members in sorted(groups.items()):
        warm = calibration.warm_up([start for run in members for start in run.deadlines[name].starts])
        series = {run.name: _series(run.deadlines[name], warm) for run in members}
        every = sum(run.seconds for run in members) / max(1, sum(run.deadlines[name].n for run in members))
        p = calibration.trial_probability(target.false_alarms / share[mark], 1, target.horizon_s, every)
        for left_out, train, test in _folds({key: values for key, values in series.items() if values}):
            held = _held(train, test, p, target, most)
            if held is not None:
                fitted, nvrx = held
                assert fitted.timeout_s is not None
                yield Held(
                    mark,
                    name,
                    left_out,
                    fitted.status,
                    p,
                    fitted.n,
                    fitted.timeout_s,
                    nvrx,
                    fitted.max_s,
                    len(test),
                    sum(seconds > fitted.timeout_s for seconds in test),
                    sum(seconds > nvrx for seconds in test),
                    sum(seconds > fitted.max_s for seconds in test),
                )


def _series(seen: Observed, warm: int) -> list[float]:
    return [seconds for start in seen.starts for seconds in start[warm:]]


def _folds(series: Mapping[str, list[float]]) -> Iterator[tuple[str, list[list[float]], list[float]]]:
    if len(series) == 1:
        ((name, values),) = series.items()
        cut = int(len(values) * 0.6)
        yield f"the last 40 % of {name}", [values[:cut]], values[cut:]
        return
    for left_out, test in series.items():
        yield left_out, [values for name, values in series.items() if name != left_out], test


def _held(
    train: list[list[float]], test: list[float], p: float, target: Target, most: int | None
) -> tuple[Timeout, float] | None:
    if most is not None:
        train = _shortened(train, most)
    if not train or not test or sum(map(len, train)) < calibration.FEWEST:
        return None
    fitted = fit_pool(
        calibration.pooled(train),
        p,
        target.confidence,
        min_timeout=target.min_timeout,
        max_timeout=target.max_timeout,
    )
    return None if fitted.timeout_s is None else (fitted, nvrx_rule(train))


def _shortened(train: list[list[float]], most: int) -> list[list[float]]:
    """Return the first `most` durations, nothing if there are not so many."""
    taken, left = [], most
    for values in train:
        if left > 0:
            taken.append(values[:left])
            left -= len(taken[-1])
    return [] if left > 0 else taken


def nvrx_rule(runs: Sequence[Sequence[float]]) -> float:
    """Return the limit of the compatible rule: 5 times each run's maximum, averaged with what was before."""
    limit: float | None = None
    for values in runs:
        new = FACTOR * max(values)
        limit = new if limit is None else (1 - EMA) * limit + EMA * new
    assert limit is not None
    return limit


def at_least(k: int, n: int, p: float) -> float:
    """Return the probability of k or more successes in n trials of probability p."""
    if n * p > 50 and k > n * p:
        z = (k - 0.5 - n * p) / math.sqrt(n * p * (1 - p))
        return 0.5 * math.erfc(z / math.sqrt(2))
    below = sum(math.exp(_log_term(i, n, p)) for i in range(k))
    return max(0.0, 1.0 - below)


def _log_term(i: int, n: int, p: float) -> float:
    choose = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
    return choose + i * math.log(p) + (n - i) * math.log1p(-p)


def upper_rate(exceeded: int, exposure: int) -> float:
    """Return the 95 % upper bound of a rate of which so many events were seen. Source: Clopper and Pearson,
    by the relation of the Poisson to the chi-squared distribution."""
    return calibration.chi2(0.95, 2 * (exceeded + 1)) / 2 / exposure if exposure else 1.0


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


__all__ = ["Held", "Pool", "Target", "backtest", "calibrate", "geometric_mean", "nvrx_rule", "upper_rate"]
