"""What the account of a launched job says, as the report and the metrics tell it."""

from __future__ import annotations

from collections import Counter

from resilience.attribution.incident import Incident
from resilience.facts import events
from resilience.report.condensed import Report, report
from resilience.run_folder.load import load
from resilience.telemetry.metrics import MetricView
from tests.process.launching import Launched


def told(job: Launched, killed: str = "") -> Report:
    """Return the report of a job that is over. Whatever began in it has ended, but on a node of which the agent was
    killed, and each incident is counted once, unless nobody was left to count."""
    run = load(job.job.run)
    assert run.missing == ()
    found = report(run)
    began: Counter[tuple[str, str]] = Counter()
    for record in run.records:
        origin, event = record.origin, record.event
        if isinstance(event, events.CyclePhaseStarted):
            began[origin.node, event.phase] += 1
        elif isinstance(event, events.CyclePhaseEnded):
            began[origin.node, event.phase] -= 1
    assert {node for node, _ in +began} <= {killed}
    assert killed or sum(counted(job).values()) == len(found.incidents)
    return found


def only_incident(job: Launched, killed: str = "") -> Incident:
    """Return the one incident of a job."""
    (incident,) = told(job, killed).incidents
    assert incident.layer == "launcher"
    return incident


def counted(job: Launched) -> Counter[str]:
    """Return how many interruptions the metrics count as first, and not as following from one, by kind."""
    view = MetricView()
    for record in load(job.job.run).records:
        view.take(record)
    counts: Counter[str] = Counter()
    for (name, labels), value in view.samples().items():
        if name == "resilience_interruptions_total" and labels[2] == "first":
            counts[labels[0]] += int(value)
    return counts


def culprits(incident: Incident) -> list[tuple[int, str]]:
    """Return who is blamed, and of what."""
    return [(culprit.rank, culprit.what) for culprit in incident.verdict.culprits]


def cleared(incident: Incident) -> list[int]:
    """Return the ranks that are not to blame."""
    return sorted(rank for group in incident.verdict.exonerated for rank in group.ranks)
