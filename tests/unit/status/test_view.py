"""The screen of `resilience status --watch`: exactly as large as the terminal, and what keys make of it."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from resilience.run_folder.rank_ranges import ranges_of
from resilience.status import view as status_view
from resilience.status.screen import keys_of
from resilience.status.state import Now, RankNow, Section, Sort, grouped, order
from resilience.status.view import SORTS, StatusView, What, frame, pressed
from resilience.system.render import plain
from tests.unit.cli.test_status import now


def text_of(
    seen: Now | None, view: StatusView | None = None, width: int = 80, height: int = 24, rate: float = 1.5
) -> str:
    drawn = frame(seen, view or StatusView(), width, height, 0.5, rate)
    return "\n".join(plain(line) for line in drawn.lines)


def rows_of(text: str) -> list[list[str]]:
    """The rows of the last table."""
    lines = text.splitlines()[:-1]
    header = max(number for number, line in enumerate(lines) if "open / limit" in line)
    return [line.split() for line in lines[header + 1 :] if line.strip()]


@pytest.mark.parametrize("world", [0, 1, 8, 10_000])
@pytest.mark.parametrize(("width", "height"), [(60, 12), (80, 24), (160, 50), (200, 20)])
@pytest.mark.parametrize("node", ["n", "a-node-with-a-very-long-name.of.some.cluster"])
@pytest.mark.parametrize("what", get_args(What))
def test_frame_is_as_large_as_the_terminal(world: int, width: int, height: int, node: str, what: What) -> None:
    seen = now(world, node)
    for view in (
        StatusView(what=what),
        StatusView(what=what, top=10**9),
        StatusView(is_helping=True),
        StatusView(is_typing=True, text="3-"),
    ):
        lines = [plain(line) for line in frame(seen, view, width, height, 7.0, 2.0).lines]
        assert len(lines) == height
        assert width < 80 or max(map(len, lines)) <= width  # narrower ones are cut when they are drawn


def test_before_anything_is_on_record_the_screen_says_so() -> None:
    assert text_of(None).startswith("No records yet")


def test_many_ranks_are_reported_in_groups_and_the_stalest_one_by_one() -> None:
    text = text_of(now(10_000))
    assert "0, 2, 4 …" in text and " 5000 " in text
    assert rows_of(text)[0][0] == "5"  # it is suspect
    assert "1-10 of 10000 ranks by staleness" in text
    assert "step       100000 to 100002, 1.5 per second" in text


def test_nodes_and_groups_can_be_asked_for() -> None:
    by_node = rows_of(text_of(now(64), StatusView(what="node"), width=120))
    assert by_node[0][:6] == ["node0", "8", "7", "active,", "1", "suspect"]
    assert len(by_node) == 8
    alike = rows_of(text_of(now(64), StatusView(what="alike"), width=120))
    assert [row[0] for row in alike] == ["5", "1,", "0,"]


def test_only_some_ranks_can_be_asked_for() -> None:
    def ranks(**asked: object) -> list[str]:
        return [row[0] for row in rows_of(text_of(now(64), StatusView(sort="rank", **asked), height=60))]  # type: ignore[arg-type]

    assert ranks(only_wrong=True) == ["5"]
    assert ranks(text="3,60-61") == ["3", "60", "61"]
    assert ranks(text="60-") == ["60"]
    assert ranks(text="NODE7") == [str(rank) for rank in range(56, 64)]
    assert ranks(text="checkpoint") == [str(rank) for rank in range(1, 64, 2)]
    assert ranks(text="suspect") == ["5"]
    assert ranks(text="9-3") == ranks(text="nowhere") == ranks(text="0-99999999") == []


def test_filter_is_parsed_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(text: str) -> tuple[range, ...]:
        parsed.append(text)
        return ranges_of(text)

    monkeypatch.setattr(status_view, "ranges_of", counted)
    assert "of 1000 ranks" in text_of(now(1000), StatusView(text="0-9999"))
    assert parsed == ["0-9999"]


def test_rows_move_and_stop_at_their_ends() -> None:
    seen = now(64)
    first = frame(seen, StatusView(sort="rank"), 80, 24, 0.0)
    last = frame(seen, StatusView(sort="rank", top=10**9), 80, 24, 0.0)
    assert first.top == 0
    assert last.top == 64 - last.page
    assert [row[0] for row in rows_of("\n".join(plain(line) for line in last.lines))][-1] == "63"
    up = pressed(StatusView(top=last.top), "up", last.page)
    assert up is not None and up.top == last.top - 1


def after(*keys: str, view: StatusView | None = None) -> StatusView | None:
    seen: StatusView | None = view or StatusView()
    for key in keys:
        assert seen is not None
        seen = pressed(seen, key, 10)
    return seen


def test_keys_change_the_view() -> None:
    assert after("q") is None
    assert after(*["s"] * len(SORTS)) == StatusView()
    assert after("S") == StatusView(sort=SORTS[-1])
    assert after("g") == StatusView(what="alike")
    assert after("g", "g", "g") == StatusView()
    assert after("w") == StatusView(only_wrong=True)
    assert after(" ") == StatusView(is_paused=True)
    assert after("h") == StatusView(is_helping=True)
    assert after("h", "x") == StatusView()
    assert after("pagedown", "down", "pageup") == StatusView(top=1)
    assert after("down", "g") == StatusView(what="alike")
    assert after("up") == StatusView()


def test_letters_are_a_text_while_one_is_typed() -> None:
    assert after("/", *"qs1", "backspace", "left", "enter") == StatusView(text="qs")
    assert after("/", *"abc", "escape") == StatusView()
    assert after("/", *"abc", "enter", "escape") == StatusView()


def test_keys_of_a_terminal_are_told_apart() -> None:
    assert keys_of("q\x1b[A\x1bOB\x1b[5~\x1b[6~\r\x7f\x1b[H\x1b[F é\x1b") == [
        *("q", "up", "down", "pageup", "pagedown", "enter", "backspace", "home", "end", " ", "é", "escape")
    ]
    assert keys_of("\x1b[15~\x01") == ["", ""]


def ranks() -> list[RankNow]:
    data = Section("data", 50.0, 60.0)
    return [
        RankNow(0, "b", "active", "run", 7, 1.0, shown_s=1.0),
        RankNow(1, "a", "active", "run", 5, 90.0, shown_s=90.0),
        RankNow(2, "b", "active", "run", 9, 3.0, data, 1, 3.0),
        RankNow(3, "a", "suspect", "run", 6, 30.0, shown_s=30.0),
        RankNow(4, "c", "active", "run", None, 2.0, shown_s=2.0),
    ]


@pytest.mark.parametrize(
    ("by", "first"),
    [
        ("staleness", [3, 1, 2, 4, 0]),
        ("limit", [2, 3, 1, 4, 0]),
        ("step", [1, 3, 0, 2, 4]),
        ("rank", [0, 1, 2, 3, 4]),
        ("node", [1, 3, 0, 2, 4]),
    ],
)
def test_order_is_the_one_that_is_asked_for(by: Sort, first: list[int]) -> None:
    assert [rank.rank for rank in order(ranks(), by)] == first


def test_age_that_is_usual_in_a_large_job_is_no_staleness() -> None:
    seen = [msgspec.structs.replace(rank, shown_s=100.0 - rank.rank, silent_s=100.0) for rank in ranks()]
    assert [rank.rank for rank in order(seen, world_size=10_000)][:2] == [3, 2]  # suspect, then nearest to its limit


def test_rank_that_owes_no_sign_is_not_stale() -> None:
    seen = [
        msgspec.structs.replace(rank, doing="waiting", silent_s=None) if rank.rank == 1 else rank for rank in ranks()
    ]
    assert [rank.rank for rank in order(seen)] == [3, 2, 4, 0, 1]


def test_groups_hold_what_is_alike() -> None:
    found = grouped(ranks(), "alike")
    assert [(group.ranks, group.state, group.where) for group in found] == [
        ((3,), "suspect", ""),
        ((0, 1, 4), "active", ""),
        ((2,), "active", "data"),
    ]
    group = found[1]
    assert (group.nodes, group.low, group.high, group.worst.rank) == (3, 5, 7, 1)
