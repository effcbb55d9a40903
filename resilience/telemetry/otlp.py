"""How do spans leave the process?  In batches, from a separate thread, over OTLP.

Callers offer spans and never wait: the queue is bounded, and spans that do not fit or cannot be sent are counted and
reported from time to time. The thread also loads the exporter, which takes a second."""

from __future__ import annotations

import collections
import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from resilience.errors import error_in_words
from resilience.facts import encoding, events
from resilience.facts.masking import masked, masked_text
from resilience.system.environment import Exporting
from resilience.telemetry.span import SCOPE, Span

LONGEST_CAUSE = 500  # characters of the reason why something was not sent
REPORT_EVERY = 15.0  # seconds between two records about lost spans

Emit = Callable[[events.Event], None]
EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class SpanSender:
    """Sends spans from a separate thread, from a bounded queue. The thread also loads the exporter, which may take a
    second, so the creator of this object does not wait."""

    def __init__(self, exporting: Exporting, node: str, emit: Emit) -> None:
        self._exporting = exporting
        self._node = node
        self._emit = emit
        self._is_off = False  # the exporter could not be loaded; this is reported
        self._queue: collections.deque[Span] = collections.deque()
        self._in_flight = 0  # spans of the request that is under way; 0 once they are counted as lost
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._lost: collections.Counter[str] = collections.Counter()
        self._report_at = 0.0
        self._exporter: Any = None
        self._thread = threading.Thread(target=self._run, name="resilience-spans", daemon=True)
        self._thread.start()

    def offer(self, span: Span) -> bool:
        """Queue a span; if the queue is full, count it as lost and return False."""
        with self._changed:
            if self._is_off:
                return False
            if len(self._queue) >= self._exporting.queue:
                self._lost["queue full"] += 1
                return False
            self._queue.append(span)
            if len(self._queue) >= self._exporting.batch:
                self._changed.notify()
        return True

    def close(self, timeout: float) -> None:
        """Send queued spans for at most `timeout` seconds; count the rest as lost. A request that is under way then
        ends by its own timeout, is not repeated, and blocks nothing. Its spans count as lost too."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            if unsent := len(self._queue) + self._in_flight:
                self._lost["closing"] += unsent
                self._queue.clear()
                self._in_flight = 0
        if self._thread.is_alive():
            end_retries(self._exporter)
        self._report_losses()

    def _run(self) -> None:
        loaded = _load(self._exporting, self._node, self._emit)
        if loaded is None:
            with self._changed:
                self._is_off = True
                self._queue.clear()
            return
        exporter, convert = loaded
        self._exporter = exporter
        while batch := self._next_batch():
            self._note_result(_export(exporter, convert, batch, masked_text(self._exporting.endpoint)))
            if time.monotonic() >= self._report_at:
                self._report_losses()
        _shut_down(exporter)

    def _next_batch(self) -> list[Span]:
        """Wait for a full batch, the delay or the end; return the next batch, empty at the end."""
        with self._changed:
            while not self._queue and not self._is_closing:
                self._changed.wait(self._exporting.delay_s)
            deadline = time.monotonic() + self._exporting.delay_s
            while len(self._queue) < self._exporting.batch and not self._is_closing:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            count = self._in_flight = min(len(self._queue), self._exporting.batch)
            return [self._queue.popleft() for _ in range(count)]

    def _note_result(self, failure: str) -> None:
        """failure: why the spans were not sent, "" if they were."""
        with self._changed:
            unaccounted, self._in_flight = self._in_flight, 0
            if unaccounted and failure:
                self._lost["export failed"] += unaccounted
        if failure and not self._is_failing:
            self._emit(events.ExportFailed("otlp", failure))
        self._is_failing = bool(failure)

    def _report_losses(self) -> None:
        """Report losses as events."""
        with self._changed:
            lost, self._lost = self._lost, collections.Counter()
            if lost:
                self._report_at = time.monotonic() + REPORT_EVERY
        for reason, count in sorted(lost.items()):
            self._emit(events.TelemetryDropped("span", reason, count))


def _export(exporter: Any, convert: Callable[[Span], Any], batch: Sequence[Span], endpoint: str) -> str:
    """Send spans. Return why they were not sent, "" if they were."""
    try:
        spans = [convert(span) for span in batch]
    except Exception as error:  # edge to the SDK: an exception costs spans only, and they are counted
        return f"spans cannot be converted: {_cause(error)}"
    cause = why_not_sent(exporter, spans)
    return cause and f"{endpoint} does not take spans: {cause}"


def why_not_sent(exporter: Any, data: Any) -> str:
    """Let an exporter send its data. Return why it did not, "" if it did. Never raises."""
    said = _LastMessages()
    logger = logging.getLogger("opentelemetry.exporter")
    logger.addHandler(said)
    try:
        result = exporter.export(data)
    except Exception as error:  # edge to the exporter: an exception costs this transmission only
        return _cause(error)
    finally:
        logger.removeHandler(said)
    is_sent = getattr(result, "name", "") == "SUCCESS"
    return "" if is_sent else masked_text("; ".join(said.texts) or "the exporter gives no reason")[:LONGEST_CAUSE]


class _LastMessages(logging.Handler):
    """Keeps the last warnings of this thread: an exporter only logs why it did not send. The last one may only say that
    it gives up, and the one before has the cause."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: collections.deque[str] = collections.deque(maxlen=2)
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.texts.append(record.getMessage())
        if logging.lastResort is not None and not logging.root.handlers:
            logging.lastResort.handle(record)  # as without this handler


