"""A worker's link to its monitor: its first signs of progress, and the thread that shows its stacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts.limits import Limits
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


def test_first_signs_that_a_full_channel_does_not_take_are_sent_with_the_next_ones() -> None:
    sent: list[bytes] = []
    takes = iter([False] * 3 + [True] * 2)

    def send(message: bytes) -> bool:
        is_taken = next(takes)
        sent.extend([message] if is_taken else [])
        return is_taken

    page: Any = SimpleNamespace(step_value=3, on_progress=None)
    channel: Any = SimpleNamespace(send=send)
    connect.WorkerLink(page, channel, messages.Welcome(0, 1, Limits()))
    for sign in ("heartbeat", "heartbeat", "step") * 2:
        page.on_progress(sign)
    told: list[Any] = [messages.decode_for_monitor(message) for message in sent]
    assert [(message.sign, message.step) for message in told] == [("heartbeat", 3), ("step", 3)]
    assert page.on_progress is None  # further steps cost nothing
