"""What is known about a job's limits: the file that `resilience calibrate` writes and the next run reads.

One entry a deadline (a section, the time out of sections, heartbeats, and `.first` of each: the first
occurrences after a start). Here too: when may a new file change an old limit, and when is a file too
old to be believed. Where the file is read and written is `adapters.timeouts_file`'s matter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resilience.core.calibration import FACTOR, MONTH, Mode, Status, Timeout

SCHEMA = 1
HEARTBEAT = "heartbeat"
OUT_OF_SECTION = "out_of_section"
FIRST = ".first"
NEAR_MISS = 0.67  # of the limit: a healthy occurrence that comes so near says that the limit is too short
MEDIAN_MOVED = 0.20
RARE = 3.09  # standard deviations: 99.9 %


class Alarms(msgspec.Struct, frozen=True):
    """Expected false alarms of one deadline in 30 days, at most: by the fitted tail, and by counting alone."""

    model_upper: float | None
    distribution_free_upper: float | None


class Deadline(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limit of one deadline and what it rests on. Durations in seconds."""

    timeout_s: float | None
    status: Status
    reason: str
    p: float
    expected_false_alarms_per_month: Alarms = Alarms(None, None)
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


class Source(msgspec.Struct, frozen=True):
    """A file that was read."""

    path: str
    sha256: str


class Timeouts(msgspec.Struct, frozen=True, omit_defaults=True):
    """All limits of one configuration. target_false_alarms: of the whole job within horizon_s."""

    schema: int
    fingerprint: str
    created: str
    target_false_alarms: float
    horizon_s: float
    ranks: int
    deadlines: dict[str, Deadline]
    sources: tuple[Source, ...] = ()
    warmup_occurrences: int = 0


def deadline(fitted: Timeout, every_s: float, ranks: int, hours: float, p99_s: float) -> Deadline:
    """Return a fit as the file states it. every_s: mean seconds between two occurrences."""
    trials = MONTH / every_s if every_s > 0 else 0.0
    is_rated = fitted.status in ("ok", "tentative")
    limit = fitted.timeout_s
    return Deadline(
        timeout_s=limit,
        status=fitted.status,
        reason=fitted.reason,
        p=fitted.p,
        expected_false_alarms_per_month=Alarms(
            fitted.model_upper * trials if is_rated and fitted.model_upper is not None else None,
            fitted.distribution_free_upper * trials if fitted.distribution_free_upper is not None else None,
        ),
        ratio_to_max=limit / fitted.max_s if limit and fitted.max_s else None,
        ratio_to_median=limit / fitted.median_s if limit and fitted.median_s else None,
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
    )


def succeed(new: Mapping[str, Deadline], old: Mapping[str, Deadline]) -> dict[str, Deadline]:
    """Return the new limits beside the old ones: only an `ok` fit may lower a limit, any may raise it."""
    merged = dict(new)
    for name, known in old.items():
        fresh = new.get(name)
        if fresh is None:
            merged[name] = known
        elif known.timeout_s is not None:
            limit, status, reason = fresh.timeout_s, fresh.status, fresh.reason
            if limit is None or (limit < known.timeout_s and status != "ok"):
                reason = f"{reason}; kept at {known.timeout_s:.4g} s, for only an `ok` fit may lower a limit"
                limit = known.timeout_s
            merged[name] = msgspec.structs.replace(
                fresh, timeout_s=limit, reason=reason, previous_timeout_s=known.timeout_s
            )
    return merged


class Seen(msgspec.Struct, frozen=True):
    """What a running job has seen of one deadline. above_p99: of the last hour's occurrences."""

    n: int
    max_s: float
    median_s: float
    above_p99: int
    hour_n: int


def staleness(known: Deadline, seen: Seen) -> str:
    """Return why a limit is not to be believed any more, empty while it is."""
    if known.timeout_s is not None and seen.max_s > NEAR_MISS * known.timeout_s:
        return f"a healthy occurrence took {seen.max_s:.4g} s, {seen.max_s / known.timeout_s:.0%} of the limit"
    if known.median_s and seen.n >= 30 and abs(seen.median_s / known.median_s - 1.0) > MEDIAN_MOVED:
        return f"the median moved from {known.median_s:.4g} s to {seen.median_s:.4g} s"
    expected = 0.01 * seen.hour_n
    if known.p99_s and seen.above_p99 > expected + RARE * max(1.0, expected) ** 0.5 + 1.0:
        return f"{seen.above_p99} of {seen.hour_n} occurrences in an hour lay above the 99th percentile of before"
    return ""


def fallback(known: Deadline, seen: Seen) -> float | None:
    """Return the limit that holds while a deadline is stale: the old one, or 5 times the recent maximum."""
    candidates = [limit for limit in (known.timeout_s, FACTOR * seen.max_s or None) if limit is not None]
    return max(candidates, default=None)
