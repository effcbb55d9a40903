"""What state is each rank in now?  Active, inactive, suspect, terminated, excluded or unmonitored."""

from __future__ import annotations

from resilience.facts import events
from resilience.facts.records import Record
from resilience.history.cycles import Cycle
from resilience.history.phases import Place

HEALTHY = ("active", "inactive")
LOST = ("terminated", "excluded")


class RankState:
    """What is known about one rank on one node in one cycle."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.state = "inactive"
        self.is_shown = False
        self.place: Place = (0, 0, 0, 0)  # of its last iteration
        self.monitored_ns = self.unmonitored_ns = 0  # when a monitor began, and when a monitor was lost

    @property
    def name(self) -> str:
        """Return the state, "unmonitored" if a healthy rank has no monitor."""
        is_unmonitored = self.unmonitored_ns > self.monitored_ns
        return "unmonitored" if is_unmonitored and self.state in HEALTHY else self.state

    def take(self, record: Record) -> None:
        """Add a record of the rank or of one of its monitors, in this cycle."""
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
                self.unmonitored_ns = max(self.unmonitored_ns, record.mono_ns)
                self.is_shown |= self.state not in LOST  # the agent's file may be read after that of a rank that ended
            case _ if not origin.is_launchers:
                self._take_of_wrapper(event, record)
            case _:  # no other event matters here
                pass

    def without(self, place: Place | None) -> str:
        """Return the state if the other ranks went on without this rank after the iteration `place` (None: they did
        not). The rank itself may have no record of that, because its whole node is lost."""
        is_out = place is not None and place >= self.place and self.state not in LOST
        return "excluded" if is_out else self.name

    def _take_of_wrapper(self, event: events.Event, record: Record) -> None:
        rank = record.origin.initial_rank
        match event:
            case events.IterationStarted():
                self.place = place_of(record)
                self.is_shown, self.state = True, event.state
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
        events.RankStoodInFor,
        events.NodeFellSilent,
        events.RankLeft,
    )
)
"""Events that change a state."""


def place_of(record: Record) -> Place:
    origin = record.origin
    return origin.attempt, origin.cycle, origin.call, origin.iteration or 0


def excluded_by(record: Record) -> tuple[int, ...]:
    """Return the initial ranks that a record of another rank's monitor says to be out of the job."""
    match record.event:
        case events.RankStoodInFor(initial_rank=rank, result="excluded" | "discarded"):
            return () if rank == record.origin.initial_rank else (rank,)
        case events.NodeFellSilent(ranks=ranks):
            return ranks
        case _:
            return ()
