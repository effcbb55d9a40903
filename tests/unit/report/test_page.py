"""The report as a page: it needs nothing else, tells the same, and stays small for many ranks."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from resilience.attribution.incidents import incidents_of
from resilience.attribution.stack_groups import stack_groups
from resilience.cli import main
from resilience.facts import events
from resilience.facts.interruptions import Cause, ExceptionInfo, Frame, ThreadStack
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.report import log_lines
from resilience.report.page import ReportPage, _headline
from resilience.report.rank_lanes import MOST_LANES, LaneChart, lanes
from resilience.report.terminal import incident_lines, report_lines
from resilience.run_folder.load import load
from resilience.run_folder.merge import history_of
from resilience.system.render import date, moments, plain
from tests.support import launch_streams
from tests.support.agreement import written
from tests.support.lines import SECOND, log_line, write
from tests.support.nested_streams import nested
from tests.support.record_streams import LOADS, Fault, job
from tests.unit.report.test_throughput import stepped

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Collects text, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return job([Fault("exception", 1, 0), Fault("kill", 2, 1)], seed=3).write(tmp_path / "run")


def drawn_of(folder: Path) -> LaneChart:
    history = history_of(folder)
    return lanes(history, incidents_of(history))


def page_of(folder: Path, out: Path) -> str:
    assert main(["report", str(folder), "--html", str(out)]) == 0
    return out.read_text()


def test_lanes_of_launched_workers_agree_with_the_verdict_and_not_with_who_ended_first() -> None:
    """Rank 1 hung, and the agent collected the end of rank 0 first."""
    records = []
    for record in launch_streams.launched([launch_streams.Fault("hang", 1)]).records:
        event = record.event
        if isinstance(event, events.WorkerExited) and record.origin.cycle == 0:
            event = msgspec.structs.replace(event, expected=event.worker_rank == 1)
        records.append(msgspec.structs.replace(record, event=event))
    history = History().take_all(records)
    kinds = {lane.ranks: lane.stretches[0].kind for lane in lanes(history, incidents_of(history)).lanes}
    assert kinds == {(0,): "interrupted", (1,): "failed"}


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_lane_of_a_rank_of_a_lost_node_ends_with_its_cycle(is_wrapped: bool) -> None:
    """Nobody recorded its end, and the job went on without it."""
    faults = [launch_streams.Fault("node", 2)]
    told = nested(faults, nodes=2, has_steps=True) if is_wrapped else launch_streams.launched(faults, nodes=2, ranks=2)
    history = History().take_all(told.records)
    by_ranks = {lane.ranks: lane.stretches for lane in lanes(history, incidents_of(history)).lanes}
    ((lost,), (stopped, _)) = by_ranks[2, 3], by_ranks[0, 1]
    assert (lost.kind, stopped.kind) == ("lost", "interrupted")
    assert abs(lost.end_ns - stopped.end_ns) < 10**9


@pytest.mark.parametrize("ahead_s", [0, 7])
@pytest.mark.parametrize("node", ["node", "lost"])
def test_lane_of_a_rank_lost_with_its_monitor_ends_where_its_time_does(node: str, ahead_s: int) -> None:
    """The others went on for an hour. On a lost node, the time of the rank ends with the last record of the node."""
    told, ahead_ns = job([Fault("kill", 2, 0)], world=3), ahead_s * 10**9 if node == "lost" else 0
    entered = next(n for n, each in enumerate(told.files[2]) if each.event == events.StageStarted("run"))
    records = [
        msgspec.structs.replace(
            each, wall_ns=each.wall_ns + ahead_ns, origin=msgspec.structs.replace(each.origin, node=node)
        )
        for each in told.files[2][: entered + 1]
    ]
    for rank in (0, 1):
        ended = next(n for n, each in enumerate(told.files[rank]) if isinstance(each.event, events.IterationEnded))
        before, after = told.files[rank][: ended + 1], told.files[rank][ended + 1 :]
        monitor = msgspec.structs.replace(before[-1].origin, role="monitor", pid=500 + rank)
        stood_in = msgspec.structs.replace(before[-1], origin=monitor, event=events.RankStoodInFor(2, "excluded", 0.01))
        records += [*before, stood_in]
        records += [
            msgspec.structs.replace(each, wall_ns=each.wall_ns + 3600 * 10**9, mono_ns=each.mono_ns + 3600 * 10**9)
            for each in after
        ]
    history = History({node: ahead_ns}).take_all(records)
    by_ranks = {lane.ranks: lane.stretches for lane in lanes(history, incidents_of(history)).lanes}
    (lost,), (interrupted, _) = by_ranks[(2,)], by_ranks[0, 1]
    assert lost.kind == "lost"
    assert lost.end_ns <= interrupted.end_ns
    spent = history.spent()[2]
    assert (lost.end_ns - lost.begin_ns) / 1e9 == pytest.approx((spent.total - spent.vacant) / 1e9, abs=0.001)


def test_wrapped_rank_that_the_launcher_stopped_is_not_lost() -> None:
    told = nested([launch_streams.Fault("kill", 1)])
    records = []
    for record in told.records:
        is_of_stopped = record.origin.initial_rank == 0 and record.origin.cycle == 0
        if is_of_stopped and isinstance(record.event, events.IterationStarted):
            ended = events.IterationEnded("lost", 1.0)
            records.append(msgspec.structs.replace(record, mono_ns=record.mono_ns + 1, event=ended))
        if not (is_of_stopped and isinstance(record.event, events.IterationEnded)):
            records.append(record)
    history = History().take_all(sorted(records, key=lambda record: record.mono_ns))
    kinds = {
        (lane.ranks, stretch.kind) for lane in lanes(history, incidents_of(history)).lanes for stretch in lane.stretches
    }
    assert ((0,), "lost") not in kinds and ((0,), "interrupted") in kinds


def test_steps_per_second_are_drawn_over_the_time_of_the_lanes(folder: Path, tmp_path: Path) -> None:
    assert "Steps per second" not in page_of(folder, tmp_path / "without.html")
    first = min(record.wall_ns for record in load(folder).records) / 1e9
    for rank in range(4):
        stepped(folder, rank, first, [2.0, 4.0])
    page = page_of(folder, tmp_path / "page.html")
    Page(page)
    drawn = page[page.index('<svg id="throughput"') : page.index("</svg>", page.index('<svg id="throughput"'))]
    assert re.findall(r"([\d.]+) steps per second</title>", drawn) == ["2", "4"]
    assert "Steps per second over time, at most 4" in drawn


def test_log_lines_around_an_incident_are_on_the_page(folder: Path, tmp_path: Path) -> None:
    (incident, *_) = incidents_of(history_of(folder))
    at = incident.detected_wall_ns
    assert at is not None
    lines = [log_line("near <the> fault", at, 1, loss=2.5), log_line("long before", at - 60 * SECOND, 0)]
    write(folder, "logs/node-1.jsonl", *lines)
    write(folder, "output/0/2.err", b"plain words\n", changed_ns=at)
    page = page_of(folder, tmp_path / "report.html")
    (logged, *_) = re.findall(r"<details class=logs>(.*?)</details>", page, re.DOTALL)
    assert "rank 1" in logged
    assert "near &lt;the&gt; fault  loss=2.5" in logged
    assert "plain words" in logged
    assert "long before" not in logged
    assert "<label hidden>" in logged  # without a script there is no search


def test_log_lines_on_the_page_are_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (incident, *_) = incidents_of(history_of(folder))
    at = incident.detected_wall_ns
    assert at is not None
    write(folder, "logs/node-1.jsonl", *(log_line(f"line {n}", at + n, 1) for n in range(5000)))
    page = page_of(folder, tmp_path / "report.html")
    assert page.count("rank 1    line") == log_lines.MOST_LINES * page.count("<details class=logs>")
    assert "resilience logs RUN --around N" in page
    monkeypatch.setattr(log_lines, "MOST_BYTES", 1000)
    assert "<details class=logs>" not in page_of(folder, tmp_path / "report.html")


def test_stacks_on_the_page_are_whole(tmp_path: Path) -> None:
    folder = job([Fault("hang", 1, 0)], world=3).write(tmp_path / "run")
    page = page_of(folder, tmp_path / "report.html")
    history = history_of(folder)
    (incident,) = incidents_of(history)
    for group in stack_groups(history, incident):
        for frame in group.stack:
            assert f"{frame.file}:{frame.line} {frame.function}" in html.unescape(page)


def test_exception_on_the_page_has_its_causes_and_notes_with_all_frames(tmp_path: Path) -> None:
    """A failed read was handled, and a validation raised on its account."""
    read = Cause("OSError", "disk 7 is gone", "cause", (Frame("/home/me/io.py", 5, "read"),), ("after 3 attempts",))
    first = Cause("KeyError", "'shard'", "context", (Frame("/home/me/index.py", 8, "find"),))
    frames = (Frame("/home/me/lock.py", 2, "lock"), Frame("/home/me/lock.py", 9, "wait"))
    oldest = Cause("TimeoutError", "no lock", "context", frames)
    stack = (Frame("/home/me/train.py", 12, "train"), Frame("/home/me/data.py", 34, "next_batch"))
    error = ExceptionInfo("ValueError", "bad batch", "f", stack, notes=("shard 17",), causes=(read, first, oldest))
    told = job([Fault("exception", 1, 0)], world=3)
    for rank, records in told.files.items():
        for number, record in enumerate(records):
            if isinstance(record.event, events.RankInterrupted) and record.event.record.rank == 1:
                seen = msgspec.structs.replace(record.event.record, exception=error)
                told.files[rank][number] = msgspec.structs.replace(record, event=events.RankInterrupted(seen))
    page = Page(page_of(told.write(tmp_path / "run"), tmp_path / "report.html"))
    text = " ".join("".join(page.text).split())
    for part in (
        "ValueError: bad batch",
        "/home/me/data.py:34 in next_batch",
        "/home/me/train.py:12 in train",
        "shard 17",
        "caused by OSError: disk 7 is gone",
        "/home/me/io.py:5 in read",
        "after 3 attempts",
        "while handling KeyError: 'shard'",
        "/home/me/index.py:8 in find",
        "while handling TimeoutError: no lock",
        "/home/me/lock.py:9 in wait",
        "/home/me/lock.py:2 in lock",
    ):
        assert part in text, part


def test_page_is_whole_and_needs_nothing_else(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(folder), "--html", str(out)]) == 0
    page = Page(out.read_text())
    assert page.open == []
    assert {link[:1] for link in page.links} == {"#", "d"}  # within the page, and an icon of no bytes
    assert [link for link in page.links if link[0] == "d"] == ["data:,"]
    text = "".join(page.text)
    assert "2 incidents" in text
    assert "http" not in out.read_text().replace("http://www.w3.org", "")


def test_numbers_of_incidents_are_apart_from_the_words_around_them(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    for count in (1, 12):
        faults = [Fault("exception", 1, number, 5 * (number + 1)) for number in range(count)]
        main(["report", str(job(faults).write(tmp_path / f"run{count}")), "--html", str(out)])
        text = "".join(Page(out.read_text()).text)
        assert re.search(r"incidents?\s+1\b", text)
        assert not re.search(r"incidents?1|more\(", text)


def test_page_tells_what_the_terminal_tells(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    main(["report", str(folder), "--html", str(out)])
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "100")
    main(["report", str(folder)])
    text = "".join(Page(out.read_text()).text)
    for line in capsys.readouterr().out.splitlines():
        assert line.strip() in text


def test_ranks_with_the_same_story_share_a_lane(tmp_path: Path) -> None:
    drawn = drawn_of(job([Fault("exception", 5, 0)], world=64, seed=1).write(tmp_path / "run"))
    own, others = sorted(drawn.lanes, key=lambda lane: len(lane.ranks))
    assert own.ranks == (5,)
    assert others.ranks == tuple(rank for rank in range(64) if rank != 5)
    assert [mark.is_own for mark in own.marks] == [True]
    assert [mark.is_own for mark in others.marks] == [False]  # who only followed makes no lane of his own
    assert {phase.name for phase in own.phases} >= {"abort", "regroup"}


def test_rank_that_only_reported_a_hang_has_no_fault_of_its_own_in_its_lane(tmp_path: Path) -> None:
    drawn = drawn_of(job([Fault("communication", 1, 0)], world=4).write(tmp_path / "run"))
    assert {mark.is_own for lane in drawn.lanes for mark in lane.marks} == {False}


def test_more_stories_than_lanes_are_reported(tmp_path: Path) -> None:
    faults = [Fault("exception", rank, rank) for rank in range(MOST_LANES + 6)]
    drawn = drawn_of(job(faults, world=MOST_LANES + 8).write(tmp_path / "run"))
    assert len(drawn.lanes) == MOST_LANES
    shown = {rank for lane in drawn.lanes for rank in lane.ranks}
    assert sorted(shown | set(drawn.left_out)) == list(range(MOST_LANES + 8))


def test_page_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["report", str(folder), "--html", str(tmp_path / "file" / "x.html")]) == 2
    assert f"cannot write {tmp_path / 'file' / 'x.html'}: Not a directory; " in capsys.readouterr().err


def test_page_of_a_run_over_midnight_has_dates(folder: Path) -> None:
    page = ReportPage(folder)
    day = 24 * 3600 * 10**9
    page.found = msgspec.structs.replace(page.found, last_wall_ns=(page.found.started_wall_ns or 0) + day)
    page._moment = moments(page.found.started_wall_ns, page.found.last_wall_ns)
    html = page.page()
    assert f"to {date(page.found.last_wall_ns)}" in html
    at = page.found.incidents[0].detected_wall_ns
    assert f'<span class="dim">{date(at).removesuffix(" UTC")}, cost' in html
    mark = next(mark for lane in page.lanes.lanes for mark in lane.marks)
    assert f"<title>{date(mark.at_ns).removesuffix(' UTC')} " in html
    assert date(page.found.incidents[0].since_wall_ns).removesuffix(" UTC") in plain_table(page)


def plain_table(page: ReportPage) -> str:
    lines = report_lines(page.found, 100, 0)
    return next(plain(line) for line in lines if plain(line).startswith("  1  "))


def test_job_that_completed_without_a_lost_rank_is_not_bad(folder: Path) -> None:
    found = ReportPage(folder).found
    changed = msgspec.structs.replace
    assert not _headline(changed(found, lost=(1,), completed=(0, 2), left=()), 0)["is_bad"]
    assert _headline(changed(found, lost=(1,), completed=(), left=()), 0)["is_bad"]


def test_one_rank_is_one_rank(folder: Path) -> None:
    page = ReportPage(folder)
    page.found = msgspec.structs.replace(page.found, world_size=1)
    assert "1 ranks" not in page.page()


def logged(records: list[Record], culprit: int, has_own: bool) -> list[Record]:
    """The records, in which each has its rank's last line. has_own: the culprit has a record too, the last one."""
    made: list[Record] = []
    for record in records:
        event = record.event
        if isinstance(event, events.RankInterrupted):
            own = msgspec.structs.replace(event.record, log_tail=(f"line of rank {event.record.rank}",))
            record = msgspec.structs.replace(record, event=events.RankInterrupted(own))
        made.append(record)
    if has_own:
        first = next(record for record in made if isinstance(record.event, events.RankInterrupted))
        assert isinstance(first.event, events.RankInterrupted) and first.event.record.rank != culprit
        own = msgspec.structs.replace(
            first.event.record,
            rank=culprit,
            pid=100 + culprit,
            stacks=(ThreadStack("MainThread", LOADS),),
            hang="in_call",
            log_tail=(f"line of rank {culprit}",),
        )
        of_culprit = [record for record in made if record.origin.initial_rank == culprit]
        before = next(record for record in of_culprit if isinstance(record.event, events.IterationDecided))
        record = msgspec.structs.replace(before, mono_ns=before.mono_ns - 1, event=events.RankInterrupted(own))
        made.insert(made.index(before), record)
    return made


