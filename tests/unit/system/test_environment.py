"""What the environment says is checked once, in words that name the variable."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.errors import ConfigurationError
from resilience.system.environment import (
    DISTRIBUTED,
    PREFIX,
    Launcher,
    LauncherRendezvous,
    Settings,
    has_agent,
    infrastructure_rank,
    keep_nccl_watchdog_from_raising,
    local_rank,
    node_name,
    nvls_may_be_used,
    rank_and_world_size,
    scoped_environment,
    settings_of_a_launch,
    settings_table,
    unknown_variables,
)
from tests.support.server import ROOT


def test_without_variables_the_defaults_hold() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings().run_dir == "./resilience-runs"


def test_every_setting_is_read_from_its_variable() -> None:
    values = {
        "run_dir": ("/tmp/runs", "/tmp/runs"),
        "job_id": ("train-7", "train-7"),
        "attempt": ("2", 2),
        "cycle": ("3", 3),
        "metrics_port": ("9400", 9400),
        "metrics_host": ("0.0.0.0", "0.0.0.0"),
        "metrics_textfile": ("/var/lib/textfile", "/var/lib/textfile"),
        "metrics_ranks": ("unhealthy", "unhealthy"),
        "node": ("host-7", "host-7"),
        "timeouts": ("limits.yaml", "limits.yaml"),
        "timeouts_shadow": ("1", True),
        "collectives": ("0", False),
        "quiet": ("1", True),
        "calibration_key": ("large", "large"),
        "interrupt_signal": ("SIGUSR2", int(signal.SIGUSR2)),
        "abort_wait": ("45", 45.0),
        "abort_limit": ("0.5", 0.5),
        "step_timeout": ("1.5", 1.5),
        "detect_hangs": ("0", False),
        "hang_first_limit": ("900", 900.0),
        "hang_least_limit": ("30", 30.0),
        "section_timeouts": ("data:30, a:b:0.5,", {"data": 30.0, "a:b": 0.5}),
    }
    settings = Settings.from_environment({PREFIX + name.upper(): text for name, (text, _) in values.items()})
    fields = {field.name for field in msgspec.structs.fields(Settings)}
    assert fields == {*values, "run_id", "restart_count", "scheduler_restarts"}
    assert {name: getattr(settings, name) for name in values} == {name: value for name, (_, value) in values.items()}


def test_a_section_may_have_no_limit() -> None:
    settings = Settings.from_environment({"RESILIENCE_SECTION_TIMEOUTS": "data:30, checkpoint:none"})
    assert settings.section_timeouts == {"data": 30.0, "checkpoint": None}


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("SIGUSR1", signal.SIGUSR1), ("SIGRTMIN+3", signal.SIGRTMIN + 3), ("SIGRTMIN", signal.SIGRTMIN)],
)
def test_signal_may_be_named_or_numbered(text: str, number: int) -> None:
    assert Settings.from_environment({"RESILIENCE_INTERRUPT_SIGNAL": text}).interrupt_signal == number


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JOB_ID", "a\0b"),
        ("ATTEMPT", "-1"),
        ("ATTEMPT", "1.5"),
        ("CYCLE", "first"),
        ("METRICS_PORT", "65536"),
        ("INTERRUPT_SIGNAL", "SIGKILL"),
        ("INTERRUPT_SIGNAL", "19"),
        ("INTERRUPT_SIGNAL", "SIGNOT"),
        ("INTERRUPT_SIGNAL", "SIGUSR1+x"),
        ("INTERRUPT_SIGNAL", "99"),
        ("STEP_TIMEOUT", "0"),
        ("STEP_TIMEOUT", "-3"),
        ("STEP_TIMEOUT", "nan"),
        ("STEP_TIMEOUT", "inf"),
        ("STEP_TIMEOUT", "1 s"),
        ("SECTION_TIMEOUTS", "data"),
        ("SECTION_TIMEOUTS", "data:"),
        ("SECTION_TIMEOUTS", ":3"),
        ("SECTION_TIMEOUTS", "data:0"),
        ("SECTION_TIMEOUTS", "data:1,data:2"),
        ("SECTION_TIMEOUTS", "data:1,data2"),
    ],
)
def test_unusable_value_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^RESILIENCE_{variable} is "):
        Settings.from_environment({PREFIX + variable: text})


@given(st.dictionaries(st.sampled_from(["STEP_TIMEOUT", "CYCLE", "JOB_ID", "SECTION_TIMEOUTS"]), st.text()))
def test_any_text_is_a_valid_setting_or_a_configuration_error(texts: dict[str, str]) -> None:
    try:
        settings = Settings.from_environment({PREFIX + name: text for name, text in texts.items()})
    except ConfigurationError:
        return
    assert settings.step_timeout is None or 0 < settings.step_timeout < float("inf")
    assert settings.cycle is None or settings.cycle >= 0
    assert settings.job_id is None or "\0" not in settings.job_id


def test_settings_that_exist_are_valid() -> None:
    with pytest.raises(ConfigurationError, match="RESILIENCE_STEP_TIMEOUT is -1"):
        Settings(step_timeout=-1.0)
    with pytest.raises(ConfigurationError, match="RESILIENCE_ATTEMPT is 'x'"):
        Settings(attempt="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "job_id"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "run"}, "run"),
        ({"TORCHELASTIC_RUN_ID": "run", "SLURM_JOB_ID": "77"}, "77"),
        ({"TORCHELASTIC_RUN_ID": "run", "SLURM_JOB_ID": "77", "RESILIENCE_JOB_ID": "own"}, "own"),
    ],
)
def test_job_is_named_by_the_nearest_that_knows(variables: dict[str, str], job_id: str | None) -> None:
    assert Settings.from_environment(variables).job_id == job_id


@pytest.mark.parametrize("job_id", ["team/run", "..", "../../escaped", "x" * 1000])
def test_job_id_may_be_any_text(job_id: str) -> None:
    assert Settings.from_environment({"TORCHELASTIC_RUN_ID": job_id}).job_id == job_id
    assert Settings.from_environment({"RESILIENCE_JOB_ID": job_id}).job_id == job_id


def test_value_of_a_launcher_is_refused_under_the_launchers_name() -> None:
    with pytest.raises(ConfigurationError, match=r"^TORCHELASTIC_RESTART_COUNT is 'many'"):
        Settings.from_environment({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "many"})


def test_restart_count_of_the_scheduler_is_a_hint_and_that_of_the_launcher_the_cycle() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "5"}
    settings = Settings.from_environment(elastic)
    assert (settings.attempt, settings.attempt_hint, settings.cycle) == (None, 5, 2)
    assert (settings.run_id, settings.restart_count) == ("run", 2)
    own = Settings.from_environment({**elastic, "RESILIENCE_ATTEMPT": "0", "RESILIENCE_CYCLE": "9"})
    assert (own.attempt, own.attempt_hint, own.cycle) == (0, 0, 9)
    plain = Settings.from_environment({"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "many"})
    assert (plain.attempt_hint, plain.cycle, plain.restart_count) == (0, None, 2)


OUTER = {"RESILIENCE_RUN_FOLDER": "/runs/outer@1", "RESILIENCE_JOB_ID": "outer", "RESILIENCE_ATTEMPT": "1"}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (None, None)),
        ({"RESILIENCE_JOB_ID": "inner"}, ("inner", None)),
        ({"RESILIENCE_JOB_ID": "inner", "RESILIENCE_ATTEMPT": "3"}, ("inner", 3)),
    ],
)
def test_launcher_in_a_worker_takes_neither_id_nor_attempt_of_the_outer_job(
    own: dict[str, str], expected: tuple[str | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "run", "RESILIENCE_CYCLE": "4"}
    for name, value in {**OUTER, **worker, "RESILIENCE_STEP_TIMEOUT": "5", **own}.items():
        monkeypatch.setenv(name, value)
    settings = settings_of_a_launch()
    assert (settings.job_id, settings.attempt) == expected
    assert (settings.cycle, settings.run_id, settings.step_timeout) == (None, "none", 5.0)
    assert "RESILIENCE_RUN_FOLDER" not in os.environ and os.environ["SLURM_JOB_ID"] == "77"


def test_socket_of_a_monitor_that_another_launcher_started_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this job has neither metrics nor spans nor lines on the terminal: they are left to an agent."""
    monkeypatch.delenv("RESILIENCE_RESTART_POLICY", raising=False)
    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/run/monitor-0")
    assert not has_agent()
    monkeypatch.setenv("RESILIENCE_RESTART_POLICY", "any-failed")
    assert has_agent()


