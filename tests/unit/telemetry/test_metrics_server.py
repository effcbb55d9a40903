"""What the server of a node's metrics does while its host fails."""

from __future__ import annotations

import os
import socket
import threading
import urllib.parse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.telemetry import prometheus
from tests.support.busy_node import busy_node


def test_connection_that_gets_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    server = prometheus._Threads(("127.0.0.1", 0), prometheus._Silent, False)
    for _ in range(2 * (prometheus.MOST_CONNECTIONS + prometheus.ENDING)):
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(RuntimeError):
            server.process_request(ours, ("127.0.0.1", 1))
    assert (server._threads_alive, server._since) == (0, {})
    server.server_close()


def test_job_whose_name_is_not_utf8_is_found_by_the_name_of_its_entry() -> None:
    server: Any = SimpleNamespace(_folder=Path(os.fsdecode(b"run-\xff")), _metrics=lambda *_: [b"metrics"])
    for name, answer in (("run-\\udcff", b"metrics"), ("another", b"this is job run-\\udcff\n")):
        asked = {"PATH_INFO": "/metrics", "QUERY_STRING": urllib.parse.urlencode({"job_id": name})}
        assert prometheus.MetricsServer._answer(server, asked, lambda *_: None) == [answer]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("resilience_monitor_up", "resilience_monitor_up"),
        ("resilience_interruptions_total", "resilience_interruptions"),
        ("resilience_restart_duration_seconds_count", "resilience_restart_duration_seconds"),
    ],
)
def test_request_for_one_metric_is_answered_with_it(name: str, family: str) -> None:
    registry = prometheus.Exposition(busy_node()).registry
    assert [answered.name for answered in registry.restricted_registry([name]).collect()] == [family]


def test_server_that_gets_no_thread_leaves_its_port_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[bool] = []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with monkeypatch.context() as watched:
        close = prometheus._Threads.server_close
        watched.setattr(prometheus._Threads, "server_close", lambda self: (closed.append(True), close(self)))
        exposition = prometheus.Exposition(busy_node())
        with pytest.raises(RuntimeError):
            prometheus.MetricsServer("127.0.0.1", 0, exposition, tmp_path / "run", "node", lambda *new: None)
    assert closed == [True]
    server: Any = SimpleNamespace(_stop=lambda: None)
    prometheus.MetricsServer.close(server, 1.0)
