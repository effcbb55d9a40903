"""What is known about a job's limits?  The file that `resilience calibrate` writes and the next run reads.

It has one entry per deadline (`facts.deadlines`). This module also decides when a new file may change an old limit, and
when a file is stale. `system.timeouts_file` reads and writes the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar, get_args

import msgspec

from resilience.calibration import rank_groups
from resilience.calibration.fitting import FACTOR, FLOOR, MONTH, Mode, Status, Timeout
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import Start, parse_name, section_of
from resilience.facts.in_words import count
from resilience.facts.limits import NO_LIMIT, First, Learned, Limit, Limits, OfRanks, Outside
from resilience.facts.phases import Phases

SCHEMA = 2
NEAR_MISS = 0.67  # of the limit: a healthy occurrence this long shows that the limit is too short
MEDIAN_MOVED = 0.20
CLAIMS: frozenset[Status] = frozenset(
    ("ok", "tentative", "short")
)  # that say how often an occurrence exceeds the limit
ROUNDED = 1e-5  # of a value in the file
RARE = 3.09  # standard deviations: 99.9 %


class Alarms(msgspec.Struct, frozen=True):
    """Upper bounds on the false alarms of one deadline: from the fitted tail, and from counting alone."""

    model_upper: float | None = None
    distribution_free_upper: float | None = None


class RankGroupLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limit of one group of ranks, for a deadline whose ranks differ. ranks: such as `0,4-7`. rank_medians_s: the
    lowest and the highest."""

    ranks: str
    timeout_s: float | None
    status: Status
    reason: str
    n: int = 0
    max_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    rank_medians_s: tuple[float, float] = (0.0, 0.0)


class OutsideLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limit of occurrences outside known phases. p: the requested probability of a false alarm. warnings: for the
    user."""

    timeout_s: float
    status: Status
    reason: str
    phases: Phases
    p: float = 0.0
    n: int = 0
    max_s: float = 0.0
    median_s: float = 0.0
    warnings: tuple[str, ...] = ()


_Part = TypeVar("_Part", RankGroupLimit, OutsideLimit)


class Deadline(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limit of one deadline and its basis. Durations in seconds. expected_false_alarms_per_month: in 30 days of the
    whole job, with the ranks that it was fitted for. false_alarms_per_occurrence: the probability of one, for the same
    ranks. ranks: observed; p is for these. occurrences: for a deadline of first occurrences,
    their number after a start. rank_medians_s: the lowest and the highest median of single ranks; all other values are
    of the slowest rank of each occurrence. groups: limits of groups of similar ranks, which take precedence. outside: a
    shorter limit outside known phases after a cold start. killed_s: without an answer, the longest occurrence that
    did not end by itself and that may have been healthy."""

    timeout_s: float | None
    status: Status
    reason: str
    p: float
    expected_false_alarms_per_month: Alarms = Alarms()
    false_alarms_per_occurrence: Alarms = Alarms()
    ratio_to_max: float | None = None
    ratio_to_median: float | None = None
    n: int = 0
    runs: int = 0
    ranks: int = 0
    hours: float = 0.0
    every_s: float = 0.0
    max_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    modes: tuple[Mode, ...] = ()
    censored: int = 0
    excluded_hangs: tuple[float, ...] = ()
    previous_timeout_s: float | None = None
    warnings: tuple[str, ...] = ()
    occurrences: int = 0
    rank_medians_s: tuple[float, float] = (0.0, 0.0)
    groups: tuple[RankGroupLimit, ...] = ()
    outside: OutsideLimit | None = None
    killed_s: float = 0.0


class SourceFile(msgspec.Struct, frozen=True):
    """A file that the limits were computed from."""

    path: str
    sha256: str


class Timeouts(msgspec.Struct, frozen=True, omit_defaults=True):
    """All limits of one configuration. target_false_alarms: of the whole job within horizon_s. ranks: size of the job
    that they were fitted for. observed_world: ranks of the largest observed job, also those without timings; 0 in a
    file of an earlier version."""

    schema: int
    configuration: Configuration
    created: str
    target_false_alarms: float
    horizon_s: float
    ranks: int
    deadlines: dict[str, Deadline]
    sources: tuple[SourceFile, ...] = ()
    observed_world: int = 0

    @property
    def world(self) -> int:
        """Return the number of ranks of the largest observed job, 0 if unknown."""
        return self.observed_world or max((known.ranks for known in self.deadlines.values()), default=0)

    @property
    def names(self) -> frozenset[str]:
        """Return the deadlines with a limit, without those of first occurrences."""
        return frozenset(parse_name(name)[0] for name in self.deadlines)


