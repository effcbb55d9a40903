"""How do ranks of any numbers meet in a store?  The protocol behind `StoreMixin.barrier`.

Most ranks take two round trips: they add to a counter, write their rank into the place that the counter gives them, and
wait for one key. A rank whose place shows that all may have come reads the places, and writes that key once there are
enough different ranks. The restart protocol has a barrier of its own (`core.restart`), for ranks from 0."""

from __future__ import annotations

from resilience.core import restart
from resilience.core.restart import Add, Await, Protocol, Read, Set
from resilience.errors import BarrierOverflow, BarrierTimeout

LOOK_AGAIN = 2.0  # seconds in a barrier, after which a rank looks whether one that was killed has kept it closed


def meet(group_name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """Meet `count` participants of any numbers.

    Each arrival takes the next place and writes its rank there; a rank that arrives again takes another place and
    counts once. So a stand-in may repeat the arrival of a rank that was killed at any point."""
    name = f"barrier/{group_name}"
    arrivals = yield Add(f"{name}/arrived", 1)
    yield Set(f"{name}/place/{arrivals - 1}", str(rank))
    yield from gather(group_name, rank, count, limit, arrivals)


def gather(group_name: str, rank: int, count: int, limit: float, arrivals: int, waited: float = 0.0) -> Protocol[None]:
    """Wait until `count` different ranks have arrived. Once there are as many arrivals, look who has arrived.

    arrivals: how many there were at the last look. waited: seconds of the limit that are over.
    Raises: BarrierOverflow, BarrierTimeout."""
    name = f"barrier/{group_name}"
    done = f"{name}/done"
    left = limit - waited
    while True:
        awaited = done
        if arrivals >= count:
            members, unwritten = yield from _members(name, arrivals)
            if len(members) >= count:
                yield Set(done, "1")
                if rank not in members[:count]:
                    raise _overflow(group_name, rank, members.index(rank) + 1, count)
                return
            awaited = unwritten or done
        if left <= 0:
            break
        pause = min(left, LOOK_AGAIN)
        if (yield Await(awaited, pause)):
            if awaited == done:
                return
        else:
            left -= pause
        arrivals = yield Add(f"{name}/arrived", 0)
    members, _ = yield from _members(name, arrivals)
    raise BarrierTimeout(
        f"rank {rank} waited {limit:g} s (timeout) in barrier {group_name!r}, and {len(members)} of {count} ranks "
        "came; a rank is lost or late. Raise the timeout if ranks may be this far apart",
        rank=rank,
        rendezvous_count=count,
        group_name=group_name,
        limit=limit,
        arrived=len(members),
    )


def _members(name: str, arrivals: int) -> Protocol[tuple[list[int], str]]:
    """Return the ranks that have arrived, each once and in order, and the key of the first place that is not written
    yet: its rank is about to write it, or was killed."""
    members: dict[int, None] = {}
    unwritten = ""
    for first in range(0, arrivals, restart.BLOCK):
        keys = tuple(f"{name}/place/{place}" for place in range(first, min(arrivals, first + restart.BLOCK)))
        for key, value in zip(keys, (yield Read(keys)), strict=True):
            if value is None:
                unwritten = unwritten or key
            else:
                members.setdefault(int(value))
    return list(members), unwritten


def _overflow(group_name: str, rank: int, number: int, count: int) -> BarrierOverflow:
    return BarrierOverflow(
        f"rank {rank} is number {number} to reach barrier {group_name!r}, which is made for {count} ranks; "
        "all must pass the same rendezvous_count, and a barrier serves once: use another group_name for the next",
        rank=rank,
        rendezvous_count=count,
        group_name=group_name,
    )
