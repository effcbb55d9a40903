"""What do the callbacks of training frameworks share?  A rank that is watched while it trains.

A framework's hooks say which section begins or ends, that a step is done, that the training ended in order;
here that becomes signs of life, limits that are calculated and kept in a file for the next start, and the
finished-flag file by which a script knows that there is nothing left to resume. Sections are `setup`,
`step`, `validation` and `checkpoint`.

A limit is calculated only from what is as long as it will get: that of the setup once a checkpoint was
loaded in it, those of heartbeats and of the time between sections once a checkpoint, a validation and the
turn of an epoch were seen as far as the job has them. Until then what is configured holds. A rank without a
monitor trains on unwatched; then no rank calculates."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from resilience.adapters import environment, files, maxima
from resilience.core import encoding
from resilience.errors import ConfigurationError, RankMonitorClientError
from resilience.integrations import simulated
from resilience.monitor import client
from resilience.monitor.rank_client import RankMonitorClient

SETUP, STEP, VALIDATION, CHECKPOINT = SECTIONS = ("setup", "step", "validation", "checkpoint")
FILE = "resilience-timeouts.json"
FEWEST_STEPS = 10  # optimizer steps before the first calculation: one alone says little of the others


class Watching:
    """A rank's training under its monitor. Created unused: what a callback is copied for has no monitor yet.

    autoresume: at the end in order, rank 0 writes the file that FAULT_TOL_FINISHED_FLAG_FILE names.
    calculate_timeouts: limits are calculated, kept in `folder`, and loaded from there at the next start.
    Raises: ConfigurationError."""

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: simulated.SimulatedFaultParams | Mapping[str, Any] | None,
        folder: str | Path | None,
        logger_name: str,
    ) -> None:
        self.is_resumed = False  # a checkpoint was loaded
        self.validates = False  # there will be validations
        self._autoresume = autoresume
        self._calculates = calculate_timeouts
        self._fault = simulated.parsed(simulated_fault_params)
        self._folder = folder
        self._logger = logging.getLogger(logger_name)
        self._rank = 0
        self._client: RankMonitorClient | None = None
        self._has_begun = False
        self._timer: Timer | None = None
        self._open: dict[str, bool] = {}  # sections; whether the monitor was shown that it is open
        self._forget()

    def _forget(self) -> None:
        self._closed: set[str] = set()  # names of sections that were seen
        self._epochs = 0
        self._first_step: int | None = None
        self._steps = 0
        self._is_due = True

    @property
    def has_begun(self) -> bool:
        """Whether a training goes on, watched or not."""
        return self._has_begun

    @property
    def is_initialized(self) -> bool:
        """Whether a monitor watches."""
        return self._client is not None

    # -- beginning and end ----------------------------------------------------------------------

    def begin(self, folder: str | Path, rank: int, world_size: int) -> None:
        """Attach to the monitor; the setup begins. folder: where limits are kept unless told otherwise.

        Raises: ConfigurationError if the finished flag has no path."""
        self.end()
        if self._autoresume and environment.finished_flag_file() is None:
            raise ConfigurationError(
                "autoresume=True and FAULT_TOL_FINISHED_FLAG_FILE is not set; set it to a file that the job script "
                "looks for, or pass autoresume=False"
            )
        self._forget()
        self._has_begun = True
        self._rank = rank
        self._folder = self._folder or folder
        if environment.monitor_socket() is None:
            self._say("hangs are not looked for: the script was not started by `resilience run`")
        else:
            self._attach()
        if self._fault is not None:
            self._timer = simulated.schedule(self._fault, rank, world_size)
        self.open(SETUP)

    def end(self) -> None:
        """Close what is open and leave: no limit holds from now on. Nothing, if that was done."""
        self._has_begun = False
        self.is_resumed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        made, self._client = self._client, None
        self._open.clear()
        if made is not None and made.is_initialized:
            made.end_all_sections()
            made.shutdown_workload_monitoring()

    def complete(self) -> None:
        """The training ended in order. Limits are calculated a last time, and none holds from now on: what
        a program does after its training is unlike all that was seen. A collective."""
        if self._has_begun:
            self._calculate(is_last=True)
            self.end()

    def write_finished_flag(self) -> None:
        """Tell the job script that there is nothing left to resume. Raises: OSError."""
        path = environment.finished_flag_file()
        if self._autoresume and path is not None and self._rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
            self._say(f"the training is finished; {path} says so")

    def _attach(self) -> None:
        made = RankMonitorClient()
        try:
            if self._calculates:
                self._load(made)
            made.init_workload_monitoring()
        except RankMonitorClientError as error:
            self._logger.warning("rank %d trains without a monitor: %s", self._rank, error)
        else:
            self._client = made

    # -- signs of life --------------------------------------------------------------------------

    def open(self, name: str) -> None:
        """Open a section; nothing, if it is open already."""
        if name in self._open:
            return
        self._open[name] = False
        if self._client is not None:
            try:
                self._client.start_section(name)
            except RankMonitorClientError as error:  # the program has one of this name; training goes on
                self._logger.warning("section %r is not watched this time: %s", name, error)
            else:
                self._open[name] = True

    def close(self, *names: str) -> None:
        """Close sections, those that are open."""
        for name in names:
            if name not in self._open:
                continue
            is_shown = self._open.pop(name)
            self._closed.add(name)
            self._is_due |= name in (VALIDATION, CHECKPOINT)
            if self._client is not None and is_shown:
                try:
                    self._client.end_section(name)
                except RankMonitorClientError:
                    pass  # the program has closed all sections

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A section, and a sign of life at its end."""
        self.open(name)
        try:
            yield
        finally:
            self.close(name)
            self.beat()

    def beat(self) -> None:
        """Show life."""
        if self._client is not None:
            self._client.send_heartbeat()

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._epochs += 1

    def begin_step(self, number: int) -> None:
        """A step begins, or a part of one. number: of optimizer steps that were done before, in all starts."""
        if self._first_step is None:
            self._first_step = number
        self._steps = number - self._first_step
        client.step(number)
        self.open(STEP)

    def end_step(self) -> None:
        """A step, or a part of one, is done. From time to time limits are calculated. A collective."""
        self.close(STEP)
        self.beat()
        if self._is_due and self._steps >= FEWEST_STEPS:
            self._is_due = False
            self._calculate()

    # -- limits ---------------------------------------------------------------------------------

    def _calculate(self, is_last: bool = False) -> None:
        """Calculate the limits that can be, and keep them. A collective: what decides is the same on all ranks."""
        if not self._calculates or environment.monitor_socket() is None:
            return
        if maxima.over_ranks({"unwatched": float(self._client is None)})["unwatched"] or self._client is None:
            return
        is_complete = self._closed >= {CHECKPOINT} and (not self.validates or VALIDATION in self._closed)
        names = {STEP} if self._steps >= FEWEST_STEPS else set()
        names |= self._closed & ({SETUP, VALIDATION, CHECKPOINT} if self.is_resumed else {VALIDATION, CHECKPOINT})
        has_outside = is_complete and (is_last or self._epochs > 1)
        if names:
            self._client.calculate_and_set_section_timeouts(sorted(names), has_outside, skip_if_not_ready=True)
        if is_complete and self.is_resumed:
            self._client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        if self._rank == 0:
            self._keep(self._client)

    @property
    def _path(self) -> Path | None:
        """Where limits are kept; None where the folder is none, such as that of an object store."""
        return None if self._folder is None or "://" in str(self._folder) else Path(self._folder) / FILE

    def _keep(self, made: RankMonitorClient) -> None:
        path = self._path
        state = made.state_dict()
        if path is None or not files.replace(path, encoding.to_json_page(state)):
            self._logger.warning("calculated limits are not kept for the next start: %s cannot be written", path)
        self._say(f"limits: {made.hb_timeouts}, {made.section_timeouts}")

    def _load(self, made: RankMonitorClient) -> None:
        path = self._path
        if path is None or not path.is_file():
            return
        try:
            made.load_state_dict(encoding.from_json(path.read_bytes()))
        except (OSError, ValueError) as error:  # a ConfigurationError is a ValueError
            self._logger.warning("kept limits are not taken up: %s: %s", path, error)
        else:
            self._say(f"limits of {path} are taken up")

    def _say(self, line: str) -> None:
        if self._rank == 0:
            self._logger.info(line)
