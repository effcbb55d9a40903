"""What is read from the kernel's words about processes."""

from __future__ import annotations

import signal

import pytest

from resilience.adapters.processes import memory_files, to_exit
from resilience.core.attribution import Exit


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, Exit(code=0)),
        (7 << 8, Exit(code=7)),
        (signal.SIGKILL, Exit(signal="SIGKILL")),
        (signal.SIGSEGV | 0x80, Exit(signal="SIGSEGV")),  # with a core dump
        (64, Exit(signal="SIGRTMAX")),
        (60, Exit(signal="signal 60")),
    ],
)
def test_wait_status_is_taken_apart(status: int, expected: Exit) -> None:
    assert to_exit(status) == expected


@pytest.mark.parametrize(
    ("memberships", "expected"),
    [
        ("0::/user.slice/a", ["user.slice/a/memory.events", "memory.events"]),
        (
            "9:name=systemd:/x\n4:memory:/job\n0::/\n",
            ["memory/job/memory.oom_control", "memory/memory.oom_control", "memory.events", "memory.events"],
        ),
        ("3:cpu,memory:/a:b\n", ["memory/a:b/memory.oom_control", "memory/memory.oom_control"]),
        ("", []),
    ],
)
def test_count_of_kills_for_memory_is_looked_for_where_either_kind_of_cgroup_keeps_it(
    memberships: str, expected: list[str]
) -> None:
    assert [str(file) for file in memory_files(memberships)] == [f"/sys/fs/cgroup/{path}" for path in expected]
