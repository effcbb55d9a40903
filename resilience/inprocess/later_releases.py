"""Names and signatures of later releases of the compatible API that are not here: what to write instead.

The API here is that of the releases 0.1 and 0.2, whose hooks take two arguments. Code written for 0.3 and later is
refused when it is loaded or when the Wrapper is constructed. What a hook reads from its State is seen only when it
runs: the error says what to write."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from resilience.errors import ConfigurationTypeError

P = ParamSpec("P")

_LEVELS = (
    "write Compose(ShiftRanks(), FilterGroupedByKey(key_or_fn, condition)) for the groups that leave as a whole, and "
    "rank_filter=MaxActiveWorldSize(n) for the number of active ranks"
)
_RAISE = "raise the exception in the wrapped function"
_STATE = {"FrozenState": "write State, which hooks may change", "Mode": "write state.Status"}
INSTEAD: dict[str, dict[str, str]] = {
    "": _STATE,
    "state": _STATE,
    "rank_assignment": {
        "RankAssignmentCtx": "write the hook as (state, terminated_ranks) -> (state, terminated_ranks)",
        "FilterCountGroupedByKey": "write FilterGroupedByKey; it calls key_or_fn(rank, world_size)",
        "Tree": _LEVELS,
        "Layer": _LEVELS,
        "LayerFlag": _LEVELS,
        "ActivateAllRanks": "leave it out: all ranks are active before the rank_filter runs",
        "RankFilter": "write rank_filter.RankFilter, and pass the hook as rank_filter=",
        "MaxActiveWorldSize": "write rank_filter=rank_filter.MaxActiveWorldSize(n)",
        "ActiveWorldSizeDivisibleBy": "write rank_filter=rank_filter.WorldSizeDivisibleBy(n)",
    },
    "rank_filter": {"ActiveWorldSizeDivisibleBy": "write WorldSizeDivisibleBy"},
    "health_check": {
        "ChainedGPUHealthCheck": "write CudaHealthCheck(), composed with checks of your own; `resilience run` checks "
        "NVIDIA devices too",
    },
    "nested_restarter": {
        "NestedRestarterCallback": "write a hook of your own; one report shows the restarts of both layers",
        "NestedRestarterLogger": "leave it out: one report shows the restarts of both layers",
    },
    "tools.inject_fault": {
        "maybe_raise_workload_exception": _RAISE,
        "clear_workload_exception": _RAISE,
        "register_fault": "pass a callback to inject_fault, or break the rank in your own code",
        "dispatch_fault_injection": "call inject_fault",
    },
}
# Attributes of the State from release 0.3 on.
OF_STATE = {
    "fn_exception": "a finalize or health_check hook gets the exception as its second argument",
    "mode": "write state.status",
    "active_rank": "write state.rank; the active ranks are 0 to state.active_world_size - 1",
    "freeze": "leave it out: hooks get the State itself and may change it",
    "copy_from": "change the fields of the State, or return another State",
}
# Parameters of classes that are here.
PARAMETERS = {
    "torch_fr_trace_path": "leave it out: the records have each rank's last collectives",
    "monitor_process_pidfile": "leave it out: the record monitor.started has the pid of each rank's monitor",
}
# What each hook is called with.
_ARGUMENTS = {
    "initialize": "state",
    "abort": "state",
    "finalize": "state, exc",
    "health_check": "state, exc",
    "rank_assignment": "state, terminated_ranks",
    "rank_filter": "state",
    "completion": "state",
    "terminate": "state",
}


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that the module lacks; it says what to write if a later release has the name."""
    names = INSTEAD.get(module.partition("inprocess")[2].removeprefix("."), {})
    return AttributeError(f"module {module!r} has no attribute {name!r}{_advice(names, name)}", name=name)


def missing_in_state(state: object, name: str) -> AttributeError:
    """Return the error for an attribute that a State lacks, with the same advice."""
    sentence = f"{type(state).__name__!r} object has no attribute {name!r}{_advice(OF_STATE, name)}"
    return AttributeError(sentence, name=name, obj=state)


def _advice(names: dict[str, str], name: str) -> str:
    return f": it is of nvidia-resiliency-ext 0.3 or later; {names[name]}" if name in names else ""


def check_signature(option: str, hook: Any) -> None:
    """Check that a hook, or each part of a composed one, can be called as the Wrapper calls it.

    Raises: ConfigurationTypeError."""
    for part in getattr(hook, "instances", (hook,)):
        if part is not hook:
            check_signature(option, part)
            continue
        expected = _ARGUMENTS[option]
        try:
            inspect.signature(part).bind(*expected.split(", "))
        except TypeError:
            raise ConfigurationTypeError(
                f"{option} is {part!r}, which cannot be called with ({expected}); hooks of nvidia-resiliency-ext 0.3 "
                f"and later take one argument, here write def __call__(self, {expected})",
                option=option,
                value=part,
            ) from None
        except ValueError:  # a callable without a signature, such as one written in C
            pass


def advises(construct: Callable[P, None]) -> Callable[P, None]:
    """Return a constructor that refuses parameters of later releases with what to write instead."""

    @functools.wraps(construct)
    def constructor(*values: P.args, **options: P.kwargs) -> None:
        for name in PARAMETERS.keys() & options.keys():
            raise ConfigurationTypeError(
                f"there is no parameter {name!r}{_advice(PARAMETERS, name)}", option=name, value=options[name]
            )
        construct(*values, **options)

    return constructor
