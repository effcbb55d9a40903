"""The callback in a real transformers Trainer: what the monitor is told, and when the training is finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="not installed: pip install torch-resilience[frameworks]")
pytest.importorskip("accelerate", reason="not installed: pip install torch-resilience[frameworks]")
pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from resilience.integrations.stored_limits import FILE  # noqa: E402
from resilience.integrations.transformers import FaultToleranceCallback  # noqa: E402
from tests.unit.integrations.faking import FakeClient  # noqa: E402


class Model(torch.nn.Module):
    """One weight. fails_at: the call in training at which it does."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.calls += 1
        if self.training and self.calls == self.fails_at:
            raise RuntimeError("bad batch")
        seen = self.layer(x)
        return {"loss": seen.square().mean(), "logits": seen}


DATA = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(8)]


def trainer(folder: Path, callbacks: list[TrainerCallback], model: Model | None = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return Trainer(
        model=model or Model(),
        args=TrainingArguments(**{**settings, **options}),
        train_dataset=DATA,
        eval_dataset=DATA,
        callbacks=callbacks,
    )


@pytest.fixture
def callback() -> FaultToleranceCallback:
    return FaultToleranceCallback(autoresume=False, calculate_timeouts=True)


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The Trainer prints its metrics."""
    yield
    capsys.readouterr()


def test_hooks_become_sections_and_heartbeats(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    trainer(tmp_path, [callback]).train()
    expected = "init +setup -setup step 0"
    for number in range(8):
        expected += f" +step -step step {number + 1} beat"
        if number in (2, 5, 7):
            expected += " +checkpoint -checkpoint beat"
    expected += " beat +validation beat beat -validation beat shutdown"
    assert " ".join(told) == expected
    assert not callback.is_initialized


def test_validation_comes_before_the_checkpoint_of_the_same_step(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=3, max_steps=3).train()
    after = told[told.index("step 3") :]
    expected = "step 3 beat +validation beat beat -validation beat +checkpoint -checkpoint beat beat"
    assert " ".join(after[:11]) == expected


def test_exception_in_a_validation_is_after_the_step_before_it(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    class Invalid(Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if not self.training:
                raise RuntimeError("bad validation batch")
            return super().forward(x, labels)

    with pytest.raises(RuntimeError, match="bad validation batch"):
        trainer(tmp_path, [callback], Invalid(), eval_strategy="steps", eval_steps=3).train()
    assert [each for each in told if each.startswith("step")][-1] == "step 3"  # steps 0 to 2 are done


def test_validations_of_several_datasets_come_before_the_checkpoint(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=3, max_steps=3)
    made.eval_dataset = {"a": DATA, "b": DATA}
    made.train()
    after = told[told.index("step 3") :]
    expected = "step 3 beat +validation beat beat -validation beat +checkpoint !checkpoint"
    expected += " +validation beat beat -validation beat +checkpoint -checkpoint beat beat"
    assert " ".join(after[:18]) == expected


def test_accumulated_parts_are_one_step(told: list[str], tmp_path: Path, callback: FaultToleranceCallback) -> None:
    trainer(tmp_path, [callback], gradient_accumulation_steps=4, max_steps=2).train()
    assert told.count("+step") == told.count("-step") == 2
    between = told[told.index("+step") : told.index("-step")]
    assert between == ["+step", "beat", "beat", "beat"]


def test_checkpoint_that_is_called_off_ends_with_the_next_step(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    class CallOff(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = False

    trainer(tmp_path, [callback, CallOff()], eval_strategy="no", num_train_epochs=2).train()
    assert told.count("+checkpoint") == told.count("!checkpoint") == 6
    after = told[told.index("+checkpoint") :]
    assert after[:3] == ["+checkpoint", "!checkpoint", "+step"]
    (one,) = FakeClient.made
    assert one.calculated == [(("step",), False)] * len(one.calculated) != []


def test_exception_that_the_program_survives_needs_a_word(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback], Model(fails_at=5))
    with pytest.raises(RuntimeError, match="bad batch"):
        made.train()
    assert told[-3:] == ["step 4", "beat", "+step"]
    callback.close()
    assert told[-2:] == ["!step", "shutdown"]


def test_training_again_after_an_exception_begins_anew(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback], Model(fails_at=5))
    with pytest.raises(RuntimeError, match="bad batch"):
        made.train()
    made.train()
    assert told.count("init") == told.count("shutdown") == 2
    assert told[told.index("shutdown") - 1] == "!step"


def test_limits_are_calculated_kept_and_taken_up_when_the_training_resumes(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    with pytest.raises(RuntimeError, match="bad batch"):
        trainer(tmp_path, [callback], Model(fails_at=15), num_train_epochs=2).train()
    (first,) = FakeClient.made
    assert first.loaded is None and first.calculated_heartbeats == 0
    assert first.calculated == [(("checkpoint", "step", "validation"), False)]
    assert (tmp_path / FILE).exists()

    trainer(tmp_path, [callback], num_train_epochs=4).train(resume_from_checkpoint=True)
    second = FakeClient.made[1]
    assert second.loaded is not None
    assert told[told.index("init", 1) :].count("step 12") == 1  # from the last checkpoint on
    # The Trainer may load the best model before it reports its end: no limit outside of sections covers that.
    assert second.calculated[-1] == (("checkpoint", "setup", "step", "validation"), False)
    assert second.calculated_heartbeats == 0


def test_trainer_that_only_predicts_is_not_watched(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback])
    made.evaluate()
    assert told == ["init", "+setup", "!setup", "shutdown"]
    made.train()
    assert told[4:6] == ["init", "+setup"]


def test_each_of_two_trainers_is_watched_while_it_trains(told: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    callbacks = [FaultToleranceCallback(autoresume=False, calculate_timeouts=False) for _ in range(2)]
    trainers = [trainer(tmp_path / str(number), [callbacks[number]], **options) for number in range(2)]
    for each in reversed(trainers):
        told.clear()
        each.train()
        assert told[told.index("step 0") - 1] == "-setup" and told[-1] == "shutdown"
        assert told.count("+step") == told.count("-step") == 2


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize("others", [[], [Stop()]], ids=["epochs", "stop"])
def test_end_in_order_is_flagged(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[TrainerCallback]
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    trainer(tmp_path, [FaultToleranceCallback(autoresume=True, calculate_timeouts=False), *others]).train()
    assert (tmp_path / "finished").exists()


@pytest.mark.usefixtures("told", "stop_requested")
@pytest.mark.parametrize(("others", "is_finished"), [([], True), ([Stop()], False)], ids=["epochs", "stop"])
def test_training_that_stops_with_its_job_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[TrainerCallback], is_finished: bool
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    trainer(tmp_path, [FaultToleranceCallback(autoresume=True, calculate_timeouts=False), *others]).train()
    assert (tmp_path / "finished").exists() is is_finished


def test_exception_is_no_end(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=False)
    with pytest.raises(RuntimeError, match="bad batch"):
        trainer(tmp_path, [callback], Model(fails_at=5)).train()
    assert not (tmp_path / "finished").exists()
