"""Which collectives does a record name?  For each group the last one, and the first one that the rank has not left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from resilience.core import wait_for
from resilience.facts.interruptions import Collective
from resilience.monitor.page import CollectiveEntry

GROUPS = 8  # the most recently used ones


def last_collectives(entries: Iterable[CollectiveEntry]) -> tuple[Collective, ...]:
    """Return the collectives of a page that a record names. entries: oldest first."""
    by_group: defaultdict[int, dict[int, CollectiveEntry]] = defaultdict(dict)
    for entry in entries:
        by_group[entry.group] = group = by_group.pop(entry.group, {})  # as the most recently used one
        group[entry.sequence] = entry  # torch's recorder may be read several times
    return tuple(collective for group in list(by_group.values())[-GROUPS:] for collective in _group_collectives(group))


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
