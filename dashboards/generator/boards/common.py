"""Parts that several dashboards share: metric names, recurring queries, and texts for panels without data."""

from __future__ import annotations

from dashboards.generator.queries import present

QUIET = "No interruption in this range"
NO_PROGRESS = "No rank has reported a step"
NO_STEPS = "No rank has reported a step, or per-rank metrics are off"
NO_BEATS = "No rank sends heartbeats, or per-rank metrics are off"
NO_SECTIONS = "The program marks no sections"
NONE_OPEN = "No section is open, or per-rank metrics are off"

SILENCE = "resilience_rank_silence_seconds"
STEP = "resilience_rank_step"
DURATION = "resilience_restart_duration_seconds"
SECTION = "resilience_section_duration_seconds"
OPEN = "resilience_rank_section_open_seconds"
LIMIT = "resilience_section_timeout_seconds"
FAULTS = "resilience_interruptions_total"  # faults and their consequences
FIRST = 'origin="first"'
BLAMED = "resilience_blamed_total"
LISTED = 20  # rows in a table


# Ranks that take part. Spares and lost ranks still have a series with their old step.
TAKING_PART = present("resilience_rank_state", 'state=~"active|suspect|unmonitored"')
STEPS = f"({present(STEP)} and on (node, rank) {TAKING_PART})"


# Of all nodes, whether or not single ranks have series.
FIRST_STEP = f"max({present('resilience_step')})"
LAST_STEP = f"min({present('resilience_step_lowest')})"


def top(expression: str) -> str:
    """Return an expression for the LISTED largest values."""
    return f"topk({LISTED}, {expression})"


def silence(by: str) -> str:
    """Return an expression for the time since the last sign of life, as the metric has it."""
    return f"max by ({by}) ({present(SILENCE)})"
