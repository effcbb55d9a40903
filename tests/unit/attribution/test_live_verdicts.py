"""The verdict that a restart prints and records is the one that the report makes afterwards.

A restart judges as soon as it takes its records to be complete. The report has all records of the job. Both are
compared over generated jobs, each restart at that moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import fold
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.inprocess._runtime import telling as wrapper_telling
from resilience.launcher import telling as launcher_telling
from resilience.telemetry import restart_lines
from resilience.telemetry.restart_lines import Choose, Complete, Hurry, Wanted
from tests.support import launch_streams, nested_streams, record_streams
from tests.support.torchrun_streams import in_cycle, stopped_in_restart, under_torchrun

SEEDS = pytest.mark.parametrize("seed", range(40))
IN_PLACE = [kind for kind in get_args(record_streams.Kind) if kind != "monitor"]  # whose loss interrupts nothing
OF_A_CYCLE: tuple[launch_streams.Kind, ...] = ("kill", "raise", "hang", "membership", "request")
BY_TORCHRUN: tuple[record_streams.Kind, ...] = ("kill", "exit", "oom", "native", "stopped")
LATEST_S = 0.5  # after which a record is written

Ask = Callable[[], object]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ask, list[Record]], Incident | None]:
    """Return the incident that is chosen live: from the wanted records as far as they were written when the restart
    took them to be complete."""
    questions: list[tuple[Wanted, Complete, Choose]] = []

    def noted(folder: Path, wanted: Wanted, complete: Complete, choose: Choose, hurry: Hurry) -> None:
        questions.append((wanted, complete, choose))

    monkeypatch.setattr(wrapper_telling, "incident", noted)
    monkeypatch.setattr(restart_lines, "incident", noted)

    def incident_of(ask: Ask, records: list[Record]) -> Incident | None:
        ask()
        wanted, complete, choose = questions.pop()
        kept = [record for record in as_written(records) if wanted(record)]
        number = next(number for number in range(len(kept) + 1) if complete(kept[:number]))
        return choose(fold(kept[:number]))

    return incident_of


Live = Callable[[Ask, list[Record]], Incident | None]


def as_written(records: list[Record]) -> list[Record]:
    """Return the records in an order in which the disk may get them: some processes write late. A rank's monitor also
    writes the records of its rank."""
    chance = random.Random(len(records))
    late_ns = {writer: round(chance.random() * LATEST_S * 1e9) for writer in dict.fromkeys(map(writer_of, records))}
    return sorted(records, key=lambda record: record.wall_ns + late_ns[writer_of(record)])


def writer_of(record: Record) -> tuple[object, ...]:
    return record.origin.node, record.origin.initial_rank, record.origin.layer


def after(origin: Origin, **place: int) -> Origin:
    """The origin of rank 0 when it goes on after a restart."""
    return msgspec.structs.replace(origin, rank=0, **place)


def is_of_cycle(incident: Incident, cycle: int) -> bool:
    return (incident.layer, incident.cycle) == ("launcher", cycle) and not incident.is_of_lost_monitors


@SEEDS
def test_verdict_of_a_restart_in_place_is_the_reports(seed: int, live: Live) -> None:
    chance = random.Random(seed)
    world = chance.choice((2, 4, 8))
    ranks = chance.sample(range(world), min(3, world - 1))
    faults = [record_streams.Fault(chance.choice(IN_PLACE), rank, number) for number, rank in enumerate(ranks)]
    records = record_streams.job(faults, world=world, spares=chance.choice((0, 1)), seed=seed).records
    by_iteration = {incident.iteration: incident for incident in fold(records)}
    for fault in faults:
        origin = next(record.origin for record in records if record.origin.iteration == fault.iteration)
        restarted = after(origin, iteration=fault.iteration + 1)
        incident = live(lambda at=restarted: wrapper_telling._in_place(Path(), at, Hurry(), print), records)  # type: ignore[misc]
        assert incident is not None
        assert judged(incident) == judged(by_iteration[fault.iteration]), fault


@SEEDS
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_verdict_of_a_restart_by_the_launcher_is_the_reports(seed: int, is_wrapped: bool, live: Live) -> None:
    chance = random.Random(seed)
    nodes = chance.choice((1, 2))
    faults = [launch_streams.Fault(chance.choice(OF_A_CYCLE), chance.randrange(2 * nodes)) for _ in range(3)]
    job = nested_streams.nested(faults, nodes) if is_wrapped else launch_streams.launched(faults, nodes)
    if is_wrapped and chance.random() < 0.5:
        nested_streams.restart_in_place(job, 0, reached=5, resumed=3)
    incidents = fold(job.records)
    for cycle, fault in enumerate(faults):
        reported = [judged(incident) for incident in incidents if is_of_cycle(incident, cycle)]
        assert bool(reported) is (fault.kind not in ("membership", "request"))
        incident = live(lambda at=cycle: launcher_telling._incident(Path(), 0, at, Hurry()), job.records)  # type: ignore[misc]
        assert ([] if incident is None else [judged(incident)]) == reported, fault


@SEEDS
@pytest.mark.parametrize("kind", BY_TORCHRUN)
def test_verdict_of_a_restart_by_torchrun_is_the_reports(kind: record_streams.Kind, seed: int, live: Live) -> None:
    first = stopped_in_restart(record_streams.job([record_streams.Fault(kind, 3, 0)], seed=seed), cause=3)
    records = under_torchrun(first + in_cycle(record_streams.job(seed=seed).records, 1), left=1)
    restarted = after(records[0].origin, cycle=1)
    incident = live(lambda: wrapper_telling._by_a_launcher(Path(), restarted, Hurry(), print), records)
    (reported,) = [incident for incident in fold(records) if incident.cycle == 0]
    assert incident is not None and judged(incident) == judged(reported)
