"""Where do process groups meet if their code names its own address, `init_method="tcp://host:port"`?

Inside a wrapped function every rank is a client of the iteration's store (TORCHELASTIC_USE_AGENT_STORE), so no process
hosts the address of such a URL. If rank 0 did, its port would be taken, or would hold the previous iteration's keys,
when the function starts again. So during a call torch's handler for `tcp` is replaced by one that meets at the
iteration's store, under a prefix built from the URL.

This applies to the group of all ranks. A URL with another rank or world size names a group of some ranks, or one with
processes outside the job: its rank 0 hosts the address, as it does without a launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from resilience.system.environment import LauncherRendezvous, rank_and_world_size

T = TypeVar("T")
Handler = Callable[..., Iterator[tuple[Any, int, int]]]
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@contextmanager
def meeting_at_own_store() -> Iterator[None]:
    """While the body runs, make groups of all ranks with a tcp:// URL meet at MASTER_ADDR and MASTER_PORT.

    Does nothing if torch keeps its handlers elsewhere than today (2.13)."""
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original: Handler | None = handlers.get("tcp")
    if original is None:
        yield
        return

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import PrefixStore

        store_url = own_url(url)
        if not store_url:
            meeting = original(url, **options)
            yield _hosted_by_its_rank_0(meeting)
            yield from meeting  # torch's handler says that it cannot meet twice
            return
        for store, rank, world_size in original(store_url, **options):
            yield PrefixStore(urlsplit(url).netloc, store), rank, world_size

    handlers["tcp"] = meet
    try:
        yield
    finally:
        if handlers.get("tcp") is meet:
            handlers["tcp"] = original


def _hosted_by_its_rank_0(meeting: Iterator[T]) -> T:
    """Return what a handler of torch answers where no process is the client of an agent's store."""
    agents = os.environ.pop(USE_AGENT_STORE, None)
    try:
        return next(meeting)
    finally:
        if agents is not None:
            os.environ[USE_AGENT_STORE] = agents


def own_url(url: str) -> str:
    """Return the URL of the iteration's store for a group of all ranks, empty for any other group."""
    parts, rendezvous = urlsplit(url), LauncherRendezvous.from_environment()
    query = parse_qs(parts.query)
    rank, world_size = rank_and_world_size()
    if rendezvous.host is None or rendezvous.port is None:
        return ""
    if (query.get("rank"), query.get("world_size")) != ([str(rank)], [str(world_size)]):
        return ""
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    return parts._replace(netloc=f"{host}:{rendezvous.port}").geturl()
