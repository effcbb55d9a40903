"""Options that exclude each other are refused, and none is silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.cli import main
from tests.support.record_streams import Fault, job


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "--html", "page.html", "--incident", "1"], "--html cannot be combined with --incident"),
        (["report", "--html", "page.html", "--json"], "--html cannot be combined with --json"),
        (["trace", "--format", "perfetto", "--incident", "1"], "--format perfetto cannot be combined with --incident"),
        (["trace", "--format", "otlp-json", "--json"], "--format otlp-json cannot be combined with --json"),
        (
            ["logs", "--sql", "select 1", "--rank", "0", "--since", "1m"],
            "--sql cannot be combined with --rank, --since",
        ),
        (["calibrate", "--format", "nvrx", "--json"], "--format nvrx cannot be combined with --json"),
        (["logs", "--sql", "select 1", "--follow"], "--sql cannot be combined with --follow"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    assert main([arguments[0], "run", *arguments[1:]]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
