"""Where do process groups meet whose code names a place of its own, `init_method="tcp://host:port"`?

Inside a wrapped function every rank is a client of the iteration's store (TORCHELASTIC_USE_AGENT_STORE), so nobody
hosts the place that such a URL names; and if rank 0 did, the port would be taken, or hold the keys of the iteration
before, when the function starts again. So for the length of a call torch's handler for `tcp` is exchanged for one that
meets at the iteration's store, under a prefix made of the URL. Only for the group of all ranks: a URL with another
rank or world size is about a group with processes outside the job, and stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from resilience.adapters.environment import Rendezvous, rank_and_world_size

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


@contextmanager
def meeting_at_own_store() -> Iterator[None]:
    """While the body runs, let groups of all ranks with a tcp:// URL meet at MASTER_ADDR and MASTER_PORT.

    Does nothing where torch keeps its handlers elsewhere than today (2.13)."""
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original: Handler | None = handlers.get("tcp")
    if original is None:
        yield
        return

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import PrefixStore

        own = own_url(url)
        for store, rank, world_size in original(own or url, **options):
            yield PrefixStore(urlsplit(url).netloc, store) if own else store, rank, world_size

    handlers["tcp"] = meet
    try:
        yield
    finally:
        if handlers.get("tcp") is meet:
            handlers["tcp"] = original


def own_url(url: str) -> str:
    """Return the URL of the iteration's store for a group of all ranks; empty for any other group."""
    parts, there = urlsplit(url), Rendezvous.from_environment()
    query = parse_qs(parts.query)
    rank, world_size = rank_and_world_size()
    if there.host is None or there.port is None:
        return ""
    if (query.get("rank"), query.get("world_size")) != ([str(rank)], [str(world_size)]):
        return ""
    host = f"[{there.host}]" if ":" in there.host else there.host
    return parts._replace(netloc=f"{host}:{there.port}").geturl()
