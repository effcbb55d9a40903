"""Do all agents of a job have the same settings?  The later agent compares its own with those of the first one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resilience.core.terms import Terms, agree, read
from resilience.errors import ConfigurationError
from tests.unit.core.agents import Run

FIRST = Terms(2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"least": 1}, "--nnodes is 1:3 on node b, but 2:3 on node a, which came first"),
        ({"most": 4}, "--nnodes is 2:4 on node b, but 2:3 on node a, which came first"),
        ({"lost_after": 60.0}, "keep_alive_interval × keep_alive_max_attempt is 60 s on node b, but 8 s on node a"),
        ({"policy": "min-healthy"}, "--ft-restart-policy is min-healthy on node b, but any-failed on node a"),
    ],
)
def test_setting_that_agents_must_share_is_an_error_of_the_later_agent(changes: dict[str, Any], message: str) -> None:
    run = Run()
    run.run(agree("a", FIRST))
    with pytest.raises(ConfigurationError) as raised:
        run.run(agree("b", msgspec.structs.replace(FIRST, **changes)))
    assert message in str(raised.value)
    assert ";" in str(raised.value) and str(raised.value).count("on node b") == 1
    assert run.run(read()) == FIRST


@pytest.mark.parametrize("changes", [{"join_limit": 1.0}, {"last_call": 1.0}, {"interval": 1.0}])
def test_setting_of_one_node_alone_may_differ(changes: dict[str, Any]) -> None:
    run = Run()
    run.run(agree("a", FIRST))
    run.run(agree("b", msgspec.structs.replace(FIRST, **changes)))
    assert run.run(read()) == FIRST


def test_job_without_an_agent_has_no_settings() -> None:
    assert Run().run(read()) is None
