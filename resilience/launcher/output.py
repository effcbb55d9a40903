"""Where workers' output goes: into a file for each cycle and rank, and on to the terminal.

`output/<cycle>/<rank>.out` and `.err` in the run folder keep what every worker said, so that a failed
rank's last lines can stand in its record. A follower copies what is appended to the agent's own stdout
and stderr, byte for byte, so the terminal shows what torchrun would show. Where the user redirects or
tees by torchrun's options, those rule, and nothing here is used."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from resilience.adapters import files

INTERVAL = 0.05  # seconds between looks for new output
CHUNK = 1 << 20  # bytes copied at once
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
    """Copies files that grow to a stream, in a thread of its own. Whole lines where they come whole."""

    def __init__(self, sources: list[tuple[str, BinaryIO]]) -> None:
        self._sources = [(Path(path), to, [0]) for path, to in sources]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="resilience-output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left, and end."""
        self._is_over.set()
        self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        while not self._is_over.wait(INTERVAL):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        for path, to, read in self._sources:
            while data := _read(path, read[0]):
                read[0] += len(data)
                try:
                    to.write(data)
                    to.flush()
                except (OSError, ValueError):
                    break  # nobody listens; the files have it all


def _read(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(CHUNK)
    except OSError:
        return b""


def tail(path: str, lines: int = TAIL) -> tuple[str, ...]:
    """Return the last lines of a file, none if it cannot be read."""
    return files.tail(Path(path), lines) if path and path != os.devnull else ()
