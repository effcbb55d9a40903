"""The demonstration's picture: right, and no wider than a terminal."""

from __future__ import annotations

import io

import pytest

from resilience.demo.board import DemoActivity, DemoBoard, DemoRow, Return, Strike
from resilience.demo.faults import DemoFault
from resilience.demo.screen import DemoScreen, DemoView, FaultProgress, fault_line, picture
from resilience.system.render import plain

STRIKE = Strike(process=1, iteration=0, at=100.0)


def _view(
    *fault_progress: FaultProgress, rows: tuple[DemoRow, ...] = (), ended: dict[int, int] | None = None
) -> DemoView:
    training = tuple(DemoRow(DemoActivity.TRAINING, rank, 1, 57, 2.5) for rank in range(4))
    rows = rows or (*training, DemoRow(DemoActivity.WAITING, 4, 1, 0, 0.0))
    return DemoView(
        rows, tuple(range(4_000_000, 4_000_000 + len(rows))), ended or {}, fault_progress, ranks=4, steps=200
    )


def _hit(*returns: Return, kind: str = "kill") -> FaultProgress:
    return FaultProgress(DemoFault(kind, 57, 1), STRIKE, returns, ranks=4)  # type: ignore[arg-type]


def test_fault_is_recovered_from_when_as_many_ranks_as_before_train_again() -> None:
    returns = [Return(100.2, 50), Return(100.3, 50), Return(100.1, 50)]
    assert _hit(*returns).recovered_after is None
    assert _hit(*returns, Return(100.25, 50)).recovered_after == pytest.approx(0.3)


def test_spare_that_steps_in_later_does_not_prolong_an_earlier_recovery() -> None:
    returns = [Return(100.1 + process / 100, 50) for process in range(4)]
    assert _hit(*returns, Return(109.0, 90)).recovered_after == pytest.approx(0.13)


def test_line_of_a_fault_tells_whom_it_struck_and_what_it_cost() -> None:
    text = plain(fault_line(_hit(*[Return(100.5, 50)] * 4)))
    assert "SIGKILL" in text
    assert "process 1, rank 1" in text
    assert "back after 500 ms, 7 steps redone" in text


def test_states_are_those_of_the_processes() -> None:
    rows = (
        DemoRow(DemoActivity.TRAINING, 0, 2, 60, 2.5),
        DemoRow(DemoActivity.TRAINING, 1, 1, 57, 2.6),
        DemoRow(DemoActivity.RESTARTING, 2, 2, 57, 2.6),
        DemoRow(DemoActivity.WAITING, 4, 2, 0, 0.0),
    )
    lines = [plain(line) for line in picture(_view(_hit(), rows=rows, ended={1: -9}))]
    for line, state in zip(lines[1:5], ("training", "SIGKILL", "restarting", "spare"), strict=True):
        assert state in line


def test_progress_is_that_of_the_newest_iteration() -> None:
    old, new = DemoRow(DemoActivity.TRAINING, 1, 0, 57, 2.5), DemoRow(DemoActivity.TRAINING, 0, 1, 50, 2.6)
    assert _view(rows=(new, old)).step == 50


def test_picture_fits_eighty_columns() -> None:
    hits = [_hit(*[Return(159.5, 0)] * 4, kind=kind) for kind in ("exception", "kill", "hang")]
    lines = picture(_view(*hits, _hit(kind="hang"), ended={1: -9, 2: 139, 3: -11}))
    assert max(len(plain(line)) for line in lines) < 80


def test_nothing_is_redrawn_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    screen = DemoScreen(stream)
    screen.say(("told", "bold"))
    assert not screen.is_live
    assert stream.getvalue() == "told\n"


def test_board_tells_what_was_put_on_it() -> None:
    board = DemoBoard(processes=3, faults=2)
    board.seat(2, DemoActivity.WAITING, rank=2, iteration=1)
    board.progress(1, step=7, loss=2.25)
    board.strike(1, process=2)
    board.came_back(1, process=0, step=4)
    assert board.row(2) == DemoRow(DemoActivity.WAITING, 2, 1, 0, 0.0)
    assert board.row(1) == DemoRow(DemoActivity.TRAINING, 0, 0, 7, 2.25)
    strike = board.struck(1)
    assert strike is not None
    assert (strike.process, strike.iteration) == (2, 1)
    assert board.struck(0) is None
    assert [back.step for back in board.returns(1)] == [4]
    assert board.returns(0) == []
