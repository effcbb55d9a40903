"""Which limits has an earlier start calculated, and may this start use them?

They are in a file that all ranks read without communication, so all must come to the same answer. Limits of another
workload or another number of ranks are refused. A limit that is too short would end each start that uses it. So limits
are on trial in a start until each of its sections has ended once on each rank and the ranks have met: rank 0 notes the
start in the file, and later starts refuse the limits as long as that note is there.

At its start a rank waits for the disk however long that takes: otherwise only the ranks with a fast disk would have the
limits, and limits could apply that are not on trial. Later the rank is watched and silent meanwhile, so it does not
wait until limits are written if the disk is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from resilience.calibration.differences import differences, serious
from resilience.core.limits import SHORTEST
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.facts.configuration import Configuration
from resilience.system import files
from resilience.system.background import Writer
from resilience.system.environment import Settings, launched_folder
from resilience.telemetry.recording import configuration_of

FILE = "resilience-timeouts.json"
WRITE_LIMIT = SHORTEST / 4  # seconds: no calculated limit is exceeded meanwhile, nor by this and the fit together

_disk = Writer()


class StoredLimits(msgspec.Struct, frozen=True):
    """The content of the file. limits: a client's state. configuration: of the run that calculated them. on_trial_in:
    the start that has not confirmed them; empty if there is none."""

    limits: dict[str, Any]
    configuration: Configuration
    on_trial_in: str = ""


class LimitsFile:
    """The file in a folder. path: None if the folder is not a local one, as in an object store.

    Raises: ConfigurationError for wrong variables."""

    def __init__(self, folder: str | Path, world_size: int) -> None:
        settings = Settings.from_environment()
        configuration = configuration_of(launched_folder(), settings.calibration_key, world_size)
        self.path = None if "://" in str(folder) else Path(folder) / FILE
        # Without the command's arguments: only the owner may read job.json, others may read this file.
        # With the ranks of this cycle: job.json has the most that the job may have.
        self._configuration = msgspec.structs.replace(configuration, arguments=(), world_size=world_size)
        self._start = "/".join(
            map(str, (settings.job_id, settings.attempt_hint, settings.cycle, settings.restart_count))
        )

    def read(self) -> dict[str, Any] | None:
        """Return the limits, None if there are none. Raises: OSError; ValueError, saying why they are refused."""
        if self.path is None:
            return None
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        stored = encoding.from_json(content, StoredLimits)
        mismatch = serious(differences(stored.configuration, self._configuration))
        if mismatch:
            raise ConfigurationError(f"they are those of another run: {mismatch}; set exp_dir to a folder of its own")
        if stored.on_trial_in not in ("", self._start):
            raise ConfigurationError(
                "the start that used them last has not timed all its sections, so they may be too short; they are "
                "calculated again"
            )
        return stored.limits

    def write(self, limits: dict[str, Any], is_on_trial: bool, waits: bool = False) -> bool:
        """Replace the file. Return True if that worked; if the disk is slow, it may still work later. waits: however
        slow the disk is."""
        stored = StoredLimits(limits, self._configuration, self._start if is_on_trial else "")
        path = self.path
        if path is None:
            return False
        if waits:
            return files.replace(path, encoding.to_json_page(stored))
        try:
            return _disk.ask(lambda: files.replace(path, encoding.to_json_page(stored)), WRITE_LIMIT)
        except OSError:
            return False
