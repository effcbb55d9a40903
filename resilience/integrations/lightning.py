"""A callback for Lightning 2: `Trainer(callbacks=[FaultToleranceCallback(...)])`, nothing else changes.

Lightning's hooks show which section a rank is in. There is no hook for the end of a checkpoint. So the callback wraps
`Trainer.save_checkpoint`, which every checkpoint uses, while `fit` runs. Only `fit` is watched. `watching` defines what
each hook does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback, Timer
except ModuleNotFoundError:  # the same package under its other name
    from pytorch_lightning.callbacks import Callback, Timer

from resilience.integrations.simulated import SimulatedFaultParams
from resilience.integrations.watching import CHECKPOINT, STEP, VALIDATION, Watching

__all__ = ["FaultToleranceCallback", "SimulatedFaultParams"]


class FaultToleranceCallback(Callback):  # type: ignore[misc]  # the framework may be absent where types are checked
    """Shows the rank's monitor where the training is; calculates limits and stores them.

    autoresume: once the training is finished, rank 0 creates the file that FAULT_TOL_FINISHED_FLAG_FILE names.
    A training stopped by an exception, by a stop of the job or by a Timer that keeps no state is not finished.
    calculate_timeouts: replace configured limits by calculated ones, stored for the next start.
    simulated_fault_params: a fault with which to try out the consequences. exp_dir: a folder that all ranks can read,
    by default the trainer's `default_root_dir`. logger_name: by default this module's.
    Raises: ConfigurationError."""

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | Path | None = None,
        logger_name: str | None = None,
    ) -> None:
        super().__init__()
        self._watching = Watching(
            autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name or __name__
        )
        self._is_over = False
        self._saves: tuple[Any, Any] | None = None  # the wrapped method, and the wrapper

    @property
    def is_initialized(self) -> bool:
        """Return True if a monitor watches this rank."""
        return self._watching.is_initialized

    # -- beginning and end ----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin the setup. Raises: ConfigurationError."""
        if stage == "fit":
            self._is_over = False
            self._watching.begin(trainer.default_root_dir, trainer.global_rank, trainer.world_size)
            self._wrap(trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note that the training resumes."""
        self._watching.is_resumed = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._watching.validates = trainer.enable_validation
        self._watching.beat()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that the training ended normally."""
        self._is_over = True
        self._watching.complete()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the monitor; all work is done, including the last checkpoints."""
        if stage == "fit":
            self._leave(trainer)
            # If a resumed checkpoint is from the training's end, nothing is left to do, and on_train_end is not called.
            is_over = self._is_over or trainer.fit_loop.done
            if is_over and not any(map(_is_pause, trainer.callbacks)):
                self._watching.write_finished_flag(ends_early=trainer.should_stop)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the monitor: the program's reaction to the exception has no limit."""
        self._leave(trainer)

    # -- on the way -----------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._watching.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._watching.begin_step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._watching.end_step(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.discard(STEP)  # open if the module skipped the rest of the epoch
        self._watching.beat()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:  # part of the setup, and far shorter
            self._watching.open(VALIDATION)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._watching.beat()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.close(VALIDATION)
        self._watching.beat()

    # -- helpers --------------------------------------------------------------------------------

    def _wrap(self, trainer: Any) -> None:
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def watched(*args: Any, **kwargs: Any) -> Any:
            weights_only = args[1] if len(args) > 1 else kwargs.get("weights_only")
            with self._watching.section(CHECKPOINT, is_whole=not weights_only):
                return save(*args, **kwargs)

        self._saves = (vars(trainer).get("save_checkpoint"), watched)
        trainer.save_checkpoint = watched

    def _leave(self, trainer: Any) -> None:
        self._watching.end()
        original, watched = self._saves or (None, None)
        self._saves = None
        if watched is not None and vars(trainer).get("save_checkpoint") is watched:
            if original is None:
                del trainer.save_checkpoint  # so that the class's method is used again
            else:
                trainer.save_checkpoint = original


def _is_pause(callback: Any) -> bool:
    """Return True for a Timer that has expired and keeps no state: it ends this start, not the training."""
    if not isinstance(callback, Timer):
        return False
    remaining = callback.time_remaining()
    return remaining is not None and remaining <= 0 and not callback.state_dict()
