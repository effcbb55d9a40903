"""The thread of a worker that shows its stacks."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.monitor import connect, messages
from resilience.system.channel import ChannelClosed


def test_worker_still_shows_its_stacks_after_its_collectives_could_not_be_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    class Channel:
        def __init__(self) -> None:
            self.asked = [messages.encode(messages.ShowStacks(number)) for number in (1, 2)]

        def receive(self, limit: float) -> bytes:
            if not self.asked:
                raise ChannelClosed("over")
            return self.asked.pop(0)

    shown: list[int] = []
    monkeypatch.setattr(connect.collective_calls, "note_recorded", fail)
    monkeypatch.setattr(connect.stacks, "answer", shown.append)
    channel: Any = Channel()
    connect._show_stacks(channel)
    assert shown == [1, 2]
