"""Where do the agents of a job meet?  In one key-value store; every agent is a client of it.

c10d and static: a TCPStore in the store process of the node that the endpoint names; if several agents run on that
host, the first of them hosts it. The agent whose process hosts the store leaves last. etcd: in etcd, which survives the
loss of any agent; the last agent to leave a finished job deletes the job's keys."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from resilience.errors import ConfigurationError, LaunchError, StoreError
from resilience.facts.in_words import count
from resilience.launcher.rendezvous import etcd_store
from resilience.launcher.rendezvous.conf import switch, whole
from resilience.launcher.rendezvous.stores import Hosted, StoreProcess
from resilience.system.client_sockets import addresses_of, await_server, is_no_name, short_lookups
from resilience.system.open_sockets import shut_down

DEFAULT_PORT, ETCD_PORT = 29400, 2379  # torch's defaults for an endpoint without a port
ETCD_KINDS = ("etcd", "etcd-v2")
KINDS = ("c10d", "static", *ETCD_KINDS)
CUT_LIMIT = 2.0  # seconds in which a thread ends whose connection has been cut
LOOK = 0.05  # seconds between two polls for a signal while the store does not answer
SILENT = "a server listens there, but does not answer"

T = TypeVar("T")


class RendezvousStore:
    """The store as one agent reaches it. server: its numeric address and port. address: the address of this node for
    the other nodes. is_host: the store ends with this node's store process. forget: deletes the keys of a finished job.
    addresses: numeric addresses by name; each name is looked up once, so the name service may fail later."""

    def __init__(
        self,
        connect: Callable[[], Any],
        server: tuple[str, int],
        address: str,
        is_host: bool = False,
        forget: Callable[[], None] | None = None,
        addresses: Mapping[str, str] = MappingProxyType({}),
        is_cut: threading.Event | None = None,
        why_not_host: str = "",
    ) -> None:
        """is_cut: set by `cut`, for clients that repeat a failed request. why_not_host: why this node, which the
        endpoint names, does not host the store; empty if it does or need not."""
        self.address = address
        self.is_host = is_host
        self.forget = forget
        self.addresses = addresses
        self._connect = connect
        self._server = server
        self._is_cut = is_cut or threading.Event()
        self._why_not_host = why_not_host
        self._clients: list[Any] = []  # torch's PrefixStore does not keep a Python store alive

    def connect(self) -> Any:
        """Return a new client, for one thread. Raises: StoreError."""
        client = self._connect()
        self._clients.append(client)
        return client

    def answer(self, request: Callable[[], T], limit: float, is_interrupted: Callable[[], bool]) -> T:
        """Return the result of an agent's first requests, which run in a thread: the clients wait for a silent store in
        C++, where no limit and no signal reaches them. If they do not return in time, give the store up.

        is_interrupted: True ends the wait. Raises: what the requests raise; StoreError, LaunchError."""
        results: list[T] = []
        errors: list[BaseException] = []
        has_ended = threading.Event()

        def run() -> None:
            try:
                results.append(request())
            except BaseException as error:  # raised in the caller
                errors.append(error)
            has_ended.set()

        thread = threading.Thread(target=run, name="resilience meeting", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise LaunchError(
                f"the rendezvous could not be begun: {error}; this host lacks the resources for it"
            ) from error
        deadline = time.monotonic() + limit
        while not has_ended.wait(LOOK):
            if is_interrupted() or time.monotonic() >= deadline:
                with contextlib.suppress(OSError):  # no descriptor is left
                    self.cut()
                thread.join(CUT_LIMIT)  # an error in C++ while the interpreter ends would abort the process
                raise _unreachable(*self._server, limit, OSError(SILENT), self._why_not_host)
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    @property
    def server(self) -> str:
        """Return the store's address and port, in words."""
        host, port = self._server
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def cut(self) -> None:
        """Close all connections of this process to the store; pending requests get a StoreError. Any thread."""
        self._is_cut.set()
        shut_down(*self._server)


