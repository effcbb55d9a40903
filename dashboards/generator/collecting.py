"""How do other tools read the log lines of a run?  A format for lnav, and example configurations of log shippers.

Promtail, Vector and Alloy send the lines to Loki with few labels; the other fields stay in the line. `trace_id` links
to the trace."""

from __future__ import annotations

import json
import re

from resilience.facts.events import CATALOGUE
from resilience.run_folder.lines import LEVELS
from resilience.telemetry.log import LogLine

_NOT_SHOWN = (
    "mono_ns",
    "seq",
    "schema",
    "pid",
    "job_id",
    "attempt",
    "trace_id",
    "span_id",
    "world_size",
    "role",
    "rank",
)

PROMTAIL = """\
# Promtail or any agent with its scrape_configs
scrape_configs:
  - job_name: resilience
    pipeline_stages:
      - json:
          expressions: {ts: ts, level: level, job_id: job_id, node: node, trace_id: trace_id}
      - timestamp: {source: ts, format: RFC3339Nano}
      - labels: {level: "", job_id: "", node: ""}
      - structured_metadata: {trace_id: ""}
    static_configs:
      - targets: [localhost]
        labels: {job: resilience, __path__: /shared/resilience-runs/*/logs/*.jsonl}
"""

VECTOR = """\
# vector.toml
[sources.resilience]
type = "file"
include = ["/shared/resilience-runs/*/logs/*.jsonl"]

[transforms.resilience_parsed]
type = "remap"
inputs = ["resilience"]
source = '''
. = object!(parse_json!(string!(.message)))
.timestamp = parse_timestamp!(string!(.ts), "%+")
'''

[sinks.loki]
type = "loki"
inputs = ["resilience_parsed"]
endpoint = "http://loki:3100"
encoding.codec = "json"
labels = { job = "resilience", level = "{{ level }}", job_id = "{{ job_id }}", node = "{{ node }}" }
"""

ALLOY = """\
// config.alloy
local.file_match "resilience" {
  path_targets = [{__path__ = "/shared/resilience-runs/*/logs/*.jsonl", job = "resilience"}]
}

loki.source.file "resilience" {
  targets    = local.file_match.resilience.targets
  forward_to = [loki.process.resilience.receiver]
}

loki.process "resilience" {
  stage.json {
    expressions = {ts = "ts", level = "level", job_id = "job_id", node = "node", trace_id = "trace_id"}
  }
  stage.timestamp {
    source = "ts"
    format = "RFC3339Nano"
  }
  stage.labels {
    values = {level = "", job_id = "", node = ""}
  }
  stage.structured_metadata {
    values = {trace_id = ""}
  }
  forward_to = [loki.write.default.receiver]
}

loki.write "default" {
  endpoint {
    url = "http://loki:3100/loki/api/v1/push"
  }
}
"""


def texts() -> dict[str, str]:
    """Return all files by their path."""
    return {
        "lnav/resilience.json": lnav_format(),
        "logs/promtail.yaml": PROMTAIL,
        "logs/vector.toml": VECTOR,
        "logs/config.alloy": ALLOY,
    }


def lnav_format() -> str:
    """Return the formats for the log viewer lnav: log lines, and records with the levels of the catalogue."""
    levels = {level: [str(k.__struct_config__.tag) for k in CATALOGUE if k.level == level] for level in LEVELS[:4]}
    visible = {"kind": "string", "identifier": True}
    hidden = {"kind": "json", "hidden": True}
    common = {"json": True, "file-type": "json"}
    time = {"field": "__timestamp__", "timestamp-format": "%H:%M:%S.%L"}
    formats = {
        "$schema": "https://lnav.org/schemas/format-v1.schema.json",
        "resilience_log": common
        | {
            "title": "resilience log lines",
            "description": "What a program logs with resilience.get_logger(): logs/*.jsonl of a run folder.",
            "file-pattern": "/logs/[^/]+\\.jsonl$",
            "timestamp-field": "ts",
            "level-field": "level",
            "body-field": "event",
            "opid-field": "trace_id",
            "value": {
                **dict.fromkeys(("node", "initial_rank", "iteration", "step", "section"), visible),
                **{name: hidden for name in LogLine.__struct_fields__ if name in _NOT_SHOWN},
            },
            "line-format": [
                time,
                " ",
                {"field": "__level__", "min-width": 7},
                " rank ",
                {"field": "initial_rank", "default-value": "-", "min-width": 5},
                " ",
                {"field": "event"},
            ],
        },
        "resilience_record": common
        | {
            "title": "resilience records",
            "description": "Every event of ranks, monitors and agents: records/*.jsonl of a run folder.",
            "file-pattern": "/records/[^/]+\\.jsonl$",
            "timestamp-field": "wall_ns",
            "timestamp-divisor": 1_000_000_000,
            "level-field": "event/event",
            "level": {level: f"^({'|'.join(map(re.escape, tags))})$" for level, tags in levels.items() if tags},
            "body-field": "event/event",
            "opid-field": "origin/iteration",
            "value": {
                **{f"origin/{name}": visible for name in ("node", "role", "initial_rank", "iteration", "cycle")},
                **{f"event/{name}": visible for name in ("event", "stage", "outcome", "duration_s")},
                **dict.fromkeys(("origin", "sequence", "mono_ns", "schema"), hidden),
            },
            "line-format": [
                time,
                " ",
                {"field": "__level__", "min-width": 7},
                " ",
                {"field": "origin/role", "min-width": 7},
                " ",
                {"field": "origin/initial_rank", "default-value": "-", "min-width": 5},
                " ",
                {"field": "event/event"},
                " ",
                {"field": "event/stage", "default-value": ""},
            ],
        },
    }
    return json.dumps(formats, indent=2, ensure_ascii=False) + "\n"
