"""Which durations are recorded, fitted and enforced?  One name and one definition for each.

A deadline is a duration with a limit. The monitor records it, `resilience calibrate` fits it, the file of limits stores
it and `core.watch` enforces it, all under the same name. The first occurrences after a start are slower, so they are
separate deadlines: after a cold start, after a warm start, and after an iteration begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from resilience.facts.encoding import text
from resilience.facts.in_words import seconds

Start = Literal["cold", "warm", "iteration"]
"""How a rank starts. cold: the rank, or any node of the job, starts for the first time in this run. warm: a new process
on the same nodes. iteration: the wrapped function is called again in the same process."""

NAME_BYTES = 64  # of a section's name
EARLY = 16  # occurrences after a start that may be slower than later ones
STEP = "step"
HEARTBEAT = "heartbeat"
INITIAL_HEARTBEAT = "initial_heartbeat"
OUT_OF_SECTION = "out_of_section"
FIRST = ".first"
_AGAIN: Mapping[Start, str] = {"cold": "", "warm": ".warm", "iteration": ".iteration"}
LimitKind = Literal["section", "hook", "silence"]
"""Kinds of limits that apply to a named thing. silence: has the name of the innermost open section, if any."""
_SECTION = "section:"

DEFINITIONS: Mapping[str, str] = {
    "NAME": "from opening section NAME to closing it, if no exception leaves it",
    OUT_OF_SECTION: "from closing the last open section to opening the next one, or to the end of the program",
    STEP: "from one rise of the step counter to the next one, or to the end of the program",
    HEARTBEAT: "from one heartbeat to the next one, or to the end of the program",
    INITIAL_HEARTBEAT: "from the announcement of heartbeats to the first one; a section that is opened or closed in "
    "between restarts the clock",
    "NAME" + FIRST: "any of the durations above for the first occurrences after a cold start",
    "NAME" + FIRST + ".warm": "the same after a warm start",
    "NAME" + FIRST + ".iteration": "the same after an iteration of the Wrapper began",
}
"""What each deadline measures, without the time in which the rank waits between two runs of the Wrapper's function.
NAME: the name of a section, or one of the other names."""


def recorded_name(name: str) -> str:
    """Return the name under which a section is recorded and limited: at most NAME_BYTES bytes of UTF-8, without zero
    bytes and half characters."""
    encoded = text(name).replace("\0", "\\x00").encode()
    return encoded[:NAME_BYTES].decode(errors="ignore")


def of_section(name: str) -> str:
    """Return the deadline of a section. A section with an ambiguous name gets the deadline `section:NAME:`."""
    is_plain = name not in DEFINITIONS and FIRST not in name and not name.startswith(_SECTION)
    return name if is_plain else f"{_SECTION}{name}:"


def section_of(deadline: str) -> str | None:
    """Return the section of a deadline without `.first`, None if the deadline has no section."""
    if deadline.startswith(_SECTION):
        return deadline.removeprefix(_SECTION)[:-1]
    return None if deadline in DEFINITIONS else deadline


class LimitTarget(NamedTuple):
    """What a limit of `core.watch` applies to. kind: a `LimitKind`, or the limit's own name. name: of the section or
    hook, empty for other kinds."""

    kind: str
    name: str = ""

    @property
    def section(self) -> str:
        """Return the section that the limit applies to, empty if none."""
        return self.name if self.kind in ("section", "silence") else ""


def limit_name(kind: LimitKind, name: str) -> str:
    """Return the name of the limit of a section, a hook or a silence, as records have it."""
    return kind if kind == "silence" and not name else f"{kind}:{name}"


def parse_limit(limit: str) -> LimitTarget:
    """Return what a limit applies to, given its name in records."""
    kind, _, name = limit.partition(":")
    return LimitTarget(kind, name)


def deadline_of_limit(limit: str) -> str:
    """Return the deadline that a limit enforces, empty if it enforces none."""
    kind, name = parse_limit(limit)
    if kind == "section":
        return of_section(name)
    return limit if limit in (STEP, HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION) else ""


def first_name(deadline: str, start: Start) -> str:
    """Return the name of the first occurrences after a start. The initial heartbeat has no later occurrences."""
    return deadline + ("" if deadline == INITIAL_HEARTBEAT else FIRST) + _AGAIN[start]


def parse_name(name: str) -> tuple[str, Start | None]:
    """Return (deadline, start) for a name in a file of limits. start is None unless it is for first occurrences."""
    for start, again in _AGAIN.items():
        for first in (FIRST, ""):
            plain = name.removesuffix(first + again)
            if plain != name and first_name(plain, start) == name:
                return plain, start
    return (name, "cold") if name == INITIAL_HEARTBEAT else (name, None)


_NOT_IN_TIME = {
    STEP: "no new step",
    HEARTBEAT: "no new heartbeat",
    INITIAL_HEARTBEAT: "no first heartbeat",
    OUT_OF_SECTION: "no section opened",
    "ping": "no new ping",
    "watchdog": "no Python code run by the main thread",
}


def exceeded_in_words(limit: str, allowed_s: float) -> str:
    """Return what did not happen in time, for the limit that a rank exceeded."""
    return f"{_missing(limit)} within the {seconds(allowed_s)} limit"


def silence_in_words(limit: str, silent_for_s: float, allowed_s: float | None) -> str:
    """Return what has not happened for how long, and the limit of that, if known."""
    return f"{_missing(limit)} for {seconds(silent_for_s)}" + (
        "" if allowed_s is None else f", limit {seconds(allowed_s)}"
    )


def _missing(limit: str) -> str:
    target = parse_limit(limit)
    match target.kind:
        case "section":
            return f"section {target.name!r} not left"
        case "hook":
            return f"hook {target.name} not over"
        case "silence":
            return "no sign of progress" + (f" in section {target.name!r}" if target.name else "")
        case _:
            return _NOT_IN_TIME.get(limit, f"no sign of life ({limit})")
