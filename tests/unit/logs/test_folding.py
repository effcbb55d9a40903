"""Like lines of many ranks become one; a minority stands out; nothing is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.logs import folding
from resilience.logs.folding import MOMENT_NS, FoldedLine, fold, template, templates
from resilience.run_folder.lines import Line
from resilience.run_folder.merge import MergedLines
from tests.support.lines import AT, SECOND, log_line, write


def text(words: str, rank: int, at_ns: int = 0, level: str = "info") -> Line:
    return Line(AT + at_ns, "text", f"output/0/{rank}.out", 1, words.encode(), level, words, rank)


def told(lines: list[Line]) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(one.text, one.ranks, one.stands_out) for one in fold(lines)]


def test_same_line_of_all_ranks_is_reported_once() -> None:
    assert told([text("ready", rank) for rank in range(8)]) == [("ready", tuple(range(8)), False)]


@given(st.text("a_1.e+- é٣", max_size=40))
def test_tokens_with_digits_are_whole_words_and_numbers(words: str) -> None:
    plain = r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w)|\w*\d\w*"
    assert folding._TOKEN.findall(words) == re.findall(plain, words, re.ASCII)


@pytest.mark.parametrize("character", ["a", " "])
def test_line_of_the_greatest_length_is_folded_in_linear_time(character: str) -> None:
    words = character * (1 << 20)
    line = Line(AT, "log", "logs/node-0.jsonl", 1, log_line(words, AT), "info", words, 0)
    assert template(line) == f"log info {words}"


def test_minority_that_says_something_else_stands_out() -> None:
    lines = [text("loss is finite" if rank != 3 else "loss is nan", rank) for rank in range(8)]
    assert told(lines) == [("loss is finite", (0, 1, 2, 4, 5, 6, 7), False), ("loss is nan", (3,), True)]


def test_rank_with_another_value_than_the_majority_stands_out() -> None:
    lines = [text(f"checkpoint of step {900 if rank == 3 else 1000}", rank) for rank in range(8)]
    assert told(lines) == [
        ("checkpoint of step 1000", (0, 1, 2, 4, 5, 6, 7), False),
        ("checkpoint of step 900", (3,), True),
    ]


def test_values_that_differ_on_all_ranks_are_reported_as_a_range() -> None:
    lines = [text(f"loss 2.{rank}1 on rank{rank}", rank) for rank in range(4)]
    assert told(lines) == [("loss 2.01…2.31 on *", (0, 1, 2, 3), False)]


def test_text_that_looks_like_the_mask_of_a_number_is_no_number() -> None:
    bars = [text(" 12%|#2        | 1/8", 0), text(" 20%|##        | 2/10", 1)]  # tqdm with LANG=C
    assert told(bars) == [(bars[0].event, (0,), False), (bars[1].event, (1,), False)]
    assert template(text("step #", 0)) != template(text("step 5", 0))


@given(st.lists(st.text("a0_#\0. ", max_size=12), min_size=2, max_size=4))
def test_lines_of_any_text_can_be_folded(words: list[str]) -> None:
    assert sum(one.count for one in fold([text(said, rank) for rank, said in enumerate(words)])) == len(words)


def test_lines_of_two_roles_are_never_similar() -> None:
    lines = [
        Line(AT, "log", "f", 1, b"{}", "info", said, 0, role=role)
        for role, said in (("a None None 0", "b"), ("a", "5 None None b"))
    ]
    assert len(list(fold(lines))) == 2


def test_what_rank_0_says_for_all_does_not_stand_out_but_its_errors_do() -> None:
    lines = [text("ready", rank) for rank in range(4)] + [text("epoch done", 0), text("lost", 0, level="error")]
    assert [(said, alone) for said, _, alone in told(lines)] == [
        ("ready", False),
        ("epoch done", False),
        ("lost", True),
    ]


def test_rank_0_stands_out_where_all_others_say_something_else_of_the_same_thing() -> None:
    lines = [text("validation loss: " + ("nan" if rank == 0 else "fine"), rank) for rank in range(4)]
    assert told(lines) == [("validation loss: nan", (0,), True), ("validation loss: fine", (1, 2, 3), False)]


def test_repeated_lines_of_a_rank_pair_with_the_same_of_the_others() -> None:
    steps = [text(f"step {step}", rank, step) for step in range(3) for rank in range(3) if (step, rank) != (0, 2)]
    assert told(steps) == [("step 0", (0, 1), False), ("step 1", (0, 1, 2), False), ("step 2", (0, 1, 2), False)]


def test_lines_far_apart_in_time_are_two() -> None:
    assert [ranks for _, ranks, _ in told([text("x", 0), text("x", 1, MOMENT_NS + 1)])] == [(0,), (1,)]


def test_agents_fold_by_node() -> None:
    lines = [Line(AT, "record", "f", 1, b'{"event":{}}', "info", "cycle.started", None, node) for node in "ba"]
    (one,) = fold(lines)
    assert (one.ranks, one.nodes, one.count) == ((), ("a", "b"), 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["a", "a 1", "a 2", "b x3", "b y4", "a nan"]), st.integers(0, 2)),
        max_size=60,
    )
)
def test_every_line_is_reported_by_exactly_one_fold(spoken: list[tuple[int, str, int]]) -> None:
    at = 0
    lines = []
    for rank, words, pause in spoken:
        at += pause * SECOND
        lines.append(text(words, rank, at))
    found: list[FoldedLine] = list(fold(lines))
    assert sum(one.count for one in found) == len(lines)
    times = [one.line.at_ns for one in found]
    assert times == sorted(times)
    for rank in range(6):
        assert sum(one.ranks.count(rank) for one in found) == sum(line.rank == rank for line in lines)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "HELD", 1000)
    taken = 0

    def lines() -> Iterator[Line]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield text(f"{'x' * 500} {chr(97 + number)}", number)

    found = fold(lines())
    next(found)
    assert taken <= 4


def test_pending_fold_is_released_after_a_quiet_time() -> None:
    found = fold([text("a", 0), None, text("a", 1), *[None] * folding.QUIET, text("a", 2)])
    assert [one.ranks for one in found] == [(0, 1), (2,)]


@pytest.mark.parametrize("ahead_s", [0, 1800])
def test_line_waits_for_a_number_of_batches_even_if_others_come(ahead_s: int) -> None:
    """Also a line that begins with a time of the future: those after it are not later."""
    taken = 0

    def lines() -> Iterator[Line | None]:
        nonlocal taken
        yield text("ETA", 0, ahead_s * SECOND)
        for taken in range(1, 100):
            yield text(f"work {'abc'[taken % 3]}", 0, taken)
            yield None

    assert next(fold(lines())).text == "ETA"
    assert taken == folding.QUIET


def test_short_lines_that_wait_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "HELD", 10 * folding.SLOT_BYTES)
    taken = 0

    def lines() -> Iterator[Line]:
        nonlocal taken
        yield text("ETA", 0, 1800 * SECOND)
        for taken in range(1, 100):
            yield text(f"{taken}", 0, taken * SECOND)

    next(fold(lines()))
    assert taken <= 11


class _Counted(str):
    """A speaker that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        type(self).lookups += 1
        return super().__hash__()


