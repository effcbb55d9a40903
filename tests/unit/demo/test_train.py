"""The demonstration's checkpoints: whole, verified, and with one to fall back on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from resilience.demo.train import Checkpoints, flat_model


def _state(value: float) -> torch.Tensor:
    return torch.full((3, 50), value)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """A folder with checkpoints of steps 10 and 20."""
    made = Checkpoints(tmp_path)
    made.save(_state(1.0), step=10, loss=3.5, first_loss=5.0)
    made.save(_state(2.0), step=20, loss=2.5, first_loss=5.0)
    return made


def _newest(folder: Path) -> Path:
    return max(folder.glob("*.ckpt"))


def test_newest_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = torch.randn(3, 50)
    Checkpoints(tmp_path).save(saved, step=7, loss=0.1, first_loss=4.2)
    loaded = _state(0.0)
    assert Checkpoints(tmp_path).load_into(loaded) == (7, 0.1, 4.2)
    assert torch.equal(loaded, saved)


def test_nothing_is_loaded_where_there_is_nothing(tmp_path: Path) -> None:
    state = _state(4.0)
    assert Checkpoints(tmp_path).load_into(state)[0] == 0
    assert torch.equal(state, _state(4.0))


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip_a_bit(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def _lose_all(data: bytes) -> bytes:
    return b""


def _break_the_header(data: bytes) -> bytes:
    return b"{" + data


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _lose_all, _break_the_header])
def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    checkpoints: Checkpoints, damage: Callable[[bytes], bytes]
) -> None:
    newest = _newest(checkpoints.folder)
    newest.write_bytes(damage(newest.read_bytes()))
    state = _state(0.0)
    assert checkpoints.load_into(state) == (10, 3.5, 5.0)
    assert torch.equal(state, _state(1.0))


def test_damaged_checkpoint_is_replaced_when_its_step_is_reached_again(checkpoints: Checkpoints) -> None:
    _newest(checkpoints.folder).write_bytes(b"")
    checkpoints.save(_state(2.0), step=20, loss=2.5, first_loss=5.0)
    assert checkpoints.load_into(_state(0.0))[0] == 20


def test_what_a_killed_writer_left_is_not_loaded_and_goes(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step-00000030.tmp").write_bytes(b"half of a checkp")
    assert checkpoints.load_into(_state(0.0))[0] == 20
    checkpoints.save(_state(3.0), step=30, loss=1.5, first_loss=5.0)
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-00000020.ckpt", "step-00000030.ckpt"]


def test_model_is_a_few_hundred_thousand_parameters_and_the_same_for_a_seed() -> None:
    (_, first, _), (_, again, _), (_, other, _) = flat_model(1), flat_model(1), flat_model(2)
    assert 200_000 < first.numel() < 500_000
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
