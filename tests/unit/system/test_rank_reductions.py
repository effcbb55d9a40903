"""What ranks tell each other about their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.system import rank_reductions


@pytest.mark.parametrize("data", [encoding.to_msgpack([b"data", b"\xff"]), b"\x92\xa1", b"\x01"])
def test_names_of_another_rank_that_are_no_text_are_refused(data: bytes) -> None:
    group: Any = SimpleNamespace(
        get_rank=lambda: 0,
        get_backend_config=lambda: "cpu:gloo",
        all_reduce=lambda tensor, op: tensor.fill_(len(data)),
        broadcast=lambda tensor, src: tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8)),
        ReduceOp=torch.distributed.ReduceOp,
    )
    with pytest.raises(DecodeError):
        rank_reductions._broadcast(group, [], 1)
