"""Text on its way out: by file, by message, by the store, and in every view."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from resilience.facts import encoding
from resilience.facts.records import Record, from_line, to_line
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.recording import RecordFile
from resilience.telemetry.spans import SpanView
from tests.fuzz import corpus
from tests.fuzz.mutating import text
from tests.fuzz.target import Target


def text_targets(folder: Path) -> list[Target]:
    """Text of any kind goes out, and comes back escaped: by file, by message, by the store, and in every view."""
    records = corpus.records()
    sink = RecordFile(folder / "texts" / "records.jsonl")
    pending: list[Record] = []

    class Taken:
        def take(self, record: Record) -> bool:
            pending.append(record)
            return True

    def there_and_back(_: bytes, chance: random.Random) -> None:
        record = _retold(chance.choice(records), chance)
        expected = encoding.cleaned(record)
        assert from_line(to_line(record)) == expected

    def emitted(_: bytes, chance: random.Random) -> None:
        record = _retold(chance.choice(records), chance)
        pending.clear()
        Emitter(record.origin, [Taken(), sink]).emit(record.event)
        (taken,) = pending
        assert encoding.cleaned(taken) is taken
        assert not sink.dropped

    def views(_: bytes, chance: random.Random) -> None:
        metrics, spans = MetricView(), SpanView()
        for record in chance.sample(records, 20):
            told = encoding.cleaned(_retold(record, chance))
            metrics.take(told)
            spans.take(told)

    return [
        Target("text there and back", 50, (), there_and_back, ()),
        Target("text of an event", 20, (), emitted, ()),
        Target("text in spans and metrics", 3, (), views, ()),
    ]


def _retold(record: Record, chance: random.Random) -> Record:
    """Return the record with other text wherever its type allows any."""

    def other(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            fields = {field.name: field for field in msgspec.structs.fields(type(value))}
            changed = {
                name: text(chance) if field.type is str and chance.random() < 0.5 else other(getattr(value, name))
                for name, field in fields.items()
            }
            return msgspec.structs.replace(value, **changed)
        if isinstance(value, tuple):
            return tuple(text(chance) if isinstance(item, str) else other(item) for item in value)
        return value

    retold: Record = other(record)
    return retold
