"""The folder that torch makes for logs, which a launch without log files does not leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from resilience.launcher.arguments import Command, parse
from resilience.launcher.launch import remove_unused_log_folder


class UsersLogs(DefaultLogsSpecs):
    """A LogsSpecs as `--logs-specs` names one, with a folder of the user's."""


def used(specs: DefaultLogsSpecs) -> tuple[Command, LaunchConfig, Path]:
    """Return what a launch has after a worker of it got its folder, and that folder."""
    root = Path(specs.root_log_dir)
    (root / "job_x" / "attempt_0" / "0").mkdir(parents=True)
    return parse(["script.py"]), LaunchConfig(1, 1, 1, logs_specs=specs), root


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_folder_of_torch_is_removed_though_a_worker_had_one_in_it() -> None:
    command, config, root = used(DefaultLogsSpecs())
    remove_unused_log_folder(command, config)
    assert not root.exists()


def test_file_in_the_folder_of_torch_is_kept() -> None:
    command, config, root = used(DefaultLogsSpecs())
    error = root / "job_x" / "attempt_0" / "0" / "error.json"
    error.write_text("{}")
    remove_unused_log_folder(command, config)
    assert error.exists()


def test_users_folder_stays_as_it_is(tmp_path: Path) -> None:
    command, config, root = used(UsersLogs(str(tmp_path / "logs")))
    remove_unused_log_folder(command, config)
    assert (root / "job_x" / "attempt_0" / "0").is_dir()
