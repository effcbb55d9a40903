"""What does an occurrence of all ranks count as if some of them did not end it by themselves?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from resilience.calibrate import timings
from resilience.calibrate.limits import Target, calibrate
from resilience.calibrate.timings import Input
from resilience.calibration.limits_file import Deadline
from resilience.calibration.unended import Cut, End
from resilience.facts.configuration import Configuration
from resilience.telemetry.durations import Header, Recorder
from tests.support import record_streams

RANKS = 2
USUAL_S = 0.1
Last = tuple[float, End] | None  # what a rank did last in its last occurrence


def folder_of(folder: Path, last: tuple[Last, ...], longest_s: float = USUAL_S, is_stopped: bool = False) -> Path:
    """Write a run folder. is_stopped: rank 1 was; otherwise no incident, so that no verdict shows a hang."""
    record_streams.job([record_streams.Fault("stopped", 1, 0)] if is_stopped else [], world=RANKS).write(folder)
    for rank, of_rank in enumerate(last):
        chance = random.Random(rank)
        header = Header(folder.name, "node", rank, RANKS, Configuration("train.py", world_size=RANKS), folder.name)
        recorder = Recorder(folder, header, at=1000.0)
        recorder.started("cold", 1000.0)
        for i in range(1000):
            recorder.add("train", USUAL_S * chance.lognormvariate(0.0, 0.02), 1000.0 + i)
        recorder.add("train", longest_s, 2000.0)
        if of_rank is not None:
            recorder.add("train", of_rank[0], 3000.0, of_rank[1])
        recorder.close(3001.0)
    return folder


def table_of(path: Path, last: tuple[Last, ...]) -> Path:
    """Write the same as a table."""
    lines = ["run,section,rank,i,seconds,end"]
    for rank, of_rank in enumerate(last):
        chance = random.Random(rank)
        lines += [f"0,train,{rank},{i},{USUAL_S * chance.lognormvariate(0.0, 0.02)},ok" for i in range(1000)]
        lines += [] if of_rank is None else [f"0,train,{rank},1000,{of_rank[0]},{of_rank[1]}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def cuts_of(read: Input) -> list[Cut]:
    """Return what the last occurrence of the only run counts as."""
    (run,) = read.runs
    (deadline,) = run.deadlines.values()
    return [observed.cut for observed in deadline.cuts]


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "table"])
@pytest.mark.parametrize(
    ("last", "counted"),
    [
        (
            ((30.0, "cut"), (0.12, "ok")),
            [(30.0, "cut")],
        ),  # a long evaluation on rank 0, which the others did not wait for
        (((0.25, "cut"), (0.12, "ok")), []),
        (((20.1, "cut"), (20.0, "ok")), []),
        (((30.0, "cut"), (5.0, "hang")), [(5.0, "hang"), (30.0, "cut")]),
        (((5.01, "cut"), (5.0, "hang")), [(5.0, "hang")]),  # it waited for the rank that hung
        (((600.5, "cut"), (600.0, "hang")), [(600.0, "hang")]),  # and its process ended later
        (((0.4, "cut"), (0.18, "killed")), [(0.18, "killed"), (0.4, "cut")]),
        (((0.3, "cut"), (0.18, "killed")), [(0.18, "killed")]),
        (((0.05, "cut"), (0.18, "killed")), [(0.18, "killed")]),
        (((0.3, "killed"), (5.0, "hang")), [(0.3, "killed")]),
        (((30.0, "cut"), (0.05, "cut")), [(30.0, "cut")]),
        (((30.0, "cut"), None), [(30.0, "cut")]),
    ],
)
def test_long_occurrence_that_was_cut_off_counts_whatever_other_ranks_did_in_it(
    tmp_path: Path, is_folder: bool, last: tuple[Last, ...], counted: list[tuple[float, End]]
) -> None:
    for name, ranks in (("one", last), ("other", last[::-1])):
        path = folder_of(tmp_path / name, ranks) if is_folder else table_of(tmp_path / f"{name}.csv", ranks)
        assert cuts_of(timings.read([path])) == [Cut(seconds, end) for seconds, end in counted]


@pytest.mark.parametrize(("cut_s", "end"), [(1.0, "cut"), (14.0, "cut"), (16.0, "hang")])
def test_cut_of_a_stopped_rank_is_a_hang_only_if_it_took_unusually_long(tmp_path: Path, cut_s: float, end: End) -> None:
    """The longest one that ended took 10 s."""
    folder = folder_of(tmp_path / "run", (None, (cut_s, "cut")), longest_s=10.0, is_stopped=True)
    assert cuts_of(timings.read([folder])) == [Cut(cut_s, end)]


def limit_of(*runs: Path) -> Deadline:
    return calibrate(timings.read(runs), Target(min_timeout=0.01)).deadlines["train"]


def test_long_cut_beside_a_rank_that_ended_the_occurrence_raises_the_limit(tmp_path: Path) -> None:
    quiet = [folder_of(tmp_path / name, (None, None)) for name in ("one", "two")]
    before = limit_of(*quiet)
    after = limit_of(*quiet, folder_of(tmp_path / "long", ((30.0, "cut"), (0.12, "ok"))))
    assert (before.timeout_s or 0.0) < (after.timeout_s or 0.0) == pytest.approx(5 * after.max_s)
    assert "cut off 1 occurrence after 30 s" in after.warnings[0]
