"""The disk of these tests may be slow: the package takes one for lost after seconds, which a busy machine needs too.

A test of a disk that does not answer sets the limit that it is about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resilience.launcher.worker import program
from resilience.monitor import duration_recorder
from resilience.system import background
from resilience.telemetry import durations, log

PATIENCE = 60.0  # seconds
LIMITS = (
    (background, "STALL"),
    (background, "LAST_STALL"),
    (durations, "LAST_STALL"),
    (durations, "READ_LIMIT"),
    (durations, "REREAD_LIMIT"),
    (duration_recorder, "READ_LIMIT"),
    (log, "LINE_LIMIT"),
    (program, "LIMIT"),
)
WAITS = (background.asked, background.Writer.end, background.Writer.flush, background.BackgroundFile.close)


@pytest.fixture(scope="module", autouse=True)
def _disk_that_may_be_slow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patient:
        for module, name in LIMITS:
            patient.setattr(module, name, PATIENCE)
        for function in WAITS:
            patient.setattr(function, "__defaults__", (PATIENCE,))
        yield
