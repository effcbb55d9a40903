"""A job on a virtual clock, watched by the rule for silences as a rank's monitor does it.

Signs reach the rule in batches, as a monitor reads them from the page. The rule is asked in each long silence what it
would have done meanwhile. Silences shorter than LOOK end before the next look; `shortest_limit` shows that none of them
could have been ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from resilience.core.silences import (
    Hearing,
    PauseInSection,
    SignOfLife,
    Silence,
    begin_cycle,
    hear,
    present,
    suspect,
)
from resilience.facts.limits import Rule

LOOK = 15.0  # seconds between two looks of the monitor, at most


class SilentJob:
    """One rank. `pass_time` lets it be silent; what the rule does meanwhile is counted.

    judged: number of silences for which a limit held. shortest_limit: the shortest limit at any look, in seconds."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = Rule() if rule is None else rule
        self.now = 1000.0
        self.hearing = Hearing()
        self.kills: list[Silence] = []
        self.suspicions: list[tuple[float, Silence]] = []  # seconds of silence, and which
        self.judged = 0
        self.shortest_limit = math.inf
        self._began = self._looked_at = self.now
        self._unjudged = 0
        self._signs: list[SignOfLife] = []
        self._open: list[PauseInSection] = []

    # -- what the program does ------------------------------------------------------------------

    def start_again(self) -> None:
        """Begin another cycle."""
        self._look()
        self.hearing = begin_cycle(self.hearing.shown)
        self._began = self.now
        self._open.clear()

    def step(self) -> None:
        self._signs.append(SignOfLife(self.now, "step"))

    def heartbeat(self) -> None:
        self._signs.append(SignOfLife(self.now, "heartbeat"))

    @contextmanager
    def section(self, name: str, failed: bool = False) -> Iterator[None]:
        section = PauseInSection(name, self.now)
        self._open.append(section)
        yield
        self._open.remove(section)
        self._signs.append(SignOfLife(self.now, "closed", name, section.at, failed))

    def pass_time(self, seconds: float) -> None:
        """Be silent for so long, and let the monitor look as often as it would."""
        self._unjudged += 1
        if seconds < LOOK:
            self.now += seconds
            if self.now >= self._looked_at + LOOK:
                self._look()
            return
        until = self.now + seconds
        self._look()
        is_killed = False
        while self.now < until:
            self.now = min(until, self.now + LOOK)
            self._look()
            is_killed = is_killed or self._is_exceeded()

    def hang(self) -> float:
        """Be silent for ever; answers after how many seconds the rule ends the rank."""
        self._look()
        silence = self.silence
        assert silence is not None, "the rule is not armed"
        return silence.since + silence.allowed - self.now

    # -- what the rule says ---------------------------------------------------------------------

    @property
    def silence(self) -> Silence | None:
        self._look()
        return present(self.rule, self.hearing, self._began)

    @property
    def is_learned(self) -> bool:
        self._look()
        return self.silence is not None and self.silence.is_learned

    def _look(self) -> None:
        self.hearing = hear(self.hearing, self._signs, tuple(self._open))
        self._signs.clear()
        self._looked_at = self.now
        silence = present(self.rule, self.hearing, self._began)
        if silence is not None:
            self.judged += self._unjudged
            self.shortest_limit = min(self.shortest_limit, silence.allowed)
        self._unjudged = 0

    def _is_exceeded(self) -> bool:
        silence = present(self.rule, self.hearing, self._began)
        if silence is None:
            return False
        self.hearing, is_new = suspect(self.hearing, silence, self.now)
        if is_new:
            self.suspicions.append((self.now - silence.since, silence))
        if self.now < silence.since + silence.allowed:
            return False
        self.kills.append(silence)
        return True
