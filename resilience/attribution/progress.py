"""How far had a job come when it was interrupted, and with which step did it go on?

The Wrapper's ranks report the first step of their function and of each restart in place, the launcher's workers their
first step. If the workers of a cycle called a Wrapper, the steps are those of their first call: if there were several,
it is not known in which of them the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from resilience.history.cycles import Cycle, NodeCycle
from resilience.history.history import History
from resilience.history.iterations import Iteration
from resilience.history.phases import Place


class Progress(NamedTuple):
    """How far the job had come. first: the lowest step before the restart; reached: the highest step that had begun;
    resumed: the lowest one after the restart. seconds_a_step: how long a step took before the incident, None if not
    known. has_several_functions: several wrapped functions were called before a restart by the launcher."""

    first: int | None
    reached: int | None
    resumed: int | None
    seconds_a_step: Callable[[], float | None]
    has_several_functions: bool = False

    @property
    def has_steps(self) -> bool:
        return any(step is not None for step in (self.first, self.reached, self.resumed))


NO_PROGRESS = Progress(None, None, None, lambda: None)
"""Of an incident that interrupted no rank."""


def in_iteration(history: History, key: Place, last: Place) -> Progress:
    """Return the progress of an iteration that was interrupted. last: in which the incident ended, mostly the same."""
    iteration = history.iterations[key]
    again = history.started_again(last)
    reached = [step for place in {key, last} if (step := _reached(history.iterations[place])) is not None]
    has_several_functions = again is not None and key[2] > 0
    resumed = _resumed(iteration) if again is None else _first_step_of_call(history, again[:3])
    return Progress(
        _first_step(history, key),
        max(reached, default=None),
        None if has_several_functions else resumed,
        partial(_seconds_a_step, history, key),
        has_several_functions,
    )


def in_cycle(history: History, place: Cycle, steps: Mapping[int, int], silence: float | None) -> Progress:
    """Return the progress of a cycle that failed. steps: that its ranks had reached. silence: of a hang, in seconds."""
    parts, later = history.cycles.parts(place), history.cycles.following(place)
    following = {} if later is None else history.cycles.parts(later)
    steps_reached = [*steps.values(), *(part.reached for part in parts.values() if part.reached is not None)]
    reached = max(steps_reached, default=None)
    if any(worker.called_ns is not None for part in parts.values() for worker in part.workers.values()):
        return _wrapped_progress(history, place, later, reached, silence or 0.0)
    return Progress(
        _first_step_of_workers(parts),
        reached,
        _first_step_of_workers(following),
        partial(_seconds_a_step_of_workers, parts, 0 if reached is None else reached, silence or 0.0),
    )


def _wrapped_progress(
    history: History, place: Cycle, later: Cycle | None, reached: int | None, silence: float
) -> Progress:
    """Return the progress of a cycle in a wrapped function. later: the next cycle."""
    last = max((key for key in history.iterations if key[:2] == place), default=(*place, 0, 0))
    has_several_functions = last[2] > 0
    resumed = None if later is None or has_several_functions else _first_step_of_call(history, (*later, 0))
    reached = _reached_in_call(history, last[:3]) if reached is None else reached
    return Progress(
        _first_step_of_call(history, last[:3]),
        reached,
        resumed,
        partial(_seconds_a_step, history, last, silence),
        has_several_functions,
    )


def _first_step_of_call(history: History, call: tuple[int, int, int]) -> int | None:
    """Return the lowest step with which a rank began a call, None if no record says so before a restart in place."""
    for key in sorted(key for key in history.iterations if key[:3] == call):
        step = _first_step(history, key)
        if step is not None or _reached(history.iterations[key]) is not None:
            return step
    return None


def _reached_in_call(history: History, call: tuple[int, int, int]) -> int | None:
    """Return the highest step that a rank had begun in the last iteration of a call in which a step began."""
    for key in sorted((key for key in history.iterations if key[:3] == call), reverse=True):
        reached = _reached(history.iterations[key])
        if reached is not None or _first_step(history, key) is not None:
            return reached
    return None


def _reached(iteration: Iteration) -> int | None:
    """Return the highest step that a rank had begun when the iteration was interrupted, or when the launcher ended the
    rank."""
    ends = [*iteration.records, *filter(iteration.is_stopped, iteration.reported)]
    return max([*iteration.steps.values(), *(end.step for end in ends if end.step is not None)], default=None)


def _resumed(iteration: Iteration) -> int | None:
    """Return the lowest step with which a rank continued after the restart."""
    return min((end.step for end in iteration.restarts.values() if end.step is not None), default=None)


def _first_step(history: History, key: Place) -> int | None:
    """Return the lowest step with which a rank began this iteration."""
    iteration, before = history.iterations[key], history.iterations.get((*key[:3], key[3] - 1))
    resumed = None if before is None else _resumed(before)
    return min((step for step, _ in iteration.first_steps.values()), default=resumed)


def _seconds_a_step(history: History, key: Place, silence: float = 0.0) -> float | None:
    """Return how long a step took in this iteration, else in another iteration of the call. silence: how long a rank
    was silent at the end of the iteration, as far as the iteration's own records do not say it.

    The restart before an iteration says at which step it began. The first iteration says it itself; if it is of an
    earlier version, it began with step 0 if the restart after it resumed at step 0."""
    iterations = history.iterations
    other_places = sorted(iterations.keys() - {key})
    for place in (*{key} & iterations.keys(), *(place for place in other_places if place[:3] == key[:3])):
        iteration, before = iterations[place], iterations.get((*place[:3], place[3] - 1))
        entered = _resumed(before) if before is not None and place[3] > 0 else None
        loading = 0.0
        if entered is None and iteration.first_steps:
            entered, loading = min(iteration.first_steps.values())
        if entered is None and place[3] == 0 and _resumed(iteration) == 0:
            entered = 0
        # Not the longest: a rank may leave its function long after the interruption, and it does no steps then.
        runs = [seconds for outcome, seconds in iteration.runs.values() if outcome != "completed"]
        run = min(runs or [seconds for _, seconds in iteration.runs.values()], default=None)
        reached = _reached(iteration)
        if entered is not None and reached is not None and run is not None and reached > entered:
            silent = max((record.silent_for_s or 0.0 for record in iteration.records), default=0.0)
            silent = max(silent, silence) if place == key else silent
            if run > silent + loading:
                return (run - silent - loading) / (reached - entered)
    return None


def _first_step_of_workers(parts: dict[str, NodeCycle]) -> int | None:
    """Return the lowest step with which a worker began the cycle."""
    steps = [worker.first_step for part in parts.values() for worker in part.workers.values()]
    return min((step[1] for step in steps if step is not None), default=None)


def _seconds_a_step_of_workers(parts: dict[str, NodeCycle], reached: int, silence: float) -> float | None:
    """Return how long a step took in this cycle."""
    for part in parts.values():
        failed = part.failed_at
        for worker in part.workers.values():
            if failed is not None and worker.first_step is not None and worker.first_step[1] < reached:
                until = part.worked_until(worker, failed[0])
                silent = max(0.0, silence - (failed[0] - until) / 1e9)  # it waits for no rank once it is done
                ran = (until - worker.first_step[0]) / 1e9 - silent
                return max(0.0, ran) / (reached - worker.first_step[1])
    return None
