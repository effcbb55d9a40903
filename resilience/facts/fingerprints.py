"""Is this the same fault again?  A short hash that is equal across ranks, restarts and runs.

The hash of an exception covers its type, its message without variable parts (numbers, addresses, paths, quoted text),
and the innermost frames of user code, without line numbers. Library frames count only if there is no user frame:
another release of a library, or a Wrapper around the function, changes these frames but not the fault."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from resilience.facts.encoding import text
from resilience.facts.interruptions import Frame
from resilience.facts.user_frames import is_users

FRAMES = 2  # the innermost ones
MOST_MESSAGE = 200  # characters that are compared
UNPRINTABLE = "<exception str() failed>"  # what the interpreter prints for a message whose `__str__` raises
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_VARIES = re.compile(
    r"""(?P<quoted>"[^"\n]*"|'[^'\n]*'|`[^`\n]*`)
    | (?P<path>(?:~|\.{1,2})?(?:/[^\s:,;'")\]]+)+)
    | (?P<address>\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{8,}\b)
    | (?P<number>[-+]?\d+(?:[.:_]\d+)*(?:[eE][-+]?\d+)?)""",
    re.X,
)


def masked(message: str) -> str:
    """Return the first line of a message, as it is printed, with <#> in place of variable parts."""
    line = COLOURS.sub("", text(message)).strip().partition("\n")[0]
    return _VARIES.sub("<#>", " ".join(line.split()))[:MOST_MESSAGE]


def of_exception(name: str, message: str, stack: Sequence[Frame]) -> str:
    """Return the fingerprint of an exception. name: its type. stack: innermost frame last."""
    frames = [frame for frame in stack if is_users(frame)] or list(stack)
    frames = [frame for frame in frames if frame.function != "<module>"] or frames
    return of_parts(name, masked(message), *map(place_of, frames[-FRAMES:]))


def place_of(frame: Frame) -> str:
    """Return a place in code that is the same wherever the code is installed: file and function, without the line."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}"


def of_parts(*parts: str) -> str:
    """Return the fingerprint of some texts."""
    return hashlib.blake2b(text("\n".join(parts)).encode(), digest_size=6).hexdigest()
