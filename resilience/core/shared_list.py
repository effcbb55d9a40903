"""A list in a store that several agents append to, and that each reads from where it left off.

An entry is written by one operation under the first free number, so that there is no gap and no doubt: an agent that
dies on the way leaves the list as it was, and all agents read the same entry under a number. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable

from resilience.core.agent_protocol import Protocol
from resilience.core.restart import CompareSet, Read


class SharedList:
    """One agent's view of a list."""

    def __init__(self, name: str) -> None:
        """name: beginning of its keys."""
        self._name = name
        self._count = 0  # entries that were read

    def read(self) -> Protocol[list[str]]:
        """Return what was appended since the last time; one look at the store if nothing was."""
        new: list[str] = []
        while True:
            (text,) = yield Read((f"{self._name}/{self._count}",))
            if text is None:
                return new
            self._count += 1
            new.append(text)

    def append(self, text: str, is_known: Callable[[], Protocol[bool]]) -> Protocol[None]:
        """Append an entry unless it is known. is_known is asked before each try, and is to read on first."""
        while not (yield from is_known()):
            yield CompareSet(f"{self._name}/{self._count}", text)
