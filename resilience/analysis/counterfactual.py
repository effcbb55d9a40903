"""What if?  What a shorter limit, more frequent checkpoints or a spare would have changed in this run.

Each answer is arithmetic on what is on record, told with its formula and its numbers: the faults stay as they were,
and only what they cost is another. The saved seconds become productive ones; the total stays. It is no forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from resilience.attribution.cost import Times
from resilience.attribution.incident import Incident

LIMITS = (1.0, 5.0, 20.0, 60.0, 300.0)  # seconds
CHECKPOINTS = (10.0, 60.0, 300.0, 900.0)  # seconds of work between two
USUAL_LIMIT, USUAL_CHECKPOINTS = 20.0, 300.0  # where all of them are more than there was
SPARES = (1, 2)
LEAST_S = 0.0005  # seconds saved that are worth an answer


class WhatIf(msgspec.Struct, frozen=True):
    """One answer. saved_s: no more than was lost by the causes it addresses. ettr: productive share then.

    formula, inputs: in words, with numbers. assumes: what has to hold."""

    kind: str  # limit, checkpoints, spares
    value: float
    saved_s: float
    ettr: float
    formula: str
    inputs: str
    assumes: str


def what_ifs(
    times: Times, incidents: Sequence[Incident], until_wall_ns: int | None = None, write_s: float | None = None
) -> tuple[WhatIf, ...]:
    """Return the answers for a run that save something.

    until_wall_ns: when the run ended, or the last that is known. write_s: what writing one checkpoint takes."""
    if times.total_s <= 0 or not incidents:
        return ()
    answers = (
        *(sooner(times, incidents, limit) for limit in _limits(incidents)),
        *(saved_more_often(times, incidents, every, write_s) for every in _checkpoints(times, incidents)),
        *(with_spares(times, incidents, spares, until_wall_ns) for spares in SPARES),
    )
    return tuple(answer for answer in answers if answer.saved_s >= LEAST_S)


def _limits(incidents: Sequence[Incident]) -> list[float]:
    """Limits that would have changed something."""
    longest = max((each.cost.hang_s or 0.0 for each in incidents), default=0.0)
    return ([limit for limit in LIMITS if limit < longest] or [USUAL_LIMIT]) if longest else []


def _checkpoints(times: Times, incidents: Sequence[Incident]) -> list[float]:
    """Distances between checkpoints that there was time for."""
    if all(each.cost.rework_s is None for each in incidents):
        return []
    return [every for every in CHECKPOINTS if every < times.productive_s] or [USUAL_CHECKPOINTS]


def sooner(times: Times, incidents: Sequence[Incident], limit: float) -> WhatIf:
    """Every silence ends after `limit` seconds at the latest."""
    hangs = [hang for incident in incidents if (hang := incident.cost.hang_s)]
    saved = sum(max(0.0, hang - limit) for hang in hangs)
    longest = ", ".join(f"{hang:.3g}" for hang in sorted(hangs, reverse=True)[:5])
    more = f" and {len(hangs) - 5} shorter" if len(hangs) > 5 else ""
    return _answer(
        "limit",
        limit,
        times,
        min(saved, times.hang_s),
        "saved = Σ max(0, silence - limit)",
        f"silences of {longest}{more} s; whether a healthy rank is ever so silent: `resilience calibrate`",
        "no healthy rank is ever silent for that long",
    )


def saved_more_often(times: Times, incidents: Sequence[Incident], every: float, write_s: float | None) -> WhatIf:
    """A checkpoint after every `every` seconds of work: a fault finds half of that undone, on average.

    No incident loses more than the work since the one before; checkpoints of now are taken to cost nothing more."""
    again = [rework for incident in incidents if (rework := incident.cost.rework_s) is not None]
    now = sum(again)
    mean = times.productive_s / (len(incidents) + 1)
    then = len(again) * min(every / 2, mean)
    writing = 0.0 if write_s is None else write_s * times.productive_s / every
    words = "not on record, taken as 0 (name a section `checkpoint`)"
    if write_s is not None:
        best = math.sqrt(2 * write_s * times.productive_s / max(1, len(again)))
        words = f"{write_s:.3g} s, by which one every {best:.3g} s would be best (√(2 · writing · work per fault))"
    return _answer(
        "checkpoints",
        every,
        times,
        min(now - then - writing, times.rework_s),
        "saved = done again - faults · min(every / 2, work between faults) - writing · work / every",
        f"{now:.3g} s done again, {len(again)} faults, {times.productive_s:.4g} s of work, {mean:.3g} s between "
        f"faults; writing one: {words}",
        "checkpoints cost nothing but their writing" if write_s is not None else "writing a checkpoint costs nothing",
    )


def with_spares(times: Times, incidents: Sequence[Incident], spares: int, until_wall_ns: int | None) -> WhatIf:
    """So many ranks more that wait: they take the place of those that went for good, until they are used up.

    The work that missing ranks did not do counts as seconds of the whole job; waiting for nodes as it is."""
    steps = _missing(incidents, until_wall_ns)
    saved = sum(min(spares, missing) / size * seconds for missing, size, seconds in steps)
    waits = [
        phase.took.max_s
        for incident in incidents
        for phase in incident.phases
        if incident.verdict.what == "node_lost" and phase.name == "rendezvous"
    ]
    lacking = sum(missing * seconds for missing, _, seconds in steps)
    return _answer(
        "spares",
        spares,
        times,
        min(saved, times.idle_s) + min(sum(waits), times.restart_s),
        "saved = Σ min(spares, missing) / ranks · seconds + waiting for a node in the place of a lost one",
        f"{lacking:.3g} rank-seconds without a rank that had been there; waited {sum(waits):.3g} s for "
        f"{len(waits)} nodes",
        "a spare takes the place of a lost rank at once",
    )


def _missing(incidents: Sequence[Incident], until_wall_ns: int | None) -> list[tuple[int, int, float]]:
    """Stretches with fewer active ranks than the job had at first: how many are missing, of how many, for how long."""
    at_work = [each for each in incidents if each.active_world_size is not None and each.detected_wall_ns is not None]
    size = max((each.active_world_size or 0 for each in at_work), default=0)
    found = []
    for number, incident in enumerate(at_work):
        later = at_work[number + 1].detected_wall_ns if number + 1 < len(at_work) else until_wall_ns
        left = incident.next_active_world_size
        if left is not None and later is not None and 0 < left < size:
            found.append((size - left, size, max(0.0, (later - (incident.detected_wall_ns or later)) / 1e9)))
    return found


def _answer(kind: str, value: float, times: Times, saved: float, formula: str, inputs: str, assumes: str) -> WhatIf:
    ettr = (times.productive_s + saved) / times.total_s
    return WhatIf(kind, value, saved, ettr, formula, inputs, assumes)
