"""One definition a setting, for keywords, YAML and flags alike."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import itertools
import json
import pickle
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.facts.limits import Limit, Limits
from resilience.monitor import config as module
from resilience.monitor.config import FIELDS, FaultToleranceConfig, add_arguments, from_limits, rule_of, to_limits
from resilience.system.environment import Settings

DEFAULTS = {
    "workload_check_interval": 5.0,
    "initial_rank_heartbeat_timeout": 3600.0,
    "rank_heartbeat_timeout": 2700.0,
    "rank_section_timeouts": {},
    "rank_out_of_section_timeout": None,
    "step_timeout": None,
    "detect_hangs": None,
    "hang_first_limit": None,
    "hang_least_limit": None,
    "end_suspected_ranks": False,
    "num_warmup_iterations": 5,
    "warmup_rank_heartbeat_timeout": None,
    "warmup_rank_section_timeouts": {},
    "safety_factor": 5.0,
    "rank_termination_signal": signal.SIGKILL,
    "log_level": 20,
    "restart_policy": "any-failed",
    "use_infra_group_rank": None,
    "node_health_check_interval": 5.0,
}
OTHERS: dict[str, tuple[str, Any]] = {  # name: (as text, as a value), none of them the default
    "workload_check_interval": ("1.5", 1.5),
    "initial_rank_heartbeat_timeout": ("none", None),
    "rank_heartbeat_timeout": ("60", 60.0),
    "rank_section_timeouts": ("step:30,a:b:4.5,free:none", {"step": 30.0, "a:b": 4.5, "free": None}),
    "rank_out_of_section_timeout": ("12", 12.0),
    "step_timeout": ("7", 7.0),
    "detect_hangs": ("false", False),
    "hang_first_limit": ("1200", 1200.0),
    "hang_least_limit": ("30", 30.0),
    "end_suspected_ranks": ("true", True),
    "num_warmup_iterations": ("0", 0),
    "warmup_rank_heartbeat_timeout": ("100", 100.0),
    "warmup_rank_section_timeouts": ("step:300", {"step": 300.0}),
    "safety_factor": ("2.5", 2.5),
    "rank_termination_signal": ("SIGUSR1", signal.SIGUSR1),
    "log_level": ("DEBUG", 10),
    "restart_policy": ("min-healthy", "min-healthy"),
    "use_infra_group_rank": ("True", True),
    "node_health_check_interval": ("0.5", 0.5),
}


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--ft-cfg-path")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def from_flags(*arguments: str) -> FaultToleranceConfig:
    return FaultToleranceConfig.from_args(parsed(*arguments, "train.py"))


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


# -- three sources ------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_compatible_api() -> None:
    assert dataclasses.asdict(FaultToleranceConfig()) == DEFAULTS
    assert from_flags() == FaultToleranceConfig()
    assert set(OTHERS) == set(DEFAULTS)


@pytest.mark.parametrize("name", OTHERS)
def test_every_setting_reads_alike_from_keyword_file_and_flag(name: str, tmp_path: Path) -> None:
    text, value = OTHERS[name]
    expected = dataclasses.asdict(FaultToleranceConfig()) | {name: value}
    assert expected != DEFAULTS
    path = written(tmp_path, yaml.safe_dump({"fault_tolerance": {name: text}}))
    for config in (
        FaultToleranceConfig(**{name: value}),
        FaultToleranceConfig.from_kwargs(**{name: text}),
        FaultToleranceConfig.from_yaml_file(path),
        from_flags(f"--ft-{name.replace('_', '-')}={text}"),
        from_flags(f"--ft-{name}={text}"),
    ):
        assert dataclasses.asdict(config) == expected


def test_limit_of_heartbeats_counts_as_set_only_if_somebody_has_set_it(tmp_path: Path) -> None:
    both = ("initial_heartbeat", "heartbeat")
    path = written(tmp_path, "fault_tolerance: {rank_heartbeat_timeout: 2700}")
    assert to_limits(from_flags()).defaults == both
    assert to_limits(from_flags("--ft-step-timeout=9")).defaults == both
    assert to_limits(from_flags("--ft-rank-heartbeat-timeout=2700")).defaults == both[:1]
    assert to_limits(from_flags(f"--ft-cfg-path={path}")).defaults == both[:1]
    assert to_limits(FaultToleranceConfig(rank_heartbeat_timeout=9.0)).defaults == both[:1]
    assert to_limits(FaultToleranceConfig(rank_heartbeat_timeout=2700.0)).defaults == both[:1]
    assert to_limits(FaultToleranceConfig(5.0, 3600.0)).defaults == both[1:]
    assert to_limits(FaultToleranceConfig.from_kwargs(initial_rank_heartbeat_timeout=None)).defaults == both[1:]


def test_keyword_of_the_constructor_counts_as_set_in_each_form_of_the_settings(tmp_path: Path) -> None:
    settings = {"rank_heartbeat_timeout": 2700.0, "safety_factor": 5.0}
    config = FaultToleranceConfig(**settings)  # type: ignore[arg-type]
    assert config.given == set(settings)
    assert config == FaultToleranceConfig.from_kwargs(**settings) != FaultToleranceConfig()
    config.to_yaml_file(tmp_path / "limits.yaml")
    assert FaultToleranceConfig.from_yaml_file(tmp_path / "limits.yaml") == config
    assert from_limits(to_limits(config)).given >= {"rank_heartbeat_timeout"}


def test_default_does_not_count_as_set_in_a_copy_that_replaces_another_setting() -> None:
    """It would switch off the rule for silences."""
    copied = dataclasses.replace(FaultToleranceConfig(), step_timeout=9.0)
    assert copied.given == {"step_timeout"}
    assert FaultToleranceConfig(**dataclasses.asdict(copied)).given == {"step_timeout"}


def test_constructor_takes_the_settings_and_nothing_else() -> None:
    assert list(inspect.signature(FaultToleranceConfig).parameters) == list(FIELDS)
    config = FaultToleranceConfig(rank_heartbeat_timeout=2700.0)
    with pytest.raises(ConfigurationTypeError, match="there is no setting _given"):
        FaultToleranceConfig(**vars(config))


def test_settings_are_decoded_by_msgspec() -> None:
    config = msgspec.convert({"step_timeout": 9.0}, FaultToleranceConfig)
    assert (config.step_timeout, config.given) == (9.0, {"step_timeout"})


def test_subclass_may_have_a_post_init_of_its_own() -> None:
    @dataclasses.dataclass
    class Mine(FaultToleranceConfig):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.safety_factor = 2.0

    assert Mine(step_timeout=9.0).given == {"step_timeout", "safety_factor"}


def test_copy_is_set_apart_from_its_original() -> None:
    config = FaultToleranceConfig()
    copied = copy.copy(config)
    copied.rank_heartbeat_timeout = 2700.0
    assert (config.given, copied.given) == (set(), {"rank_heartbeat_timeout"})


def test_section_that_is_added_to_the_mapping_is_checked_and_written(tmp_path: Path) -> None:
    config = FaultToleranceConfig()
    config.rank_section_timeouts["setup"] = 900
    config.to_yaml_file(tmp_path / "made.yaml")
    assert FaultToleranceConfig.from_yaml_file(tmp_path / "made.yaml") == config
    assert to_limits(config).sections == {"setup": Limit(hard=900.0)}
    config.rank_section_timeouts["step"] = -1
    with pytest.raises(ConfigurationError, match=r"rank_section_timeouts is .*'step': -1"):
        to_limits(config)


def test_file_that_was_written_is_read_back(tmp_path: Path) -> None:
    config = FaultToleranceConfig(**{name: value for name, (_, value) in OTHERS.items()})
    for kept in (config, FaultToleranceConfig(), FaultToleranceConfig(log_level=15)):
        kept.to_yaml_file(tmp_path / "made.yaml")
        assert FaultToleranceConfig.from_yaml_file(str(tmp_path / "made.yaml"), False) == kept


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "fault_tolerance: {rank_heartbeat_timeout: 60, safety_factor: 3, step_timeout: 9}")
    config = from_flags(f"--ft-cfg-path={path}", "--ft-safety-factor", "4", "--ft-step-timeout", "none")
    assert (config.rank_heartbeat_timeout, config.safety_factor, config.step_timeout) == (60.0, 4.0, None)


def test_namespace_of_another_parser_may_hold_values_and_none_for_what_was_not_given() -> None:
    args = argparse.Namespace(ft_cfg_path=None, ft_safety_factor=3.0, ft_rank_heartbeat_timeout=None)
    assert FaultToleranceConfig.from_args(args) == FaultToleranceConfig(safety_factor=3.0)


# -- flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--ft-use-infra-group-rank"], True),
        (["--ft-use_infra_group_rank"], True),
        (["--ft-use-infra-group-rank=False"], False),
        (["--ft-use_infra_group_rank=true"], True),
        (["--no-ft-use-infra-group-rank"], False),
        (["--no-ft-use_infra_group_rank"], False),
        (["--ft-use-infra-group-rank", "--ft-use-infra-group-rank=none"], None),
    ],
)
def test_switch_takes_its_value_after_an_equals_sign_and_never_the_script(flags: list[str], value: bool | None) -> None:
    args = parsed(*flags, "train.py", "--ft-step-timeout", "3")
    assert (args.script, args.rest) == ("train.py", ["--ft-step-timeout", "3"])
    assert FaultToleranceConfig.from_args(args) == FaultToleranceConfig(use_infra_group_rank=value)


def test_wrong_flag_is_named_with_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--ft-safety-factor", "0.5")
    shown = capsys.readouterr().err
    assert "--ft-safety-factor" in shown and "expected a factor of 1 or more" in shown


def test_help_names_every_setting_once_with_its_default() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=400))
    add_arguments(parser)
    shown = parser.format_help().split("options:")[1]
    for field in FIELDS.values():
        text = f"{field.metadata['help']}; default {module.shown_default(field)}"
        assert shown.count(text) == 1
        assert f"{module.flag(field.name)}" in shown


# -- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "number"),
    [("SIGTERM", 15), ("term", 15), (15, 15), ("15", 15), (signal.SIGTERM, 15)],
)
def test_signal_has_name_or_number(given: Any, number: int) -> None:
    assert FaultToleranceConfig(rank_termination_signal=given).rank_termination_signal == number


@pytest.mark.parametrize(
    ("given", "level"), [("warning", 30), ("INFO", 20), ("WARN", 30), ("dbg", 10), (10, 10), ("40", 40), (15, 15)]
)
def test_log_level_has_name_or_number(given: Any, level: int) -> None:
    assert FaultToleranceConfig(log_level=given).log_level == level


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("rank_heartbeat_timeout", 0, ConfigurationError),
        ("rank_heartbeat_timeout", -1, ConfigurationError),
        ("rank_heartbeat_timeout", float("nan"), ConfigurationError),
        ("rank_heartbeat_timeout", "soon", ConfigurationError),
        pytest.param("rank_heartbeat_timeout", 10**400, ConfigurationError, id="huge timeout"),
        pytest.param("num_warmup_iterations", 10**400, ConfigurationError, id="huge count"),
        ("rank_heartbeat_timeout", True, ConfigurationTypeError),
        ("rank_heartbeat_timeout", [1], ConfigurationTypeError),
        ("workload_check_interval", None, ConfigurationTypeError),
        ("safety_factor", 0.5, ConfigurationError),
        ("num_warmup_iterations", -1, ConfigurationError),
        ("num_warmup_iterations", 1.5, ConfigurationError),
        ("rank_section_timeouts", 3, ConfigurationTypeError),
        ("rank_section_timeouts", "step", ConfigurationError),
        ("rank_section_timeouts", {"step": 0}, ConfigurationError),
        ("rank_section_timeouts", {3: 1.0}, ConfigurationError),
        ("rank_termination_signal", "SIGNOTHING", ConfigurationError),
        ("rank_termination_signal", 4711, ConfigurationError),
        ("log_level", "LOUD", ConfigurationError),
        ("restart_policy", "never", ConfigurationError),
        ("use_infra_group_rank", "perhaps", ConfigurationError),
        ("use_infra_group_rank", 2, ConfigurationTypeError),
    ],
)
def test_wrong_value_is_refused_when_it_is_set(name: str, value: Any, kind: type[ConfigurationError]) -> None:
    with pytest.raises(kind, match=f"^{name} is .*, expected ") as caught:
        FaultToleranceConfig(**{name: value})
    assert type(caught.value) is kind
    config = FaultToleranceConfig()
    with pytest.raises(kind):
        setattr(config, name, value)
    assert config == FaultToleranceConfig()


def test_setting_that_there_is_not_cannot_be_set() -> None:
    with pytest.raises(ConfigurationError, match="there is no setting 'rank_hearbeat_timeout'"):
        FaultToleranceConfig().rank_hearbeat_timeout = 3  # type: ignore[attr-defined]


# -- what is not recognized ---------------------------------------------------------------------------


def test_unknown_keyword_is_named_with_what_to_write() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"no setting other; there are .*from_kwargs ignores"):
        FaultToleranceConfig(other=60.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationTypeError, match=r"no setting step_timeouts; did you mean step_timeout\?"):
        FaultToleranceConfig(step_timeouts=60.0)  # type: ignore[call-arg]
    config = FaultToleranceConfig(safety_factor=3.0)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_settings_without_a_value_are_not_given() -> None:
    assert FaultToleranceConfig().given == set()
    assert FaultToleranceConfig(rank_section_timeouts={"step": 1.0}).given == {"rank_section_timeouts"}


def test_unknown_keys_are_named_in_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "fault_tolerance: {step_timeout: 3, stepp: 1, other: 2}")
    with pytest.warns(UserWarning, match="not recognized: other, stepp") as caught:
        config = FaultToleranceConfig.from_yaml_file(path)
    assert f"in {path} are ignored" in str(caught[0].message)
    assert config == FaultToleranceConfig(step_timeout=3)


HARMLESS = {
    "restart_check_interval": 60.0,
    "skip_section_response": True,
    "enable_nic_monitor": False,
    "pci_topo_file": None,
    "link_down_path_template": None,
}


@pytest.mark.filterwarnings("error")
def test_settings_that_only_the_compatible_api_has_are_accepted_where_their_flags_are(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"fault_tolerance": HARMLESS}))
    assert FaultToleranceConfig(**HARMLESS) == FaultToleranceConfig()  # type: ignore[arg-type]
    assert FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, **HARMLESS) == FaultToleranceConfig()
    assert FaultToleranceConfig.from_yaml_file(path) == FaultToleranceConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_nic_monitor", True), ("pci_topo_file", "topo.xml"), ("link_down_path_template", "/sys/x")],
)
def test_settings_of_the_compatible_api_that_are_not_here_are_refused_with_what_to_do(
    name: str, value: object, tmp_path: Path
) -> None:
    path = written(tmp_path, json.dumps({"fault_tolerance": {name: value}}))
    for make in (lambda: FaultToleranceConfig(**{name: value}), lambda: FaultToleranceConfig.from_yaml_file(path)):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=f"{name} is a setting of .*`--health-check`"):
            make()


def test_unknown_keys_are_an_error_where_they_are_not_ignored(tmp_path: Path) -> None:
    path = written(tmp_path, "fault_tolerance: {stepp: 1}")
    with pytest.raises(ConfigurationError, match="stepp") as caught:
        FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="stepp"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, stepp=1)


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "fault_tolerance: {step_timeout: 3}",
        "a: {b: {fault_tolerance: {step_timeout: 3}}}\nc: 4",
        "jobs:\n- name: one\n- fault_tolerance: {step_timeout: 3}",
    ],
)
def test_mapping_is_found_at_any_depth(text: str, tmp_path: Path) -> None:
    assert FaultToleranceConfig.from_yaml_file(written(tmp_path, text)) == FaultToleranceConfig(step_timeout=3)


def test_settings_that_are_written_and_read_have_the_same_effect(tmp_path: Path) -> None:
    """A default that comes back as set would switch off the rule for silences."""
    for settings in ({}, {"rank_heartbeat_timeout": 2700}, {"rank_section_timeouts": {"setup": 900}, "log_level": 10}):
        config = FaultToleranceConfig.from_kwargs(**settings)  # type: ignore[arg-type]
        config.to_yaml_file(tmp_path / "limits.yaml")
        again = FaultToleranceConfig.from_yaml_file(tmp_path / "limits.yaml")
        assert again == config
        assert to_limits(again) == to_limits(config)
    assert FaultToleranceConfig.from_kwargs(rank_heartbeat_timeout=2700) != FaultToleranceConfig()
    assert FaultToleranceConfig.from_kwargs(safety_factor=5) == FaultToleranceConfig()


@pytest.mark.parametrize("nothing", ["none", "", None])
def test_none_means_no_limits_of_sections(nothing: object) -> None:
    config = FaultToleranceConfig.from_kwargs(rank_section_timeouts=nothing, warmup_rank_section_timeouts=nothing)
    assert (config.rank_section_timeouts, config.warmup_rank_section_timeouts) == ({}, {})


@pytest.mark.parametrize("sections", ["data:", "step:30,data: ", {"data": ""}])
@pytest.mark.parametrize("name", ["rank_section_timeouts", "warmup_rank_section_timeouts"])
def test_section_with_an_empty_limit_is_refused_and_not_unlimited(name: str, sections: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} is .*data.*, expected name:seconds,… or a mapping"):
        FaultToleranceConfig.from_kwargs(**{name: sections})


def test_empty_limit_of_a_section_is_wrong_usage_of_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--ft-rank-section-timeouts", "data:")
    said = " ".join(capsys.readouterr().err.split())
    assert "argument --ft-rank-section-timeouts" in said
    assert "rank_section_timeouts is 'data:', expected name:seconds,…" in said


def test_section_with_two_limits_is_wrong_usage_of_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--ft-rank-section-timeouts", "data:3,data:4")
    said = " ".join(capsys.readouterr().err.split())
    assert "rank_section_timeouts is 'data:3,data:4', expected name:seconds,…" in said


@pytest.mark.parametrize(
    "settings", ["  safety_factor: 2\n  safety_factor: 3", "  rank_section_timeouts:\n    a: 1\n    a: 2"]
)
def test_setting_that_a_file_has_twice_is_refused(tmp_path: Path, settings: str) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text(f"fault_tolerance:\n{settings}")
    with pytest.raises(ConfigurationError, match=r"key '\w+' appears twice"):
        FaultToleranceConfig.from_yaml_file(path)


def test_merged_keys_of_a_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("usual: &usual {safety_factor: 2}\nfault_tolerance:\n  <<: *usual\n  safety_factor: 3")
    assert FaultToleranceConfig.from_yaml_file(path).safety_factor == 3


def test_empty_mapping_means_the_defaults(tmp_path: Path) -> None:
    assert FaultToleranceConfig.from_yaml_file(written(tmp_path, "fault_tolerance:")) == FaultToleranceConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("other: 3", "has no mappings 'fault_tolerance'"),
        ("", "has no mappings"),
        ("a: {fault_tolerance: {}}\nfault_tolerance: {}", "has 2 mappings .*: a.fault_tolerance, fault_tolerance"),
        ("fault_tolerance: [1]", "is a list, expected a mapping"),
        ("fault_tolerance: {1: 2}", "not names"),
        ("a: b: c", "is not YAML"),
        ("fault_tolerance: {step_timeout: -1}", "step_timeout is -1, expected seconds above 0, or none"),
    ],
)
def test_file_that_does_not_say_it_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        from_flags(f"--ft-cfg-path={path}")
    assert str(path) in str(caught.value)


# -- what the monitors are told -----------------------------------------------------------------------


def test_limits_end_a_rank() -> None:
    config = FaultToleranceConfig(
        initial_rank_heartbeat_timeout=None,
        rank_heartbeat_timeout=60,
        rank_section_timeouts={"step": 30, "free": None},
        rank_out_of_section_timeout=12,
        step_timeout=7,
        num_warmup_iterations=3,
        warmup_rank_heartbeat_timeout=100,
        warmup_rank_section_timeouts={"step": 300},
        safety_factor=2,
        rank_termination_signal="SIGTERM",
    )
    assert to_limits(config) == Limits(
        step=Limit(hard=7.0),
        heartbeat=Limit(hard=60.0),
        sections={"step": Limit(hard=30.0), "free": Limit()},
        out_of_section=Limit(hard=12.0),
        warmup={"step": Limit(hard=300.0)},
        warmup_heartbeat=Limit(hard=100.0),
        warmup_occurrences=3,
        signal="SIGTERM",
        grace=module.GRACE,
        safety_factor=2.0,
    )


def test_rank_that_is_killed_gets_no_grace() -> None:
    made = to_limits(FaultToleranceConfig())
    assert (made.signal, made.grace) == ("SIGKILL", 0.0)
    assert made.heartbeat == Limit(hard=2700.0) and made.initial_heartbeat == Limit(hard=3600.0)


def test_settings_of_limits_are_those_that_the_limits_were_made_from() -> None:
    launchers = {
        "workload_check_interval",
        "log_level",
        "restart_policy",
        "use_infra_group_rank",
        "node_health_check_interval",
    }
    chosen = {name: value for name, (_, value) in OTHERS.items() if name not in launchers}
    rules: tuple[dict[str, Any], ...] = (
        {"detect_hangs": True, "hang_first_limit": 1800.0, "hang_least_limit": 90.0},
        {"detect_hangs": False, "hang_first_limit": None, "hang_least_limit": None},
    )
    set_to_defaults = {"rank_heartbeat_timeout": 2700.0, "initial_rank_heartbeat_timeout": 3600.0}
    for settings, rule in itertools.product(({}, chosen, set_to_defaults), rules):
        config = FaultToleranceConfig(**settings | rule)
        limits = msgspec.structs.replace(to_limits(config), rule=rule_of(config, Settings()))
        assert from_limits(limits) == config


def test_settings_of_the_rule_come_from_the_variables_if_no_flag_sets_them() -> None:
    config = FaultToleranceConfig(hang_first_limit=1800)
    limits = msgspec.structs.replace(to_limits(config), rule=rule_of(config, Settings(hang_least_limit=30.0)))
    shown = from_limits(limits)
    assert (shown.detect_hangs, shown.hang_first_limit, shown.hang_least_limit) == (True, 1800.0, 30.0)
