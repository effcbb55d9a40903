"""scikit-learn's digits under Lightning; a checkpoint at the end of each epoch, from the newest of which it resumes.

python lightning_digits.py FOLDER [crash|kill|hang]     the fault happens once, on rank 1 in its third epoch"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from misbehaving import fail_once
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from resilience.integrations.lightning import FaultToleranceCallback

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
EPOCHS, BATCH = 4, 64


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, numbers = batch
        return torch.nn.functional.cross_entropy(self.model(images), numbers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, numbers = batch
        right = (self.model(images).argmax(1) == numbers).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Fault(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"starts at step {trainer.global_step}", flush=True)

    def on_before_zero_grad(self, trainer: Trainer, *args: Any) -> None:  # within a step
        if trainer.current_epoch == 2 and trainer.global_rank == 1:
            fail_once(FAULT, FOLDER)


def main() -> None:
    seed_everything(0)
    images, numbers = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(numbers))
    train, rest = torch.utils.data.random_split(data, [1280, len(data) - 1280], torch.Generator().manual_seed(0))
    trainer = Trainer(
        default_root_dir=FOLDER,
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            FaultToleranceCallback(autoresume=True, calculate_timeouts=True),
            Fault(),
            ModelCheckpoint(FOLDER / "checkpoints", save_last=True),
        ],
    )
    module = Digits()
    trainer.fit(module, DataLoader(train, BATCH, shuffle=True), DataLoader(rest, BATCH), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"ends at step {trainer.global_step}", flush=True)
        weights = torch.cat([weight.flatten() for weight in module.parameters()])
        print(f"weights {weights.double().sum().item():.6f}", flush=True)
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.3f}", flush=True)


if __name__ == "__main__":
    main()
