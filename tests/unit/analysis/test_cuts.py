"""The verdict of an incident says whether an occurrence that a limit ended was a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.analysis.cuts import Verdicts
from resilience.telemetry.durations import Value
from tests.support.record_streams import Fault, Kind, job

KILLED = Value("data", 5, 5, 0.0, 2.0, "killed")


@pytest.mark.parametrize(
    ("kind", "blamed", "others"),
    [
        ("stopped", "hang", "hang"),
        ("native", "hang", "hang"),
        ("busy", "killed", "hang"),  # a long computation looks like an endless one
        ("hang", "killed", "hang"),
        ("exception", "killed", "hang"),
    ],
)
def test_rank_that_was_stopped_or_only_waited_hung_and_of_others_nobody_knows(
    tmp_path: Path, kind: Kind, blamed: str, others: str
) -> None:
    folder = job([Fault(kind, 1, 0, 20)], world=3).write(tmp_path / "run")
    verdicts = Verdicts([folder])
    assert verdicts.judged(1, (0, 0), KILLED).end == blamed
    assert verdicts.judged(2, (0, 0), KILLED).end == others
    assert verdicts.judged(1, (0, 7), KILLED).end == "killed"  # an iteration without an incident


def test_cut_that_no_limit_made_stays_what_it_is(tmp_path: Path) -> None:
    verdicts = Verdicts([tmp_path])
    for end in ("cut", "hang"):
        assert verdicts.judged(0, (0, 0), Value("data", 0, 0, 0.0, 1.0, end)).end == end
