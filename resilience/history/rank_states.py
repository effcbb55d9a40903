"""What state is each rank in now?  Active, inactive, suspect, terminated, excluded or unmonitored."""

from __future__ import annotations

from resilience.core import events
from resilience.core.records import Record

HEALTHY = ("active", "inactive")
LOST = ("terminated", "excluded")


class RankState:
    """What is known about one rank on one node."""

    def __init__(self) -> None:
        self.state = "inactive"
        self.is_shown = False
        self.is_spare = False  # in the present iteration
        self.monitored_ns = self.unmonitored_ns = 0  # when a monitor began, and when a monitor was lost

    @property
    def name(self) -> str:
        """Return the state, "unmonitored" if a healthy rank has no monitor."""
        is_unmonitored = self.unmonitored_ns > self.monitored_ns
        return "unmonitored" if is_unmonitored and self.state in HEALTHY else self.state

    def take(self, record: Record) -> None:
        """Add a record of the rank or of one of its monitors."""
        origin, event = record.origin, record.event
        match event:
            case events.RankFellSilent():
                self.state = "suspect"
            case events.RankExited():
                self.state, self.is_shown = "terminated", not event.goodbye
            case events.MonitorStarted():
                self.monitored_ns = max(self.monitored_ns, record.mono_ns)
                if origin.is_launchers:  # a worker was started; a Wrapper's rank becomes active later
                    self.state, self.is_shown = "active", True
            case events.MonitorLost():
                self.unmonitored_ns, self.is_shown = record.mono_ns, True
            case _ if not origin.is_launchers:
                self._take_of_wrapper(event, origin.initial_rank)
            case _:  # no other event matters here
                pass

    def _take_of_wrapper(self, event: events.Event, rank: int | None) -> None:
        match event:
            case events.IterationStarted():
                self.is_shown, self.state, self.is_spare = True, event.state, event.state == "inactive"
            case events.IterationEnded():
                self.is_spare = False
            case events.RankStoodInFor() if event.initial_rank == rank and event.result != "completed":
                self.state = "excluded"
            case events.RankLeft():
                self.state = "excluded"
            case _:  # no other event matters here
                pass


OF_STATES = frozenset(
    (
        events.RankFellSilent,
        events.RankExited,
        events.MonitorStarted,
        events.MonitorLost,
        events.IterationStarted,
        events.IterationEnded,
        events.RankStoodInFor,
        events.RankLeft,
    )
)
"""Events that change a state."""
