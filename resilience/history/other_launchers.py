"""Which restarts did a launcher make that leaves no records of its own, such as torchrun?

It starts all ranks again in new processes. The number of the restart is in their environment, so that their calls are
in a later cycle of the same attempt. The restart follows the last iteration of the earlier cycle. As in
`history.rank_time`, it begins when the first rank learns of the interruption, and ends for each rank when it enters its
function. If no rank learned of one, it begins with the last end of a call or of a process that is on record."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.history.cycles import Cycle
from resilience.history.phases import Place, RankRestart


class OtherLaunchers:
    """The cycles of the ranks, as far as their own records show them. Times are UTC nanoseconds."""

    def __init__(self) -> None:
        self._entered: dict[Cycle, dict[int, int]] = {}  # when each initial rank first entered its function
        self._first: dict[Cycle, Place] = {}
        self._last: dict[Cycle, Place] = {}
        self._ended_ns: dict[Cycle, int] = {}

    def began(self, place: Place) -> None:
        """Note an iteration that has a record."""
        cycle = place[:2]
        self._first[cycle] = min(place, self._first.get(cycle, place))
        self._last[cycle] = max(place, self._last.get(cycle, place))

    def entered(self, place: Place, rank: int, at_ns: int) -> None:
        """Note that a rank entered its function."""
        self._entered.setdefault(place[:2], {}).setdefault(rank, at_ns)

    def ended(self, place: Place, at_ns: int) -> None:
        """Note that a rank ended a call, or its process ended."""
        self._ended_ns[place[:2]] = max(at_ns, self._ended_ns.get(place[:2], at_ns))

    def following(self, place: Place) -> Place | None:
        """Return the first iteration after the restart that followed an iteration, None if none did."""
        cycle = place[:2]
        if place < self._last.get(cycle, place):
            return None
        later = min((other for other in self._first if other[0] == cycle[0] and other > cycle), default=None)
        return None if later is None else self._first[later]

    def restarts_after(self, place: Place, noticed_ns: int | None) -> Iterator[RankRestart]:
        """Yield the restarts of ranks after an iteration. noticed_ns: when a rank first learned of its interruption."""
        following = self.following(place)
        since = self._ended_ns.get(place[:2]) if noticed_ns is None else noticed_ns
        if following is not None and since is not None:
            for rank, entered_ns in self._entered.get(following[:2], {}).items():
                yield RankRestart(place[:2], rank, max(0.0, (entered_ns - since) / 1e9))
