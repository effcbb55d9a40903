"""What ranks show, as files of a folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilience.core.observation import Doing
from resilience.facts.identity import Origin
from resilience.telemetry import rank_snapshot
from resilience.telemetry.rank_snapshot import RankSnapshot, SnapshotSection


@pytest.mark.parametrize(
    ("doing", "silent_s"),
    [(Doing.FUNCTION, 9.0), (Doing.WAITING, None), (Doing.ENDING, None), (Doing.OUTSIDE, None)],
)
def test_rank_that_has_finished_or_shuts_down_owes_no_sign_of_life(doing: Doing, silent_s: float | None) -> None:
    origin = Origin(job_id="job", role="monitor", pid=1, node="node", initial_rank=0)
    assert RankSnapshot(origin, doing.value, 1.0, heartbeat_at=1.0, alive_at=10.0).silent_for() == silent_s


def test_time_for_which_the_function_does_not_run_is_left_out_of_what_is_shown() -> None:
    origin = Origin(job_id="job", role="monitor", pid=1, node="node", initial_rank=0)
    opened = [SnapshotSection("epoch", 1.0), SnapshotSection("hook", 7.0)]
    shown = RankSnapshot(origin, "finalize", heartbeat_at=2.0, alive_at=10.0, away_since=5.0)
    assert (shown.silent_for(), [shown.open_for(each) for each in opened]) == (3.0, [4.0, 3.0])
    runs = msgspec.structs.replace(shown, away_since=None)
    assert (runs.silent_for(), [runs.open_for(each) for each in opened]) == (8.0, [9.0, 3.0])


def test_own_ranks_are_read_without_a_look_at_the_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timings").mkdir()
    for rank in range(5):
        origin = Origin(job_id="job", role="rank", pid=1, node=f"node{rank // 2}", initial_rank=rank)
        assert rank_snapshot.write(tmp_path, RankSnapshot(origin=origin, doing="", step=rank))
    monkeypatch.setattr(Path, "iterdir", lambda _: pytest.fail("nobody is to list the folder"))
    assert [each.step for each in rank_snapshot.read_of(tmp_path, "node1", [2, 3, 9])] == [2, 3]
