"""What signs of life did the rank show since the last look, and how long may it be silent now?

Turns what the page shows into the signs that `core.silences` learns from. One for each rank monitor; what it has
learned goes on to the next worker of the rank (`shown`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from resilience.core.silences import SAME, Hearing, Open, Rule, Shown, Sign, Silence, begin, hear, present, suspect
from resilience.core.watch import Doing
from resilience.monitor.page import Closed, PageView

RUNNING = (Doing.FUNCTION, Doing.ENDING)


class Listener:
    """The silences of one rank."""

    def __init__(self, shown: Shown | None = None) -> None:
        """shown: what workers of this rank have shown before."""
        self._hearing = Hearing(shown=Shown() if shown is None else shown)
        self._iteration: int | None = None

    @property
    def shown(self) -> Shown:
        """What the job has shown on this rank."""
        return self._hearing.shown

    def start_again(self) -> None:
        """Another program shows signs of life from now on."""
        self._hearing = begin(self._hearing)

    def take(self, finished: Iterable[Closed], view: PageView, now: float, is_healthy: bool) -> None:
        """Take what has finished since the last look, and the page as it is after that.

        is_healthy: nothing has ended or interrupted the rank, so its silences are worth learning."""
        shown = [at for at in (view.step_at, view.heartbeat_at, view.ping_at, view.section_left_at) if at is not None]
        has_signs = bool(shown or view.open_sections)
        if view.iteration != self._iteration or view.doing not in RUNNING or not has_signs:
            self._iteration = view.iteration
            self.start_again()
            finished = [entry for entry in finished if entry.at >= view.since]  # the others are of the time before
            if view.doing not in RUNNING or not has_signs:
                return
        signs = [sign for entry in finished for sign in _signs(entry, is_healthy)]
        latest = max((sign.at for sign in signs), default=-math.inf)
        # What came after the page's ring was read. The rest is in the ring, or was at an earlier look.
        signs += [Sign(at, "other", failed=not is_healthy) for at in shown if at > latest + SAME]
        still_open = tuple(Open(section.name, section.entered_at) for section in view.open_sections)
        self._hearing = hear(self._hearing, signs, still_open, now)

    def silence(self, rule: Rule, since: float) -> Silence | None:
        """Return the present silence, None before the first sign of life. since: when the function was entered."""
        return present(rule, self._hearing, since)

    def is_suspect(self, silence: Silence, now: float) -> bool:
        """Whether to tell now that the rank may hang; once in each silence."""
        self._hearing, is_new = suspect(self._hearing, silence, now)
        return is_new


def _signs(entry: Closed, is_healthy: bool) -> Iterable[Sign]:
    if entry.name:
        left_at = entry.at + entry.duration
        yield Sign(left_at, "closed", entry.name, entry.at, failed=entry.failed or not is_healthy)
        return
    if entry.duration:
        yield Sign(entry.at - entry.duration, "other", failed=not is_healthy)  # the first one is nowhere else
    yield Sign(entry.at, "step" if entry.is_step else "heartbeat", failed=not is_healthy)
