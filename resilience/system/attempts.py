"""Which attempt of its job is this launch, and which is its run folder?

A run folder can be created only once, on whatever hosts of a shared file system, so creating it allocates the attempt.
One process of a launch does that: the first that writes a key of the launch's store. It publishes the result there for
all others. If it dies before, one of the others takes its place: after a while, or at once if a launcher has started
all processes again."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resilience.core.restart import Await, Check, CompareSet, Read
from resilience.errors import ConfigurationError, StoreError
from resilience.facts import encoding
from resilience.facts.identity import attempt_of, run_name
from resilience.system import files, private
from resilience.system.background import ASK_LIMIT, asked
from resilience.system.store import execute

ALLOCATION_LIMIT = 2 * ASK_LIMIT  # seconds for a process to allocate an attempt, before another one does it: twice as
# long as it waits for a disk that hangs. A slower process does no harm: the first published launch counts.


class Launch(msgspec.Struct, frozen=True):
    """One launch of a job. token: different for each launch. error: why the launch could not be allocated."""

    job_id: str
    attempt: int
    token: str = ""
    error: str = ""

    @property
    def run_name(self) -> str:
        """Return the name of its run folder."""
        return run_name(self.job_id, self.attempt)


_launch = encoding.reader(Launch)


def allocate(root: Path, job_id: str, wanted: int | None, least: int) -> Launch:
    """Create the run folder of a new attempt of this job in `root`, and return its launch.

    wanted: the attempt that the user asks for; None for the first free one from `least` on. If no folder can be
    created at all, any number will do. Raises: ConfigurationError if the attempt is taken."""
    attempt = least if wanted is None else wanted
    while not _create(root / run_name(job_id, attempt)):
        if wanted is not None:
            raise _taken(job_id, wanted, root / run_name(job_id, attempt))
        attempt += 1
    return Launch(job_id, attempt, uuid.uuid4().hex[:12])


def _create(folder: Path) -> bool:
    """Create a folder. Return False if it already exists, and True even if it cannot be created."""
    try:
        return asked(lambda: _is_new(folder))
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return True


def _is_new(folder: Path) -> bool:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def why_unusable(folder: Path) -> str:
    """Create a folder. Return the reason why it cannot be written to, empty if it can."""
    try:
        return asked(lambda: files.why_unusable(folder))
    except OSError as error:  # the disk does not answer
        return error.strerror or str(error)


def instead_of(folder: Path) -> Path:
    """Return a new folder of that name in a private place. Raises: OSError."""
    place = Path(private.make()) / folder.name
    place.mkdir()
    return place


def newest(root: Path, job_id: str, is_ours: Callable[[Path], bool]) -> int | None:
    """Return the newest attempt of this job whose folder `is_ours` accepts, else the newest one; None without any."""
    attempts: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            attempt = attempt_of(folder.name, job_id)
            if attempt is not None:
                attempts[attempt] = folder
    ours = [attempt for attempt, folder in attempts.items() if is_ours(folder)]
    return max(ours or attempts, default=None)


def agree(
    store: Any,
    root: Path,
    process: str,
    allocate_one: Callable[[], Launch],
    prefix: str = "",
    start: int = 0,
    say: Callable[[str], object] = lambda line: None,
) -> Launch:
    """Return the launch that all processes of this store belong to.

    process: a unique name of this process, `NAME/UNIQUE`. allocate_one: usually called in one process only. If another
    process was faster, the folder that it created is removed. start: how often a launcher has started the processes
    before: those of an earlier start are gone. say: prints a line if this process takes the place of another one.
    Raises: StoreError; ConfigurationError, in every process, if `allocate_one` does."""
    key, absent = f"{prefix}launch", ""
    if start and execute(Check((key,)), store):
        return _published(store, key)
    for turn in itertools.count():
        allocator = str(execute(CompareSet(f"{key}/allocator/{start}/{turn}", process), store))
        if allocator == process:
            break
        if execute(Await(key, ALLOCATION_LIMIT), store):
            return _published(store, key)
        absent = allocator
    if absent:
        name = absent.rpartition("/")[0]
        say(f"{name} created no run folder within {ALLOCATION_LIMIT:g} s; {process.rpartition('/')[0]} creates one")
    try:
        allocated = allocate_one()
    except ConfigurationError as error:
        allocated = Launch("", 0, uuid.uuid4().hex, str(error))
    launch = share(store, allocated, prefix)
    if launch != allocated and not allocated.error:
        with contextlib.suppress(OSError):  # if it is not empty, it is not the one just created
            (root / allocated.run_name).rmdir()
    return launch


def share(store: Any, own: Launch, prefix: str = "") -> Launch:
    """Publish a known launch, and return the one that was published first. Raises: StoreError."""
    return _valid(execute(CompareSet(f"{prefix}launch", encoding.to_json_text(own)), store))


def _published(store: Any, key: str) -> Launch:
    (published,) = execute(Read((key,)), store)
    return _valid(published)


def _valid(published: object) -> Launch:
    """Return the published launch. Raises: ConfigurationError, StoreError."""
    try:
        launch = _launch(str(published).encode())
    except ValueError as error:
        raise StoreError(f"the launch's entry in the store cannot be read: {error}; start the job again") from error
    if launch.error:
        raise ConfigurationError(launch.error)
    return launch


def _taken(job_id: str, attempt: int, folder: Path) -> ConfigurationError:
    return ConfigurationError(
        f"RESILIENCE_ATTEMPT is {attempt}, and attempt {attempt} of job {job_id} already has a run folder: {folder}; "
        "nothing was changed there. Unset RESILIENCE_ATTEMPT to use the first free number, or set a number that is "
        "free",
        option="RESILIENCE_ATTEMPT",
        value=attempt,
    )
