"""What happened in this run?  The one fold of its records: attempts, cycles, iterations, ranks and phases.

Records of all ranks and agents go in one by one, in the order of each file; how files follow one another does not
matter. Memory grows with what happened, never with the number of records. Times of several nodes are put on one clock
where the offsets of their clocks are known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from resilience.core import events
from resilience.core.records import Record
from resilience.history.cycles import Cycle, CycleHistory, Worker
from resilience.history.iterations import Iteration, IterationHistory
from resilience.history.phases import Place, TimedPhase
from resilience.history.rank_states import OF_STATES, RankState
from resilience.history.rank_time import OF_TIMES, RankSeconds, RankTimes
from resilience.history.ranks import WORKER, RankHistory


class Attempt:
    """When an attempt began and ended, by its first and last record, in UTC nanoseconds."""

    def __init__(self, at_ns: int) -> None:
        self.first_ns = at_ns
        self.last_ns = at_ns


class LastCall:
    """How a rank's last call, or its last worker, ended. outcome: None while it is not known."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.error = ""
        self.is_lost = False
        self.is_stopped = False


class History:
    """Everything that the records of a job say, so far."""

    def __init__(
        self,
        offsets: Mapping[str, int] | None = None,
        note: Callable[[events.Event], str | None] | None = None,
        has_details: bool = True,
    ) -> None:
        """offsets: how far each node's clock is ahead, in nanoseconds. note: gives a text to events to be noted.
        has_details: keep what single iterations and ranks did; without, memory does not grow with restarts in place."""
        self.job_id: str | None = None
        self.attempts: dict[int, Attempt] = {}
        self.functions: dict[str, None] = {}
        self.started: events.CallStarted | None = None  # the first call on record
        self.calls: set[tuple[int, int, int]] = set()
        self.world_size: int | None = None  # of the largest call
        self.cycles = CycleHistory()
        self.ranks = RankHistory()
        self._times = RankTimes()
        self._states: dict[str, dict[int, RankState]] = {}  # by node and initial rank
        self._last_mono: dict[str, int] = {}  # node -> monotonic nanoseconds of its last record
        self._iterations = IterationHistory()
        self._last_calls: dict[int, LastCall] = {}
        self.noted: dict[str, set[int]] = {}  # text -> initial ranks
        self._offsets = {} if offsets is None else offsets
        self._note = note
        self._has_details = has_details

    def take(self, record: Record) -> None:
        """Add what a record says."""
        origin, event = record.origin, record.event
        at = record.wall_ns - self._offsets.get(origin.node, 0)
        attempt = self.attempts.get(origin.attempt)
        if attempt is None:
            attempt = self.attempts[origin.attempt] = Attempt(at)
            self.job_id = self.job_id or origin.job_id
        elif at > attempt.last_ns:
            attempt.last_ns = at
        elif at < attempt.first_ns:
            attempt.first_ns = at
        if record.mono_ns > self._last_mono.get(origin.node, -1):
            self._last_mono[origin.node] = record.mono_ns
        rank = origin.initial_rank
        if self._note is not None and (text := self._note(event)) is not None:
            ranks = self.noted.setdefault(text, set())
            if rank is not None:
                ranks.add(rank)
        if rank is not None and type(event) in OF_STATES:
            self.state_of(origin.node, rank).take(record)
        if origin.role == "agent" or origin.layer == "launcher":
            self._take_of_launcher(record, at)
        elif rank is not None:
            kind = type(event)
            is_stage = kind is events.StageStarted or kind is events.StageEnded
            is_entry = is_stage and event.stage in _ENTRIES  # type: ignore[union-attr]
            if kind is events.StageStarted and not is_entry:
                return  # most records are phases that begin: what counts is their end
            if self._has_details:
                self._iterations.take(record, at)
            if kind in _OF_RANKS:
                self._take_of_rank(record, rank, at)
            if is_entry or (kind in OF_TIMES and not is_stage):
                self._times.take(record, rank)

    def take_all(self, records: Iterable[Record]) -> History:
        """Add what all of these say; return the history itself."""
        for record in records:
            self.take(record)
        return self

    # -- questions --------------------------------------------------------------------------------

    @property
    def iterations(self) -> dict[Place, Iteration]:
        """All iterations that something is known of."""
        return self._iterations.settled(self.cycles)

    @property
    def nodes(self) -> Collection[str]:
        return self._last_mono.keys()

    def state_of(self, node: str, rank: int) -> RankState:
        """Return the state of a rank on a node."""
        return self._states.setdefault(node, {}).setdefault(rank, RankState())

    def states(self, node: str) -> dict[int, str]:
        """Return the states of the ranks that are on a node, by initial rank."""
        return {rank: known.name for rank, known in sorted(self._states.get(node, {}).items()) if known.is_shown}

    def spent(self, until: Callable[[str], int | None] | None = None) -> dict[int, RankSeconds]:
        """Return where the time of each rank went, by initial rank.

        until: gives for a node the nanoseconds on its monotonic clock until which its ranks go on, None: only what has
        ended counts. Without it: up to each node's last record."""
        return self._times.spent(self.cycles, self._last_mono.get if until is None else until)

    @property
    def first_ns(self) -> int | None:
        return min((attempt.first_ns for attempt in self.attempts.values()), default=None)

    @property
    def last_ns(self) -> int | None:
        return max((attempt.last_ns for attempt in self.attempts.values()), default=None)

    def is_over(self, place: Place) -> bool:
        """Return True if all ranks of an iteration's call have ended it."""
        ranks = {who for who in self._iterations.seen if who[:3] == place[:3]}
        return ranks <= self._iterations.finished

    def restart_phases(self, place: Place | Cycle) -> Iterator[TimedPhase]:
        """Yield the phases of the restart that an iteration, or a cycle of the launcher, ended with."""
        if len(place) == 2:
            return self.cycles.restart_phases(place)
        return self._iterations.restart_phases(place)

    def phases(self, ranks: set[int]) -> Iterator[TimedPhase]:
        """Yield the phases of all restarts of these ranks, and of all nodes; starts by the launcher too."""
        for place in self._iterations.phases.places:
            yield from self._iterations.phases.at(place, ranks)
        yield from (phase for phase in self.cycles.phases() if isinstance(phase.who, str) or phase.who in ranks)

    def last_calls(self) -> dict[int, LastCall]:
        """Return how each rank's last call, or its last worker, ended, by initial rank."""
        found = {rank: copy.copy(last) for rank, last in self._last_calls.items()}
        preempted = {
            rank
            for part in self.cycles.last_parts()
            if part.ended is not None and part.ended.outcome == "preempted"
            for rank in part.workers
        }
        for rank, worker in self.cycles.last_workers().items():
            last = found.get(rank)
            if last is None or worker.called_ns is None:  # what a Wrapper says of an earlier cycle is over
                last = found[rank] = LastCall()
            _end_of_worker(last, worker, rank in preempted)
        return dict(sorted(found.items()))

    # -- records ----------------------------------------------------------------------------------

    def _take_of_launcher(self, record: Record, at: int) -> None:
        self.cycles.take(record, at)
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle, WORKER, WORKER)
        match event:
            case events.WorkerStarted():
                self.ranks.begin(event.worker_rank, place, at)
            case events.WorkerExited():
                kind = "failed" if not event.expected else "completed" if event.code == 0 else "interrupted"
                self.ranks.end(event.worker_rank, place, at, kind)
                self._iterations.is_settled = False

    def _take_of_rank(self, record: Record, rank: int, at: int) -> None:
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration or 0)
        match event:
            case events.CallStarted():
                self._called(place[:3], event)
                self._last_calls[rank] = LastCall()
                self.cycles.take_of_wrapper(record, rank, at)
            case events.CallEnded():
                last = self._last_calls.setdefault(rank, LastCall())
                last.outcome, last.error = event.outcome, event.error
            case events.RankExited(goodbye=False):
                self._last_calls.setdefault(rank, LastCall()).is_lost = True
            case events.IterationStarted():
                self.ranks.begin(rank, place, at)
                self._last_calls.setdefault(rank, LastCall())
            case events.IterationEnded():
                self.ranks.end(rank, place, at, event.outcome)
            case events.StageStarted(stage="run"):
                self.cycles.take_of_wrapper(record, rank, at)
            case events.Interrupted():
                self.cycles.take_of_wrapper(record, rank, at)

    def _called(self, call: tuple[int, int, int], event: events.CallStarted) -> None:
        self.calls.add(call)
        self.functions.setdefault(event.function)
        self.world_size = max(event.world_size, self.world_size or 0)
        self.started = self.started or event


_ENTRIES = ("run", "restart")  # stages that begin something else for a rank
_OF_RANKS = frozenset(
    (
        events.CallStarted,
        events.CallEnded,
        events.RankExited,
        events.IterationStarted,
        events.IterationEnded,
        events.StageStarted,
        events.Interrupted,
    )
)


def _end_of_worker(last: LastCall, worker: Worker, is_preempted: bool) -> None:
    end = worker.exit
    if end is None or last.outcome is not None:
        return
    if end.code == 0 and end.expected and not is_preempted:
        last.outcome = "completed"
    else:
        last.is_stopped, last.is_lost = end.expected, not end.expected
