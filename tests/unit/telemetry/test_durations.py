"""A rank's timings file: exact where it matters, small for any length of run, readable when torn."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

import pytest

from resilience.errors import DecodeError
from resilience.system import background
from resilience.system.background import WRITER
from resilience.telemetry import durations, single_durations
from resilience.telemetry.durations import Header, Recorder, Started, Value
from resilience.telemetry.timings import Histogram, Timings
from tests.support import rank_timings

HEADER = Header(run="job", node="host", rank=3, world_size=4)


def values(path: Path) -> list[Value]:
    return [line for _, line in single_durations.read_values(path) if isinstance(line, Value)]


def test_first_values_the_large_ones_and_cut_offs_are_kept_one_by_one(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER, at=1000.0)
    recorder.started("cold", 1000.0)
    for i in range(1000):
        recorder.add("step", 0.1 if i != 777 else 9.0, 1000.0 + i)
    recorder.add("step", 5.0, 2000.0, end="hang")
    recorder.close(2000.0)
    kept = values(tmp_path / "timings" / "host-3.jsonl")
    assert [value.i for value in kept[:64]] == list(range(64))
    assert [(value.i, value.s) for value in kept[64:] if value.end == "ok"] == [(777, 9.0)]
    assert kept[-1].end == "hang"


@pytest.mark.parametrize("waited", [background.LAST_LIMIT, 0.0])
def test_histograms_are_written_at_the_end_though_the_writer_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: float
) -> None:
    """waited: seconds for which a flush waits for the queue, which may not be enough."""
    recorder = Recorder(tmp_path, HEADER, at=1000.0)
    monkeypatch.setattr(background, "MOST", 3)
    has_begun, answers = threading.Event(), threading.Event()
    WRITER.submit(lambda: (has_begun.set(), answers.wait(60.0)))
    assert has_begun.wait(60.0)
    for i in range(10):
        recorder.add("step", 0.1, 1000.0 + i)
    threading.Timer(0.1, answers.set).start()
    flush = WRITER.flush
    with monkeypatch.context() as patch:
        patch.setattr(WRITER, "flush", lambda limit=0.0: flush(waited))
        recorder.close(1010.0)
    assert WRITER.flush()
    state = durations.read_histograms(tmp_path / "timings" / "host-3.hist")
    assert (state.deadlines["step"].total.count, recorder.dropped) == (10, 10 - 2)  # the header took a place


def test_everything_is_in_the_histogram_with_exact_count_sum_and_maximum(tmp_path: Path) -> None:
    chance = random.Random(1)
    told = [chance.lognormvariate(0.0, 0.5) for _ in range(5000)]
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    for i, seconds in enumerate(told):
        recorder.add("data", seconds, float(i))
    recorder.close(5000.0)
    state = durations.read_histograms(tmp_path / "timings" / "host-3.hist")
    total, periods = state.deadlines["data"].total, state.deadlines["data"].periods
    assert (total.count, total.max) == (5000, max(told))
    assert total.sum == pytest.approx(sum(told))
    assert durations.PERIODS / 2 <= len(periods) <= durations.PERIODS
    assert sum(period.count for period in periods.values()) == 5000
    assert sum(period.settled for period in periods.values()) == 5000 - durations.FIRST_AGAIN
    assert sum(period.sum for period in periods.values()) == pytest.approx(sum(told))
    assert all(0.9 < period.median < 1.1 for period in periods.values() if period.count > 100)
    longest = max(periods.values(), key=lambda period: period.max)
    assert longest.max == max(told)
    assert longest.max_at == float(told.index(max(told)))


def test_files_stay_below_a_megabyte_however_long_the_run(tmp_path: Path) -> None:
    chance = random.Random(2)
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    for i in range(200_000):
        recorder.add(f"section {i % 10}", chance.lognormvariate(0.0, 0.3), i * 15.0)
    recorder.close(3e6)
    sizes = [path.stat().st_size for path in (tmp_path / "timings").iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 1 << 20
    state = durations.read_histograms(tmp_path / "timings" / "host-3.hist")
    assert all(len(series.periods) <= durations.PERIODS for series in state.deadlines.values())
    assert sum(series.total.count for series in state.deadlines.values()) == 200_000


def test_file_with_a_count_that_no_rank_reaches_is_refused(tmp_path: Path) -> None:
    path = rank_timings.write(tmp_path, "host", 0, Timings({"data": Histogram({5: 2**63}, 2**63, 1.0, 1.0)}))
    with pytest.raises(DecodeError):
        durations.read_histograms(path)
    path = rank_timings.write(tmp_path, "host", 0, Timings({"data": Histogram({5: 10**9}, 10**9, 1.0, 1.0)}))
    assert durations.read_histograms(path).deadlines["data"].total.count == 10**9


def test_value_that_no_occurrence_reaches_is_refused_with_its_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    recorder.started("cold", 0.0)
    recorder.add("step", 0.5, 1.0)
    recorder.close(2.0)
    path = tmp_path / "timings" / "host-3.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"s":0.5', b'"s":1e308'))
    with pytest.raises(DecodeError, match="line 3: "):
        single_durations.read_lines(path)


def test_calls_are_counted_anew_after_a_start(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    for start in range(2):
        recorder.started("warm", start * 100.0, cycle=start)
        for i in range(3):
            recorder.add("step", 1.0 + i, start * 100.0 + i)
    recorder.close(200.0)
    path = tmp_path / "timings" / "host-3.jsonl"
    assert [(value.i, value.j) for value in values(path)] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    assert [line.cycle for _, line in single_durations.read_values(path) if isinstance(line, Started)] == [0, 1]


def test_torn_last_line_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    recorder.add("step", 1.0, 0.0)
    recorder.close(1.0)
    path = tmp_path / "timings" / "host-3.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"value","sec')
    assert len(values(path)) == 1
    path.write_bytes(whole + b"nonsense\n")
    with pytest.raises(DecodeError, match="line 3"):
        values(path)


@pytest.mark.parametrize("is_glued", [False, True])
def test_line_that_a_full_disk_cut_off_costs_itself_only(tmp_path: Path, is_glued: bool) -> None:
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    for at in range(3):
        recorder.add('da"{}ta', 1.0, float(at))
    recorder.close(1.0)
    path = tmp_path / "timings" / "host-3.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    for size in range(1, len(rest[0]) - 1):
        path.write_bytes(first + rest[0][:size] + b"\n" * (not is_glued) + rest[1] + rest[2])
        kept, cut_off = single_durations.read_lines(path)
        assert [line.i for line in kept if isinstance(line, Value)] == [1, 2]
        assert cut_off == 1


@pytest.mark.parametrize("later", [1000.0, 90_000.0])
def test_earlier_file_that_could_not_be_read_is_merged_later_and_not_replaced(
    later: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timings" / "host-3.hist"
    record(Recorder(tmp_path, HEADER, at=0.0), 0.0, 5).close(5.0)
    record(whole := Recorder(tmp_path, HEADER, at=later), later, 600)
    before = path.read_bytes()

    def unreadable(path: Path) -> durations.Durations:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as hung:
        hung.setattr(durations, "read_histograms", unreadable)
        recorder = record(Recorder(tmp_path, HEADER, at=later), later, 600)
        assert not recorder.flush(later + 600.0)
    assert WRITER.flush(60.0)
    assert path.read_bytes() == before
    recorder.add("new", 1.0, later + 600.0)
    recorder.close(later + 601.0)
    state = durations.read_histograms(path)
    merged, expected = state.deadlines["step"], whole.state.deadlines["step"]
    assert (merged.total, merged.early) == (expected.total, expected.early)
    assert state.period_s == whole.state.period_s
    assert {number: period.count for number, period in merged.periods.items()} == {
        number: period.count for number, period in expected.periods.items()
    }
    assert state.deadlines["new"].total.count == 1
    assert recorder._running["step"].i == 605


def record(recorder: Recorder, begin: float, count: int) -> Recorder:
    recorder.started("warm", begin)
    for i in range(count):
        recorder.add("step", 1.0 + i % 7, begin + i)
    return recorder


def counts(folder: Path) -> dict[str, int]:
    assert WRITER.flush(60.0)
    state = durations.read_histograms(folder / "timings" / "host-3.hist")
    periods = {
        name: sum(period.count for period in series.periods.values()) for name, series in state.deadlines.items()
    }
    totals = {name: series.total.count for name, series in state.deadlines.items()}
    assert periods == totals
    return totals


@pytest.mark.parametrize("length", [1000, 90_000])
def test_two_monitors_of_a_rank_record_what_both_have_seen(tmp_path: Path, length: int) -> None:
    """A Wrapper's call has a monitor of its own, which continues the files of the launcher's."""
    launchers = Recorder(tmp_path, HEADER, at=0.0)
    launchers.add("load", 30.0, 0.0)
    assert launchers.flush(30.0)
    assert counts(tmp_path) == {"load": 1}
    launchers.add("load", 2.0, 31.0)  # not written yet when the call begins
    wrappers = record(Recorder(tmp_path, HEADER, at=34.0), 34.0, 600)
    assert wrappers.flush(700.0) and launchers.flush(701.0)
    assert counts(tmp_path) == {"load": 1, "step": 600}
    assert launchers.flush(715.0)
    assert counts(tmp_path) == {"load": 2, "step": 600}
    wrappers.add("step", 1.0, 34.0 + length)
    wrappers.close(35.0 + length)
    launchers.add("load", 2.0, 40.0 + length)
    launchers.add("export", 20.0, 45.0 + length)
    launchers.close(70.0 + length)
    assert counts(tmp_path) == {"load": 3, "step": 601, "export": 1}
    assert [value.i for value in values(tmp_path / "timings" / "host-3.jsonl") if value.section == "load"] == [0, 1, 2]


@pytest.mark.parametrize("damage", [b'{"header":', b'{"header":{"kind":"header","schema":99}}'])
def test_file_of_histograms_that_cannot_be_decoded_is_kept_aside(tmp_path: Path, damage: bytes) -> None:
    record(Recorder(tmp_path, HEADER, at=0.0), 0.0, 5).close(5.0)
    path = tmp_path / "timings" / "host-3.hist"
    path.write_bytes(damage)
    later = record(Recorder(tmp_path, HEADER, at=10.0), 10.0, 3)
    later.close(20.0)
    aside = [file for file in path.parent.iterdir() if file.suffix not in (".hist", ".jsonl")]
    assert [file.read_bytes() for file in aside] == [damage]
    assert (later.take_unreadable(), later.take_unreadable()) == (aside[0].name, "")
    assert durations.read_histograms(path).deadlines["step"].total.count == 3


@pytest.mark.parametrize("is_damaged", [False, True])
def test_single_values_are_continued_without_the_histograms(tmp_path: Path, is_damaged: bool) -> None:
    """A monitor that was killed in its first seconds leaves the values alone."""
    record(Recorder(tmp_path, HEADER, at=0.0), 0.0, 5).close(5.0)
    path = tmp_path / "timings" / "host-3.hist"
    path.write_bytes(b"{") if is_damaged else path.unlink()
    later = Recorder(tmp_path, HEADER, at=10.0)
    assert not later.is_new
    record(later, 10.0, 3).close(20.0)
    lines = [line for _, line in single_durations.read_values(path.with_suffix(".jsonl"))]
    assert [type(line) for line in lines[1:]].count(Header) == 0
    assert [line.j for line in lines if isinstance(line, Value)] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_folder_that_cannot_be_written_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / "timings").write_text("a file where a folder should be")
    recorder = Recorder(tmp_path, HEADER, at=0.0)
    recorder.add("step", 1.0, 0.0)
    recorder.close(1.0)
    assert recorder.dropped == 2
