"""What is a target?  One reader, the inputs that it accepts, and what it may raise.

A target takes one input. What it may raise is its contract and stands beside it; anything else is a failure."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilience.errors import DecodeError
from tests.fuzz.mutating import mutated

Feed = Callable[[bytes, random.Random], object]


class RefusedError(Exception):
    """A command said what is wrong with its run, and showed nothing."""


@dataclass(frozen=True)
class Target:
    """weight: its share of all inputs. inputs: undamaged ones. may_raise: what the reader promises."""

    name: str
    weight: float
    inputs: Sequence[bytes]
    feed: Feed
    may_raise: tuple[type[Exception], ...] = (DecodeError,)

    def run(self, seed: str) -> bool:
        """Feed the input of this seed; return False if it was refused. Raises: what the target raises beyond its
        contract."""
        chance = random.Random(f"{self.name}/{seed}")
        data = mutated(chance.choice(self.inputs), chance, self.inputs) if self.inputs else b""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that are not known
            try:
                self.feed(data, chance)
            except self.may_raise:
                return False
        return True


def only_bytes(decode: Callable[[bytes], object]) -> Feed:
    """Return the feed of a decoder, which makes no choices."""
    return lambda data, _: decode(data)
