"""Which collectives does a record name?  For each group the last one, and the first one that the rank has not left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from resilience.core import wait_for
from resilience.facts.interruptions import Collective
from resilience.monitor.page import COLLECTIVES, CollectiveEntry

GROUPS = 8  # the most recently used ones


def last_collectives(entries: Sequence[CollectiveEntry]) -> tuple[Collective, ...]:
    """Return the collectives of a page that a record names. entries: oldest first. If the page or the record has no
    place for groups that the rank used before, the first collective says so."""
    by_group: defaultdict[int, dict[int, CollectiveEntry]] = defaultdict(dict)
    for entry in entries:
        group = by_group.pop(entry.group, {})
        by_group[entry.group] = group | {entry.sequence: entry}  # torch's recorder may be read several times
    groups = list(by_group.values())[-GROUPS:]
    named = [collective for group in groups for collective in _group_collectives(group)]
    if named and (len(by_group) > GROUPS or len(entries) >= COLLECTIVES - 1):
        named[0] = msgspec.structs.replace(named[0], is_cut=True)
    return tuple(named)


def _group_collectives(entries: dict[int, CollectiveEntry]) -> list[Collective]:
    sequences = sorted(entries)
    pending = next((sequence for sequence in sequences if entries[sequence].left_at is None), sequences[-1])
    collectives = []
    for sequence in dict.fromkeys((pending, sequences[-1])):
        entry = entries[sequence]
        before = [entries[earlier].operation for earlier in sequences if earlier < sequence]
        is_left = entry.left_at is not None
        collectives.append(wait_for.entered(entry.group, sequence, entry.operation, is_left, entry.members, before))
    return collectives
