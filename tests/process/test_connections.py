"""Connections of this process, found and ended from outside the library that made them."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch.distributed as dist

from resilience.system import patience
from resilience.system.listening_sockets import listen
from resilience.system.open_sockets import shut_down, tcp_sockets


def serve() -> tuple[int, dist.TCPStore]:
    listener = listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    return port, dist.TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
    )


def test_connection_that_is_kept_alive_is_probed_by_the_kernel() -> None:
    port, _server = serve()
    _client, connections = patience.connect(lambda: dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    assert len(connections) == 1
    with socket.socket(fileno=os.dup(connections[0].fd)) as copy:
        assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_waiting_client_gets_an_error_and_other_servers_keep_working() -> None:
    (port, _server), (other_port, _other) = serve(), serve()
    client = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    bystander = dist.TCPStore("127.0.0.1", other_port, wait_for_workers=False)
    failed: list[Exception] = []

    def wait() -> None:
        try:
            client.wait(["never"])
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert (port, None) in set(tcp_sockets())
    assert shut_down("127.0.0.1", port) == 2  # the server's own client is one too
    thread.join()  # if it had not come to wait by then, its question fails just the same
    assert len(failed) == 1
    bystander.set("key", "value")
    with pytest.raises(RuntimeError):
        client.set("key", "value")
