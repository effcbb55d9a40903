"""What store do all ranks share?  Stores with the names of the compatible API.

`StoreMixin` adds to any torch Store what hooks and users of that API call: barriers and records. The
restart protocol needs only the store's plain operations (`core.restart`), so any torch Store with the
mixin will do. Who hosts a TCPStore depends on where it is made: inside a Wrapper, rank 0's monitor does
and every rank is a client, so that the store outlives rank 0's process; elsewhere rank 0 does."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from resilience.adapters.connecting import await_server, short_lookups
from resilience.adapters.environment import Rendezvous, rank_and_world_size
from resilience.adapters.serving import listen
from resilience.adapters.store import StoreLike, drive, execute, wait
from resilience.core import restart
from resilience.core.attribution import InterruptionRecord, decode, encode
from resilience.core.restart import Add, Await, Check, CompareSet, Protocol, Read, Set
from resilience.errors import (
    BarrierError,
    BarrierOverflow,
    BarrierTimeout,
    ConfigurationError,
    StoreError,
)
from resilience.inprocess import options

DEFAULT_TIMEOUT = timedelta(seconds=300)
CHUNK = 5.0  # seconds; longest single wait by default: no interrupt ends it, and torch warns whenever one runs out
HOST_RANK = 0

# None: outside any Wrapper. A context variable, because threads of one monitor connect on their own.
_may_host: ContextVar[bool | None] = ContextVar("_may_host", default=None)


@contextmanager
def hosting(is_host: bool) -> Iterator[None]:
    """Decide for the body, in this thread, whether a TCPStore that is made there becomes the server."""
    token = _may_host.set(is_host)
    try:
        yield
    finally:
        _may_host.reset(token)


class StoreMixin:
    """Barriers and records for a class that also is a torch Store (it needs set, get, add, check, wait and
    compare_set). Every operation is O(1) in the number of ranks, but for lists, which are as long as what
    is in them. Raises: StoreError, from every method, if the store does not answer."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the mixin's methods win over those of torch, whatever the order of bases: since torch 2.9 a
        Store has a `barrier` of its own, with other arguments."""
        super().__init_subclass__(**options)
        for name, method in vars(StoreMixin).items():
            if not name.startswith("__"):
                owner = next(base for base in cls.__mro__ if name in vars(base))
                if not issubclass(owner, StoreMixin):
                    setattr(cls, name, method)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Initial ranks whose processes must leave last, because the store ends with them."""
        return ()

    # -- ranks ----------------------------------------------------------------------------------

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Tell which initial rank has `rank` now."""
        self._do(Set(f"initial_rank/{rank}", str(initial_rank)))

    def get_initial_rank(self, rank: int) -> int:
        """Return what was set for `rank`; waits for it, at most the store's own timeout.

        Raises: StoreError if nothing is set by then."""
        key = f"initial_rank/{rank}"
        limit = cast(timedelta, getattr(self, "timeout", DEFAULT_TIMEOUT)).total_seconds()
        if not wait(self._store, key, limit, CHUNK):
            raise StoreError(
                f"no initial rank was set for rank {rank} within {limit:g} s; that rank has to call set_initial_rank",
                rank=rank,
                limit=limit,
            )
        (text,) = self._do(Read((key,)))
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
        """Wait until `rendezvous_count` different ranks have come to `group_name`, at most `timeout`.

        rank: any number, different for each participant; one that comes again changes nothing.
        timeout_chunk: longest single wait, default 5 s. A barrier serves once in one store.
        Raises: BarrierTimeout; BarrierOverflow if more ranks come; ConfigurationError."""
        count = options.whole("rendezvous_count", rendezvous_count, 1)
        limit = options.seconds("timeout", timeout)
        chunk = CHUNK if timeout_chunk is None else options.seconds("timeout_chunk", timeout_chunk)
        drive(meet(group_name, rank, count, limit), self._store, chunk=chunk)

    initial_barrier = functools.partialmethod(barrier, group_name="initial_barrier")
    iteration_barrier = functools.partialmethod(barrier, group_name="iteration_barrier")
    completion_barrier = functools.partialmethod(barrier, group_name="completion_barrier")
    termination_barrier = functools.partialmethod(barrier, group_name="termination_barrier")

    # -- records --------------------------------------------------------------------------------

    def record_interrupted(self, record: InterruptionRecord | Iterable[InterruptionRecord] | None = None) -> None:
        """Add records of interrupted ranks: one, several or none."""
        records = [record] if isinstance(record, InterruptionRecord) else record or ()
        for each in records:
            self._append("interrupted", encode(each))

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the records in the order in which they arrived."""
        return [decode(text) for text in self._listed("interrupted")]

    def record_completed(self) -> None:
        """Note that a rank has completed."""
        self._do(Set("completed", "1"))

    def is_any_rank_completed(self) -> bool:
        """Return whether `record_completed` was called by any rank."""
        return bool(self._do(Check(("completed",))))

    def record_terminated_rank(self, rank: int) -> None:
        """Note that a rank does not go on. Again for the same rank changes nothing."""
        self._append("terminated", str(rank))

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that do not go on."""
        return {int(text) for text in self._listed("terminated")}

    def record_base_terminated_rank(self, rank: int) -> None:
        """Note that a rank, by its initial number, has left the job. Again changes nothing."""
        self._append("base_terminated", str(rank))

    def get_base_terminated_count(self) -> int:
        """Return how many different ranks have left the job."""
        return len(set(self._listed("base_terminated")))

    def _append(self, name: str, value: str) -> None:
        slot = self._do(Add(f"{name}/count", 1))
        self._do(Set(f"{name}/{slot}", value))

    def _listed(self, name: str) -> list[str]:
        count = self._do(Add(f"{name}/count", 0))
        texts = self._do(Read(tuple(f"{name}/{slot}" for slot in range(1, count + 1))))
        return [text for text in texts if text is not None]  # a slot whose writer was killed stays empty

    def _do(self, operation: restart.Operation) -> Any:
        return execute(operation, self._store)

    @property
    def _store(self) -> StoreLike:
        """This object as the torch Store that it is too, which the type checker cannot see."""
        return cast(StoreLike, self)


def meet(group_name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """Meet `count` participants of any numbers: each gets a place in the order of arrival and keeps it, so
    that whoever repeats the arrival of a killed rank takes no second place. Killed between getting its place
    and noting it, a rank leaves that place empty, and the barrier runs into its limit."""
    name = f"barrier/{group_name}"
    mine = f"{name}/place/{rank}"
    (place,) = yield Read((mine,))
    if place is None:
        arrived = yield Add(f"{name}/arrived", 1)
        place = yield CompareSet(mine, str(arrived - 1))
    if int(place) >= count:
        raise BarrierOverflow(
            f"rank {rank} is number {int(place) + 1} to reach barrier {group_name!r}, which is made for {count} ranks; "
            "all must pass the same rendezvous_count, and a barrier serves once: use another group_name for the next",
            rank=rank,
            rendezvous_count=count,
            group_name=group_name,
        )
    if (yield from restart.arrive(name, int(place), count)):
        return
    if not (yield Await(f"{name}/done", limit)):
        arrived = yield Add(f"{name}/arrived", 0)
        raise BarrierTimeout(
            f"rank {rank} waited {limit:g} s (timeout) in barrier {group_name!r}, and {arrived} of {count} ranks came; "
            "a rank is lost or late. Raise the timeout if ranks may be this far apart",
            rank=rank,
            rendezvous_count=count,
            group_name=group_name,
            limit=limit,
            arrived=arrived,
        )


class TCPStore(dist.TCPStore, StoreMixin):
    """torch's TCPStore, with the launcher's variables as defaults.

    host_name, port, world_size: default MASTER_ADDR, MASTER_PORT, WORLD_SIZE.
    timeout: for the connection, and for each operation that waits.
    wait_for_workers: the constructor returns once `world_size` processes have connected. Not so inside a
        Wrapper, where ranks meet in a barrier of their own, nor on the store of a launcher's agent.
    multi_tenant, use_libuv: as in torch.
    Hosts on rank 0, or joins if something already listens there; inside a Wrapper see `hosting`. Where
    TORCHELASTIC_USE_AGENT_STORE is True every process is a client.
    Raises: ConfigurationError; StoreError if the server cannot be made, or reached within `timeout`."""

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
        limit = options.seconds("timeout", timeout)
        there = Rendezvous.from_environment()
        host = _given(host_name, there.host, "host_name", "MASTER_ADDR")
        number = _given(port, there.port, "port", "MASTER_PORT")
        may_host = _may_host.get()
        if may_host is not None and not there.is_agents:
            host = there.server_host if there.is_one_node else host  # in a Wrapper every client is ours
        is_outside = may_host is None and not there.is_agents
        is_server = not there.is_agents and (rank_and_world_size()[0] == HOST_RANK if may_host is None else may_host)
        self._critical_ranks = (HOST_RANK,) if is_outside else ()
        listener = _listen(host, number, or_join=is_outside) if is_server else None
        if listener is not None:
            number = listener.getsockname()[1]
        address = _reach(host, number, limit)
        try:
            with short_lookups():
                super().__init__(
                    address,
                    number,
                    is_master=listener is not None,
                    master_listen_fd=None if listener is None else listener.detach(),
                    world_size=world_size if world_size is not None else there.world_size,
                    timeout=timeout,
                    wait_for_workers=wait_for_workers and is_outside,
                    multi_tenant=multi_tenant,
                    use_libuv=use_libuv,
                )
        except (RuntimeError, ValueError) as error:
            raise _unusable("use", host, number, error) from error

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Rank 0 where its process hosts the store; none inside a Wrapper and under an agent."""
        return self._critical_ranks


