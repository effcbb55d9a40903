"""Is this rank late compared with its own past?  Weighs silences below its limits, and limits on trial; ends nothing.

`core.shadow` and `core.suspicion` decide. This object keeps what they know between two checks of the monitor, looks at
the rank when they ask for it, and emits what they find. The observation shows `core.watch` a confirmed suspicion."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from resilience.core import shadow, suspicion
from resilience.core.observation import Observation, Suspicion
from resilience.core.watch import Finding, last_signs
from resilience.facts import deadlines, events
from resilience.facts.interruptions import Hang
from resilience.facts.limits import Learned, Limits


class Suspicions:
    """The suspicions of one rank. Times are monotonic seconds.

    look: returns the rank's present position. seek_others: asks for the positions of the node's other ranks;
    `others_found` takes the answer, if one comes."""

    def __init__(
        self,
        look: Callable[[], events.WorkerSeen],
        seek_others: Callable[[], None],
        emit: Callable[..., None],
    ) -> None:
        self._look = look
        self._seek = seek_others
        self._emit = emit
        self._thresholds: Limits | None = None  # beyond which the rank is late
        self._late = shadow.NOTHING  # silences beyond these, already reported
        self._on_trial = shadow.NOTHING  # silences beyond limits on trial, already reported
        self._suspect: suspicion.Suspect | None = None
        self._sought_at = 0.0

    def expect(self, limits: Limits) -> None:
        """Compare the rank with the durations that these limits were learned from."""
        self._thresholds = suspicion.limits_of(limits)

    def forget(self) -> None:
        """Suspect nothing from now on: the learned durations no longer hold."""
        self._thresholds = self._suspect = None

    @property
    def confirmed(self) -> Suspicion | None:
        """The suspicion for which the rank may be ended before its limit."""
        suspect = self._suspect
        if suspect is None or not suspect.is_confirmed:
            return None
        return Suspicion(suspect.limit, suspect.began, suspect.allowed)

    def weigh(self, limits: Limits, observation: Observation, is_ending: bool, now: float) -> None:
        """Report what limits on trial would have done, and silences that are longer than ever before.

        limits: those in force. is_ending: the rank is gone, or it is being ended."""
        self._on_trial, exceeded = shadow.weigh(limits.shadow, observation, self._on_trial, now)
        for finding in exceeded:
            self._emit(events.TimeoutsShadowAlarm(finding.limit, finding.allowed, finding.silent_for))
        if is_ending:
            return
        self._late, findings = shadow.weigh(self._thresholds, observation, self._late, now)
        self._look_again(now)
        began = {} if self._thresholds is None else last_signs(self._thresholds, observation)
        for finding in findings:
            learned = limits.learned.get(deadlines.deadline_of_limit(finding.limit))
            if learned is not None:
                self._suspected(finding, learned, began.get(finding.limit, now - finding.silent_for))

    def next_look(self, limits: Limits, observation: Observation, now: float) -> float | None:
        """Return when the next silence may be late, or a suspect is due for another look; None if never."""
        moments = (
            shadow.next_look(limits.shadow, observation, now),
            shadow.next_look(self._thresholds, observation, now),
            None if self._suspect is None else self._suspect.look_at,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def others_found(self, hangs: Mapping[int, Hang | None], missing: tuple[int, ...], elsewhere: int) -> None:
        """Take the positions of the node's other ranks. hangs: how they hang, by rank."""
        suspect, now = self._suspect, time.monotonic()
        if suspect is None or suspect.look_at is not None or suspect.is_confirmed:
            return
        self._suspect = suspicion.compared(suspect, hangs, len(missing), now)
        waiting = tuple(sorted(rank for rank, hang in hangs.items() if hang == "in_collective"))
        busy = tuple(sorted(hangs.keys() - set(waiting)))
        is_confirmed, took = self._suspect.is_confirmed, now - self._sought_at
        positions = (waiting, busy, missing, elsewhere)
        self._emit(events.RankSuspicionCompared(suspect.limit, *positions, suspect.looks, is_confirmed, took))

    def _suspected(self, finding: Finding, learned: Learned, began: float) -> None:
        """Record the rank's position, long before its learned limit. began: of the silence."""
        looked_at = time.monotonic()
        position = self._look()
        look_s = time.monotonic() - looked_at
        if self._suspect is None:
            self._suspect = suspicion.suspected(finding, position.hang, position.stack, began)
            self._seek_others()
        self._emit(
            events.RankSuspected(
                finding.limit,
                finding.silent_for,
                learned.longest_s,
                learned.timeout_s,
                position.hang,
                position.stack,
                position.step,
                look_s,
            )
        )

    def _look_again(self, now: float) -> None:
        """Drop the suspicion once the rank shows a sign of life or has moved; look at it again when that is due."""
        suspect = self._suspect
        if suspect is None:
            return
        if not shadow.lasts(self._late, suspect.limit, suspect.began):
            self._suspect = None
        elif suspect.look_at is not None and now >= suspect.look_at:
            position = self._look()
            self._suspect = suspicion.looked_again(suspect, position.hang, position.stack)
            self._seek_others()

    def _seek_others(self) -> None:
        if self._suspect is not None and not self._suspect.waits_for_others:
            self._sought_at = time.monotonic()
            self._seek()
