"""Which environment variables do modules read while they are imported?

During an import, the class of `os.environ` is replaced by one that records names. A copy of the whole environment
(`dict(os.environ)`, `items()`) looks up every name, which says nothing about the variables that the module uses: a copy
counts as no read. Variables that a C library reads by itself are not seen."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recorded(reads: dict[str, set[str]]) -> Iterator[None]:
    """Add the variables that the body reads to `reads`, by the package that reads them, directly or through the
    standard library. One thread."""
    recorder = _Recorder(reads)

    class Recording(type(os.environ)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            names = list(super().__iter__())
            recorder.begin_copy(names)
            return iter(names)

        def __getitem__(self, name: Any) -> Any:
            recorder.add(_reader(sys._getframe(1)), name)
            return super().__getitem__(name)

    before = type(os.environ)
    os.environ.__class__ = Recording
    try:
        yield
    finally:
        os.environ.__class__ = before
        recorder.end_copy()


class _Recorder:
    """Adds reads of variables, except those of a complete copy.

    A copy lists all names and then, or meanwhile, looks up each of them in the same order."""

    def __init__(self, reads: dict[str, set[str]]) -> None:
        self._reads = reads
        self._expected: deque[Any] = deque()  # names that a copy would look up next
        self._copied: list[tuple[str, Any]] = []  # package and name of the look-ups of a copy that is not complete

    def begin_copy(self, names: Iterable[Any]) -> None:
        self.end_copy()
        self._expected.extend(names)

    def add(self, package: str, name: Any) -> None:
        if not self._expected or self._expected[0] != name:
            self.end_copy()
            self._reads[package].add(name)
            return
        self._expected.popleft()
        self._copied.append((package, name))
        if not self._expected:
            self._copied.clear()

    def end_copy(self) -> None:
        """Look-ups of a copy that was not completed were reads."""
        for package, name in self._copied:
            self._reads[package].add(name)
        self._copied.clear()
        self._expected.clear()


def _reader(frame: Any) -> str:
    while frame is not None:
        package: str = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ("resilience", "importlib"):
            return package
        frame = frame.f_back
    return ""
