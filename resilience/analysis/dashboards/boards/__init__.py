"""Which dashboards are there?  One of all jobs, and six of one job, down to the exporter itself.

Fleet shows which job needs somebody, Overview whether a job is worth its machines, Restarts what interrupts it and
where the time of a restart goes, Hangs which ranks are silent, Sections whether limits fit, Node what single ranks do,
Self whether what is shown can be believed. All work on raw metrics; recording rules are for alerts only."""

from __future__ import annotations

from resilience.analysis.dashboards.boards.fleet import FLEET
from resilience.analysis.dashboards.boards.hangs import HANGS
from resilience.analysis.dashboards.boards.node import NODE
from resilience.analysis.dashboards.boards.overview import OVERVIEW
from resilience.analysis.dashboards.boards.own import OWN
from resilience.analysis.dashboards.boards.restarts import RESTARTS
from resilience.analysis.dashboards.boards.sections import SECTIONS

BOARDS = (FLEET, OVERVIEW, RESTARTS, HANGS, SECTIONS, NODE, OWN)
