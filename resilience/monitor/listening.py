"""Which signs of life has the rank shown since the last check, and how long may it be silent now?

Turns the page's content into the signs of life that `core.silences` learns from. There is one Listener per rank
monitor; the rank's next worker inherits what it has learned (`shown`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from resilience.core.observation import Doing
from resilience.core.silences import (
    SAME,
    PauseInSection,
    Shown,
    SignOfLife,
    Silence,
    begin,
    begin_cycle,
    hear,
    present,
    suspect,
)
from resilience.core.standstills import Standstill
from resilience.facts.limits import Rule
from resilience.monitor.page import Closed, PageView

RUNNING = (Doing.FUNCTION, Doing.ENDING)


class Listener:
    """The silences of one rank."""

    def __init__(self, shown: Shown | None = None, is_first_sign_expected: bool = True) -> None:
        """shown: what earlier workers of this rank have shown. is_first_sign_expected: if they have shown rounds, this
        one must show signs too."""
        self._hearing = begin_cycle(Shown() if shown is None else shown)
        if not is_first_sign_expected:
            self.expect_nothing()
        self._iteration: int | None = None
        self._is_ending = False

    @property
    def shown(self) -> Shown:
        """The pauses that the job has shown on this rank."""
        return self._hearing.shown

    def expect_nothing(self) -> None:
        """Note that signs of life may never come, although the rank is well."""
        self._hearing = msgspec.structs.replace(self._hearing, is_expected=False)

    def start_again(self) -> None:
        """Begin again: another program shows signs of life from now on."""
        self._hearing = begin(self._hearing)

    def take(
        self,
        finished: Iterable[Closed],
        view: PageView,
        is_healthy: bool,
        standstills: Iterable[Standstill] = (),
    ) -> None:
        """Take the entries finished since the last check, and the page as it is after that.

        is_healthy: the rank was neither ended nor interrupted, so its silences are worth learning. standstills: of this
        process."""
        self._is_ending = view.doing is Doing.ENDING
        has_signs = view.last_sign_at is not None
        if view.iteration != self._iteration or view.doing not in RUNNING or not has_signs:
            if view.iteration != self._iteration is not None:
                self._hearing = begin_cycle(self.shown)
            else:
                self.start_again()
            self._iteration = view.iteration
            finished = [entry for entry in finished if entry.at >= view.since]  # the others belong to the time before
            if view.doing not in RUNNING or not has_signs:
                return
        signs = [sign for entry in finished for sign in _signs(entry, is_healthy)]
        latest = max((sign.at for sign in signs), default=-math.inf)
        # Signs that came after the page's ring was read. The ring, now or at an earlier check, has the others.
        signs += [SignOfLife(at, "other", failed=not is_healthy) for at in view.sign_times if at > latest + SAME]
        still_open = tuple(PauseInSection(section.name, section.entered_at) for section in view.open_sections)
        self._hearing = hear(self._hearing, signs, still_open, standstills)

    def silence(self, rule: Rule, since: float) -> Silence | None:
        """Return the present silence, None if no sign is expected. since: time of entry into the function."""
        return present(rule, self._hearing, since, self._is_ending)

    def is_suspect(self, silence: Silence, now: float) -> bool:
        """Return True if it is time to report that the rank may hang; once per silence."""
        self._hearing, is_new = suspect(self._hearing, silence, now)
        return is_new


def _signs(entry: Closed, is_healthy: bool) -> Iterable[SignOfLife]:
    if entry.begins is not None or entry.away:
        return
    if entry.name:
        left_at = entry.at + entry.duration
        yield SignOfLife(left_at, "closed", entry.name, entry.at, failed=entry.failed or not is_healthy)
        return
    if entry.duration:
        # Only this entry shows the first one.
        yield SignOfLife(entry.at - entry.duration, "other", failed=not is_healthy)
    yield SignOfLife(entry.at, "step" if entry.is_step else "heartbeat", failed=not is_healthy)
