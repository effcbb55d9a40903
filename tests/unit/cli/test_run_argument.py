"""A run that cannot be read is refused in one line with the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.cli import main
from tests.support.record_streams import Fault, job

COMMANDS = ["report", "status", "logs", "trace", "incidents", "calibrate"]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse everything within a folder, also to root: it has mode 000."""

    def refusing(call: Callable[..., Any], is_inside: Callable[[Path], bool]) -> Callable[..., Any]:
        def checked(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and is_inside(Path(os.fsdecode(path))):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return checked

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name), lambda path: folder in path.parents))
    for name in ("listdir", "scandir"):
        within = refusing(getattr(os, name), lambda path: path == folder or folder in path.parents)
        monkeypatch.setattr(os, name, within)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("locked", ["the run", "the folder above"])
def test_run_without_permission_is_refused_with_the_reason(
    command: str, locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = job([Fault("exception", 1, 0)]).write(tmp_path / "above" / "run")
    lock(run if locked == "the run" else run.parent, monkeypatch)
    assert main([command, str(run)]) == 2
    message = capsys.readouterr().err
    assert "cannot be read: Permission denied" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_name_that_is_too_long_is_refused_with_the_reason(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x" * 300]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err
