"""Are torch's modes as they were?  Notes them before a function runs, and puts them back before it runs again.

Gradients switched off, autocast, a default device, a mode that intercepts operations: torch keeps each of them for the
thread, and a context manager puts it back. An exception that lands inside that context manager's own `__exit__`, as an
interruption can, leaves the mode on for the rest of the process. Then every later call of the function fails, for
instance with "element 0 of tensors does not require grad"."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode
from torch.utils import _python_dispatch

DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """What is switched on in this thread. functions, dispatches: how many modes intercept torch's operations."""

    gradients: bool
    autocast: tuple[bool, ...]  # of DEVICES
    functions: int
    dispatches: int


def modes() -> Modes:
    """Return the modes of the calling thread."""
    return Modes(
        gradients=torch.is_grad_enabled(),
        autocast=tuple(torch.is_autocast_enabled(device) for device in DEVICES),
        functions=_len_torch_function_stack(),
        dispatches=torch._C._len_torch_dispatch_stack(),
    )


def restore(before: Modes) -> None:
    """Leave what was entered in the calling thread since `before` was noted."""
    while torch._C._len_torch_dispatch_stack() > before.dispatches:
        _python_dispatch._pop_mode()
    while _len_torch_function_stack() > before.functions:
        _pop_mode()  # type: ignore[no-untyped-call]
    torch.set_grad_enabled(before.gradients)
    for device, is_on in zip(DEVICES, before.autocast, strict=True):
        torch.set_autocast_enabled(device, is_on)