def kind_of(parameters: RendezvousParameters) -> str:
    """Return which of torch's backends the parameters name. Raises: ConfigurationError."""
    kind = str(parameters.get("inner") or (parameters.backend if parameters.backend in KINDS else "c10d"))
    if kind not in KINDS:
        raise ConfigurationError(f"the rendezvous backend is {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def static_rank(parameters: RendezvousParameters) -> int:
    """Return this node's fixed rank. Raises: ConfigurationError."""
    if parameters.get("rank") is None:
        raise ConfigurationError("a static rendezvous needs the node's rank; pass --node-rank")
    return whole(parameters, "rank", 0)


def rank_of(parameters: RendezvousParameters, given: int | None) -> int | None:
    """Return this node's rank in the infrastructure's order, if any; a static rendezvous always has one."""
    if kind_of(parameters) == "static":
        given = static_rank(parameters)
    if given is not None and not 0 <= given < parameters.max_nodes:
        raise ConfigurationError(
            f"this node's rank is {given}, but the job has at most {count(parameters.max_nodes, 'node')}; ranks "
            "count from 0"
        )
    return given


def meet(
    parameters: RendezvousParameters,
    stores: StoreProcess,
    limit: float,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> RendezvousStore:
    """Connect to the store, or host it; wait at most `limit` seconds for a host that is not up yet.

    is_interrupted: True ends that wait. Raises: ConfigurationError, StoreError."""
    kind = kind_of(parameters)
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, ETCD_PORT if kind in ETCD_KINDS else DEFAULT_PORT)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if kind in ETCD_KINDS:
        return _in_etcd(parameters, host, port, limit, is_interrupted)
    is_host = _is_to_host(parameters, kind, host)
    is_certain = kind == "static" or parameters.get("is_host") is not None
    hosted, why_not_host = _host(stores, host, port, is_certain) if is_host else (None, "")
    actual_port = port if hosted is None else hosted.port
    if actual_port == 0:
        raise ConfigurationError(
            f"the rendezvous endpoint {parameters.endpoint!r} has no port, and this node does not host it; add the port"
        )
    if hosted is not None:
        target, own_address = hosted.address, ""
        store_address = _own_address(host)
    else:
        target, own_address = _reach(host, actual_port, limit, is_interrupted, why_not_host)
        store_address = target
    is_cut = threading.Event()
    return RendezvousStore(
        lambda: connect(target, actual_port, limit, is_cut.is_set, why_not_host),
        (target, actual_port),
        parameters.local_addr or _address(parameters, host, own_address),
        hosted is not None,
        addresses={host: store_address} if store_address else {},
        is_cut=is_cut,
        why_not_host=why_not_host,
    )


def _in_etcd(
    parameters: RendezvousParameters, host: str, port: int, limit: float, is_interrupted: Callable[[], bool]
) -> RendezvousStore:
    settings = etcd_store.settings_of(parameters)
    target, own_address = _reach(host, port, limit, is_interrupted)
    name = (
        host if settings.protocol == "https" else target
    )  # a certificate is for a name; an address needs no name service later
    server = f"[{name}]" if ":" in name else name
    is_cut = threading.Event()

    @contextlib.contextmanager
    def reached() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"etcd at {parameters.endpoint} cannot be used: {error}; check --rdzv-endpoint, that etcd runs, and "
                "that its v2 API is on (etcd --enable-v2=true)",
                host=host,
                port=port,
            ) from error

    def connect_etcd() -> Any:
        with reached():
            return etcd_store.connect(settings, server, port, is_cut)

    def forget() -> None:
        store = connect_etcd()
        with reached():
            store.forget()

    return RendezvousStore(
        connect_etcd,
        (target, port),
        parameters.local_addr or _address(parameters, host, own_address),
        forget=forget,
        is_cut=is_cut,
    )


def connect(
    host: str, port: int, limit: float, is_interrupted: Callable[[], bool] = lambda: False, why_not_host: str = ""
) -> dist.TCPStore:
    """Return a new client of a TCPStore. is_interrupted: True ends the wait for its server. Raises: StoreError."""
    try:
        with short_lookups():
            address = await_server(host, port, limit, is_interrupted)
            return dist.TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreachable(host, port, limit, error, why_not_host) from error


def _is_to_host(parameters: RendezvousParameters, kind: str, host: str) -> bool:
    if kind == "static":
        return static_rank(parameters) == 0
    is_host = switch(parameters, "is_host")
    if is_host is not None:
        return is_host
    try:
        return _matches_machine_hostname(host)
    except OSError:  # the name service does not know this host's own name
        return False


def _host(stores: StoreProcess, host: str, port: int, is_certain: bool) -> tuple[Hosted | None, str]:
    """Host the store unless another agent on this host was faster. Return the store, or why it is not hosted."""
    try:
        return stores.host(host, port), ""
    except StoreError as error:
        if not port:  # no other agent can host it, because the others would not know the port
            raise StoreError(f"this node cannot host the rendezvous: {error}") from error
        if is_certain:
            raise StoreError(
                f"this node cannot host the rendezvous at {host}:{port}: {error}; use another port, or stop the "
                "process that listens there"
            ) from error
        return None, str(error)


def _reach(
    host: str, port: int, limit: float, is_interrupted: Callable[[], bool], why_not_host: str = ""
) -> tuple[str, str]:
    """Wait for the server; return its address, and our own address on the route to it."""
    try:
        target = await_server(host, port, limit, is_interrupted)
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, port))  # sends nothing: the kernel only looks up the route
            return target, str(probe.getsockname()[0])
    except OSError as error:
        raise _unreachable(host, port, limit, error, why_not_host) from error


def _address(parameters: RendezvousParameters, host: str, own_address: str) -> str:
    """Return an address of this node that every node of the job can use, numeric if possible."""
    if own_address and not ipaddress.ip_address(own_address.partition("%")[0]).is_loopback:
        return own_address
    if parameters.max_nodes == 1 or host == "localhost":
        return "127.0.0.1"
    return host  # the other nodes reach this node by it


def _own_address(host: str) -> str:
    """Return this host's numeric address for the name that others use; empty if the name does not resolve to this
    host, or only to loopback, which others cannot use."""
    try:
        address = str(addresses_of(host, 0, socket.SOCK_STREAM)[0][4][0])
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return ""
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return ""
    return address


def _unreachable(host: str, port: int, limit: float, error: Exception, why_not_host: str = "") -> StoreError:
    if isinstance(error, socket.gaierror) and is_no_name(error):
        return StoreError(f"{error.strerror}; check --rdzv-endpoint", host=host)
    if isinstance(error, socket.gaierror):
        return StoreError(
            f"the name {host} was not found within {limit:g} s: {error.strerror}; check --rdzv-endpoint and the "
            "name service, or use an address",
            host=host,
        )
    return StoreError(
        f"the rendezvous at {host}:{port} was not reached within {limit:g} s: {type(error).__name__}: "
        f"{next(iter(str(error).splitlines()), '')[:200]}; "
        + (f"this node, which the endpoint names, could not host it: {why_not_host}; " if why_not_host else "")
        + "check --rdzv-endpoint, that its node runs, and the firewall",
        host=host,
        port=port,
    )
