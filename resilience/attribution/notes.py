"""What else should a user know about a run?  Text for the events that deserve a note besides the incidents."""

from __future__ import annotations

from collections.abc import Callable

from resilience.core.watched import unlearned_in_words, watched_in_words
from resilience.facts import events
from resilience.facts.deadlines import parse_limit
from resilience.facts.in_words import count, seconds

_MISSING = {
    "file": "could not be kept",
    "rotated": "was removed by rotation",
    "terminal": "was not shown at the terminal, but is in its file",
}


def note(event: events.Event) -> str | None:
    """Return the text of an event's note, None if it deserves none. Equal texts are one note."""
    match event:
        case events.HangsWatched():
            # A Wrapper under the launcher has limits of its own.
            where = " in the wrapped function" if event.in_wrapper else ""
            return watched_in_words(event, f"hang detection{where}")
        case events.HangSuspected():
            where = f"in section {event.kind!r}" if event.kind else "outside sections"
            limit = f"a rank is ended there after {seconds(event.allowed_s)}"
            return f"a hang was suspected {where}, where no limit is set; {limit}"
        case events.RankSuspected():
            where, longest = _place(event.limit), seconds(event.longest_s)
            was = "waited in a collective" if event.hang == "in_collective" else "was late"
            return f"a rank {was} in {where}: longer than ever before ({longest}); limit {seconds(event.allowed_s)}"
        case events.RankSuspicionCompared():
            return _compared(event)
        case events.TimeoutsShadowAlarm():
            where = _place(event.limit)
            return f"a shadow limit would have ended a rank in {where}: {seconds(event.allowed_s)} (nothing was done)"
        case events.TimeoutsFitFailed():
            return f"the limit of {event.deadline!r} could not be fitted in the job: {event.error}"
        case events.TimeoutsUnread():
            return f"a rank could not read the limits in {event.file} and has the configured ones: {event.error}"
        case events.TimeoutsUnlearned():
            return unlearned_in_words(event)
        case events.RankProgressUnknown():
            return "no limit on progress was armed: a loop that makes no progress would go unnoticed"
        case events.AbortDelayed():
            at = f"{event.where}, at {event.store}" if event.store else event.where
            limit = seconds(event.limit_s)
            return f"a rank had not left the function {limit} after the abort; it had until hard_timeout to leave {at}"
        case events.AbortFailed():
            return f"the abort hook raised: {event.error}"
        case events.AbortGroup(outcome="timed out"):
            return f"the abort of group {event.group} ({event.backend}) was given up after {seconds(event.duration_s)}"
        case events.AbortGroup(outcome="failed"):
            return f"the abort of group {event.group} ({event.backend}) failed: {event.error}"
        case events.AbortGroup(note=note) if note:
            return note
        case events.MonitorLost():
            return f"a rank lost its monitor: {event.reason}"
        case events.StoreLost():
            return f"a process lost its store: {event.error}"
        case events.HookFailed(hook="monitor" | "supervision"):
            return f"work of a monitor failed ({event.hook}): {event.error}"
        case events.HookFailed(hook="sign of life"):
            return f"a rank without a working monitor could not show in the store that it lives: {event.error}"
        case events.HookFailed(hook="hosting"):
            return event.error
        case events.NodeFellSilent():
            return f"node {event.silent_node} fell silent for {seconds(event.silent_for_s)}"
        case events.CallStarted(monitor="executed"):
            return f"the monitor was started as a fresh process: {event.monitor_reason}"
        case events.CallStarted(monitor_reason=reason) if reason:
            return f"the monitor was forked, which costs memory: {reason}"
        case events.NodeUnhealthy():
            return f"a node was unhealthy: {event.check}: {event.detail}"
        case events.NodeWarned():
            return f"a node gave a warning: {event.check}: {event.detail}"
        case events.OutputLost():
            return f"some of the workers' output {_MISSING[event.place]}: {event.why}"
        case events.DrainLost():
            return f"the process that read the workers' output was lost: {event.why}; another process replaced it"
        case events.DrainStopped():
            return "the process that reads the workers' output had been stopped; the agent resumed it"
        case events.NodeExcluded():
            return f"a node left: {event.why}"
        case events.StoreProcessLost():
            lost = (
                "the job's store" if event.is_job_store else "the store of the workers" if event.is_cycle_store else ""
            )
            return (
                "the process that hosts a node's stores was lost"
                + (f", and {lost} with it" if lost else "")
                + (f": {event.why}" if event.why else "")
            )
        case events.StoreProcessStopped():
            return "the process that hosts a node's stores had been stopped; the agent resumed it"
        case events.ZygoteLost() | events.WorkersNotForked():
            return f"workers were started cold: {event.why}"
        case events.StopRequested():
            target = "a node" if event.leaves else "the job"
            return f"{target} was asked to stop: {event.source}"
        case events.ControlRequested():
            return f"a rank asked for {event.action}: {event.description}"
        case events.CycleStarted(why="membership"):
            return "a new cycle began because nodes joined or left"
        case events.TelemetryDropped():
            return f"telemetry was lost: {event.signal}s, {event.reason}"
        case events.ExportFailed():
            return f"export of {event.exported}s failed: {event.reason}"
        case events.ExportStarted(note=note) if note:
            return f"metrics are served at {event.endpoint}: {note}"
    return None


def _compared(event: events.RankSuspicionCompared) -> str | None:
    where, others = _place(event.limit), len(event.waiting) + len(event.busy)
    if event.is_confirmed:
        waited = "the other rank" if others == 1 else f"all {others} others"
        return f"a rank stood still in {where} while {waited} of its node waited for it"
    return (
        None
        if not event.waiting
        else f"{len(event.waiting)} of {count(others, 'other rank')} waited while one was late in {where}"
    )


def _place(limit: str) -> str:
    kind, name = parse_limit(limit)
    return name if kind == "section" else limit


NOTES: dict[type[events.Event], Callable[[events.Event], str | None]] = dict.fromkeys(
    (
        events.HangsWatched,
        events.HangSuspected,
        events.RankSuspected,
        events.RankSuspicionCompared,
        events.TimeoutsShadowAlarm,
        events.TimeoutsFitFailed,
        events.TimeoutsUnlearned,
        events.TimeoutsUnread,
        events.RankProgressUnknown,
        events.AbortDelayed,
        events.AbortFailed,
        events.AbortGroup,
        events.MonitorLost,
        events.StoreLost,
        events.HookFailed,
        events.NodeFellSilent,
        events.CallStarted,
        events.NodeUnhealthy,
        events.NodeWarned,
        events.OutputLost,
        events.DrainLost,
        events.DrainStopped,
        events.NodeExcluded,
        events.StoreProcessLost,
        events.StoreProcessStopped,
        events.ZygoteLost,
        events.WorkersNotForked,
        events.StopRequested,
        events.ControlRequested,
        events.CycleStarted,
        events.TelemetryDropped,
        events.ExportFailed,
        events.ExportStarted,
    ),
    note,
)
"""The function for each event that may deserve a note. Millions of other events need no look-up of their text."""
