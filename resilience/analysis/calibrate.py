"""Which limits do these runs support?  From what was observed to one limit for each deadline.

Runs of one configuration are put together, warm-up after each start is a deadline of its own, the target
is shared out among all deadlines, and `core.calibration` answers for each. The backtest holds that to
account: fit on some runs, count on the one left out, beside the rule of thumb."""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from resilience.analysis.observed import Begun, Observed, Run, pool_of, warm_up
from resilience.analysis.timings import Input
from resilience.core import calibration, timeouts
from resilience.core.calibration import FACTOR, MONTH, Pool, fit_first, fit_pool
from resilience.core.configuration import differences, harmless, serious
from resilience.core.deadlines import Start, first_of
from resilience.core.phases import Phases, recurring
from resilience.core.quantiles import chi2
from resilience.core.tails import quantile
from resilience.core.timeouts import Deadline, Group, Outside, Timeouts
from resilience.errors import ConfigurationError

RESTARTS_PER_MONTH = 100.0  # expected, where nothing else is said
EMA = 0.5  # weight of the newer value in the compatible rule
SIGNIFICANT = 0.05
PAYS = 0.67  # of the usual limit: a limit outside phases that is longer is not worth its positions
MOST_FOLDS = 8  # runs that a limit outside phases is tested on


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
    names = sorted({name for run in runs for name in run.deadlines})
    job = _Job(target, observed, target.ranks or observed, target.false_alarms / (2 * len(names)))
    made: dict[str, Deadline] = {}
    for number, name in enumerate(names):
        if progress is not None:
            progress(name, number, len(names))
        seen = [run.deadlines[name] for run in runs if name in run.deadlines]
        seconds = sum(run.seconds for run in runs if name in run.deadlines)
        first = warm_up(name, seen)
        usual = _usual(seen, first, seconds, job)
        if usual is not None:  # else it came once a start, and is a first occurrence only
            usual = _grouped(usual, _of_groups(runs, name, job), first, seconds, job)
            p = job.among(2).p(usual.every_s)  # in phases there are few occurrences, outside nearly all
            outside = outside_phases(seen, first, usual.timeout_s, p, target)
            made[name] = msgspec.structs.replace(usual, outside=outside)
        for start in get_args(Start):
            begun = [each for observed_ in seen for each in observed_.starts if each.how == start and each.values]
            if begun:
                made[first_of(name, start)] = _first(begun, first, usual, seconds, job)
    if progress is not None:
        progress("", len(names), len(names))
    return Timeouts(
        schema=timeouts.SCHEMA,
        configuration=runs[0].configuration,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        target_false_alarms=target.false_alarms,
        horizon_s=target.horizon_s,
        ranks=job.ranks,
        deadlines=made if previous is None else timeouts.succeed(made, previous.deadlines),
        sources=tuple(given.sources),
    )


class _Job(msgspec.Struct, frozen=True):
    """What is asked for of each deadline. share: false alarms within the horizon."""

    target: Target
    observed: int
    ranks: int
    share: float

    def p(self, every: float) -> float:
        """Return the probability of a false alarm that an occurrence may have. every: mean seconds between two."""
        return calibration.trial_probability(self.share, 1, self.target.horizon_s, every, self.observed, self.ranks)

    def among(self, deadlines: int) -> _Job:
        """Share the target out among so many deadlines."""
        shared: _Job = msgspec.structs.replace(self, share=self.share / deadlines)
        return shared


def check(runs: Sequence[Run], target: Target) -> list[Run]:
    """Return the runs that count. Raises: ConfigurationError for none, empty ones, or several configurations."""
    if not runs:
        raise ConfigurationError("no runs were given; name run folders or tables of timings")
    for run in runs:
        if not run.deadlines:
            raise ConfigurationError(
                f"run {run.name} holds no timings; it recorded none yet, or --section left none of it"
            )
    for run in runs[1:]:
        why = serious(differences(runs[0].configuration, run.configuration))
        if why and not target.is_pooled:
            raise ConfigurationError(
                f"runs {runs[0].name} and {run.name} differ: {why}. Calibrate each by itself, or say --pool if they "
                "are equal in all that matters for durations"
            )
    return list(runs)


