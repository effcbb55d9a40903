"""Trains a small model on every worker of a Slurm job, with a checkpoint to resume from.

    sbatch examples/slurm/job.sbatch examples/slurm/train.py --steps 200 --checkpoint /shared/model.pt

The batch of a step depends on the step alone, so a job that lost a node ends with about the same model."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import resilience


def save(path: Path, model: torch.nn.Module, step: int) -> None:
    """Replace the checkpoint as a whole."""
    beside = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "step": step}, beside)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("model.pt"))
    parser.add_argument("--step-time", type=float, default=0.02)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    start = 0
    if options.checkpoint.exists():
        kept = torch.load(options.checkpoint)
        model.load_state_dict(kept["model"])
        start = kept["step"]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        resilience.step(step)
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.data -= 0.05 * weight.grad / dist.get_world_size()
        time.sleep(options.step_time)
        is_asked = torch.tensor([float(resilience.stop_requested())])
        dist.all_reduce(is_asked)  # all ranks leave at the same step
        if dist.get_rank() == 0 and (step % 10 == 9 or is_asked):
            save(options.checkpoint, model, step + 1)
        if is_asked:
            print(f"rank {dist.get_rank()} stops after step {step}", flush=True)
            return
    if dist.get_rank() == 0:
        print(f"done: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
