"""Which tcp:// URLs meet at the iteration's store?"""

from __future__ import annotations

import pytest

from resilience.system.tcp_urls import own_url


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "400"}.items():
        monkeypatch.setenv(name, value)


def test_url_of_the_group_of_all_ranks_gets_the_iterations_address() -> None:
    url = "tcp://node7:29500?rank=1&world_size=4&use_libuv=1"
    assert own_url(url) == "tcp://10.0.0.1:400?rank=1&world_size=4&use_libuv=1"


def test_address_of_ipv6_is_put_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "fd00::1")
    assert own_url("tcp://node7:29500?rank=1&world_size=4") == "tcp://[fd00::1]:400?rank=1&world_size=4"


@pytest.mark.parametrize("query", ["rank=1&world_size=5", "rank=0&world_size=4", "world_size=4", "rank=1", ""])
def test_url_of_any_other_group_stays_as_it_is(query: str) -> None:
    assert own_url(f"tcp://node7:29500?{query}") == ""


def test_url_stays_as_it_is_where_no_store_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    assert own_url("tcp://node7:29500?rank=1&world_size=4") == ""
