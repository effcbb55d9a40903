"""Where did the time of the whole job go?  Converts the ranks' time to seconds of the job.

A second in which all ranks worked is one productive second of the job. A second in which half of them worked is half a
second. The productive share is the effective training time ratio (ETTR). `history.rank_time` defines each cause."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resilience.facts.in_words import seconds
from resilience.history.history import History
from resilience.history.wrapped_rank import RankSeconds


class Times(msgspec.Struct, frozen=True):
    """Seconds of the whole job: rank-seconds divided by the number of ranks. productive_s and all causes add up to
    total_s. rework_s: the known part; None if none is known, then it counts as productive. unknown_s: more seconds, of
    running workers that have shown no progress: they load, or send no signals."""

    total_s: float
    productive_s: float
    startup_s: float
    restart_s: float
    hang_s: float
    rework_s: float | None
    idle_s: float = 0.0
    ranks: int = 0
    unknown_s: float = 0.0

    @property
    def ettr(self) -> float | None:
        """Return the productive share of the known time. None if there was none, or if no worker has shown progress."""
        is_known = self.total_s > 0 and (self.productive_s > 0 or self.unknown_s == 0)
        return self.productive_s / self.total_s if is_known else None


def times(history: History, without: Collection[int] = (), has_unknown_rework: bool = False) -> Times:
    """Return where the time of a job went. without: ranks to leave out because records are missing. has_unknown_rework:
    the rework of an incident is not known."""
    by_rank = {rank: of_rank for rank, of_rank in history.spent().items() if rank not in without}
    spent = RankSeconds()
    for of_rank in by_rank.values():
        spent.add(of_rank)
    unit = max(1, len(by_rank)) * 1e9
    return Times(
        total_s=spent.total / unit,
        productive_s=spent.productive / unit,
        startup_s=spent.startup / unit,
        restart_s=spent.restart / unit,
        hang_s=spent.hang / unit,
        rework_s=None if has_unknown_rework and not spent.rework else spent.rework / unit,
        idle_s=spent.idle / unit,
        ranks=len(by_rank),
        unknown_s=spent.unknown / unit,
    )


def time_unknown_in_words(spent: Times) -> str:
    """Return how much time may have been productive or start-up."""
    return f"{seconds(spent.unknown_s)} without a signal of progress since the workers' start"
