"""What happened in this run?  The one fold of its records: attempts, cycles, iterations, ranks and phases.

Records of all ranks and agents go in one by one, in the order of each file; the order of the files does not matter.
Memory grows with the number of incidents, never with the number of records. If the clock offsets of the nodes are
known, all times are converted to one clock."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, CycleHistory
from resilience.history.iterations import Iteration, IterationHistory
from resilience.history.phases import Place, RankRestart, TimedPhase
from resilience.history.places import place_at
from resilience.history.processes import Worker
from resilience.history.rank_states import LOST, OF_STATES, RankState, excluded_by, place_of
from resilience.history.rank_time import RankTimes
from resilience.history.ranks import WORKER, RankHistory
from resilience.history.wrapped_rank import OF_TIMES, RankSeconds


class Attempt:
    """The time span of an attempt, from its first to its last record, in UTC nanoseconds."""

    def __init__(self, at_ns: int) -> None:
        self.first_ns = at_ns
        self.last_ns = at_ns


class LastCall:
    """How a rank's last call, or its last worker, ended. place: its newest iteration. outcome: None while not known.
    ended_ns: when its call or process ended, UTC, 0 if no record of a Wrapper says so. is_lost: its process ended,
    is_asked: because it was asked to, is_signalled: by its monitor, has_failed: with an exit status other than 0."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outcome: str | None = None
        self.ended_ns = 0
        self.error = ""
        self.is_lost = False
        self.is_asked = False
        self.is_signalled = self.is_stopped = self.has_failed = False


