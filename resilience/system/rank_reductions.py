"""What is the largest value of each name over all ranks, or the sum of its histograms?

Uses torch.distributed if the process has a group; otherwise this rank's values are the result. Names may differ between
ranks, so they are agreed first. One rank after another that has names not yet agreed broadcasts them, until no rank has
any (one broadcast for most jobs). Then follows one all-reduce. No rank receives data that grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from resilience.errors import DecodeError
from resilience.facts import encoding

_names = encoding.reader(list[bytes], "msgpack")


def over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the largest value over all ranks for each name. Values are 0 or more.

    A collective of the default group: all ranks call it. Raises: what collectives raise; DecodeError for names of
    another rank that cannot be read."""
    dist: Any = sys.modules.get("torch.distributed")  # without this import there is no group
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return dict(values)
    names = _agreed_names(dist, sorted(values))
    reduced = _maxima(dist, [values.get(name, -1.0) for name in names])
    return dict(zip(names, reduced, strict=True))


def sums_over_ranks(histograms: Mapping[str, Mapping[int, int]], size: int) -> dict[str, dict[int, int]]:
    """Return the histograms of each name, added up over ranks. Buckets are from 0 to size - 1.

    A collective of the default group, with `size` numbers per name. Raises: as `over_ranks`."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {name: dict(buckets) for name, buckets in histograms.items()}
    import torch

    summed: dict[str, dict[int, int]] = {}
    for name in _agreed_names(dist, sorted(histograms)):
        tensor = torch.zeros(size, dtype=torch.int64)
        for number, count in histograms.get(name, {}).items():
            tensor[number] = count
        tensor = tensor.to(_device(dist))
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        tensor = tensor.cpu()
        filled = tensor.nonzero().flatten().tolist()
        summed[name] = {int(number): int(tensor[number]) for number in filled}
    return summed


def _agreed_names(dist: ModuleType, own_names: list[str]) -> list[str]:
    """Return the names of all ranks, in the same order on all ranks."""
    agreed: list[str] = []
    while True:
        not_agreed = [name for name in own_names if name not in agreed]
        (speaker,) = _maxima(dist, [float(dist.get_rank()) if not_agreed else -1.0])
        if speaker < 0:
            return agreed
        agreed += _broadcast(dist, not_agreed, int(speaker))


def _broadcast(dist: ModuleType, names: list[str], speaker: int) -> list[str]:
    """Return the speaker's names, which need not be UTF-8. Data from another rank are never unpickled.

    Raises: DecodeError; what collectives raise."""
    import torch

    is_speaker = dist.get_rank() == speaker
    text = encoding.to_msgpack([name.encode("utf-8", "surrogatepass") for name in names]) if is_speaker else b""
    (length,) = _maxima(dist, [float(len(text))])
    data = torch.zeros(int(length), dtype=torch.uint8)
    if is_speaker:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    data = data.to(_device(dist))
    dist.broadcast(data, src=speaker)
    try:
        return [name.decode("utf-8", "surrogatepass") for name in _names(bytes(data.cpu().tolist()))]
    except UnicodeDecodeError as error:
        raise DecodeError(f"a name of rank {speaker} is not text: {error}") from error


def _maxima(dist: ModuleType, values: list[float]) -> list[float]:
    import torch

    tensor = torch.tensor(values, dtype=torch.float64, device=_device(dist))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    reduced: list[float] = tensor.tolist()
    return reduced


def _device(dist: ModuleType) -> Any:
    import torch

    is_for_cpu = "cpu:" in dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    return torch.device("cpu") if is_for_cpu else torch.device("cuda", torch.cuda.current_device())
