"""Who hosts the store of a job, and what is said if nobody can."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.errors import StoreError
from resilience.launcher.rendezvous.job_store import connect, meet


class NoStores:
    """The handle of a store process that could not open a server."""

    def host(self, address: str, port: int) -> Any:
        raise StoreError("the store process (pid 7) has ended", pid=7)


def test_reason_is_named_if_a_job_of_one_node_can_host_no_store() -> None:
    parameters = RendezvousParameters("c10d", "localhost:0", "job", 1, 1)
    with pytest.raises(StoreError, match=r"cannot host the rendezvous: the store process \(pid 7\) has ended"):
        meet(parameters, NoStores(), 1.0)  # type: ignore[arg-type]


def test_text_that_can_be_no_host_name_is_reported_as_such() -> None:
    with pytest.raises(StoreError, match=r"'a\.\.b' is no host name") as raised:
        connect("a..b", 29500, 20.0)
    assert "within" not in str(raised.value)  # it is told at once
    assert str(raised.value).endswith("; check --rdzv-endpoint")
