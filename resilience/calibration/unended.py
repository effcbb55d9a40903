"""What do the occurrences show that did not end by themselves?

Some are known as hangs, by the verdict of their incident (`calibrate.cuts`). They are left out, and the user is told.
One that was cut off before it took unusually long shows that it lasted at least that long. All others are of unknown
health, because a limit ended them or because they took unusually long: they may have been healthy, and may have hung.
`calibration.fitting` raises the limit for these, within a bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from resilience.facts.in_words import count

End = Literal["ok", "cut", "killed", "hang"]


class Cut(msgspec.Struct, frozen=True):
    """An occurrence that had not ended by itself after `seconds`. killed: a limit ended it, and its health is unknown;
    hang: it was a hang; cut: an exception, a restart or the end of the run cut it off."""

    seconds: float
    end: End


class Unended(msgspec.Struct, frozen=True):
    """The occurrences of one deadline that did not end by themselves, in seconds. exposure: how many were cut off
    before they took unusually long. killed, cut: of unknown health. A limit ended the former."""

    exposure: int
    hangs: tuple[float, ...]
    killed: tuple[float, ...]
    cut: tuple[float, ...]

    @classmethod
    def of(cls, cuts: Iterable[Cut], usual_s: float) -> Unended:
        """usual_s: an occurrence that was cut off later than that took unusually long."""
        by_end: dict[End, list[float]] = {"cut": [], "killed": [], "hang": []}
        for cut in cuts:
            by_end[cut.end].append(cut.seconds)
        long = tuple(seconds for seconds in by_end["cut"] if seconds > usual_s)
        return cls(len(by_end["cut"]) - len(long), tuple(by_end["hang"]), tuple(by_end["killed"]), long)

    @property
    def unknown(self) -> tuple[float, ...]:
        """Return the seconds of those of unknown health."""
        return (*self.killed, *self.cut)

    @property
    def in_words(self) -> str:
        """Return what is known of those of unknown health."""
        causes = (("a limit ended", self.killed), ("an exception, a restart or the end of the run cut off", self.cut))
        ended = " and ".join(f"{cause} {_counted(lasted)}" for cause, lasted in causes if lasted)
        return f"{ended}; it is not known whether {self.they} hung"

    @property
    def they(self) -> str:
        """Return the pronoun for those of unknown health."""
        return "it" if len(self.unknown) == 1 else "they"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is known, without any effect on a limit."""
        return (*((self.in_words,) if self.unknown else ()), *self.left_out)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return a warning if some are left out."""
        return (f"{_counted(self.hangs)}, hung: left out",) if self.hangs else ()


def _counted(lasted: Sequence[float]) -> str:
    which = " after" if len(lasted) == 1 else ", the longest after"
    return f"{count(len(lasted), 'occurrence')}{which} {max(lasted):.4g} s"
