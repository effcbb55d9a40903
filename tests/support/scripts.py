"""Runs a script in a rank as `python script.py` would, without importing torch again."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence


def run(path: str, arguments: Sequence[str] = ()) -> None:
    """Be the script: a rank's function, for `start(world, "tests.support.scripts:run", path=...)`."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