def above_limit(known: Deadline) -> Deadline:
    """Return the entry, with a warning if a healthy occurrence took longer than the limit."""
    warning = f"a healthy occurrence took {known.max_s:.4g} s, which is above the limit"
    if known.timeout_s is None or known.max_s <= known.timeout_s or warning in known.warnings:
        return known
    warned: Deadline = msgspec.structs.replace(known, warnings=(*known.warnings, warning))
    return warned


def deadline(
    fitted: Timeout, every_s: float, ranks: int, hours: float, p99_s: float, per_observed: float = 1.0
) -> Deadline:
    """Return a fit as an entry of the file. every_s: mean seconds between two occurrences. ranks: observed.
    per_observed: ranks of the job for each observed one; if there are more, a false alarm is likelier in proportion, as
    in `trial_probability`."""
    trials = MONTH / every_s if every_s > 0 else 0.0
    is_rated = fitted.status in ("ok", "tentative")
    alarms = Alarms(
        _of_job(fitted.model_upper if is_rated else None, per_observed),
        _of_job(fitted.distribution_free_upper, per_observed),
    )
    limit = fitted.timeout_s
    return Deadline(
        timeout_s=limit,
        status=fitted.status,
        reason=fitted.reason,
        p=fitted.p,
        expected_false_alarms_per_month=Alarms(
            _times(alarms.model_upper, trials), _times(alarms.distribution_free_upper, trials)
        ),
        false_alarms_per_occurrence=alarms,
        ratio_to_max=_ratio(limit, fitted.max_s),
        ratio_to_median=_ratio(limit, fitted.median_s),
        n=fitted.n,
        runs=fitted.runs,
        ranks=ranks,
        hours=hours,
        every_s=every_s,
        max_s=fitted.max_s,
        median_s=fitted.median_s,
        p99_s=p99_s,
        modes=fitted.modes,
        censored=fitted.censored,
        excluded_hangs=fitted.excluded_hangs,
        warnings=fitted.warnings,
        killed_s=fitted.killed_s,
    )


def _of_job(probability: float | None, per_observed: float) -> float | None:
    """Return the probability that a rank of the job, which may have more ranks than were observed, is late."""
    return None if probability is None else min(1.0, probability * max(1.0, per_observed))


def _times(probability: float | None, trials: float) -> float | None:
    return None if probability is None else probability * trials


def _ratio(limit_s: float | None, duration_s: float) -> float | None:
    return limit_s / duration_s if limit_s and duration_s else None


def with_limit(known: Deadline, timeout_s: float | None, reason: str) -> Deadline:
    """Return the entry with another limit (seconds), and the ratios of that limit."""
    changed: Deadline = msgspec.structs.replace(
        known,
        timeout_s=timeout_s,
        reason=reason,
        ratio_to_max=_ratio(timeout_s, known.max_s),
        ratio_to_median=_ratio(timeout_s, known.median_s),
    )
    return changed


def refitted_for(
    previous: Timeouts, ranks: int, target_false_alarms: float, horizon_s: float, share: float
) -> dict[str, Deadline]:
    """Return earlier limits for a file with this number of ranks and this target. A limit that was fitted for fewer
    ranks, or for more false alarms in the same time, states no rate there. share: false alarms within the horizon that
    one deadline may have; a limit that states more states no rate either."""
    reasons = []
    if previous.ranks < ranks:
        reasons.append(f"it was fitted for {count(previous.ranks, 'rank')}, the target is for {ranks}")
    before, now = previous.target_false_alarms / previous.horizon_s, target_false_alarms / horizon_s
    if before > now * (1.0 + ROUNDED):
        reasons.append(f"it was fitted for {before / now:.3g} times as many false alarms as the target allows")
    most = share / horizon_s * MONTH * (1.0 + ROUNDED)
    refitted = {}
    for name, known in previous.deadlines.items():
        stated = known.expected_false_alarms_per_month.model_upper or 0.0
        too_many = [f"its share of the target is {most:.3g} false alarms in 30 d now"] if stated > most else []
        whole = "; ".join([*reasons, *too_many])
        refitted[name] = without_rate(known, whole) if whole else known
    return refitted


