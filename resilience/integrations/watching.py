"""What do the callbacks of training frameworks share?  A rank that is watched while it trains.

A framework's hooks report that a section begins or ends, that a step is done, that the training ended normally. This
module turns that into signs of life, into limits that are calculated and stored in a file for the next start, and into
the finished-flag file, which shows a script that there is nothing left to resume. Sections are `setup`, `step`,
`validation` and `checkpoint`.

A limit is calculated only once its durations are as long as they will get. The setup's limit needs a setup that loaded
a checkpoint. The limits of heartbeats and of the time between sections need a checkpoint, a validation and the turn of
an epoch, as far as the job has them. Until then the configured limits apply. A rank without the launcher's monitor is
watched only within a Wrapper's call; then no rank calculates limits.

A process has one monitor. So one training is watched at a time: the one that began last."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar

from resilience.errors import ConfigurationError, RankMonitorClientError
from resilience.integrations import simulated
from resilience.integrations.stored_limits import LimitsFile
from resilience.monitor import client, connect
from resilience.monitor.rank_client import RankMonitorClient
from resilience.system import environment, rank_reductions

SETUP, STEP, VALIDATION, CHECKPOINT = SECTIONS = ("setup", "step", "validation", "checkpoint")
FEWEST_STEPS = 10  # optimizer steps before the first calculation: one alone says little about the others
MOST_STEPS = 1000  # optimizer steps between two calculations, whose numbers double until then


class Watching:
    """A rank's training under its monitor. Attaches only in `begin`: a copied callback has no monitor yet.

    autoresume: at a normal end, rank 0 writes the file that FAULT_TOL_FINISHED_FLAG_FILE names.
    calculate_timeouts: limits are calculated, stored in `folder`, and loaded from there at the next start.
    reports_its_end: False if the framework works for an unknown time between its last section and `complete`. Then no
    limit is calculated that holds outside of sections: nothing observed before is as long.
    Raises: ConfigurationError."""

    _begun: ClassVar[Watching | None] = None  # in this process

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: simulated.SimulatedFaultParams | Mapping[str, Any] | None,
        folder: str | Path | None,
        logger_name: str,
        reports_its_end: bool = True,
    ) -> None:
        self.is_resumed = False  # a checkpoint was loaded
        self.validates = False  # there will be validations
        self._autoresume = autoresume
        self._calculates = calculate_timeouts
        self._reports_its_end = reports_its_end
        self._fault = simulated.parsed(simulated_fault_params)
        self._folder = folder  # None: the default folder of each training
        self._file: LimitsFile | None = None  # of limits, once the training has begun
        self._logger = logging.getLogger(logger_name)
        self._rank = 0
        self._client: RankMonitorClient | None = None
        self._timer: Timer | None = None
        self._open: dict[str, bool] = {}  # sections; whether the monitor knows that it is open
        self._forget()

    def _forget(self) -> None:
        self._closed: set[str] = set()  # names of finished sections
        self._on_trial: set[str] = set()  # sections with a stored limit that have not ended yet on this rank
        self._has_trial = False  # on any rank
        self._epochs = 0
        self._first_step: int | None = None
        self._reported_step: int | None = None
        self._steps = 0
        self._next_steps = FEWEST_STEPS  # at which all ranks meet
        self._is_due = True  # there is something new
        self._is_stopping = False  # the job was asked to stop before the training ended

    @property
    def has_begun(self) -> bool:
        """Return True while this training runs, with a monitor or without, and no other one has begun since."""
        return Watching._begun is self

    @property
    def is_initialized(self) -> bool:
        """Return True if the launcher's monitor watches."""
        return self._watched is not None

    @property
    def _watched(self) -> RankMonitorClient | None:
        """Return the client, None if the launcher has no monitor or another client has ended the monitoring."""
        return self._client if self._client is not None and self._client.is_initialized else None

    # -- beginning and end ----------------------------------------------------------------------

    def begin(self, folder: str | Path, rank: int, world_size: int) -> None:
        """Attach to the monitor, and begin the setup. Another training of this process is then no longer watched.

        folder: default folder for stored limits.
        Raises: ConfigurationError if the finished flag has no path, or the rank of a simulated fault does not exist."""
        self.end()
        if (other := Watching._begun) is not None:
            if other._first_step is not None and other._rank == 0:
                other._logger.warning("this training is no longer watched: another one of its process has begun")
            other.end()
        if self._autoresume and environment.finished_flag_file() is None:
            raise ConfigurationError(
                "autoresume=True and FAULT_TOL_FINISHED_FLAG_FILE is not set; set it to a file that the job script "
                "checks for, or pass autoresume=False"
            )
        if self._fault is not None:
            self._timer = simulated.schedule(self._fault, rank, world_size)
        self._forget()
        Watching._begun = self
        self._rank = rank
        if environment.monitor_socket() is None:
            self._warn_without_launcher()
        else:
            self._warn_if_apart(world_size)
            self._attach(self._folder or folder, world_size)
        self.open(SETUP)

    def end(self) -> None:
        """Leave the monitor: no limit applies from now on. Sections that are still open have not run to their end. A
        second call does nothing."""
        if Watching._begun is self:
            Watching._begun = None
        self.is_resumed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.discard(*SECTIONS)
        client_to_close, self._client = self._client, None
        if client_to_close is not None:
            client_to_close.shutdown_workload_monitoring()
        elif connect.wrapper_page is not None:
            connect.wrapper_page.forget_signs()

    def complete(self) -> None:
        """End a training that ended normally. Limits are calculated a last time and then no longer apply: a program's
        work after its training is unlike all work before. A collective, also on a rank that is no longer watched."""
        link = connect.latest()
        self._is_stopping = link is not None and not link.page.is_wanted()
        self._on_trial.clear()
        self._calculate(is_last=True)
        self.end()

    def write_finished_flag(self, ends_early: bool) -> None:
        """Show the job script that there is nothing left to resume. A training that ended before its last step while
        the job was asked to stop is not finished.

        ends_early: it ended before its last step. Raises: OSError."""
        path = environment.finished_flag_file()
        if self._is_stopping and ends_early:
            self._log("the training stopped with its job; it is not finished")
        elif self._autoresume and path is not None and self._rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
            self._log(f"the training is finished; {path} was written")

    def _warn_without_launcher(self) -> None:
        if connect.wrapper_page is None:
            missing = "hangs are not detected"
        elif self._calculates:
            missing = "no limits are calculated"
        else:
            return
        if self._rank == 0:
            self._logger.warning("%s: the script was not started by `resilience run`", missing)

    def _warn_if_apart(self, world_size: int) -> None:
        worker = environment.LaunchedWorker.from_environment()
        if worker is not None and world_size < worker.world_size and worker.rank == 0:
            self._logger.warning(
                "to the framework this training has %d of the %d ranks that the launcher started: the ranks do not "
                "train together, and they write the same files; docs/frameworks.md names the settings for one training "
                "of all ranks",
                world_size,
                worker.world_size,
            )

    def _attach(self, folder: str | Path, world_size: int) -> None:
        new_client, unread = RankMonitorClient(), None
        try:
            if self._calculates:
                self._file = LimitsFile(folder, world_size)
                unread = self._load_limits(new_client, self._file)
            new_client.init_workload_monitoring()
        except RankMonitorClientError as error:
            self._logger.warning("rank %d is not watched by a monitor of the launcher: %s", self._rank, error)
        else:
            self._client, link = new_client, connect.current()
            if unread is not None and link is not None and self._file is not None:
                link.limits_unread(str(self._file.path), unread)

    # -- signs of life --------------------------------------------------------------------------

    def open(self, name: str) -> None:
        """Open a section, unless it is already open."""
        if name in self._open:
            return
        self._open[name] = False
        watched, wrapper_page = self._watched, connect.wrapper_page
        try:
            if watched is not None:
                watched.start_section(name)
            elif wrapper_page is not None:
                wrapper_page.enter(name)
        except (RankMonitorClientError, ConfigurationError) as error:  # the program has a section of this name
            self._logger.warning("section %r is not watched this time: %s", name, error)
        else:
            self._open[name] = True

    def close(self, *names: str) -> None:
        """Close those of these sections that are open."""
        for name in names:
            if name in self._open:
                self._closed.add(name)
                self._is_due |= name in (VALIDATION, CHECKPOINT)
                self._leave(name)
                self._confirm(name)

    def discard(self, *names: str) -> None:
        """Close those of these sections that are open and did not run to their end: their durations do not count."""
        for name in names:
            if name in self._open:
                self._leave(name, failed=True)

    def _leave(self, name: str, failed: bool = False) -> None:
        is_shown = self._open.pop(name)
        watched, wrapper_page = self._watched, connect.wrapper_page
        if not is_shown:
            return
        if watched is None:
            if wrapper_page is not None:
                wrapper_page.leave_if_open(name, failed)
            return
        leave = watched.discard_section if failed else watched.end_section
        try:
            leave(name)
        except RankMonitorClientError:
            pass  # the program has closed all sections

    @contextmanager
    def section(self, name: str, is_whole: bool = True) -> Iterator[None]:
        """Open a section for the body, and send a sign of life at its end. An exception discards the section.

        is_whole: False for a section shorter than others of its name: no limit is calculated before a whole one.
        Within the setup, the body is a part of it."""
        if SETUP not in self._open:
            self.open(name)
        try:
            yield
            if is_whole:
                self.close(name)
            elif name in self._open:
                self._leave(name)
        finally:
            self.discard(name)
            self.beat()

    def beat(self) -> None:
        """Send a sign of life."""
        watched, wrapper_page = self._watched, connect.wrapper_page
        if watched is not None:
            watched.send_heartbeat()
        elif wrapper_page is not None:
            wrapper_page.heartbeat()

    def begin_epoch(self) -> None:
        """Note that an epoch begins."""
        self._epochs += 1

    def begin_step(self, number: int) -> None:
        """Begin a step, or a part of one. The first one ends the setup: before it, a resumed epoch skips its batches.

        number: optimizer steps done before, in all starts."""
        self.close(SETUP)
        if self._first_step is None:
            self._first_step = number
        self._steps = number - self._first_step
        self._report_step(number)
        self.open(STEP)

    def end_step(self, number: int) -> None:
        """End a step, or a part of one. Calculate limits from time to time. A collective.

        number: optimizer steps done in all starts, reported at once: a validation or a checkpoint may fail now."""
        self.close(STEP)
        self._report_step(number)
        self.beat()
        if self._steps >= self._next_steps:  # equal on all ranks, unlike the sections that each has seen
            self._next_steps = self._steps + min(self._steps, MOST_STEPS)
            self._calculate()

    def _report_step(self, number: int) -> None:
        if number != self._reported_step:
            self._reported_step = number
            client.step(number)

    # -- limits ---------------------------------------------------------------------------------

    def _calculate(self, is_last: bool = False) -> None:
        """Calculate the possible limits, and store them. A collective: all ranks call it at the same steps."""
        if not self._calculates or environment.monitor_socket() is None:
            return
        ranks, watched = rank_reductions.over_ranks(self._progress()), self._watched
        if ranks["unwatched"] or watched is None or not (ranks["new"] or is_last):
            return
        self._is_due = False
        self._has_trial = bool(ranks["on trial"])
        closed = {name for name in SECTIONS if ranks[f"closed {name}"]}
        is_complete = (
            self._reports_its_end and CHECKPOINT in closed and (VALIDATION in closed or not ranks["validates"])
        )
        names = {STEP} if self._steps >= FEWEST_STEPS else set()
        names |= closed & ({SETUP, VALIDATION, CHECKPOINT} if ranks["resumed"] else {VALIDATION, CHECKPOINT})
        has_outside = is_complete and (is_last or ranks["epochs"] > 1)
        try:
            if names:
                watched.calculate_and_set_section_timeouts(sorted(names), has_outside, True, method="fit")
            if is_complete and ranks["resumed"]:
                watched.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        except RankMonitorClientError as error:  # the program has limits for very many sections
            self._logger.warning("calculated limits are not in force: %s", error)
        self._log(f"limits: {watched.hb_timeouts}, {watched.section_timeouts}")
        self._store_limits(watched)

    def _progress(self) -> dict[str, float]:
        """Return what this rank has seen. What any rank has seen decides for all, because all calculate or none."""
        return {
            "unwatched": float(self._watched is None),
            "new": float(self._is_due),
            "on trial": float(bool(self._on_trial)),
            "resumed": float(self.is_resumed),
            "validates": float(self.validates),
            "epochs": float(self._epochs),
            **{f"closed {name}": float(name in self._closed) for name in SECTIONS},
        }

    def _confirm(self, name: str) -> None:
        """Note that a section has ended under its stored limit. When the ranks meet after the last one of any rank, the
        trial is over: the next start may use the limits whatever ends this one."""
        if name in self._on_trial:
            self._on_trial.remove(name)
            self._is_due |= not self._on_trial

    def _store_limits(self, monitor_client: RankMonitorClient, waits: bool = False) -> None:
        if self._rank == 0 and self._file is not None:
            state, path = monitor_client.state_dict(), self._file.path
            if not self._file.write(state, self._has_trial, waits):
                self._logger.warning(
                    "calculated limits are not stored for the next start: %s cannot be written now", path
                )

    def _load_limits(self, monitor_client: RankMonitorClient, file: LimitsFile) -> OSError | None:
        """Use the stored limits, if there are any. Return why this rank cannot read them, None if it can."""
        try:
            limits = file.read()
            if limits is None:
                return None
            monitor_client.load_state_dict(limits)
        except (OSError, ValueError) as error:  # a ConfigurationError is a ValueError
            if self._rank == 0 or isinstance(error, OSError):  # all ranks refuse the same content
                self._logger.warning("stored limits are not used: %s: %s", file.path, error)
            return error if isinstance(error, OSError) else None
        else:
            self._log(f"limits from {file.path} are used")
            self._on_trial = set(monitor_client.section_timeouts.calculated_sections)
            self._has_trial = bool(self._on_trial)
            self._store_limits(monitor_client, waits=True)
        return None

    def _log(self, line: str) -> None:
        if self._rank == 0:
            self._logger.info(line)
