"""What torchelastic counts and times, as metrics of ours.

torch names its values as it likes (`SimpleElasticAgent._rendezvous.duration.ms`, `workers.<role>.flakiness`). Those
that follow its scheme for calls become a counter and a histogram; of all others the last value is shown. Names are cut
off at MOST_NAMES, and the user's word for the role of workers is left out, so that labels stay few."""

from __future__ import annotations

import re
from collections import defaultdict

from resilience.core import events
from resilience.telemetry.catalogue import OTHER, Labels

MOST_NAMES = 8
_CALL = re.compile(r"(?P<call>.+)\.(?P<what>success|failure|duration\.ms)")
_OF_ROLE = re.compile(r"workers\.(?P<role>.*)\.(?P<what>\w+)")


class ElasticMetrics:
    """What torchelastic has told on one node."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.observed: list[tuple[Labels, float]] = []  # durations of calls in seconds, of which there are few
        self.last: dict[Labels, float] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)

    def take(self, event: events.Event) -> None:
        """Add what an event says."""
        match event:
            case events.ElasticMeasured(name, value):
                self._measured(name, value)
            case events.ElasticTold(_, source, state):
                labels = (self._known("source", source), self._known("state", state))
                self.counts["resilience_elastic_events_total"][labels] += 1

    def _measured(self, name: str, value: float) -> None:
        call = _CALL.fullmatch(name)
        if call is None:
            of_role = _OF_ROLE.fullmatch(name)
            self.last[(self._known("name", name if of_role is None else f"workers.{of_role['what']}"),)] = value
            return
        label = self._known("call", call["call"])
        if call["what"] == "duration.ms":
            self.observed.append(((label,), value / 1000))
        else:
            self.counts["resilience_elastic_calls_total"][label, call["what"]] += value

    def _known(self, what: str, name: str) -> str:
        names = self._names[what]
        if name not in names and len(names) < MOST_NAMES:
            names.add(name)
        return name if name in names else OTHER
