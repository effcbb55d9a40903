"""Where do the agents of a job meet?  One key-value store, which every agent is a client of.

c10d and static: a TCPStore in the store process of one node, of the one that the endpoint names; where
several agents run on that host, of the first. The agent whose process hosts it leaves last. etcd: in etcd,
which survives any of them; the last to leave a job that is over deletes what it kept there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from resilience.adapters.connecting import await_server, short_lookups
from resilience.adapters.connections import shut_down
from resilience.errors import ConfigurationError, StoreError
from resilience.launcher import etcd_store
from resilience.launcher.stores import Hosted, StoreProcess

DEFAULT_PORT, ETCD_PORT = 29400, 2379  # torch's, for an endpoint without one
ETCD_KINDS = ("etcd", "etcd-v2")
KINDS = ("c10d", "static", *ETCD_KINDS)


class Meeting:
    """The place. server: its numeric address and port; address: under which others reach this node; is_host: it
    ends with this node's store process; forget: deletes what a job that is over leaves there; found: numeric addresses
    by the names that were looked up, each once: a name service that fails later is not missed."""

    def __init__(
        self,
        connect: Callable[[], Any],
        server: tuple[str, int],
        address: str,
        is_host: bool = False,
        forget: Callable[[], None] | None = None,
        found: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.address = address
        self.is_host = is_host
        self.forget = forget
        self.found = found
        self._connect = connect
        self._server = server
        self._clients: list[Any] = []  # torch's PrefixStore does not keep a store alive that is written in Python

    def connect(self) -> Any:
        """Return a new client, for one thread. Raises: StoreError."""
        client = self._connect()
        self._clients.append(client)
        return client

    def cut(self) -> None:
        """End all connections of this process to the place: who waits for an answer gets a StoreError. Any thread."""
        shut_down(*self._server)


def kind_of(parameters: RendezvousParameters) -> str:
    """Return which of torch's backends is meant. Raises: ConfigurationError."""
    kind = str(parameters.get("inner") or (parameters.backend if parameters.backend in KINDS else "c10d"))
    if kind not in KINDS:
        raise ConfigurationError(f"the rendezvous is asked to run on {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def static_rank(parameters: RendezvousParameters) -> int:
    """Return the rank that this node has for good. Raises: ConfigurationError."""
    if parameters.get("rank") is None:
        raise ConfigurationError("a static rendezvous needs the node's rank; pass --node-rank")
    return int(parameters.config["rank"])


def rank_of(parameters: RendezvousParameters, given: int | None) -> int | None:
    """Return this node's rank in the infrastructure's order; a static rendezvous always has one."""
    if kind_of(parameters) == "static":
        given = static_rank(parameters)
    if given is not None and not 0 <= given < parameters.max_nodes:
        raise ConfigurationError(
            f"this node's rank is {given}, and {parameters.max_nodes} nodes take part at most; ranks count from 0"
        )
    return given


def seconds(parameters: RendezvousParameters, key: str, default: float) -> float:
    text = parameters.get(key, default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigurationError(f"--rdzv-conf {key} is {text!r}, expected a number above 0")
    return value


def meet(
    parameters: RendezvousParameters,
    stores: StoreProcess,
    limit: float,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Meeting:
    """Find the place, or make it; waits at most `limit` seconds for a host that is not there yet.

    is_interrupted: True ends that wait. Raises: ConfigurationError, StoreError."""
    kind = kind_of(parameters)
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, ETCD_PORT if kind in ETCD_KINDS else DEFAULT_PORT)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if kind in ETCD_KINDS:
        return _in_etcd(parameters, host, port, limit, is_interrupted)
    is_host = _hosts(parameters, kind, host)
    hosted = _host(stores, host, port, is_host, is_certain=kind == "static" or parameters.get("is_host") is not None)
    number = port if hosted is None else hosted.port
    if number == 0:
        raise ConfigurationError(
            f"the rendezvous endpoint {parameters.endpoint!r} has no port, and this node does not host it; "
            "give the port"
        )
    if hosted is not None:
        target, own = hosted.address, ""
        found = _own_address(host)
    else:
        target, own = _reach(host, number, limit, is_interrupted)
        found = target
    return Meeting(
        lambda: connect(target, number, limit),
        (target, number),
        parameters.local_addr or _address(parameters, host, own),
        hosted is not None,
        found={host: found} if found else {},
    )


def _in_etcd(
    parameters: RendezvousParameters, host: str, port: int, limit: float, is_interrupted: Callable[[], bool]
) -> Meeting:
    target, own = _reach(host, port, limit, is_interrupted)

    def connect_etcd() -> Any:
        try:
            return etcd_store.connect(parameters, target, port)
        except OSError as error:
            raise _unreachable(host, port, limit, error) from error

    return Meeting(
        connect_etcd,
        (target, port),
        parameters.local_addr or _address(parameters, host, own),
        forget=lambda: connect_etcd().forget(),
    )


def connect(host: str, port: int, limit: float) -> dist.TCPStore:
    """Return a new client of a TCPStore. Raises: StoreError."""
    try:
        with short_lookups():
            return dist.TCPStore(
                await_server(host, port, limit), port, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreachable(host, port, limit, error) from error


def _hosts(parameters: RendezvousParameters, kind: str, host: str) -> bool:
    if kind == "static":
        return static_rank(parameters) == 0
    told = parameters.get_as_bool("is_host")
    if told is not None:
        return told
    try:
        return _matches_machine_hostname(host)
    except OSError:  # nobody knows this host's own name
        return False


def _host(stores: StoreProcess, host: str, port: int, is_host: bool, is_certain: bool) -> Hosted | None:
    """Host the store if that is this node's part, and nobody else on this host was faster."""
    if not is_host:
        return None
    try:
        return stores.host(host, port)
    except StoreError as error:
        if is_certain:
            raise StoreError(
                f"this node was to host the rendezvous at {host}:{port} and cannot: {error}; use another port, or end "
                "what listens there"
            ) from error
        return None


def _reach(host: str, port: int, limit: float, is_interrupted: Callable[[], bool]) -> tuple[str, str]:
    """Wait for the server; return its address, and ours on the way to it."""
    try:
        target = await_server(host, port, limit, is_interrupted)
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.connect((target, port))  # sends nothing: the kernel looks up the route
            return target, str(line.getsockname()[0])
    except OSError as error:
        raise _unreachable(host, port, limit, error) from error


def _address(parameters: RendezvousParameters, host: str, own: str) -> str:
    """Return an address of this node that every node of the job can use, numeric where it can be."""
    if own and not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return own
    if parameters.max_nodes == 1 or host == "localhost":
        return "127.0.0.1"
    return host  # the others come here by it


def _own_address(host: str) -> str:
    """Return the numeric address of this host under the name that others use, empty if that is no address of it
    (loopback, as some systems have it, is none for others)."""
    try:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return ""
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return ""
    return address


def _unreachable(host: str, port: int, limit: float, error: Exception) -> StoreError:
    if isinstance(error, socket.gaierror):
        return StoreError(
            f"the name {host} was not found within {limit:g} s: {error.strerror}; check --rdzv-endpoint and the "
            "name service, or give an address",
            host=host,
        )
    return StoreError(
        f"the rendezvous at {host}:{port} was not reached within {limit:g} s: {type(error).__name__}: "
        f"{next(iter(str(error).splitlines()), '')[:200]}; check --rdzv-endpoint, that its node runs, and the firewall",
        host=host,
        port=port,
    )
