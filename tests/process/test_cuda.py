"""Restarts over NCCL on real devices. Without CUDA each of these tests is skipped, and says so.

The ranks run `tests.process.on_devices`. NCCL refuses two ranks on one device, so two ranks need two devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from resilience.facts import events
from tests.process.on_devices import MODEL_BYTES, train_over_nccl
from tests.support.ranks import Job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

Start = Callable[..., Job]
TRAIN = f"{train_over_nccl.__module__}:{train_over_nccl.__name__}"
LIMIT = 600.0  # seconds
WITHOUT_SHARP = {"NCCL_NVLS_ENABLE": "0"}  # docs/gpus.md asks for it
WORLDS = pytest.mark.parametrize("world", [1, 2])


def need_devices(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, has {torch.cuda.device_count()}")


@WORLDS
def test_ddp_over_nccl_ends_with_the_same_weights_after_six_restarts(
    start: Start, world: int, record_testsuite_property: Callable[[str, object], None]
) -> None:
    need_devices(world)
    undisturbed = start(world, TRAIN, restarts=0, env=WITHOUT_SHARP).wait(LIMIT)
    job = start(world, TRAIN, restarts=6, env=WITHOUT_SHARP)
    ranks = job.wait(LIMIT)
    assert not job.of(events.RankSignalled)
    assert [rank.value["iteration"] for rank in ranks] == [6] * world, ranks
    weights = [rank.value["weights"] for rank in (*undisturbed, *ranks)]
    assert weights == pytest.approx([weights[0]] * 2 * world)
    told = [record.event for record in job.of(events.AbortGroup)]
    assert [(event.backend, event.outcome) for event in told] == [("nccl", "aborted")] * 6 * world
    longest = max(event.duration_s for event in told)
    record_testsuite_property(f"longest abort of an NCCL group of {world}, seconds", longest)


@WORLDS
def test_torch_nccl_rethrow_cuda_errors_is_0_in_each_iteration(start: Start, world: int) -> None:
    need_devices(world)
    ranks = start(world, TRAIN, restarts=2, env=WITHOUT_SHARP).wait(LIMIT)
    assert [rank.value["rethrow"] for rank in ranks] == [["0"] * 3] * world, ranks


@WORLDS
def test_memory_of_the_device_is_flat_over_25_restarts(start: Start, world: int) -> None:
    need_devices(world)
    for rank in start(world, TRAIN, restarts=25, env=WITHOUT_SHARP).wait(LIMIT):
        _, first, *later = rank.value["allocated"]  # before the first iteration cuBLAS has nothing either
        assert len(later) == 24
        assert max(first, *later) < MODEL_BYTES  # weights, gradients and buckets are of this size each
        assert later[-1] - first < 2**20


@pytest.mark.parametrize("device", [0, 1])
def test_threaded_finalize_runs_on_the_device_of_its_rank(start: Start, device: int) -> None:
    need_devices(device + 1)
    (rank,) = start(1, TRAIN, restarts=2, device=device, env=WITHOUT_SHARP).wait(LIMIT)
    assert rank.value["finalized_on"] == [device] * 2, rank
