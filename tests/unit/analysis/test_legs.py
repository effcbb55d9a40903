"""One pass keeps what a pass over all records for each incident would find; where everybody was is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.analysis import waterfall
from resilience.analysis.lanes import Lanes
from resilience.analysis.load import Run, load
from resilience.analysis.report import report
from resilience.analysis.sections import sections_of, write_s
from resilience.attribution.stack_groups import Whereabouts
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.telemetry import signs
from resilience.telemetry.timings import Timings
from tests.support import launch_streams
from tests.support.record_streams import Fault, job


def jobs() -> list[list[Record]]:
    faults = [Fault("exception", 1, 0), Fault("hang", 2, 1), Fault("kill", 3, 2)]
    cycles = [launch_streams.Fault("raise", 3), launch_streams.Fault("hang", 2)]
    return [job(faults, world=6, spares=1).records, launch_streams.launched(cycles, nodes=2).records]


@pytest.mark.parametrize("records", jobs(), ids=["inprocess", "launcher"])
def test_the_same_legs_as_by_a_pass_for_each_incident(records: list[Record], tmp_path: Path) -> None:
    lanes = Lanes()
    for record in records:
        lanes.take(record)
    told = report(Run(tmp_path, None, tuple(records), ()))
    assert len(told.incidents) > 1
    for incident in told.incidents:
        assert sorted(map(repr, lanes.legs.of(incident))) == sorted(map(repr, waterfall.legs_of(records, incident)))


def test_where_everybody_was_is_told_once(tmp_path: Path) -> None:
    seen = Whereabouts()
    run = load(job([Fault("hang", 2, 0)], world=6).write(tmp_path / "run"))
    found = report(run, (seen.take,))
    alone, others = seen.of(found.incidents[0])
    assert (alone.ranks, alone.stack[-1].function) == ((2,), "next_batch")
    assert (others.ranks, others.stack[-1].function) == ((0, 1, 3, 4, 5), "all_reduce")


def test_sections_of_all_ranks_beside_the_shortest_limit(tmp_path: Path) -> None:
    for rank, limit in enumerate((30.0, 20.0)):
        timings = Timings()
        timings.fold(("checkpoint", 2.0 + rank) for _ in range(10))
        timings.fold_failed([("data", 1.0)])
        (tmp_path / "timings").mkdir(exist_ok=True)
        timings.write(tmp_path / "timings" / f"n-{rank}.json")
        origin = Origin("job", "n", "monitor", 1, initial_rank=rank)
        signs.write(tmp_path, signs.Signs(origin, "ended", limits=(signs.Allowed("checkpoint", limit),)))
    (tmp_path / "timings" / "n-9.json").write_text("{torn")
    found = {section.name: section for section in sections_of(tmp_path)}
    checkpoint = found["checkpoint"]
    assert (checkpoint.count, checkpoint.ranks, checkpoint.limit_s, checkpoint.max_s) == (20, 2, 20.0, 3.0)
    assert checkpoint.p50_s == pytest.approx(2.0, rel=0.01)
    assert sum(number for _, number in checkpoint.bins) == 20
    assert (found["data"].count, found["data"].failed) == (0, 2)
    assert write_s(tuple(found.values())) == pytest.approx(2.5)
