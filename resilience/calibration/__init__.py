"""Which limit follows from observed durations?  Samples, tails and limits, with a stated rate of false alarms.

    fit(durations_by_run, p=1e-5)     the limit of one deadline
    calibrate(read([...]))            the limits of whole runs

docs/calibration.md says what the results mean and when not to trust them. The modules of this package are pure.
`resilience.calibrate` reads runs; the names that need it are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.calibrate.limits import Target, calibrate
    from resilience.calibrate.timings import read
    from resilience.calibration.fitting import Timeout, fit
    from resilience.calibration.limits_file import Deadline, Timeouts
    from resilience.calibration.unended import Cut

__all__ = ["Cut", "Deadline", "Target", "Timeout", "Timeouts", "calibrate", "fit", "read"]

_WHERE = {
    "Cut": "resilience.calibration.unended",
    "Deadline": "resilience.calibration.limits_file",
    "Target": "resilience.calibrate.limits",
    "Timeout": "resilience.calibration.fitting",
    "Timeouts": "resilience.calibration.limits_file",
    "calibrate": "resilience.calibrate.limits",
    "fit": "resilience.calibration.fitting",
    "read": "resilience.calibrate.timings",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
