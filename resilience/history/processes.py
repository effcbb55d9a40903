"""Which processes did the launcher have on a node?  Its agents, one after the other, and the workers of each cycle."""

from __future__ import annotations

from resilience.core.watch import AGENT_LOST
from resilience.facts import events
from resilience.facts.records import Record


class AgentProcess:
    """One process of a node's agent. A node that comes back after its loss has a new one, perhaps with the same pid.
    After a boot its monotonic clock begins again."""

    def __init__(self, record: Record) -> None:
        self.attempt, self.pid = record.origin.attempt, record.origin.pid
        self.began_ns = self.last_ns = record.mono_ns  # its first and last record
        self._sequence = 0

    def is_of(self, record: Record) -> bool:
        """Return True if this process wrote the agent's record. Each process numbers its records from 0."""
        is_restarted = record.sequence == 0 and self._sequence > 0
        return (record.origin.attempt, record.origin.pid) == (self.attempt, self.pid) and not is_restarted

    def took(self, record: Record) -> None:
        self.last_ns, self._sequence = max(self.last_ns, record.mono_ns), record.sequence


class Worker:
    """One worker in one cycle. A Wrapper in the worker accounts for its own function."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.started_ns: int | None = None
        self.started_wall_ns = 0
        self.exited_ns: int | None = None
        self.exit: events.WorkerExited | None = None
        self.ended_wall_ns = 0  # when its end was recorded, UTC
        self.left: events.RankExited | None = None  # its monitor saw its process end
        self.progress: tuple[int, int, events.ProgressSign] | None = None  # the first: monotonic ns, UTC ns, signal
        self.first_step: tuple[int, int] | None = None  # monotonic ns, step
        self.how = ""
        self.evidence: str | None = None  # how its stacks were taken
        self.signals: tuple[str, str] | None = None  # signals that its monitor sent, and the limit that fired
        self.seen: events.WorkerSeen | None = None  # where it was when another rank hung
        self.seen_ns = 0  # UTC
        self.looked_ns = 0  # the same, monotonic
        self.signalled_ns = 0  # UTC, of its monitor's first signal; 0 if there was none
        self.called_ns: int | None = None  # when a Wrapper's function was called
        # Call and iteration in its Wrapper, and monotonic ns: the last one that it began, and the last one that was
        # interrupted other than by its end, with the first time.
        self.began: tuple[tuple[int, int], int] | None = None
        self.interrupted: tuple[tuple[int, int], int] | None = None
        self.died_ns: int | None = None  # when its Wrapper's monitor recorded its end

    @property
    def has_shown_progress(self) -> bool:
        """True if it sent a signal of progress, or called a Wrapper's function."""
        return self.progress is not None or self.called_ns is not None

    @property
    def has_completed(self) -> bool:
        """True if it ended by itself with exit status 0."""
        return self.exit is not None and self.exit.expected and self.exit.code == 0

    @property
    def has_ended(self) -> bool:
        """True if its agent or its monitor saw its process end."""
        return self.exit is not None or self.left is not None

    @property
    def has_broken_off(self) -> bool:
        """True if its monitor saw its process end before the program was over: not with status 0."""
        return self.left is not None and not self.left.goodbye and self.left.code != 0

    @property
    def has_left_well(self) -> bool:
        """True if its monitor saw it exit with status 0, and had not asked it to end."""
        return self.left is not None and self.left.code == 0 and self.signals is None

    @property
    def lost_its_agent(self) -> bool:
        """True if its monitor ended it because its agent was gone."""
        return self.signals is not None and self.signals[1] == AGENT_LOST

    def is_stopped(self, ran_until: int | None) -> bool:
        """Return True if the agent ended it on purpose. ran_until: end of the cycle's run, None if it still runs."""
        if self.exit is None or not self.exit.expected:
            return False
        is_late = ran_until is not None and self.exited_ns is not None and self.exited_ns > ran_until
        return self.exit.code != 0 or is_late

    def looked_at(self, look: events.WorkerSeen, at_ns: int, mono_ns: int) -> None:
        """Note where it was. The first look counts: what it does once another rank was ended is no evidence."""
        if self.seen is None:
            self.seen, self.seen_ns, self.looked_ns = look, at_ns, mono_ns

    def signalled(self, event: events.RankSignalled, at_ns: int) -> None:
        """Note a signal of its monitor."""
        self.signals = (", ".join(event.signals), event.reason)
        self.signalled_ns = self.signalled_ns or at_ns

    def was_interrupted(self, iteration: tuple[int, int], at_ns: int) -> None:
        """Note an interruption that its Wrapper recorded. The first one of an iteration counts."""
        if self.interrupted is None or self.interrupted[0] != iteration:
            self.interrupted = (iteration, at_ns)

    def progressed(self, at_ns: int, wall_ns: int, sign: events.ProgressSign) -> None:
        if self.progress is None:
            self.progress = (at_ns, wall_ns, sign)
