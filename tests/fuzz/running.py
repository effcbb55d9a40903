"""Feeds the targets: which input comes when, how long one may take, and what is said of a failure."""

from __future__ import annotations

import itertools
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tests.fuzz.target import Target

LIMIT, WAIT_LIMIT = 30.0, 240.0  # seconds of CPU time, and of time, that one input may take
MEMORY = 8 << 30  # bytes of address space: a size that somebody else chose must not fill the machine
MOST_FAILURES = 20  # after so many different ones there is no use in going on


class TooSlowError(BaseException):
    """An input took longer than LIMIT: it may never end."""


@dataclass
class Outcome:
    """What came of it. refused: inputs that raised what their target may raise. failed: inputs; failures: target, seed
    of the input, and what was raised, one for each place in the code."""

    inputs: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    failures: list[tuple[str, str, str]] = field(default_factory=list)


def feed(
    targets: Sequence[Target], inputs: int, seed: str, progress: Callable[[Outcome], None] = lambda _: None
) -> Outcome:
    """Feed so many inputs, to each target its share, until all are done or too many have failed."""
    outcome = Outcome()
    began = time.monotonic()
    with _bounded_memory():
        for number, target in enumerate(itertools.islice(_drawn(targets, seed), inputs)):
            own = f"{seed}.{number}"
            at = time.perf_counter()
            error, is_refused = _fed(target, own)
            outcome.refused[target.name] += is_refused
            outcome.inputs[target.name] += 1
            outcome.seconds[target.name] += time.perf_counter() - at  # type: ignore[assignment]
            if error:
                outcome.failed += 1
                if _place(error) not in {_place(known) for _, _, known in outcome.failures}:
                    outcome.failures.append((target.name, own, error))
                if len(outcome.failures) >= MOST_FAILURES:
                    break
            if time.monotonic() - began > 10.0:
                began = time.monotonic()
                progress(outcome)
    return outcome


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    """Return what came of all of them together."""
    total = Outcome()
    for outcome in outcomes:
        total.inputs += outcome.inputs
        total.refused += outcome.refused
        total.seconds += outcome.seconds
        total.failed += outcome.failed
        total.failures += outcome.failures
    return total


def once(targets: Sequence[Target], name: str, seed: str) -> str:
    """Feed one input again; return what it raised, empty if nothing."""
    return _fed(next(target for target in targets if target.name == name), seed)[0]


def _drawn(targets: Sequence[Target], seed: str) -> Iterator[Target]:
    """Yield each target once, then at random, by weight."""
    yield from targets
    chance = random.Random(seed)
    weights = list(itertools.accumulate(target.weight for target in targets))
    while True:
        yield from chance.choices(targets, cum_weights=weights, k=1000)


def _fed(target: Target, seed: str) -> tuple[str, bool]:
    """Feed one input. Return what it raised beyond the contract, empty if nothing, and whether it was refused."""
    try:
        with _bounded_time():
            return "", not target.run(seed)
    except TooSlowError:
        return f"took longer than {LIMIT:g} s of CPU time, or {WAIT_LIMIT:g} s\n{traceback.format_exc()}", False
    except Exception:
        return traceback.format_exc(), False


def _place(error: str) -> str:
    """Return the last place in a traceback that is the package's, else the last one."""
    places = re.findall(r'File "(.+)", line (\d+)', error)
    ours = [place for place in places if "/resilience/" in place[0] and "encoding.py" not in place[0]]
    return ":".join((ours or places or [("", "")])[-1])


@contextmanager
def _bounded_time() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, late), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    signal.setitimer(signal.ITIMER_REAL, WAIT_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextmanager
def _bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_used() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
