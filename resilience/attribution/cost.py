"""Where did the time of the whole job go?  The ranks' time, as seconds of the job.

A second in which all ranks were at work is a productive second of the job; one in which half of them were is half a
second. The share that was productive is the effective training time ratio (ETTR). `history.rank_time` has the
definition of each cause."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resilience.history.history import History
from resilience.history.rank_time import RankSeconds


class Times(msgspec.Struct, frozen=True):
    """Seconds of the whole job: rank-seconds by the number of ranks. The causes and what is productive add up."""

    total_s: float
    productive_s: float
    startup_s: float
    restart_s: float
    hang_s: float
    rework_s: float
    idle_s: float = 0.0
    ranks: int = 0

    @property
    def ettr(self) -> float | None:
        """The share that was productive, None if nothing was."""
        return self.productive_s / self.total_s if self.total_s > 0 else None


def times(history: History, without: Collection[int] = ()) -> Times:
    """Return where the time of a job went. without: ranks of which records are missing."""
    whole = {rank: of_rank for rank, of_rank in history.spent().items() if rank not in without}
    spent = RankSeconds()
    for of_rank in whole.values():
        spent.add(of_rank)
    unit = max(1, len(whole)) * 1e9
    return Times(
        total_s=spent.total / unit,
        productive_s=spent.productive / unit,
        startup_s=spent.startup / unit,
        restart_s=spent.restart / unit,
        hang_s=spent.hang / unit,
        rework_s=spent.rework / unit,
        idle_s=spent.idle / unit,
        ranks=len(whole),
    )
