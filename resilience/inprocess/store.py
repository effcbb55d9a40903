"""The store that all ranks share, with the names of the compatible API.

`StoreMixin` adds to any torch Store what hooks and users of that API call: barriers and records. The
restart protocol itself needs only the plain operations (`core.restart`), so a mixin over any store
will do. Inside a Wrapper rank 0's monitor hosts the TCPStore and every rank is a client; outside one,
rank 0 hosts it."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from resilience.adapters.store import drive, execute
from resilience.core import restart
from resilience.core.attribution import InterruptionRecord, decode, encode
from resilience.errors import (
    BarrierError,
    BarrierOverflow,
    BarrierTimeout,
    ConfigurationError,
    ConfigurationTypeError,
    StoreError,
)

DEFAULT_TIMEOUT = timedelta(seconds=300)
_may_host: bool | None = None  # None: outside any Wrapper, where rank 0 hosts


@contextmanager
def hosting(is_host: bool) -> Iterator[None]:
    """Decide for the body whether a TCPStore that is made there becomes the server."""
    global _may_host
    before, _may_host = _may_host, is_host
    try:
        yield
    finally:
        _may_host = before


class StoreMixin:
    """Barriers and records over a torch Store. Ranks are those the caller passes; a barrier serves once."""

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes hold the store; none, where it lives outside of them."""
        return ()

    # -- ranks ----------------------------------------------------------------------------------

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        self._do(restart.Set(f"initial_rank/{rank}", str(initial_rank)))

    def get_initial_rank(self, rank: int) -> int:
        """Return what was set for `rank`. Raises: StoreError if nothing was."""
        (text,) = self._do(restart.Read((f"initial_rank/{rank}",)))
        if text is None:
            raise StoreError(f"no initial rank is known of rank {rank}; set_initial_rank must come first")
        return int(text)

    # -- barriers -------------------------------------------------------------------------------

    def barrier(
        self,
        rank: int,
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Wait until the ranks 0 to rendezvous_count-1 have come, at most `timeout`.

        timeout_chunk: the longest single wait; default `timeout`. A rank that comes again changes nothing.
        Raises: BarrierTimeout, BarrierOverflow if `rank` is not below rendezvous_count, StoreError."""
        for name, value in (("timeout", timeout), ("timeout_chunk", timeout_chunk or timeout)):
            if not isinstance(value, timedelta):
                raise ConfigurationTypeError(f"{name} is {value!r}, expected a datetime.timedelta")
        limit = timeout.total_seconds()
        chunk = limit if timeout_chunk is None else timeout_chunk.total_seconds()
        drive(restart.barrier(f"barrier/{group_name}", rank, rendezvous_count, limit), _plain(self), chunk=chunk)

    initial_barrier = functools.partialmethod(barrier, group_name="initial")
    iteration_barrier = functools.partialmethod(barrier, group_name="iteration")
    completion_barrier = functools.partialmethod(barrier, group_name="completion")
    termination_barrier = functools.partialmethod(barrier, group_name="termination")

    # -- records --------------------------------------------------------------------------------

    def record_interrupted(self, records: Sequence[InterruptionRecord]) -> None:
        """Add records of interrupted ranks."""
        for record in records:
            slot = self._do(restart.Add("interrupted/count", 1))
            self._do(restart.Set(f"interrupted/{slot}", encode(record)))

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the records in the order in which they arrived."""
        return [decode(text) for text in self._listed("interrupted")]

    def record_completed(self) -> None:
        """Note that a rank has completed."""
        self._do(restart.Set("completed", "1"))

    def is_any_rank_completed(self) -> bool:
        return bool(self._do(restart.Check(("completed",))))

    def record_terminated_rank(self, rank: int) -> None:
        """Note that a rank does not go on."""
        slot = self._do(restart.Add("terminated/count", 1))
        self._do(restart.Set(f"terminated/{slot}", str(rank)))

    def get_terminated_ranks(self) -> set[int]:
        return {int(text) for text in self._listed("terminated")}

    def record_base_terminated_rank(self, rank: int) -> None:
        """Note that a rank ended by a BaseException."""
        self.record_terminated_rank(rank)
        self._do(restart.Add("base_terminated", 1))

    def get_base_terminated_count(self) -> int:
        return int(self._do(restart.Add("base_terminated", 0)))

    def _listed(self, name: str) -> list[str]:
        count = self._do(restart.Add(f"{name}/count", 0))
        texts = self._do(restart.Read(tuple(f"{name}/{slot}" for slot in range(1, count + 1))))
        return [text for text in texts if text is not None]

    def _do(self, operation: restart.Operation) -> Any:
        return execute(operation, _plain(self))


def _plain(store: Any) -> Any:
    """A mixin is used together with a torch Store; the type checker cannot see that."""
    return store


class TCPStore(dist.TCPStore, StoreMixin):
    """torch's TCPStore with the settings of the environment as defaults.

    host_name, port, world_size: default MASTER_ADDR, MASTER_PORT, WORLD_SIZE. timeout: for the connection
        and for each operation. wait_for_workers: accepted for compatibility; a host never waits here, because
        it would count its own client, and the Wrapper has a barrier of its own.
    Raises: ConfigurationError, StoreError if the server cannot be reached within `timeout`."""

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        if not isinstance(timeout, timedelta):
            raise ConfigurationTypeError(f"timeout is {timeout!r}, expected a datetime.timedelta")
        host = host_name if host_name is not None else _required("MASTER_ADDR", "host_name")
        number = port if port is not None else int(_required("MASTER_PORT", "port"))
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_server = not is_agents and (os.environ.get("RANK", "0") == "0" if _may_host is None else _may_host)
        try:
            if is_server:
                listener = listen(host, number)
                number = listener.getsockname()[1]
            else:
                listener = None
                _await_server(host, number, timeout.total_seconds())
            super().__init__(
                host,
                number,
                world_size,
                is_server,
                timeout,
                wait_for_workers=False,
                multi_tenant=multi_tenant,
                use_libuv=use_libuv,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except (RuntimeError, ValueError, OSError) as error:
            what = "host" if is_server else "reach"
            raise StoreError(
                f"could not {what} the store at {host}:{number}: {str(error).splitlines()[0][:300]}; check MASTER_ADDR "
                "and MASTER_PORT, and that no other job uses the port",
                host=host,
                port=number,
            ) from error


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of every address of this host, in the family of `host`.

    Left to itself a TCPStore listens on IPv6 and looks up the name of every client, as an IPv6 address, in
    the thread that serves all of them: where reverse DNS loses a packet the whole store stands still for
    5 s. IPv4 clients of this host are found in the hosts file. Raises: OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def iteration_server(address: str) -> dist.TCPStore:
    """Return a fresh server for the process groups of one iteration, on a port of its own."""
    listener = listen(address, 0)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _required(variable: str, argument: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(
            f"{variable} is not set and the store was given no {argument}; set the variable on all ranks (torchrun and "
            f"most launchers do), or pass store_kwargs={{{argument!r}: …}}"
        )
    return value


def _await_server(host: str, port: int, limit: float) -> None:
    """Wait until the server listens. torch's own client pauses a second and more between attempts."""
    deadline = time.monotonic() + limit
    pause = 0.005
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, limit)):
                return
        except OSError:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)


class FileStore(dist.FileStore, StoreMixin):
    """torch's FileStore: `path` on a file system that all ranks share. The file must not be left over from
    an earlier run."""

    def __init__(self, path: str | os.PathLike[str], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(os.fspath(path), -1)
        self.set_timeout(timeout)


class PrefixStore(dist.PrefixStore, StoreMixin):
    """The part of `store` that belongs to one iteration."""

    def __init__(self, iteration: int | str, store: Any) -> None:
        super().__init__(str(iteration), store)
        self.iteration = iteration


__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
    "hosting",
]
