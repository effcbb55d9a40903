"""Hosts on one machine: network namespaces around a bridge, each with a name, an address and a link of its own.

Network, host name and name lookup are real and apart; processes, files and clocks are shared. All of it lies in
namespaces, bridge included, so that nothing of the machine's own network changes. Names hold the pid of the test
session: what a session that was killed has left is cleared away by the next one."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support.stops import await_stops

T = TypeVar("T")
NETNS = Path("/run/netns")  # where iproute2 keeps them
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PREFIX = "resilience-test-"


def missing() -> str:
    """Return why there can be no hosts here, empty if there can."""
    if shutil.which("ip") is None:
        return "NETWORKS THAT FAIL ARE NOT TESTED HERE: install iproute2"
    probe = f"{PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"NETWORKS THAT FAIL ARE NOT TESTED HERE: run as root with CAP_SYS_ADMIN ({made.stderr.strip()})"
    _ip("netns", "del", probe)
    return ""


class Host:
    """One of them. name: that others find it by; address: IPv4; network: of its namespace."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"host{number}"
        self.address = f"10.99.0.{number + 1}"
        self.network = f"{PREFIX}{os.getpid()}-{number}"
        self._hub = f"{PREFIX}{os.getpid()}-hub"
        self._port = f"port{number}"
        self.env = {
            "HOST": f"{self.network} {self.name} {folder / 'hosts'}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def plug_in(self) -> None:
        """Make the namespace and its line to the bridge."""
        _ip("netns", "add", self.network)
        _ip("-n", self._hub, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.network)
        _ip("-n", self._hub, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", self.network, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.network, "link", "set", device, "up")

    def cut(self) -> None:
        """Pull the plug: nothing gets in or out, and nobody is told."""
        _ip("-n", self._hub, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Put it back."""
        _ip("-n", self._hub, "link", "set", self._port, "up")

    def cut_from(self, other: Host) -> None:
        """Drop what is for another host, and it alone."""
        _ip("-n", self.network, "route", "add", "blackhole", f"{other.address}/32")

    def heal_to(self, other: Host) -> None:
        """Send it again."""
        _ip("-n", self.network, "route", "del", "blackhole", f"{other.address}/32")

    def pids(self) -> list[int]:
        """Return the processes that run here."""
        return [int(pid) for pid in _ip("netns", "pids", self.network).split()]

    def signal(self, number: int) -> list[int]:
        """Send a signal to every process here at once; answers to which."""
        sent: list[int] = []
        while new := [pid for pid in self.pids() if pid not in sent]:  # meanwhile one may have started another
            for pid in new:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            sent += new
        if number == signal.SIGSTOP:
            await_stops(sent)
        return sent

    def lose(self) -> None:
        """The power goes: its line is dead before its processes are, so that no other host hears of their end."""
        self.cut()
        self.signal(signal.SIGKILL)

    def within(self, body: Callable[[], T]) -> T:
        """Run something in this host's network; sockets that it makes stay there."""
        with ThreadPoolExecutor(1) as threads:  # a namespace is a thread's
            threads.submit(_enter_network, self.network).result()
            return threads.submit(body).result()

    def free_port(self) -> int:
        """Return a TCP port that nobody listens on here."""

        def ask() -> int:
            with socket.socket() as probe:
                probe.bind(("", 0))
                return int(probe.getsockname()[1])

        return self.within(ask)


class Hosts:
    """All of them, and what they know of each other's names. names: the file that their lookups read."""

    def __init__(self, count: int, folder: Path) -> None:
        self._hub = f"{PREFIX}{os.getpid()}-hub"
        self.names = folder / "hosts"
        self.all = [Host(number, folder) for number in range(count)]

    def __getitem__(self, number: int) -> Host:
        return self.all[number]

    def start(self) -> None:
        self.know_names()
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for host in self.all:
            host.plug_in()

    def know_names(self, is_known: bool = True) -> None:
        """Let every name be found, or none but localhost: the name service has failed."""
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.all if is_known)]
        self.names.write_text("\n".join(lines) + "\n")  # in place: it is mounted


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Set up hosts for the body. Whatever still runs there afterwards is ended."""
    _clear_away()
    made = Hosts(count, folder)
    try:
        made.start()
        yield made
    finally:
        _clear_away(own=True)


def enter(host: str) -> None:
    """Be a process of this host, and all that is started from here: network, host name, lookup of names.

    host: its `env["HOST"]`. In a process with one thread."""
    network, name, names = host.split(" ")
    _enter_network(network)
    _call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    socket.sethostname(name)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _call("mount", os.fsencode(names), b"/etc/hosts", None, MS_BIND, None)


def leave_network() -> None:
    """Give the calling thread a network of its own, in which even loopback is down."""
    _call("unshare", CLONE_NEWNET)


def _enter_network(network: str) -> None:
    fd = os.open(NETNS / network, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, CLONE_NEWNET)
    finally:
        os.close(fd)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


def _clear_away(own: bool = False) -> None:
    """Remove the namespaces of sessions that are gone, and our own at the end; the kernel removes what is in them."""
    for path in NETNS.glob(f"{PREFIX}*"):
        owner = re.fullmatch(rf"{PREFIX}(\d+)-\w+", path.name)
        if owner is None or (Path(f"/proc/{owner[1]}").exists() and not (own and int(owner[1]) == os.getpid())):
            continue
        for pid in _ip("netns", "pids", path.name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        _ip("netns", "del", path.name)
