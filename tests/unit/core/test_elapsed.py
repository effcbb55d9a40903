"""How long something was waited for, as counted by a process that may be stopped meanwhile."""

from __future__ import annotations

from resilience.core.elapsed import Elapsed


def test_looks_in_time_add_up() -> None:
    elapsed = Elapsed(100.0, longest=1.0)
    assert [elapsed.look(now) for now in (100.5, 101.5, 102.0)] == [0.5, 1.5, 2.0]


def test_gap_in_which_this_process_was_stopped_counts_little() -> None:
    elapsed = Elapsed(100.0, longest=1.0)
    assert [elapsed.look(now) for now in (100.5, 4000.0, 4000.5)] == [0.5, 1.5, 2.0]
