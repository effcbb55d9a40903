"""In the style of the peer's advanced use: model, optimizer and store are made once; the loop alone is wrapped."""

import datetime
import os
import pathlib
import sys

import torch

import resilience.inprocess as inprocess


@inprocess.Wrapper(
    store_kwargs={"port": int(os.getenv("MASTER_PORT", "29500")) + 2},
    health_check=inprocess.health_check.CudaHealthCheck(),
)
def train(
    base_store: torch.distributed.Store,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: pathlib.Path,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.PrefixStore(str(call_wrapper.iteration), base_store)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    replica = torch.nn.parallel.DistributedDataParallel(model)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, 6):
        if step % 2 == 1:
            torch.distributed.barrier()
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                with call_wrapper.atomic():
                    torch.save(state, checkpoint)
        if (step, rank, call_wrapper.iteration) == (4, 1, 0):
            raise RuntimeError(f"example fault in step {step}")
        model.zero_grad()
        replica(torch.rand(4, 4)).square().mean().backward()
        optimizer.step()
    sys.stdout.write(f"done in iteration {call_wrapper.iteration} size {world_size} from step {first}\n")


def main() -> None:
    model = torch.nn.Linear(4, 4)
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    train(store, model, torch.optim.Adam(model.parameters(), lr=1e-5), pathlib.Path(sys.argv[1], "checkpoint.pt"))


if __name__ == "__main__":
    main()
