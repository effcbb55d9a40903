"""The silence of a rank at its job's Prometheus endpoint is the time since its last sign of life, by the rank's clock.

All clocks here are the host's monotonic one. A scrape is made between two looks at it, so no value depends on how fast
the machine is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from resilience.telemetry import rank_snapshot
from resilience.telemetry.rank_snapshot import RankSnapshot
from tests.process.launching import Launched, launcher
from tests.process.test_export import scrape
from tests.support.ranks import Job, free_port
from tests.support.signs import await_true

SILENCE = "resilience_rank_silence_seconds"
ROUNDED = 0.0005 + 1e-9  # the endpoint shows milliseconds
SILENT_S = 3.0  # of a held rank: longer than the first look of its monitor without a change
AGE_S = 0.5  # of a snapshot: the silence would be wrong by that much if the age were added
STEPS = """
import json, resilience
for step in range(10**6):
    before = time.monotonic()
    resilience.step(step)
    after = time.monotonic()
    if (here / "end").exists():
        break
    if (here / "hold").exists():
        (here / "written").write_text(json.dumps([before, after]))
        (here / "written").rename(here / "held")
        await_file("end")
        break
    time.sleep(0.07)
"""


class Watched:
    """A running job of one rank that steps every 70 ms until it is held."""

    def __init__(self, job: Launched, port: int) -> None:
        self._job = job
        self._port = port

    def hold(self) -> tuple[float, float]:
        """Hold the rank after its last step; return the times between which it made that step."""
        (self._job.folder / "hold").touch()
        self._job.await_worker("held")
        before, after = json.loads((self._job.folder / "held").read_text())
        return before, after

    def snapshot(self) -> RankSnapshot | None:
        return rank_snapshot.read_all(self._job.folder / "runs" / "job").get(0)

    def silence(self) -> tuple[float, float | None, float]:
        """Return the endpoint's value, between the times before and after the scrape."""
        before = time.monotonic()
        try:
            families = text_string_to_metric_families(scrape(self._port))
        except OSError:  # it does not answer yet
            families = iter(())
        values = [sample.value for family in families for sample in family.samples if sample.name == SILENCE]
        return before, values[0] if values else None, time.monotonic()


@pytest.fixture
def watched(start: Callable[..., Job], tmp_path: Path) -> Iterator[Watched]:
    port = free_port()
    job = launcher(start, tmp_path)(STEPS, "--metrics-port", str(port), nproc=1)
    yield Watched(job, port)
    (tmp_path / "end").touch()
    assert job.wait() == [0]


def test_endpoint_shows_the_time_since_the_last_step_of_a_held_rank(watched: Watched) -> None:
    earliest, latest = watched.hold()

    def is_last_step_on_record() -> bool:
        snapshot = watched.snapshot()
        return snapshot is not None and (snapshot.heartbeat_at or 0.0) >= earliest - ROUNDED

    await_true(is_last_step_on_record)

    def is_shown() -> bool:
        """Return False until the monitor has looked twice without a change. The endpoint shows no more than it saw."""
        _, silent_s, after = watched.silence()
        assert silent_s is None or silent_s <= after - earliest + ROUNDED
        snapshot = watched.snapshot()
        assert snapshot is not None
        seen_s = snapshot.known_until - latest
        return silent_s is not None and seen_s > SILENT_S and silent_s >= seen_s - ROUNDED

    await_true(is_shown)


def test_endpoint_does_not_add_the_age_of_a_snapshot_to_the_silence_of_a_rank(watched: Watched) -> None:
    """A rank that stepped until its snapshot was written was not silent since then."""
    compared: list[tuple[float | None, float]] = []

    def is_compared() -> bool:
        snapshot = watched.snapshot()
        before, silent_s, _ = watched.silence()
        if snapshot is None or snapshot.heartbeat_at is None or snapshot != watched.snapshot():
            return False
        if before - snapshot.known_until < AGE_S:
            return False  # too new to tell
        compared.append((silent_s, snapshot.known_until - snapshot.heartbeat_at))
        return True

    await_true(is_compared)
    ((shown, on_record),) = compared
    assert shown == pytest.approx(on_record, abs=ROUNDED)
