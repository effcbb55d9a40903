"""Which variables do modules read while they are imported?

The class of `os.environ` is exchanged for one that remembers names, for the time of an import. Variables that a library
in C reads by itself are not seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recorded(reads: dict[str, set[str]]) -> Iterator[None]:
    """Add to `reads` what is read in the body: names, by the package that reads them, or for which a module of the
    standard library does. One thread."""

    class Recording(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: Any) -> Any:
            reads[_reader(sys._getframe(1))].add(name)
            return super().__getitem__(name)

    before = type(os.environ)
    os.environ.__class__ = Recording
    try:
        yield
    finally:
        os.environ.__class__ = before


def _reader(frame: Any) -> str:
    while frame is not None:
        package: str = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ("resilience", "importlib"):
            return package
        frame = frame.f_back
    return ""
