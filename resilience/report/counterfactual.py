"""What if?  How a shorter limit, more frequent checkpoints or a spare would have changed this run.

Each answer is arithmetic on the records, shown with its formula and numbers. It assumes the same faults at another
cost: saved seconds become productive, and the total stays. It is not a forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from resilience.attribution.cost import Times
from resilience.attribution.incident import Incident
from resilience.facts.in_words import count, seconds

LIMITS = (1.0, 5.0, 20.0, 60.0, 300.0)  # seconds
CHECKPOINTS = (10.0, 60.0, 300.0, 900.0)  # seconds of work between two
USUAL_LIMIT = 20.0  # seconds; used if all of LIMITS exceed the observed silences
SPARES = (1, 2)
LEAST_S = 0.0005  # seconds saved; smaller answers are omitted


class WhatIf(msgspec.Struct, frozen=True):
    """One answer. saved_s: at most the time lost to the causes it addresses. ettr: resulting productive share.

    formula, inputs: as text, with numbers. assumes: the assumption behind it."""

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
    """Return the answers that would have saved time in a run.

    until_wall_ns: end of the run, or its last record. write_s: seconds to write one checkpoint."""
    if times.total_s <= 0 or not incidents:
        return ()
    answers = (
        *(sooner(times, incidents, limit) for limit in _limits(incidents)),
        *(saved_more_often(times, incidents, every, write_s) for every in _checkpoints(times, incidents)),
        *(with_spares(times, incidents, spares, until_wall_ns) for spares in SPARES),
    )
    return tuple(answer for answer in answers if answer.saved_s >= LEAST_S)


def _limits(incidents: Sequence[Incident]) -> list[float]:
    """Return limits below the longest silence."""
    longest = max((incident.cost.hang_s or 0.0 for incident in incidents), default=0.0)
    return ([limit for limit in LIMITS if limit < longest] or [USUAL_LIMIT]) if longest else []


def _checkpoints(times: Times, incidents: Sequence[Incident]) -> list[float]:
    """Return checkpoint intervals that fit into the productive time. A longer one would write no checkpoint."""
    if all(incident.cost.rework_s is None for incident in incidents):
        return []
    return [every for every in CHECKPOINTS if every < times.productive_s]


def least_change_last(answer: WhatIf) -> tuple[float, float]:
    """Return a key that sorts answers by what they save, and those that save the same by how much they change."""
    return answer.saved_s, -answer.value if answer.kind == "spares" else answer.value


def what_if_in_words(answer: WhatIf) -> str:
    """Return the change that a what-if assumes, in words."""
    if answer.kind == "limit":
        return f"a limit of {seconds(answer.value)}"
    if answer.kind == "checkpoints":
        return f"checkpoints every {seconds(answer.value)}"
    return "one spare" if answer.value == 1 else f"{answer.value:g} spares"


def sooner(times: Times, incidents: Sequence[Incident], limit: float) -> WhatIf:
    """Return the answer for a limit that ends every silence after `limit` seconds at the latest. Each rank that
    would have worked loses a silence, so of_job is the share of ranks."""
    hangs = [hang for incident in incidents if (hang := incident.cost.hang_s)]
    beyond = sum(max(0.0, hang - limit) for hang in hangs)
    of_job = min(1.0, times.hang_s / sum(hangs)) if hangs else 0.0
    longest = ", ".join(seconds(hang) for hang in sorted(hangs, reverse=True)[:5])
    more = f" and {len(hangs) - 5} shorter" if len(hangs) > 5 else ""
    return _answer(
        "limit",
        limit,
        times,
        of_job * beyond,
        "saved = share of ranks · Σ max(0, silence - limit)",
        f"{of_job:.0%} of the ranks lost silences of {longest}{more}; "
        "`resilience calibrate` shows how long healthy ranks are silent",
        "no healthy rank is ever silent for that long",
    )


def saved_more_often(times: Times, incidents: Sequence[Incident], every: float, write_s: float | None) -> WhatIf:
    """Return the answer for a checkpoint every `every` seconds of work: a fault loses half of that on average.

    every: shorter than the productive time. The existing checkpoints are assumed to cost nothing."""
    rework_times = [rework for incident in incidents if (rework := incident.cost.rework_s) is not None]
    rework_now = sum(rework_times)
    rework_then = len(rework_times) * every / 2
    writing = 0.0 if write_s is None else write_s * times.productive_s / every
    of_job = min(1.0, (times.rework_s or 0.0) / rework_now) if rework_now else 0.0  # not all ranks repeat all of it
    writing_cost = "not recorded, assumed 0 (name a section `checkpoint`)"
    if write_s is not None:
        best = math.sqrt(2 * write_s * times.productive_s / max(1, len(rework_times)))
        writing_cost = (
            f"{seconds(write_s)}, so one every {seconds(best)} would be best (√(2 · writing · work per fault))"
        )
    return _answer(
        "checkpoints",
        every,
        times,
        of_job * (rework_now - rework_then) - writing,
        "saved = share of ranks · (repeated work - faults · every / 2) - writing · work / every",
        f"{seconds(rework_now)} repeated by {of_job:.0%} of the ranks, {count(len(rework_times), 'fault')}, "
        f"{seconds(times.productive_s)} of work; writing one: {writing_cost}",
        "checkpoints cost only the time to write them" if write_s is not None else "writing a checkpoint costs nothing",
    )


def with_spares(times: Times, incidents: Sequence[Incident], spares: int, until_wall_ns: int | None) -> WhatIf:
    """Return the answer for additional waiting ranks that replace permanently lost ranks until they are used up.

    Work that missing ranks did not do counts as seconds of the whole job. Waiting for nodes counts in full."""
    steps = _missing(incidents, until_wall_ns)
    saved = sum(min(spares, missing) / size * lasted for missing, size, lasted in steps)
    waits = [
        phase.took.max_s
        for incident in incidents
        for phase in incident.phases
        if incident.verdict.what == "node_lost" and phase.name == "rendezvous"
    ]
    lacking = sum(missing * lasted for missing, _, lasted in steps)
    return _answer(
        "spares",
        spares,
        times,
        min(saved, times.idle_s) + min(sum(waits), times.restart_s),
        "saved = Σ min(spares, missing) / ranks · seconds + waiting for replacement nodes",
        f"{seconds(lacking)} of missing ranks in total; waited {seconds(sum(waits))} for {count(len(waits), 'node')}",
        "a spare takes the place of a lost rank at once",
    )


def _missing(incidents: Sequence[Incident], until_wall_ns: int | None) -> list[tuple[int, int, float]]:
    """Return stretches with fewer active ranks than at first: (missing ranks, all ranks, seconds)."""
    with_ranks = [
        candidate
        for candidate in incidents
        if candidate.active_world_size is not None and candidate.detected_wall_ns is not None
    ]
    size = max((incident.active_world_size or 0 for incident in with_ranks), default=0)
    stretches = []
    for number, incident in enumerate(with_ranks):
        end_ns = with_ranks[number + 1].detected_wall_ns if number + 1 < len(with_ranks) else until_wall_ns
        active_after = incident.next_active_world_size
        if active_after is not None and end_ns is not None and 0 < active_after < size:
            stretches.append(
                (size - active_after, size, max(0.0, (end_ns - (incident.detected_wall_ns or end_ns)) / 1e9))
            )
    return stretches


def _answer(kind: str, value: float, times: Times, saved: float, formula: str, inputs: str, assumes: str) -> WhatIf:
    ettr = (times.productive_s + saved) / times.total_s
    return WhatIf(kind, value, saved, ettr, formula, inputs, assumes)
