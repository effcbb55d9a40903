"""On which address do our servers listen, and under which address do their peers reach them?

A server listens on the one address that its clients use: loopback if all of them are on this host. A server that
listens on all addresses is open to every network of the host, and our stores have no password."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

from resilience.system.client_sockets import addresses_of

LOOPBACK = "127.0.0.1"
NEIGHBOURS = 2  # ports after MASTER_PORT that scripts bind for their own stores
FIRST_PORT, LAST_PORT = 10000, 65535
TRIES = 20  # attempts to find a port whose neighbours are free
CLIENT_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of the address of `host`, in its address family.

    It listens on all addresses of the host if the address that clients use cannot be known here: the name has no
    address or several, it is not "localhost" and yet resolves to loopback (as some systems map their own name), or its
    address is not one of this host's (address translation).

    A TCPStore by itself listens on IPv6 and looks up the name of every client, as an IPv6 address, in the thread that
    serves all of them. If reverse DNS loses a packet, the whole store stands still for 5 s. IPv4 clients of this host
    are found in the hosts file. Raises: OSError."""
    family, address = _address(host)
    try:
        return _bound(family, address, port)
    except OSError as error:
        if not address or error.errno != errno.EADDRNOTAVAIL:
            raise
        return _bound(family, "", port)


def where_to_listen(host: str) -> str:
    """Return the numeric address on which `listen` listens for `host`: given that, it needs no name service.

    Raises: socket.gaierror if the name has no address."""
    family, address = _looked_up(host)
    return address or ("::" if family == socket.AF_INET6 else "0.0.0.0")


def listen_beside_free_ports(host: str) -> socket.socket:
    """Return a socket that listens on a free port whose next ports are free too, if there is such a port.

    Scripts bind MASTER_PORT + 1 in every iteration. So all of these ports lie outside the range from which the kernel
    takes clients' ports: only another server can take one of them meanwhile. Raises: OSError."""
    for _ in range(TRIES):
        try:
            listener = listen(host, _server_port())
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        address, port = listener.getsockname()[:2]
        if are_next_free(address, port):  # numeric, so that the name is looked up once
            return listener
        listener.close()
    return listen(host, 0)


def _server_port() -> int:
    """Return a random port that the kernel gives to no client, or 0 (any) if it may give all of them."""
    try:
        with open(CLIENT_PORTS, encoding="ascii") as file:
            lowest, highest = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    ports = [*range(highest + 1, LAST_PORT - NEIGHBOURS), *range(FIRST_PORT, lowest - NEIGHBOURS)]
    return random.SystemRandom().choice(ports) if ports else 0


def are_next_free(host: str, port: int) -> bool:
    """Return True if a server could be opened now on each of the next `NEIGHBOURS` ports."""
    if port + NEIGHBOURS > LAST_PORT:
        return False
    try:
        for number in range(port + 1, port + 1 + NEIGHBOURS):
            listen(host, number).close()
    except OSError:
        return False
    return True


def address_of(listener: socket.socket) -> str:
    """Return the numeric address by which this host reaches its own listening socket."""
    address = str(listener.getsockname()[0])
    if not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return address
    return "::1" if listener.family == socket.AF_INET6 else LOOPBACK


def _address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the address family to listen in, and the address, empty for all addresses."""
    try:
        return _looked_up(host)
    except socket.gaierror:  # other hosts may know the name
        return socket.AF_INET, ""


def _looked_up(host: str) -> tuple[socket.AddressFamily, str]:
    """Return what `_address` returns. Raises: socket.gaierror if the name has no address."""
    entries = addresses_of(host, None, socket.SOCK_STREAM)
    family = entries[0][0]
    addresses = {str(entry[4][0]) for entry in entries if entry[0] == family}
    if host == "localhost" or host in addresses:
        return family, str(entries[0][4][0])
    address = addresses.pop()
    is_unsure = bool(addresses) or ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return family, "" if is_unsure else address


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def local_address(base_host: str) -> str:
    """Return the address under which peers reach this host: the local end of a connection to the base store.

    If the base store is on this host and its name resolves to loopback here, return the name: other hosts know it
    better."""
    if not base_host:
        return socket.gethostname()
    try:
        family, _, _, _, address = addresses_of(base_host, 9, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own_address = str(probe.getsockname()[0])
    except OSError:
        return base_host
    is_known_elsewhere = base_host != "localhost" and not _is_numeric(base_host)
    return (
        base_host
        if is_known_elsewhere and ipaddress.ip_address(own_address.partition("%")[0]).is_loopback
        else own_address
    )


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
