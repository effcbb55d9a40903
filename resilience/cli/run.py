"""`resilience run`: torchrun that replaces dead and hung workers, and accounts for it.

The parser and everything behind it live in `resilience.launcher`; torch is imported there."""

from __future__ import annotations

from collections.abc import Sequence

from resilience.launcher.main import main as launcher_main


def main(arguments: Sequence[str]) -> int:
    """Run the launcher with the arguments behind the verb; return its exit status."""
    return launcher_main(arguments)
