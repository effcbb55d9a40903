"""In the style of a large trainer: every hook is composed, one rank is a spare, and the wrapper is applied late."""

import datetime
import gc
import os
import sys
from datetime import timedelta
from typing import Any

import torch

import resilience.inprocess as inprocess

FAULTS = {0: 1, 1: 0}  # iteration -> rank that fails in it


class Announced(inprocess.abort.Abort):
    """An abort of the user's own, beside torch's."""

    def __call__(self, state: Any) -> Any:
        sys.stderr.write(f"rank {state.rank} aborts\n")
        return state


def clear_caches() -> None:
    gc.collect()


def train(call_wrapper: inprocess.CallWrapper | None = None) -> int:
    assert call_wrapper is not None
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    halves = torch.distributed.new_group(list(range(size)))
    for step in range(4):
        call_wrapper.ping()
        if step == 2 and FAULTS.get(call_wrapper.iteration) == rank:
            raise RuntimeError(f"example fault in step {step}")
        torch.distributed.all_reduce(torch.ones(4), group=halves)
        with call_wrapper.atomic():
            pass  # what must not be cut in two
    sys.stdout.write(f"done in iteration {call_wrapper.iteration} size {size}\n")
    return size


def main() -> None:
    wrapped = inprocess.Wrapper(
        store_kwargs={
            "timeout": timedelta(seconds=60),
            "port": int(os.environ["MASTER_PORT"]) + 2,
            "use_libuv": True,
        },
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(max_iterations=5, min_world_size=2, min_active_world_size=2),
        ),
        abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), Announced()),
        finalize=inprocess.finalize.ThreadedFinalize(timeout=timedelta(seconds=30), fn=clear_caches),
        health_check=inprocess.Compose(
            inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=30)),
            inprocess.health_check.FaultCounter(max_rank_faults=3),
        ),
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.ShiftRanks(),
            inprocess.rank_assignment.FilterGroupedByKey(
                key_or_fn=lambda rank, world_size: rank, condition=lambda count: count == 1, timeout=timedelta(60)
            ),
        ),
        rank_filter=inprocess.Compose(
            inprocess.rank_filter.WorldSizeDivisibleBy(2), inprocess.rank_filter.MaxActiveWorldSize(2)
        ),
        monitor_thread_interval=timedelta(seconds=1),
        monitor_process_interval=timedelta(seconds=1),
        progress_watchdog_interval=timedelta(seconds=1),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        heartbeat_timeout=timedelta(seconds=60),
        barrier_timeout=timedelta(seconds=120),
        completion_timeout=timedelta(seconds=120),
        last_call_wait=timedelta(seconds=1),
        monitor_process_logfile=os.path.join(os.path.abspath(sys.argv[1]), "monitor-{rank}.log"),
    )(train)
    result = wrapped()
    sys.stdout.write(f"result {result}\n")


if __name__ == "__main__":
    main()
