"""What does an agent do at its start, in a store that another agent reached first?"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core.membership import Membership
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.terms import Terms, agree
from resilience.errors import ConfigurationError
from resilience.launcher.rendezvous import handler as rendezvous
from resilience.launcher.rendezvous.driving import Driver
from resilience.launcher.rendezvous.handler import Handler
from resilience.launcher.rendezvous.job_store import RendezvousStore
from tests.unit.launcher.stores import Store


class _NoStores:
    """No process for stores."""

    def ask(self, address: str) -> None:
        pass


@pytest.mark.parametrize("is_host", [True, False])
def test_agent_with_other_settings_ends_the_job_only_if_it_hosts_the_store(
    monkeypatch: pytest.MonkeyPatch, is_host: bool
) -> None:
    store = Store()
    monkeypatch.setattr(
        rendezvous, "meet", lambda *_: RendezvousStore(lambda: store, ("127.0.0.1", 1), "here", is_host)
    )
    monkeypatch.setattr("torch.distributed.PrefixStore", lambda _, inner: inner)
    driver = Driver(store, lambda: False)
    driver.run(agree("other", Terms(1, 3)))
    parameters: Any = RendezvousParameters("c10d", "here:1", "job", 2, 2)
    said: list[str] = []
    stop = said.__len__  # a signal as soon as the wait for the others has been announced
    with pytest.raises(ConfigurationError, match="--nnodes is 2:2 on node own, but 1:3 on node other"):
        Handler(
            parameters,
            _NoStores(),
            "own",
            is_interrupted=lambda: stop() > 0,
            say=said.append,  # type: ignore[arg-type]
        )
    assert [sentence.endswith("after 300 s at most") for sentence in said] == [True] * is_host
    closed = driver.run(RendezvousLog().newest(Membership())).closed
    assert closed.startswith("--nnodes is 2:2 on node own") if is_host else closed == ""