def unlike(runs: Sequence[Run]) -> list[str]:
    """Return in what these runs differ that does not matter by itself."""
    found = {harmless(differences(runs[0].configuration, run.configuration)): run.name for run in runs[1:]}
    return [f"run {name} differs from {runs[0].name}: {what}" for what, name in found.items() if what]


def _usual(seen: Sequence[Observed], first: int, seconds: float, job: _Job) -> Deadline | None:
    """Return the limit of all but the first occurrences, None if there were no others."""
    pool = pool_of(seen, first)
    if not pool.n:
        return None
    every = seconds / max(1, sum(each.n for each in seen))
    fitted = fit_pool(
        pool,
        job.p(every),
        job.target.confidence,
        [cut for each in seen for cut in each.cuts],
        min_timeout=job.target.min_timeout,
        max_timeout=job.target.max_timeout,
    )
    made = timeouts.deadline(fitted, every, job.observed, seconds / 3600, quantile(pool.descending, 0.99))
    medians = [each.rank_medians for each in seen if each.rank_medians[1]]
    if medians:
        least, most = min(low for low, _ in medians), max(high for _, high in medians)
        made = msgspec.structs.replace(made, rank_medians_s=(least, most))
    lost = sum(sum(each.missing.values()) for each in seen)
    if lost:
        what = "large durations are known from the histogram only, within 1 %, for the file of single values is full"
        made = _warned(made, f"{lost} {what}")
    if made.timeout_s is not None and pool.descending[0][0] > made.timeout_s:
        made = _warned(made, f"a healthy occurrence took {pool.descending[0][0]:.4g} s, which is above the limit")
    return made


def _of_groups(runs: Sequence[Run], name: str, job: _Job) -> dict[str, list[Observed]]:
    """Return what was observed of each group of like ranks, in all runs; nothing for a job of another size."""
    seen: dict[str, list[Observed]] = defaultdict(list)
    if job.ranks == job.observed:
        for run in runs:
            for ranks, observed in run.groups.get(name, {}).items():
                seen[ranks].append(observed)
    return seen


def _grouped(usual: Deadline, groups: Mapping[str, list[Observed]], first: int, seconds: float, job: _Job) -> Deadline:
    """Return a deadline with the limits of its groups. The target is shared out among them. A group that has no rate
    has the common limit if that one has, so no limit is longer than the common one."""
    made = []
    for ranks, seen in groups.items():
        own = _usual(seen, first, seconds, job.among(len(groups)))
        if own is None:
            continue
        is_rated = own.status in ("ok", "tentative")
        timeout = own.timeout_s
        if timeout is None or (not is_rated and usual.status in ("ok", "tentative")):
            timeout = usual.timeout_s
        if timeout is not None and usual.timeout_s is not None:
            timeout = min(timeout, usual.timeout_s)
        made.append(
            Group(
                ranks=ranks,
                timeout_s=timeout,
                status=own.status,
                reason=own.reason,
                n=own.n,
                max_s=own.max_s,
                median_s=own.median_s,
                p99_s=own.p99_s,
                rank_medians_s=own.rank_medians_s,
            )
        )
    return msgspec.structs.replace(usual, groups=tuple(made))


def outside_phases(
    seen: Sequence[Observed], first: int, usual_s: float | None, p: float, target: Target
) -> Outside | None:
    """Return the limit outside known phases, None if no phases are known, or it is not much shorter than the usual one,
    or the runs do not bear it out: of each run, what lies outside is compared with the limit of the others."""
    found = _fit_outside(seen, first, p, target)
    if found is None or usual_s is None:
        return None
    fitted, phases = found
    limit = fitted.timeout_s
    if limit is None or limit > PAYS * usual_s or not _is_borne_out(seen, first, phases, p, target):
        return None
    return Outside(limit, fitted.status, fitted.reason, phases, fitted.p, fitted.n, fitted.max_s, fitted.median_s)


