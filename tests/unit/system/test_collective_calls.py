"""Calls of torch's process groups are noted, and are what they were."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from resilience.core.restart import ENTRY
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import failure
from resilience.monitor.collectives import last_collectives
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.system import collective_calls, flight_recorder
from resilience.system.frames import is_wrapper


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create()
    collective_calls.note_in(RankSide(page))
    yield page
    collective_calls.note_in(None)


def noted(page: Page) -> list[tuple[int, str, bool]]:
    return [(each.sequence, each.operation, each.left_at is not None) for each in MonitorSide(page).collectives()]


def test_calls_from_python_are_noted_with_their_end(group: None, page: Page) -> None:
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    work = dist.broadcast(torch.ones(1), 0, async_op=True)
    assert noted(page) == [(1, "all_reduce", True), (2, "barrier", True), (3, "broadcast", False)]
    assert work is not None and work.wait()
    assert noted(page)[-1] == (3, "broadcast", True)


def test_groups_are_counted_apart_and_anew_in_each_iteration(group: None, page: Page) -> None:
    other = dist.new_group([0])
    before = len(noted(page))
    dist.all_reduce(torch.ones(1), group=other)
    dist.all_reduce(torch.ones(1))
    entries = MonitorSide(page).collectives()[before:]
    assert len({each.group for each in entries}) == 2
    RankSide(page).set_seat(Seat(ENTRY, 0, 1, 1, 0))
    collective_calls.begin()
    assert noted(page) == []
    dist.all_reduce(torch.ones(1), group=other)
    assert noted(page) == [(1, "all_reduce", True)]


def test_nothing_keeps_a_tensor_a_group_or_its_work_alive(page: Page) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    world = dist.group.WORLD
    refs = [weakref.ref(each) for each in (tensor, work, world)]
    assert work is not None
    work.wait()
    dist.destroy_process_group()
    del tensor, work, world
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_failed_call_raises_what_torch_raises_and_has_ended(group: None, page: Page) -> None:
    with pytest.raises(RuntimeError, match="invalid root rank: 7") as error:
        dist.broadcast(torch.ones(1), 7)
    assert noted(page) == [(1, "broadcast", True)]
    assert not any(is_wrapper(frame.file) for frame in failure.describe(error.value).stack)


def test_methods_are_torchs_own_once_nothing_is_noted() -> None:
    collective_calls.note_in(None)  # whatever ran in this process before
    before = dist.ProcessGroup.allreduce, dist.Work.wait
    page = Page.create()
    collective_calls.note_in(RankSide(page))
    assert dist.ProcessGroup.allreduce is not before[0]
    collective_calls.note_in(None)
    assert (dist.ProcessGroup.allreduce, dist.Work.wait) == before


def test_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_COLLECTIVES", "0")
    collective_calls.note_in(None)  # whatever ran in this process before
    before = dist.ProcessGroup.allreduce
    collective_calls.note_in(RankSide(Page.create()))
    assert dist.ProcessGroup.allreduce is before


def test_recorder_of_torch_adds_what_no_call_from_python_starts(group: None, page: Page) -> None:
    dist.all_reduce(torch.ones(1))
    collective_calls.note_recorded()
    collective_calls.note_recorded()  # read again, it is still one collective
    recorded = [each for each in last_collectives(MonitorSide(page).collectives()) if each.is_recorded]
    if not recorded:
        pytest.skip("this torch records no collectives of gloo")
    assert {each.op for each in recorded} == {"gloo:all_reduce"}
    assert {(each.seq, each.members) for each in recorded} == {(1, (0, 1, 1))}


@pytest.mark.parametrize("dump", [None, b"", b"{}", b'{"entries": [{"name": 1}]}'])
def test_recorder_that_cannot_be_read_adds_nothing(monkeypatch: pytest.MonkeyPatch, dump: bytes | None) -> None:
    c10d = sys.modules["torch._C"]._distributed_c10d
    if dump is None:
        monkeypatch.delattr(c10d, "_dump_fr_trace_json", raising=False)
    else:
        monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: dump, raising=False)
    assert flight_recorder.last(0) == []
