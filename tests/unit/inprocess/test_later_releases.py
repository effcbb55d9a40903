"""Code for later releases of the compatible API runs, or is refused before the job starts and told what to write."""

from __future__ import annotations

import copy
import importlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import resilience.inprocess as inprocess
from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.fault_tolerance import RankMonitorClient
from resilience.inprocess.later_releases import INSTEAD, OF_STATE
from resilience.inprocess.state import State
from resilience.inprocess.tools.inject_fault import Fault

NAMES = [(module, name) for module, names in INSTEAD.items() for name in names]
MIGRATION = Path(__file__).parents[3] / "docs" / "migration.md"


def module_of(path: str) -> Any:
    return importlib.import_module(f"resilience.inprocess.{path}".rstrip("."))


class OneArgument(
    inprocess.finalize.Finalize,
    inprocess.health_check.HealthCheck,
    inprocess.rank_assignment.RankAssignment,
):
    """A hook as releases from 0.3 on have it."""

    def __call__(self, state: State) -> Any:  # type: ignore[override]
        return state


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_name_of_a_later_release_is_refused_with_what_to_write(module: str, name: str) -> None:
    with pytest.raises(AttributeError, match=r"0\.3 or later; ") as raised:
        getattr(module_of(module), name)
    assert INSTEAD[module][name] in str(raised.value)


@pytest.mark.parametrize("module", INSTEAD)
def test_name_of_no_release_is_just_missing(module: str) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        getattr(module_of(module), "no_such_name")  # noqa: B009  by name, as the others


@pytest.mark.parametrize("name", OF_STATE)
def test_hook_that_reads_a_later_attribute_of_the_state_is_told_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=r"^'State' object has no .*0\.3 or later; ") as raised:
        getattr(State(rank=0, world_size=1), name)
    assert OF_STATE[name] in str(raised.value)
    assert name in MIGRATION.read_text()


def test_other_attributes_of_a_state_are_just_missing() -> None:
    state = State(rank=0, world_size=1)
    with pytest.raises(AttributeError, match=r"^'State' object has no attribute 'no_such_name'$"):
        state.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(state) == pickle.loads(pickle.dumps(state)) == state


def test_state_is_read_from_the_environment_under_the_later_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert State.from_env() == State(rank=3, world_size=8)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_migration_page_names_what_is_refused(module: str, name: str) -> None:
    assert name in MIGRATION.read_text()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(inprocess.Wrapper, "monitor_process_pidfile"), (inprocess.abort.AbortTorchDistributed, "torch_fr_trace_path")],
)
def test_parameter_of_a_later_release_is_refused_with_what_to_write(kind: Any, name: str) -> None:
    with pytest.raises(ConfigurationTypeError, match=rf"no parameter '{name}': it is of .*; leave it out: "):
        kind(**{name: "/tmp/x"})
    assert name in MIGRATION.read_text()
    with pytest.raises(TypeError, match="no_such_name"):
        kind(no_such_name=1)


def test_client_that_is_asked_for_its_rank_says_where_to_read_it() -> None:
    with pytest.raises(AttributeError, match="'rank_info'; read RANK, LOCAL_RANK and WORLD_SIZE from the environment"):
        RankMonitorClient().rank_info  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(RankMonitorClient(), "no_such_name")


@pytest.mark.parametrize("option", ["finalize", "health_check", "rank_assignment"])
@pytest.mark.parametrize("is_composed", [False, True])
def test_hook_with_one_argument_is_refused_before_the_job_starts(option: str, is_composed: bool) -> None:
    hook = inprocess.Compose(OneArgument(), OneArgument()) if is_composed else OneArgument()
    with pytest.raises(ConfigurationTypeError, match=rf"^{option} is .*write def __call__\(self, state, "):
        inprocess.Wrapper(**{option: hook})


@pytest.mark.parametrize("option", ["completion", "terminate"])
def test_hook_of_another_kind_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationTypeError, match=f"{option} is .* expected an instance of .*{option.capitalize()}"):
        inprocess.Wrapper(**{option: OneArgument()})


def test_hooks_of_the_nested_restarter_are_accepted_where_later_releases_take_them() -> None:
    nested = inprocess.nested_restarter
    hooks: dict[str, Any] = {
        "initialize": inprocess.Compose(
            inprocess.initialize.RetryController(), nested.NestedRestarterHandlingCompleted()
        ),
        "abort": inprocess.Compose(
            inprocess.abort.AbortTorchDistributed(), nested.NestedRestarterHandlingStarting(special_rank=1)
        ),
        "completion": nested.NestedRestarterFinalized(),
        "terminate": nested.NestedRestarterAborted(),
    }
    wrapper = inprocess.Wrapper(**hooks, heartbeat_interval=timedelta(seconds=2))
    state = State(rank=0, world_size=2)
    assert all(getattr(wrapper, name)(state) is state for name in ("completion", "terminate"))


def test_heartbeat_interval_that_no_release_accepts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_interval"):
        inprocess.Wrapper(heartbeat_interval=timedelta(0))


@pytest.mark.parametrize(
    ("later", "here"),
    [
        ("GPU_ERROR", "GPU"),
        ("OS_ABORT", "ABORT"),
        ("LOCK_GIL", "GIL"),
        ("SIGINT", "INT"),
        ("SIGKILL", "KILL"),
        ("SIGTERM", "TERM"),
        ("SIGSTOP", "STOP"),
    ],
)
def test_fault_has_the_name_of_later_releases_too(later: str, here: str) -> None:
    assert Fault[later] is Fault[here]