@pytest.mark.parametrize("words", ["retry {}", "retry"])
def test_many_similar_lines_of_a_rank_are_folded_in_linear_time(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Counted, "lookups", 0)
    speaker = _Counted("node")
    lines = [Line(AT, "text", "f", 1, b"", "info", words.format(number), None, speaker) for number in range(1000)]
    assert len(list(fold(lines))) == 1000
    assert _Counted.lookups < 20 * 1000


def test_many_lines_of_rank_0_are_judged_in_linear_time() -> None:
    lookups = 0

    class Slots(set[int]):
        def __len__(self) -> int:
            nonlocal lookups
            lookups += 1
            return super().__len__()

    def waits(slot: folding._Slot) -> folding._Slot:
        slot.speakers = Slots()
        return slot

    made = folding._Slot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "_Slot", lambda *arguments: waits(made(*arguments)))
        said = [text(f"the beginning of {chr(0x4E00 + number)}", 0) for number in range(1000)]
        assert len(list(fold([*(text("ready", rank) for rank in range(8)), *said]))) == 1001
    assert lookups < 20 * 1000


def test_template_is_the_same_for_lines_that_differ_in_what_holds_digits() -> None:
    assert template(text("saved run-3f2a at step 10", 0)) == template(text("saved run-77c1 at step 11", 1))
    assert template(text("saved", 0)) != template(text("lost", 0))
    assert template(text("saved", 0)) != template(text("saved", 0, level="error"))


def test_lines_of_a_good_run_are_known(tmp_path: Path) -> None:
    write(tmp_path / "good", "logs/node-0.jsonl", log_line("step done", AT, step_time=1.5))
    write(tmp_path / "bad", "logs/node-0.jsonl", log_line("step done", AT, step_time=9.5), log_line("retry", AT))
    known = templates(MergedLines(tmp_path / "good"))
    assert [line.event for line in MergedLines(tmp_path / "bad") if hash(template(line)) not in known] == ["retry"]
