"""The facts about a run stay small, and comparable."""

from __future__ import annotations

from resilience.facts.configuration import MOST, abridged


def test_long_command_lines_are_kept_in_part_and_stay_comparable() -> None:
    short = ("--lr", "1e-3")
    assert abridged(short) == short
    long = [*short, *(f"--path={number:05}" for number in range(10_000))]
    kept = abridged(long)
    assert kept[:2] == short
    assert sum(map(len, kept)) < 2 * MOST
    assert kept[-1].startswith(f"… {len(long) - len(kept) + 1} more, ")
    assert abridged(list(long)) == kept
    assert abridged([*long[:-1], "--path=other"]) != kept
    assert abridged(["x" * 100_000])[-1].startswith("… 1 more, 100000 bytes")
