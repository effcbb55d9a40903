"""Builds PromQL over the metric catalogue, for dashboards and rules.

Many counters here appear with their first event, and so with a value above 0: the first restart of a job creates a new
series. `increase` and `rate` need two samples of a series and would miss it. So rare events are counted by `grown`: the
value now minus the value at the beginning, if that is known. `rate` is for frequent events (heartbeats, sections)."""

from __future__ import annotations

from collections.abc import Sequence

from resilience.telemetry.catalogue import BY_NAME

TARGET_LABELS = ("job", "instance", "job_id", "node", "cluster")  # labels that discovery adds to every series
JOB = 'job_id="$job"'
NODE = 'node=~"$node"'
SCOPE = (JOB, NODE)  # matchers of every selector in a dashboard
ALL_JOBS = ('job_id!=""',)  # matchers of the dashboard for all jobs
OF_JOB = ("cluster", "job_id")  # labels that every aggregation in a rule keeps
RATE = "$__rate_interval"
RANGE = "$__range"
STEP = "$__interval"
# Windows in seconds, for comparison with times.
SECONDS = {RANGE: "$__range_s", STEP: "$__interval_ms / 1000", RATE: "$__rate_interval_ms / 1000"}
SECONDS |= {"15m": "900", "30m": "1800", "1h": "3600", "6h": "21600"}
BRIDGED = "2m"  # for rules: the exporter of a node may change, which leaves a short gap
BEGAN = "resilience_start_timestamp_seconds"
ALWAYS_THERE = "resilience_productive_seconds_total"  # in every scrape, and in the file of a job that has ended
DEAD_S = 600  # age of a file
_OF_NODE = f"on ({', '.join(OF_JOB)}, node)"

Scope = Sequence[str]


def select(metric: str, *matchers: str, scope: Scope = SCOPE) -> str:
    """Return a selector of a metric for the selected job and nodes."""
    inside = ", ".join((*scope, *matchers))
    return f"{metric}{{{inside}}}" if inside else metric


def counted(metric: str, *matchers: str, by: Sequence[str] = (), scope: Scope = SCOPE) -> str:
    """Return the sum of a metric over nodes: of a gauge, or of a counter since the beginning."""
    is_gauge = metric in BY_NAME and BY_NAME[metric].kind == "gauge"
    value = present(metric, *matchers, scope=scope) if is_gauge else select(metric, *matchers, scope=scope)
    return fold("sum", by, of_nodes(metric, value))


def present(metric: str, *matchers: str, scope: Scope = SCOPE) -> str:
    """Return a gauge, for dashboards."""
    return living(select(metric, *matchers, scope=scope), scope)


def living(expression: str, scope: Scope = SCOPE) -> str:
    """Return an expression over gauges without those in files for node-exporter that dead processes left behind.

    A living job writes its file every 15 s. The clocks of the node and of Prometheus may differ by some minutes."""
    age = f"time() - {select('resilience_written_timestamp_seconds', scope=scope)}"
    return f"({expression} unless on ({', '.join(OF_JOB)}, node, instance) {age} > {DEAD_S})"


def fold(operator: str, by: Sequence[str], expression: str) -> str:
    """Return an aggregation, such as `sum by (state) (…)`."""
    return f"{operator} by ({', '.join(by)}) ({expression})" if by else f"{operator}({expression})"


def labelled(expression: str, label: str, value: str, known: str) -> str:
    """Return an expression whose series also have this label. known: a label that they have."""
    return f'label_replace({expression}, "{label}", "{value}", "{known}", ".*")'


def grown(
    metric: str,
    *matchers: str,
    by: Sequence[str] = (),
    window: str = RANGE,
    scope: Scope = SCOPE,
    has_left: bool = False,
) -> str:
    """Return the growth of a counter within a window, including its first appearance. has_left: a rule counts nodes too
    that have left within the window."""
    selector = select(metric, *matchers, scope=scope)
    # A dashboard shows ended jobs; a rule ignores them.
    present = window if scope or has_left else BRIDGED
    latest = f"last_over_time({selector}[{present}])"
    began = f"last_over_time({select(BEGAN, scope=scope)}[{present}])"
    # The maximum of some minutes: an exporter that has just taken over may not have read everything yet.
    earlier = f"{selector} offset {window}" if scope else f"max_over_time({selector}[5m] offset {window})"
    scraped = f"count_over_time({select(ALWAYS_THERE, scope=scope)}[{window}])"
    has_appeared = (
        f"({of_nodes(metric, f'count_over_time({selector}[{window}])', 'sum')} "
        f"< {_OF_NODE} group_left () {fold('sum', (*OF_JOB, 'node'), scraped)}) * 0"
    )
    first = of_nodes(metric, f"min_over_time({selector}[{window}])", "min")
    return fold("sum", by, _growth(metric, latest, earlier, began, window, (has_appeared, first)))


