"""Fixtures for everybody. Ranks come from one preloaded forking server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ForkServer, Job, started


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start ranks: start(world_size, "module:function", env={...}, **kwargs)."""
    with ExitStack() as stack:

        def begin(world_size: int, target: str, env: dict[str, str] | None = None, **kwargs: Any) -> Job:
            return stack.enter_context(started(fork_server, tmp_path, world_size, target, kwargs, env))

        yield begin