def without_rate(known: Deadline, reason: str) -> Deadline:
    """Return the entry with the same limits and no claim. reason: why."""
    is_claimed = known.status in CLAIMS
    unclaimed: Deadline = msgspec.structs.replace(
        known,
        status="provisional" if is_claimed else known.status,
        reason=f"{known.reason}; {reason}" if is_claimed else known.reason,
        false_alarms_per_occurrence=Alarms(),
        expected_false_alarms_per_month=Alarms(),
        groups=tuple(_unclaimed(group) for group in known.groups),
        outside=None if known.outside is None else _unclaimed(known.outside),
    )
    return unclaimed


def _unclaimed(limit: _Part) -> _Part:
    return msgspec.structs.replace(limit, status="provisional") if limit.status in CLAIMS else limit


def succeed(
    new: Mapping[str, Deadline],
    old: Mapping[str, Deadline],
    max_timeout: float | None = None,
    min_timeout: float = 0.0,
) -> dict[str, Deadline]:
    """Return the merged limits. Only an `ok` fit may lower a limit, also one of a group or outside known phases; any
    fit may raise it. If the new fit has no limit and a healthy occurrence exceeded the old one, the limit is raised to
    5 times the maximum; if the old limit ended occurrences that may have been healthy, to 1.5 times their length,
    within 5 times the maximum. The rates of the new fit are upper bounds for a longer limit too. max_timeout,
    min_timeout: the longest and the shortest limit in seconds, also of a deadline that only `old` has."""
    merged = dict(new)
    for name, previous in old.items():
        fresh = new.get(name)
        if fresh is None:
            merged[name] = _at_least(_bounded(previous, max_timeout), min_timeout)
        elif previous.timeout_s is not None:
            limit, reason = _following(fresh, previous.timeout_s, max_timeout)
            followed = msgspec.structs.replace(
                above_limit(with_limit(fresh, limit, reason)), previous_timeout_s=previous.timeout_s
            )
            merged[name] = _at_least(_with_parts(followed, previous, is_kept=limit != fresh.timeout_s), min_timeout)
    return merged


def _at_least(known: Deadline, min_timeout: float) -> Deadline:
    """Return the entry without limits below min_timeout seconds. Its rates are upper bounds for longer limits too."""
    if known.timeout_s is not None and known.timeout_s < min_timeout:
        reason = f"{known.reason}; raised from {known.timeout_s:.4g} s to min_timeout, {min_timeout:g} s"
        earlier_s = known.previous_timeout_s or known.timeout_s
        known = msgspec.structs.replace(with_limit(known, min_timeout, reason), previous_timeout_s=earlier_s)
    outside = None if known.outside is None else _part_at_least(known.outside, min_timeout)
    if outside is not None and known.timeout_s is not None and outside.timeout_s >= known.timeout_s:
        outside = None
    groups = tuple(_part_at_least(group, min_timeout) for group in known.groups)
    bounded: Deadline = msgspec.structs.replace(known, groups=groups, outside=outside)
    return bounded


def _part_at_least(limit: _Part, min_timeout: float) -> _Part:
    is_short = limit.timeout_s is not None and limit.timeout_s < min_timeout
    return msgspec.structs.replace(limit, timeout_s=min_timeout) if is_short else limit


def _whole(known: Deadline) -> Deadline:
    """Return the entry without the shorter limits of groups and outside known phases."""
    whole: Deadline = msgspec.structs.replace(known, groups=(), outside=None)
    return whole


def _with_parts(fresh: Deadline, previous: Deadline, is_kept: bool) -> Deadline:
    """Return the entry in which the limits of groups and outside known phases are no shorter than earlier ones, unless
    an `ok` fit allows it. A group of other ranks than before follows the longest limit that one of its ranks had. A
    limit outside known phases is left out if the earlier one is as long as the usual limit. is_kept: the usual limit is
    an earlier one, which the new runs do not support. So it is what held where the earlier file has no shorter limit.
    """
    longest = math.inf if fresh.timeout_s is None else fresh.timeout_s
    unknown_s = longest if is_kept else 0.0
    warnings = list(fresh.warnings)
    groups = []
    for group in fresh.groups:
        earlier = (was.timeout_s or 0.0 for was in previous.groups if rank_groups.overlap(was.ranks, group.ranks))
        kept_s = _kept(group, min(longest, max(earlier, default=unknown_s)))
        groups.append(group if kept_s is None else msgspec.structs.replace(group, timeout_s=kept_s))
        warnings += [] if kept_s is None else [f"ranks {group.ranks}: {_why_kept(kept_s)}"]
    if previous.groups and not groups:
        warnings.append("the earlier limits of groups of ranks are left out: these runs show no such groups")
    outside = fresh.outside
    if outside is not None:
        earlier_s = unknown_s if previous.outside is None else previous.outside.timeout_s
        kept_s = _kept(outside, min(longest, earlier_s))
        if kept_s is not None:
            kept = msgspec.structs.replace(outside, timeout_s=kept_s, warnings=(*outside.warnings, _why_kept(kept_s)))
            outside = kept if kept_s < longest else None
            warnings += [] if outside is not None else [f"no limit outside known phases: {_why_kept(kept_s)}"]
    elif previous.outside is not None:
        warnings.append("the earlier limit outside known phases is left out: these runs do not support it")
    entry: Deadline = msgspec.structs.replace(fresh, groups=tuple(groups), outside=outside, warnings=tuple(warnings))
    return entry


