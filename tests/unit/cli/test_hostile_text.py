"""No command lets a text that somebody else wrote steer the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.cli import VERBS, main
from tests.support.hostile import HOSTILE, LEGITIMATE, NAME, obeyed, run_folder

# How each command is called. RUN is a run with hostile text everywhere, OUT a file or folder to be written.
CALLS: dict[str, list[list[str]]] = {
    "report": [["RUN"], ["RUN", "--incident", "1"], ["RUN", "--json"], ["RUN", "--html", "OUT"]],
    "logs": [
        ["RUN"],
        ["RUN", "--no-fold"],
        ["RUN", "--json"],
        ["RUN", "--json", "--fold"],
        ["RUN", "--columns", "date,node,role,kind,event,file,message,text"],
        ["RUN", "--follow"],
        ["RUN", "--sql", "select * from logs"],
        ["RUN", "--sql", "select * from logs", "--json"],
        ["RUN", "--sql", f"select {NAME}"],
        ["RUN", "--rank", "0", "--level", "error", "--iteration", "0", "--cycle", "0", "--since", "1m"],
        ["RUN", "--around", "1", "--grep", "gone"],
        ["RUN", "--event", HOSTILE],
        ["RUN", "--grep", f"({HOSTILE}"],
        ["RUN", "--rank", HOSTILE],
        ["RUN", "--since", HOSTILE],
        ["RUN", "--diff", f"/proc/nowhere/{NAME}"],
    ],
    "trace": [
        ["RUN"],
        ["RUN", "--incident", "1"],
        ["RUN", "--json"],
        ["RUN", "--format", "perfetto"],
        ["RUN", "--format", "otlp-json"],
        ["RUN", "--output", f"/proc/nowhere/{NAME}"],
    ],
    "incidents": [["RUN"], ["RUN", "--json"], ["RUN", "--all"], [f"/proc/nowhere/{NAME}"]],
    "status": [["RUN"], ["RUN", "--json"], ["RUN", "--all"], ["RUN", "--watch"]],
    "calibrate": [
        ["RUN"],
        ["RUN", "--json"],
        ["RUN", "--section", HOSTILE],
        ["RUN", "--out", "OUT"],
        ["RUN", "--plot", "OUT"],
        ["RUN", "--format", "nvrx", "--target-false-alarms", "1", "--horizon", "30d", "--ranks", "2", "--pool"],
        ["RUN", "--backtest", "--n", "10"],
        ["RUN", "--min-timeout", "1s", "--max-timeout", HOSTILE],
        [f"/proc/nowhere/{NAME}"],
        ["diff", f"/proc/nowhere/{NAME}", f"/proc/nowhere/{NAME}"],
    ],
    "completion": [["bash"], ["zsh"], [HOSTILE]],
    "dashboards": [
        ["export", "OUT", "--datasource", HOSTILE, "--grafana", HOSTILE],
        ["export", f"/proc/{NAME}"],
        [HOSTILE],
    ],
    "demo": [["--fault", HOSTILE], ["--ranks", HOSTILE, "--steps", "1", "--seed", "0", "--keep"]],
    "run": [["--max-restarts", HOSTILE]],  # what it shows of a job: tests/process/test_untrusted_text.py
}
CLEARED = "\r\x1b[K"  # what a progress bar of ours begins with


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[False, True], ids=["wrapper", "launcher"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return run_folder(tmp_path / NAME / f"job {NAME}", request.param)


@pytest.fixture(params=[io.StringIO, Terminal], ids=["pipe", "terminal"])
def shown(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[list[str]], str]:
    """Return what a command writes, on both streams."""

    def call(arguments: list[str]) -> str:
        stream: io.StringIO = request.param()
        with monkeypatch.context() as patch:
            patch.setenv("NO_COLOR", "1")
            patch.setenv("TERM", "dumb")
            for name in ("stdout", "stderr"):
                patch.setattr(f"sys.{name}", stream)
            with contextlib.suppress(SystemExit):
                main(arguments)
        return stream.getvalue()

    return call


@pytest.mark.parametrize("verb", CALLS)
def test_command_shows_hostile_text_as_escapes(
    run: Path, shown: Callable[[list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    if verb in ("logs", "status"):
        monkeypatch.setattr("time.sleep", stop)  # --watch and --follow end at the first pause
    places = {"RUN": str(run), "OUT": str(tmp_path / NAME / "out")}
    for arguments in CALLS[verb]:
        written = shown([verb, *(places.get(argument, argument) for argument in arguments)])
        assert written, arguments
        assert not obeyed(written.replace(CLEARED, "")), arguments


@pytest.mark.parametrize("verb", ["report", "logs", "status"])
def test_text_of_people_is_shown_as_they_wrote_it(run: Path, shown: Callable[[list[str]], str], verb: str) -> None:
    assert LEGITIMATE in shown([verb, str(run)])


def test_the_page_of_a_report_holds_no_such_text_either(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert LEGITIMATE in page
    assert not obeyed(page)


def test_every_command_and_every_option_is_tried_here() -> None:
    assert set(CALLS) == set(VERBS)
    for verb, calls in CALLS.items():
        used = {argument for call in calls for argument in call}
        options = _options(verb) - {"-h", "--help"}
        assert not {option for option in options if option not in used}, verb


def _options(verb: str) -> set[str]:
    """Return the options of a command, by their first names; of the launcher none, which shows no run."""
    parser = argparse.ArgumentParser()
    if verb == "run":
        return set()
    importlib.import_module(f"resilience.cli.{verb}").configure(parser)
    return {action.option_strings[0] for action in parser._actions if action.option_strings}


def test_unknown_command_is_named_without_obeying_it(shown: Callable[[list[str]], str]) -> None:
    assert "pwned" in shown([HOSTILE])
    assert not obeyed(shown([HOSTILE]))
