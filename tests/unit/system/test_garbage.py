"""Garbage is collected again after a time in which it was not."""

from __future__ import annotations

import gc

import pytest

from resilience.system import garbage


def test_interrupt_that_arrives_while_collections_are_switched_off_leaves_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch_off = gc.disable

    def interrupted() -> None:
        switch_off()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), garbage.postponed():
            pass
        assert gc.isenabled()
    finally:
        gc.enable()