def _kept(fresh: RankGroupLimit | OutsideLimit, earlier_s: float) -> float | None:
    """Return the earlier limit (seconds) if the new one is shorter and may not replace it."""
    is_lower = fresh.timeout_s is not None and fresh.timeout_s < earlier_s
    return earlier_s if is_lower and fresh.status != "ok" else None


def _why_kept(seconds: float) -> str:
    return f"kept at {seconds:.4g} s, because only an `ok` fit may lower a limit"


def _bounded(kept: Deadline, max_timeout: float | None) -> Deadline:
    """Return an earlier deadline that the new runs do not have, with a limit of at most max_timeout seconds. A limit
    that this shortens states no rate."""
    if kept.timeout_s is None or max_timeout is None or kept.timeout_s <= max_timeout:
        return kept
    reason = f"{kept.reason}; the earlier limit of {kept.timeout_s:.4g} s is above max_timeout, {max_timeout:g} s"
    by_occurrence, by_month = (
        alarms.distribution_free_upper
        for alarms in (kept.false_alarms_per_occurrence, kept.expected_false_alarms_per_month)
    )
    if by_occurrence is not None and max_timeout < kept.max_s:
        by_occurrence, by_month = 1.0, MONTH / kept.every_s if kept.every_s else None
    bounded = msgspec.structs.replace(
        with_limit(kept, max_timeout, reason),
        status="insufficient" if kept.status == "insufficient" else "provisional",
        false_alarms_per_occurrence=Alarms(None, by_occurrence),
        expected_false_alarms_per_month=Alarms(None, by_month),
        previous_timeout_s=kept.timeout_s,
    )
    return above_limit(_whole(bounded))


def _following(fresh: Deadline, earlier_s: float, max_timeout: float | None) -> tuple[float | None, str]:
    """Return the limit that follows an earlier one, and its reason. All in seconds."""
    limit, reason = fresh.timeout_s, fresh.reason
    bound = math.inf if max_timeout is None else max_timeout
    if earlier_s > bound:
        reason = f"{reason}; the earlier limit of {earlier_s:.4g} s is above max_timeout, {bound:g} s"
        earlier_s = bound
    needed_s, why = _needed(fresh, earlier_s)
    if limit is None and earlier_s < min(needed_s, bound):
        limit = min(needed_s, bound)
        reason = f"{reason}; raised from {earlier_s:.4g} s, because {why}"
    elif limit is None or (limit < earlier_s and fresh.status != "ok"):
        limit = earlier_s
        reason = f"{reason}; {_why_kept(earlier_s)}"
    return limit, reason


def _needed(fresh: Deadline, earlier_s: float) -> tuple[float, str]:
    """Return how long an earlier limit must be, in seconds, given durations that are too few for an answer, and why."""
    if earlier_s < fresh.max_s:
        return FACTOR * fresh.max_s, f"{fresh.max_s:.4g} s was observed"
    needed_s = min(FLOOR * fresh.killed_s, FACTOR * fresh.max_s)
    return (
        needed_s,
        f"occurrences that lasted up to {fresh.killed_s:.4g} s and did not end by themselves may have been healthy",
    )


