"""How do ranks with arbitrary numbers meet in a store?  The protocol behind `StoreMixin.barrier`.

Most ranks take two round trips: they add to a counter and write their rank into the place with that number. Then they
wait for one key. If a rank's place shows that all ranks may have arrived, it reads the places. Once there are enough
different ranks, it writes that key. The restart protocol has its own barrier (`core.restart`), for ranks from 0."""

from __future__ import annotations

from resilience.core import restart
from resilience.core.restart import Add, Await, Protocol, Read, Set
from resilience.errors import BarrierOverflow, BarrierTimeout
from resilience.facts import in_words

LOOK_AGAIN = 2.0  # seconds in a barrier until a rank checks whether a killed one has kept it closed


def gather(group_name: str, rank: int, count: int, limit: float, arrivals: int, waited: float = 0.0) -> Protocol[None]:
    """Wait until `count` different ranks have arrived. Read who has arrived once the number of arrivals is enough.

    arrivals: number at the last check. waited: seconds of the limit already spent.
    Raises: BarrierOverflow, BarrierTimeout."""
    name = f"barrier/{group_name}"
    done = f"{name}/done"
    remaining = limit - waited
    given_up: set[str] = set()  # places whose owners were probably killed before they wrote their ranks
    while True:
        awaited = done
        if arrivals >= count:
            members, unwritten = yield from _members(name, arrivals, count)
            late = [place for place in unwritten if place not in given_up]
            # The owner of an earlier place goes before a surplus rank, even if it writes its rank later.
            if len(members) >= count and (not late or remaining <= 0):
                yield Set(done, "1")
                if rank not in members[:count]:
                    raise _overflow(group_name, rank, members.index(rank) + 1, count)
                return
            awaited = (late or unwritten or [done])[0]
        if remaining <= 0:
            break
        pause = min(remaining, LOOK_AGAIN)
        if (yield Await(awaited, pause)):
            if awaited == done:
                return
        else:
            remaining -= pause
            given_up.add(awaited)
        arrivals = yield Add(f"{name}/arrived", 0)
    members, _ = yield from _members(name, arrivals, count)
    raise BarrierTimeout(
        f"rank {rank} waited {limit:g} s (timeout) in barrier {group_name!r}, and {len(members)} of "
        f"{in_words.count(count, 'rank')} came; a rank is lost or late. Raise the timeout if ranks may "
        "arrive this far apart",
        rank=rank,
        rendezvous_count=count,
        group_name=group_name,
        limit=limit,
        arrived=len(members),
    )


def _members(name: str, arrivals: int, count: int) -> Protocol[tuple[list[int], list[str]]]:
    """Return the ranks that have arrived, each once and in order, and the keys of the places without a rank before that
    of the rank that completes the barrier. Their owners are about to write them, or were killed."""
    members: dict[int, None] = {}
    unwritten: list[str] = []
    for first in range(0, arrivals, restart.BLOCK):
        keys = tuple(f"{name}/place/{place}" for place in range(first, min(arrivals, first + restart.BLOCK)))
        for key, value in zip(keys, (yield Read(keys)), strict=True):
            if value is not None:
                members.setdefault(int(value))
            elif len(members) < count:
                unwritten.append(key)
    return list(members), unwritten


def _overflow(group_name: str, rank: int, number: int, count: int) -> BarrierOverflow:
    return BarrierOverflow(
        f"rank {rank} is number {number} to reach barrier {group_name!r}, which is for "
        f"{in_words.count(count, 'rank')}; all must pass the same rendezvous_count, and a barrier serves once: use "
        "another group_name for the next",
        rank=rank,
        rendezvous_count=count,
        group_name=group_name,
    )
