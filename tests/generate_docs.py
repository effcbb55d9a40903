"""Writes the pages that are made from the code: events, metrics, settings, config, API reference, the table of options
in the page on migration, the list of stable names, and CHANGELOG.md from the fragments in docs/changes.

`python -m tests.generate_docs` writes them; with `--check` it only says which are stale, and exits with 1."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import msgspec

from dashboards.generator.rules import ALERTS
from resilience import __version__
from resilience.cli import VERBS
from resilience.cli.calibrate import configure_diff
from resilience.cli.completion import parser_of
from resilience.facts.events import CATALOGUE
from resilience.facts.records import Record
from resilience.launcher import ft_options
from resilience.launcher.arguments import CFG_PATH_HELP, MAX_RESTARTS, Options
from resilience.monitor.config import FIELDS, FORMS, flag, shown_default
from resilience.run_folder.entries import Entry
from resilience.system.environment import settings_table
from resilience.telemetry.catalogue import METRICS
from resilience.telemetry.log import LogLine

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STABLE_NAMES = "schema/stable-names.txt"
RUN_FILES = (
    "job.json",
    "logs/<node>-<rank>.jsonl",
    "metrics/<node>.prom",
    "output/<cycle>/<rank>.err",
    "output/<cycle>/<rank>.err.times",
    "output/<cycle>/<rank>.out",
    "output/<cycle>/<rank>.out.times",
    "records/<node>-<rank>.jsonl",
    "records/<node>-agent.jsonl",
    "timings/<node>-<rank>.hist",
    "timings/<node>-<rank>.jsonl",
    "timings/<node>-<rank>.signs",
)
"""The files of a run folder; tests/process/test_run_folder.py compares them with those of a job."""
LINES = {"log-line": LogLine, "record": Record, "timeline": Entry}
"""The lines that programs read, by the names of their schemas in docs/schema."""
CHANGE_KINDS = ("added", "changed", "fixed", "removed")
FIRST_RELEASE = "0.1.0"
FIRST_RELEASE_SUMMARY = """
The first release. In short:

- **Restarts in place**: a `Wrapper` runs the training function again in the same processes after an exception, a
  death or a hang, on the remaining ranks or with spares ([usage](docs/usage.md)).
- **Launcher**: `resilience run` has torchrun's options, restarts workers, replaces nodes, and ends jobs that another
  start would not help ([launcher](docs/launcher.md)).
- **Hangs**: each rank has a monitor in another process. Heartbeats, sections and steps have limits, which are set,
  learned while the job runs, or calculated by `resilience calibrate` ([heartbeats, sections,
  limits](docs/fault_tolerance.md)).
- **Explanations**: every restart is recorded, with the rank that is to blame and how sure that is. `resilience
  report`, `status`, `logs`, `trace` and `incidents` show it ([what a run leaves behind](docs/account.md)).
- **Telemetry**: spans and metrics, by OTLP, endpoint or file; dashboards and alerts for Grafana and Prometheus
  ([dashboards](docs/dashboards.md)).
- **Compatible names**: code for nvidia-resiliency-ext 0.1 and 0.2 works under a changed import. Code for later releases
  needs the changes that [migration](docs/migration.md) lists. `resilience run` understands the options of `ft_launcher`
  0.2 to 0.7.
- **Integrations**: callbacks for Lightning and transformers ([frameworks](docs/frameworks.md)), pages for
  [Slurm](docs/slurm.md) and [Kubernetes](docs/kubernetes.md).