def in_force(timeouts: Timeouts, base: Limits, margin: float | None = None, is_equal: bool = True) -> Limits:
    """Return the limits of a run that starts with this file.

    base: limits set by hand, which take precedence over learned ones. margin: seconds between asking all ranks to
    restart and ending the rank, None to end it at once. is_equal: the run equals the observed runs, including
    arguments. Otherwise phases may be at other positions, and the limits of whole deadlines apply everywhere."""
    limits = {name: known.timeout_s for name, known in timeouts.deadlines.items() if known.timeout_s is not None}
    sections = dict(base.sections)
    changes: dict[str, Limit] = {}
    learned: dict[str, Learned] = {}
    groups: dict[str, tuple[OfRanks, ...]] = {}
    outside: dict[str, Outside] = {}
    first = _first(timeouts, limits, base, margin)
    for name, seconds in limits.items():
        deadline, start = parse_name(name)
        section = section_of(deadline)
        if start is not None or _is_set(base, deadline):
            continue
        if section is None:
            changes[deadline] = _limit(seconds, margin)
        else:
            sections[section] = _limit(seconds, margin)
        known = timeouts.deadlines[name]
        occurrences = first[name].occurrences if name in first else 0
        learned[name] = _learned(seconds, known, occurrences)
        if known.outside is not None and is_equal:
            outside_s = min(known.outside.timeout_s, seconds)
            outside[name] = Outside(_limit(outside_s, margin), known.outside.phases)
            learned[name] = msgspec.structs.replace(learned[name], outside_s=outside_s)
        if known.groups:
            groups[name] = tuple(
                OfRanks(group.ranks, _limit(limit, margin), _learned(limit, group, occurrences))
                for group in known.groups
                for limit in (group.timeout_s or seconds,)
            )
    return msgspec.structs.replace(
        base,
        sections=sections,
        first=first,
        learned=learned,
        groups=groups,
        group_world=timeouts.configuration.world_size,
        outside=outside,
        worlds=_worlds(timeouts),
        unlearned=base,
        **changes,
    )


def _worlds(timeouts: Timeouts) -> tuple[int, int] | None:
    """Return the smallest and the largest world for which these limits hold, None for any. The configuration has the
    most ranks that a job may have. It may never have had that many, so what was observed decides."""
    most = timeouts.configuration.world_size
    least = min(most, timeouts.world or most)
    return (least, max(least, timeouts.ranks)) if most else None


def _learned(seconds: float, known: Deadline | RankGroupLimit, occurrences: int) -> Learned:
    least, most = known.rank_medians_s
    return Learned(seconds, most or known.median_s, known.p99_s, occurrences, least, known.max_s)


def of_rank(limits: Limits, rank: int | None, world_size: int | None) -> Limits:
    """Return the limits of one rank: those of its group, if the world size is the one for which groups were fitted. The
    limit outside known phases holds for it too if it is shorter. In a world of another size than the observed ones, as
    after the loss of a node, no learned limit holds, nor is one on trial."""
    if limits.shadow is not None:
        limits = msgspec.structs.replace(limits, shadow=of_rank(limits.shadow, rank, world_size))
    if not holds_in(limits, world_size):
        return msgspec.structs.replace(limits.unlearned or limits, rule=limits.rule)
    chosen = msgspec.structs.replace(limits, groups={}, group_world=0, worlds=None, unlearned=None)
    if rank is None or world_size != limits.group_world:
        return chosen
    for name, groups in limits.groups.items():
        for group in groups:
            if rank_groups.holds(group.ranks, rank):
                section = section_of(name)
                changed = (
                    {name: group.limit} if section is None else {"sections": {**chosen.sections, section: group.limit}}
                )
                outside_s = limits.learned[name].outside_s  # of the slowest rank of each occurrence, so of any rank
                outside = dict(chosen.outside)
                if outside_s >= group.learned.timeout_s:
                    outside_s = 0.0
                    outside.pop(name, None)
                learned = {**chosen.learned, name: msgspec.structs.replace(group.learned, outside_s=outside_s)}
                chosen = msgspec.structs.replace(chosen, learned=learned, outside=outside, **changed)
    return chosen


def holds_in(limits: Limits, world_size: int | None) -> bool:
    """Return True if learned limits hold in a world of this size; None: unknown."""
    return limits.worlds is None or world_size is None or limits.worlds[0] <= world_size <= limits.worlds[1]


