"""When must an alert fire, and when not?  Synthetic series for each alert, in the format of `promtool test rules`.

Series have one value per minute in Prometheus's notation (`0+6x10`: 0, 6, 12 …; `_`: no value; `x10`: ten more times).
A firing case lists the labels and the value that the alert must have; no other alert of that name may fire."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

import msgspec

from dashboards.generator.rules import ALERTS, Alert, annotations_of, unit_test_file
from resilience.telemetry.catalogue import SLOW_BY_LAUNCHER_S, SLOW_IN_PLACE_S

WHERE = 'cluster="c", job_id="j"'


class Case(msgspec.Struct, frozen=True):
    """One example. series: selector and values. at: evaluation time. fires: labels, and the value as in the text.
    annotations: those that Prometheus fills in from other series."""

    series: dict[str, str]
    at: str
    fires: tuple[tuple[dict[str, str], str], ...] = ()
    annotations: dict[str, str] = {}


def _series(metric: str, labels: str = "", node: str = "n0") -> str:
    inside = f'{WHERE}, node="{node}"' + (f", {labels}" if labels else "")
    return f"{metric}{{{inside}}}"


def _job(**labels: str) -> dict[str, str]:
    return {"cluster": "c", "job_id": "j", **labels}


_ACTIVE = _series("resilience_ranks", 'state="active"')
_TWO_NODES = {_ACTIVE: "8x100", _series("resilience_ranks", 'state="active"', "n1"): "8x100"}
_SPARE = _series("resilience_ranks", 'state="inactive"')
_BEATS = _series("resilience_heartbeat_interval_seconds_count")
_STEP = _series("resilience_step")
_SILENCE = _series("resilience_rank_silence_seconds", 'rank="3"')
_FINISHED = _series("resilience_rank_silence_seconds", 'rank="0"')
_RUN_INFO = _series("resilience_run_info", 'folder="/runs/j"')
_FOLDER = {"run_folder": "/runs/j", "command": "resilience report '/runs/j'"}
_WRITTEN, _ENDED_AT = (_series(f"resilience_{name}_timestamp_seconds") for name in ("written", "ended"))
_FAILED_AT = _ENDED_AT.replace("}", ', outcome="failed"}')
_COMPLETED_AT = _ENDED_AT.replace("}", ', outcome="completed"}')
_UP_FAILED = 'up{cluster="c", job_id="j", job="resilience", outcome="failed", instance="127.0.0.1:0"}'
_UP_BY_HTTP = 'up{cluster="c", job_id="j", job="resilience", node="n0", instance="n0:9", discovery="http"}'
_RANK_ACTIVE = _series("resilience_rank_state", 'rank="3", state="active"')
_OPEN = _series("resilience_rank_section_open_seconds", 'rank="3", section="checkpoint"')
_USED = _series("resilience_timeout_headroom_ratio", 'section="step"')
_ITERATION = _series("resilience_restart_iteration", 'layer="inprocess"')
_ENDED = _series("resilience_restart_iterations_total", 'layer="inprocess", outcome="interrupted"')
_ENDED_ELSEWHERE = _ENDED.replace("}", ', instance="n0:10"}')
_BUDGET = _series("resilience_restart_budget_remaining", 'layer="launcher"')
_BUDGET_MAX = _series("resilience_restart_budget_max", 'layer="launcher"')
_PRODUCTIVE = _series("resilience_productive_seconds_total")
_LOST = _series("resilience_lost_seconds_total", 'cause="restart"')
_HANG = _series("resilience_lost_seconds_total", 'cause="hang"')
_IDLE = _series("resilience_lost_seconds_total", 'cause="idle"')
_RUN_FOLDER, _RUN_FOLDER_PEER = (_series("resilience_run_folder_up", node=node) for node in ("n0", "n1"))
_DROPPED = _series("resilience_telemetry_dropped_total", 'signal="span", reason="queue"')
_UP = 'up{cluster="c", job_id="j", job="resilience", node="n1", instance="n1:9"}'
_UP_PEER = 'up{cluster="c", job_id="j", job="resilience", node="n0", instance="n0:9"}'
_SAMPLES = _series("resilience_section_duration_seconds_count", 'section="step", outcome="completed"')
_CALIBRATED = _series("resilience_section_timeout_seconds", 'section="step", source="calibrated"')
_STALE = _series("resilience_calibration_stale", 'section="step"')


# Unless an example says otherwise, the job's nodes exist all the time and started long before.
_BEGAN, _BEGAN_PEER = (_series("resilience_start_timestamp_seconds", node=node) for node in ("n0", "n1"))
_PRODUCTIVE_PEER = _series("resilience_productive_seconds_total", node="n1")
_THERE = {_BEGAN: "-36000x300", _BEGAN_PEER: "-36000x300", _PRODUCTIVE: "0x300", _PRODUCTIVE_PEER: "0x300"}


def _faults(node: str) -> str:
    return _series("resilience_interruptions_total", 'interruption="terminated", category="host", origin="first"', node)


def _blamed(culprit: str, by: str = "n0") -> str:
    """The counter of a node's blame. by: the node that records the verdicts."""
    return _series("resilience_blamed_total", f'culprit_node="{culprit}"', by)


