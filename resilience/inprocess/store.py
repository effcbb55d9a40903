"""Which store do all ranks share?  Stores with the names of the compatible API.

`StoreMixin` adds to any torch Store the methods that hooks and users of that API call: barriers and records. The
restart protocol needs only the store's plain operations (`core.restart`), so any torch Store with the mixin will do.
The process that hosts a TCPStore depends on the place of construction. Outside a Wrapper, rank 0 hosts it. Inside a
Wrapper, rank 0's monitor hosts it and every rank is a client, so the store outlives rank 0's process. If a
launcher's agent already hosts a store, that store is the default. A Wrapper that names another port gets its own
store there, and rank 0's monitor publishes its address in the agent's store."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from resilience.core import restart
from resilience.core.restart import Add, Check, Read, Set
from resilience.errors import (
    BarrierError,
    BarrierOverflow,
    BarrierTimeout,
    ConfigurationError,
    StoreError,
)
from resilience.facts.encoding import text
from resilience.facts.in_words import count
from resilience.facts.interruptions import InterruptionRecord, decode, encode
from resilience.inprocess._runtime import options
from resilience.inprocess._runtime.store_barrier import LOOK_AGAIN, gather
from resilience.inprocess._runtime.store_refusal import RefusedStore, accept, raise_if_refused
from resilience.system import descriptors
from resilience.system.client_sockets import await_server, short_lookups
from resilience.system.environment import LauncherRendezvous, local_world_size, rank_and_world_size
from resilience.system.listening_sockets import listen, local_address
from resilience.system.store import StoreLike, drive, execute, wait

DEFAULT_TIMEOUT = timedelta(seconds=300)
CHUNK = 5.0  # seconds; longest single wait by default: no interrupt ends a wait, and torch warns about each timeout
HOST_RANK = 0

CONNECTIONS = 3  # per rank to the Wrapper's store: its own, its watcher's, its monitor's; one more for each node
GROUP_CONNECTIONS = 2  # per rank to the stores of its process groups: this iteration's and the last one's
REFUSED = "!"  # a published text with this prefix is the reason why there is no store


class Notice:
    """The key under which rank 0's monitor publishes the address of a store that it hosts beside the launcher's.

    prefix: of the keys in the launcher's store, the same in all ranks and monitors of a call. call: its number.
    Remembers the places that it has read, so that later connections need not ask again."""

    def __init__(self, prefix: str, call: int = 0) -> None:
        self.prefix = prefix
        self.call = call
        self.places: dict[int, _StorePlace] = {}  # by requested port
        self.refusal: RefusedStore | None = None  # served by this process

    def key(self, port: int) -> str:
        return text(f"{self.prefix}store/{port}")


class _StoreRole(NamedTuple):
    """The role of a process in the Wrapper's store. is_rank: it is the rank's own process, not its monitor."""

    is_host: bool
    notice: Notice
    is_rank: bool


# None: outside any Wrapper. A context variable, because each thread of a monitor connects separately.
_part: ContextVar[_StoreRole | None] = ContextVar("_part", default=None)


@contextmanager
def hosting(is_host: bool, notice: Notice | None = None, is_rank: bool = False) -> Iterator[None]:
    """Set, for the body and this thread, whether a TCPStore constructed there becomes the server.

    notice: names the key for the address of a store beside the launcher's own."""
    token = _part.set(_StoreRole(is_host, notice or Notice("resilience/"), is_rank))
    try:
        yield
    finally:
        _part.reset(token)


