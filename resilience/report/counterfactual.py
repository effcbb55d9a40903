"""What if?  How a shorter limit, more frequent checkpoints or a spare would have changed this run.

Each answer is arithmetic on the records, shown with its formula and numbers. It assumes the same faults at another
cost: saved seconds become productive, and the total stays. It is not a forecast."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from resilience.attribution.cost import Times
from resilience.attribution.incident import Incident
from resilience.facts.in_words import count, seconds
from resilience.history.history import History

LIMITS = (1.0, 5.0, 20.0, 60.0, 300.0)  # seconds
CHECKPOINTS = (10.0, 60.0, 300.0, 900.0)  # seconds of work between two
USUAL_LIMIT = 20.0  # seconds; used if all of LIMITS exceed the observed silences
SPARES = (1, 2)
LEAST_S = 0.0005  # seconds saved; smaller answers are omitted


class WhatIf(msgspec.Struct, frozen=True):
    """One answer. saved_s: no more than was lost to the causes that it addresses, because it is a part of that time.
    ettr: resulting productive share.

    formula, inputs: as text, with numbers. assumes: the assumption behind it."""

    kind: str  # limit, checkpoints, spares
    value: float
    saved_s: float
    ettr: float
    formula: str
    inputs: str
    assumes: str


class Vacancies(msgspec.Struct, frozen=True):
    """What ranks and nodes that were lost for good cost, in seconds of the whole job. places: idle time of each lost
    rank's place that no spare took, in the order of the losses. waited: wait for a node in the place of each lost
    one, of the ranks that waited."""

    places: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()


NONE_VACANT = Vacancies()


def vacancies(history: History, incidents: Sequence[Incident], ranks: int, without: Collection[int] = ()) -> Vacancies:
    """Return the vacancies of a run. ranks: their number in its times. without: ranks that are not in its times."""
    iterations = history.iterations
    lost: dict[int, None] = {}
    for incident in incidents:
        iteration = iterations.get(incident.place) if len(incident.place) == 4 else None
        states = {} if iteration is None else iteration.started
        vacated = [rank for rank in incident.excluded if states.get(rank) != "inactive"]  # a spare leaves no work
        lost.update((rank, None) for rank in vacated[len(incident.stepped_in) :] if rank not in without)
    spent = history.spent() if lost else {}
    places = (spent[rank].vacant / 1e9 / ranks for rank in lost if rank in spent)
    lost_nodes = [incident for incident in incidents if incident.verdict.what == "node_lost"]
    return Vacancies(tuple(places), tuple(_waited(history, lost_node, without) / ranks for lost_node in lost_nodes))


def _waited(history: History, incident: Incident, without: Collection[int]) -> float:
    """Return the rank-seconds in which nodes met again after an incident."""
    following = history.cycles.following((incident.attempt, incident.cycle))
    if incident.layer != "launcher" or following is None:
        return 0.0
    parts = history.cycles.parts(following)
    workers = {node: len(part.workers.keys() - set(without)) for node, part in parts.items()}
    phases = [phase for phase in history.restart_phases(incident.place) if phase.name == "rendezvous"]
    return sum(phase.seconds * workers.get(phase.node, 0) for phase in phases)


def what_ifs(
    times: Times, incidents: Sequence[Incident], vacant: Vacancies = NONE_VACANT, write_s: float | None = None
) -> tuple[WhatIf, ...]:
    """Return the answers that would have saved time in a run. write_s: seconds to write one checkpoint."""
    if times.total_s <= 0 or not incidents:
        return ()
    answers = (
        *(sooner(times, incidents, limit) for limit in _limits(incidents)),
        *(saved_more_often(times, incidents, every, write_s) for every in _checkpoints(times, incidents)),
        *(with_spares(times, vacant, spares) for spares in SPARES if spares <= max(1, len(vacant.places))),
    )
    return tuple(answer for answer in answers if answer.saved_s >= LEAST_S)


def _limits(incidents: Sequence[Incident]) -> list[float]:
    """Return limits below the longest silence."""
    longest = max((incident.cost.hang_s or 0.0 for incident in incidents), default=0.0)
    return ([limit for limit in LIMITS if limit < longest] or [USUAL_LIMIT]) if longest else []


def _checkpoints(times: Times, incidents: Sequence[Incident]) -> list[float]:
    """Return checkpoint intervals that fit into the productive time. A longer one would write no checkpoint."""
    if not _rework_times(incidents):
        return []
    return [every for every in CHECKPOINTS if every < times.productive_s]


def _rework_times(incidents: Sequence[Incident]) -> list[float]:
    """Return how long each fault had ranks repeat steps, without those for which that is unknown."""
    faults = [incident for incident in incidents if not incident.interrupted_no_rank]
    return [rework for incident in faults if (rework := incident.cost.rework_s) is not None]


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
    rework_times = _rework_times(incidents)
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


def with_spares(times: Times, vacant: Vacancies, spares: int) -> WhatIf:
    """Return the answer for additional waiting ranks. Each takes the place of one lost rank for good. A waiting node
    takes the place of each lost node."""
    filled, waits = sum(vacant.places[:spares]), sum(vacant.waited)
    lost = count(len(vacant.places), "lost rank")
    return _answer(
        "spares",
        spares,
        times,
        filled + waits,
        "saved = Σ idle time of the places that spares take + waiting for replacement nodes",
        f"places of {lost} were idle for {seconds(sum(vacant.places))} of the job; waited {seconds(waits)} for "
        f"{count(len(vacant.waited), 'node')}",
        "a spare takes the place of a lost rank at once",
    )


def _answer(kind: str, value: float, times: Times, saved: float, formula: str, inputs: str, assumes: str) -> WhatIf:
    ettr = (times.productive_s + saved) / times.total_s
    return WhatIf(kind, value, saved, ettr, formula, inputs, assumes)