def _fit_outside(
    seen: Sequence[Observed], first: int, p: float, target: Target, phases: Phases | None = None
) -> tuple[calibration.Timeout, Phases] | None:
    """Return the fit of all that lies outside the phases that these runs show, and the phases; None without any."""
    if phases is None:
        courses = [course for each in seen if (course := each.course(first)) is not None]
        phases = recurring(courses) if len(courses) == len(seen) else None
    if phases is None:
        return None
    pool = pool_of([each.outside(phases) for each in seen], first)
    if not pool.n:
        return None
    bounds = {"min_timeout": target.min_timeout, "max_timeout": target.max_timeout}
    return fit_pool(pool, p, target.confidence, **bounds), phases  # type: ignore[arg-type]


def _is_borne_out(seen: Sequence[Observed], first: int, phases: Phases, p: float, target: Target) -> bool:
    """Whether no run exceeds the limit of the others outside their phases. Two runs share their phases, for one alone
    shows none."""
    for held_out in seen[:MOST_FOLDS]:
        others = [each for each in seen if each is not held_out]
        found = _fit_outside(others, first, p, target, phases if len(others) == 1 else None)
        if found is None or found[0].timeout_s is None:
            return False
        if max(held_out.outside(found[1]).series(first), default=0.0) > found[0].timeout_s:
            return False
    return True


def _warned(made: Deadline, what: str) -> Deadline:
    return msgspec.structs.replace(made, warnings=(*made.warnings, what))


def _first(begun: Sequence[Begun], first: int, usual: Deadline | None, seconds: float, job: _Job) -> Deadline:
    """Return the limit of the first occurrences after starts of one kind; it is never shorter than the usual one."""
    every = MONTH / job.target.restarts_per_month
    maxima = [max(start.values[:first]) for start in begun]
    fitted = fit_first(maxima, job.p(every), min_timeout=job.target.min_timeout)
    made = timeouts.deadline(fitted, every, job.observed, seconds / 3600, max(maxima))
    least = None if usual is None else usual.timeout_s
    if least is not None and made.timeout_s is not None and made.timeout_s < least:
        made = msgspec.structs.replace(made, timeout_s=least, reason=f"{made.reason}; as long as the usual limit")
    return msgspec.structs.replace(made, occurrences=first)


