"""What does torchelastic report about itself?  Its own metrics and events, which become our records while `bridged`.

torch's agent, which the launcher's agent builds on, reports call durations and run results as metrics, and states of
agent and workers as events. Without a handler of the user's both are discarded. Here they become records, and so also
counters, histograms and log lines. The user's configuration stays in place: their metrics handler gets each value as
before, and their events handler is not touched, except that torch's own one for stderr (`console`) waits for no reader.

Only the agent's process is bridged: a training script that uses `torch.distributed.elastic.metrics` in a worker
configures its own handlers there.

torch looks up the host's full name for each event, in the agent's main thread. A name service that stops answering
would delay each cycle by several timeouts. While `bridged`, all events have one name, looked up at the start, and
only if the user has a handler for it."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resilience.facts import encoding, events
from resilience.facts.printable import printable
from resilience.system import terminal
from resilience.system.background import asked
from resilience.telemetry.otlp import Emit

CONSOLE = "console"  # torch's destination for events on stderr
GROUP = "torchelastic"  # torch's group for its own metrics
NO_HANDLER = "null"  # torch's destination for events that nobody takes
NAME_LIMIT = 2.0  # seconds for the name service to tell the host's full name
_LONGEST = 500  # characters of an error


@contextmanager
def bridged(emit: Emit, destination: str) -> Iterator[None]:
    """Turn torchelastic's metrics and events into records, while in the body.

    emit: takes events from any thread. destination: torch's name of the handler for its events,
    `--event-log-handler`. torch's own handler for stderr would wait for a reader that does not read; ours drops events
    then, and emits their number."""
    from torch.distributed.elastic import metrics
    from torch.distributed.elastic.agent.server import api

    class Forwarder(metrics.MetricHandler):
        """Passes each value to the previous handler, and emits it as an event."""

        def emit(self, metric_data: metrics.MetricData) -> None:
            previous.emit(metric_data)
            emit(events.ElasticMeasured(str(metric_data.name), float(metric_data.value)))

    previous = metrics.getStream(GROUP).handler
    logger, listener = logging.getLogger(f"torchelastic-events-{destination}"), _Listener(emit)
    host, look_up = host_name(destination), api._get_fq_hostname
    metrics.configure(Forwarder(), GROUP)
    logger.addHandler(listener)
    api._get_fq_hostname = lambda: host
    try:
        with _console_without_waiting(emit) if destination == CONSOLE else contextlib.nullcontext():
            yield
    finally:
        metrics.configure(previous, GROUP)
        logger.removeHandler(listener)
        api._get_fq_hostname = look_up


@contextmanager
def _console_without_waiting(emit: Emit) -> Iterator[None]:
    """Print torchelastic's events by a handler that does not wait, while in the body. A handler of the user's stays."""
    from torch.distributed.elastic.events import handlers

    previous = handlers._log_handlers[CONSOLE]
    if type(previous) is not logging.StreamHandler or previous.stream is not sys.stderr:  # not torch's
        yield
        return
    console = _Console(emit)
    console.setFormatter(previous.formatter)
    logger = logging.getLogger(f"torchelastic-events-{CONSOLE}")
    handlers._log_handlers[CONSOLE] = console  # torch adds it to the logger with the first event
    if previous in logger.handlers:
        logger.removeHandler(previous)
        logger.addHandler(console)
    try:
        yield
    finally:
        handlers._log_handlers[CONSOLE] = previous
        if console in logger.handlers:
            logger.removeHandler(console)
            logger.addHandler(previous)
        console.report()


class _Console(logging.Handler):
    """Prints each event as a line on stderr, unless its reader does not read: then it counts the event."""

    def __init__(self, emit: Callable[[events.Event], None]) -> None:
        super().__init__()
        self._emit = emit
        self._unfinished = b""  # the rest of a line that the reader has only in part
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = printable(f"{self.format(record)}\n").encode()
        self._unfinished = self._rest(self._unfinished)
        rest = line if self._unfinished else self._rest(line)
        if len(rest) == len(line):
            self._dropped += 1
            return
        self._unfinished = rest
        self.report()

    def report(self) -> None:
        """Emit the number of events that were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            reason = (
                f"stderr was not read, or could not be written: torchelastic's events (--event-log-handler {CONSOLE})"
            )
            self._emit(events.TelemetryDropped("log", reason, dropped))

    @staticmethod
    def _rest(data: bytes) -> bytes:
        return data[terminal.put(terminal.stream(terminal.STDERR), data, time.monotonic()) :] if data else b""


def host_name(destination: str) -> str:
    """Return the name of this host for torchelastic's events: the full one, unless nobody takes the events, or the name
    service does not answer in time."""
    name = socket.gethostname()
    if destination != NO_HANDLER:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name that no service can know
            return asked(lambda: socket.getfqdn(name), NAME_LIMIT)
    return name


class _Listener(logging.Handler):
    """Emits each event of torchelastic; skips other messages and unknown forms."""

    def __init__(self, emit: Callable[[events.Event], None]) -> None:
        super().__init__(logging.INFO)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = encoding.from_json(record.getMessage())
            self._emit(_event(message))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass


def _event(message: dict[str, Any]) -> events.ElasticTold:
    """Return a torchelastic event as our event. Raises: KeyError, TypeError, ValueError for an unknown form."""
    metadata = message["metadata"]
    rank, duration, error = metadata.get("global_rank"), metadata.get("duration_ms"), metadata.get("raw_error")
    return events.ElasticTold(
        name=str(message["name"]),
        source=str(message["source"]),
        state=str(metadata.get("state") or ""),
        worker_rank=None if rank is None else int(rank),
        duration_s=None if duration is None else float(duration) / 1000,
        error="" if error is None else str(error)[-_LONGEST:],
    )