def _verdict(node: str, sentence: str) -> str:
    return _series("resilience_verdict_timestamp_seconds", f'sentence="{sentence}"', node)


def _restart(layer: str, le: str) -> str:
    labels = f'layer="{layer}", le="{le}"'
    return _series("resilience_restart_duration_seconds_bucket", labels)


CASES: dict[str, tuple[Case, ...]] = {
    "JobGone": (
        # Its agents were killed: the entries exist, but no endpoint answers.
        Case({_UP: "1x10 0x30", _UP_PEER: "1x10 0x30"}, "20m", ((_job(), ""),)),
        Case({_UP: "1x10 0x30", _UP_PEER: "1x40"}, "20m"),
        # The links of the alert name a job whose id needs an escape, both as a folder and in a URL.
        Case(
            {_UP.replace('job_id="j"', 'job_id="team%2Fa b&c"'): "1x10 0x30"},
            "20m",
            ((_job(job_id="team%2Fa b&c"), ""),),
        ),
        # A clean end removes the entries; a failed end is reported.
        Case({_UP: "1x10 stale", _UP_PEER: "1x10 stale"}, "20m"),
        Case({_UP: "1x10 0x30", _UP_FAILED: "_x10 0x30"}, "20m"),
        # A new Prometheus never scraped it alive; HTTP discovery cannot distinguish an end from a death.
        Case({_UP: "0x40"}, "20m"),
        Case({_UP_BY_HTTP: "1x10 0x30"}, "20m"),
        # The file for node-exporter is no longer written.
        Case({_WRITTEN: "0+60x10 600x30"}, "20m", ((_job(), ""),)),
        Case({_WRITTEN: "0+60x10 600x30", _COMPLETED_AT: "_x10 600x30"}, "20m"),
        # Its run folder does not answer at the end, so its entries stay; the file says how it ended.
        Case({_UP: "1x10 0x30", _WRITTEN: "0+60x10 600x30", _COMPLETED_AT: "_x10 600x30"}, "20m"),
        Case({_WRITTEN: "-26400x30"}, "20m"),  # since more than 6 hours
    ),
    "JobFailed": (
        Case({_UP: "1x10 stale", _UP_FAILED: "_x10 0x30"}, "12m", ((_job(), ""),)),
        Case({_UP: "1x10 stale", _UP_FAILED: "_x10 0x30", _RUN_INFO: "1x10 stale"}, "12m", ((_job(), ""),), _FOLDER),
        Case({_UP: "1x10 stale"}, "12m"),
        Case({_UP: "1x40", _UP_FAILED: "_x10 0x30"}, "12m"),  # only one node; the others continue
        Case({_UP_FAILED: "0x40"}, "12m"),  # long ago, before this Prometheus
        Case({_WRITTEN: "0+60x10 600x30", _FAILED_AT: "_x10 600x30"}, "12m", ((_job(), ""),)),
        Case({_WRITTEN: "0+60x10 600x30", _COMPLETED_AT: "_x10 600x30"}, "12m"),
    ),
    "StartStalled": (
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_"}, "12m", ((_job(), "1h 2m 0s"),)),
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_", _STEP: "_x5 1x15"}, "12m"),
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_", _STEP: "1x5 stale"}, "12m"),  # its monitors are stopped
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_", _BEATS: "_x5 1x15"}, "12m"),
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_", _ITERATION: "_x5 0x15"}, "12m"),
        Case({_BEGAN: "-2280x20", _BEGAN_PEER: "_"}, "12m"),
        # Its run folder no longer answers, so its steps are unknown.
        Case({_BEGAN: "-3000x20", _BEGAN_PEER: "_", _STEP: "1x7 stale", _RUN_FOLDER: "1x7 0x12"}, "12m"),
    ),
    "JobStalled": (
        Case({_ACTIVE: "8x40", _BEATS: "0+60x10 600x30"}, "35m", ((_job(), ""),)),
        Case({_ACTIVE: "8x40", _STEP: "0+5x10 50x30"}, "35m", ((_job(), ""),)),
        Case(
            {_ACTIVE: "8x40", _STEP: "0+5x10 50x30", _SILENCE: "0x10 0+60x30"},
            "35m",
            ((_job(), ""),),
            {"culprit": "rank 3 on n0, silent for 24m 0s"},
        ),
        # A rank that was silent for longer has finished.
        Case(
            {_ACTIVE: "8x40", _STEP: "0+5x10 50x30", _SILENCE: "0x10 0+60x30", _FINISHED: "3600x9 stale"},
            "35m",
            ((_job(), ""),),
            {"culprit": "rank 3 on n0, silent for 24m 0s"},
        ),
        Case({_ACTIVE: "8x40", _BEATS: "0+60x40"}, "35m"),
        # No run folder answers, so nothing is known about progress. Where one does, it is.
        Case({_ACTIVE: "8x40", _BEATS: "0+60x10 600x30", _RUN_FOLDER: "1x10 0x30"}, "35m"),
        Case(
            {_ACTIVE: "8x40", _BEATS: "0+60x10 600x30", _RUN_FOLDER: "1x10 0x30", _RUN_FOLDER_PEER: "1x40"},
            "35m",
            ((_job(), ""),),
        ),
        # Steps continue without heartbeats: no stall. A job that has ended does not stall either.
        Case({_ACTIVE: "8x40", _BEATS: "0+60x10 600x30", _STEP: "0+5x40"}, "35m"),
        Case({_ACTIVE: "8x10 stale", _BEATS: "0+60x10 600x30", _BEGAN: "0x10 stale", _BEGAN_PEER: "0x10 stale"}, "35m"),
    ),
    "RankHeartbeatStale": (
        Case(
            {_SILENCE: "0x10 0+60x20", _RANK_ACTIVE: "1x30"},
            "20m",
            ((_job(node="n0", rank="3"), "9m 0s"),),
        ),
        Case({_SILENCE: "13x30", _RANK_ACTIVE: "1x30"}, "20m"),
        # The section's limit covers a rank inside a section. A rank that is gone raises no alert.
        Case({_SILENCE: "0x10 0+60x20", _RANK_ACTIVE: "1x30", _OPEN: "0+60x30"}, "20m"),
        Case({_SILENCE: "0x10 0+60x20", _RANK_ACTIVE: "1x10 stale"}, "20m"),
    ),
    "SectionNearLimit": (
        Case({_USED: "0.2x5 0.8x10"}, "10m", ((_job(section="step"), "80%"),)),
        Case({_USED: "0.5x20"}, "10m"),
    ),
    "RestartLoop": (
        # The first restart creates the counter.
        Case({_ITERATION: "0x5 1+1x4 5x20", _ENDED: "_x6 1+1x4 5x20"}, "15m", ((_job(), "5"),)),
        Case(
            {_ITERATION: "0x5 1+1x4 5x20", _ENDED: "_x6 1+1x4 5x20", _blamed("n1"): "_x6 1+1x4 5x20"},
            "15m",
            ((_job(), "5"),),
            {"culprit": "node n1, times blamed within 6 hours: 5"},
        ),
        # The newest of two nodes' verdicts.
        Case(
            {
                _ITERATION: "0x5 1+1x4 5x20",
                _ENDED: "_x6 1+1x4 5x20",
                _verdict("n0", "rank 1 failed first (ValueError: bad)"): "_x6 360x2 stale",
                _verdict("n1", "rank 3 failed first (SIGKILL)"): "_x9 540x20",
            },
            "15m",
            ((_job(), "5"),),
            {"verdict": "rank 3 failed first (SIGKILL)"},
        ),
        Case({_ITERATION: "0x5 1+1x2 3x20", _ENDED: "_x6 1+1x2 3x20"}, "15m"),
        # The exporter has changed: the same counters have another instance.
        Case({_ITERATION: "0x5 1+1x2 3x20", _ENDED: "_x6 1+1x2 stale", _ENDED_ELSEWHERE: "_x9 3x20"}, "15m"),
        Case({_ITERATION: "0x5 1+1x4 5x60", _ENDED: "_x6 1+1x4 5x60"}, "50m"),
    ),
    "RestartBudgetLow": (
        Case({_BUDGET: "3x5 1x10", _BUDGET_MAX: "3x20"}, "10m", ((_job(layer="launcher"), "1"),)),
        # A new Prometheus has never seen more of the budget.
        Case({_BUDGET: "1x20", _BUDGET_MAX: "3x20"}, "10m", ((_job(layer="launcher"), "1"),)),
        Case({_BUDGET: "3x5 2x10", _BUDGET_MAX: "3x20"}, "10m"),
        Case({_BUDGET: "1x20", _BUDGET_MAX: "1x20"}, "10m"),  # the budget was this small from the start
    ),
    "NodeRepeatOffender": (
        Case({_blamed("n1"): "_x5 1x5 3x20", **_TWO_NODES}, "20m", ((_job(node="n1"), "3"),)),
        # The node that records verdicts has left, and another one records them.
        Case(
            {_blamed("n1"): "_x2 1x3 stale", _blamed("n1", "n1"): "_x14 2x20", **_TWO_NODES},
            "20m",
            ((_job(node="n1"), "3"),),
        ),
        Case({_blamed("n1"): "_x5 1x20", _blamed("n0"): "_x10 2x20", **_TWO_NODES}, "20m"),
        Case({_blamed("other"): "_x5 3x20", **_TWO_NODES}, "20m"),  # of several nodes, which have no series
        # Ranks of a node failed first by its own records, and the verdicts blame no node.
        Case({_faults("n1"): "_x5 1x5 3x20", **_TWO_NODES}, "20m"),
        Case({_blamed("n0"): "_x5 1x5 3x20", _ACTIVE: "8x100"}, "20m"),  # the job has only one node
    ),
    "RestartSlow": (
        Case(
            {
                _restart("inprocess", "15"): "_x5 0x30",
                _restart("inprocess", "60"): "_x5 8x30",
                _restart("inprocess", "+Inf"): "_x5 8x30",
            },
            "20m",
            ((_job(layer="inprocess"), "57.75s"),),
        ),
        Case(
            {
                # Each took 25 s: the quantile stays within the bucket that ends at the limit.
                _restart("inprocess", "20"): "_x5 0x30",
                _restart("inprocess", f"{SLOW_IN_PLACE_S:g}"): "_x5 8x30",
                _restart("inprocess", "+Inf"): "_x5 8x30",
            },
            "20m",
        ),
        Case(
            {
                _restart("launcher", "168"): "_x5 0x30",
                _restart("launcher", f"{SLOW_BY_LAUNCHER_S:g}"): "_x5 8x30",
                _restart("launcher", "+Inf"): "_x5 8x30",
            },
            "20m",
        ),
    ),
    "GoodputLow": (
        Case({_PRODUCTIVE: "0+480x90", _LOST: "_x10 0+120x80"}, "85m", ((_job(), "80%"),)),
        Case({_PRODUCTIVE: "0+480x90", _LOST: "_x10 0+10x80"}, "85m"),
        # 1,000 ranks: once an hour all of them wait for 30 minutes for one that hangs, until a limit fires.
        Case(
            {_PRODUCTIVE: "0+60000x180", _HANG: "0x39 1800000x59 3600000x59"},
            "100m",
            ((_job(), "50%"),),
        ),
        # A spare is idle, and no fault.
        Case({_PRODUCTIVE: "0+480x90", _IDLE: "0+120x90"}, "85m"),
        Case({_PRODUCTIVE: "0+480x90", _IDLE: "0+120x90", _LOST: "_x10 0+120x80"}, "85m", ((_job(), "80%"),)),
        Case({_PRODUCTIVE: "_x20 0+480x40", _LOST: "_x20 0+480x40"}, "45m"),  # too young: the job has just started
    ),
    "SparesExhausted": (
        Case({_ACTIVE: "8x60", _SPARE: "1x10 stale"}, "40m", ((_job(), ""),)),
        Case({_ACTIVE: "8x60", _SPARE: "1x10 stale"}, "25m"),  # a launcher may restart the job
        Case({_ACTIVE: "8x20 stale 8x39", _SPARE: "1x10 stale"}, "40m", ((_job(), ""),)),  # no sample for a moment
        Case({_ACTIVE: "8x60", _SPARE: "2x10 1x50"}, "40m"),
        Case({_ACTIVE: "8x60"}, "40m"),
    ),
    "MonitorDown": (
        Case(
            {_ACTIVE: "7x30", _series("resilience_ranks", 'state="unmonitored"'): "_x5 1x25"},
            "20m",
            ((_job(node="n0"), ""),),
        ),
        Case({_UP_PEER: "1x30", _UP: "1x5 0x25"}, "20m", ((_job(node="n1"), ""),)),
        Case({_UP_PEER: "1x30", _UP: "1x30", _ACTIVE: "8x30"}, "20m"),
        Case({_UP_PEER: "1x5 0x25", _UP: "1x5 0x25"}, "20m"),  # the job has ended
    ),
    "TelemetryDropping": (
        Case({_DROPPED: "_x5 12x20"}, "10m", ((_job(signal="span", reason="queue"), ""),)),
        Case({_DROPPED: "12x60"}, "40m"),
        # The disk of one node is full, and takes no record that says so.
        Case(
            {_RUN_FOLDER: "1x10 0x30", _RUN_FOLDER_PEER: "1x40"}, "17m", ((_job(signal="record", reason="sink"), ""),)
        ),
        Case({_RUN_FOLDER: "1x10 0x2 1x30"}, "17m"),
    ),
    "TimeoutsUncalibrated": (
        Case({_SAMPLES: "600x90"}, "70m", ((_job(section="step"), ""),)),
        Case({_SAMPLES: "600x90", _CALIBRATED: "12x90", _STALE: "1x90"}, "70m", ((_job(section="step"), ""),)),
        Case({_SAMPLES: "600x90", _CALIBRATED: "12x90"}, "70m"),
        Case({_SAMPLES: "600x90", _CALIBRATED: "12x5 stale", _RUN_FOLDER: "1x5 0x85"}, "70m"),
        Case({_SAMPLES: "20x90"}, "70m"),
    ),
}
assert set(CASES) == {alert.name for alert in ALERTS}