Below is what was added, without details. Nobody has an earlier version, so what was changed and fixed until now is
only in [docs/changes](docs/changes), and so are the details. These files stay when later releases remove theirs.
"""
OPTIONS_BEGIN = "<!-- The table is made by tests/generate_docs.py from resilience/launcher/ft_options.py. -->"
OPTIONS_END = "<!-- End of the table. -->"
MADE = "<!-- Made by tests/generate_docs.py from the code; change it there. -->\n\n"
API = (
    ("resilience", ("section", "heartbeat", "step", "stop_requested", "get_logger", "traceparent")),
    ("resilience.calibration", ("fit", "read", "calibrate", "Target", "Timeouts", "Deadline", "Timeout", "Cut")),
    (
        "resilience.errors",
        (
            "ResilienceError",
            "ConfigurationError",
            "ConfigurationTypeError",
            "ProtocolError",
            "DecodeError",
            "MonitorError",
            "LaunchError",
            "StoreError",
            "ServerGone",
            "RestartError",
            "HealthCheckError",
            "FaultCounterExceeded",
            "InternalError",
            "TimeoutError",
            "RankDiscarded",
            "BarrierError",
            "BarrierTimeout",
            "BarrierOverflow",
            "RestartAbort",
        ),
    ),
    ("resilience.inprocess", ("Wrapper", "CallWrapper", "Compose")),
    ("resilience.inprocess.state", ("State", "Status")),
    ("resilience.inprocess.initialize", ("Initialize", "RetryController")),
    (
        "resilience.inprocess.abort",
        ("Abort", "AbortTorchDistributed", "AbortTransformerEngine", "AbortCheckpointWriters"),
    ),
    ("resilience.inprocess.finalize", ("Finalize", "ThreadedFinalize")),
    ("resilience.inprocess.health_check", ("HealthCheck", "CudaHealthCheck", "FaultCounter")),
    ("resilience.inprocess.rank_assignment", ("RankAssignment", "ShiftRanks", "FillGaps", "FilterGroupedByKey")),
    ("resilience.inprocess.completion", ("Completion",)),
    ("resilience.inprocess.terminate", ("Terminate",)),
    ("resilience.inprocess.rank_filter", ("RankFilter", "MaxActiveWorldSize", "WorldSizeDivisibleBy")),
    ("resilience.inprocess.store", ("StoreMixin", "TCPStore", "FileStore", "PrefixStore")),
    ("resilience.inprocess.hook_store", ("IterationStore",)),
    ("resilience.inprocess.attribution", ("Interruption", "InterruptionRecord")),
    ("resilience.inprocess.monitor_thread", ("RankShouldRestart", "async_raise", "reraise_if_unraisable")),
    ("resilience.inprocess.tools.inject_fault", ("Fault", "InjectedException", "inject_fault")),
    (
        "resilience.fault_tolerance",
        (
            "RankMonitorClient",
            "FaultToleranceConfig",
            "WorkloadAction",
            "WorkloadControlRequest",
            "RankMonitorServer",
            "RankMonitorClientError",
        ),
    ),
    ("resilience.fault_tolerance.data", ("HeartbeatTimeouts", "SectionTimeouts")),
)


def events_page() -> str:
    lines = [
        "# Events\n",
        MADE,
        "Every fact the toolkit states, in the order of the catalogue `resilience/facts/events.py`. A record is "
        "an event with its place: `sequence`, `wall_ns`, `mono_ns`, `origin`. Log line, span and metric are views of "
        "records. "
        "Durations are seconds, names that end in `_s`.\n",
    ]
    for kind in CATALOGUE:
        hints = typing.get_type_hints(kind)
        lines.append(f"\n## `{kind.__struct_config__.tag}` ({kind.level})\n")
        lines.append(f"{inspect.cleandoc(kind.__doc__ or '')}\n")
        if kind.__struct_fields__:
            lines.append("\n| field | type |\n|---|---|\n")
            lines += [f"| `{name}` | {_type(hints[name])} |\n" for name in kind.__struct_fields__]
    return _page(lines)


def metrics_page() -> str:
    lines = [
        "# Metrics\n",
        MADE,
        "One endpoint a node, or a file for node-exporter; [how to collect them](dashboards.md"
        "#where-the-metrics-come-from). The last snapshot stands in the run folder, `metrics/<node>.prom`. Base units, "
        "seconds. Counters survive the death of ranks, monitors and agents: they are counted from the record files. "
        "`resilience_elastic_…` are the metrics that torch's elastic agent, on which ours is built, emits through "
        "`torch.distributed.elastic.metrics` and `.events`; handlers that are configured there still get them.\n",
        "\n| name | type | labels | meaning | made from |\n|---|---|---|---|---|\n",
    ]
    for metric in METRICS:
        labels = ", ".join(metric.labels) or "–"
        made_from = ", ".join(f"`{kind.__struct_config__.tag}`" for kind in metric.events) or metric.source or "–"
        if len(metric.events) == len(CATALOGUE):
            made_from = "every event"
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {made_from} |\n")
    lines.append("\nUpper bounds of the buckets, in seconds:\n\n| histogram | buckets |\n|---|---|\n")
    for metric in METRICS:
        if metric.buckets:
            lines.append(f"| `{metric.name}` | {', '.join(f'{bound:g}' for bound in metric.buckets)} |\n")
    return _page(lines)


def log_line_schema() -> str:
    """JSON Schema of a line in `logs/` of a run folder; a line may hold more fields, the event's own."""
    return _schema(LogLine)


