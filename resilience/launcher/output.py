"""Where workers' output goes: into a file for each cycle and rank, and on to the terminal.

`output/<cycle>/<rank>.out` and `.err` in the run folder keep what every worker said, so that a failed
rank's last lines can stand in its record. A follower copies what is appended to the agent's own stdout
and stderr, byte for byte, so the terminal shows what torchrun would show. Where the user redirects or
tees by torchrun's options, those rule, and nothing here is used."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from resilience.adapters import files
from resilience.launcher import terminal

INTERVAL = 0.05  # seconds between looks for new output
CHUNK = 1 << 20  # bytes copied at once
PATIENCE = 2.5  # seconds that a reader is given for what is left when workers have ended
TAIL = 200  # lines kept in a failed rank's record


class RunFolderLogs(LogsSpecs):
    """Log files of torchelastic in the run folder, named by cycle and rank."""

    def __init__(self, folder: Path, local_ranks_filter: set[int] | None) -> None:
        super().__init__(local_ranks_filter=local_ranks_filter)
        self._folder = folder
        self.cycle = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder / "output")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each worker's files by its rank, and tell it where its exception may be written."""
        folder = self._folder / "output" / str(self.cycle)
        folder.mkdir(parents=True, exist_ok=True)
        ranks = {local: env["RANK"] for local, env in envs.items()}
        errors = {local: str(folder / f"{rank}.error.json") for local, rank in ranks.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(
            stdouts={local: str(folder / f"{rank}.out") for local, rank in ranks.items()},
            stderrs={local: str(folder / f"{rank}.err") for local, rank in ranks.items()},
            error_files=errors,
        )

    def shows(self, local_rank: int) -> bool:
        """Whether a worker's output goes to the terminal."""
        return not self._local_ranks_filter or local_rank in self._local_ranks_filter


class Follower:
    """Copies files that grow to a descriptor, in a thread of its own. Whole lines where they come whole.

    A reader that does not read is waited for, by this thread alone; after the end not for long. What it
    has not taken by then the files have."""

    def __init__(self, sources: list[tuple[str, int]]) -> None:
        """sources: file, and the descriptor that it is copied to."""
        self._sources = [_Source(Path(path), to) for path, to in sources]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="resilience-output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left, and end."""
        self._is_over.set()
        self._thread.join(timeout=2 * PATIENCE)

    def _follow(self) -> None:
        while not self._is_over.wait(INTERVAL):
            for source in self._sources:
                source.copy(time.monotonic() + INTERVAL)
        until = time.monotonic() + PATIENCE
        for source in self._sources:
            source.copy(until)
            source.close()


class _Source:
    """A file that grows, and how far it was copied."""

    def __init__(self, path: Path, to: int) -> None:
        self._path = path
        self._to = to
        self._file: BinaryIO | None = None
        self._rest = b""  # read, and not yet taken

    def copy(self, until: float) -> None:
        """Copy what there is, as far as it is taken until then."""
        while self._rest or self._read():
            taken = terminal.put(self._to, self._rest, until)
            self._rest = self._rest[taken:]
            if self._rest:
                return

    def _read(self) -> bool:
        try:
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
            self._rest = self._file.read(CHUNK)
        except OSError:
            return False  # not there yet, or no more
        return bool(self._rest)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def tail(path: str, lines: int = TAIL) -> tuple[str, ...]:
    """Return the last lines of a file, none if it cannot be read."""
    return files.tail(Path(path), lines) if path and path != os.devnull else ()
