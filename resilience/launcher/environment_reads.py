"""Which environment variables do modules read while they are imported?

During an import, the class of `os.environ` is replaced by one that records names. Variables that a C library reads by
itself are not seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recorded(reads: dict[str, set[str]]) -> Iterator[None]:
    """Add the variables that the body reads to `reads`, by the package that reads them, directly or through the
    standard library. One thread."""

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