def _first(timeouts: Timeouts, limits: Mapping[str, float], base: Limits, margin: float | None) -> dict[str, First]:
    """Return the limits of first occurrences. None is shorter than the usual limit. A kind of start that was not
    observed gets the longest limit of the other kinds. Where none of them ended by itself, so that nothing is known,
    there is no limit: the usual one is too short."""
    known: dict[str, dict[Start, float]] = {}
    occurrences: dict[str, int] = {}
    for name, entry in timeouts.deadlines.items():
        deadline, start = parse_name(name)
        if start is None or _is_set(base, deadline) or (name not in limits and deadline not in limits):
            continue
        known.setdefault(deadline, {})[start] = max(limits.get(name, math.inf), limits.get(deadline, 0.0))
        occurrences[deadline] = max(occurrences.get(deadline, 1), entry.occurrences)
    return {
        deadline: First(
            occurrences[deadline],
            {start: _limit(starts.get(start, max(starts.values())), margin) for start in get_args(Start)},
        )
        for deadline, starts in known.items()
    }


def _limit(seconds: float, margin: float | None) -> Limit:
    if seconds == math.inf:
        return NO_LIMIT
    return Limit(hard=seconds) if margin is None else Limit(seconds, seconds + margin)


def _is_set(base: Limits, deadline: str) -> bool:
    """Return True if a limit is set by hand."""
    section = section_of(deadline)
    if section is not None:
        return section in base.sections or section in base.warmup
    return deadline not in base.defaults and getattr(base, deadline) != NO_LIMIT


class SeenInJob(msgspec.Struct, frozen=True):
    """What a running job has observed for one deadline. above_p99: number in the last hour's occurrences.
    outside_max_s: the longest one to which the limit outside known phases applied."""

    n: int
    max_s: float
    median_s: float
    above_p99: int
    hour_n: int
    outside_max_s: float = 0.0


def staleness(known: Learned, in_job: SeenInJob) -> str:
    """Return why a limit is stale, empty if it is not."""
    if in_job.max_s > NEAR_MISS * known.timeout_s:
        return f"a healthy occurrence took {in_job.max_s:.4g} s, {in_job.max_s / known.timeout_s:.0%} of the limit"
    if in_job.outside_max_s > NEAR_MISS * known.outside_s > 0.0:
        share = in_job.outside_max_s / known.outside_s
        limit = f"the limit of {known.outside_s:.4g} s outside known phases"
        return f"a healthy occurrence took {in_job.outside_max_s:.4g} s, {share:.0%} of {limit}"
    least = known.least_median_s or known.median_s
    is_moved = in_job.median_s > known.median_s * (1.0 + MEDIAN_MOVED) or in_job.median_s < least * (1.0 - MEDIAN_MOVED)
    if known.median_s and in_job.n >= 30 and is_moved:
        before = known.median_s if in_job.median_s > known.median_s else least
        return f"the median moved from {before:.4g} s to {in_job.median_s:.4g} s"
    expected = 0.01 * in_job.hour_n
    if known.p99_s and in_job.above_p99 > expected + RARE * max(1.0, expected) ** 0.5 + 1.0:
        return f"{in_job.above_p99} of {in_job.hour_n} occurrences in an hour lay above the earlier 99th percentile"
    return ""


def fallback(known: Learned, in_job: SeenInJob) -> float:
    """Return the limit of a stale deadline: the old limit, or 5 times the recent maximum if that is longer."""
    return max(known.timeout_s, FACTOR * in_job.max_s)


def raised(limits: Limits, name: str, seconds: float) -> Limits:
    """Return the limits with one deadline's limit raised to at least `seconds`, that of its first occurrences too. Its
    phases are dropped."""

    def longer(limit: Limit) -> Limit:
        first = limit.hard if limit.soft is None else limit.soft
        more = 0.0 if first is None else max(0.0, seconds - first)
        return Limit(*(None if allowed is None else allowed + more for allowed in (limit.soft, limit.hard)))

    outside = {known: limit for known, limit in limits.outside.items() if known != name}
    first = {
        known: First(old.occurrences, {how: longer(limit) for how, limit in old.limits.items()})
        if known == name
        else old
        for known, old in limits.first.items()
    }
    section = section_of(name)
    # A learned limit outside known phases had replaced the warm-up limit, which may be shorter.
    warmup = {known: limit for known, limit in limits.warmup.items() if known != section or name not in limits.outside}
    limits = msgspec.structs.replace(limits, outside=outside, first=first, warmup=warmup)
    if section is None:
        return msgspec.structs.replace(limits, **{name: longer(getattr(limits, name))})
    if section not in limits.sections:
        return limits
    return msgspec.structs.replace(limits, sections={**limits.sections, section: longer(limits.sections[section])})
