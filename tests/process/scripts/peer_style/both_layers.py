"""In the style of the peer's example of both layers: a rank monitor's client is attached anew in every iteration, and
its state is part of the checkpoint."""

import os
import pathlib
import signal
import sys
import time

import torch

import resilience.fault_tolerance as fault_tolerance
import resilience.inprocess as inprocess


def fail(how: str, step: int) -> None:
    if how == "exc":
        raise RuntimeError(f"example fault in step {step}")
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600.0)  # how == "sleep"


@inprocess.Wrapper(
    store_kwargs={"port": int(os.getenv("MASTER_PORT", "29500")) + 2},
    health_check=inprocess.health_check.CudaHealthCheck(),
)
def train(
    client: fault_tolerance.RankMonitorClient,
    base_store: torch.distributed.Store,
    checkpoint: pathlib.Path,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if client.is_initialized:
        client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(str(call_wrapper.iteration), base_store),
        rank=rank,
        world_size=world_size,
    )
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        client.load_state_dict(state["client"])
        first = state["step"]
    for step in range(first, 4):
        if step == 1:
            torch.distributed.barrier()
            if rank == 0:
                with call_wrapper.atomic():
                    part = checkpoint.with_suffix(".part")  # the launcher may end this worker at any moment
                    torch.save({"client": client.state_dict(), "step": step}, part)
                    part.replace(checkpoint)
        failed = checkpoint.with_name("failed")  # the launcher's new worker does not fail again
        if (step, rank) == (2, 1) and not failed.exists():
            failed.touch()
            fail(sys.argv[2], step)
        torch.distributed.all_reduce(torch.ones(4))
        client.send_heartbeat()
    sys.stdout.write(f"done in iteration {call_wrapper.iteration} size {world_size} from step {first}\n")


def main() -> None:
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
    )
    client = fault_tolerance.RankMonitorClient()
    try:
        train(client, store, pathlib.Path(sys.argv[1], "checkpoint.pt"))
    finally:
        if client.is_initialized:
            client.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