class StoreMixin:
    """Barriers and records for a class that is also a torch Store (it needs set, get, add, check, wait and
    compare_set). Every operation is O(1) in the number of ranks, with two exceptions: reading a list takes time
    in proportion to its entries, and the last rank to arrive at a barrier reads who has arrived.
    Raises: StoreError, from every method, if the store does not answer."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the mixin's methods override torch's, whatever the order of bases. Since torch 2.9 a Store has its own
        `barrier`, with other arguments."""
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
        """Record which initial rank has `rank` now."""
        self._do(Set(f"initial_rank/{rank}", str(initial_rank)))

    def get_initial_rank(self, rank: int) -> int:
        """Return the initial rank that was set for `rank`. Waits for it, at most the store's own timeout.

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
        """Wait until `rendezvous_count` different ranks have arrived at `group_name`, at most `timeout`.

        rank: any number, different for each participant. A second arrival of a rank changes nothing.
        timeout_chunk: longest single wait, default 5 s. A barrier can be used once per store.
        Raises: BarrierTimeout; BarrierOverflow if more ranks arrive; ConfigurationError."""
        count = options.whole("rendezvous_count", rendezvous_count, 1)
        limit = options.seconds("timeout", timeout)
        chunk = CHUNK if timeout_chunk is None else options.seconds("timeout_chunk", timeout_chunk)
        # Most ranks need only these three operations. They do not go through `drive`: when 256 processes wake at once,
        # caches are cold, and each Python call costs ten times as much as usual.
        name, store = f"barrier/{group_name}", self._store
        arrivals = execute(Add(f"{name}/arrived", 1), store)
        execute(Set(f"{name}/place/{arrivals - 1}", str(rank)), store)
        pause = min(limit, LOOK_AGAIN)
        if arrivals >= count:
            drive(gather(group_name, rank, count, limit, arrivals), store, chunk=chunk)
        elif not wait(store, f"{name}/done", pause, chunk):
            arrivals = execute(Add(f"{name}/arrived", 0), store)
            drive(gather(group_name, rank, count, limit, arrivals, pause), store, chunk=chunk)

    initial_barrier = functools.partialmethod(barrier, group_name="initial_barrier")
    iteration_barrier = functools.partialmethod(barrier, group_name="iteration_barrier")
    completion_barrier = functools.partialmethod(barrier, group_name="completion_barrier")
    termination_barrier = functools.partialmethod(barrier, group_name="termination_barrier")

    # -- records --------------------------------------------------------------------------------

    def record_interrupted(self, record: InterruptionRecord | Iterable[InterruptionRecord] | None = None) -> None:
        """Add records of interrupted ranks: one, several or none."""
        records = [record] if isinstance(record, InterruptionRecord) else record or ()
        for interruption in records:
            self._append("interrupted", encode(interruption))

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the records in order of arrival."""
        return [decode(text) for text in self._entries("interrupted")]

    def record_completed(self) -> None:
        """Note that a rank has completed."""
        self._do(Set("completed", "1"))

    def is_any_rank_completed(self) -> bool:
        """Return True if any rank has called `record_completed`."""
        return bool(self._do(Check(("completed",))))

    def record_terminated_rank(self, rank: int) -> None:
        """Note that a rank does not continue. Repeating it for the same rank changes nothing."""
        self._append("terminated", str(rank))

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that do not continue."""
        return {int(text) for text in self._entries("terminated")}

    def record_base_terminated_rank(self, rank: int) -> None:
        """Note that a rank, given by its initial rank, has left the job. Repeating it changes nothing."""
        self._append("base_terminated", str(rank))

    def get_base_terminated_count(self) -> int:
        """Return how many different ranks have left the job."""
        return len(set(self._entries("base_terminated")))

    def _append(self, name: str, value: str) -> None:
        slot = self._do(Add(f"{name}/count", 1))
        self._do(Set(f"{name}/{slot}", value))

    def _entries(self, name: str) -> list[str]:
        count = self._do(Add(f"{name}/count", 0))
        texts = self._do(Read(tuple(f"{name}/{slot}" for slot in range(1, count + 1))))
        return [text for text in texts if text is not None]  # a slot whose writer was killed stays empty

    def _do(self, operation: restart.Operation) -> Any:
        return execute(operation, self._store)

    @property
    def _store(self) -> StoreLike:
        """Return this object as a torch Store; the type checker cannot see that it is one."""
        return cast(StoreLike, self)


class TCPStore(dist.TCPStore, StoreMixin):
    """torch's TCPStore, with the launcher's variables as defaults.

    host_name, port, world_size: default MASTER_ADDR, MASTER_PORT, WORLD_SIZE.
    timeout: for the connection, and for each operation that waits.
    wait_for_workers: the constructor returns once `world_size` processes have connected. Ignored inside a
        Wrapper, where ranks meet in a barrier of their own, and for the store of a launcher's agent.
    multi_tenant, use_libuv: as in torch.
    Rank 0 hosts the store, or joins if a process already listens at the address; inside a Wrapper see `hosting`. If
    TORCHELASTIC_USE_AGENT_STORE is True, the agent hosts the store of MASTER_PORT and every process is its client.
    With another port, inside a Wrapper, rank 0's monitor hosts the store there, or on any free port if that one is
    taken; all other processes read its address in the agent's store.
    Raises: ConfigurationError; StoreError if the server cannot be created, or reached within `timeout`."""

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
        rendezvous = LauncherRendezvous.from_environment()
        host = _or_default(host_name, rendezvous.host, "host_name", "MASTER_ADDR")
        number = _or_default(port, rendezvous.port, "port", "MASTER_PORT")
        size = world_size if world_size is not None else rendezvous.world_size
        part = _part.get()
        place = _place(part, rendezvous, host, number, size or 1, limit)
        self._critical_ranks = (HOST_RANK,) if place.is_outside else ()
        self.is_hosted_here = place.listener is not None
        address = _reach(place, limit)
        try:
            with short_lookups():
                super().__init__(
                    address,
                    place.port,
                    is_master=place.listener is not None,
                    master_listen_fd=None if place.listener is None else place.listener.detach(),
                    world_size=size,
                    timeout=timeout,
                    wait_for_workers=wait_for_workers and place.is_outside,
                    multi_tenant=multi_tenant,
                    use_libuv=use_libuv,
                )
        except (RuntimeError, ValueError) as error:
            raise _unusable(f"could not use the store at {host}:{number}", place, error) from error
        if place.is_plain and self.is_hosted_here:
            accept(self)
        elif part is not None and place.is_plain:
            raise_if_refused(self, rank_and_world_size()[0] if part.is_rank else None, limit)
        if place.publish is not None:
            place.publish(f"{place.host}:{place.port}")

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Rank 0 if its process hosts the store; none inside a Wrapper or under an agent."""
        return self._critical_ranks