def record_schema() -> str:
    """JSON Schema of a line in `records/` of a run folder."""
    return _schema(Record)


def timeline_schema() -> str:
    """JSON Schema of a line of `resilience logs --json`; a line may hold more fields, the event's own."""
    return _schema(Entry)


def _schema(kind: type) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)}
    for definition in schema["$defs"].values():
        if "description" in definition:  # a docstring, which msgspec before 0.23 leaves indented
            definition["description"] = inspect.cleandoc(definition["description"])
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def settings_page() -> str:
    head = (
        "Environment variables set what no function has a parameter for. Give all ranks the same values, except for "
        "RESILIENCE_NODE. A variable that holds only for `Wrapper` has an effect in functions that a `Wrapper` calls, "
        "whatever started the script. For a script without a `Wrapper`, use [options](config.md) of `resilience run` "
        "instead, such as `--ft-step-timeout`.\n\n"
    )
    others = (
        "\n## Variables with other names\n\n"
        "| variable | read by | meaning |\n|---|---|---|\n"
        "| `FAULT_TOL_FINISHED_FLAG_FILE` | callbacks for Lightning and transformers with `autoresume=True` | file "
        "that rank 0 creates once the training is finished ([frameworks](frameworks.md)); if it is not set, such a "
        "training raises ConfigurationError at its start |\n"
        "| `FT_RANK_MONITOR_IPC_SOCKET` | the program in a worker that [a launcher of your own]"
        "(fault_tolerance.md#a-launcher-of-your-own) starts | socket of the worker's `RankMonitorServer`; "
        "RESILIENCE_MONITOR_SOCKET, which `resilience run` sets, takes precedence |\n"
        "| `NO_COLOR` | all commands that print | any value but an empty one: no colours |\n"
        "| `OTEL_…`, `TRACEPARENT` | `resilience run`, `Wrapper` | export of [traces](traces.md) and "
        "[metrics](dashboards.md#where-the-metrics-come-from) |\n"
        "| `PET_…`, `SLURM_PROCID`, `GROUP_RANK` | `resilience run` | [torchrun's options and the node's rank]"
        "(launcher.md#environment) |\n"
    )
    return _page(["# Settings\n", MADE, head, settings_table(), others])


def config_page() -> str:
    head = (
        "Each setting is a field of `FaultToleranceConfig`, a key of the mapping `fault_tolerance` in a YAML file, and "
        "a flag of `resilience run`, with the same name and the same values. The page "
        "[heartbeats, sections, limits](fault_tolerance.md) describes how they work. Timeouts are in seconds; `none` "
        "never fires, and an empty value means the same. Flags override the file that `--ft-cfg-path` names, and the "
        "file overrides the defaults.\n\n"
    )
    lines = ["# Config\n", MADE, head, "| key | flag | value | default | meaning |\n|---|---|---|---|---|\n"]
    for field in FIELDS.values():
        form = FORMS[field.metadata["read"]][0]
        lines.append(
            f"| `{field.name}` | `{flag(field.name)}` | {form} | {shown_default(field)} | {field.metadata['help']} |\n"
        )
    lines.append(
        "\n## Further options of `resilience run`\n\n`resilience run` has these options too, and all of torchrun's. "
        "Give options before the script's name; everything after it belongs to the script.\n\n"
        "| flag | default | meaning |\n|---|---|---|\n"
        f"| `--ft-cfg-path` | - | {CFG_PATH_HELP} |\n"
    )
    for option in dataclasses.fields(Options):
        is_text = isinstance(option.default, str)
        default = "-" if option.default in (None, False, ()) else option.default if is_text else f"{option.default:g}"
        lines.append(f"| `--{option.name.replace('_', '-')}` | {default} | {option.metadata['help']} |\n")
    lines.append(f"| `--max-restarts` | {MAX_RESTARTS} | torchrun's own; there the default is 0 |\n")
    return _page(lines)


def migration_page() -> str:
    """The page as it is, with the table of ft_launcher's options between the two marks."""
    page = (DOCS / "migration.md").read_text()
    before, _, rest = page.partition(OPTIONS_BEGIN)
    _, _, after = rest.partition(OPTIONS_END)
    return f"{before}{OPTIONS_BEGIN}\n\n{ft_options.table()}\n{OPTIONS_END}{after}"


