"""Fixed points between a test and its ranks: a rank shows how far it is, or waits there to be let on.

Signs are empty files in the folder the ranks run in. In a rank's function:

    show("armed", rank)                 I have come this far
    hold("before barrier", rank)        the same, and wait until the test lets me on

In the test: `job.await_sign("armed", rank=1)`, `job.let_on("before barrier")`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY = 0.005  # seconds between looks


def show(name: str, rank: int, folder: Path | None = None) -> None:
    """Leave the sign of a rank."""
    (folder or Path.cwd()).joinpath(f"{name}-{rank}.sign").touch()


def hold(name: str, rank: int, limit: float = 120.0) -> None:
    """Leave the sign of a rank and wait until the test lets this point go. Raises: TimeoutError."""
    show(name, rank)
    await_file(Path.cwd() / f"{name}.go", limit)


def await_sign(folder: Path, name: str, rank: int, limit: float = 120.0) -> None:
    """Wait for a rank's sign. Raises: TimeoutError."""
    await_file(folder / f"{name}-{rank}.sign", limit)


def let_on(folder: Path, name: str) -> None:
    """Let go all who hold at this point, now or later."""
    (folder / f"{name}.go").touch()


def await_file(path: Path, limit: float) -> None:
    """Wait until a file is there. Raises: TimeoutError."""
    deadline = time.monotonic() + limit
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not appear within {limit:g} s")
        time.sleep(LOOK_EVERY)


def await_true(claim: Callable[[], bool], limit: float = 150.0) -> None:
    """Wait until a claim holds. Raises: AssertionError."""
    deadline = time.monotonic() + limit
    while not claim():
        assert time.monotonic() < deadline, f"not true within {limit:g} s: {claim}"
        time.sleep(LOOK_EVERY)
