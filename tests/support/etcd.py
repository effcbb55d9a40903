"""A real etcd, for the tests of the rendezvous on it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from resilience.system.client_sockets import await_server
from tests.support.ranks import free_port

MISSING = [
    what
    for what, is_there in (
        ("etcd (Debian: etcd-server)", shutil.which("etcd")),
        ("python-etcd (pip)", importlib.util.find_spec("etcd")),
    )
    if not is_there
]


@contextmanager
def running_etcd(folder: Path, endpoint: str, *options: str, protocol: str = "http") -> Iterator[None]:
    """An etcd that listens at this endpoint until the end of the body. It goes on with what is in the folder."""
    url = f"{protocol}://{endpoint}"
    command = ["etcd", "--data-dir", str(folder / "etcd"), "--enable-v2=true", *options]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", f"http://127.0.0.1:{free_port()}"]
    with ExitStack() as ending:
        log = ending.enter_context((folder / "etcd.log").open("ab"))
        server = subprocess.Popen(command, stdout=log, stderr=log)
        ending.callback(server.wait, 120)
        ending.callback(server.terminate)
        host, _, port = endpoint.rpartition(":")
        await_server(host.strip("[]"), int(port), 120)
        yield
