"""Which limits do these runs support?  From observed durations to one limit for each deadline.

Runs of one configuration are combined. The warm-up after each start is a separate deadline. The target is divided
among all deadlines, and `calibration.fitting` fits each. `calibrate.held_out` checks the result."""

from __future__ import annotations

import datetime
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

import msgspec

from resilience.calibrate.observed import ObservedDeadline, ObservedRun, pool_of, warm_up
from resilience.calibrate.outside import outside_phases
from resilience.calibrate.timings import Input
from resilience.calibration import fitting, limits_file
from resilience.calibration.differences import differences, harmless, serious
from resilience.calibration.fitting import FACTOR, FLOOR, MONTH, NEAR_TOP, Timeout, fit_first, fit_pool
from resilience.calibration.limits_file import Deadline, OutsideLimit, RankGroupLimit, Timeouts
from resilience.calibration.pool import Pool
from resilience.calibration.tails import quantile
from resilience.calibration.unended import Cut, Unended
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import Start, first_name
from resilience.facts.in_words import count
from resilience.telemetry.durations import FIRST_AGAIN

RESTARTS_PER_MONTH = 100.0  # expected restarts, the default


class Target(msgspec.Struct, frozen=True):
    """The target of a calibration. false_alarms: of the whole job within horizon_s, at `ranks` ranks (0: as observed).
    min_timeout, max_timeout: seconds. is_pooled: combine runs of different configurations."""

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
    observations: Input, target: Target = DEFAULT, previous: Timeouts | None = None, progress: Progress | None = None
) -> Timeouts:
    """Return a limit for each deadline of these runs. previous: earlier limits, which are merged.
    Raises: ConfigurationError for runs or earlier limits that do not fit together."""
    runs = check(observations.runs, target)
    aim = Aim.of(runs, target, frozenset() if previous is None else previous.names)
    earlier = {} if previous is None else _earlier(previous, runs, aim)
    names = sorted({name for run in runs for name in run.deadlines})
    limits: dict[str, Deadline] = {}
    for number, name in enumerate(names):
        if progress is not None:
            progress(name, number, len(names))
        observed_deadlines = [run.deadlines[name] for run in runs if name in run.deadlines]
        seconds = sum(run.seconds for run in runs if name in run.deadlines)
        has_ended = any(deadline.n for deadline in observed_deadlines)
        first = warm_up(name, observed_deadlines) if has_ended else 0  # if nothing ended, the user must learn of it
        usual = _usual(observed_deadlines, first, seconds, aim)
        if usual is not None:  # None: one occurrence per start, so there are only first occurrences
            usual = _grouped(usual, _observed_groups(runs, name, aim), first, seconds, aim)
            is_open = _unnumbered_usual(observed_deadlines, first) > 0.0  # it may have been outside phases
            outside = None if is_open else fit_outside(observed_deadlines, first, usual.every_s, aim)
            limits[name] = msgspec.structs.replace(usual, outside=outside)
        limits |= {
            first_name(name, start): limit
            for start, limit in _first_limits(observed_deadlines, first, usual, seconds, aim).items()
        }
    if progress is not None:
        progress("", len(names), len(names))
    return Timeouts(
        schema=limits_file.SCHEMA,
        configuration=_common(runs),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        target_false_alarms=target.false_alarms,
        horizon_s=target.horizon_s,
        ranks=aim.ranks,
        deadlines=limits_file.succeed(limits, earlier, target.max_timeout, target.min_timeout),
        sources=tuple(observations.sources),
        observed_world=max(0 if previous is None else previous.world, *(run.world for run in runs)),
    )


class Aim(msgspec.Struct, frozen=True):
    """The target for each deadline. share: false alarms within the horizon."""

    target: Target
    observed: int
    ranks: int
    share: float

    @classmethod
    def of(cls, runs: Sequence[ObservedRun], target: Target, others: frozenset[str] = frozenset()) -> Aim:
        """Divide the target among all deadlines of these runs, also those that are not asked for, and the others of the
        same file. Half of it is kept for first occurrences."""
        observed = max(run.ranks for run in runs)
        future = target.ranks or max(run.world for run in runs)
        names = others.union(*(run.deadlines.keys() | run.excluded for run in runs))
        return cls(target, observed, future, target.false_alarms / (2 * len(names)))

    def p(self, every: float) -> float:
        """Return the accepted false-alarm probability of one occurrence. every: mean seconds between occurrences."""
        return fitting.trial_probability(self.share, 1, self.target.horizon_s, every, self.observed, self.ranks)

    def entry(self, fitted: Timeout, every: float, seconds: float, p99: float) -> Deadline:
        """Return a fit as an entry of the file. every: mean seconds between occurrences. seconds: observed time."""
        return limits_file.deadline(fitted, every, self.observed, seconds / 3600, p99, self.ranks / self.observed)

    def among(self, deadlines: int) -> Aim:
        """Return the target divided among this number of deadlines."""
        shared: Aim = msgspec.structs.replace(self, share=self.share / deadlines)
        return shared


