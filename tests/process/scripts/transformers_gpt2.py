"""A tiny GPT-2 with fresh weights under transformers' Trainer; it resumes from its newest checkpoint.

python transformers_gpt2.py FOLDER [crash|kill|hang]     the fault happens once, on rank 1 after 25 steps"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from misbehaving import fail_once
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from resilience.integrations.transformers import FaultToleranceCallback

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
STEPS, WORDS, LENGTH = 40, 64, 16


class Fault(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(f"starts at step {state.global_step}", flush=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # within a step
        if state.global_step == 25 and args.process_index == 1:
            fail_once(FAULT, FOLDER)


def texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards, which is learned soon."""
    starts = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(FOLDER / "checkpoints"),
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=texts(256, 0),
        eval_dataset=texts(64, 1),
        callbacks=[FaultToleranceCallback(autoresume=True, calculate_timeouts=True, exp_dir=FOLDER), Fault()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(FOLDER / "checkpoints")))
    if trainer.is_world_process_zero():
        print(f"ends at step {trainer.state.global_step}", flush=True)
        weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        print(f"weights {weights.double().sum().item():.6f}", flush=True)


if __name__ == "__main__":
    Path(FOLDER / "checkpoints").mkdir(parents=True, exist_ok=True)
    main()
