"""Which dashboards exist?  One for all jobs, and six for one job.

Fleet: which job needs attention. Overview: is the job using its machines well. Restarts: what interrupts it, and where
the time of a restart goes. Hangs: which ranks are silent. Sections: do the limits fit. Node: what single ranks do.
Self: is the telemetry complete. All use raw metrics; recording rules are for alerts only."""

from __future__ import annotations

from resilience.analysis.dashboards.boards.fleet import FLEET
from resilience.analysis.dashboards.boards.hangs import HANGS
from resilience.analysis.dashboards.boards.node import NODE
from resilience.analysis.dashboards.boards.overview import OVERVIEW
from resilience.analysis.dashboards.boards.own import OWN
from resilience.analysis.dashboards.boards.restarts import RESTARTS
from resilience.analysis.dashboards.boards.sections import SECTIONS

BOARDS = (FLEET, OVERVIEW, RESTARTS, HANGS, SECTIONS, NODE, OWN)
