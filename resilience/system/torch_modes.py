"""Are torch's modes unchanged?  Records them before a function runs, and restores them when it has failed.

Disabled gradients, autocast, a default device, a mode that intercepts operations: torch keeps each of them per thread,
and a context manager restores it. If an exception, such as an interruption, lands inside that context manager's own
`__exit__`, the mode stays on for the rest of the process. Every later call of the function then fails, for instance
with "element 0 of tensors does not require grad". Or it trains on old weights: autocast keeps the weights that it has
cast until its outermost context ends.

Not restored: inference mode, which ends with its context manager's object, and what torch keeps per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.utils import _device, _python_dispatch

_autograd: Any = torch._C._autograd  # torch declares only a part of these modules' functions
_functorch: Any = torch._C._functorch
_overrides: Any = overrides
DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """The state of autocast in this thread. devices: for each of DEVICES, whether it is on, and its type. nesting: how
    many contexts are open."""

    devices: tuple[tuple[bool, torch.dtype], ...]
    keeps_casts: bool
    nesting: int


class Autograd(NamedTuple):
    """The state of autograd in this thread. hooks: the innermost pair for saved tensors. transforms: open ones of
    `torch.func`. level: of forward gradients."""

    gradients: bool
    forward_gradients: bool
    multithreading: bool
    has_hooks: bool
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    transforms: int
    level: int


class Modes(NamedTuple):
    """The modes of this thread. functions: those that intercept torch's functions, outermost first. device: of the
    innermost `with torch.device(...)`. dispatches: how many modes intercept operations."""

    autograd: Autograd
    autocast: Autocast
    functions: list[Any]
    device: torch.device | None
    dispatches: int


def modes() -> Modes:
    """Return the modes of the calling thread."""
    return Modes(
        Autograd(
            gradients=torch.is_grad_enabled(),
            forward_gradients=torch._C._is_fwd_grad_enabled(),
            multithreading=torch._C._is_multithreading_enabled(),
            has_hooks=_autograd._saved_tensors_hooks_is_enabled(),
            hooks=_hooks(),
            transforms=_functorch.get_dynamic_layer_stack_depth(),
            level=forward_ad._current_level,
        ),
        Autocast(
            tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES),
            torch.is_autocast_cache_enabled(),
            _autocast_nesting(),
        ),
        _overrides._get_current_function_mode_stack(),
        _device.CURRENT_DEVICE,
        torch._C._len_torch_dispatch_stack(),
    )


def restore(before: Modes) -> None:
    """Leave the modes entered in the calling thread since `before` was recorded."""
    while torch._C._len_torch_dispatch_stack() > before.dispatches:
        _python_dispatch._pop_mode()
    # A default device stands at the bottom, in place of an outer one: the length does not show it.
    if _overrides._get_current_function_mode_stack() != before.functions:
        while _overrides._len_torch_function_stack():
            _overrides._pop_mode()
        for mode in before.functions:
            _overrides._push_mode(mode)
    _device.CURRENT_DEVICE = before.device
    _restore_autograd(before.autograd)
    _restore_autocast(before.autocast)


def _restore_autograd(before: Autograd) -> None:
    if _functorch.get_dynamic_layer_stack_depth() > before.transforms:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(before.transforms)
    while forward_ad._current_level > before.level:
        forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]
    if before.has_hooks:
        _autograd._saved_tensors_hooks_enable()
    while (hooks := _hooks()) is not None and hooks != before.hooks:
        _autograd._pop_saved_tensors_default_hooks()
    torch._C._set_multithreading_enabled(before.multithreading)
    torch._C._set_fwd_grad_enabled(before.forward_gradients)
    torch.set_grad_enabled(before.gradients)


def _restore_autocast(before: Autocast) -> None:
    while _autocast_nesting() > before.nesting:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(before.keeps_casts)
    for device, (is_on, dtype) in zip(DEVICES, before.devices, strict=True):
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()  # the only way to read it


def _hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost hooks for saved tensors, None if there are none. torch before 2.8 cannot say."""
    top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)
