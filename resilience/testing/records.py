"""Which records were emitted?  A sink that keeps them, and queries for tests."""

from __future__ import annotations

from collections.abc import Iterable

from resilience.facts.events import Event
from resilience.facts.records import Record


class Recorded:
    """A sink in memory that accepts every record."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def take(self, record: Record) -> bool:
        self.records.append(record)
        return True

    def of(self, kind: type[Event], **fields: object) -> list[Record]:
        """Return the records of one kind of event, in order, whose event or origin has these field values."""
        return matching(self.records, kind, **fields)

    def only(self, kind: type[Event], **fields: object) -> Record:
        """Return the only record of its kind. Raises: AssertionError if there is none, or more than one."""
        matches = self.of(kind, **fields)
        assert len(matches) == 1, f"{len(matches)} records of {kind.__name__} with {fields}, expected one"
        return matches[0]


def matching(records: Iterable[Record], kind: type[Event], **fields: object) -> list[Record]:
    """Return the records of one kind of event whose event, or else origin, has these field values."""
    return [
        record
        for record in records
        if isinstance(record.event, kind) and all(_value(record, name) == value for name, value in fields.items())
    ]


def _value(record: Record, name: str) -> object:
    return getattr(record.event, name) if hasattr(record.event, name) else getattr(record.origin, name)
