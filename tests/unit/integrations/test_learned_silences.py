"""Hangs are noticed by default in a training that a callback reports: its silences are those of the training.

The callbacks are called as their frameworks call them, beside a page that a monitor reads, on a virtual clock. Where a
framework is not installed, an empty class stands for the callback's base class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from resilience.core.observation import Doing
from resilience.core.silences import FACTOR, START
from resilience.facts.limits import Limits, Rule
from resilience.facts.seats import Seat
from resilience.monitor import client, connect, messages
from resilience.monitor import page as page_module
from resilience.monitor.listening import Listener
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.system.channel import pair

STEP, BATCH, CHECKPOINT, EPOCH = 0.5, 6.0, 40.0, 20.0  # seconds; a batch of a validation; the turn of an epoch
EPOCHS, STEPS, BATCHES = 6, 10, 3
BASES = {
    "transformers": {"transformers": (), "transformers.trainer_callback": ("TrainerCallback",)},
    "lightning": {
        "lightning": (),
        "lightning.pytorch": (),
        "lightning.pytorch.callbacks": ("Callback", "Timer"),
    },
}


class Watched:
    """A rank beside its monitor. limits: the last limit of each kind of silence, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.limits: dict[str, float] = {}
        page = Page.create()
        self.page, self._monitor = RankSide(page), MonitorSide(page)
        self._listener = Listener()

    def begin(self) -> None:
        self.page.set_seat(Seat(0, 0, 1, 1, iteration=0))
        self.page.doing(Doing.FUNCTION)

    def work(self, seconds: float) -> None:
        """Let time pass. The monitor looks every few seconds."""
        until = self.now + seconds
        while self.now < until:
            self._look()
            self.now = min(until, self.now + 5.0)

    def _look(self) -> None:
        finished, _ = self._monitor.drain()
        view = self._monitor.read()
        self._listener.take(finished, view, is_healthy=True)
        silence = self._listener.silence(Rule(), view.since)
        if silence is not None:
            self.limits[silence.kind] = silence.allowed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched()
    clock = SimpleNamespace(monotonic_ns=lambda: round(made.now * 1e9), monotonic=lambda: made.now)
    monkeypatch.setattr(page_module, "time", clock)
    made.begin()
    ours, theirs = pair()
    link = connect.WorkerLink(made.page, ours, messages.Welcome(rank=0, world_size=1, limits=Limits()))
    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.setattr(connect, "attach", lambda: link)
    monkeypatch.setattr(client, "_page", made.page)
    yield made
    ours.close()
    theirs.close()


def callback(framework: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a callback for a framework, whether it is installed or not."""
    name = f"resilience.integrations.{framework}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        for base, classes in BASES[framework].items():
            module = ModuleType(base)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            monkeypatch.setitem(sys.modules, base, module)
        module = importlib.import_module(name)
        del sys.modules[name]  # its base is none of the framework's
    return module.FaultToleranceCallback(autoresume=False, calculate_timeouts=False)


def transformers(watched: Watched, hooks: Any, folder: Path) -> None:
    """Train as the Trainer of transformers does: hooks report the end of a batch and of a save, not the beginning."""
    args = SimpleNamespace(output_dir=str(folder), process_index=0, world_size=1, eval_strategy="epoch")
    state, control = SimpleNamespace(global_step=0, max_steps=EPOCHS * STEPS), SimpleNamespace()
    context = (args, state, control)
    hooks.on_init_end(*context)
    watched.work(60.0)
    hooks.on_train_begin(*context)
    for _ in range(EPOCHS):
        control.should_save = control.should_evaluate = False
        hooks.on_epoch_begin(*context)
        watched.work(EPOCH)
        for _ in range(STEPS):
            hooks.on_step_begin(*context)
            watched.work(STEP)
            state.global_step += 1
            hooks.on_step_end(*context)
        control.should_save = control.should_evaluate = True
        hooks.on_epoch_end(*context)
        for _ in range(BATCHES):
            watched.work(BATCH)
            hooks.on_prediction_step(*context)
        hooks.on_evaluate(*context)
        watched.work(CHECKPOINT)
        hooks.on_save(*context)
    hooks.on_train_end(*context)


def lightning(watched: Watched, hooks: Any, folder: Path) -> None:
    """Train as the Trainer of Lightning does."""
    trainer = SimpleNamespace(
        default_root_dir=str(folder),
        global_rank=0,
        world_size=1,
        global_step=0,
        enable_validation=True,
        sanity_checking=False,
        should_stop=False,
        callbacks=[hooks],
        fit_loop=SimpleNamespace(done=True),
        save_checkpoint=lambda path: watched.work(CHECKPOINT),
    )
    hooks.setup(trainer, None, "fit")
    watched.work(60.0)
    hooks.on_train_start(trainer, None)
    for _ in range(EPOCHS):
        hooks.on_train_epoch_start(trainer, None)
        watched.work(EPOCH)
        for number in range(STEPS):
            hooks.on_train_batch_start(trainer, None, None, number)
            watched.work(STEP)
            trainer.global_step += 1
            hooks.on_train_batch_end(trainer, None, None, None, number)
        hooks.on_validation_start(trainer, None)
        for _ in range(BATCHES):
            watched.work(BATCH)
            hooks.on_validation_batch_end(trainer, None)
        hooks.on_validation_end(trainer, None)
        trainer.save_checkpoint("last.ckpt")
        hooks.on_train_epoch_end(trainer, None)
    hooks.on_train_end(trainer, None)
    hooks.teardown(trainer, None, "fit")


@pytest.mark.parametrize("train", [transformers, lightning])
def test_limits_of_a_training_are_learned_from_its_steps_validations_and_checkpoints(
    train: Callable[[Watched, Any, Path], None], watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(watched, callback(train.__name__, monkeypatch), tmp_path)
    rule = Rule()
    assert watched.limits == {
        "setup": START * rule.first,  # before the first step
        "step": rule.first,  # no step has paused: the first recompilation may come
        "validation": FACTOR * BATCH,
        "checkpoint": FACTOR * CHECKPOINT,
        "": FACTOR * EPOCH,
    }
