"""What the launcher does while no descriptor is left for a moment."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from resilience.errors import LaunchError
from resilience.launcher.rendezvous import stores
from resilience.launcher.rendezvous.key_watch import KeyWatch
from resilience.launcher.signals import Signals
from resilience.launcher.worker import zygote
from resilience.launcher.worker.zygote import Zygote


def refuse(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_store_process_that_gets_no_descriptor_is_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "pair", refuse)
    with pytest.raises(stores.LaunchError, match=r"could not be started: .*Too many open files"):
        stores.StoreProcess.start()


def test_zygote_that_gets_no_descriptor_says_why_no_worker_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "pair", refuse)
    started = Zygote.start()
    assert (started.pid, "could not be forked: [Errno 24] Too many open files" in started.why_not) == (0, True)
    started.preload(["json"])
    (left_out,) = started.succeed(0.0)
    assert (left_out.refused, left_out.why) == (("json",), started.why_not)
    started.close()


@pytest.mark.parametrize("make", [lambda: Signals("SIGTERM"), lambda: KeyWatch(refuse)])
def test_agent_that_gets_no_descriptor_cannot_be_started(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.setattr(os, "pipe2", refuse)
    with pytest.raises(LaunchError, match="Too many open files"):
        make()


def test_preload_that_gets_no_descriptor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "pair", refuse)
    started = Zygote(os.getppid(), None)
    monkeypatch.setattr(Zygote, "why_not", "")
    started.preload(["json"])
    (left_out,) = started.succeed(0.0)
    assert (left_out.refused, left_out.is_tried) == (("json",), False)
    assert "Too many open files" in left_out.why
