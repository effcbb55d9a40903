"""What does the launcher add to the metrics?  Values, computed from the facts of its cycles when they are asked for.

Whatever order files are read in, the facts are the same, and so are the values. Seconds are kept in whole
nanoseconds until they are shown, so that the order of adding does not show either."""

from __future__ import annotations

from collections import defaultdict

from resilience.attribution.launch_incidents import WISHED
from resilience.attribution.symptoms import category_of, symptom
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.core.identity import trace_id
from resilience.history.cycles import NODE_LOST, Cycle, NodeCycle, phases_of, restarts_of
from resilience.history.history import History
from resilience.telemetry.span import Trace

LAYER = "launcher"
_OUTCOMES = {"completed": "completed", "failed": "interrupted", "interrupted": "interrupted", "exhausted": "exhausted"}

Labels = tuple[str, ...]
Exemplar = tuple[str, float, float]
"""Trace id, value, UTC seconds."""


class Values:
    """counts: values that add to those of the same labels; of seconds, nanoseconds. observed: name, labels,
    seconds, exemplar."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.observed: list[tuple[str, Labels, float, Exemplar | None]] = []


class LauncherMetrics:
    """The launcher's share in the metrics of one node."""

    def __init__(self, history: History, parent: Trace | None = None) -> None:
        self._history = history
        self._parent = parent

    def values(self) -> Values:
        """Return all values."""
        made = Values()
        for node, parts in self._history.cycles.nodes.items():
            for place in sorted(parts):
                part = parts[place]
                if part.started is None and part.ended is None:
                    continue
                self._cycle(made, place, part)
                before = self._history.cycles.before(node, place)
                if before is not None:
                    self._restart(made, before, node, parts[before], part)
        return made

    def _cycle(self, made: Values, place: Cycle, part: NodeCycle) -> None:
        counts = made.counts
        if part.met is not None:
            counts["resilience_job_info"] = defaultdict(
                float, {(self._history.job_id or "", str(part.met.world_size), LAYER): 1}
            )  # the last one
        if part.started is not None:
            counts["resilience_restart_iteration"][(LAYER,)] = place[1]
            counts["resilience_restart_budget_remaining"][(LAYER,)] = part.restarts_left or 0
        if part.ended is not None:
            outcome = _OUTCOMES.get(part.ended.outcome, "aborted")
            counts["resilience_restart_iterations_total"][LAYER, outcome] += 1
            is_wished = part.ended.outcome in WISHED  # then ranks end, and none of them failed
            for record, place_of in () if is_wished else _places(part):
                labels = (record.interruption.value, category_of(record), place_of)
                counts["resilience_interruptions_total"][labels] += 1
            if part.decided is not None and part.decided.fingerprint.startswith(NODE_LOST):  # it can't tell itself
                counts["resilience_interruptions_total"][Interruption.UNRESPONSIVE.value, "host", "first"] += 1

    def _restart(self, made: Values, failed: Cycle, node: str, before: NodeCycle, this: NodeCycle) -> None:
        """The restart belongs to the trace of the cycle that failed."""
        trace = format(self._parent[0] if self._parent else trace_id(self._history.job_id or "", *failed), "032x")
        for restart in restarts_of(before, this):
            exemplar = (trace, restart.duration_s, restart.wall_ns / 1e9)
            made.observed.append(("resilience_restart_duration_seconds", (LAYER,), restart.duration_s, exemplar))
        for phase in phases_of(node, before, this):
            labels = (LAYER, phase.name)
            made.observed.append(("resilience_restart_phase_duration_seconds", labels, phase.seconds, None))


def _places(part: NodeCycle) -> list[tuple[InterruptionRecord, str]]:
    """A cycle's interruptions, and of each whether it was the first or followed from it."""
    own = [seen.record for seen in sorted(part.seen, key=lambda seen: seen.at_ns) if part.is_own(seen.record)]
    first = part.mover
    is_elsewhere = part.is_failed and part.decided is None
    if first is None and not is_elsewhere:
        first = next((record.rank for record in own if symptom(record).is_own), None)
    told: list[tuple[InterruptionRecord, str]] = []
    known: set[tuple[int, bool]] = set()
    for record in own:
        is_end = record.interruption is Interruption.TERMINATED
        if (record.rank, is_end) in known:
            continue  # its monitor and the agent have both seen it
        # An end after a limit fired is that limit's doing.
        is_first = record.rank == first and not (is_end and (record.rank, False) in known)
        known.add((record.rank, is_end))
        told.append((record, "first" if is_first else "cascade"))
    return told
