"""Which limit holds where runs are known not to be slow?  Shorter than the usual one, and tested before it is believed.

Runs that are slow at the same positions have known phases (`facts.phases`). Outside these, the other durations decide.
A healthy run that is longer than the observed ones meets unseen phases. Within the length of the observed runs, later
runs did not exceed three times the longest duration of three runs, even if these runs were short
(docs/calibration.md). So within that length, few durations from three runs are enough for the status `short`.

An occurrence outside these phases that a limit ended may have been healthy. It raises this limit as it does the usual
one, because otherwise a limit that is too short would confirm itself. Such occurrences never make such a limit worth
storing, although they may raise the usual one, but they may make it too long for that."""

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

    def __call__(self, pool: Pool, *, censored: Iterable[Cut] = (), fewest_short: int = SHORT) -> Timeout: ...


def outside_phases(observed: Sequence[ObservedDeadline], first: int, usual: Fit, fit: Fit) -> OutsideLimit | None:
    """Return the limit outside known phases. Return None if it is not known whether there are phases, if the limit is
    not much shorter than the usual one, or if a run exceeds it: each run is tested against the limit of the others.

    first: number of first occurrences after a start. usual: fits all other occurrences. fit: fits those outside."""
    phases = _phases(observed, first)
    if phases is None:
        return None
    fit_outside = _OutsideFit(first, fit, FEWEST if len(observed) >= ENOUGH_RUNS else SHORT)
    every_pool = pool_of(observed, first)
    outside_s, usual_s = fit_outside.limit_of(observed, phases), usual(every_pool).timeout_s
    if outside_s is None or usual_s is None or outside_s > MOST_OF_USUAL * usual_s:
        return None
    if not fit_outside.are_kept(observed, phases):
        return None
    fitted = fit_outside.raised(observed, phases)
    cuts = [cut for deadline in observed for cut in deadline.settled_cuts(first)]
    raised_s = usual(every_pool, censored=cuts).timeout_s
    if fitted.timeout_s is None or raised_s is None or fitted.timeout_s > MOST_OF_USUAL * raised_s:
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

    def limit_of(self, observed: Sequence[ObservedDeadline], phases: Phases) -> float | None:
        """Return the limit of the durations outside these phases, as if no occurrence had ended otherwise. None: they
        are too few."""
        pool = pool_of([deadline.outside(phases) for deadline in observed], self.first)
        return self.fit(pool, fewest_short=self.fewest).timeout_s

    def raised(self, observed: Sequence[ObservedDeadline], phases: Phases) -> Timeout:
        """Return the fit to the same durations, with the occurrences that did not end by themselves."""
        outside = [deadline.outside(phases) for deadline in observed]
        cuts = [cut for deadline in outside for cut in deadline.settled_cuts(self.first)]
        return self.fit(pool_of(outside, self.first), censored=cuts, fewest_short=self.fewest)

    def are_kept(self, observed: Sequence[ObservedDeadline], phases: Phases) -> bool:
        """Return True if no run exceeds the limit that the others support outside their phases. Too few runs to show
        phases share those of all runs."""
        for held_out in observed[:MOST_FOLDS]:
            remaining = [deadline for deadline in observed if deadline is not held_out]
            known = _phases(remaining, self.first) or phases
            limit_s = self.limit_of(remaining, known)
            if limit_s is None or max(held_out.outside(known).series(self.first), default=0.0) > limit_s:
                return False
        return True
