"""Are limits exceeded as rarely as they state?  Fits on all runs but one, and counts on the one left out.

Beside each limit stand the rule of thumb, 5 times the maximum, and the plain maximum of the same data.
`calibrate.backtest` prints the result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from resilience.calibrate.limits import Aim, Target, fit_outside, fit_usual, seconds_between
from resilience.calibrate.observed import ObservedDeadline, ObservedRun, pool_of, warm_up
from resilience.calibration import fitting
from resilience.calibration.fitting import FACTOR
from resilience.calibration.limits_file import OutsideLimit
from resilience.calibration.pool import Pool
from resilience.calibration.quantiles import chi2
from resilience.calibration.recurring_phases import FEWEST_RUNS, SLOW
from resilience.facts.limits import Learned

EMA = 0.5  # weight of the newer value in the compatible rule
SIGNIFICANT = 0.05
LEAST_SHARE = 0.3  # of a deadline's durations; if fewer were tested, the backtest says nothing about it
COUNTED = 3.0  # events among n occurrences that counting cannot exclude (95 %) though none was seen


class TestedLimit(msgspec.Struct, frozen=True):
    """One limit, tested on data that it was not fitted on. nvrx: the limit of the compatible rule, 5 times the maximum
    of each run, averaged. exposure: tested durations; plain_exceeded: durations above the plain maximum. suspected:
    durations late enough for a suspicion before the limit. outside_s: the limit outside known
    phases, None without any; outside_p: the rate that it claims, None without one; outside_exposure, outside_exceeded:
    its tested and exceeded counts, where a job would apply it."""

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
    outside_p: float | None = None
    outside_max_s: float = 0.0
    outside_exposure: int = 0
    outside_exceeded: int = 0
    suspected: int = 0

    @property
    def is_rated(self) -> bool:
        """True if the limit states a rate."""
        return self.status in ("ok", "tentative")

    @property
    def is_worse(self) -> bool:
        """True if the limit was exceeded significantly more often than claimed (binomial test, 5 %)."""
        return _is_worse(self.exceeded, self.exposure, _claimed(self.status, self.p, self.n))

    @property
    def is_outside_worse(self) -> bool:
        """True if the limit outside known phases was exceeded significantly more often than it claims."""
        return _is_worse(self.outside_exceeded, self.outside_exposure, self.outside_p)


def _is_worse(exceeded: int, exposure: int, p: float | None) -> bool:
    """Return True if a limit was exceeded significantly more often than it claims. p: None without a claim."""
    return p is not None and exceeded > 0 and at_least(exceeded, exposure, p) < SIGNIFICANT


class Backtest(msgspec.Struct):
    """A backtest. answers: one per deadline and part left out; runs of one name are numbered. tested: number of tested
    durations. recorded: durations that could have been tested. untested: deadlines without a test, with the reason.
    too_little: tested and recorded durations of each deadline whose limit claims something and had too small a test."""

    answers: list[TestedLimit] = []
    tested: int = 0
    recorded: int = 0
    untested: dict[str, str] = {}
    too_little: dict[str, tuple[int, int]] = {}


def backtest(runs: Sequence[ObservedRun], target: Target, most: int | None = None) -> Backtest:
    """Fit as `calibrate` does on all runs of a configuration but one, and count exceeded limits on that one. For a
    single table, fit on the first 60 % and count on the rest, without occurrences that did not end by themselves.

    most: number of durations to fit on; deadlines with fewer are skipped."""
    test = Backtest()
    groups: dict[tuple[str, str], list[ObservedRun]] = defaultdict(list)
    alike: dict[str, list[ObservedRun]] = defaultdict(list)
    for run in _unique_names(runs):
        mark = "pooled" if target.is_pooled else run.configuration.name
        alike[mark].append(run)
        for name in run.deadlines:
            groups[mark, name].append(run)
    for (mark, name), members in sorted(groups.items()):
        aim = Aim.of(alike[mark], target)
        observed = [run.deadlines[name] for run in members]
        first = warm_up(name, observed)
        every = seconds_between(observed, sum(run.seconds for run in members))
        recorded = sum(pool_of([deadline], first).n for deadline in observed)
        tested = 0
        for left_out, train, held_out in _folds(members, name, first):
            answer = _test_limit(mark, name, left_out, train, held_out, first, every, aim, most)
            if answer is not None:
                test.answers.append(answer)
                tested += answer.exposure
        is_single = len(members) == 1
        test.recorded += recorded
        test.tested += tested
        shown = f"{name} ({mark})" if len(alike) > 1 else name
        if most is None and tested < LEAST_SHARE * recorded and _claims(observed, first, every, aim):
            test.too_little[shown] = tested, recorded
        if not tested and recorded and most is None:
            test.untested[shown] = (
                "a single run folder cannot be split; give a second run"
                if is_single
                else f"the other runs have fewer than {fitting.FEWEST} durations"
            )
        if most is None and len(members) == FEWEST_RUNS and _has_limit_outside(observed, first, every, aim):
            test.untested[f"{shown} outside known phases"] = "both runs are needed to know the phases; give a third run"
    return test


def _claims(observed: Sequence[ObservedDeadline], first: int, every: float, aim: Aim) -> bool:
    """Return True if the limit of all runs together claims something."""
    usual = fit_usual(pool_of(observed, first), observed, first, every, aim)
    return _claimed(usual.status, usual.p, max(1, usual.n)) is not None


def _has_limit_outside(observed: Sequence[ObservedDeadline], first: int, every: float, aim: Aim) -> bool:
    """Return True if all runs together give a limit outside known phases."""
    return fit_outside(observed, first, every, aim) is not None


def _unique_names(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """Return the runs with unique names: several launches of one job share its name."""
    counts, numbers = Counter(run.name for run in runs), Counter[str]()
    numbered = []
    for run in runs:
        numbers[run.name] += 1
        name = f"{run.name} ({numbers[run.name]} of {counts[run.name]})" if counts[run.name] > 1 else run.name
        numbered.append(msgspec.structs.replace(run, name=name))
    return numbered


def _folds(
    runs: Sequence[ObservedRun], name: str, first: int
) -> Iterator[tuple[str, list[ObservedDeadline], ObservedDeadline]]:
    """Yield the name of the part left out, the data of deadline `name` to fit on, and the data to test on."""
    observed = [run.deadlines[name] for run in runs]
    if len(runs) > 1:
        for number, run in enumerate(runs):
            yield run.name, [*observed[:number], *observed[number + 1 :]], observed[number]
        return
    (single,) = observed
    if single.is_whole:
        cut = first + int(max(0, len(single.kept) - first) * 0.6)
        later = [(first + number, s, at) for number, (_, s, at) in enumerate(single.kept[cut:])]
        yield f"the last 40 % of {runs[0].name}", [_part(single, single.kept[:cut])], _part(single, later)


def _part(whole: ObservedDeadline, kept: list[tuple[int, float, float]]) -> ObservedDeadline:
    return ObservedDeadline(
        starts=whole.starts, kept=kept, n=len(kept), max_s=max((s for _, s, _ in kept), default=0.0)
    )


def _test_limit(
    mark: str,
    name: str,
    left_out: str,
    train: list[ObservedDeadline],
    held_out: ObservedDeadline,
    first: int,
    every: float,
    aim: Aim,
    most: int | None,
) -> TestedLimit | None:
    if most is not None:
        train = _shortened(train, first, most)
    train_pool, test_pool = pool_of(train, first), pool_of([held_out], first)
    if train_pool.n < fitting.FEWEST or not test_pool.n:
        return None
    fitted = fit_usual(train_pool, train, first, every, aim)
    if fitted.timeout_s is None:
        return None
    pools = [pool_of([deadline], first) for deadline in train]
    nvrx = nvrx_rule([[pool.descending[0][0]] for pool in pools if pool.n])
    over, nvrx_over, plain_over = (_above(test_pool, limit) for limit in (fitted.timeout_s, nvrx, fitted.max_s))
    late_s = Learned(fitted.timeout_s, fitted.median_s, 0.0, longest_s=fitted.max_s).suspected_s
    answer = TestedLimit(
        mark,
        name,
        left_out,
        fitted.status,
        fitted.p,
        fitted.n,
        fitted.timeout_s,
        nvrx,
        fitted.max_s,
        test_pool.n,
        over,
        nvrx_over,
        plain_over,
        fitted.median_s,
        suspected=0 if late_s is None else _above(test_pool, late_s),
    )
    outside = fit_outside(train, first, every, aim)
    return answer if outside is None else _tested_outside(answer, outside, held_out, first)


def _tested_outside(answer: TestedLimit, outside: OutsideLimit, held_out: ObservedDeadline, first: int) -> TestedLimit:
    """Return the answer with the limit outside known phases, tested where a job would apply it."""
    exposure, exceeded = _where_in_force(outside, held_out, first, answer.median_s)
    with_outside: TestedLimit = msgspec.structs.replace(
        answer,
        outside_s=outside.timeout_s,
        outside_status=outside.status,
        outside_p=_claimed(outside.status, outside.p, outside.n),
        outside_max_s=outside.max_s,
        outside_exposure=exposure,
        outside_exceeded=exceeded,
    )
    return with_outside


def _where_in_force(limit: OutsideLimit, held_out: ObservedDeadline, first: int, median_s: float) -> tuple[int, int]:
    """Return to how many occurrences of a run the limit outside known phases applies, and how many are longer: those
    after a cold start, from the first known phase on, and as long as the run is slow at each known phase.

    median_s: usual duration in seconds. A long occurrence whose position a run folder does not tell counts as well."""
    course, phases = held_out.course(first), limit.phases
    if course is None or not (phases.positions or course.is_from_beginning):
        return 0, 0
    begins = phases.positions[0] if phases.positions else 0
    reached = (number for number in phases.positions if number < course.reach)
    unconfirmed = (number for number in reached if course.slow.get(number, 0.0) < SLOW * median_s)
    applies = range(max(first, begins), min(next(unconfirmed, phases.until), course.reach))
    exposure = sum(map(phases.is_outside, applies))
    exceeded = sum(
        seconds > limit.timeout_s and number in applies and phases.is_outside(number)
        for number, seconds in course.slow.items()
    )
    outside = held_out.outside(phases)
    placed = sum(seconds > limit.timeout_s for seconds in outside.series(first))
    exceeded += _above(pool_of([outside], first), limit.timeout_s) - placed
    return max(exposure, exceeded), exceeded


def _above(pool: Pool, limit: float) -> int:
    """Return how many durations are longer than the limit."""
    return sum(count for seconds, count in pool.descending if seconds > limit)


def _claimed(status: str, p: float, n: int) -> float | None:
    """Return the probability of a late occurrence that a limit from n durations claims, None without a claim. p: the
    requested one. `short` claims what counting shows."""
    counted = min(0.5, COUNTED / n) if status == "short" else None
    return p if status in ("ok", "tentative") else counted


def _shortened(train: list[ObservedDeadline], first: int, most: int) -> list[ObservedDeadline]:
    """Return the first `most` durations; nothing if there are fewer, or if their order is unknown."""
    taken: list[ObservedDeadline] = []
    missing = most
    for deadline in train:
        if missing > 0 and deadline.is_whole:
            part = [kept for kept in deadline.kept if kept[0] >= first][:missing]
            taken.append(_part(deadline, part))
            missing -= len(part)
    return [] if missing > 0 else taken


def nvrx_rule(runs: Sequence[Sequence[float]]) -> float:
    """Return the limit of the compatible rule: 5 times each run's maximum, averaged with the previous limit."""
    limit: float | None = None
    for values in runs:
        run_limit = FACTOR * max(values)
        limit = run_limit if limit is None else (1 - EMA) * limit + EMA * run_limit
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
    """Return the 95 % upper bound of the rate of `exceeded` events in `exposure` trials. Source: Clopper and Pearson,
    by the relation between the Poisson and the chi-squared distribution."""
    return chi2(0.95, 2 * (exceeded + 1)) / 2 / exposure if exposure else 1.0


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None for no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
