"""Fixtures for everybody. Ranks come from one preloaded forking server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tests.support.examples  # noqa: F401
from tests.support import ranks
from tests.support.ranks import Job, started
from tests.support.server import DDP_AND_FSDP, LAUNCHER, ForkServer

# Container images set this. The tests start thousands of processes, each of which would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test's folder says what is real in it, and so gives it its mark."""
    for item in items:
        folder = item.path.relative_to(config.rootpath / "tests").parts[0]
        if folder in ("process", "system"):
            item.add_marker(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows what its jobs recorded: it may have failed for once, on a machine that nobody can look at."""
    report = yield
    if report.failed and report.when == "call":
        for job in ranks.of_this_test:
            try:
                report.sections.append(("Records of a job", job.told()))
            except Exception as error:  # a damaged run folder must not hide the failure
                report.sections.append(("Records of a job", f"cannot be shown: {error!r}"))
    return report


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer(DDP_AND_FSDP)
    yield server
    server.close()


@pytest.fixture(scope="session")
def agent_server() -> Iterator[ForkServer]:
    """As large as a real agent. At its end, a worker destroys each module that it was forked with, which costs time."""
    server = ForkServer(LAUNCHER)
    yield server
    server.close()


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start ranks: start(world_size, "module:function", env={...}, env_of=..., **kwargs of the function).

    are_agents: the function is an agent of the launcher; its workers are forked from it."""
    with ExitStack() as stack:

        def begin(
            world_size: int,
            target: str,
            env: Mapping[str, str] | None = None,
            env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
            are_agents: bool = False,
            **kwargs: Any,
        ) -> Job:
            server = request.getfixturevalue("agent_server" if are_agents else "fork_server")
            return stack.enter_context(started(server, tmp_path, world_size, target, kwargs, env, env_of))

        yield begin
