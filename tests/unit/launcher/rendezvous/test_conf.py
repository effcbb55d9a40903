"""An unusable value of `--rdzv-conf` is refused before anything is connected."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.errors import ConfigurationError
from resilience.launcher.rendezvous.conf import keys_without_effect, number
from resilience.launcher.rendezvous.job_store import meet, static_rank


def parameters(backend: str, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "nowhere.invalid:1", "job", 1, 1, **conf)


@pytest.mark.parametrize("value", ["30s", "nan", "inf", "-1", "0", "1e300", None, ""])
def test_unusable_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"--rdzv-conf join_timeout is {value!r}, expected a number above 0"):
        number(parameters("c10d", join_timeout=value), "join_timeout", 600)


def test_number_may_have_a_fraction() -> None:
    assert number(parameters("etcd", read_timeout="0.5"), "read_timeout", 60) == 0.5
    assert number(parameters("etcd"), "read_timeout", 60) == 60.0


@pytest.mark.parametrize(
    ("backend", "conf", "expected"),
    [
        ("etcd", {"read_timeout": "30s"}, "read_timeout is '30s', expected a number above 0"),
        ("etcd", {"protocol": "ftp"}, "protocol is 'ftp', expected one of http, https"),
        ("etcd", {"attempt": "first"}, "attempt is 'first', expected a whole number"),
        ("c10d", {"is_host": "maybe"}, "is_host is 'maybe', expected 1 or 0"),
        ("static", {"rank": "first"}, "rank is 'first', expected a whole number"),
    ],
)
def test_wrong_value_is_refused_before_the_store_is_reached(backend: str, conf: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--rdzv-conf {expected}"):
        meet(parameters(backend, **conf), cast(Any, None), 0.0)


def test_rank_of_a_static_rendezvous_may_be_text() -> None:
    assert static_rank(parameters("static", rank="3")) == 3


def test_keys_that_nothing_reads_are_reported() -> None:
    conf = "join_timeout=5, read_timeout=30,timeout=900,is_host=1,rank=1,node=a"
    assert keys_without_effect(conf, "c10d") == ["node", "rank", "read_timeout", "timeout"]
    assert keys_without_effect(conf, "static") == ["is_host", "node", "read_timeout", "timeout"]
    assert keys_without_effect(conf, "etcd") == ["is_host", "node", "rank", "timeout"]
    assert keys_without_effect("", "c10d") == []
