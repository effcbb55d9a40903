"""Which server of an etcd does an agent ask, if one does not answer?"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from resilience.launcher.rendezvous.etcd_store import EtcdSettings, EtcdStore, connect
from tests.support.ranks import free_port

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("etcd"), reason="python-etcd is not installed")
SETTINGS = EtcdSettings("/job", timeout=20.0)
KEY = json.dumps({"action": "get", "node": {"key": "/job/key", "value": "1"}})


class Member(BaseHTTPRequestHandler):
    """Answers as a member of etcd in which each key has the value 1. advertised: the members' URLs; requests: all so
    far; may_answer: while it is not set, requests wait."""

    advertised: ClassVar[str]
    requests: ClassVar[list[str]]
    may_answer: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        self.may_answer.wait()
        text = self.advertised if self.path == "/v2/machines" else KEY
        try:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:
            pass  # the client has given up

    do_PUT = do_GET  # noqa: N815 - http.server calls it by this name

    def log_message(self, format: str, *args: object) -> None:
        pass


def member_of(*ports: int) -> type[Member]:
    """Return a member of an etcd that advertises these ports."""
    advertised = ", ".join(f"http://127.0.0.1:{port}" for port in ports)
    may_answer = threading.Event()
    may_answer.set()
    return type("Member", (Member,), {"advertised": advertised, "requests": [], "may_answer": may_answer})


@contextmanager
def running(member: type[Member], *ports: int) -> Iterator[None]:
    """Servers at these ports, until the end of the body."""
    with ExitStack() as ending:
        for port in ports:
            server = ThreadingHTTPServer(("127.0.0.1", port), member)
            ending.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            ending.callback(thread.join)
            ending.callback(server.shutdown)
        ending.callback(member.may_answer.set)
        yield


def ask_in_vain(store: EtcdStore, is_cut: threading.Event) -> None:
    """Let each known server fail twice. An agent that is cut off does not repeat a request."""
    is_cut.set()
    for _ in range(8):
        with pytest.raises(OSError, match="etcd does not answer"):
            store.check(["key"])
    is_cut.clear()


def test_agent_returns_to_the_given_endpoint_though_etcd_advertises_an_unreachable_address() -> None:
    port, is_cut = free_port(), threading.Event()
    member = member_of(free_port())
    with running(member, port):
        store = connect(SETTINGS, "127.0.0.1", port, is_cut)
        assert store.check(["key"])
    ask_in_vain(store, is_cut)
    with running(member, port):
        assert store.check(["key"])


def test_each_member_can_be_lost_also_after_all_were_away_for_a_moment() -> None:
    ports, is_cut = [free_port() for _ in range(3)], threading.Event()
    member = member_of(*ports)
    with running(member, *ports):
        store = connect(SETTINGS, "127.0.0.1", ports[0], is_cut)
    ask_in_vain(store, is_cut)
    with running(member, ports[0]):
        assert store.check(["key"])
    for port in ports:
        with running(member, port):
            assert store.check(["key"])


def test_silent_etcd_gets_a_request_once_in_the_time_that_a_request_may_take() -> None:
    port, is_cut = free_port(), threading.Event()
    member = member_of(port)
    with running(member, port):
        store = connect(EtcdSettings("/job", timeout=5.0), "127.0.0.1", port, is_cut)
        is_cut.set()  # so the store itself repeats nothing
        member.may_answer.clear()
        for ask in (lambda: store.check(["key"]), lambda: store.set("key", "1")):
            member.requests.clear()
            with pytest.raises(OSError, match="etcd does not answer"):
                ask()
            assert len(member.requests) <= 1
        member.requests.clear()
        with pytest.raises(OSError, match="etcd does not answer"):
            connect(EtcdSettings("/job", timeout=0.3), "127.0.0.1", port, is_cut)
        assert len(member.requests) <= 1