def _given(value: Any, fallback: Any, argument: str, variable: str) -> Any:
    if value is None and fallback is None:
        raise ConfigurationError(
            f"{variable} is not set and the store was given no {argument}; set the variable on all ranks (torchrun and "
            f"most launchers do), or pass store_kwargs={{{argument!r}: …}}",
            option=argument,
        )
    return fallback if value is None else value


def _listen(host: str, port: int, or_join: bool) -> socket.socket | None:
    """or_join: None where somebody listens there already, which is then taken for the store of this job."""
    try:
        return listen(host, port)
    except OSError as error:
        if or_join and error.errno == errno.EADDRINUSE:
            return None
        raise _unusable("host", host, port, error) from error


def _reach(host: str, port: int, limit: float) -> str:
    try:
        return await_server(host, port, limit)
    except OSError as error:
        raise _unusable(f"within {limit:g} s (timeout) reach", host, port, error) from error


def _unusable(what: str, host: str, port: int, error: Exception) -> StoreError:
    first_line = next(iter(str(error).splitlines()), "")[:300]
    return StoreError(
        f"could not {what} the store at {host}:{port}: {type(error).__name__}: {first_line}; check MASTER_ADDR and "
        "MASTER_PORT, that rank 0 runs, and that no other job uses the port",
        host=host,
        port=port,
    )


class FileStore(dist.FileStore, StoreMixin):
    """torch's FileStore: a file on a file system that all ranks share.

    path: must not be left over from an earlier run; `file_name` is torch's name for it. timeout: for each
    operation that waits. world_size: accepted and not used: torch's store removes the file once that many
    instances are gone, and a rank has several, beside those of its monitor. So the file stays.
    Raises: ConfigurationError."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        world_size: int = -1,
        timeout: timedelta = DEFAULT_TIMEOUT,
        file_name: str | None = None,
    ) -> None:
        options.seconds("timeout", timeout)
        file = path if path is not None else file_name
        if file is None:
            raise ConfigurationError(
                "FileStore was given no path; pass store_kwargs={'path': a file that all ranks share}", option="path"
            )
        super().__init__(os.fspath(file), -1)
        self.set_timeout(timeout)


class PrefixStore(dist.PrefixStore, StoreMixin):
    """The part of `store` that belongs to one iteration. `base_store` is the whole."""

    def __init__(self, iteration: int | str, store: Any) -> None:
        super().__init__(f"iteration/{iteration}", store)
        self.base_store = store


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
