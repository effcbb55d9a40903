"""How is a duration written for a person?  In the largest units that fit, and never with an exponent."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Return a readable duration: 21 ms, 3.02 s, 2 min 05 s, 3 h 20 min."""
    if value is None:
        return "?"
    if value < 0.00995:
        return f"{value * 1000:.1f}".removesuffix(".0") + " ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
