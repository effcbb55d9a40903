"""How complete are the records of a run?  Lists what is missing when a run is read from files.

Numbers of the whole job are given while nearly all ranks have complete records; they are computed from these ranks. If
more is missing, the numbers are unknown and are not given."""

from __future__ import annotations

import msgspec

SHARE_MISSING = 0.1  # largest share of ranks with missing records for which the others stand for the job


class Completeness(msgspec.Struct, frozen=True):
    """What is missing. ranks: number of ranks that should have records. damaged: initial ranks with missing records, in
    their own files or their agent's. files: files with missing records; "records" if their folder cannot be read. lost:
    records known to be missing. is_sample: those of some ranks were left out to save time; those read stand for all."""

    ranks: int = 0
    damaged: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    lost: int = 0
    is_sample: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.damaged or self.files)

    @property
    def is_enough(self) -> bool:
        """Return True if numbers of the whole job can be given."""
        return self.is_whole or (self.ranks > 0 and len(self.damaged) <= SHARE_MISSING * self.ranks)
