"""Limits learned from observed durations, with a stated rate of false alarms.

    fit(durations_by_run, p=1e-5)     the limit of one deadline
    calibrate(read([...]))            the limits of whole runs

docs/calibration.md says what the results mean and when not to trust them."""

from __future__ import annotations

from resilience.analysis.calibrate import Target, calibrate
from resilience.analysis.timings import read
from resilience.core.calibration import Cut, Timeout, fit
from resilience.core.timeouts import Deadline, Timeouts

__all__ = ["Cut", "Deadline", "Target", "Timeout", "Timeouts", "calibrate", "fit", "read"]