def _cause(error: Exception) -> str:
    return masked_text(error_in_words(error))[:LONGEST_CAUSE]


def end_retries(exporter: Any) -> None:
    """Let an exporter (None: not loaded yet) give up the request that it repeats. Does not wait for that: older
    gRPC exporters wait up to 30 s for the request before they shut down."""
    if exporter is not None:
        threading.Thread(target=_shut_down, args=(exporter,), name="resilience-otlp-end", daemon=True).start()


def _shut_down(exporter: Any) -> None:
    try:
        exporter.shutdown()
    except Exception:  # edge to the exporter: nothing is left to lose
        pass


def _load(exporting: Exporting, node: str, emit: Emit) -> tuple[Any, Callable[[Span], Any]] | None:
    """Return the exporter and the converter for our spans; report an event and return None if it cannot start."""
    reason = ""
    try:
        exporter = importlib.import_module(EXPORTERS[exporting.protocol or ""]).OTLPSpanExporter()
        loaded = exporter, _converter(node)
        emit(events.ExportStarted("otlp", masked_text(exporting.endpoint)))
        return loaded
    except KeyError:
        reason = f"protocol {exporting.protocol!r}, expected one of {', '.join(EXPORTERS)}"
    except ImportError as error:
        reason = f"{error}; pip install 'torch-resilience[otlp]'"
    except Exception as error:  # the exporter reads many variables, and a bad one may raise anything
        reason = masked_text(error_in_words(error))
    emit(events.ExportFailed("otlp", f"cannot start: {reason}", is_at_start=True))
    return None


def _masked(key: str, value: Any) -> Any:
    """Return an attribute without secrets: OpenTelemetry's process detector reports the command line."""
    if not key.startswith("process.command"):
        return value
    return masked_text(value) if isinstance(value, str) else masked(value)


def resource_of(node: str) -> Any:
    """Return the OpenTelemetry resource of this node. Raises: ImportError."""
    from opentelemetry.sdk.resources import Resource

    from resilience import __version__

    resource = Resource(
        {"service.name": "resilience", "service.version": __version__, "host.name": encoding.text(node)}
    )
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence; the SDK's default name does not.
    overrides = {
        key: _masked(key, value)
        for key, value in Resource.create().attributes.items()
        if not (key == "service.name" and str(value).startswith("unknown_service"))
    }
    return resource.merge(Resource(overrides))


def _converter(node: str) -> Callable[[Span], Any]:
    """Return the function that converts our spans into OpenTelemetry's."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    from resilience import __version__

    resource = resource_of(node)
    scope = InstrumentationScope(SCOPE, __version__)

    def context(trace: int, span: int) -> SpanContext:
        return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def convert(span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else context(span.trace_id, span.parent_id),
            resource=resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
            links=[Link(context(to.trace_id, to.span_id), {"resilience.link.kind": to.kind}) for to in span.links],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return convert
