"""How often, how long, how many?  Metrics, computed from records and timing histograms.

`METRICS` is the catalogue: name, kind, labels, buckets, and the events each metric is a view of; the docs
are made from it. `MetricView` folds the records of one node into values; it keeps what depends on order
apart for each rank and counts what all ranks of the node see once, so a replay of the record files gives
the numbers of the live run. prometheus_client only puts them into words (`collect`), when asked.

Base units, seconds. Labels have few values and never hold text; what the user names (sections) is cut
off at MAX_SECTIONS. Histograms are those of the node, not of a rank."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from resilience.core import events
from resilience.core.identity import Origin, trace_id
from resilience.core.records import Record
from resilience.core.symptoms import category_of, symptom
from resilience.telemetry.timings import HEARTBEAT, Histogram, Timings, upper_bound

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

MAX_SECTIONS = 16  # names of sections that get series of their own; the others are added up as "other"
OTHER = "other"
LAYER = "inprocess"

RESTART_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PHASE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 120.0)
DURATION_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Metric(msgspec.Struct, frozen=True):
    """One metric. events: what it is a view of; () where it comes from timing histograms or exporters."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    events: tuple[type[events.Event], ...] = ()
    buckets: tuple[float, ...] = ()
    source: str = ""


_E = events
METRICS: tuple[Metric, ...] = (
    Metric("resilience_build_info", "gauge", "Versions in use; always 1.", ("version", "torch"), (_E.CallStarted,)),
    Metric(
        "resilience_job_info",
        "gauge",
        "The wrapped function; always 1.",
        ("name", "world_size", "layer"),
        (_E.CallStarted,),
    ),
    Metric(
        "resilience_restart_iterations_total",
        "counter",
        "Iterations that ended, once for all ranks of the node.",
        ("layer", "outcome"),
        (_E.IterationEnded, _E.RankStoodInFor),
    ),
    Metric("resilience_restart_iteration", "gauge", "The iteration under way.", ("layer",), (_E.IterationStarted,)),
    Metric(
        "resilience_restart_duration_seconds",
        "histogram",
        "From detection to the first progress, a sample a rank.",
        ("layer", "interruption"),
        (_E.RestartEnded,),
        RESTART_BUCKETS,
    ),
    Metric(
        "resilience_restart_phase_duration_seconds",
        "histogram",
        "How long a phase of a restart took, a sample a rank.",
        ("layer", "phase"),
        (_E.StageEnded,),
        PHASE_BUCKETS,
    ),
    Metric(
        "resilience_interruptions_total",
        "counter",
        "Interruption records; origin tells faults (the store has them first, or a process ended) from what followed.",
        ("interruption", "category", "origin"),
        (_E.Interrupted, _E.OutcomeSeen, _E.MonitorEnded),
    ),
    Metric(
        "resilience_hangs_detected_total",
        "counter",
        "Limits that were exceeded.",
        ("detector", "section"),
        (_E.RankFellSilent,),
    ),
    Metric(
        "resilience_rank_state",
        "gauge",
        "The state a rank is in; 1.",
        ("rank", "state"),
        (_E.IterationStarted, _E.RankFellSilent, _E.RankExited, _E.RankLeft, _E.RankStoodInFor, _E.MonitorLost),
    ),
    Metric(
        "resilience_ranks",
        "gauge",
        "Ranks of the node by state.",
        ("state",),
        (_E.IterationStarted, _E.RankFellSilent, _E.RankExited, _E.RankLeft, _E.RankStoodInFor, _E.MonitorLost),
    ),
    Metric(
        "resilience_productive_seconds_total",
        "counter",
        "Rank-seconds of active ranks in the function, what is lost inside included (see lost_seconds).",
        (),
        (_E.StageStarted, _E.StageEnded, _E.IterationStarted),
    ),
    Metric(
        "resilience_lost_seconds_total",
        "counter",
        "Rank-seconds lost: startup until the function is entered, restart, hang (silence until a limit fired).",
        ("cause",),
        (_E.CallStarted, _E.StageStarted, _E.RestartEnded, _E.RankFellSilent),
    ),
    Metric(
        "resilience_monitor_up",
        "gauge",
        "Monitors of the node that watch their rank.",
        (),
        (_E.MonitorStarted, _E.MonitorEnded, _E.MonitorLost),
    ),
    Metric("resilience_events_total", "counter", "Records by kind of event.", ("event",), events.CATALOGUE),
    Metric(
        "resilience_telemetry_dropped_total",
        "counter",
        "Records, spans or measurements that were lost.",
        ("signal", "reason"),
        (_E.TelemetryDropped, _E.MonitorEnded),
    ),
    Metric(
        "resilience_telemetry_errors_total",
        "counter",
        "Exporters that could not start or send.",
        ("signal", "reason"),
        (_E.ExportFailed,),
    ),
    Metric(
        "resilience_heartbeat_interval_seconds",
        "histogram",
        "Time from one heartbeat to the next.",
        (),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
    Metric(
        "resilience_section_duration_seconds",
        "histogram",
        "How long sections took; other: sections beyond the first names.",
        ("section",),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
_REASONS = ("sink", "queue", "export", "malformed", "overrun", "closing")
_EXPORT_SIGNALS = {"prometheus": "metric", "otlp": "span"}


class _Buckets(msgspec.Struct):
    """A histogram being filled. exemplars: bucket -> (trace id, value, UTC seconds)."""

    counts: list[int]
    sum_ns: int = 0  # whole nanoseconds, so that the order of adding does not show
    exemplars: dict[int, tuple[str, float, float]] = {}


class _Rank:
    """What is known of one rank of the node."""

    def __init__(self) -> None:
        self.state = "inactive"
        self.is_shown = False
        self.is_unmonitored = False
        self.has_started = False  # its function was entered in the present call
        self.call_started_ns: int | None = None
        self.run_started_ns: int | None = None
        self.is_active = False


class _Pending(msgspec.Struct):
    """Interruptions of one iteration that wait to be told apart into first and cascade."""

    first: int | None = None
    waiting: list[tuple[int, bool | None, str, str]] = []  # rank, is first (None: if its rank is), kind, category


IterationKey = tuple[int, int, int, int]


class MetricView:
    """Folds records of one node into metrics. Thread-safe.

    clock: monotonic nanoseconds of this host, to count functions that are still running."""

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._call: IterationKey = (0, 0, 0, -1)
        self._iteration: IterationKey = (0, 0, 0, -1)
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in METRICS}
        self._histograms: dict[str, dict[Labels, _Buckets]] = {
            metric.name: {} for metric in METRICS if metric.kind == "histogram"
        }
        self._timings = Timings()
        self._ranks: dict[int, _Rank] = {}
        self._pending: dict[IterationKey, _Pending] = defaultdict(_Pending)
        self._ended: set[IterationKey] = set()
        self._monitors: set[int] = set()  # ranks that are monitored

    # -- folding --------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Add what a record says."""
        with self._lock:
            self._take(record)

    def take_timings(self, timings: Timings) -> None:
        """Replace what is known of heartbeats and sections: the sum of all ranks' histograms."""
        with self._lock:
            self._timings = timings

    def _take(self, record: Record) -> None:
        origin, event = record.origin, record.event
        self._count("resilience_events_total", (str(event.__struct_config__.tag),))
        match event:
            case events.TelemetryDropped():
                # A monitor's own sink is its record file, and that says at its end what it has lost.
                if event.reason != "sink" or origin.role != "monitor":
                    labels = (str(event.signal), _reason(event.reason))
                    self._count("resilience_telemetry_dropped_total", labels, event.count)
            case events.ExportFailed():
                labels = (
                    _EXPORT_SIGNALS[event.exporter],
                    "start" if event.reason.startswith("cannot start") else "send",
                )
                self._count("resilience_telemetry_errors_total", labels)
            case events.Interrupted():
                self._interrupted(origin, event)
        if origin.initial_rank is None:
            return
        rank = self._ranks.setdefault(origin.initial_rank, _Rank())
        self._take_of_rank(record, rank)

    def _take_of_rank(self, record: Record, rank: _Rank) -> None:
        origin, event = record.origin, record.event
        assert origin.initial_rank is not None
        match event:
            case events.CallStarted():
                rank.call_started_ns, rank.has_started = record.mono_ns, False
                if _key(origin) >= self._call:
                    self._call = _key(origin)
                    self._values["resilience_build_info"] = {(event.resilience_version, event.torch_version): 1}
                    self._values["resilience_job_info"] = {(event.function, str(event.world_size), LAYER): 1}
            case events.IterationStarted():
                rank.is_shown, rank.state, rank.is_active = True, event.state, event.state == "active"
                self._iteration = max(self._iteration, _key(origin))
                self._values["resilience_restart_iteration"][(LAYER,)] = self._iteration[3]
            case events.IterationEnded():
                if event.outcome != "lost":  # of a lost one its stand-in knows the outcome
                    self._iteration_ended(origin, event.outcome == "completed")
            case events.RankStoodInFor():
                if event.initial_rank == origin.initial_rank:
                    self._iteration_ended(origin, event.result == "completed")
                    rank.state = "excluded" if event.result != "completed" else rank.state
            case events.StageStarted(stage="run"):
                self._run_started(record, rank)
            case events.StageEnded():
                self._stage_ended(event, rank)
            case events.RestartEnded():
                self._restart_ended(record, event)
            case events.OutcomeSeen():
                self._first_known(origin, event.by)
            case events.RankFellSilent():
                rank.state = "suspect"
                detector, _, section = event.limit.partition(":")
                section = self._section(section) if detector == "section" else ""
                self._count("resilience_hangs_detected_total", (detector, section))
                if event.severity == "soft":
                    self._add_seconds("resilience_lost_seconds_total", ("hang",), event.silent_for_s)
            case events.RankExited():
                rank.state, rank.is_shown = "terminated", not event.goodbye
            case events.RankLeft():
                rank.state = "excluded"
            case events.MonitorStarted():
                self._monitors.add(origin.initial_rank)
            case events.MonitorLost():
                rank.is_unmonitored = True
                self._monitors.discard(origin.initial_rank)
            case events.MonitorEnded():
                self._monitor_ended(origin, event)

    def _run_started(self, record: Record, rank: _Rank) -> None:
        rank.run_started_ns = record.mono_ns
        if not rank.has_started and rank.call_started_ns is not None:
            waited = (record.mono_ns - rank.call_started_ns) / 1e9
            self._add_seconds("resilience_lost_seconds_total", ("startup",), waited)
        rank.has_started = True

    def _stage_ended(self, event: events.StageEnded, rank: _Rank) -> None:
        duration = max(0.0, event.duration_s)
        if event.stage == "run":
            rank.run_started_ns = None
            if rank.is_active:
                self._add_seconds("resilience_productive_seconds_total", (), duration)
        elif event.stage in events.PHASES and event.outcome != "lost":
            self._observe("resilience_restart_phase_duration_seconds", (LAYER, event.stage), duration)

    def _restart_ended(self, record: Record, event: events.RestartEnded) -> None:
        origin, duration = record.origin, max(0.0, event.duration_s)
        trace = format(trace_id(origin.job_id, origin.attempt, origin.cycle), "032x")
        labels = (LAYER, event.interruption)
        self._observe("resilience_restart_duration_seconds", labels, duration, (trace, duration, record.wall_ns / 1e9))
        self._add_seconds("resilience_lost_seconds_total", ("restart",), duration)

    def _iteration_ended(self, origin: Origin, is_completed: bool) -> None:
        key = _key(origin)
        if key not in self._ended:
            self._ended.add(key)
            outcome = "completed" if is_completed else "interrupted"
            self._count("resilience_restart_iterations_total", (LAYER, outcome))

    # -- first and cascade ----------------------------------------------------------------------

    def _interrupted(self, origin: Origin, event: events.Interrupted) -> None:
        record = event.record
        key = _key(origin) if record.iteration is None else (*_key(origin)[:3], record.iteration)
        pending = self._pending[key]
        found = symptom(record)
        # What only echoes another rank's fault is never the first; a death is a fault of its own.
        is_first = False if not found.is_own else True if found.rule == 1 else None
        pending.waiting.append((record.rank, is_first, record.interruption.value, category_of(record)))
        if pending.first is not None:
            self._settle(pending, pending.first)

    def _first_known(self, origin: Origin, first: int | None) -> None:
        if first is not None:
            pending = self._pending[_key(origin)]
            pending.first = first
            self._settle(pending, first)

    def _monitor_ended(self, origin: Origin, event: events.MonitorEnded) -> None:
        """Count what nobody on this node will tell apart any more: the rank's own is the first known."""
        assert origin.initial_rank is not None
        self._monitors.discard(origin.initial_rank)
        if event.dropped_records:
            self._count("resilience_telemetry_dropped_total", ("record", "sink"), event.dropped_records)
        for pending in self._pending.values():
            if any(rank == origin.initial_rank for rank, *_ in pending.waiting):
                self._settle(pending, origin.initial_rank)

    def _settle(self, pending: _Pending, first: int) -> None:
        for rank, is_first, interruption, category in pending.waiting:
            place = "first" if (rank == first if is_first is None else is_first) else "cascade"
            labels = (interruption, category, place)
            self._count("resilience_interruptions_total", labels)
        pending.waiting = []

    # -- values ---------------------------------------------------------------------------------

    def _count(self, name: str, labels: Labels, amount: int = 1) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0) + amount

    def _add_seconds(self, name: str, labels: Labels, seconds: float) -> None:
        """Kept in whole nanoseconds, so that the order of adding does not show."""
        self._count(name, labels, round(max(0.0, seconds) * 1e9))

    def _observe(
        self, name: str, labels: Labels, value: float, exemplar: tuple[str, float, float] | None = None
    ) -> None:
        edges = BY_NAME[name].buckets
        found = self._histograms[name].setdefault(labels, _Buckets([0] * (len(edges) + 1)))
        number = bisect.bisect_left(edges, value)
        found.counts[number] += 1
        found.sum_ns += round(value * 1e9)
        if exemplar is not None:
            found.exemplars[number] = exemplar

    def _section(self, name: str) -> str:
        """The label for a section: its name while there are few of them."""
        known = self._values["resilience_hangs_detected_total"]
        sections = {labels[1] for labels in known} - {"", OTHER}
        return name if name in sections or len(sections) < MAX_SECTIONS else OTHER

    def samples(self) -> dict[tuple[str, Labels], float]:
        """Return every value by (name, labels); of a histogram the sum and each bucket by itself."""
        found: dict[tuple[str, Labels], float] = {}
        for metric, rows in self._rows():
            for labels, value in rows:
                if isinstance(value, _Buckets):
                    found[metric.name + "_sum", labels] = value.sum_ns / 1e9
                    for edge, count in zip((*metric.buckets, float("inf")), value.counts, strict=True):
                        found[metric.name + "_bucket", (*labels, f"{edge:g}")] = count
                else:
                    found[metric.name, labels] = value
        return found

    def _rows(self) -> Iterator[tuple[Metric, list[tuple[Labels, Any]]]]:
        with self._lock:
            ready = dict(self._values)
            ready["resilience_monitor_up"] = {(): len(self._monitors)}
            ready["resilience_rank_state"] = {
                (str(number), _state(rank)): 1 for number, rank in sorted(self._ranks.items()) if rank.is_shown
            }
            states: dict[Labels, float] = {}
            for _, state in ready["resilience_rank_state"]:
                states[(state,)] = states.get((state,), 0) + 1
            ready["resilience_ranks"] = states
            ready["resilience_productive_seconds_total"] = {(): self._productive()}
            lost = self._values["resilience_lost_seconds_total"]
            ready["resilience_lost_seconds_total"] = {labels: value / 1e9 for labels, value in lost.items()}
            for metric in METRICS:
                if metric.kind == "histogram":
                    yield metric, sorted(self._histogram_rows(metric).items())
                else:
                    yield metric, sorted(ready[metric.name].items())

    def _productive(self) -> float:
        total = self._values["resilience_productive_seconds_total"].get((), 0)
        now_ns = None if self._clock is None else self._clock()
        for rank in self._ranks.values():
            if now_ns is not None and rank.run_started_ns is not None and rank.is_active:
                total += max(0, now_ns - rank.run_started_ns)
        return total / 1e9

    def _histogram_rows(self, metric: Metric) -> dict[Labels, _Buckets]:
        if metric.name == "resilience_heartbeat_interval_seconds":
            beats = self._timings.sections.get(HEARTBEAT)
            return {} if beats is None else {(): _coarse([beats], metric.buckets)}
        if metric.name == "resilience_section_duration_seconds":
            names = sorted(name for name in self._timings.sections if name != HEARTBEAT)
            shown = {(name,): [self._timings.sections[name]] for name in names[:MAX_SECTIONS]}
            if names[MAX_SECTIONS:]:
                shown[(OTHER,)] = [self._timings.sections[name] for name in names[MAX_SECTIONS:]]
            return {labels: _coarse(parts, metric.buckets) for labels, parts in shown.items()}
        return self._histograms[metric.name]

    # -- for prometheus_client ------------------------------------------------------------------

    def collect(self) -> Iterable[Family]:
        """Yield metric families, as a prometheus_client registry wants them of a collector."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric, rows in self._rows():
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in rows:
                    histogram.add_metric(labels, _cumulative(metric, value), value.sum_ns / 1e9)
                yield histogram
                continue
            family: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            simple = family(metric.name, metric.help, labels=metric.labels)
            for labels, value in rows:
                simple.add_metric(labels, value)
            yield simple


def _key(origin: Origin) -> IterationKey:
    return origin.attempt, origin.cycle, origin.call, -1 if origin.iteration is None else origin.iteration


def _state(rank: _Rank) -> str:
    return "unmonitored" if rank.is_unmonitored and rank.state in ("active", "inactive") else rank.state


def _reason(text: str) -> str:
    """One of few words for why something was lost."""
    return next((word for word in _REASONS if word in text), OTHER)


def _coarse(parts: list[Histogram], edges: tuple[float, ...]) -> _Buckets:
    """Add fine histograms up into the buckets of a metric; the edges are met within 1 %."""
    counts = [0] * (len(edges) + 1)
    for part in parts:
        for number, count in part.buckets.items():
            counts[bisect.bisect_left(edges, upper_bound(number) / 1.005)] += count
    return _Buckets(counts, round(sum(part.sum for part in parts) * 1e9))


def _cumulative(metric: Metric, value: _Buckets) -> list[Any]:
    from prometheus_client.samples import Exemplar

    found: list[Any] = []
    total = 0
    for number, count in enumerate(value.counts):
        total += count
        edge = "+Inf" if number == len(metric.buckets) else repr(metric.buckets[number])
        if number in value.exemplars:
            trace, measured, at = value.exemplars[number]
            found.append((edge, total, Exemplar({"trace_id": trace}, measured, at)))
        else:
            found.append((edge, total))
    return found
