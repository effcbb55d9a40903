"""Whose code is a frame?  The user's own, a library's, or this package's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from resilience.core.attribution import Frame

_OURS = re.compile(r"/resilience/(adapters|attribution|cli|core|history|inprocess|launcher|monitor|telemetry)/")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<(frozen|string)")
_ENTRY = re.compile(r"/s?bin/(resilience|torchrun)$")  # the script that pip makes for a command
_DEMO = re.compile(r"/resilience/cli/demo_\w+\.py$")  # plays the part of the user's code, wherever it is installed


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code: no library's, none of ours."""
    for frame in reversed(tuple(stack)):
        if is_users(frame):
            return frame
    return None


def is_ours(frame: Frame) -> bool:
    """Whether a frame belongs to this package's machinery."""
    return _OURS.search(frame.file) is not None and not _DEMO.search(frame.file)


def is_users(frame: Frame) -> bool:
    """Whether a frame belongs to the user's own code: no library's, none of ours."""
    if _ENTRY.search(frame.file):
        return False
    return _DEMO.search(frame.file) is not None or not (is_ours(frame) or _LIBRARY.search(frame.file))
