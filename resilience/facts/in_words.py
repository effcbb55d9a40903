"""How are a duration and a number of things written for a person?

A duration has the largest units that fit, and never an exponent. A noun has the form that fits its number."""

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


def count(number: int, noun: str, plural: str = "") -> str:
    """Return "1 step", "2 steps". plural: if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def about_in_words(has_all_records: bool) -> str:
    """Return what precedes a number of restarts or incidents, or the time lost. If records are missing, it may be too
    low, or too high: one of them may show that two restarts were one."""
    return "" if has_all_records else "about "
