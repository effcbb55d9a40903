"""Text for HTML and SVG."""

from __future__ import annotations

import html

from resilience.core.printable import printable


def escape(value: str) -> str:
    """Return a text for a page. What would steer a terminal would reorder or hide text in a browser as well."""
    return html.escape(printable(value))
