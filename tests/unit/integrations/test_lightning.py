"""The callback in a real Lightning Trainer: what the monitor is told, and when the training is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="Lightning is not installed: pip install torch-resilience[frameworks]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about small data and few workers

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer  # noqa: E402

from resilience.integrations.lightning import FaultToleranceCallback  # noqa: E402
from resilience.integrations.stored_limits import FILE  # noqa: E402
from tests.unit.integrations.faking import FakeClient  # noqa: E402


class Module(LightningModule):
    """One weight. fails_at: the batch at which it does."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("bad batch")
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1)


def trainer(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**settings, **options}, callbacks=callbacks)


def fit(folder: Path, callbacks: list[Callback], module: Module | None = None, **options: Any) -> Trainer:
    made = trainer(folder, callbacks, **options)
    resumed = sorted(folder.glob("*.ckpt"))
    made.fit(module or Module(), data(8), data(2), ckpt_path=resumed[-1] if resumed else None)
    return made


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step:03}", every_n_train_steps=3, save_top_k=-1)


@pytest.fixture
def callback() -> FaultToleranceCallback:
    return FaultToleranceCallback(autoresume=False, calculate_timeouts=True)


def test_hooks_become_sections_and_heartbeats(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    fit(tmp_path, [callback, saving(tmp_path)], max_epochs=1)
    # The sanity check's two batches are part of the setup. So is the first batch's loading: a resumed epoch skips data.
    expected = "init +setup beat beat beat beat"
    for number in range(8):
        expected += (" -setup step 0" if number == 0 else "") + f" +step -step step {number + 1} beat"
        if number % 3 == 2:
            expected += " +checkpoint -checkpoint beat"
    expected += " +validation beat beat -validation beat beat shutdown"
    assert " ".join(told) == expected
    assert not callback.is_initialized


def test_exception_closes_the_sections_and_leaves(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback])
    with pytest.raises(RuntimeError, match="bad batch"):
        made.fit(Module(fails_at=4), data(8), data(2))
    assert told[-5:] == ["step 4", "beat", "+step", "!step", "shutdown"]
    assert "save_checkpoint" not in vars(made)


