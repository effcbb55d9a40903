"""Each name, parameter and default of the compatible API's two-argument-hook generation, as its release 0.2.1 has them.

The table is that API's, written out; ours may have further parameters at the end, with defaults."""

from __future__ import annotations

import enum
import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest

SECONDS = timedelta(seconds=1)
BARRIER = "rank, group_name, rendezvous_count, timeout, timeout_chunk=None"

PARAMETERS = {
    "Wrapper": "store_factory=TCPStore, store_kwargs=None, initialize=None, abort=AbortTorchDistributed(), "
    "finalize=None, health_check=None, rank_assignment=ShiftRanks(), rank_filter=None, monitor_thread_interval=1 s, "
    "monitor_process_interval=1 s, progress_watchdog_interval=1 s, soft_timeout=60 s, hard_timeout=90 s, "
    "heartbeat_timeout=30 s, barrier_timeout=120 s, completion_timeout=120 s, last_call_wait=1 s, "
    "termination_grace_time=5 s, monitor_process_logfile=None, enabled=True",
    "CallWrapper.ping": "",
    "CallWrapper.atomic": "",
    "Compose": "*instances",
    "abort.AbortTorchDistributed": "",
    "attribution.InterruptionRecord": "rank, interruption",
    "finalize.ThreadedFinalize": "timeout, fn, args=(), kwargs=None",
    "health_check.CudaHealthCheck": "timeout=30 s",
    "health_check.FaultCounter": "max_rank_faults=None",
    "initialize.RetryController": "max_iterations=None, min_world_size=1, min_active_world_size=1",
    "monitor_thread.async_raise": "tid, exc_type, event=None",
    "monitor_thread.reraise_if_unraisable": "exc_type",
    "rank_assignment.ShiftRanks": "",
    "rank_assignment.FillGaps": "",
    "rank_assignment.FilterGroupedByKey": "key_or_fn, condition, timeout=60 s",
    "rank_filter.MaxActiveWorldSize": "max_active_world_size=None",  # there it has no default
    "rank_filter.WorldSizeDivisibleBy": "divisor=1",
    "state.State.set_distributed_vars": "",
    "state.State.activate_all_ranks": "",
    "state.State.advance": "",
    "store.TCPStore": "host_name=None, port=None, world_size=None, timeout=300 s, wait_for_workers=True, "
    "multi_tenant=False, use_libuv=True",
    "store.PrefixStore": "iteration, store",
    "store.StoreMixin.set_initial_rank": "rank, initial_rank",
    "store.StoreMixin.get_initial_rank": "rank",
    "store.StoreMixin.barrier": BARRIER,
    **{
        f"store.StoreMixin.{name}_barrier": BARRIER.replace("group_name", f"group_name='{name}_barrier'")
        for name in ("initial", "iteration", "completion", "termination")
    },
    "store.StoreMixin.record_interrupted": "record=None",
    "store.StoreMixin.record_completed": "",
    "store.StoreMixin.is_any_rank_completed": "",
    "store.StoreMixin.record_terminated_rank": "rank",
    "store.StoreMixin.get_terminated_ranks": "",
    "store.StoreMixin.record_base_terminated_rank": "rank",
    "store.StoreMixin.get_base_terminated_count": "",
    "tools.inject_fault.inject_fault": "faults, num_faults, keep_alive, delay, seed, callback=None",
}
MEMBERS = {
    "attribution.Interruption": "EXCEPTION BASE_EXCEPTION SOFT_TIMEOUT HARD_TIMEOUT TERMINATED UNRESPONSIVE "
    "MONITOR_PROCESS_EXCEPTION",
    "state.Status": "INITIALIZED ACTIVE INACTIVE ABORTING ABORTED",
    "tools.inject_fault.Fault": "GPU GPU_SLEEP ASYNC_EXC SIGNAL_EXC ABORT GIL SEGFAULT INT KILL TERM STOP",
}
BASES = {
    "exception.RestartError": "Exception",
    "exception.RestartAbort": "BaseException",
    "exception.HealthCheckError": "RestartError",
    "exception.InternalError": "RestartError",
    "exception.TimeoutError": "RestartError",
    "health_check.FaultCounterExceeded": "RestartError",
    "monitor_thread.RankShouldRestart": "BaseException",
    "rank_assignment.RankDiscarded": "RestartError",
    "tools.inject_fault.InjectedException": "Exception",
    "store.BarrierError": "RestartError",
    "store.BarrierTimeout": "BarrierError",
    "store.BarrierOverflow": "BarrierError",
    "abort.AbortTorchDistributed": "Abort",
    "finalize.ThreadedFinalize": "Finalize",
    "health_check.CudaHealthCheck": "HealthCheck",
    "health_check.FaultCounter": "HealthCheck",
    "initialize.RetryController": "Initialize",
    "rank_assignment.ShiftRanks": "RankAssignment",
    "rank_assignment.FillGaps": "RankAssignment",
    "rank_assignment.FilterGroupedByKey": "RankAssignment",
    "rank_filter.MaxActiveWorldSize": "RankFilter",
    "rank_filter.WorldSizeDivisibleBy": "RankFilter",
    "store.TCPStore": "StoreMixin",
    "store.FileStore": "StoreMixin",
    "store.PrefixStore": "StoreMixin",
}
ATTRIBUTES = {
    "CallWrapper": "iteration state store",
    "state.State": "rank initial_rank world_size active_world_size initial_world_size iteration status store",
    "store.StoreMixin": "critical_ranks",
}


def named(path: str) -> Any:
    """Return what the path names below resilience.inprocess."""
    *names, last = path.split(".")
    modules = [name for name in names if name.islower()]
    value = importlib.import_module(".".join(["resilience.inprocess", *modules]))
    for name in [*names[len(modules) :], last]:
        value = getattr(value, name)
    return value


def shown(parameter: inspect.Parameter) -> str:
    """Return a parameter as the table has it."""
    default = parameter.default
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if default is parameter.empty:
        return parameter.name
    if isinstance(default, timedelta):
        text = f"{default / SECONDS:g} s"
    elif inspect.isclass(default):
        text = default.__name__
    else:
        text = f"{type(default).__name__}()" if type(default).__module__.startswith("resilience.") else repr(default)
    return f"{parameter.name}={text}"


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_and_defaults_are_those_of_the_api(path: str) -> None:
    ours = [each for each in inspect.signature(named(path)).parameters.values() if each.name != "self"]
    theirs = PARAMETERS[path].split(", ") if PARAMETERS[path] else []
    assert [shown(each) for each in ours[: len(theirs)]] == theirs
    assert all(each.default is not each.empty for each in ours[len(theirs) :])


@pytest.mark.parametrize("path", MEMBERS)
def test_members_are_those_of_the_api(path: str) -> None:
    kind = named(path)
    assert issubclass(kind, enum.Enum)
    assert [member.name for member in kind] == MEMBERS[path].split()  # without aliases


@pytest.mark.parametrize("path", BASES)
def test_class_is_of_the_kind_that_the_api_says(path: str) -> None:
    assert BASES[path] in [base.__name__ for base in named(path).__mro__]


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_attributes_are_those_of_the_api(path: str) -> None:
    kind = named(path)
    fields = [*dir(kind), *getattr(kind, "__dataclass_fields__", {}), *inspect.signature(kind).parameters]
    assert [name for name in ATTRIBUTES[path].split() if name not in fields] == []