def api_page() -> str:
    lines = ["# API reference\n", MADE]
    for module, names in API:
        lines.append(f"\n## `{module}`\n\n{_doc(importlib.import_module(module)).splitlines()[0]}\n")
        for name in names:
            lines += _described(name, getattr(importlib.import_module(module), name))
    return _page(lines)


def stable_names() -> set[str]:
    """Return every name that docs/compatibility.md promises to keep, one line each: its kind, then the name."""
    names = {f"command {verb}" for verb in VERBS} | {f"file {name}" for name in RUN_FILES}
    for kind in CATALOGUE:
        tag = kind.__struct_config__.tag
        names |= {f"event {tag}"} | {f"event {tag} {field}" for field in kind.__struct_fields__}
    for metric in METRICS:
        names |= {f"metric {metric.name}"} | {f"metric {metric.name} {label}" for label in metric.labels}
    names |= {f"config {name}" for name in FIELDS} | {f"option {flag(name)}" for name in FIELDS}
    names |= {f"option --{option.name.replace('_', '-')}" for option in dataclasses.fields(Options)}
    names.add("option --ft-cfg-path")
    for verb in VERBS:
        if verb != "run":  # its parser has all of torchrun's options too
            names |= set(_options_of(verb, parser_of(verb)))
    diff = argparse.ArgumentParser()
    configure_diff(diff)
    names |= {"command calibrate diff", *_options_of("calibrate diff", diff)}
    names |= {f"alert {alert.name}" for alert in ALERTS}
    names |= {
        f"field {line} {field.encode_name}" for line, kind in LINES.items() for field in msgspec.structs.fields(kind)
    }
    names |= {f"variable {name}" for name in re.findall(r"^\| `(RESILIENCE_\w+)`", settings_table(), re.MULTILINE)}
    for module, public in API:
        for name in public:
            thing = getattr(importlib.import_module(module), name)
            names |= {f"python {module}.{name}"}
            names |= {f"python {module}.{name}.{member}" for member in _public_members(thing)}
            names |= {f"python {module}.{name}({parameter})" for parameter in _parameters(thing)}
    return names


def stable_names_page() -> str:
    """Return the list with the names that are new. Names that have gone stay in it until a person deletes them."""
    path = DOCS / STABLE_NAMES
    listed = set(path.read_text().splitlines()) if path.exists() else set()
    return "\n".join(sorted(listed | stable_names())) + "\n"


def changelog(version: str = __version__, fragments: Mapping[str, str] | None = None) -> str:
    """Return CHANGELOG.md: the fragments, by kind; of the first release only the first paragraphs of what was added.

    fragments: text by file name, by default those in docs/changes. Raises: ValueError for one without a kind."""
    if fragments is None:
        paths = sorted((DOCS / "changes").glob("*.md"))
        fragments = {path.name: path.read_text() for path in paths if path.name != "README.md"}
    is_first = version == FIRST_RELEASE
    changes: dict[str, list[str]] = {kind: [] for kind in CHANGE_KINDS}
    for name, fragment in fragments.items():
        for kind, text in changes_in(name, fragment):
            if not is_first:
                changes[kind].append(text)
            elif kind == "added":
                changes[kind].append(text.partition("\n\n")[0].rstrip() + "\n")
    lines = [
        "# Changelog\n",
        "<!-- Made by tests/generate_docs.py from docs/changes; add a file there. -->\n\n",
        "Names that stay, and how they may change: [docs/compatibility.md](docs/compatibility.md).\n",
        f"\n## {version} (not released)\n",
        FIRST_RELEASE_SUMMARY if is_first else "",
    ]
    for kind, texts in changes.items():
        if texts:
            lines += [f"\n### {kind.capitalize()}\n\n", *texts]
    return _page(lines)


def changes_in(name: str, fragment: str) -> list[tuple[str, str]]:
    """Return the changes of one fragment: the kind of each, and its text as an item of a list.

    A line that begins with a kind begins a change; other paragraphs continue it."""
    changes: list[tuple[str, str]] = []
    for paragraph in re.split(rf"\n\n|\n(?=(?:{'|'.join(CHANGE_KINDS)}): )", fragment.strip()):
        kind, colon, sentence = paragraph.partition(": ")
        if colon and kind in CHANGE_KINDS:
            changes.append((kind, f"- {_indented(sentence[0].upper() + sentence[1:])}\n"))
        elif changes:
            kind, text = changes[-1]
            changes[-1] = (kind, f"{text}\n  {_indented(paragraph)}\n")
        else:
            raise ValueError(f"docs/changes/{name}: begins with {paragraph[:20]!r}, expected one of {CHANGE_KINDS}")
    return changes


