"""Runs whose stalls come in episodes, and what a limit of them is worth: the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import msgspec

from resilience.calibration.fitting import Timeout, fit_pool
from resilience.calibration.pool import pooled

Severity = Callable[[random.Random], float]

BODY = 0.02  # spread of the log of healthy durations
LEAST = 1.2  # times the median: what counts as a stall
DRAWS = 20_000  # of a severity, to know how often it exceeds a limit

SEVERITIES: dict[str, Severity] = {
    "5 x": lambda chance: 5.0,
    "2 to 10 x, uniform": lambda chance: chance.uniform(2.0, 10.0),
    "2 x, lognormal 0.7": lambda chance: math.exp(abs(chance.gauss(0.7, 0.7))),
    "1.5 x, Pareto 2": lambda chance: 1.5 * chance.paretovariate(2.0),
}


class Stalls(msgspec.Struct, frozen=True):
    """How a job stalls. share: of all occurrences, in runs that stall at all; length: occurrences of an episode, which
    has one severity; run_spread: of the log of a run's speed; runs: how many are observed; stalling: of these."""

    share: float = 1e-3
    length: int = 20
    severity: str = "2 to 10 x, uniform"
    run_spread: float = 0.0
    runs: int = 2
    stalling: int = 2
    n: int = 40_000


class Outcome(msgspec.Struct, frozen=True):
    """A fit beside the truth. is_seen: whether a stall occurred in the data. exceeded: how often an occurrence of later
    runs is longer than the limit, given their speed; one value for each later run."""

    answer: Timeout
    is_seen: bool
    exceeded: tuple[float, ...]

    @property
    def is_rated(self) -> bool:
        return self.answer.status in ("ok", "tentative")


def run(chance: random.Random, n: int, stalls: Stalls, is_stalling: bool = True) -> list[float]:
    """Return the durations of one run, in order; the median is 1 where all runs are equally fast."""
    speed = math.exp(chance.gauss(0.0, stalls.run_spread))
    begins = stalls.share / stalls.length / (1.0 - stalls.share) if is_stalling else 0.0
    severity = SEVERITIES[stalls.severity]
    durations, left, slow = [], 0, 1.0
    for _ in range(n):
        if not left and chance.random() < begins:
            left, slow = stalls.length, severity(chance)
        durations.append(chance.lognormvariate(0.0, BODY) * speed * (slow if left else 1.0))
        left = max(0, left - 1)
    return durations


def outcome(stalls: Stalls, p: float, seed: int, later: int = 20) -> Outcome:
    """Observe some runs, fit, and ask `later` further runs how often they exceed the limit."""
    return outcomes(stalls, [p], seed, later)[0]


def outcomes(stalls: Stalls, probabilities: Sequence[float], seed: int, later: int = 20) -> list[Outcome]:
    """Return the outcome of a fit for each of these probabilities of a false alarm, from the same data."""
    chance = random.Random(f"{stalls}{seed}")
    observed = [run(chance, stalls.n // stalls.runs, stalls, number < stalls.stalling) for number in range(stalls.runs)]
    pool = pooled(observed)
    is_seen = any(max(durations) > LEAST * sorted(durations)[len(durations) // 2] for durations in observed)
    share = stalls.share * stalls.stalling / stalls.runs
    severities = [SEVERITIES[stalls.severity](chance) for _ in range(DRAWS)]
    speeds = [math.exp(chance.gauss(0.0, stalls.run_spread)) for _ in range(later if stalls.run_spread else 1)]
    found = []
    for p in probabilities:
        answer = fit_pool(pool, p, min_timeout=0.0)
        limit = answer.timeout_s or math.inf
        exceeded = tuple(
            share * sum(_above(limit / speed / severity) for severity in severities) / DRAWS
            + (1.0 - share) * _above(limit / speed)
            for speed in speeds
        )
        found.append(Outcome(answer, is_seen, exceeded))
    return found


def _above(times: float) -> float:
    """Return how probably a healthy duration of median 1 is longer."""
    return 0.5 * math.erfc(math.log(times) / BODY / math.sqrt(2.0))


def covered(outcomes: Sequence[Outcome], p: float) -> float | None:
    """Return the share of later runs in which rated answers keep the stated rate, None without such answers."""
    kept = [exceeded <= p for each in outcomes if each.is_rated for exceeded in each.exceeded]
    return sum(kept) / len(kept) if kept else None