@pytest.mark.parametrize("has_own", [False, True])
def test_stack_and_last_lines_stand_under_the_rank_that_they_are_of(tmp_path: Path, has_own: bool) -> None:
    """Rank 0 waits, and is reported; rank 1 is to blame."""
    folder = written(logged(job([Fault("waited_for", 1, 0)]).records, 1, has_own), tmp_path / "run")
    page = ReportPage(folder)
    (incident,) = page.found.incidents
    assert incident.verdict.first == 1
    text = "\n".join(map(plain, incident_lines(incident, 100, is_whole=True)))
    place = "data.py:34"
    assert place in text and "line of rank 0" not in text
    assert ("stack      me/data.py:34" in text) == ("line of rank 1" in text) == has_own
    assert "stack      me/train.py" not in text
    shown = page._incident(incident)
    facts = "\n".join(map(plain, shown["lines"]))
    assert place in facts and "line of rank 0" not in facts and "stack      me/train.py" not in facts
    (of_culprit,) = (each for each in shown["places"] if re.match(r"rank 1:", each["title"]))
    assert place in of_culprit["title"] and place in of_culprit["frames"]
    assert not any(place in each["frames"] for each in shown["places"] if each is not of_culprit)
    rank = shown["last_lines_rank"]
    assert (rank == 1) == has_own and shown["last_lines"] == f"line of rank {rank}"
    written_page = Page(page.page())
    assert f"Last lines of rank {rank}" in " ".join(written_page.text)