def test_exception_in_a_validation_is_after_the_step_before_it(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    class Invalid(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 8:
                raise RuntimeError("bad validation batch")

    with pytest.raises(RuntimeError, match="bad validation batch"):
        trainer(tmp_path, [callback]).fit(Invalid(), data(8), data(2))
    assert [each for each in told if each.startswith("step")][-1] == "step 8"  # steps 0 to 7 are done
    assert told[-2:] == ["!validation", "shutdown"]


def test_training_that_skips_data_is_in_its_setup_until_the_first_batch(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    """A loader without a state is asked for all batches that the checkpoint's epoch has had."""
    module = Module(fails_at=5)
    with pytest.raises(RuntimeError, match="bad batch"):
        fit(tmp_path, [callback, saving(tmp_path)], module)
    at_first_batch: list[str] = []

    class Data(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            at_first_batch[:] = at_first_batch or [" ".join(told[told.index("shutdown") :])]
            return super().__getitem__(index)

    made = trainer(tmp_path, [callback], max_epochs=1)
    loader = DataLoader(Data(torch.ones(8, 1)), batch_size=1)
    made.fit(Module(), loader, ckpt_path=tmp_path / "step=003.ckpt")
    assert at_first_batch == ["shutdown init +setup beat"]
    assert told[told.index("-setup", told.index("shutdown")) + 1] == "step 3"


def test_checkpoint_that_fails_closes_its_section(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, [callback, saving(tmp_path)])

    def no_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(made.strategy, "save_checkpoint", no_disk)
    with pytest.raises(OSError, match="disk full"):
        made.fit(Module(), data(8), data(2))
    assert told[-4:] == ["+checkpoint", "!checkpoint", "beat", "shutdown"]


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoint_of_weights_alone_gives_no_limit(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback, weights_only: bool
) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_weights_only=weights_only)
    fit(tmp_path, [callback, saves])
    assert told.count("+checkpoint") == told.count("-checkpoint") > 0
    (one,) = FakeClient.made
    assert any("checkpoint" in names for names, _ in one.calculated) is not weights_only


def test_training_that_the_module_cuts_short_leaves_no_section_open(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    class Skipping(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    fit(tmp_path, [callback], Skipping())
    assert (told.count("+step"), told.count("-step"), told.count("!step")) == (12, 10, 2)
    assert told[told.index("step 5") :][:3] == ["step 5", "beat", "+step"]


def test_limits_are_calculated_kept_and_taken_up_when_the_training_resumes(
    told: list[str], tmp_path: Path, callback: FaultToleranceCallback
) -> None:
    made = trainer(tmp_path, [callback, saving(tmp_path)])
    with pytest.raises(RuntimeError, match="bad batch"):
        made.fit(Module(fails_at=14), data(8), data(2))
    (first,) = FakeClient.made
    assert first.loaded is None and first.calculated_heartbeats == 0
    # After the tenth step, which is past the turn of an epoch.
    assert first.calculated == [(("checkpoint", "step", "validation"), True)]
    kept = (tmp_path / FILE).read_text()

    fit(tmp_path, [callback, saving(tmp_path)], max_epochs=4)
    second = FakeClient.made[1]
    assert second.loaded is not None and str(second.loaded["calculated"]) in kept
    assert told[told.index("shutdown") :].count("step 12") == 1  # from the last checkpoint on
    assert second.calculated[-1] == (("checkpoint", "setup", "step", "validation"), True)
    assert second.calculated_heartbeats > 0


def test_other_stages_are_not_watched(told: list[str], tmp_path: Path, callback: FaultToleranceCallback) -> None:
    made = trainer(tmp_path, [callback])
    made.validate(Module(), data(2), verbose=False)
    assert told == []
    made.save_checkpoint(tmp_path / "by hand.ckpt")
    assert told == []


class Stop(Callback):
    """Asks for the end, as a user's own callback may."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


class PauseTimer(Timer):
    """Its time is that of this start."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("others", "is_finished"),
    [
        ([], True),
        ([Stop()], True),
        ([EarlyStopping("loss", patience=1, min_delta=100.0)], True),
        ([Timer({"hours": 1})], True),
        ([PauseTimer({"hours": 1})], True),
        ([Timer({"seconds": 0})], True),  # its time counts over all starts
        ([PauseTimer({"seconds": 0})], False),
    ],
    ids=["epochs", "stop", "early", "timer", "pause timer", "time over", "pause"],
)
def test_flag_says_whether_there_is_nothing_left_to_resume(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[Callback], is_finished: bool
) -> None:
    flag = tmp_path / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    fit(tmp_path, [FaultToleranceCallback(autoresume=True, calculate_timeouts=False), *others])
    assert flag.exists() is is_finished
    assert told[-1] == "shutdown"


@pytest.mark.usefixtures("told", "stop_requested")
@pytest.mark.parametrize(("others", "is_finished"), [([], True), ([Stop()], False)], ids=["epochs", "stop"])
def test_training_that_stops_with_its_job_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[Callback], is_finished: bool
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    fit(tmp_path, [FaultToleranceCallback(autoresume=True, calculate_timeouts=False), *others])
    assert (tmp_path / "finished").exists() is is_finished


def test_exception_is_no_end(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=False)
    with pytest.raises(RuntimeError, match="bad batch"):
        fit(tmp_path, [callback], Module(fails_at=4))
    assert not (tmp_path / "finished").exists()
    fit(tmp_path, [callback])
    assert (tmp_path / "finished").exists()


def test_start_with_nothing_left_to_do_is_finished_too(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may have ended between its last checkpoint and its flag."""
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    last = ModelCheckpoint(tmp_path)
    fit(tmp_path, [last])
    told.clear()
    fit(tmp_path, [FaultToleranceCallback(autoresume=True, calculate_timeouts=False), last])
    assert "+step" not in told
    assert (tmp_path / "finished").exists()
