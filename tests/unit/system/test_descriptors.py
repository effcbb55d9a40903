"""From which number of free descriptors on does telemetry leave them to the job?"""

from __future__ import annotations

import resource

import pytest

from resilience.system import descriptors


@pytest.mark.parametrize(("limit", "reserve"), [(1024, 64), (100, 25)])
def test_last_descriptors_are_kept_for_the_job(monkeypatch: pytest.MonkeyPatch, limit: int, reserve: int) -> None:
    is_open = [limit - reserve]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(descriptors.os, "listdir", lambda path: [""] * is_open[0])
    assert not descriptors.are_scarce()
    is_open[0] += 1
    assert descriptors.are_scarce()


def test_descriptors_without_a_limit_are_never_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not descriptors.are_scarce()
