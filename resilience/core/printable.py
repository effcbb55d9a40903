"""Which part of a text may go to a terminal?  Everything but what steers the terminal or hides text from its reader.

Exception messages, log lines, names and arguments were written by somebody else. A terminal obeys escape sequences in
them, and characters for bidirectional text reorder what is shown. Both are written as backslash escapes here, so that
nothing is lost and nothing is obeyed. Letters, marks, joiners and emoji of all scripts stay as they are. Applying a
function twice changes nothing more."""

from __future__ import annotations

import re

# ASCII and C1 controls; bidirectional marks, embeddings, overrides and isolates; line and paragraph separators;
# deprecated format characters; annotations; surrogates, which no terminal can be sent.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_STEERING}]")
_IN_LINE = re.compile(f"[\n{_STEERING}]")


def printable(text: str) -> str:
    """Return a text of one or several lines that a terminal shows and does not obey. Newlines and tabs stay."""
    return _IN_TEXT.sub(_escaped, text)


def printable_line(text: str) -> str:
    """Return a text as one line that a terminal shows and does not obey: a newline in it is escaped too."""
    return _IN_LINE.sub(_escaped, text)


def printable_json(text: str) -> str:
    """Return JSON that means the same and that a terminal shows and does not obey."""
    return _IN_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 0x0A:
        return "\\n"
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