def test_table_of_the_docs_has_a_line_for_each_variable() -> None:
    lines = settings_table().splitlines()
    described = [field.name for field in msgspec.structs.fields(Settings)][:-3]
    assert [line.split("`")[1] for line in lines[2:]] == [PREFIX + name.upper() for name in described]
    assert {line.count("|") for line in lines} == {6}


# -- what launchers set -------------------------------------------------------------------------------


def test_meeting_point_is_read_from_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert LauncherRendezvous.from_environment() == LauncherRendezvous("host", 29500, 4, True)
    for name in DISTRIBUTED:
        monkeypatch.delenv(name, raising=False)
    assert LauncherRendezvous.from_environment() == LauncherRendezvous(None, None, None, False)


def test_local_rank_is_none_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_rank() is None
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3


NUMBERS_OF_LAUNCHERS = [
    *[(name, rank_and_world_size) for name in ("RANK", "WORLD_SIZE")],
    *[("SLURM_PROCID", infrastructure_rank), ("MASTER_PORT", LauncherRendezvous.from_environment)],
    *[("RESILIENCE_SHORTEST_LIMIT", Launcher.from_environment), ("GROUP_WORLD_SIZE", Launcher.from_environment)],
]


@pytest.mark.parametrize(("name", "read"), NUMBERS_OF_LAUNCHERS, ids=[name for name, _ in NUMBERS_OF_LAUNCHERS])
@pytest.mark.parametrize("text", ["5000²", "x", "9" * 5000], ids=lambda text: text[:5])
def test_launchers_number_that_cannot_be_read_is_named(
    text: str, name: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "RESILIENCE_SHORTEST_LIMIT" and text.isdecimal():
        text = "nan"
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=name):
        read()


