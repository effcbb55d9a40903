"""Report, page and trace read the phases of a restart from one history, and give the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from resilience.attribution.incidents import incidents_of
from resilience.attribution.stack_groups import stack_groups
from resilience.attribution.waterfall import waterfall
from resilience.cli import main
from resilience.facts.identity import Origin
from resilience.history.history import History
from resilience.report.condensed import report
from resilience.report.sections import sections_of, write_s
from resilience.run_folder.load import load
from resilience.run_folder.merge import history_of
from resilience.telemetry import rank_snapshot
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.timings import Timings
from tests.support import launch_streams, rank_timings
from tests.support.nested_streams import nested
from tests.support.rank_timings import add_durations, add_failed
from tests.support.record_streams import Fault, job

IMPORT_S = 1.5
JOBS = {
    "inprocess": job([Fault("exception", 1, 0), Fault("hang", 2, 1), Fault("kill", 3, 2)], world=6, spares=1),
    "launcher": launch_streams.launched([launch_streams.Fault("raise", 3), launch_streams.Fault("hang", 2)], nodes=2),
    "nested": nested([launch_streams.Fault("kill", 1)]),
}


@pytest.mark.parametrize("name", JOBS)
def test_report_and_waterfall_have_the_same_phases(name: str) -> None:
    history = History().take_all(JOBS[name].records)
    incidents = incidents_of(history)
    assert incidents
    for incident in incidents:
        rows = waterfall(history, incident)
        assert rows is not None
        assert {phase.name: (phase.took.median_s, phase.took.max_s) for phase in incident.phases} == {
            row.name: (row.median_s, row.max_s) for row in rows.rows
        }


def test_restart_of_a_wrapped_worker_lasts_until_its_function_is_entered_in_every_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher starts workers that import for 1.5 s before they call the Wrapper."""
    told = JOBS["nested"]
    folder = told.write(tmp_path / "run")
    whole = sum(launch_streams.LEG_S.values()) + IMPORT_S
    (incident,) = report(load(folder)).incidents
    assert incident.restart is not None
    assert incident.restart.max_s == pytest.approx(whole, abs=0.01)
    assert {phase.name: phase.took.max_s for phase in incident.phases}["import"] == pytest.approx(IMPORT_S, abs=0.01)
    assert main(["trace", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(whole, abs=0.01)
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert re.findall("The restart: [^<]*", page) == ["The restart: 1.79 s"]
    view = MetricView()
    for record in told.records:
        view.take(record)
    import_s = view.samples()["resilience_restart_phase_duration_seconds_sum", ("launcher", "import")]
    assert import_s == pytest.approx(2 * IMPORT_S, abs=0.01)


def test_ranks_with_the_same_stack_form_one_group(tmp_path: Path) -> None:
    history = history_of(job([Fault("hang", 2, 0)], world=6).write(tmp_path / "run"))
    (incident,) = incidents_of(history)
    alone, others = stack_groups(history, incident)
    assert (alone.ranks, alone.stack[-1].function) == ((2,), "next_batch")
    assert (others.ranks, others.stack[-1].function) == ((0, 1, 3, 4, 5), "all_reduce")


def test_sections_of_all_ranks_beside_the_shortest_limit(tmp_path: Path) -> None:
    for rank, limit in enumerate((30.0, 20.0)):
        timings = Timings()
        add_durations(timings, (("checkpoint", 2.0 + rank) for _ in range(10)))
        add_failed(timings, [("data", 1.0)])
        (tmp_path / "timings").mkdir(exist_ok=True)
        rank_timings.write(tmp_path, "n", rank, timings)
        origin = Origin("job", "n", "monitor", 1, initial_rank=rank)
        rank_snapshot.write(
            tmp_path, rank_snapshot.RankSnapshot(origin, "ended", limits=(rank_snapshot.Allowed("checkpoint", limit),))
        )
    (tmp_path / "timings" / "n-9.hist").write_text("{torn")
    found = {section.name: section for section in sections_of(tmp_path)}
    checkpoint = found["checkpoint"]
    assert (checkpoint.count, checkpoint.ranks, checkpoint.limit_s, checkpoint.max_s) == (20, 2, 20.0, 3.0)
    assert checkpoint.p50_s == pytest.approx(2.0, rel=0.01)
    assert sum(number for _, number in checkpoint.bins) == 20
    assert (found["data"].count, found["data"].failed) == (0, 2)
    assert write_s(tuple(found.values())) == pytest.approx(2.5)
