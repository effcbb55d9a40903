"""How much of what happened is on record?  What is missing of a run that is read from files.

Numbers of the whole job are told while the records of nearly all ranks are whole; they are then the whole ranks'
numbers. Beyond that they are not known, and are not told."""

from __future__ import annotations

import msgspec

SHARE_MISSING = 0.1  # of all ranks, up to which the others' numbers stand for the job


class Completeness(msgspec.Struct, frozen=True):
    """What is missing. ranks: of which there should be records. damaged: of these, initial ranks of which records are
    missing, by their own files or their agent's. files: with something missing. lost: records known to be missing."""

    ranks: int = 0
    damaged: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    lost: int = 0

    @property
    def is_whole(self) -> bool:
        return not (self.damaged or self.files)

    @property
    def is_enough(self) -> bool:
        """Whether numbers of the whole job can be told."""
        return self.is_whole or len(self.damaged) <= SHARE_MISSING * self.ranks
