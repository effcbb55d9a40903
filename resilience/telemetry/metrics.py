"""How often, how long, how many?  Metrics, computed from records, timing histograms and rank snapshots.

`MetricView` folds the records of one node into the values of `telemetry.catalogue`. State that depends on record order
is kept per rank, and what all ranks of the node observe is counted once, so a replay of the record files yields the
numbers of the live run. Durations of restarts are those of the timeline's intervals, each counted once.
prometheus_client only formats the values (`collect`), on request.

Names from torch are limited to MOST_NAMES, those of blamed nodes to MOST_NODES, sections by `telemetry.section_labels`.
Histograms are per node, not per rank."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from resilience.attribution.first_and_cascade import Interruptions
from resilience.facts import events
from resilience.facts.identity import CYCLE
from resilience.facts.records import Record
from resilience.history.cycles import RESTART, Cycle, NodeCycle
from resilience.history.intervals import Interval
from resilience.history.job_end import EndOfJob, job_end
from resilience.history.rank_states import HEALTHY, LOST
from resilience.history.timeline import Timeline
from resilience.history.wrapped_rank import CAUSES, RankSeconds
from resilience.telemetry.catalogue import BY_NAME, METRICS, OPEN_SHOWN, OTHER, Labels, Metric
from resilience.telemetry.durations import Durations
from resilience.telemetry.final_state import FinalState
from resilience.telemetry.histograms import Buckets, Exemplar, add, coarse, copy_of, cumulative, no_buckets
from resilience.telemetry.iteration_counts import IterationCounts, Key, key_of
from resilience.telemetry.limit_metrics import LimitMetrics
from resilience.telemetry.rank_snapshot import RankSnapshot
from resilience.telemetry.section_labels import SectionLabels
from resilience.telemetry.span import Trace, trace_id
from resilience.telemetry.timings import HEARTBEAT, Histogram, Timings

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

LAYER, LAUNCHER = "inprocess", "launcher"
MOST_NAMES = 8  # of torchelastic's calls, sources, states and values, each
MOST_NODES = 64  # blamed nodes
READ_S = 5.0  # seconds after which the records of what has happened have been read, as a rule
SILENT_S = 60.0  # half of the limit of RankHeartbeatStale
_ELASTIC_CALL = re.compile(r"(?P<call>.+)\.(?P<what>success|failure|duration\.ms)")
_ELASTIC_ROLE = re.compile(r"workers\.(?P<role>.*)\.(?P<what>\w+)")
_OUTCOMES = {"completed": "completed", "failed": "interrupted", "interrupted": "interrupted", "exhausted": "exhausted"}
Ranks = Literal["all", "unhealthy", "none"]
_PRODUCTIVE, _LOST = "resilience_productive_seconds_total", "resilience_lost_seconds_total"
_INTERRUPTIONS = "resilience_interruptions_total"
_BY_SECTION = ("resilience_hangs_detected_total", "resilience_suspicions_total", "resilience_shadow_alarms_total")
_REASONS = ("sink", "queue", "export", "malformed", "overrun", "closing")


class About(msgspec.Struct, frozen=True):
    """Facts that no record holds. folder: the run folder. version, torch: of the exporting process; torch is empty if
    it is not loaded."""

    folder: str
    version: str
    torch: str


class FolderLook(msgspec.Struct, frozen=True):
    """What a scrape finds in the run folder. snapshots: of the node's ranks, by initial rank; empty if the folder does
    not answer. is_folder_up: it answers and can be written."""

    snapshots: Mapping[int, RankSnapshot]
    is_folder_up: bool


class MetricView:
    """Folds records of one node into metrics. Thread-safe.

    clock: monotonic nanoseconds of this host, to count functions that are still running. ranks: which ranks have their
    own series; unhealthy: suspect, terminated, excluded and unmonitored ranks, and the most silent one. timeline: of
    the node; by default a new one. parent: trace and span that everything belongs to, from TRACEPARENT."""

    def __init__(
        self,
        clock: Callable[[], int] | None = None,
        ranks: Ranks = "all",
        about: About | None = None,
        timeline: Timeline | None = None,
        parent: Trace | None = None,
    ) -> None:
        self._clock = clock
        self._shown = ranks
        self._parent = parent
        self._timeline = Timeline() if timeline is None else timeline
        self._history = self._timeline.history
        self._limits = LimitMetrics()
        self._snapshots: Mapping[int, RankSnapshot] = {}
        self._is_folder_up: bool | None = None
        self.look: Callable[[], FolderLook] | None = (
            None  # called at each scrape, in its thread: its time must be limited
        )
        self._lock = threading.Lock()
        self._call: Key = (0, 0, 0, -1)
        self._iteration: Key = (0, 0, 0, -1)
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in METRICS}
        self.final = FinalState()
        if about is not None:
            self._values["resilience_run_info"] = {(about.folder,): 1}
            if about.torch:
                self._values["resilience_build_info"] = {(about.version, about.torch): 1}
        self._histograms: dict[str, dict[Labels, Buckets]] = {
            metric.name: {} for metric in METRICS if metric.kind == "histogram"
        }
        self._timings = Timings()
        self._job_id = ""
        self._newest = (0, 0)  # attempt and cycle
        self._newest_ns = 0  # monotonic time of the newest record
        self._names: dict[str, set[str]] = {}  # by kind: names from torch, and of nodes, that are labels
        self._sections = SectionLabels()
        self._interruptions = Interruptions(self._history.cycles.nodes)
        self._iterations = IterationCounts()
        # By rank and pid of the monitor, which a later one may have again: where it watches and since when, when it was
        # lost (both in UTC), and how many lost records it has reported.
        self._monitors: dict[tuple[int, int], tuple[str, Cycle, int]] = {}
        self._lost_monitors: dict[tuple[int, int], int] = {}
        self._reported_losses: dict[tuple[int, int], int] = {}

    # -- folding --------------------------------------------------------------------------------

    def take(self, record: Record) -> list[Interval]:
        """Add a record; return the intervals of the node's timeline that it completes."""
        with self._lock:
            intervals = self._timeline.take(record)
            self._take(record, intervals)
        return intervals

    def take_durations(self, ranks: Mapping[int, Durations]) -> None:
        """Replace the durations of heartbeats and sections, by initial rank."""
        timings = Timings()
        for durations in ranks.values():
            timings.merge(durations.timings())
        with self._lock:
            self._timings = timings
            self._sections.take_durations(ranks.values())
            self._limits.take_durations(ranks, 0.0 if self._clock is None else self._clock() / 1e9)

    def take_snapshots(self, snapshots: Mapping[int, RankSnapshot], is_folder_up: bool | None = None) -> None:
        """Replace the snapshots of the node's ranks, by initial rank. is_folder_up: None if it is unknown."""
        with self._lock:
            self._snapshots, self._is_folder_up = snapshots, is_folder_up

    def _look(self) -> None:
        if self.look is not None:
            look = self.look()
            self.take_snapshots(look.snapshots, look.is_folder_up)

    def _take(self, record: Record, intervals: list[Interval]) -> None:
        origin, event = record.origin, record.event
        self._job_id = origin.job_id
        self._newest = max(self._newest, (origin.attempt, origin.cycle))
        self._newest_ns = max(self._newest_ns, record.mono_ns)
        self._limits.take(record)
        self._interruptions.take(record)
        self._iterations.take(record)
        self._count("resilience_events_total", (str(event.__struct_config__.tag),))
        self.final.take(record)
        began = self._values["resilience_start_timestamp_seconds"]
        began[()] = min(began.get((), math.inf), record.wall_ns / 1e9)
        match event:
            case events.TelemetryDropped():
                labels = (str(event.signal), _reason(event.reason))
                self._count("resilience_telemetry_dropped_total", labels, event.count)
            case events.CyclePhaseStarted(phase):
                self._values["resilience_node_waiting"][()] = 1 if phase == "rendezvous" else 0
            case events.CyclePhaseEnded():
                self._values["resilience_node_waiting"][()] = 0
            case events.ElasticMeasured():
                self._take_elastic(event)
            case events.ElasticTold(_, source, state):
                labels = (self._label("source", source), self._label("state", state))
                self._count("resilience_elastic_events_total", labels)
            case events.ExportFailed():
                labels = (
                    event.exported,
                    "start" if event.is_at_start else "send",
                )
                self._count("resilience_telemetry_errors_total", labels)
            case events.IncidentJudged(sentence):
                # Only the last sentence, because each one is a series.
                self._values["resilience_verdict_timestamp_seconds"] = {(sentence,): record.wall_ns / 1e9}
                for node in event.nodes:
                    self._count("resilience_blamed_total", (self._label("node", node, MOST_NODES),))
            case _:  # no other event matters here
                pass
        for interval in intervals:
            self._take_interval(interval)
        if origin.initial_rank is None:
            return
        self._take_from_monitor(record)
        if not origin.is_launchers:
            self._take_from_rank(record)

    def _take_elastic(self, event: events.ElasticMeasured) -> None:
        """Add a torchelastic metric. Names that follow its scheme for calls are counted and timed; for all others, only
        the last value is kept. The workers' role, which users name, is left out, so that labels stay few."""
        call = _ELASTIC_CALL.fullmatch(event.name)
        if call is None:
            role_metric = _ELASTIC_ROLE.fullmatch(event.name)
            name = self._label("name", event.name if role_metric is None else f"workers.{role_metric['what']}")
            self._values["resilience_elastic_value"][(name,)] = event.value
            return
        label = self._label("call", call["call"])
        if call["what"] == "duration.ms":
            self._observe("resilience_elastic_call_duration_seconds", (label,), event.value / 1000)
        else:
            self._count("resilience_elastic_calls_total", (label, call["what"]), event.value)

    def _take_from_monitor(self, record: Record) -> None:
        """Add a monitor's record about its rank; monitors of a Wrapper and of the launcher alike."""
        origin, event = record.origin, record.event
        assert origin.initial_rank is not None
        monitor = origin.initial_rank, origin.pid
        match event:
            case events.RankFellSilent():
                self._count("resilience_hangs_detected_total", self._sections.take_limit(event.limit))
            case events.RankSuspected() | events.TimeoutsShadowAlarm():
                name = "suspicions" if isinstance(event, events.RankSuspected) else "shadow_alarms"
                self._count(f"resilience_{name}_total", self._sections.take_limit(event.limit))
            case events.MonitorStarted():
                self._monitors[monitor] = origin.node, (origin.attempt, origin.cycle), record.wall_ns
                self._reported_losses.pop(monitor, None)
            case events.MonitorLost():
                self._lost_monitors[origin.initial_rank, event.monitor_pid] = record.wall_ns
            case events.RankExited():
                self._monitors.pop(monitor, None)
            case events.TelemetryDropped("record", "sink") if origin.role == "monitor":
                self._reported_losses[monitor] = self._reported_losses.get(monitor, 0) + event.count
            case events.MonitorEnded():
                self._monitors.pop(monitor, None)
                # All losses of its file, also those that it has reported.
                unreported = event.dropped_records - self._reported_losses.pop(monitor, 0)
                if unreported > 0:
                    self._count("resilience_telemetry_dropped_total", ("record", "sink"), unreported)
            case _:  # no other event matters here
                pass

    def _take_from_rank(self, record: Record) -> None:
        origin, event = record.origin, record.event
        assert origin.initial_rank is not None
        match event:
            case events.CallStarted():
                if key_of(origin) >= self._call:
                    self._call = key_of(origin)
                    self._values["resilience_build_info"] = {(event.resilience_version, event.torch_version): 1}
                    self._values["resilience_job_info"] = {(event.function, str(event.world_size), LAYER): 1}
            case events.IterationStarted():
                self._iteration = max(self._iteration, key_of(origin))
                self._values["resilience_restart_iteration"][(LAYER,)] = self._iteration[3]
            case _:  # no other event matters here
                pass

    def _take_interval(self, interval: Interval) -> None:
        """Add the durations of restarts of both layers, and of their phases."""
        if interval.outcome == "open":
            return  # the agent was killed meanwhile
        is_launchers = interval.origin.is_launchers or interval.key[0] == CYCLE
        layer = LAUNCHER if is_launchers or interval.name == "import" else LAYER
        is_idle = interval.facts.get("rank.state") == "inactive"  # a spare has no progress to show
        away = interval.each_s
        if layer == LAYER and interval.name == "restart" and interval.outcome == "completed" and not is_idle:
            away = (interval.seconds,)
        for seconds in away:
            exemplar = format(trace_id(interval.origin, self._parent), "032x"), seconds, interval.end_ns / 1e9
            self._observe("resilience_restart_duration_seconds", (layer,), seconds, exemplar)
        is_idle = is_idle and interval.name == "resume"
        is_known = interval.outcome != "lost" and interval.closed_by != "call"
        is_phase = interval.name in (events.PHASES if layer == LAYER else RESTART) and interval.is_of_restart
        if is_phase and is_known and not is_idle:
            self._observe("resilience_restart_phase_duration_seconds", (layer, interval.name), interval.seconds)

    # -- values ---------------------------------------------------------------------------------

    @property
    def job(self) -> tuple[str, int]:
        """The job's id and attempt, as in its records; empty before the first one."""
        return self._job_id, self._newest[0]

    def _count(self, name: str, labels: Labels, amount: float = 1) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0) + amount

    def _observe(self, name: str, labels: Labels, value: float, exemplar: Exemplar | None = None) -> None:
        add(self._histograms[name].setdefault(labels, no_buckets(name)), BY_NAME[name].buckets, value, exemplar)

    def _label(self, kind: str, name: str, most: int = MOST_NAMES) -> str:
        """Return the label for a name: the name itself while there are few names, else OTHER."""
        names = self._names.setdefault(kind, set())
        if len(names) < most:
            names.add(name)
        return name if name in names else OTHER

    def samples(self) -> dict[tuple[str, Labels], float]:
        """Return every value by (name, labels); for a histogram, the sum and each bucket separately."""
        values: dict[tuple[str, Labels], float] = {}
        for metric, rows in self._rows():
            for labels, value in rows:
                if isinstance(value, Buckets):
                    values[metric.name + "_sum", labels] = value.sum_ns / 1e9
                    edges = metric.buckets[: len(value.counts) - 1]
                    for edge, count in zip((*edges, float("inf")), value.counts, strict=True):
                        values[metric.name + "_bucket", (*labels, f"{edge:g}")] = count
                else:
                    values[metric.name, labels] = value
        return values

    def _rows(self) -> list[tuple[Metric, list[tuple[Labels, Any]]]]:
        """Return the present values of every metric. They do not change while further records are taken."""
        with self._lock:
            now_ns = None if self._clock is None else self._clock()
            ready = {name: dict(values) for name, values in self._values.items()}
            histograms = {
                name: {labels: copy_of(buckets) for labels, buckets in rows.items()}
                for name, rows in self._histograms.items()
            }
            self._sections.choose(self._living_snapshots().values(), self._limits.stale)
            ready.update({name: self._sections.labelled(self._values[name]) for name in _BY_SECTION})
            self._add_corrected(ready, now_ns)
            for outcome, count in self._iterations.counted(now_ns).items():
                ready["resilience_restart_iterations_total"][LAYER, outcome] = count
            newest = dict(self._history.cycles.places)  # cycle of each attempt
            for parts in self._history.cycles.nodes.values():
                for cycle, node_cycle in sorted(parts.items()):
                    self._add_cycle(ready, cycle, node_cycle, cycle[1] < newest.get(cycle[0], 0))
            ready["resilience_monitor_up"] = {(): self._living_monitors()}
            if self._is_folder_up is not None:
                ready["resilience_run_folder_up"] = {(): int(self._is_folder_up)}
            self._show_ranks(ready)
            ended = self.final.ended(self._proven_end(now_ns))
            if ended is not None:
                ready["resilience_ended_timestamp_seconds"] = {(ended[0],): ended[1]}
            ready.update(self._limits.values(self._living_snapshots(), self._sections.label))
            histograms["resilience_heartbeat_interval_seconds"] = self._heartbeat_rows()
            histograms["resilience_section_duration_seconds"] = self._section_rows()
        rows: dict[str, Mapping[Labels, Any]] = {
            metric.name: (histograms if metric.kind == "histogram" else ready)[metric.name] for metric in METRICS
        }
        return [(metric, sorted(rows[metric.name].items())) for metric in METRICS]

    def _proven_end(self, now_ns: int | None) -> EndOfJob | None:
        """Return the end that other records prove although the agent has recorded none for READ_S."""
        is_young = now_ns is not None and now_ns - self._newest_ns < READ_S * 1e9
        return None if is_young or self.final.outcome is not None else job_end(self._history, self._newest[0])

    def _add_corrected(self, ready: dict[str, dict[Labels, float]], now_ns: int | None) -> None:
        """Add counters that later records may correct: interruptions, rank-seconds by cause.

        A counter never falls. So unfinished activities count until READ_S ago: the record that ends a restart says
        when it ended, but is read later, and the time between must not count as restart for good. A hang before a
        restarted worker's first sign is the exception: it counts as restart as long as nobody can tell, and as a
        hang in the end. Once the job is over, no such record can follow, and its last one ends everything."""
        until = None if now_ns is None else now_ns - round(READ_S * 1e9)
        if until is not None and self.final.outcome is not None:
            until = self._newest_ns
        spent = RankSeconds()
        for rank_seconds in self._history.spent(lambda _: until).values():
            spent.add(rank_seconds)
        counters = self._values
        _raise(counters[_PRODUCTIVE], {(): spent.work / 1e9})
        _raise(counters[_LOST], {(cause,): getattr(spent, cause) / 1e9 for cause in CAUSES if getattr(spent, cause)})
        _raise(counters[_INTERRUPTIONS], self._interruptions.counted())
        ready.update({name: dict(counters[name]) for name in (_PRODUCTIVE, _LOST, _INTERRUPTIONS)})

    def _add_cycle(
        self, ready: dict[str, dict[Labels, float]], cycle: Cycle, node_cycle: NodeCycle, is_followed: bool
    ) -> None:
        """Add a launcher cycle, from the records read so far: files are read in any order. One that failed counts once
        another one follows: if none does, it was no restart."""
        if node_cycle.met is not None:  # the last one stays
            ready["resilience_job_info"] = {(self._history.job_id or "", str(node_cycle.met.world_size), LAUNCHER): 1}
        if node_cycle.started is not None:
            ready["resilience_restart_iteration"][(LAUNCHER,)] = cycle[1]
            ready["resilience_restart_budget_remaining"][(LAUNCHER,)] = node_cycle.restarts_left or 0
            ready["resilience_restart_budget_max"][(LAUNCHER,)] = node_cycle.started.max_restarts
        if node_cycle.started is None and node_cycle.ended is None:
            return
        ended = node_cycle.ended  # None if it runs, or its agent was killed
        outcome = "interrupted" if ended is None else _OUTCOMES.get(ended.outcome, "aborted")
        if is_followed or outcome != "interrupted":
            _increase(ready["resilience_restart_iterations_total"], (LAUNCHER, outcome))

    def _show_ranks(self, ready: dict[str, dict[Labels, float]]) -> None:
        """Add the values of single ranks, as many as should be shown."""
        present = self._states()
        states: dict[Labels, float] = {}
        for state in present.values():
            states[(state,)] = states.get((state,), 0) + 1
        ready["resilience_ranks"] = states
        living = self._living_snapshots()
        at_work = {number: snapshot for number, snapshot in living.items() if present[number] != "inactive"}
        shown_ranks = self._shown_ranks(present, at_work)
        ready["resilience_rank_state"] = {(str(number), state): 1 for number, state in shown_ranks.items()}
        steps = sorted(snapshot.step for snapshot in at_work.values() if snapshot.step is not None)
        if steps:
            ready["resilience_step"][()] = steps[-1]
            ready["resilience_step_lowest"][()] = steps[0]
            ready["resilience_step_median"][()] = steps[(len(steps) - 1) // 2]
        for number in shown_ranks.keys() & living.keys():
            snapshot, label = living[number], str(number)
            if snapshot.step is not None:
                ready["resilience_rank_step"][(label,)] = snapshot.step
            silent_s = snapshot.silent_for()
            if silent_s is not None:
                ready["resilience_rank_silence_seconds"][(label,)] = round(silent_s, 3)
            for section in snapshot.sections[:OPEN_SHOWN]:  # outermost first
                labels = (label, self._sections.label(section.name))
                seconds = snapshot.open_for(section)
                _raise(ready["resilience_rank_section_open_seconds"], {labels: seconds})
                if section.limit_s:
                    _raise(ready["resilience_rank_section_used_ratio"], {labels: seconds / section.limit_s})

    def _shown_ranks(self, present: dict[int, str], at_work: dict[int, RankSnapshot]) -> dict[int, str]:
        """Return the states of the ranks that have their own series. Without a limit, a rank that hangs stays active.
        So the most silent rank counts as unhealthy, unless an open section explains the silence."""
        if self._shown == "all":
            return present
        if self._shown == "none":
            return {}
        silent = {number: snapshot.silent_for() or 0.0 for number, snapshot in at_work.items() if not snapshot.sections}
        most_silent = max(silent, key=silent.__getitem__, default=None)
        return {
            number: state
            for number, state in present.items()
            if state not in HEALTHY or (number == most_silent and silent[number] > SILENT_S)
        }

    def _living_snapshots(self) -> dict[int, RankSnapshot]:
        """Return the snapshots of ranks that still exist. The snapshot of a lost rank no longer changes, and one of the
        previous worker, or one that its monitor has not renewed in time, says nothing about the present."""
        living = {}
        now = None if self._clock is None else self._clock() / 1e9
        for number, state in self._states().items():
            snapshot = self._snapshots.get(number)
            if snapshot is None or state in LOST or (now is not None and snapshot.is_old(now)):
                continue
            if (snapshot.origin.attempt, snapshot.origin.cycle) >= self._newest:
                living[number] = snapshot
        return living

    def _living_monitors(self) -> int:
        """Return the number of monitors that watch a rank now. One that was killed with its agent has no last record,
        but a later cycle or agent shows that it is gone."""
        living = [
            (node, cycle)
            for monitor, (node, cycle, began_ns) in self._monitors.items()
            if self._lost_monitors.get(monitor, -1) < began_ns  # the files are read in any order
        ]
        is_present = {where: self._history.is_present(*where) for where in set(living)}
        return sum(is_present[where] for where in living)

    def _states(self) -> dict[int, str]:
        nodes = sorted(self._history.nodes)
        return dict(sorted(item for node in nodes for item in self._history.states(node).items()))

    def _heartbeat_rows(self) -> dict[Labels, Buckets]:
        heartbeats = self._timings.sections.get(HEARTBEAT)
        edges = BY_NAME["resilience_heartbeat_interval_seconds"].buckets
        return {} if heartbeats is None else {(): coarse([heartbeats], edges)}

    def _section_rows(self) -> dict[Labels, Buckets]:
        edges = BY_NAME["resilience_section_duration_seconds"].buckets
        parts: dict[Labels, list[Histogram]] = {}
        for outcome, sections in (("completed", self._timings.sections), ("failed", self._timings.failed)):
            for name in sorted(sections.keys() - {HEARTBEAT}):
                parts.setdefault((self._sections.label(name), outcome), []).append(sections[name])
        # The duration of a failed section says little: use one bucket, so only count and sum.
        return {
            labels: coarse(histograms, edges if labels[1] == "completed" else ())
            for labels, histograms in parts.items()
        }

    def exported(self) -> list[tuple[Metric, list[tuple[Labels, Any]]]]:
        """Return the current rows of every metric; histograms have `fine` and `sum_ns`."""
        self._look()
        return self._rows()

    # -- for prometheus_client ------------------------------------------------------------------

    def collect(self) -> Iterable[Family]:
        """Yield metric families, as a prometheus_client registry expects from a collector."""
        self._look()
        for metric, rows in self._rows():
            family = _family(metric)
            for labels, value in rows:
                if metric.kind == "histogram":
                    family.add_metric(labels, cumulative(metric, value), value.sum_ns / 1e9)
                else:
                    family.add_metric(labels, value)
            yield family

    def describe(self) -> list[Family]:
        """Return all metric families without values, from which a registry learns their names."""
        return [_family(metric) for metric in METRICS]


def _family(metric: Metric) -> Any:
    """Return a metric without values, in the form of prometheus_client."""
    from prometheus_client import metrics_core

    kinds: dict[str, Any] = {
        "counter": metrics_core.CounterMetricFamily,
        "gauge": metrics_core.GaugeMetricFamily,
        "histogram": metrics_core.HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=metric.labels)


def _increase(values: dict[Labels, float], labels: Labels) -> None:
    values[labels] = values.get(labels, 0) + 1


def _raise(values: dict[Labels, float], now: Mapping[Any, float]) -> None:
    for labels, value in now.items():
        values[labels] = max(values.get(labels, 0), value)


def _reason(message: str) -> str:
    """Return why something was lost, as one of a few words."""
    return next((word for word in _REASONS if word in message), OTHER)
