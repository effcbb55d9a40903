"""Every option of the peer's launcher is understood, or refused with what to do."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from resilience.errors import ConfigurationError
from resilience.launcher import ft_options
from resilience.launcher.arguments import Command, parse, parser

TORCHRUNS = {
    *("--nnodes 1", "--nproc-per-node 1", "--nproc_per_node 1", "--rdzv-backend c10d", "--rdzv_endpoint h:1"),
    *("--rdzv-endpoint h:1", "--rdzv-id a", "--rdzv-conf a=1", "--standalone", "--max-restarts 3", "--max_restarts 3"),
    *("--monitor-interval 0.3", "--start-method spawn", "--role r", "--log-dir logs", "-r 3", "--redirects 3", "-t 3"),
    *("--tee 3", "--local-ranks-filter 0", "--node-rank 0", "--master-addr h", "--master_port 1", "--local-addr h"),
}
V02_TO_04 = {
    *("--fault-tol-cfg-path FILE", "--ignore-missing-fault-tol-cfg", "--term-timeout 1800", "--term_timeout 9.5"),
    *("--workers-stop-timeout 30", "--workers_stop_timeout 1.5", "--restart-policy min-healthy"),
    *("--restart_policy any-failed", "--ft-param-workload_check_interval 1"),
    *("--ft-param-initial_rank_heartbeat_timeout 60", "--ft-param-rank_heartbeat_timeout 30"),
    *("--ft-param-node_health_check_interval 5", "--ft-param-safety_factor 3"),
    *("--ft-param-rank_termination_signal SIGTERM", "--ft-param-log_level DEBUG"),
    *("--ft-param-rank_out_of_section_timeout 9", "--ft-param-rank_section_timeouts setup:600,step:180"),
    *("--ft-param-restart_check_interval 60", "--ft_param_enable_nic_monitor False"),
    *("--ft-param-enable-nic-monitor false", "--ft_param_pci_topo_file f", "--ft-param-link-down-path-template t"),
}
V04_TO_07 = {
    *("--ft-cfg-path FILE", "--ft-cfg_path FILE", "--ft-workload-check-interval 1", "--ft-workload_check_interval 1"),
    *("--ft-initial-rank-heartbeat-timeout 60", "--ft-initial_rank_heartbeat_timeout none"),
    *("--ft-rank-heartbeat-timeout 30", "--ft-rank_heartbeat_timeout 30", "--ft-node_health_check_interval 5"),
    *("--ft-safety-factor 3", "--ft-safety_factor 3", "--ft-rank-termination-signal SIGKILL", "--ft-log_level INFO"),
    *("--ft-rank_out_of_section_timeout 9", "--ft-rank_section_timeouts step:180", "--ft-restart_policy any-failed"),
    *("--ft-restart-check-interval 60", "--ft-restart_check_interval 60", "--ft-enable-nic-monitor true"),
    *("--ft-enable_nic_monitor no", "--ft-enable-nic-healthcheck 1", "--ft-pci_topo_file f"),
    *("--ft-link_down_path_template t", "--ft-link-state-path-template t", "--ft-ignore-missing-cfg"),
    *("--ft-node-health-check-endpoint u", "--ft-enable_dist_storage_healthcheck true"),
    *("--ft_storage_health_check_path /a", "--ft-skip-section-response true", "--ft-rdzv-impl legacy"),
    *("--ft-rdzv_impl barrier", "--ft-numa_bind_strict false", "--ft-gpu-memory-reclaim-timeout 50"),
    *("--ft-gpu_memory_tolerance_mb 512", "--ft-gpu-memory-poll-interval 2", "--ft-check_remaining_processes true"),
    *("--ft-install-exception-hook true", "--ft-install_exception_hook false", "--ft-max-no-progress-restarts 3"),
    *("--ft-max_no_progress_cycles 3", "--ft-min-progress-iterations 200", "--ft-checkpoint_iteration_file f"),
    *("--ft-segment 4", "--ft_segment 4", "--ft-base-logfile f", "--ft_base_logfile f"),
    *("--ft-per-cycle-applog-prefix f", "--ft_nvrx_logfile f", "--ft-enable-log-server true"),
    *("--ft-log-server-port 1", "--ft_log_aggregator_count 1", "--ft-log-leaf-max-queue-chunks 1"),
    *("--ft_log_server_log_prefix f", "--ft-log-server-graceful-shutdown-timeout 1", "--ft-cycle-info-dir d"),
    *("--ft-attribution-endpoint h", "--ft_attribution_startup_timeout 1", "--ft-attribution-llm-model m"),
    *("--ft-attribution-llm-api-key-file f", "--ft-attribution-llm-base-url u", "--ft-attribution-stop-action log"),
    *("--ft-attribution-analysis-backend lib", "--ft-attribution-compute-timeout 1"),
    *("--ft-attribution-log-level INFO", "--ft-attribution-export-url u", "--ft-segment-health-check-dir d"),
    *("--ft_segment_health_check_dir d", "--ft-no-restart-exit-code 93", "--ft_no_restart_exit_code 0"),
}


@pytest.mark.parametrize("text", sorted(TORCHRUNS | V02_TO_04 | V04_TO_07))
def test_option_of_the_peers_launcher_is_accepted_or_refused_with_what_to_do(text: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("fault_tolerance: {}")
    option, *value = text.replace("FILE", str(path)).split()
    arguments = [option, *value, "train.py", "--lr", "1"]
    refused = [row for row, name in ft_options.names() if name == option and row.kind == "refused"]
    if refused and not (refused[0].form == "switch" and value[0].lower() in ft_options.OFF):
        with pytest.raises(ConfigurationError, match=f"{option} .*{re.escape(refused[0].text)}"):
            parse(arguments)
        return
    command = parse(arguments)
    assert (command.torchrun.training_script, command.torchrun.training_script_args) == ("train.py", ["--lr", "1"])


@pytest.mark.slow  # it changes with a release of the peer only
def test_each_option_in_the_source_of_the_installed_peers_launcher_is_known() -> None:
    """The source is read, not imported: that needs all that the peer depends on."""
    peer = importlib.util.find_spec("nvidia_resiliency_ext")
    if peer is None or peer.submodule_search_locations is None:
        pytest.skip("THE OPTIONS OF THE PEER ITSELF ARE NOT READ HERE: nvidia-resiliency-ext is not installed")
    folder = Path(peer.submodule_search_locations[0], "fault_tolerance")
    found = set()
    for source in (folder / "launcher.py", *folder.glob("cli_args.py")):  # the second one from 0.7 on
        for call in ast.walk(ast.parse(source.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
                found |= {each.value for each in call.args if isinstance(each, ast.Constant)}
    options = {name for name in found if isinstance(name, str) and name.startswith("-")}
    assert {"--nnodes", "--ft-rank-heartbeat-timeout"} & options
    not_the_launchers = {"--ft-cycle-info-job-id", "--ft_cycle_info_job_id"}  # of `nvrx-control`
    assert options - not_the_launchers - set(parser()._option_string_actions) == set()


def seen(*arguments: str) -> Command:
    return parse([*arguments, "train.py"])


def test_alias_sets_what_our_option_sets() -> None:
    command = seen(
        *("--ft-param-rank_section_timeouts", "setup:600,step:180", "--ft-param-rank_out_of_section_timeout", "300"),
        *("--ft-param-rank_termination_signal", "SIGTERM", "--restart_policy", "min-healthy"),
        *("--workers-stop-timeout", "14.2", "--ft-max-no-progress-restarts", "7", "--term-timeout", "1800"),
        *("--ft-no-restart-exit-code", "77"),
    )
    assert command.config.rank_section_timeouts == {"setup": 600.0, "step": 180.0}
    assert (command.config.rank_out_of_section_timeout, command.config.restart_policy) == (300.0, "min-healthy")
    assert command.config.rank_termination_signal.name == "SIGTERM"
    assert (command.torchrun.shutdown_timeout, command.options.stalled_restarts) == (15, 7)
    assert (command.options.term_timeout, command.options.same_failure_exit_code) == (1800.0, 77)


def test_value_of_an_alias_is_checked_as_that_of_our_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        seen("--ft-param-safety_factor", "0.5")
    assert "expected a factor of 1 or more" in capsys.readouterr().err


def test_alias_of_the_configuration_file_names_one_that_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"'nowhere\.yaml', but there is no such file"):
        seen("--fault-tol-cfg-path", "nowhere.yaml")


def test_value_of_a_switch_after_a_blank_is_not_taken_for_the_script() -> None:
    with pytest.raises(ConfigurationError, match="--ft-use-infra-group-rank=false"):
        seen("--ft-use-infra-group-rank", "false")


@pytest.mark.parametrize("option", ["--term-timeout", "--ft-segment", "--restart-policy", "--workers-stop"])
def test_scripts_own_option_may_be_called_like_one_of_the_peers(option: str) -> None:
    assert parse(["train.py", option, "3"]).torchrun.training_script_args == [option, "3"]


def test_each_option_stands_in_the_table_once_and_aliases_name_options_that_exist() -> None:
    names = [name for _, name in ft_options.names()]
    assert len(names) == len(set(names))
    known = parser()._option_string_actions
    assert all(row.text in known for row in ft_options.TABLE if row.kind == "alias")
    for row in ft_options.TABLE:
        assert all(f"`{name}`" in ft_options.table() for name in row.names)
