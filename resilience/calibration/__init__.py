"""Limits learned from observed durations, with a stated rate of false alarms.

    fit(durations_by_run, p=1e-5)     the limit of one deadline
    calibrate(read([...]))            the limits of whole runs

docs/calibration.md says what the results mean and when not to trust them."""

from __future__ import annotations

from resilience.calibrate.limits import Target, calibrate
from resilience.calibrate.timings import read
from resilience.calibration.fitting import Cut, Timeout, fit
from resilience.calibration.limits_file import Deadline, Timeouts

__all__ = ["Cut", "Deadline", "Target", "Timeout", "Timeouts", "calibrate", "fit", "read"]
