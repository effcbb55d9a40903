"""The command line of `resilience run` is torchrun's, with options of ours beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.errors import ConfigurationError
from resilience.launcher.arguments import parse, parser


@pytest.mark.parametrize("own", ["--timeout", "--same", "--ft", "--cold", "--rank", "--max-restart"])
def test_scripts_own_option_may_begin_as_one_of_ours(own: str) -> None:
    command = parse(["--nproc-per-node", "2", "train.py", own, "3"])
    assert command.torchrun.training_script_args == [own, "3"]


def test_torchruns_options_may_be_abbreviated_as_ever_and_ours_may_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--max_r", "4", "--stand", "--run-dir", "here", "train.py"]).torchrun.max_restarts == 4
    with pytest.raises(SystemExit):
        parse(["--run-di", "here", "train.py"])
    assert "unrecognized arguments: --run-di" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "option"), [("MAX_RESTARTS", "--max-restarts"), ("MONITOR_INTERVAL", "--monitor-interval")]
)
def test_variable_that_is_no_number_is_wrong_usage_of_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    monkeypatch.setenv(f"PET_{name}", "abc")
    with pytest.raises(SystemExit) as ended:
        parse(["train.py"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {option}" in message
    assert "'abc'" in message


def test_value_of_a_switch_is_refused_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--ft-end-suspected-ranks=perhaps\x1b", "train.py"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--ft-end-suspected-ranks" in message
    assert "takes no value, got 'perhaps\\x1b': write the option alone, or leave it out" in message


@pytest.mark.parametrize("name", ["STANDALONE", "MODULE", "NO_PYTHON", "RUN_PATH", "VIRTUAL_LOCAL_RANK"])
def test_variable_of_a_switch_that_is_no_number_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"PET_{name}", "yes")
    with pytest.raises(ConfigurationError, match=f"PET_{name}.*'yes'"):
        parse(["train.py"])


def test_variable_sets_the_number_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["train.py"]).torchrun.max_restarts == 10
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    assert parse(["train.py"]).torchrun.max_restarts == 4
    assert parse(["--max-restarts", "3", "train.py"]).torchrun.max_restarts == 3


@pytest.mark.parametrize("name", ["true", "none"])
def test_program_may_have_the_name_of_a_switchs_value(name: str) -> None:
    assert parse(["--no-python", name]).torchrun.training_script == name


def test_limits_on_trial_may_come_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_TIMEOUTS", "timeouts.yaml")
    assert parse(["--timeouts-shadow", "train.py"]).options.timeouts_shadow


@pytest.mark.parametrize(
    "option", ["--run-dir", "--timeouts", "--metrics-host", "--metrics-textfile", "--health-check", "--preload"]
)
def test_empty_value_is_refused_and_does_not_mean_the_variable(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Such as `--timeouts=$FILE` where FILE is not set."""
    monkeypatch.setenv("RESILIENCE_TIMEOUTS", "timeouts.yaml")
    with pytest.raises(ConfigurationError, match=f"{option} is '', expected .*; leave the option out for"):
        parse([f"{option}=", "train.py"])


def test_empty_calibration_key_replaces_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_CALIBRATION_KEY", "model")
    assert parse(["--calibration-key=", "train.py"]).options.calibration_key == ""


def test_key_of_a_file_that_is_no_setting_is_a_note_with_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("fault_tolerance: {step_timeouts: 3, restart_check_interval: 60.0}")
    (line,) = parse(["--ft-cfg-path", str(path), "train.py"]).config_notes
    assert f"in {path} are ignored: not recognized: step_timeouts; did you mean step_timeout?" in line
    assert parse(["train.py"]).config_notes == ()


def test_help_shows_the_number_of_restarts_that_differs_from_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(parser().format_help().split())
    assert "worker group restarts before failing; default 10" in text
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert "worker group restarts before failing; default 7" in " ".join(parser().format_help().split())
