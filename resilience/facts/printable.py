"""Which characters of a text may go to a terminal or a page?  All except those that control it or hide text.

Exception messages, log lines, names and arguments are untrusted. A terminal obeys escape sequences in them, and
characters for bidirectional text reorder what it shows. This module writes both as backslash escapes, so nothing is
lost and nothing is obeyed. Letters, marks, joiners and emoji of all scripts stay unchanged. Each function is
idempotent, except `escape`."""

from __future__ import annotations

import html
import re

# ASCII and C1 controls; bidirectional marks, embeddings, overrides and isolates; line and paragraph separators;
# deprecated format characters; annotations; surrogates, which no terminal can be sent.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_STEERING}]")
_IN_LINE = re.compile(f"[\n{_STEERING}]")
_NO_VALUE = re.compile(r"ignored explicit argument ('.*'|\".*\")", re.DOTALL)


def printable(text: str) -> str:
    """Return a text of one or more lines that is safe for a terminal. Newlines and tabs stay."""
    return _IN_TEXT.sub(_escaped, text)


def usage_error(message: str) -> str:
    """Return argparse's message about a rejected argument: safe for a terminal, and with what an option without a value
    expects."""
    return printable(_NO_VALUE.sub(r"takes no value, got \1: write the option alone, or leave it out", message))


def printable_line(text: str) -> str:
    """Return a text as one line that is safe for a terminal. Newlines are escaped too."""
    return _IN_LINE.sub(_escaped, text)


def printable_json(text: str) -> str:
    """Return equivalent JSON that is safe for a terminal."""
    return _IN_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape(text: str) -> str:
    """Return a text for HTML and SVG. A browser too hides text behind characters for bidirectional text."""
    return html.escape(printable(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0A:
        return "\\n"
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
