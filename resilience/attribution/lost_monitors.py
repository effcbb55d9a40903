"""Which monitors did the launcher lose?  Builds one incident for each node and cycle that lost any.

The launcher starts another monitor in place of a lost one, and no rank is interrupted. So the loss is an incident of
its own that costs nothing, whatever else breaks in the cycle, and no cause of that (`launch_incidents`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resilience.attribution.advice import MONITOR_REPLACED, named
from resilience.attribution.culprits import Culprit
from resilience.attribution.incident import Incident, completed, nodes_of_suspects
from resilience.attribution.progress import NO_PROGRESS
from resilience.attribution.symptoms import category_of, symptom
from resilience.attribution.verdict import Verdict
from resilience.facts.in_words import count
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.history.cycles import Cycle
from resilience.history.history import History
from resilience.history.places import AT_ENTRY


def incident(history: History, place: Cycle, node: str, before: Sequence[Incident]) -> Incident:
    """Return the incident of the monitors that one node lost in a cycle. before: earlier incidents."""
    cycles = history.cycles
    part, size = cycles.parts(place)[node], cycles.world_size(place)
    lost = sorted(part.lost_monitors.items(), key=lambda entry: (entry[1].at_ns, entry[0]))
    records = tuple(
        InterruptionRecord(
            rank,
            Interruption.MONITOR_PROCESS_EXCEPTION,
            f"the monitor, process {monitor.pid}, is gone: {monitor.reason}" if monitor.pid else monitor.reason,
            node=node,
            pid=None if rank not in part.workers else part.workers[rank].pid,
            detected_wall_ns=monitor.at_ns,
        )
        for rank, monitor in lost
    )
    unwatched = [rank for rank, _ in lost if not part.is_watched_again(rank)]
    watched = [rank for rank, _ in lost if rank not in unwatched]
    watching = "other monitors watch" if len(watched) > 1 else "another monitor watches"
    actions = [f"{watching} {named(watched)}"] if watched else []
    actions += [f"{named(unwatched)} continued without a monitor"] if unwatched else []
    again = [f"rank {rank} lost {count(monitor.count, 'monitor')}" for rank, monitor in lost if monitor.count > 1]
    symptoms = [symptom(record) for record in records]
    culprits = tuple(Culprit(shown.rank, shown.what, shown.confidence, shown.rule) for shown in symptoms)
    chief = symptoms[0]
    verdict = Verdict(chief.what, category_of(records[0]), chief.rank, culprits, rules_fired=(chief.rule,))
    facts = Incident(
        *(0, *place, 0, AT_ENTRY),
        status="continued",
        kind="",
        verdict=verdict,
        layer="launcher",
        records=records,
        nodes=nodes_of_suspects(verdict, {}, records),
        reported_first=verdict.first,
        world_size=size,
        active_world_size=size,
        next_world_size=size,
        next_active_world_size=size,
        actions=(*actions, *again),
    )
    whole = completed(facts, before, {}, NO_PROGRESS, None, {})
    return whole if unwatched else msgspec.structs.replace(whole, advice=(MONITOR_REPLACED, *whole.advice[1:]))
