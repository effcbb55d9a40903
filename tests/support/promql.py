"""Is this PromQL right?  Static checks of an expression against the metric catalogue, without a Prometheus.

`check` walks an expression with the labels that its parts have, and finds what Prometheus would answer with
silence: metrics and labels that do not exist, joins of unlike labels, rates of gauges. For dashboards also
selectors that look at every job, and windows that do not fit the graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import promql_parser as promql

from dashboards.generator.queries import OF_JOB, TARGET_LABELS
from resilience.telemetry.catalogue import METRICS

# Grafana's variables for times, by a length that nobody would write.
WINDOWS = {"$__rate_interval": timedelta(seconds=8641), "$__range": timedelta(seconds=8642)}
WINDOWS["$__interval"] = timedelta(seconds=8643)
NUMBERS = {"$__range_s": "8642", "$__interval_ms": "8643000", "$__rate_interval_ms": "8641000"}
RATES = {"rate", "irate", "increase", "resets"}
SLOPES = {"delta", "idelta", "deriv", "predict_linear"}
KEEPING = {"topk", "bottomk"}

Labels = frozenset[str]


class Known(msgspec.Struct, frozen=True):
    """What is known of a metric: what it counts, and which labels its series have."""

    is_counter: bool
    labels: Labels


def catalogue() -> dict[str, Known]:
    """Return all metrics that series can have the names of."""
    announced = frozenset((*TARGET_LABELS, "outcome", "discovery"))
    known = {name: Known(False, announced) for name in ("up", "scrape_duration_seconds")}
    known["scrape_samples_scraped"] = known["up"]
    own = {"alertname", "alertstate", "severity", "level", "rank", "section", "layer", "signal", "reason"}
    known["ALERTS"] = Known(False, frozenset(TARGET_LABELS) | own)
    for metric in METRICS:
        labels = frozenset((*TARGET_LABELS, *metric.labels))
        if metric.kind == "histogram":
            known[metric.name + "_bucket"] = Known(True, labels | {"le"})
            known[metric.name + "_sum"] = known[metric.name + "_count"] = Known(True, labels)
        else:
            known[metric.name] = Known(metric.kind == "counter", labels)
    return known


class Finding(Exception):
    """What is wrong."""


def check(expression: str, known: Mapping[str, Known], is_rule: bool = False) -> Labels:
    """Return the labels that an expression's result has. is_rule: for all jobs, so it has to keep them apart.

    Raises: Finding."""
    for name, number in NUMBERS.items():
        expression = expression.replace(name, number)
    for name, window in WINDOWS.items():
        expression = re.sub(re.escape(name) + r"\b", f"{int(window.total_seconds())}s", expression)
    try:
        parsed = promql.parse(expression)
    except ValueError as error:
        raise Finding(f"no PromQL: {error}: {expression}") from None
    labels = _Walk(known, is_rule).labels(parsed)
    if is_rule and not labels >= set(OF_JOB):
        raise Finding(f"the result does not tell jobs apart: {sorted(labels)}")
    return labels


class _Walk:
    def __init__(self, known: Mapping[str, Known], is_rule: bool) -> None:
        self._known = known
        self._is_rule = is_rule

    def labels(self, node: promql.Expr) -> Labels:
        match node:
            case promql.ParenExpr() | promql.UnaryExpr():
                return self.labels(node.expr)
            case promql.NumberLiteral() | promql.StringLiteral():
                return frozenset()
            case promql.VectorSelector():
                return self._selector(node)[1].labels
            case promql.MatrixSelector():
                self._window(node.range)
                return self._selector(node.vector_selector)[1].labels
            case promql.SubqueryExpr():
                self._window(node.range)
                if node.step is not None:
                    self._window(node.step)
                return self.labels(node.expr)
            case promql.Call():
                return self._call(node)
            case promql.AggregateExpr():
                return self._aggregate(node)
            case promql.BinaryExpr():
                return self._binary(node)
        raise Finding(f"{type(node).__name__} is not looked into")

    def _selector(self, node: promql.VectorSelector) -> tuple[str, Known]:
        name = node.name or ""
        if name not in self._known:
            raise Finding(f"no such metric: {name}")
        known = self._known[name]
        matchers = node.matchers.matchers
        for matcher in matchers:
            if matcher.name not in known.labels:
                raise Finding(f"{name} has no label {matcher.name}; it has {sorted(known.labels)}")
        if not self._is_rule and not any(m.name == "job_id" and m.value == "$job" for m in matchers):
            raise Finding(f"{name} is looked up for every job: no matcher for job_id")
        if node.offset is not None:
            self._window(node.offset)
        return name, known

    def _window(self, window: timedelta) -> None:
        if not self._is_rule and window not in WINDOWS.values():
            raise Finding(f"a window of {window} does not fit every graph; take one of {', '.join(WINDOWS)}")

    def _call(self, node: promql.Call) -> Labels:
        name = node.func.name
        for argument in node.args:
            if isinstance(argument, promql.MatrixSelector):
                metric, known = self._selector(argument.vector_selector)
                if name in RATES and not known.is_counter:
                    raise Finding(f"{name} of {metric}, which is a gauge")
                if name in SLOPES and known.is_counter:
                    raise Finding(f"{name} of {metric}, which is a counter")
        inside = [self.labels(argument) for argument in node.args]
        if name == "scalar" or not inside:
            return frozenset()
        labels = inside[-1] if name == "histogram_quantile" else inside[0]
        if name == "histogram_quantile":
            if "le" not in labels:
                raise Finding("histogram_quantile of what has no buckets: le was summed away")
            labels -= {"le"}
        if name == "label_replace":
            target, _, source = (argument.val for argument in node.args[1:4])
            if source not in labels:
                raise Finding(f"label_replace takes {source}, which is not there; there are {sorted(labels)}")
            labels |= {target}
        return labels

    def _aggregate(self, node: promql.AggregateExpr) -> Labels:
        inside = self.labels(node.expr)
        if str(node.op) in KEEPING:
            if node.modifier is not None:
                self._chosen(frozenset(node.modifier.labels), inside)
            return inside
        if node.modifier is None:
            if self._is_rule:
                raise Finding(f"{node.op} adds up all jobs")
            return frozenset()
        if node.modifier.type != promql.AggModifierType.By:
            raise Finding("`without` keeps labels that nobody knows of; name those to keep")
        return self._chosen(frozenset(node.modifier.labels), inside)

    def _chosen(self, labels: Labels, *inside: Labels) -> Labels:
        for of in inside:
            if not labels <= of:
                raise Finding(f"labels {sorted(labels - of)} are not there; there are {sorted(of)}")
        if self._is_rule and not labels >= set(OF_JOB):
            raise Finding(f"jobs are not told apart by {sorted(labels)}")
        return labels

    def _binary(self, node: promql.BinaryExpr) -> Labels:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        numbers = [_is_number(node.lhs), _is_number(node.rhs)]
        if any(numbers):
            return right if numbers[0] else left
        modifier = node.modifier
        operator = str(node.op)
        if modifier is not None and modifier.matching is not None:
            if modifier.matching.type != promql.LabelModifierType.Include:
                raise Finding("`ignoring` joins by labels that nobody knows of; name those to join by")
            on = self._chosen(frozenset(modifier.matching.labels), left, right)
            if operator in ("and", "unless") or modifier.card != promql.VectorMatchCardinality.OneToOne:
                return left
            return on
        if operator == "or":
            return left & right
        if left != right:
            raise Finding(f"joins unlike labels, so nothing matches: {sorted(left)} and {sorted(right)}")
        return left


def _is_number(node: promql.Expr) -> bool:
    match node:
        case promql.NumberLiteral():
            return True
        case promql.ParenExpr() | promql.UnaryExpr():
            return _is_number(node.expr)
        case promql.Call():
            return node.func.name in ("scalar", "time")
        case promql.BinaryExpr():
            return _is_number(node.lhs) and _is_number(node.rhs)
    return False
