"""Wrong values on the command line are told in a line that names them, whoever finds them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.errors import ConfigurationError
from resilience.launcher import launch
from resilience.launcher.arguments import parse
from resilience.launcher.launch import rendezvous_parameters, settle
from resilience.launcher.signals import Signals
from resilience.system.attempts import Launch
from resilience.system.environment import Settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node x", "--nproc-per-node is 'x', expected a number of workers, or auto, cpu, gpu or xpu"),
        ("--nproc-per-node 0", "--nproc-per-node is 0, expected from 1 to 1000000000"),
        ("--nnodes a", "--nnodes is 'a', expected a number of nodes, or MIN:MAX"),
        ("--nnodes 1:2:3", "--nnodes is '1:2:3', expected a number of nodes, or MIN:MAX"),
        ("--nnodes 3:2", "min_nodes=3, max_nodes=2"),
        ("--max-restarts -1", "--max-restarts is -1, expected a whole number from 0 to 1000000000"),
        (f"--max-restarts {10**20}", f"--max-restarts is {10**20}, expected a whole number from 0 to 1000000000"),
        (f"--nnodes {10**20}", f"--nnodes is {10**20}, expected 1000000000 nodes at most"),
        (f"--nproc-per-node {10**20}", f"--nproc-per-node is {10**20}, expected from 1 to 1000000000"),
        ("--monitor-interval nan", "--monitor-interval is nan, expected seconds from 0 to 1000000"),
        ("--monitor-interval -1", "--monitor-interval is -1.0, expected seconds from 0 to 1000000"),
        ("--monitor-interval 1e9", "--monitor-interval is 1000000000.0, expected seconds from 0 to 1000000"),
        ("--monitor-interval inf", "--monitor-interval is inf, expected seconds from 0 to 1000000"),
        ("--shutdown-timeout -1", "--shutdown-timeout is -1, expected a whole number of seconds from 0 to 1000000000"),
        ("--workers-stop-timeout -1", "--shutdown-timeout is -1, expected a whole number of seconds from 0"),
        ("--master-port 99999", "--master-port is 99999, expected a port from 0 to 65535"),
        ("--metrics-port 99999", "--metrics-port is 99999, expected a port from 0 to 65535"),
        ("--same-failure-exit-code 300", "--same-failure-exit-code is 300, expected an exit status from 0 to 255"),
        (f"--output-file-mb {10**20}", f"--output-file-mb is {10**20}, expected a whole number from 0 to 1000000000"),
        ("--join-timeout 0", "--join-timeout is 0.0, expected seconds above 0, up to 1000000000"),
        ("--exit-barrier-timeout 0", "--exit-barrier-timeout is 0.0, expected seconds above 0, up to 1000000000"),
        *(
            (f"--{option} {value}", f"--{option} is {value}, expected seconds ")
            for option in ("stop-grace", "term-timeout", "exit-barrier-timeout", "failure-window", "join-timeout")
            for value in ("nan", "inf", "-1.0")
        ),
        ("--event-log-handler nope", "--event-log-handler is 'nope', expected console or null"),
        ("--timeouts-shadow", "--timeouts-shadow has no effect without --timeouts"),
        (
            "--exclude-on-full-disk --min-free-disk-mb 0",
            "--exclude-on-full-disk has no effect with --min-free-disk-mb 0",
        ),
        ("--ft-detect-hangs none", "'none' was read as the script; write a switch's value after `=`"),
        ("--ft-cfg-path nope.yaml", "--ft-cfg-path is 'nope.yaml', but there is no such file"),
        (f"--ft-cfg-path {'x' * 300}", "which cannot be read: File name too long"),
        ("--ft-cfg-path /proc/self/mem", "which cannot be read: Input/output error"),
        ("--rdzv-backend nope", "--rdzv-backend is 'nope', expected one of c10d, static"),
        ("--rdzv-conf foo", "'foo' must have a value"),
        ("--redirects 9:9", "9:9"),
    ],
)
def test_wrong_value(options: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        settle(parse([*options.split(), "train.py"]))


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        ("", True),
        ("--log-dir logs", True),
        ("--no-output-files", False),
        ("--redirects 1", False),
        ("--log-dir logs --tee 3", False),
    ],
)
def test_run_folder_keeps_output_unless_it_is_redirected(
    options: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DrainProcess", lambda limit: limit)
    assert (launch.start_drain(parse([*options.split(), "train.py"])) is not None) is is_kept


@pytest.mark.parametrize("options", ["", "--exclude-on-full-disk"])
def test_disk_of_the_requested_run_folder_decides_whether_a_node_is_excluded(options: str, tmp_path: Path) -> None:
    command = parse(["--run-dir", str(tmp_path), *options.split(), "train.py"])
    settings = Settings.from_environment()
    first = Launch("job", 1)

    def checked(folder: Path) -> Path:
        return launch.checked_folder(command, settings, folder, first)

    assert checked(tmp_path / "job@1") == tmp_path / "job@1"
    substitute = Path("/tmp/elsewhere/job@1")
    assert checked(substitute) == (tmp_path / "job@1" if options else substitute)


def test_one_node_alone_meets_nobody() -> None:
    config, entrypoint, arguments = settle(parse(["--nproc-per-node", "2", "train.py", "--lr", "1"]))
    assert (config.rdzv_backend, config.rdzv_endpoint, config.nproc_per_node) == ("c10d", "localhost:0", 2)
    assert arguments[-3:] == ["train.py", "--lr", "1"] and entrypoint


@pytest.mark.parametrize(
    ("conf", "options", "expected"),
    [("", "", None), ("join_timeout=60", "", "60"), ("join_timeout=60", "--join-timeout 900", 900.0)],
)
def test_join_timeout_of_the_option_counts_before_that_of_rdzv_conf(
    conf: str, options: str, expected: float | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_RDZV_CONF", conf)
    command = parse([*options.split(), "train.py"])
    config, _, _ = settle(command)
    assert rendezvous_parameters(config, command, 0).get("join_timeout") == expected


def test_log_folder_that_cannot_be_used_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/nowhere/logs")):
        with pytest.raises(ConfigurationError, match=f"--log-dir is '{place}', which cannot be used: "):
            settle(parse(["--log-dir", str(place), "train.py"]))


def test_fraction_of_a_second_is_kept() -> None:
    command = parse(["--join-timeout", "0.5", "--shutdown-timeout", "0", "--monitor-interval", "0.25", "train.py"])
    config, _, _ = settle(command)
    assert (config.shutdown_timeout, config.monitor_interval) == (0, 0.25)
    assert rendezvous_parameters(config, command, 0).get("join_timeout") == 0.5


@pytest.mark.parametrize("value", ["nan", "inf", "soon"])
def test_wrong_value_of_an_alias_is_wrong_usage(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--workers-stop-timeout", value, "train.py"])
    assert ended.value.code == 2
    assert f"is '{value}', expected seconds" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNOTHING"])
def test_signal_that_cannot_be_handled_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--signals-to-handle contains '{name}'.*expected names such as"):
        Signals(f"SIGTERM,{name}")


def test_restart_policy_of_the_command_is_the_one_that_agents_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Handler", lambda *_, policy, **others: policy)
    command = parse(["--ft-restart-policy", "min-healthy", "train.py"])
    config, _, _ = settle(command)
    parameters = rendezvous_parameters(config, command, 0)
    signals: Any = SimpleNamespace(has_any=None, is_hurried=None, has_arrived=None)
    policy: object = launch.connect_rendezvous(parameters, config, command, Any, "node", None, signals)  # type: ignore[arg-type]
    assert policy == "min-healthy"
