"""How complete are the records and timings of a run?  Lists what is missing when a run is read from files.

Numbers of the whole job are given while nearly all ranks have complete records; they are computed from these ranks. If
more is missing, the numbers are unknown and are not given."""

from __future__ import annotations

import msgspec

SHARE_MISSING = 0.1  # largest share of ranks with missing records for which the others stand for the job


class Completeness(msgspec.Struct, frozen=True):
    """What is missing. ranks: number of ranks that should have records. damaged: initial ranks with missing records, in
    their own files or their agent's. files: files with missing records; "records" if their folder cannot be read. lost:
    records known to be missing. is_sample: those of some ranks were left out to save time; those read stand for all.
    timings: files of timings that cannot be read, if timings were read; "timings" if their folder cannot be read."""

    ranks: int = 0
    damaged: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    lost: int = 0
    is_sample: bool = False
    timings: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.has_all_records and not self.timings

    @property
    def has_all_records(self) -> bool:
        """Return True if incidents and restarts are known completely."""
        return not (self.damaged or self.files)

    @property
    def is_enough(self) -> bool:
        """Return True if numbers of the whole job can be given."""
        return self.has_all_records or (self.ranks > 0 and len(self.damaged) <= SHARE_MISSING * self.ranks)


WHOLE = Completeness()
