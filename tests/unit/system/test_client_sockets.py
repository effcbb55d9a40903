"""Looking up names is cut short for one thread, and only while a store connects."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest

from resilience.system import client_sockets


def patience() -> tuple[int, int]:
    state = client_sockets._resolver_state()
    assert state is not None, "this C library is not glibc"
    return state.retrans, state.retry


def test_lookups_are_short_inside_and_as_before_outside() -> None:
    before = patience()
    assert before != (1, 1), "this host's resolver is as short as it can be: nothing is shown"
    inside = []

    def fail_inside() -> None:
        with client_sockets.short_lookups():
            inside.append(patience())
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert inside == [(1, 1)]
    assert patience() == before


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    with client_sockets.short_lookups():
        pass


def test_attempts_that_failed_keep_nothing_of_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        """What a caller holds."""

    def call() -> weakref.ref[Kept]:
        kept = Kept()
        with pytest.raises(OSError, match="has no address"):
            client_sockets.await_server("nowhere", 1, 0.0)
        return weakref.ref(kept)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_text_that_can_be_no_host_name_is_a_host_that_is_not_found() -> None:
    for host in ("a..b", "x" * 64):
        with pytest.raises(socket.gaierror, match="is no host name"):
            client_sockets.await_server(host, 1, 3600.0)  # it is no use to ask again