def unit_tests(alert: Alert, grafana: str) -> dict[str, Any]:
    """Return an alert's unit tests as a file for promtool, for a folder next to the rules."""
    return unit_test_file(
        [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values} for series, values in {**_THERE, **case.series}.items()
                ],
                "alert_rule_test": [
                    {
                        "eval_time": case.at,
                        "alertname": alert.name,
                        "exp_alerts": [
                            _expected(alert, labels, value, grafana, case.annotations) for labels, value in case.fires
                        ],
                    }
                ],
            }
            for case in CASES[alert.name]
        ]
    )


def _expected(
    alert: Alert, labels: dict[str, str], value: str, grafana: str, filled_in: dict[str, str]
) -> dict[str, Any]:
    texts = {}
    for name, template in annotations_of(alert, grafana).items():
        if name in filled_in:
            texts[name] = filled_in[name]
            continue
        without_queries = re.sub(r"\{\{ with .*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", template)
        without_queries = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], without_queries)
        without_queries = re.sub(
            r"\{\{ \$labels\.(\w+) \| urlquery \}\}",
            lambda found: urllib.parse.quote_plus(labels[found[1]]),
            without_queries,
        )
        texts[name] = re.sub(r"\{\{ \$value[^}]*\}\}", value, without_queries)
    alert_labels = {"severity": alert.severity, "level": alert.level}
    return {"exp_labels": {**labels, **alert_labels}, "exp_annotations": texts}
