"""Which limits does a monitor enforce that another launcher has started?"""

from __future__ import annotations

import pytest

from resilience.facts.limits import Rule
from resilience.monitor.config import FaultToleranceConfig
from resilience.monitor.rank_server import limits_of
from resilience.system.environment import Settings


@pytest.mark.parametrize(("asked", "rule"), [(None, None), (False, None), (True, Rule(300.0, 60.0))])
def test_silences_without_a_limit_are_judged_only_on_demand(asked: bool | None, rule: Rule | None) -> None:
    settings = Settings.from_environment({})
    config = FaultToleranceConfig(detect_hangs=asked, hang_first_limit=300.0)
    assert limits_of(config, settings).rule == rule