def _indented(paragraph: str) -> str:
    """Return a paragraph as an item of a list holds it; links lead from the repository's root."""
    return paragraph.replace("\n", "\n  ").replace("](../../", "](").replace("](../", "](docs/")


def _described(name: str, thing: object) -> list[str]:
    if isinstance(thing, enum.EnumMeta):
        members = ", ".join(f"`{member}`" for member in thing.__members__)
        return [f"\n### `{name}`\n\n{_doc(thing)}\n\nMembers: {members}.\n"]
    lines = [f"\n### `{name}`\n\n```text\n{name}{_signature(thing)}\n```\n\n{_doc(thing)}\n"]
    if isinstance(thing, type):
        if issubclass(thing, BaseException):
            lines.append(f"\nBase: {', '.join(f'`{base.__name__}`' for base in thing.__bases__)}.\n")
        for attribute, member in vars(thing).items():
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            is_shown = isinstance(member, (types.FunctionType, property)) and not attribute.startswith("_")
            if is_shown and _doc(member):
                target = member.fget if isinstance(member, property) else member
                signature = "" if isinstance(member, property) else _signature(target)
                lines.append(f"\n**`{attribute}{signature}`** {' '.join(_doc(member).split())}\n")
    return lines


def _options_of(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's options and its nested commands with theirs, as lines of the list; no hidden ones."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, nested in action.choices.items():
                yield f"command {command} {name}"
                yield from _options_of(f"{command} {name}", nested)
        elif action.dest != "help" and action.help != argparse.SUPPRESS:
            yield from (f"option {command} {option}" for option in action.option_strings)


def _public_members(thing: object) -> list[str]:
    """Return the names of a class's methods and properties, or of an enum's values; none for a function."""
    members = vars(thing).items() if isinstance(thing, type) else ()
    kinds = (types.FunctionType, classmethod, staticmethod, property, enum.Enum)
    return [name for name, member in members if not name.startswith("_") and isinstance(member, kinds)]


def _parameters(thing: object) -> list[str]:
    is_class = isinstance(thing, type) and not issubclass(thing, msgspec.Struct)
    if isinstance(thing, enum.EnumMeta) or (is_class and "__init__" not in vars(thing)):
        return []  # an inherited signature depends on the version of Python
    return [name for name in inspect.signature(thing).parameters if not name.startswith("_")]  # type: ignore[arg-type]


def _signature(thing: object) -> str:
    try:
        signature = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown = [str(_plain(p)) for p in parameters]
    stars = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in stars and inspect.Parameter.VAR_POSITIONAL not in stars:
        shown.insert(stars.index(inspect.Parameter.KEYWORD_ONLY), "*")
    text = ", ".join(shown)
    return f"({text})" if len(text) < 90 else "(\n    " + ",\n    ".join(shown) + ",\n)"


class _Shown:
    """A default value as a user would write it; its repr may hold an address."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        value = self._value
        if isinstance(value, timedelta):
            return f"timedelta(seconds={value.total_seconds():g})"
        if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
            return value.__name__
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        return f"{type(value).__name__}()" if " at 0x" in repr(value) else repr(value)


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    parameter = parameter.replace(annotation=inspect.Parameter.empty)
    if parameter.default is inspect.Parameter.empty:
        return parameter
    return parameter.replace(default=_Shown(parameter.default))


def _doc(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _type(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = text.replace("typing.", "").replace("resilience.facts.interruptions.", "")
    text = re.sub(r"^Optional\[(\w+)\]$", r"\1 or None", text)  # so an alias with bounds is written
    return "`" + text.replace("|", "or") + "`"


def _page(parts: list[str]) -> str:
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


PAGES = {
    "events.md": events_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
    "config.md": config_page,
    "api.md": api_page,
    "migration.md": migration_page,
    STABLE_NAMES: stable_names_page,
    "schema/log-line.schema.json": log_line_schema,
    "schema/record.schema.json": record_schema,
    "schema/timeline.schema.json": timeline_schema,
}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in {**PAGES, "../CHANGELOG.md": changelog}.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text)
    print("stale:" if "--check" in arguments else "written:", ", ".join(stale) or "none")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
