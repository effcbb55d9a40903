"""What does torchelastic report about itself?  Its own metrics and events, which become our records while `bridged`.

torch's agent, which the launcher's agent builds on, reports call durations and run results as metrics, and states of
agent and workers as events. Without a handler of the user's both are discarded. Here they become records, and so also
counters, histograms and log lines. The user's configuration stays in place: their metrics handler gets each value as
before, and their events handler is not touched.

Only the agent's process is bridged: a training script that uses `torch.distributed.elastic.metrics` in a worker
configures its own handlers there.

torch looks up the host's full name for each event, in the agent's main thread. A name service that stops answering
would delay each cycle by several timeouts. While `bridged`, all events have one name, looked up at the start, and
only if the user has a handler for it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resilience.facts import encoding, events
from resilience.system.background import asked
from resilience.telemetry.otlp import Emit

GROUP = "torchelastic"  # torch's group for its own metrics
NO_HANDLER = "null"  # torch's destination for events that nobody takes
NAME_LIMIT = 2.0  # seconds for the name service to tell the host's full name
_LONGEST = 500  # characters of an error


@contextmanager
def bridged(emit: Emit, destination: str) -> Iterator[None]:
    """Turn torchelastic's metrics and events into records, while in the body.

    emit: takes events from any thread. destination: torch's name of the handler for its events,
    `--event-log-handler`."""
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
        yield
    finally:
        metrics.configure(previous, GROUP)
        logger.removeHandler(listener)
        api._get_fq_hostname = look_up


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
