"""In the style of the peer's simplest use: all of main is wrapped, and builds everything anew, its own store too."""

import argparse
import datetime
import os
import sys

import torch

import resilience.inprocess as inprocess


@inprocess.Wrapper(
    store_kwargs={"port": int(os.getenv("MASTER_PORT", "29500")) + 2},
    health_check=inprocess.health_check.CudaHealthCheck(),
)
def main(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    # Beside MASTER_PORT, whose store the launcher or the wrapper hosts.
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=world_size,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    torch.distributed.init_process_group(
        backend="gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for step in range(arguments.steps):
        if (step, rank, call_wrapper.iteration) == (3, 1, 0):
            raise RuntimeError(f"example fault in step {step}")
        model.zero_grad()
        model(torch.rand(4, 4)).square().mean().backward()
        optimizer.step()
    sys.stdout.write(f"done in iteration {call_wrapper.iteration} size {world_size}\n")


if __name__ == "__main__":
    main()
