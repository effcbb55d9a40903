"""A worker counts the cores without psutil, as psutil does."""

from __future__ import annotations

import os

import psutil

from resilience.launcher.worker import worker_main


def test_physical_cores_are_those_that_psutil_counts() -> None:
    assert worker_main._physical_cores() == (psutil.cpu_count(logical=False) or os.cpu_count())
