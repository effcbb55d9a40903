"""Escapes text for HTML and SVG."""

from __future__ import annotations

import html

from resilience.facts.printable import printable


def escape(value: str) -> str:
    """Escape a text for a page, including terminal control characters, which can hide text in a browser too."""
    return html.escape(printable(value))