def stepped(metric: str, *matchers: str, by: Sequence[str] = (), scope: Scope = SCOPE) -> str:
    """Return the growth of a counter between two points of a graph, including its first appearance."""
    selector = select(metric, *matchers, scope=scope)
    began = select(BEGAN, scope=scope)
    scraped = fold("max", (*OF_JOB, "node"), f"{select(ALWAYS_THERE, scope=scope)} offset {STEP}")
    has_appeared = f"{of_nodes(metric, selector)} * 0 and {_OF_NODE} {scraped}"
    return fold("sum", by, _growth(metric, selector, f"{selector} offset {STEP}", began, STEP, (has_appeared,)))


def _growth(metric: str, latest: str, earlier: str, began: str, window: str, otherwise: Sequence[str]) -> str:
    """Return the growth of each node's counter since the beginning of a window.

    A counter started at 0 if its node's part of the job started within the window. If Prometheus scraped the counter at
    the beginning, its value is known. If Prometheus scraped the node but found no such series, the value was 0, because
    a counter appears with its first event. Otherwise growth counts from the first scraped value, or is unknown. A
    missing sample alone never means 0: after a gap, or with a new Prometheus, all past events would look new."""
    now = of_nodes(metric, latest)
    is_young = f"{now} * 0 and {_OF_NODE} (time() - {fold('max', (*OF_JOB, 'node'), began)} < {SECONDS[window]})"
    return f"clamp_min({now} - ({' or '.join((is_young, of_nodes(metric, earlier), *otherwise))}), 0)"


def of_nodes(metric: str, expression: str, operator: str = "max") -> str:
    """Return one value per node. The same series may have several `instance`s and must not be counted twice: those of
    an endpoint and of the file for node-exporter, or of two exporters after each other, which have different ports."""
    name = metric.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    labels = BY_NAME[name if name in BY_NAME else metric].labels
    return fold(operator, (*OF_JOB, "node", *labels, *(("le",) if metric.endswith("_bucket") else ())), expression)


def rate(metric: str, *matchers: str, by: Sequence[str] = (), window: str = RATE, scope: Scope = SCOPE) -> str:
    """Return the growth of a counter per second."""
    return fold("sum", by, of_nodes(metric, f"rate({select(metric, *matchers, scope=scope)}[{window}])"))


def quantile(q: float, buckets: str) -> str:
    """Return a quantile of a histogram's buckets."""
    return f"histogram_quantile({q:g}, {buckets})"


def or_zero(expression: str, of: str) -> str:
    """Return an expression that is 0 if it has no value but `of` has one."""
    return f"({expression} or {of} * 0)"


def goodput(by: Sequence[str] = (), window: str = RANGE, scope: Scope = SCOPE, has_idle: bool = True) -> str:
    """Return the share of rank-seconds that were productive, as `history.rank_time` defines it.

    Hangs and rework are lost while ranks work, so they are part of those seconds; the other causes are not. No value
    before the first productive second of a job: a program may send no signal of progress while it runs. has_idle: count
    the seconds of spares, and of ranks that have finished."""
    causes = () if has_idle else ('cause!="idle"',)
    inside = grown("resilience_productive_seconds_total", by=by, window=window, scope=scope)
    lost = grown("resilience_lost_seconds_total", *causes, by=by, window=window, scope=scope)
    outside = grown("resilience_lost_seconds_total", *causes, 'cause!~"hang|rework"', by=by, window=window, scope=scope)
    known = f"max_over_time({select('resilience_productive_seconds_total', scope=scope)}[{window}])"
    has_worked = f"{fold('sum', by, known)} > 0"
    share = f"clamp_min(1 - {or_zero(lost, inside)} / ({inside} + {or_zero(outside, inside)} > 0), 0)"
    return f"({share} and {has_worked})" if not by else f"({share} and on ({', '.join(by)}) {has_worked})"


def restarts(by: Sequence[str] = (), window: str = RANGE, scope: Scope = SCOPE) -> str:
    """Return the number of restarts of a job, in place and by the launcher. Each node counts all: take the maximum."""
    by_node = grown(
        "resilience_restart_iterations_total",
        'outcome="interrupted"',
        by=(*by, "layer", "node"),
        window=window,
        scope=scope,
    )
    iteration = fold("max", (*by, "layer"), select("resilience_restart_iteration", scope=scope))
    counted = or_zero(fold("max", (*by, "layer"), by_node), iteration)
    return fold("sum", by, counted)
