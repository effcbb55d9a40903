"""What does torchelastic say of itself?  Its own metrics and events, as records of ours while `bridged`.

torch's agent, which the launcher's is built on, times its calls and counts how runs end on a stream of metrics, and
records what state agent and workers are in as events. Without a handler of the user's both go nowhere. Here they become
records, and from there counters, histograms and log lines like everything else. What the user has configured stays in
place: their metrics handler gets each value as before, their events handler is not touched.

Only the agent's process is listened to: a training script that uses `torch.distributed.elastic.metrics` in a worker
configures handlers of its own there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resilience.core import encoding, events
from resilience.telemetry.sending import Emit

GROUP = "torchelastic"  # what torch puts its own metrics in
_LONGEST = 500  # characters of an error


@contextmanager
def bridged(emit: Emit, destination: str) -> Iterator[None]:
    """Let records tell what torchelastic tells, while in the body.

    emit: takes events from any thread. destination: torch's name of the handler that its events go to,
    `--event-log-handler`."""
    from torch.distributed.elastic import metrics

    class Handler(metrics.MetricHandler):
        """Passes each value on to the handler that was there, and tells it."""

        def emit(self, metric_data: metrics.MetricData) -> None:
            before.emit(metric_data)
            emit(events.ElasticMeasured(str(metric_data.name), float(metric_data.value)))

    before = metrics.getStream(GROUP).handler
    logger, listener = logging.getLogger(f"torchelastic-events-{destination}"), _Listener(emit)
    metrics.configure(Handler(), GROUP)
    logger.addHandler(listener)
    try:
        yield
    finally:
        metrics.configure(before, GROUP)
        logger.removeHandler(listener)


class _Listener(logging.Handler):
    """Tells each event of torchelastic's; what is none, or of a form that is not known, is left out."""

    def __init__(self, emit: Callable[[events.Event], None]) -> None:
        super().__init__(logging.INFO)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            told = encoding.from_json(record.getMessage())
            self._emit(_event(told))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass


def _event(told: dict[str, Any]) -> events.ElasticTold:
    """Return an event of torch's in our words. Raises: KeyError, TypeError, ValueError for another form."""
    metadata = told["metadata"]
    rank, duration, error = metadata.get("global_rank"), metadata.get("duration_ms"), metadata.get("raw_error")
    return events.ElasticTold(
        name=str(told["name"]),
        source=str(told["source"]),
        state=str(metadata.get("state") or ""),
        worker_rank=None if rank is None else int(rank),
        duration_s=None if duration is None else float(duration) / 1000,
        error="" if error is None else str(error)[-_LONGEST:],
    )
