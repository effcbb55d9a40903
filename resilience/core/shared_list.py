"""How do several agents share one list?  A list in the store that all append to, and that each reads incrementally.

One operation writes an entry under the first free number. So the list has no gaps: an agent that dies before the write
leaves the list unchanged, and all agents read the same entry under a number. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable

from resilience.core.agent_protocol import Protocol
from resilience.core.restart import CompareSet, Read


class SharedList:
    """One agent's view of a list."""

    def __init__(self, name: str) -> None:
        """name: beginning of its keys."""
        self._name = name
        self._count = 0  # entries read so far

    def read(self) -> Protocol[list[str]]:
        """Return the entries appended since the last call. If there are none, this costs one read."""
        entries: list[str] = []
        while True:
            (entry,) = yield Read((f"{self._name}/{self._count}",))
            if entry is None:
                return entries
            self._count += 1
            entries.append(entry)

    def append(self, text: str, is_known: Callable[[], Protocol[bool]]) -> Protocol[None]:
        """Append an entry unless it is known. `is_known` is called before each try; it must read new entries first."""
        while not (yield from is_known()):
            yield CompareSet(f"{self._name}/{self._count}", text)
