"""Was a rank killed for memory?"""

from __future__ import annotations

import pytest

from resilience.monitor.oom import LOOKS, OomKills


def counted(counts: list[int | None]) -> OomKills:
    """Return the kills with these counts: one for each look, and the last one at the end of the rank."""
    remaining = iter(counts)
    kills = OomKills(lambda: next(remaining))
    for _ in counts[1:-1]:
        kills.look()
    return kills


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 1], True),
        ([0, 0], False),
        ([3, 3, 4], True),
        ([0, *[1] * LOOKS, 1], False),  # another process was killed long before
        ([0, *[1] * LOOKS, 2], True),
        ([0, 0, 1, 1], True),  # the rank took a moment to end
        ([None, None], None),
        ([0, None], None),
        ([None, *[0] * LOOKS, 1], True),
    ],
)
def test_only_a_kill_shortly_before_the_end_of_the_rank_counts(counts: list[int | None], expected: bool | None) -> None:
    assert counted(counts).have_risen() is expected
