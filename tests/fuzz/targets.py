"""What is fed with damaged bytes: every decoder, every reader of a file, every command that reads a run.

`test_coverage` finds a decoder or a command that is missing here."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.commands import command_targets
from tests.fuzz.decoders import decoder_targets
from tests.fuzz.readers import file_targets
from tests.fuzz.target import Target
from tests.fuzz.texts import text_targets


def targets(folder: Path) -> list[Target]:
    """Return all targets. folder: an empty one, whose files they use."""
    return [*decoder_targets(folder), *text_targets(folder), *file_targets(folder), *command_targets(folder)]
