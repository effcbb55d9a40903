"""Garbage is collected again after a time in which it was not."""

from __future__ import annotations

import gc
import subprocess
import sys

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


def test_garbage_from_before_the_first_entry_is_collected_and_not_frozen() -> None:
    """In a process of its own: freezing is for good."""
    program = """
import gc, weakref
from resilience.system import garbage

class Model:
    pass

gc.disable()
model = Model()
model.trainer = [model]
seen, kept = weakref.ref(model), [Model()]
del model
garbage.freeze_once()
assert seen() is None
assert gc.get_freeze_count() > 1000 and not any(each is kept for each in gc.get_objects())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
