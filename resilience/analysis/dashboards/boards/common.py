"""What do several dashboards ask?  Names of metrics, recurring queries, and what stands where there are no data."""

from __future__ import annotations

from resilience.analysis.dashboards.queries import select

QUIET = "No interruption in this range"
NO_STEPS = "No rank has told a step, or metrics of ranks are switched off"
NO_BEATS = "No rank sends heartbeats, or metrics of ranks are switched off"
NO_SECTIONS = "The program marks no sections"
NONE_OPEN = "No section is open, or metrics of ranks are switched off"

SILENCE = "resilience_rank_silence_seconds"
STEP = "resilience_rank_step"
DURATION = "resilience_restart_duration_seconds"
SECTION = "resilience_section_duration_seconds"
OPEN = "resilience_rank_section_open_seconds"
LIMIT = "resilience_section_timeout_seconds"
FAULTS = "resilience_interruptions_total"  # and what followed from them
FIRST = 'origin="first"'
LISTED = 20  # rows that a table shows


# Ranks that have a state to be asked about: spares and lost ones show old steps.
TAKING_PART = select("resilience_rank_state", 'state=~"active|suspect|unmonitored"')
STEPS = f"({select(STEP)} and on (node, rank) {TAKING_PART})"


def top(expression: str) -> str:
    """Return the largest values."""
    return f"topk({LISTED}, {expression})"


def silence(by: str) -> str:
    """Return the time since the last sign of life, at the moment of the scrape."""
    return f"max by ({by}) ({select(SILENCE)})"
