"""The launcher, with time for what a busy machine is slow to give: monitors, the records of all ranks, an export."""

from __future__ import annotations

import sys

from resilience.launcher import agent, cycle_supervisor, launch, telling
from resilience.launcher.main import main
from resilience.monitor import starting
from resilience.telemetry import restart_lines
from tests.process import patient_monitor

if __name__ == "__main__":
    cycle_supervisor.READY = agent.SETTLE = 120.0
    starting.PROGRAM = patient_monitor.__name__
    setattr(launch, "EXPORT_LIMIT", 60.0)  # noqa: B010
    restart_lines.LIMIT = 60.0
    telling.LAST_LIMIT = 120.0
    sys.exit(main())
