"""Which limit holds where runs are known not to be slow?  Shorter than the usual one, and tested before it is believed.

Runs that are slow at the same positions have known phases (`facts.phases`). Outside these, the other durations decide.
A healthy run that is longer than the observed ones meets unseen phases. Within the length of the observed runs, later
runs did not exceed three times the longest duration of three runs, even if these runs were short
(docs/calibration.md). So within that length, few durations from three runs are enough for the status `short`.

An occurrence outside these phases that a limit ended may have been healthy. It raises this limit as it does the usual
one, because otherwise a limit that is too short would confirm itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from resilience.calibrate.observed import ObservedDeadline, pool_of
from resilience.calibration.fitting import FEWEST, SHORT, Timeout
from resilience.calibration.limits_file import OutsideLimit
from resilience.calibration.pool import Pool
from resilience.calibration.recurring_phases import ENOUGH_RUNS, recurring
from resilience.calibration.unended import Cut
from resilience.facts.phases import Phases

MOST_OF_USUAL = 0.67  # a longer limit outside phases is not worth storing the positions of the phases
MOST_FOLDS = 8  # runs on which a limit outside phases is tested
UNTESTED = "both runs were needed to know the phases, so no other run has tested them; give a third run"


class Fit(Protocol):
    """`calibration.fitting.fit_pool` with the target of the deadline."""

    def __call__(self, pool: Pool, *, censored: Iterable[Cut], fewest_short: int) -> Timeout: ...


def outside_phases(
    observed: Sequence[ObservedDeadline], first: int, usual_s: float | None, fit: Fit
) -> OutsideLimit | None:
    """Return the limit outside known phases. Return None if it is not known whether there are phases, if the limit is
    not much shorter than the usual one, or if a run exceeds it: each run is tested against the limit of the others.

    first: number of first occurrences after a start. usual_s: the usual limit in seconds."""
    phases = None if usual_s is None else _phases(observed, first)
    if usual_s is None or phases is None:
        return None
    fit_outside = _OutsideFit(first, fit, FEWEST if len(observed) >= ENOUGH_RUNS else SHORT)
    fitted = fit_outside.fitted(observed, phases)
    if fitted is None or fitted.timeout_s is None or fitted.timeout_s > MOST_OF_USUAL * usual_s:
        return None
    if not fit_outside.are_kept(observed, phases):
        return None
    return OutsideLimit(
        fitted.timeout_s,
        fitted.status,
        fitted.reason,
        phases,
        fitted.p,
        fitted.n,
        fitted.max_s,
        fitted.median_s,
        fitted.warnings if len(observed) >= ENOUGH_RUNS else (*fitted.warnings, UNTESTED),
    )


def _phases(observed: Sequence[ObservedDeadline], first: int) -> Phases | None:
    """Return the phases that recur in all runs, None if that is not known."""
    courses = [course for deadline in observed if (course := deadline.course(first)) is not None]
    return recurring(courses) if len(courses) == len(observed) else None


class _OutsideFit(msgspec.Struct, frozen=True):
    """Fits the durations outside phases. fewest: durations that are enough for the status `short`."""

    first: int
    fit: Fit
    fewest: int

    def fitted(self, observed: Sequence[ObservedDeadline], phases: Phases) -> Timeout | None:
        """Return the limit of the durations outside these phases, None without any durations."""
        outside = [deadline.outside(phases) for deadline in observed]
        pool = pool_of(outside, self.first)
        cuts = [cut for deadline in outside for cut in deadline.settled_cuts(self.first)]
        return self.fit(pool, censored=cuts, fewest_short=self.fewest) if pool.n else None

    def are_kept(self, observed: Sequence[ObservedDeadline], phases: Phases) -> bool:
        """Return True if no run exceeds the limit that the others support outside their phases. Too few runs to show
        phases share those of all runs."""
        for held_out in observed[:MOST_FOLDS]:
            remaining = [deadline for deadline in observed if deadline is not held_out]
            known = _phases(remaining, self.first) or phases
            fitted = self.fitted(remaining, known)
            if fitted is None or fitted.timeout_s is None:
                return False
            if max(held_out.outside(known).series(self.first), default=0.0) > fitted.timeout_s:
                return False
        return True
