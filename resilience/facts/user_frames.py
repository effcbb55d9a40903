"""Which code does a frame belong to?  The user's code, a library, or this package."""

from __future__ import annotations

import re
from collections.abc import Iterable

from resilience.facts.interruptions import Frame

# Stacks are also read from runs that were recorded when `system` was called adapters.
_OURS = re.compile(
    r"/resilience/"
    r"(adapters|attribution|calibration|cli|core|facts|history|inprocess|launcher|monitor|system|telemetry)/"
)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<(frozen|string)")
_ENTRY = re.compile(r"/s?bin/(resilience|torchrun)$")  # the script that pip installs for a command
_DEMO = re.compile(r"/resilience/demo/\w+\.py$")  # counts as user code, wherever it is installed


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of user code, None if there is none."""
    for frame in reversed(tuple(stack)):
        if is_users(frame):
            return frame
    return None


def is_ours(frame: Frame) -> bool:
    """Return True if a frame belongs to this package."""
    return _OURS.search(frame.file) is not None


def is_users(frame: Frame) -> bool:
    """Return True if a frame belongs to user code, not to a library or this package."""
    if _ENTRY.search(frame.file):
        return False
    return _DEMO.search(frame.file) is not None or not (is_ours(frame) or _LIBRARY.search(frame.file))