# -- the backtest ----------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """One answer, tested on data that it was not fitted on. nvrx: the limit of the compatible rule, 5 times
    the maximum of each run, averaged. exposure: durations tested on; plain: that exceeded the maximum. outside_s: the
    limit outside known phases, None without any; outside_exposure, outside_exceeded: the same of it."""

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
    median_s: float = 0.0
    outside_s: float | None = None
    outside_status: str = ""
    outside_max_s: float = 0.0
    outside_exposure: int = 0
    outside_exceeded: int = 0

    @property
    def is_rated(self) -> bool:
        """Whether the answer states a rate."""
        return self.status in ("ok", "tentative")

    @property
    def is_worse(self) -> bool:
        """Whether it was exceeded significantly more often than stated (binomial, 5 %)."""
        return self.is_rated and self.exceeded > 0 and at_least(self.exceeded, self.exposure, self.p) < SIGNIFICANT


class Test(msgspec.Struct):
    """A backtest. answers: one for each deadline and each part that was left out. tested: durations that were tested;
    recorded: that could have been. untested: deadlines without a test, and why."""

    answers: list[Held] = []
    tested: int = 0
    recorded: int = 0
    untested: dict[str, str] = {}


def backtest(runs: Sequence[Run], target: Target, most: int | None = None) -> Test:
    """Fit on all runs of a configuration but one, count on that one; of a single table the first 60 %, and count on the
    rest.

    most: durations to fit on; deadlines that have fewer are left out."""
    test = Test()
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        for name in run.deadlines:
            groups["pooled" if target.is_pooled else run.configuration.name, name].append(run)
    share = Counter(mark for mark, _ in groups)
    for (mark, name), members in sorted(groups.items()):
        seen = [run.deadlines[name] for run in members]
        first = warm_up(name, seen)
        every = sum(run.seconds for run in members) / max(1, sum(each.n for each in seen))
        p = calibration.trial_probability(target.false_alarms / share[mark], 1, target.horizon_s, every)
        recorded = sum(pool_of([each], first).n for each in seen)
        tested = 0
        for left_out, train, held_out in _folds({run.name: run.deadlines[name] for run in members}, first):
            answer = _held(mark, name, left_out, train, held_out, first, p, target, most)
            if answer is not None:
                test.answers.append(answer)
                tested += answer.exposure
        is_single = len(members) == 1
        test.recorded += recorded
        test.tested += tested
        if not tested and recorded and most is None:
            test.untested[name] = (
                "one run folder cannot be split; a second run is needed"
                if is_single
                else f"the other runs have fewer than {calibration.FEWEST} durations of it"
            )
    return test


def _folds(seen: Mapping[str, Observed], first: int) -> Iterator[tuple[str, list[Observed], Observed]]:
    """Yield what is left out by name, what to fit on, and what to test on."""
    if len(seen) > 1:
        for left_out, held_out in seen.items():
            yield left_out, [each for name, each in seen.items() if name != left_out], held_out
        return
    ((name, only),) = seen.items()
    if only.is_whole:
        cut = first + int(max(0, len(only.kept) - first) * 0.6)
        later = [(first + number, s, at) for number, (_, s, at) in enumerate(only.kept[cut:])]
        yield f"the last 40 % of {name}", [_part(only, only.kept[:cut])], _part(only, later)


def _part(whole: Observed, kept: list[tuple[int, float, float]]) -> Observed:
    return Observed(starts=whole.starts, kept=kept, n=len(kept), max_s=max((s for _, s, _ in kept), default=0.0))


def _held(
    mark: str,
    name: str,
    left_out: str,
    train: list[Observed],
    held_out: Observed,
    first: int,
    p: float,
    target: Target,
    most: int | None,
) -> Held | None:
    if most is not None:
        train = _shortened(train, first, most)
    train_pool, test_pool = pool_of(train, first), pool_of([held_out], first)
    if train_pool.n < calibration.FEWEST or not test_pool.n:
        return None
    fitted = fit_pool(train_pool, p, target.confidence, min_timeout=target.min_timeout, max_timeout=target.max_timeout)
    if fitted.timeout_s is None:
        return None
    pools = [pool_of([each], first) for each in train]
    nvrx = nvrx_rule([[pool.descending[0][0]] for pool in pools if pool.n])
    over, nvrx_over, plain_over = (
        sum(count for seconds, count in test_pool.descending if seconds > limit)
        for limit in (fitted.timeout_s, nvrx, fitted.max_s)
    )
    answer = Held(
        mark,
        name,
        left_out,
        fitted.status,
        p,
        fitted.n,
        fitted.timeout_s,
        nvrx,
        fitted.max_s,
        test_pool.n,
        over,
        nvrx_over,
        plain_over,
        fitted.median_s,
    )
    outside = outside_phases(train, first, fitted.timeout_s, p / 2, target)
    if outside is None:
        return answer
    tested = [seconds for number, seconds, _ in held_out.outside(outside.phases).kept if number >= first]
    return msgspec.structs.replace(
        answer,
        outside_s=outside.timeout_s,
        outside_status=outside.status,
        outside_max_s=outside.max_s,
        outside_exposure=len(tested),
        outside_exceeded=sum(seconds > outside.timeout_s for seconds in tested),
    )


def _shortened(train: list[Observed], first: int, most: int) -> list[Observed]:
    """Return the first `most` durations, nothing if there are not so many, or if their order is not known."""
    taken: list[Observed] = []
    left = most
    for each in train:
        if left > 0 and each.is_whole:
            part = [kept for kept in each.kept if kept[0] >= first][:left]
            taken.append(_part(each, part))
            left -= len(part)
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
    return chi2(0.95, 2 * (exceeded + 1)) / 2 / exposure if exposure else 1.0


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


__all__ = ["Held", "Pool", "Target", "backtest", "calibrate", "geometric_mean", "nvrx_rule", "upper_rate"]
