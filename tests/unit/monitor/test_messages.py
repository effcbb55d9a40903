"""What is no message of ours is refused, whoever sends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.errors import DecodeError
from resilience.facts.deadlines import Start
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Frame, Interruption, InterruptionRecord, ThreadStack
from resilience.facts.limits import First, Limit, Limits, Outside, Rule
from resilience.facts.phases import Phases
from resilience.monitor import messages
from resilience.system.channel import LIMIT

LIMITS = Limits(step=Limit(None, 5.0), sections={"data": Limit(1.0)}, warmup={"data": Limit()}, warmup_occurrences=3)
ORIGIN = Origin("job", "node", "rank", 7, initial_rank=1)
DECODERS: dict[Callable[[bytes], Any], list[Any]] = {
    messages.decode_for_monitor: [
        messages.Attached(True),
        messages.Armed(at=1.0),
        messages.RankRequest("Continue", "why"),
        messages.NewLimits(LIMITS),
        messages.FitFailed("train", "OverflowError: math range error"),
        messages.LimitsUnread("/shared/resilience-timeouts.json", "PermissionError: [Errno 13]"),
    ],
    messages.decode_for_rank: [messages.Welcome(1, 4, LIMITS), messages.Refused("why"), messages.Ready()],
    messages.decode_from_agent: [
        messages.OpenMonitor(1),
        messages.Assigned(7, 123, ORIGIN, b"/run", LIMITS, (b"out",), link=messages.Attachment(7, True, 1.5, LIMITS)),
        messages.Adopt("job", "node", b"/run", LIMITS),
        messages.Dismissed("why"),
        messages.Look(),
        messages.ProbeMonitor(3),
        messages.Leave(),
    ],
    messages.decode_for_agent: [
        messages.Found(InterruptionRecord(1, Interruption.HARD_TIMEOUT), ended=False),
        messages.Requested("Continue", "why", 1, 7),
        messages.Connected(7, messages.Attachment(7, False)),
        messages.Looked(7),
        messages.Alive(3),
    ],
}


@pytest.mark.parametrize("decode", DECODERS)
def test_what_is_sent_is_what_is_read(decode: Callable[[bytes], Any]) -> None:
    for message in DECODERS[decode]:
        assert decode(messages.encode(message)) == message


@pytest.mark.parametrize("decode", DECODERS)
def test_messages_of_another_line_are_refused(decode: Callable[[bytes], Any]) -> None:
    own = {type(message) for message in DECODERS[decode]}
    for other in DECODERS.values():
        for message in other:
            if type(message) not in own and not isinstance(message, messages.NewLimits | messages.Ready):
                with pytest.raises(DecodeError):
                    decode(messages.encode(message))


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    for decode in DECODERS:
        try:
            decoded = decode(noise)
        except DecodeError:
            continue
        assert messages.encode(decoded)  # noise that happens to be a message is one


def test_longer_message_than_a_line_carries_is_refused() -> None:
    whole = messages.encode(messages.RankRequest("Continue", "x" * LIMIT))
    with pytest.raises(DecodeError, match="more than"):
        messages.decode_for_monitor(whole)


def test_shortened_record_fits_whatever_it_held() -> None:
    frames = tuple(Frame("file" * 50, number, "function") for number in range(500))
    record = InterruptionRecord(
        1,
        Interruption.HARD_TIMEOUT,
        message="m" * LIMIT,
        stacks=(ThreadStack("main", frames),),
        log_tail=("line" * 100,) * 200,
    )
    found = messages.Found(messages.shortened(record), ended=True)
    assert len(messages.encode(found)) < LIMIT
    assert found.record.rank == 1


def test_limits_are_shortened_only_as_far_as_a_message_needs() -> None:
    names = [f"validation/{number:03}" for number in range(800)]
    few = {name: Limit(hard=60.0) for name in names[:10]}
    configured = Limits(step=Limit(hard=9.0))
    learned = Limits(sections=few, rule=Rule(), unlearned=configured)
    phases = Outside(Limit(hard=3.0), Phases(tuple(range(0, 20_000, 20)), 20_000))
    outside = msgspec.structs.replace(learned, outside=dict.fromkeys(names[:100], phases))
    on_trial = msgspec.structs.replace(learned, shadow=outside)
    many = msgspec.structs.replace(
        learned, first=dict.fromkeys(names, First(16, dict.fromkeys(get_args(Start), Limit(hard=9.0))))
    )
    trial, beyond, every = "limits on trial", "limits on trial, limits outside known phases", "all learned limits"
    for limits, expected, left_out in (
        (learned, learned, ""),
        (on_trial, learned, trial),
        (outside, learned, beyond),
        (many, msgspec.structs.replace(configured, rule=Rule()), every),
    ):
        fitting, text = messages.with_fitting_limits(messages.NewLimits(limits))
        assert (fitting, text) == (messages.NewLimits(expected), left_out)
        assert len(messages.encode(fitting)) <= LIMIT


def test_limits_of_more_sections_than_a_message_holds_are_left_out_and_the_worker_is_watched() -> None:
    limits = Limits(
        step=Limit(hard=9.0),
        rule=Rule(),
        sections={f"validation/{number:04}": Limit(hard=60.0) for number in range(1000)},
    )
    link = messages.Attachment(7, True, limits=limits)  # of a lost monitor: its rank has set limits of its own
    assigned = messages.Assigned(7, 1, ORIGIN, b"/runs", limits, link=link)
    fitting, left_out = messages.with_fitting_limits(assigned)
    assert left_out == "all limits of sections and silences, all learned limits"
    assert fitting == msgspec.structs.replace(assigned, limits=Limits(step=Limit(hard=9.0)))
    assert len(messages.encode(fitting)) <= LIMIT


def test_longest_limits_that_a_rank_may_set_fit_all_messages_that_send_them_on() -> None:
    limits, path = Limits(), b"/scratch/" + b"x" * 240
    for number in range(10_000):
        longer = msgspec.structs.replace(limits, sections={**limits.sections, f"section {number}": Limit(hard=1.5)})
        if messages.bytes_of(longer) > messages.MOST_LIMITS:
            break
        limits = longer
    link = messages.Attachment(2**22, True, 1e6)
    sent: list[Any] = [
        messages.NewLimits(limits),
        messages.Connected(2**22, msgspec.structs.replace(link, limits=limits)),
        messages.Assigned(2**22, 2**62, ORIGIN, path, limits, (path, path), "x" * 100, link),
    ]
    assert messages.bytes_of(limits) > messages.MOST_LIMITS - 100
    assert [len(messages.encode(message)) <= LIMIT for message in sent] == [True] * 3
