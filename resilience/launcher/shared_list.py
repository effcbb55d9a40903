"""A list in a store that several agents append to, and that each reads from where it left off.

An entry is written by one operation under the first free number, so that there is no gap and no doubt:
an agent that dies on the way leaves the list as it was, and what one has read nobody reads otherwise.
Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable

from resilience.adapters.store import StoreLike, execute
from resilience.core.restart import CompareSet, Read


class SharedList:
    """One agent's view of a list. One thread. Methods raise StoreError if the store does not answer."""

    def __init__(self, store: StoreLike, name: str) -> None:
        self._store = store
        self._name = name
        self._count = 0  # entries that were read

    def read(self) -> list[str]:
        """Return what was appended since the last time; one look at the store if nothing was."""
        new: list[str] = []
        while True:
            (text,) = execute(Read((f"{self._name}/{self._count}",)), self._store)
            if text is None:
                return new
            self._count += 1
            new.append(text)

    def append(self, text: str, is_known: Callable[[], bool]) -> None:
        """Append an entry unless it is known; is_known is asked before each try, and is to read on first."""
        while not is_known():
            execute(CompareSet(f"{self._name}/{self._count}", text), self._store)
