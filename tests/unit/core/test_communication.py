"""An error of a communication call is told by where it was raised and by its type, never by its text."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from resilience.core.communication import left_communication, lost_loader_process
from resilience.facts.interruptions import Cause, ExceptionInfo, Frame

TORCH = "/venv/lib/python3.11/site-packages/torch"
TRAIN = Frame("/home/me/train.py", 12, "train")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce")
GONE = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"


def error(kind: str, *frames: Frame, message: str = "") -> ExceptionInfo:
    return ExceptionInfo(kind, message, "f", (TRAIN, *frames))


@pytest.mark.parametrize(
    "stack",
    [
        (REDUCE,),
        (REDUCE, Frame("/home/me/backend.py", 3, "wait")),
        (Frame(f"{TORCH}/distributed/_functional_collectives.py", 3, "wait"), Frame(f"{TORCH}/_ops.py", 3, "__call__")),
        (Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 3, "unshard"),),
        (Frame(f"{TORCH}/nn/parallel/distributed.py", 3, "_sync_buffers"),),
        (Frame(f"{TORCH}/autograd/graph.py", 3, "_engine_run_backward"),),
    ],
)
def test_runtime_error_out_of_a_communication_call_is_one(stack: tuple[Frame, ...]) -> None:
    assert left_communication(error("RuntimeError", *stack))
    assert not left_communication(error("ValueError", *stack))  # refused by torch's own checks, or of user code


@pytest.mark.parametrize(
    "stack",
    [
        (),
        (Frame("/home/me/model.py", 3, "forward"),),
        (Frame(f"{TORCH}/nn/parallel/distributed.py", 3, "forward"), Frame("/home/me/model.py", 3, "forward")),
        (
            Frame(f"{TORCH}/nn/parallel/distributed.py", 3, "forward"),
            Frame(f"{TORCH}/nn/modules/linear.py", 3, "forward"),
        ),
        (Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 3, "_write_item"),),
    ],
)
def test_runtime_error_from_anywhere_else_is_none_whatever_it_says(stack: tuple[Frame, ...]) -> None:
    assert not left_communication(error("RuntimeError", *stack, message=GONE))


def test_wait_for_a_collectives_work_leaves_no_frame_but_its_name() -> None:
    assert left_communication(error("RuntimeError"), {"work", "wait"})
    assert not left_communication(error("RuntimeError"), {"work", "result"})
    assert not left_communication(error("KeyError"), {"work", "wait"})


@pytest.mark.parametrize(
    "kind", ["torch.distributed.DistNetworkError", "torch.distributed.DistBackendError", "BrokenPipeError"]
)
def test_type_alone_shows_a_lost_connection(kind: str) -> None:
    assert left_communication(error(kind))


def test_lost_process_of_a_data_loader_is_the_ranks_own() -> None:
    loader = Frame(f"{TORCH}/utils/data/dataloader.py", 3, "_try_get_data")
    for kind in ("ConnectionResetError", "EOFError", "RuntimeError"):
        assert lost_loader_process(error(kind, loader))
        assert not left_communication(error(kind, REDUCE, loader))
    assert not lost_loader_process(error("RuntimeError", loader, Frame(f"{TORCH}/_utils.py", 3, "reraise")))


def raised_from(kind: str, relation: Literal["cause", "context", "part"], *frames: Frame) -> Cause:
    return Cause(kind, GONE, relation, (TRAIN, *frames))


@pytest.mark.parametrize("relation", ["cause", "context"])
def test_error_that_was_raised_for_one_of_a_communication_call_is_one_too(
    relation: Literal["cause", "context"],
) -> None:
    wrapped = error("TrainingError")
    closed = raised_from("RuntimeError", relation, REDUCE)
    bad = raised_from("KeyError", relation)
    assert left_communication(msgspec.structs.replace(wrapped, causes=(closed,)))
    assert left_communication(msgspec.structs.replace(wrapped, causes=(bad, closed)))
    assert not left_communication(msgspec.structs.replace(wrapped, causes=(bad,)))


def test_group_of_errors_is_one_of_communication_if_all_of_them_are() -> None:
    group = error("ExceptionGroup")
    closed, bad = raised_from("ConnectionResetError", "part"), raised_from("ValueError", "part")
    assert left_communication(msgspec.structs.replace(group, causes=(closed, closed)))
    assert not left_communication(msgspec.structs.replace(group, causes=(closed, bad)))
