"""The file of stored limits says for which run they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.identity import Job
from resilience.integrations.stored_limits import LimitsFile
from resilience.telemetry.recording import write_job


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
