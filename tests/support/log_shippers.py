"""What Promtail, Alloy and Vector send to Loki for a log line, by our configurations of them.

No package of these programs can be installed here, so their configurations are read strictly (an unknown setting is an
error) and performed in Python, as far as ours go. Only Vector's program for a line runs in its real implementation, VRL
(`pyvrl`). Source: https://grafana.com/docs/loki/v2.9.x/send-data/promtail/stages/,
https://grafana.com/docs/alloy/latest/reference/components/loki/, https://vector.dev/docs/reference/configuration/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple, cast

import msgspec
import yaml

Fields = Mapping[str, Any]
PUSH = "/loki/api/v1/push"
_FIELD = re.compile(r"[A-Za-z_]\w*")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")  # the part of RFC 3339 that we write


class Sent(NamedTuple):
    """One entry for Loki. metadata: Loki's structured metadata."""

    labels: dict[str, str]
    at_ns: int
    line: str
    metadata: dict[str, str]


class Shipper(NamedTuple):
    """What a configuration says. url: where entries go, None if the configuration leaves that to its user."""

    patterns: Sequence[str]
    url: str | None
    send: Callable[[str], Sent]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a configuration, with the settings that ours use."""


# -- Promtail, and the stages that Alloy has from it ---------------------------------------------------


class _Json(_Strict, frozen=True):
    expressions: dict[str, str]


class _Timestamp(_Strict, frozen=True):
    source: str
    format: Literal["RFC3339Nano"]


class _Stage(_Strict, frozen=True):
    json: _Json | None = None
    timestamp: _Timestamp | None = None
    labels: dict[str, str] | None = None
    structured_metadata: dict[str, str] | None = None


class _Static(_Strict, frozen=True):
    targets: list[str]
    labels: dict[str, str]


class _Scrape(_Strict, frozen=True):
    job_name: str
    pipeline_stages: list[_Stage]
    static_configs: list[_Static]


class _Promtail(_Strict, frozen=True):
    scrape_configs: list[_Scrape]


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; Promtail refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise ValueError(f"a key comes twice in {keys}")
        return super().construct_mapping(node, deep)


def promtail(text: str) -> Shipper:
    """Raises: ValueError if the text is no such configuration."""
    (scrape,) = msgspec.convert(yaml.load(text, _UniqueKeys), _Promtail).scrape_configs
    (static,) = scrape.static_configs
    return Shipper(
        [static.labels["__path__"]], None, lambda line: _through(scrape.pipeline_stages, static.labels, line)
    )


def _through(stages: Sequence[_Stage], target: Mapping[str, str], line: str) -> Sent:
    """Return what follows from a line of a target. Labels that begin with __ are the program's own."""
    labels = {name: value for name, value in target.items() if not name.startswith("__")}
    metadata: dict[str, str] = {}
    extracted: dict[str, Any] = {}
    at_ns = -1
    for stage in stages:
        match stage:
            case _Stage(json=_Json(expressions), timestamp=None, labels=None, structured_metadata=None):
                extracted |= {name: _of(json.loads(line), path) for name, path in expressions.items()}
            case _Stage(json=None, timestamp=_Timestamp(source), labels=None, structured_metadata=None):
                at_ns = _nanoseconds(extracted[source])
            case _Stage(json=None, timestamp=None, labels=dict(names), structured_metadata=None):
                labels |= _named(names, extracted)
            case _Stage(json=None, timestamp=None, labels=None, structured_metadata=dict(names)):
                metadata |= _named(names, extracted)
            case _:
                raise ValueError(f"a stage does one thing, not {stage}")
    return Sent(labels, at_ns, line, metadata)


def _of(fields: Fields, path: str) -> Any:
    """Return the value of a JMESPath expression; ours are names of fields."""
    if not _FIELD.fullmatch(path):
        raise ValueError(f"{path!r} is no name of a field")
    return fields.get(path)