def test_node_is_the_host_and_the_group_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("GROUP_RANK", "2")
    assert node_name() == f"{socket.gethostname()}-g2"


def test_nccls_watchdog_raises_only_if_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    monkeypatch.delenv(name, raising=False)
    with scoped_environment():
        keep_nccl_watchdog_from_raising()
        assert os.environ[name] == "0"
    assert name not in os.environ
    monkeypatch.setenv(name, "1")
    with scoped_environment():
        keep_nccl_watchdog_from_raising()
        assert os.environ[name] == "1"


@pytest.mark.parametrize(("value", "may_be_used"), [(None, True), ("1", True), ("2", True), ("0", False)])
def test_nvls_is_out_of_use_only_if_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, may_be_used: bool
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", value)
    assert nvls_may_be_used() is may_be_used


def test_callers_variables_come_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("UNRELATED", "before")

    def fail_inside() -> None:
        with scoped_environment():
            os.environ.update(RANK="0", MASTER_PORT="1", UNRELATED="after")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ["RANK"] == "5"
    assert "MASTER_PORT" not in os.environ
    assert os.environ["UNRELATED"] == "after"


# -- variables that do not exist -----------------------------------------------------------------------


def test_misspelt_variable_is_named_with_the_nearest_one() -> None:
    texts = {"RESILIENCE_SETP_TIMEOUT": "5", "RESILIENCE_MY_OWN": "x", "RESILIENCES": "", "PATH": "/bin"}
    own, misspelt = unknown_variables(texts)
    assert misspelt == (
        "there is no variable RESILIENCE_SETP_TIMEOUT, so it has no effect; did you mean RESILIENCE_STEP_TIMEOUT?"
    )
    assert own.startswith("there is no variable RESILIENCE_MY_OWN, ") and "docs/settings.md" in own


def test_variables_of_the_pages_and_of_the_package_exist() -> None:
    files = [*(ROOT / "resilience").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    read = [path for path in files if path.is_file() and not {"changes", "__pycache__"}.intersection(path.parts)]
    texts = [path.read_text() for path in read]
    names = {name for text in texts for name in re.findall(r"\bRESILIENCE_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert len(names) > 20
    assert list(unknown_variables(dict.fromkeys(names, "1"))) == []


@pytest.mark.parametrize(("variable", "text"), [("DETECT_HANGS", "maybe"), ("STEP_TIMEOUT", "soon")])
def test_unusable_value_is_refused_in_the_words_of_a_user(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Settings.from_environment({f"RESILIENCE_{variable}": text})
    message = str(raised.value)
    assert message.startswith(f"RESILIENCE_{variable} is {text!r}, expected ")
    assert not re.search("bool|str|float", message)


def test_process_that_ends_with_its_number_as_an_agent_is_warned_of_nothing() -> None:
    """Python's filters for warnings are anything by then: a launcher with a misspelt key in its file was warned."""
    number = "from resilience.system.environment import agent_node_name; print(agent_node_name('numbered'))"
    command = [sys.executable, "-W", "always", "-c", number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() and "ResourceWarning" not in done.stderr