def _or_default(value: Any, fallback: Any, argument: str, variable: str) -> Any:
    if value is None and fallback is None:
        raise ConfigurationError(
            f"{variable} is not set and the store got no {argument}; set the variable on all ranks (torchrun and "
            f"most launchers do), or pass store_kwargs={{{argument!r}: …}}",
            option=argument,
        )
    return fallback if value is None else value


class _StorePlace(NamedTuple):
    """Where a store is. listener: the server's, if this process hosts it. publish: announces the address.
    is_outside: no Wrapper and no agent manages it. is_plain: in a Wrapper without an agent. is_agents: the launcher's
    agent hosts it."""

    host: str
    port: int
    listener: socket.socket | None = None
    publish: Callable[[str], None] | None = None
    is_outside: bool = False
    is_plain: bool = False
    is_agents: bool = False

    @property
    def host_process(self) -> str:
        """Return the process that should host the store, for a person."""
        if self.is_agents:
            return "the launcher's agent"
        return "rank 0's process" if self.is_outside else "rank 0's monitor"


def _place(
    part: _StoreRole | None, rendezvous: LauncherRendezvous, host: str, port: int, size: int, limit: float
) -> _StorePlace:
    """Choose the store's place, and listen there if this process hosts it. Raises: StoreError."""
    if rendezvous.is_agents and port == rendezvous.port:
        if part is not None and part.is_rank:
            connections = size * CONNECTIONS + -(-size // (local_world_size() or 1))
            descriptors.make_room_in_agent(port, connections, f"host the store of {count(size, 'rank')}")
        return _StorePlace(host, port, is_agents=True)
    if part is None:
        listener = _listen(host, port, or_join=True) if rank_and_world_size()[0] == HOST_RANK else None
        return _StorePlace(host, port if listener is None else listener.getsockname()[1], listener, is_outside=True)
    if not rendezvous.is_agents:
        host = rendezvous.server_host if rendezvous.is_one_node else host  # every client is on this node
        if not part.is_host:
            return _StorePlace(host, port, is_plain=True)
        try:
            listener = _listen_for(size, host, port)
        except StoreError as error:
            with contextlib.suppress(StoreError, OSError):  # the error is raised here in any case
                part.notice.refusal = RefusedStore(listen(host, port), host, size, str(error))
            raise
        return _StorePlace(host, listener.getsockname()[1], listener, is_plain=True)
    if not part.is_host:
        return _published(part.notice, rendezvous, port, limit)
    publish = functools.partial(_join_launchers(rendezvous, limit).set, part.notice.key(port))
    own_address = local_address(rendezvous.server_host or host)
    try:
        listener = _listen_for(size, own_address, port, or_any=True)
    except StoreError as error:
        publish(text(f"{REFUSED}{error}"))
        raise
    return _StorePlace(own_address, listener.getsockname()[1], listener, publish)


def _listen_for(size: int, host: str, port: int, or_any: bool = False) -> socket.socket:
    """Return the listening socket for a Wrapper's store that `size` ranks and their monitors will use."""
    descriptors.make_room(
        size * (CONNECTIONS + GROUP_CONNECTIONS) + -(-size // (local_world_size() or 1)),
        f"host the stores of {count(size, 'rank')}",
    )
    listener = _listen(host, port, or_any=or_any)
    assert listener is not None
    return listener


def _listen(host: str, port: int, or_join: bool = False, or_any: bool = False) -> socket.socket | None:
    """Return a listening socket.

    or_join: return None if a process already listens there; it then counts as the store of this job.
    or_any: use any free port if that one is not available."""
    try:
        return listen(host, port)
    except OSError as error:
        if or_join and error.errno == errno.EADDRINUSE:
            return None
        if or_any and error.errno in (errno.EADDRINUSE, errno.EACCES):
            return _listen(host, 0)
        process = "rank 0's process" if or_join else "rank 0's monitor"
        raise _unusable(
            f"{process} could not host the store at {host}:{port}",
            _StorePlace(host, port),
            error,
            "free that port, or choose another one on all ranks with store_kwargs={'port': …} or MASTER_PORT",
        ) from error


def _reach(place: _StorePlace, limit: float) -> str:
    try:
        return await_server(place.host, place.port, limit)
    except OSError as error:
        message = f"could not reach the store at {place.host}:{place.port} within {limit:g} s (timeout)"
        raise _unusable(message, place, error) from error


# -- a store of the Wrapper's own beside the launcher's ---------------------------------------------


def _join_launchers(rendezvous: LauncherRendezvous, limit: float) -> dist.TCPStore:
    """Connect to the store of the launcher's agent. Raises: StoreError."""
    assert rendezvous.host is not None and rendezvous.port is not None
    try:
        address = await_server(rendezvous.host, rendezvous.port, limit)
        with short_lookups():
            return dist.TCPStore(address, rendezvous.port, timeout=timedelta(seconds=limit), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise _unusable(
            f"could not reach the launcher's store at {rendezvous.host}:{rendezvous.port} within {limit:g} s (timeout)",
            _StorePlace(rendezvous.host, rendezvous.port),
            error,
            "the launcher's agent should host it: check that the agent on that host runs",
        ) from error


def _published(notice: Notice, rendezvous: LauncherRendezvous, port: int, limit: float) -> _StorePlace:
    """Return the place of the store that rank 0's monitor hosts for clients that ask for `port`.

    Raises: StoreError, if that monitor refuses, publishes nothing, or cannot be reached within `limit`."""
    if port in notice.places:
        return notice.places[port]
    deadline = time.monotonic() + limit
    launchers = _join_launchers(rendezvous, limit)
    last_error, published_address = OSError("no address was published"), ""
    while wait(launchers, notice.key(port), max(0.0, deadline - time.monotonic()), CHUNK):
        answer = text(launchers.get(notice.key(port)))
        if answer.startswith(REFUSED):
            raise StoreError(answer.removeprefix(REFUSED), host=rendezvous.host, port=port)
        host, _, number = answer.rpartition(":")
        try:
            remaining = min(CHUNK, deadline - time.monotonic())
            place = _StorePlace(await_server(host, int(number), max(0.001, remaining)), int(number))
            return notice.places.setdefault(port, place)
        except OSError as error:  # the address may be left over from an earlier start; this one's follows
            last_error, published_address = error.with_traceback(None), f", which is {answer}"
            if time.monotonic() >= deadline:
                break
    raise _unusable(
        f"could not reach the wrapper's store (port {port}{published_address}) within {limit:g} s (timeout)",
        _StorePlace(rendezvous.host or "", port),
        last_error,
        "rank 0's monitor should host it and publish its address in the launcher's store at "
        f"{rendezvous.host}:{rendezvous.port}: check that rank 0 runs, and calls the wrapped function too",
    )


def _unusable(message: str, place: _StorePlace, error: Exception, advice: str = "") -> StoreError:
    advice = advice or (
        f"{place.host_process} should host it: check store_kwargs, MASTER_ADDR and MASTER_PORT, that rank 0 runs, and "
        "that no other job uses the port"
    )
    first_line = next(iter(str(error).splitlines()), "")[:300]
    return StoreError(f"{message}: {type(error).__name__}: {first_line}; {advice}", host=place.host, port=place.port)


class FileStore(dist.FileStore, StoreMixin):
    """torch's FileStore: a file on a file system that all ranks share.

    path: must not be left over from an earlier run; `file_name` is torch's name for it. timeout: for each
    operation that waits. world_size: accepted but not used. torch's store removes the file once that many
    instances are gone, but a rank has several, besides those of its monitor. So the file stays.
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
                "FileStore got no path; pass store_kwargs={'path': a file that all ranks share}", option="path"
            )
        super().__init__(os.fspath(file), -1)
        self.set_timeout(timeout)


class PrefixStore(dist.PrefixStore, StoreMixin):
    """The part of `store` that belongs to one iteration. `base_store` is the whole store."""

    def __init__(self, iteration: int | str, store: Any) -> None:
        super().__init__(f"iteration/{iteration}", store)
        self.base_store = store


__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FileStore",
    "Notice",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
    "hosting",
]
