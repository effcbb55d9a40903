"""In the style of the peer's example for nested restarters: wrapped late, at MASTER_PORT + 1, with hooks at the end."""

import os
import pathlib
import sys
from typing import Any

import torch

import resilience.inprocess as inprocess


class Noted(inprocess.nested_restarter.NestedRestarterFinalized):
    """Notes on which rank the call has completed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __call__(self, state: Any) -> Any:
        pathlib.Path(self.folder, f"completed-{state.initial_rank}").touch()
        return super().__call__(state)


def train(
    base_store: torch.distributed.Store,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.PrefixStore(str(call_wrapper.iteration), base_store)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        if (step, rank, call_wrapper.iteration) == (2, 1, 0):
            raise RuntimeError(f"example fault in step {step}")
        model.zero_grad()
        replica(torch.rand(4, 4)).square().mean().backward()
        optimizer.step()
    sys.stdout.write(f"done in iteration {call_wrapper.iteration} size {world_size}\n")


def main() -> None:
    model = torch.nn.Linear(4, 4)
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 2,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    options: dict[str, Any] = {
        "store_kwargs": {"port": int(os.getenv("MASTER_PORT", "29500")) + 1},
        "health_check": inprocess.health_check.CudaHealthCheck(),
    }
    nested = inprocess.nested_restarter
    options["initialize"] = nested.NestedRestarterHandlingCompleted()
    options["abort"] = inprocess.Compose(
        inprocess.abort.AbortTorchDistributed(), nested.NestedRestarterHandlingStarting()
    )
    options["completion"] = Noted(sys.argv[1])
    options["terminate"] = nested.NestedRestarterAborted()
    inprocess.Wrapper(**options)(train)(store, model, torch.optim.Adam(model.parameters(), lr=1e-5))


if __name__ == "__main__":
    main()
