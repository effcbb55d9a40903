"""Which dashboards exist?  One for all jobs, and six for one job.

Fleet: which job needs attention. Overview: is the job using its machines well. Restarts: what interrupts it, and where
the time of a restart goes. Hangs: which ranks are silent. Sections: do the limits fit. Node: what single ranks do.
Self: is the telemetry complete. All use raw metrics; recording rules are for alerts only."""

from __future__ import annotations

from dashboards.generator.boards.fleet import FLEET
from dashboards.generator.boards.hangs import HANGS
from dashboards.generator.boards.node import NODE
from dashboards.generator.boards.overview import OVERVIEW
from dashboards.generator.boards.own import OWN
from dashboards.generator.boards.restarts import RESTARTS
from dashboards.generator.boards.sections import SECTIONS

BOARDS = (FLEET, OVERVIEW, RESTARTS, HANGS, SECTIONS, NODE, OWN)
