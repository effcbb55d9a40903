"""The file of stored limits says for which run they hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.identity import Job
from resilience.integrations import stored_limits
from resilience.integrations.stored_limits import LimitsFile
from resilience.system.background import Writer
from resilience.telemetry.recording import write_job
from tests.unit.integrations.faking import no_answer_in_time


def test_limits_of_a_cycle_with_another_number_of_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's file has the most ranks that the job may have."""
    run = tmp_path / "run"
    run.mkdir()
    write_job(Job("job", world_size=16, configuration=Configuration("train.py", "", 16, 8)), run)
    monkeypatch.setenv("RESILIENCE_RUN_FOLDER", str(run))
    monkeypatch.setenv("RESILIENCE_JOB_ID", "job")
    assert LimitsFile(tmp_path, 16).write({"step": 1.0}, is_on_trial=False)
    assert LimitsFile(tmp_path, 16).read() == {"step": 1.0}
    with pytest.raises(ConfigurationError, match="world size '16' before, '8' now"):
        LimitsFile(tmp_path, 8).read()


def test_stored_limits_are_read_however_slow_the_disk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else some ranks would have them and others not."""
    assert LimitsFile(tmp_path, 1).write({"step": 1.0}, is_on_trial=False)
    monkeypatch.setattr(Writer, "ask", no_answer_in_time)
    assert LimitsFile(tmp_path, 1).read() == {"step": 1.0}


@pytest.fixture
def silent_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that does not answer before the event is set."""
    answers = threading.Event()
    disk = Writer()
    monkeypatch.setattr(stored_limits, "_disk", disk)
    monkeypatch.setattr(stored_limits, "WRITE_LIMIT", 0.1)
    yield answers
    answers.set()
    disk.end()


def test_step_does_not_wait_for_limits_to_be_stored_on_a_disk_that_does_not_answer(
    tmp_path: Path, silent_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_limits.files, "replace", lambda path, content: silent_disk.wait(10.0) or True)
    assert not LimitsFile(tmp_path, 1).write({"step": 1.0}, is_on_trial=False)
