"""What does a sign of life cost the rank, and a look at the page its monitor?

    python -m tests.benchmarks.bench_page

Prints the smallest of many repetitions, in microseconds a call, loop included: what the code costs on a
quiet core. `tests.benchmarks.run` has the medians of a running job, beside the peer's."""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from resilience.core.observation import Doing
from resilience.monitor import client
from resilience.monitor.page import RING, MonitorSide, Page, RankSide
from resilience.system import collective_calls

CALLS, REPEATS = 10_000, 30


def main() -> None:
    page = Page.create()
    rank, monitor = RankSide(page), MonitorSide(page)
    pair = "with section('data'): pass"
    show("without a page: heartbeat()", "heartbeat()", heartbeat=client.heartbeat)
    show("without a page: step(n)", "step(3)", step=client.step)
    show("without a page: section pair", pair, section=client.section)
    client.activate(rank)
    show("heartbeat()", "heartbeat()", heartbeat=client.heartbeat)
    show("step(n)", "step(next(number))", step=client.step, number=itertools.count())
    show("section pair", pair, section=client.section)
    show("ping()", "ping()", ping=rank.ping)
    show("watchdog tick", "tick()", tick=rank.tick)
    show("state", "doing(what)", doing=rank.doing, what=Doing.WAITING)
    show(
        "collective pair",
        "left(entered(0, 1, 'all_reduce'))",
        left=rank.collective_left,
        entered=rank.collective_entered,
    )
    show_call(rank)
    show("monitor: read", "read()", read=monitor.read)
    show("monitor: read, 4 sections open", "read()", read=_with_open_sections(rank, monitor))
    show(f"monitor: drain of {RING} entries", "drain()", calls=3, drain=_with_full_ring(rank, monitor))


def show(label: str, statement: str, calls: int = CALLS, **names: Any) -> None:
    """Time a statement and print what one run of it takes."""
    best = min(timeit.repeat(statement, globals=names, number=calls, repeat=REPEATS)) / calls
    print(f"{label:40} {best * 1e6:9.3f} us")


def show_call(rank: RankSide) -> None:
    """Print what a noted call and its wait cost beyond a call that is not noted. The group does nothing."""

    class Work:
        def wait(self) -> bool:
            return True

    class ProcessGroup:
        group_name = "0"
        work = Work()

        def rank(self) -> int:
            return 0

        def allreduce(self, tensors: list[object]) -> Work:
            return self.work

    group, statement = ProcessGroup(), "group.allreduce([]).wait()"
    plain = min(timeit.repeat(statement, globals={"group": group}, number=CALLS, repeat=REPEATS)) / CALLS
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]):
        collective_calls.note_in(None)  # torch's own methods are no longer wrapped
        collective_calls.note_in(rank, [(ProcessGroup, Work)])
        noted = min(timeit.repeat(statement, globals={"group": group}, number=CALLS, repeat=REPEATS)) / CALLS
        collective_calls.note_in(None)
    print(f"{'a noted call of a collective and its wait':40} {(noted - plain) * 1e6:9.3f} us more")


def _with_open_sections(rank: RankSide, monitor: MonitorSide) -> Callable[[], object]:
    for number in range(4):
        rank.enter(f"section {number}")
    return monitor.read


def _with_full_ring(rank: RankSide, monitor: MonitorSide) -> Callable[[], object]:
    for _ in range(RING):
        rank.heartbeat()

    def drain() -> object:
        monitor._tail = 0  # all of it again
        return monitor.drain()

    return drain


if __name__ == "__main__":
    main()
