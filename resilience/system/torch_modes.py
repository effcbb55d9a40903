"""Are torch's modes unchanged?  Records them before a function runs, and restores them before it runs again.

Disabled gradients, autocast, a default device, a mode that intercepts operations: torch keeps each of them per thread,
and a context manager restores it. If an exception, such as an interruption, lands inside that context manager's own
`__exit__`, the mode stays on for the rest of the process. Every later call of the function then fails, for instance
with "element 0 of tensors does not require grad"."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode
from torch.utils import _python_dispatch

DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes of this thread. functions, dispatches: how many modes intercept torch's operations."""

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
    """Leave the modes entered in the calling thread since `before` was recorded."""
    while torch._C._len_torch_dispatch_stack() > before.dispatches:
        _python_dispatch._pop_mode()
    while _len_torch_function_stack() > before.functions:
        _pop_mode()  # type: ignore[no-untyped-call]
    torch.set_grad_enabled(before.gradients)
    for device, is_on in zip(DEVICES, before.autocast, strict=True):
        torch.set_autocast_enabled(device, is_on)