def check(runs: Sequence[ObservedRun], target: Target) -> list[ObservedRun]:
    """Return the runs. Raises: ConfigurationError for no runs, runs without timings, or different configurations."""
    if not runs:
        raise ConfigurationError("no runs given; name run folders or tables of timings")
    for run in runs:
        if not run.deadlines:
            raise ConfigurationError(
                f"run {run.name} has no timings; it has not recorded any yet, or --section excludes all of them"
            )
    for one, other in itertools.combinations(_distinct(runs), 2):  # A may fit B, and B may fit C, but not A and C
        reason = serious(differences(one.configuration, other.configuration))
        if reason and not target.is_pooled:
            raise ConfigurationError(
                f"runs {one.name} and {other.name} differ: {reason}. Calibrate them separately, or use --pool if "
                "the difference does not affect durations"
            )
    return list(runs)


def _distinct(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """Return the first run of each configuration."""
    first: dict[Configuration, ObservedRun] = {}
    for run in runs:
        first.setdefault(run.configuration, run)
    return list(first.values())


def _common(runs: Sequence[ObservedRun]) -> Configuration:
    """Return the configuration for which the limits of these runs hold, in whatever order they are given: the smallest
    world, because the limits hold from there on, and the one about which most is known."""
    return min(
        (run.configuration for run in runs),
        key=lambda known: (
            bool(known.table),
            known.world_size or math.inf,
            known.ranks_per_node or math.inf,
            known.workload,
            known.arguments,
            known.torch,
            known.script,
        ),
    )


def _earlier(previous: Timeouts, runs: Sequence[ObservedRun], aim: Aim) -> Mapping[str, Deadline]:
    """Return the earlier limits as they apply to the configuration of these runs and to the job: limits of single ranks
    hold for one world size, limits outside known phases for equal arguments, and rates for a number of ranks and a
    target. Raises: ConfigurationError if limits of the earlier configuration do not fit these runs."""
    was = previous.configuration
    by_run = [(run.name, differences(was, run.configuration, previous.ranks)) for run in _distinct(runs)]
    reasons = [f"run {name} differ: {reason}" for name, differing in by_run if (reason := serious(differing))]
    if reasons and not aim.target.is_pooled:
        raise ConfigurationError(
            f"the existing limits file and {reasons[0]}. Write the limits to another --out file, or "
            "use --pool if the difference does not affect durations"
        )
    earlier = limits_file.refitted_for(previous, aim.ranks, aim.target.false_alarms, aim.target.horizon_s, aim.share)
    if not any(differing for _, differing in by_run):
        return earlier
    is_same_shape = not reasons and all(was.world_size == run.configuration.world_size for run in runs)
    return {
        name: msgspec.structs.replace(known, groups=known.groups if is_same_shape else (), outside=None)
        for name, known in earlier.items()
    }


def unlike(runs: Sequence[ObservedRun]) -> list[str]:
    """Return notes on harmless differences between the configurations of these runs."""
    notes = {harmless(differences(runs[0].configuration, run.configuration)): run.name for run in runs[1:]}
    return [f"run {name} differs from {runs[0].name}: {difference}" for difference, name in notes.items() if difference]


def _usual(observed: Sequence[ObservedDeadline], first: int, seconds: float, aim: Aim) -> Deadline | None:
    """Return the limit of all but the first occurrences, None if there were no others."""
    pool = pool_of(observed, first)
    was_killed = any(cut.end == "killed" for deadline in observed for cut in deadline.settled_cuts(first))
    if not pool.n and not was_killed:
        return None
    every = seconds_between(observed, seconds)
    fitted = fit_usual(pool, observed, first, every, aim)
    limit = aim.entry(fitted, every, seconds, quantile(pool.descending, 0.99) if pool.n else 0.0)
    medians = [deadline.rank_medians for deadline in observed if deadline.rank_medians[1]]
    if medians:
        lowest_median, highest_median = min(low for low, _ in medians), max(high for _, high in medians)
        limit = msgspec.structs.replace(limit, rank_medians_s=(lowest_median, highest_median))
    lost = sum(sum(deadline.missing.values()) for deadline in observed if deadline.is_full)
    if lost:
        warning = (
            "large durations are known only from the histogram, within 1 %, because the file of single values is full"
        )
        limit = _warned(limit, f"{lost} {warning}")
    if unnumbered := sum(deadline.unnumbered for deadline in observed):
        longest = max(deadline.longest_unnumbered for deadline in observed)
        limit = _warned(
            limit,
            f"the file of single values lacks {count(unnumbered, 'occurrence')} among the first {FIRST_AGAIN} after a "
            f"start, up to {longest:.4g} s: they count neither as first nor as usual ones",
        )
    limit = _raised_over(limit, _unnumbered_usual(observed, first), aim.target)
    return limits_file.above_limit(limit)


def _unnumbered_usual(observed: Sequence[ObservedDeadline], first: int) -> float:
    """Return the seconds of the longest occurrence whose number is unknown and that may be a usual one, because it took
    longer than first occurrences do. 0: there is none."""
    longest = max((deadline.longest_unnumbered for deadline in observed), default=0.0)
    known = [value for deadline in observed for start in deadline.starts for value in start.first(first)]
    return longest if longest > FACTOR * max(known, default=0.0) else 0.0


def _raised_over(limit: Deadline, unnumbered_s: float, target: Target) -> Deadline:
    """Return the entry with a limit above a healthy occurrence that may have been one of these. It states no rate."""
    if limit.timeout_s is None or unnumbered_s <= limit.timeout_s:
        return limit
    raised_s = FLOOR * unnumbered_s if target.max_timeout is None else min(FLOOR * unnumbered_s, target.max_timeout)
    raised_s = max(raised_s, limit.timeout_s)
    words = f"an occurrence soon after a start, whose number is unknown, took {unnumbered_s:.4g} s"
    limit = limits_file.without_rate(limits_file.with_limit(limit, raised_s, limit.reason), words)
    return _warned(
        limit, words + (", which is above the limit" if unnumbered_s > raised_s else ": the limit is longer")
    )


def seconds_between(observed: Sequence[ObservedDeadline], seconds: float) -> float:
    """Return the mean time between two occurrences. seconds: the observed time of these runs."""
    occurrences = sum(deadline.n + deadline.unnumbered for deadline in observed)
    return (seconds or 1.0) / max(1, occurrences)  # 0: a limit ended all at once


def fit_usual(pool: Pool, observed: Sequence[ObservedDeadline], first: int, every: float, aim: Aim) -> Timeout:
    """Return the fit of these durations to the target. observed: the deadlines in the pool, with their cuts. first:
    number of first occurrences after a start, which have a limit of their own."""
    return fit_pool(
        pool,
        aim.p(every),
        aim.target.confidence,
        [cut for deadline in observed for cut in deadline.settled_cuts(first)],
        min_timeout=aim.target.min_timeout,
        max_timeout=aim.target.max_timeout,
    )


def _observed_groups(runs: Sequence[ObservedRun], name: str, aim: Aim) -> dict[str, list[ObservedDeadline]]:
    """Return the observations of each group of similar ranks in all runs; empty for a job of another size, and for
    pooled runs of several sizes."""
    by_group: dict[str, list[ObservedDeadline]] = defaultdict(list)
    if aim.ranks == aim.observed and len({run.configuration.world_size for run in runs}) == 1:
        for run in runs:
            for ranks, observed in run.groups.get(name, {}).items():
                by_group[ranks].append(observed)
    return by_group


def _grouped(
    usual: Deadline, groups: Mapping[str, list[ObservedDeadline]], first: int, seconds: float, aim: Aim
) -> Deadline:
    """Return a deadline with the limits of its groups, which divide the target among them. A group without a rate gets
    the common limit if that has a rate. No limit is longer than the common one. The occurrences of groups that
    did not end by themselves are named, without an effect, because the limit of a group may be replaced later."""
    limits: list[RankGroupLimit] = []
    warnings = list(usual.warnings)
    for ranks, observed in groups.items():
        group_limit = _usual(observed, first, seconds, aim.among(len(groups)))
        if group_limit is None:
            continue
        cuts = [cut for deadline in observed for cut in deadline.settled_cuts(first)]
        unended = Unended.of(cuts, NEAR_TOP * group_limit.max_s)
        warnings += [f"ranks {ranks}: {warning}" for warning in unended.warnings if warning not in usual.warnings]
        is_rated = group_limit.status in ("ok", "tentative")
        timeout = group_limit.timeout_s
        if timeout is None or (not is_rated and usual.status in ("ok", "tentative")):
            timeout = usual.timeout_s
        if timeout is not None and usual.timeout_s is not None:
            timeout = min(timeout, usual.timeout_s)
        limits.append(
            RankGroupLimit(
                ranks=ranks,
                timeout_s=timeout,
                status=group_limit.status,
                reason=group_limit.reason,
                n=group_limit.n,
                max_s=group_limit.max_s,
                median_s=group_limit.median_s,
                p99_s=group_limit.p99_s,
                rank_medians_s=group_limit.rank_medians_s,
            )
        )
    return msgspec.structs.replace(usual, groups=tuple(limits), warnings=tuple(warnings))


def fit_outside(observed: Sequence[ObservedDeadline], first: int, every: float, aim: Aim) -> OutsideLimit | None:
    """Return the limit outside known phases, None if there is none. every: mean seconds between occurrences."""
    target = aim.target
    fit = partial(
        fit_pool, confidence=target.confidence, min_timeout=target.min_timeout, max_timeout=target.max_timeout
    )
    p_outside = aim.among(2).p(every)  # nearly all occurrences are outside phases
    return outside_phases(observed, first, partial(fit, p=aim.p(every)), partial(fit, p=p_outside))


def _warned(deadline: Deadline, warning: str) -> Deadline:
    return msgspec.structs.replace(deadline, warnings=(*deadline.warnings, warning))


def _first_limits(
    observed: Sequence[ObservedDeadline], first: int, usual: Deadline | None, seconds: float, aim: Aim
) -> dict[Start, Deadline]:
    """Return the limit of first occurrences after starts of each kind that was observed."""
    unnumbered_s = max(deadline.longest_unnumbered for deadline in observed)
    cuts = {start: [cut for known in observed for cut in known.first_cuts(first, start)] for start in get_args(Start)}
    limits: dict[Start, Deadline] = {}
    for start in get_args(Start):
        by_run = [
            [values for begun in deadline.starts if begun.how == start and (values := begun.first(first))]
            for deadline in observed
        ]
        if any(by_run):
            limits[start] = _first(by_run, first, cuts[start], usual, seconds, unnumbered_s, aim)
    longest_s = max((limit.timeout_s or 0.0 for limit in (usual, *limits.values()) if limit is not None), default=0.0)
    is_known = bool(limits)
    for start in get_args(Start):
        if start not in limits and (limit := _never_ended(cuts[start], longest_s, is_known, aim)) is not None:
            limits[start] = msgspec.structs.replace(limit, occurrences=first)
    return limits


def _never_ended(cuts: Sequence[Cut], longest_s: float, is_known: bool, aim: Aim) -> Deadline | None:
    """Return the limit of first occurrences none of which ended by itself, None if what is known of others holds for
    them. One that a limit ended may have been healthy, so the limit is longer; one that was cut for another reason was
    healthy until then. longest_s: the longest limit of other occurrences of this deadline in seconds. is_known:
    first occurrences after other starts are known."""
    every = MONTH / aim.target.restarts_per_month
    fitted = fitting.fit_unended(cuts, aim.p(every), longest_s, max_timeout=aim.target.max_timeout)
    lasted_s = max((cut.seconds for cut in cuts if cut.end == "cut"), default=0.0)
    if not cuts or (fitted.timeout_s is None and is_known and lasted_s <= longest_s):
        return None
    if fitted.timeout_s is not None and lasted_s > fitted.timeout_s:
        late = f"one that was cut off after {lasted_s:.4g} s had not ended either: the limit may be too short"
        fitted = msgspec.structs.replace(fitted, warnings=(*fitted.warnings, late))
    return aim.entry(fitted, every, 0.0, 0.0)


def _first(
    by_run: Sequence[Sequence[Sequence[float]]],
    first: int,
    cuts: Sequence[Cut],
    usual: Deadline | None,
    seconds: float,
    unnumbered_s: float,
    aim: Aim,
) -> Deadline:
    """Return the limit of first occurrences after starts of one kind. It is never shorter than the usual limit. by_run:
    the durations after each of its starts. cuts: first occurrences that did not end by themselves. unnumbered_s: the
    longest occurrence that may be a first one after any start."""
    every = MONTH / aim.target.restarts_per_month
    maxima = [max(values) for starts in by_run for values in starts]
    target = aim.target
    fitted = fit_first(
        maxima,
        aim.p(every),
        target.confidence,
        cuts,
        runs=sum(map(bool, by_run)),
        min_timeout=target.min_timeout,
        max_timeout=target.max_timeout,
    )
    limit = aim.entry(fitted, every, seconds, max(maxima))
    usual_s = None if usual is None else usual.timeout_s
    if usual_s is not None and limit.timeout_s is not None and limit.timeout_s < usual_s:
        limit = limits_file.with_limit(limit, usual_s, f"{limit.reason}; as long as the usual limit")
    limit = _raised_over(limit, unnumbered_s, target)
    return msgspec.structs.replace(limits_file.above_limit(limit), occurrences=first)