class History:
    """Everything that the records of a job say so far."""

    def __init__(
        self,
        offsets: Mapping[str, int] | None = None,
        notes: Mapping[type[events.Event], Callable[[events.Event], str | None]] | None = None,
        has_details: bool = True,
        clock_errors: Mapping[str, int] | None = None,
    ) -> None:
        """offsets, clock_errors: how far each node's clock is ahead, and by how much that may be wrong, in nanoseconds.
        notes: functions that return the text of a note. has_details: keep iterations, also of single ranks."""
        self.job_id: str | None = None
        self.attempts: dict[int, Attempt] = {}
        self.functions: dict[str, None] = {}
        self.started: events.CallStarted | None = None  # the first call on record
        self.calls: set[tuple[int, int, int]] = set()
        self.world_size: int | None = None  # of the largest call
        self.restarts_left: dict[Cycle, int] = {}  # how often torchrun may start the ranks again after each cycle
        self._world: tuple[Cycle, int] = ((0, 0), 0)  # the last cycle with a call, and its number of ranks
        self.cycles = CycleHistory()
        self.ranks = RankHistory(has_details)
        self._offsets = {} if offsets is None else offsets
        self.clock_errors = {} if clock_errors is None else clock_errors
        self._times = RankTimes(self._offsets)
        self._states: dict[str, dict[int, RankState]] = {}  # by node and initial rank
        # node -> attempt and cycle -> monotonic nanoseconds of the last record of a rank or monitor
        self._last_mono: dict[str, dict[Cycle, int]] = {}
        self.excluded: dict[int, Place] = {}  # initial rank -> iteration after which the others went on without it
        self._iterations = IterationHistory()
        self._last_calls: dict[int, LastCall] = {}
        self._noted: dict[str, set[int]] = {}  # text -> initial ranks
        self._lost_stores: list[tuple[str, int | None, Cycle, int]] = []  # text, initial rank, cycle, UTC nanoseconds
        self._notes = {} if notes is None else notes
        self._notes_or_states = OF_STATES.union(self._notes)
        self._has_details = has_details

    def take(self, record: Record) -> None:
        """Add one record."""
        self.take_all((record,))

    def take_all(self, records: Iterable[Record]) -> History:
        """Add all these records; return the history itself."""
        handlers = self._iterations.handlers if self._has_details else {}
        notes_or_states = self._notes_or_states
        origin: Origin | None = None  # of the record before: mostly the same one, and comparing it is fast
        for record in records:  # millions of them in a large run
            if record.origin != origin:
                origin = record.origin
                offset, attempt, last_of_node = self._source_of(record)
                is_launchers = origin.is_launchers
                cycle = None if origin.role == "agent" else (origin.attempt, origin.cycle)  # it may not know its cycle
                rank, place = origin.initial_rank, place_at(origin)
                who = (*place[:3], -1 if rank is None else rank)
            event, at_ns = record.event, record.wall_ns - offset
            if at_ns > attempt.last_ns:
                attempt.last_ns = at_ns
            elif at_ns < attempt.first_ns:
                attempt.first_ns = at_ns
            if cycle is not None and record.mono_ns > last_of_node.get(cycle, -1):
                last_of_node[cycle] = record.mono_ns
            kind = type(event)
            is_phase = False
            if (kind is _STARTED or kind is _ENDED) and not is_launchers and event.stage not in _ENTRIES:  # type: ignore[union-attr]
                if kind is _STARTED:
                    continue  # most records are starts of phases; only their ends count
                is_phase = True
            if kind in notes_or_states:
                self._take_note_and_state(record, rank, at_ns)
            if is_launchers:
                self._take_of_launcher(record, at_ns)
            elif rank is not None:
                if (handler := handlers.get(kind)) is not None:
                    self._iterations.is_settled = False
                    handler(place, who, record, event, at_ns)
                if kind in _OF_RANKS:
                    self._take_of_rank(record, rank, at_ns)
                if kind in OF_TIMES and not is_phase:
                    self._times.take(record, rank)
        return self

    def _source_of(self, record: Record) -> tuple[int, Attempt, dict[Cycle, int]]:
        """Return how far the clock of a record's node is ahead, its attempt, and the node's times of last records."""
        origin = record.origin
        offset = self._offsets.get(origin.node, 0)
        attempt = self.attempts.get(origin.attempt)
        if attempt is None:
            attempt = self.attempts[origin.attempt] = Attempt(record.wall_ns - offset)
            self.job_id = self.job_id or origin.job_id
        return offset, attempt, self._last_mono.setdefault(origin.node, {})

    # -- questions --------------------------------------------------------------------------------

    @property
    def iterations(self) -> dict[Place, Iteration]:
        """Return all iterations that have a record."""
        return self._iterations.settled(self.cycles)

    @property
    def noted(self) -> dict[str, set[int]]:
        """Return the texts of all notes, each with the initial ranks that it is about."""
        noted = {text: set(ranks) for text, ranks in self._noted.items()}
        for text, rank, cycle, at_ns in self._lost_stores:
            over_ns = self.cycles.over_since(cycle)
            if over_ns is None or at_ns < over_ns:  # later the launcher ends the store
                noted.setdefault(text, set()).update(() if rank is None else (rank,))
        return noted

    @property
    def nodes(self) -> Collection[str]:
        return self._last_mono.keys()

    def states(self, node: str) -> dict[int, str]:
        """Return the states of the ranks that a node has now, by initial rank. Those of an earlier cycle or agent are
        gone, whether or not a record says how they ended."""
        shown = [(rank, known) for rank, known in sorted(self._states.get(node, {}).items()) if known.is_shown]
        present = {cycle for cycle in {known.cycle for _, known in shown} if self.is_present(node, cycle)}
        return {rank: known.without(self.excluded.get(rank)) for rank, known in shown if known.cycle in present}

    def spent(self, until: Callable[[str], int | None] | None = None) -> dict[int, RankSeconds]:
        """Return where the time of each rank went, by initial rank.

        until: returns, for a node, the end of the count in nanoseconds of its monotonic clock; if it returns None, only
        intervals that have ended count. By default the count ends with each node's last record. The count of an earlier
        cycle ends with the last record of that cycle."""

        def end_of(node: str, place: Cycle) -> int | None:
            if until is not None and self.is_present(node, place):
                return until(node)
            return self._last_of(node, place)

        return self._times.spent(self.cycles, end_of)

    def lost_at(self, rank: int, place: Cycle) -> int | None:
        """Return until when `spent` counts a lost rank in a cycle, in UTC nanoseconds; None if it called no Wrapper."""
        return self._times.counted_until((*place, rank), self._last_of)

    def is_present(self, node: str, place: Cycle) -> bool:
        """Return True if a node is in this cycle now, as far as its records say."""
        if node in self.cycles.agents:
            return self.cycles.is_present(node, place)
        return place == max(self._last_mono.get(node, ()), default=place)

    def _last_of(self, node: str, place: Cycle) -> int:
        """Return the monotonic time of the last record of a node's cycle; if it is the present one, of its agent."""
        agents = self.cycles.agents.get(node) if self.is_present(node, place) else None
        of_agent = self.cycles.part(node, place).last_ns if agents is None else agents[-1].last_ns
        return max(self._last_mono[node].get(place, 0), of_agent)

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
        """Yield the phases of the restart after an iteration or a cycle of the launcher."""
        if len(place) == 2:
            return self.cycles.restart_phases(place)
        return self._iterations.restart_phases(place)

    def restarts_after(self, place: Place | Cycle) -> Iterator[RankRestart]:
        """Yield the restarts of ranks after an iteration or a cycle of the launcher, as far as they are over."""
        if len(place) == 2:
            yield from self.cycles.restarts_after(place)
            return
        yield from self._iterations.restarts_after(place)
        if self.started_again(place) is not None:
            noticed_ns = self.iterations[place].wall_ns
            yield from self._iterations.other_launchers.restarts_after(place, noticed_ns)

    def started_again(self, place: Place) -> Place | None:
        """Return the first iteration after torchrun, or one like it, started the ranks again; None if none did."""
        return None if self._has_agents(place[0]) else self._iterations.other_launchers.following(place)

    def is_by_torchrun(self, place: Place) -> bool:
        """Return True if torchrun, or a launcher like it, runs an iteration: it stops all ranks if a process ends."""
        is_known = place[:2] in self.restarts_left and not self._has_agents(place[0])
        return is_known or self.started_again(place) is not None

    def _has_agents(self, attempt: int) -> bool:
        return any(of_cycle == attempt for of_cycle, _ in self.cycles.places)

    def restarts(self) -> Iterator[RankRestart]:
        """Yield all restarts of ranks that are over, whether or not the launcher undid them a moment later."""
        for iteration in sorted(self.iterations):
            yield from self.restarts_after(iteration)
        for cycle in self.cycles.places:
            yield from self.cycles.restarts_after(cycle)

    def phases(self, ranks: set[int]) -> Iterator[TimedPhase]:
        """Yield the phases of all restarts of these ranks and of all nodes, including first starts by the launcher."""
        for place in self._iterations.phases.places:
            yield from self._iterations.phases.at(place, ranks)
        yield from (phase for phase in self.cycles.phases() if isinstance(phase.who, str) or phase.who in ranks)

    def last_calls(self) -> dict[int, LastCall]:
        """Return how each rank's last call, or its last worker, ended, by initial rank. Ranks that the last cycle does
        not have are left out: the launcher went on without them, or they have other numbers now."""
        workers = self.cycles.last_workers()
        calls = {
            rank: copy.copy(last)
            for rank, last in self._last_calls.items()
            if rank in workers or self._is_in_last_cycle(rank, last.place[:2], bool(workers))
        }
        by_node = [] if self.cycles.places else self._states.values()
        for rank, state in itertools.chain(*(states.items() for states in by_node)):
            is_newest = rank not in calls or calls[rank].place[:2] < state.cycle  # only its monitor has a record there
            if is_newest and state.state not in LOST and self._is_in_last_cycle(rank, state.cycle, False):
                calls[rank] = LastCall((*state.cycle, 0, 0))
        parts = self.cycles.last_parts()
        stopped = [part for part in parts if part.ended is not None and part.ended.outcome == "preempted"]
        preempted = {rank for part in stopped for rank in part.workers}
        unrecorded = [part for part in parts if part.is_undecided or part.has_lost_its_agent]
        without_agent = {rank for part in unrecorded for rank in part.workers}
        for rank, worker in workers.items():
            last = calls.get(rank)
            if last is None or worker.called_ns is None:  # a Wrapper's record of an earlier cycle no longer counts
                last = calls[rank] = LastCall((*self.cycles.places[-1], WORKER, WORKER))
            _end_of_worker(last, worker, rank in preempted, rank in without_agent)
        for rank in calls.keys() & self.excluded.keys():  # its whole node may be lost, and nobody else saw its end
            last = calls[rank]
            last.is_lost |= last.outcome is None and not last.is_stopped and self.excluded[rank] >= last.place
        return dict(sorted(calls.items()))

    def _is_in_last_cycle(self, rank: int, cycle: Cycle, has_workers: bool) -> bool:
        """Return False if the job has begun a later cycle without this rank. cycle: of the rank's last call.
        has_workers: the launcher has started workers in its last cycle, but not this rank."""
        if has_workers and cycle < self.cycles.places[-1]:
            return False
        return cycle >= self._world[0] or rank < self._world[1]

    # -- records ----------------------------------------------------------------------------------

    def _take_note_and_state(self, record: Record, rank: int | None, at_ns: int) -> None:
        note = self._notes.get(type(record.event))
        if note is not None and (note_text := note(record.event)) is not None:
            if isinstance(record.event, events.StoreLost) and record.origin.role != "agent":
                cycle = (record.origin.attempt, record.origin.cycle)
                self._lost_stores.append((note_text, rank, cycle, at_ns))
            else:
                self._noted.setdefault(note_text, set()).update(() if rank is None else (rank,))
        if rank is not None and type(record.event) in OF_STATES:
            self._take_state(record, rank)
            for other in excluded_by(record):
                self.excluded[other] = max(place_of(record), self.excluded.get(other, (0, 0, 0, 0)))
                if isinstance(record.event, events.RankStoodInFor):  # a lost node's time ends with its last record
                    self._times.excluded(other, record)

    def _take_state(self, record: Record, rank: int) -> None:
        """Add a record of a rank's state. Its newest cycle counts: nothing may say how an earlier one ended."""
        origin = record.origin
        states, cycle = self._states.setdefault(origin.node, {}), (origin.attempt, origin.cycle)
        state = states.get(rank)
        if state is None or cycle > state.cycle:
            state = states[rank] = RankState(cycle)
        if cycle == state.cycle:
            state.take(record)

    def _take_of_launcher(self, record: Record, at_ns: int) -> None:
        self.cycles.take(record, at_ns)
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle, WORKER, WORKER)
        match event:
            case events.WorkerStarted():
                self.ranks.begin(event.worker_rank, place, at_ns)
            case events.WorkerExited():
                kind = "failed" if not event.expected else "completed" if event.code == 0 else "interrupted"
                self.ranks.end(event.worker_rank, place, at_ns, kind)
                self._iterations.is_settled = False
            case _:  # no other event matters here
                pass

    def _take_of_rank(self, record: Record, rank: int, at_ns: int) -> None:
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration or 0)
        if isinstance(event, events.IterationStarted):
            self.ranks.begin(rank, place, at_ns)
            self._last_call(rank, place)
        elif isinstance(event, events.IterationEnded):
            self.ranks.end(rank, place, at_ns, event.outcome)
        elif isinstance(event, events.CallEnded):
            last = self._last_call(rank, place)
            last.outcome, last.error, last.ended_ns = event.outcome, event.error, at_ns
        elif isinstance(event, events.RankExited):
            if not event.goodbye:
                last = self._last_call(rank, place)
                last.ended_ns = at_ns
                last.is_lost, last.is_asked = True, event.status.is_stop and not last.is_signalled
        elif isinstance(event, events.RankSignalled):
            self._last_call(rank, place).is_signalled = True
        elif isinstance(event, events.CallStarted):
            self._called(place[:3], event)
            if self._last_call(rank, place) is self._last_calls[rank]:
                self._last_calls[rank] = LastCall(place)
        self.cycles.take_of_wrapper(record, rank, at_ns)

    def _last_call(self, rank: int, place: Place) -> LastCall:
        """Return a rank's last call. That of an earlier cycle does not count: the files of nodes come in any order."""
        last = self._last_calls.get(rank)
        if last is None or place[:2] > last.place[:2]:
            last = self._last_calls[rank] = LastCall(place)
        elif place[:2] < last.place[:2]:
            return LastCall(place)
        last.place = max(last.place, place)
        return last

    def _called(self, call: tuple[int, int, int], event: events.CallStarted) -> None:
        self.calls.add(call)
        self.functions.setdefault(event.function)
        self.world_size = max(event.world_size, self.world_size or 0)
        self.started = self.started or event
        self._world = max(self._world, (call[:2], event.world_size))
        if event.restarts_left is not None:
            self.restarts_left[call[:2]] = event.restarts_left


_STARTED, _ENDED = events.StageStarted, events.StageEnded
_ENTRIES = ("run", "restart")  # stages whose start changes how a rank's time counts
_OF_RANKS = frozenset(
    (
        events.CallStarted,
        events.CallEnded,
        events.RankExited,
        events.RankSignalled,
        events.IterationStarted,
        events.IterationEnded,
        events.StageStarted,
        events.RankInterrupted,
    )
)


def _end_of_worker(last: LastCall, worker: Worker, is_preempted: bool, is_agent_lost: bool) -> None:
    end, last.is_asked = worker.exit, False
    if last.outcome is not None:
        return
    if end is None and not (is_agent_lost and worker.has_left_well):  # its agent may still record the end
        last.is_lost = is_agent_lost and (last.is_lost or worker.has_broken_off)
    elif end is None or (end.code == 0 and end.expected and not is_preempted):
        last.outcome = "completed"
    else:
        last.is_stopped, last.is_lost = end.expected, not end.expected
        last.has_failed = not end.expected and end.code is not None
