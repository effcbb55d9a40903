"""The same fault has the same fingerprint, another one has another."""

from __future__ import annotations

import pytest

from resilience.facts.fingerprints import masked, of_exception
from resilience.facts.interruptions import Frame

LIBRARY = Frame("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward")
OURS = Frame("/env/lib/python3.11/site-packages/resilience/inprocess/_runtime/call.py", 359, "_call_function")
MAIN = Frame("/home/me/train.py", 90, "<module>")
LOAD = Frame("/home/me/data.py", 7, "load")
TRAIN = Frame("/home/me/train.py", 31, "train")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bad batch 17", "bad batch 4711"),
        ("no such file: /data/a/00017.bin", "no such file: /scratch/b/3.bin"),
        ("object at 0x7f1e88a0 is gone", "object at 0x55aa01f2 is gone"),
        ("key 'user_12' is missing", "key 'user_13' is missing"),
        ("loss is 1.5e-3", "loss is 27"),
        ("shapes differ\nfirst 3", "shapes differ\nfirst 4"),
    ],
)
def test_message_counts_without_what_varies(one: str, other: str) -> None:
    assert masked(one) == masked(other)
    assert of_exception("ValueError", one, (TRAIN, LOAD)) == of_exception("ValueError", other, (TRAIN, LOAD))


def test_frames_of_the_user_alone_count_without_their_lines() -> None:
    """A Wrapper around the function, or another release of a library, changes the stack and not the fault."""
    plain = of_exception("RuntimeError", "boom", (MAIN, TRAIN, LOAD, LIBRARY))
    moved = Frame("/srv/job/data.py", 99, "load")
    wrapped = of_exception("RuntimeError", "boom", (OURS, Frame("/srv/job/train.py", 2, "train"), moved))
    assert plain == wrapped


@pytest.mark.parametrize(
    "other",
    [
        ("TypeError", "boom", (TRAIN, LOAD)),
        ("RuntimeError", "out of memory", (TRAIN, LOAD)),
        ("RuntimeError", "boom", (TRAIN, Frame("/home/me/data.py", 7, "collate"))),
    ],
)
def test_another_type_message_or_place_is_another_fault(other: tuple[str, str, tuple[Frame, ...]]) -> None:
    assert of_exception(*other) != of_exception("RuntimeError", "boom", (TRAIN, LOAD))


def test_frames_of_libraries_count_where_the_user_has_none() -> None:
    assert of_exception("OSError", "x", (LIBRARY,)) != of_exception("OSError", "x", (OURS,))
