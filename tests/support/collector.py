"""A real OTLP collector that passes on what it takes, and spans in one shape, to compare them field by field."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilience.telemetry.span import Span as OurSpan
from resilience.telemetry.span import SpanEvent
from tests.support.ranks import free_port

LIMIT = 120.0  # seconds that anything may take
Plain = dict[str, Any]


def rotel() -> str:
    """Return the collector's program; skips the test where it is missing."""
    found = importlib.util.find_spec("rotel")
    places = [*(found.submodule_search_locations or [] if found is not None else [])]
    program = next((str(Path(place, "rotel-agent")) for place in places), None) or shutil.which("rotel-agent")
    if program is None:
        pytest.skip("no OTLP collector: `pip install rotel`, or put its rotel-agent on PATH; spans went through none")
    return program


@contextmanager
def collecting(folder: Path, to: str) -> Iterator[str]:
    """Run the collector before the receiver at `to`; gives its own endpoint. Once it is left, it has sent all."""
    port, grpc = free_port(), free_port()
    command = [rotel(), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "otlp", "--batch-timeout", "50ms"]
    command += ["--otlp-exporter-protocol", "http", "--otlp-exporter-traces-endpoint", f"{to}/v1/traces"]
    command += ["--otlp-exporter-endpoint", to]
    command += ["--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "rotel.log")]
    with (folder / "rotel.out").open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + LIMIT
        while not _answers(port):
            assert child.poll() is None and time.monotonic() < deadline, (folder / "rotel.out").read_text()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        try:
            child.wait(LIMIT)
        finally:
            child.kill()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def of_wire(requests: Iterable[Any]) -> list[Plain]:
    """Return all spans of OTLP requests, none left out, none made one with another."""
    return [
        {
            "scope": of_scope.scope.name,
            "host": {value.key: _value(value.value) for value in of_resource.resource.attributes}.get("host.name"),
            "name": span.name,
            "trace": span.trace_id.hex(),
            "id": span.span_id.hex(),
            "parent": span.parent_span_id.hex(),
            "start": span.start_time_unix_nano,
            "end": span.end_time_unix_nano,
            "is_error": span.status.code == 2,
            "attributes": _attributes(span.attributes),
            "events": [(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
            "links": [(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links],
        }
        for request in requests
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def of_records(spans: Iterable[OurSpan]) -> list[Plain]:
    """Return spans that were computed from record files in the same shape."""
    return [
        {
            "scope": "resilience",
            "host": span.attributes["host.name"],
            "name": span.name,
            "trace": f"{span.trace_id:032x}",
            "id": f"{span.span_id:016x}",
            "parent": "" if span.parent_id is None else f"{span.parent_id:016x}",
            "start": span.start_ns,
            "end": span.end_ns,
            "is_error": span.is_error,
            "attributes": dict(span.attributes),
            "events": [_event(event) for event in span.events],
            "links": [
                (f"{to.trace_id:032x}", f"{to.span_id:016x}", {"resilience.link.kind": to.kind}) for to in span.links
            ],
        }
        for span in spans
    ]


def _event(event: SpanEvent) -> tuple[str, int, dict[str, Any]]:
    return event.name, event.at_ns, dict(event.attributes)


def _attributes(values: Iterable[Any]) -> dict[str, Any]:
    return {value.key: _value(value.value) for value in values}


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
