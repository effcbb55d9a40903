"""A callback for transformers: `Trainer(callbacks=[FaultToleranceCallback(...)])`, nothing else changes.

A Trainer tells its callbacks when a validation or a checkpoint ends, not when it begins. Here a validation begins with
its first batch, and a checkpoint when the training's control flow requests it. The setup begins with the Trainer's
construction. A Trainer that predicts without training is not watched.

A Trainer does not report exceptions. An exception ends the process, or else the code that catches it calls
`callback.close()`; a further `train()` begins again. `watching` defines what each hook does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from resilience.integrations.simulated import SimulatedFaultParams
from resilience.integrations.watching import CHECKPOINT, STEP, VALIDATION, Watching

__all__ = ["FaultToleranceCallback", "SimulatedFaultParams"]


class FaultToleranceCallback(TrainerCallback):  # type: ignore[misc]  # may be absent where types are checked
    """Shows the rank's monitor where the training is; calculates limits and stores them.

    autoresume: once the training is finished, rank 0 creates the file that FAULT_TOL_FINISHED_FLAG_FILE names.
    A training that stops early with its job is not finished.
    calculate_timeouts: replace configured limits of sections by calculated ones, stored for the next start.
    simulated_fault_params: a fault with which to try out the consequences. exp_dir: a folder that all ranks can read,
    by default `output_dir`. logger_name: by default this module's. Raises: ConfigurationError."""

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | Path | None = None,
        logger_name: str | None = None,
    ) -> None:
        self._watching = Watching(
            autoresume,
            calculate_timeouts,
            simulated_fault_params,
            exp_dir,
            logger_name or __name__,
            reports_its_end=False,  # before on_train_end it loads the best model and deletes checkpoints
        )
        self._is_training = False

    @property
    def is_initialized(self) -> bool:
        """Return True if a monitor watches this rank."""
        return self._watching.is_initialized

    def close(self) -> None:
        """Leave the monitor: no limit applies any more. For a program that continues after `train()` has raised."""
        self._is_training = False
        self._watching.end()

    # -- beginning and end ----------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the setup. Raises: ConfigurationError."""
        self._is_training = False
        self._watching.begin(args.output_dir, args.process_index, args.world_size)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_training or not self._watching.has_begun:  # a further start, after an exception or a training
            self._watching.begin(args.output_dir, args.process_index, args.world_size)
        self._is_training = True
        self._watching.is_resumed = state.global_step > 0
        self._watching.validates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the training ended normally."""
        self._watching.complete()
        self._is_training = False
        self._watching.write_finished_flag(ends_early=state.global_step < state.max_steps)

    # -- on the way -----------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.discard(VALIDATION, CHECKPOINT)  # no hook reported their end: a later callback called them off
        self._watching.begin_step(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.end_step(state.global_step)
        self._maybe_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.discard(STEP)  # open if the epoch stopped within a step
        self._watching.beat()
        self._maybe_save(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_training:
            self._watching.discard(CHECKPOINT)  # it comes after the validation of a further dataset
            self._watching.open(VALIDATION)
            self._watching.beat()
        else:
            self._watching.end()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_training:
            self._watching.close(VALIDATION)
            self._watching.beat()
            if control.should_save:
                self._watching.open(CHECKPOINT)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watching.close(CHECKPOINT)
        self._watching.beat()

    def _maybe_save(self, control: Any) -> None:
        if control.should_save and not control.should_evaluate:  # else the validation comes first
            self._watching.open(CHECKPOINT)
