"""What did a dead program raise?  Reads the traceback that its interpreter printed last.

A program that is not ours leaves nothing but its last lines. The last traceback among them gives type,
message and frames; a prefix that torch puts in front of each line (`[rank0]: `) is dropped. The
fingerprint is that of an exception which was caught here: without line numbers, message and paths."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from resilience.core.attribution import ExceptionInfo, Frame
from resilience.core.encoding import text

BEGIN = "Traceback (most recent call last):"
MOST_FRAMES = 60
MOST_MESSAGE = 2000  # characters
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d{1,9}), in (.+)$')
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")


def parse(lines: Sequence[str]) -> ExceptionInfo | None:
    """Return the exception of the last traceback in these lines, None if there is none."""
    text = [_PREFIX.sub("", line) for line in lines]
    begins = [number for number, line in enumerate(text) if line.lstrip() == BEGIN]
    if not begins:
        return None
    frames: list[Frame] = []
    name, message = "", ""
    for number in range(begins[-1] + 1, len(text)):
        line = text[number]
        frame = _FRAME.match(line)
        if frame is not None:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        elif line[:1] not in ("", " "):
            raised = _RAISED.match(line)
            if raised is None:
                break
            name, message = raised[1], "\n".join([raised[2] or "", *_more(text[number + 1 :])]).strip()
            break
    if not name:
        return None
    stack = tuple(frames[-MOST_FRAMES:])
    return ExceptionInfo(type=name, message=message[:MOST_MESSAGE], fingerprint=fingerprint(name, stack), stack=stack)


def _more(lines: Sequence[str]) -> list[str]:
    """The further lines of a message: up to what is certainly something else."""
    return [line for line in lines[:10] if line and not line.startswith(("W", "E", "I"))] if lines else []


def fingerprint(name: str, stack: Sequence[Frame]) -> str:
    """Equal for repetitions of one failure: no line numbers, no message, no installation paths."""
    parts = [name, *(f"{frame.file.rsplit('/', 2)[-1]}:{frame.function}" for frame in stack)]
    return hashlib.blake2b(text("\n".join(parts)).encode(), digest_size=6).hexdigest()