def _named(names: Mapping[str, str], extracted: Fields) -> dict[str, str]:
    """Return labels by their names. An empty source stands for the label's own name; no value makes no label."""
    for name, source in names.items():
        if not _FIELD.fullmatch(name) or (source or name) not in extracted:
            raise ValueError(f"label {name!r} from {source or name!r}, but extracted are {sorted(extracted)}")
    values = {name: extracted[source or name] for name, source in names.items()}
    return {name: str(value) for name, value in values.items() if value is not None}


def _nanoseconds(text: str) -> int:
    """Return a time as Go's format RFC3339Nano reads it."""
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is no time of RFC 3339 in UTC")
    seconds = datetime.strptime(parts[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    return int(seconds) * 10**9 + int((parts[2] or "0").ljust(9, "0"))


# -- Alloy ---------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r'\s+|//[^\n]*|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(?P<sign>[{}\[\]=,])'
)


class _Block(NamedTuple):
    """name: "loki.write"; label: "default", empty if it has none. A reference to another block's field is a
    `_Reference`."""

    name: str
    label: str
    arguments: dict[str, Any]
    blocks: list[_Block]

    def only(self, *arguments: str) -> list[Any]:
        """Return the values of the block's arguments, which must be these."""
        if sorted(self.arguments) != sorted(arguments):
            raise ValueError(f"{self.name} has {sorted(self.arguments)}, expected {sorted(arguments)}")
        return [self.arguments[name] for name in arguments]


class _Reference(str):
    """The name of a field that another block exports."""


def alloy(text: str) -> Shipper:
    """Raises: ValueError if the text is no such configuration."""
    blocks = {f"{block.name}.{block.label}": block for block in _Reader(text).blocks()}
    if len(blocks) != 4:
        raise ValueError(f"expected 4 blocks with different names, not {list(blocks)}")
    (source,) = [block for block in blocks.values() if block.name == "loki.source.file"]
    targets, receivers = source.only("targets", "forward_to")
    (found_by,) = _exporter(blocks, targets, "local.file_match", "targets").only("path_targets")
    (receiver,) = receivers
    process = _exporter(blocks, receiver, "loki.process", "receiver")
    ((receiver,),) = process.only("forward_to")
    write = _exporter(blocks, receiver, "loki.write", "receiver")
    write.only()
    (endpoint,) = write.blocks
    (url,) = endpoint.only("url")
    if (endpoint.name, endpoint.label) != ("endpoint", ""):
        raise ValueError(f"loki.write has a block endpoint, not {endpoint.name} {endpoint.label!r}")
    (target,) = found_by
    stages = [_stage(block) for block in process.blocks]
    return Shipper([target["__path__"]], url, lambda line: _through(stages, target, line))


def _exporter(blocks: Mapping[str, _Block], reference: object, component: str, field: str) -> _Block:
    """Return the block that a reference names: a component of this kind, by the field that it exports."""
    if not isinstance(reference, _Reference):
        raise ValueError(f"{reference!r} is no reference")
    name, _, of_block = reference.rpartition(".")
    if of_block != field or name not in blocks or blocks[name].name != component:
        raise ValueError(f"{reference} is no {field} of a {component}; the blocks are {list(blocks)}")
    return blocks[name]


def _stage(block: _Block) -> _Stage:
    """Return a stage of loki.process: those of Promtail, but the labels are below `values`."""
    kind = block.name.removeprefix("stage.")
    if kind in ("labels", "structured_metadata"):
        (settings,) = block.only("values")
    else:
        settings = block.arguments
    return msgspec.convert({kind: settings}, _Stage)


class _Reader:
    """Reads the part of Alloy's syntax that our configuration uses."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []  # kind and text, last one first
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"unexpected {text[at : at + 20]!r}")
            if token.lastgroup is not None:
                self._tokens.append((token.lastgroup, token[0]))
            at = token.end()
        self._tokens.reverse()

    def blocks(self) -> list[_Block]:
        blocks = []
        while self._tokens:
            blocks.append(self._block(self._take("name")))
        return blocks

    def _block(self, name: str) -> _Block:
        label = json.loads(self._take("text")) if self._next("text") else ""
        block = _Block(name, label, {}, [])
        self._take("sign", "{")
        while not self._next("sign", "}"):
            inner = self._take("name")
            if not self._next("sign", "="):
                block.blocks.append(self._block(inner))
                continue
            self._take("sign", "=")
            if inner in block.arguments:
                raise ValueError(f"{inner} comes twice in {name}")
            block.arguments[inner] = self._value()
        self._take("sign", "}")
        return block

    def _value(self) -> Any:
        if self._next("text"):
            return json.loads(self._take("text"))
        if self._next("name"):
            return _Reference(self._take("name"))
        if self._next("sign", "["):
            return self._items("[", "]", self._value)
        return dict(self._items("{", "}", self._pair))

    def _pair(self) -> tuple[str, Any]:
        name = json.loads(self._take("text")) if self._next("text") else self._take("name")
        self._take("sign", "=")
        return name, self._value()

    def _items(self, opening: str, closing: str, item: Callable[[], Any]) -> list[Any]:
        self._take("sign", opening)
        items = []
        while not self._next("sign", closing):
            items.append(item())
            if not self._next("sign", closing):
                self._take("sign", ",")
        self._take("sign", closing)
        return items

    def _next(self, kind: str, text: str = "") -> bool:
        return bool(self._tokens) and self._tokens[-1][0] == kind and text in ("", self._tokens[-1][1])

    def _take(self, kind: str, text: str = "") -> str:
        if not self._next(kind, text):
            raise ValueError(f"expected {text or kind}, not {self._tokens[-1][1] if self._tokens else 'the end'}")
        return self._tokens.pop()[1]


# -- Vector --------------------------------------------------------------------------------------------


class _File(_Strict, frozen=True):
    type: Literal["file"]
    include: list[str]


class _Remap(_Strict, frozen=True):
    type: Literal["remap"]
    inputs: list[str]
    source: str


class _Encoding(_Strict, frozen=True):
    codec: Literal["json"]


class _Loki(_Strict, frozen=True):
    type: Literal["loki"]
    inputs: list[str]
    endpoint: str
    encoding: _Encoding
    labels: dict[str, str]


class _Vector(_Strict, frozen=True):
    sources: dict[str, _File]
    transforms: dict[str, _Remap]
    sinks: dict[str, _Loki]


def vector(text: str) -> Shipper:
    """Needs pyvrl, and Python 3.11. Raises: ValueError if the text is no such configuration."""
    import tomllib
    from pyvrl import Transform

    configuration = msgspec.convert(tomllib.loads(text), _Vector)
    ((origin, source),) = configuration.sources.items()
    ((parser, transform),) = configuration.transforms.items()
    (sink,) = configuration.sinks.values()
    if transform.inputs != [origin] or sink.inputs != [parser]:
        raise ValueError(f"the inputs are {transform.inputs} and {sink.inputs}, expected {origin} and {parser}")
    program = Transform(f"{transform.source}\n.")  # its value is that of the last expression; Vector's is the event

    def send(line: str) -> Sent:
        event = {"message": line, "file": "/runs/demo/logs/n0-0.jsonl", "host": "n0", "source_type": "file"}
        event = cast(dict[str, Any], program.remap(event | {"timestamp": "2026-01-01T00:00:00Z"}))
        labels = {name: _rendered(template, event) for name, template in sink.labels.items()}
        at = event.pop("timestamp")  # the sink's setting `remove_timestamp`, by default true
        return Sent(
            {name: value for name, value in labels.items() if value is not None},
            (int(at.timestamp()) * 10**6 + at.microsecond) * 1000,
            json.dumps(event, separators=(",", ":"), ensure_ascii=False),
            {},
        )

    return Shipper(source.include, sink.endpoint + PUSH, send)


def _rendered(template: str, event: Fields) -> str | None:
    """Return a label's value, None if the event lacks the field."""
    if "{{" not in template:
        return template
    field = re.fullmatch(r"\{\{ (\w+) \}\}", template)
    if field is None:
        raise ValueError(f"{template!r} is more than one field")
    value = event.get(field[1])
    return None if value is None else str(value)
