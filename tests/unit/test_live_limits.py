"""A hang of a live job counts as found only by the limit that the row of the table is about."""

from __future__ import annotations

import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from tests.live_limits.__main__ import HUNG_RANK, Row, found_s


def exceeded(limit: str, rank: int, allowed_s: float, at: int) -> Record:
    event = events.RankFellSilent(limit, "hard", allowed_s, allowed_s)
    return Record(0, at * 10**9, at * 10**9, Origin("job", "node0", "monitor", 1, rank=rank), event)


FOUND = exceeded("section:train", HUNG_RANK, 1.0000001, 50)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([FOUND], 50.0),
        ([exceeded("section:train", 0, 1.0, 60), FOUND], 50.0),
        ([], None),
        ([exceeded("section:train", 0, 1.0, 40), FOUND], None),
        ([exceeded("step", HUNG_RANK, 1.0, 50)], None),
        ([exceeded("silence", HUNG_RANK, 600.0, 50)], None),
        ([exceeded("section:train", HUNG_RANK, 7.5, 50)], None),
    ],
    ids=["found", "others later", "not found", "another rank", "another limit", "the rule", "a longer limit"],
)
def test_hang_is_found_by_the_limit_of_the_row_on_the_stopped_rank(records: list[Record], found: float | None) -> None:
    assert found_s(records, Row("a case", "train", limit_s=1.0)) == found
