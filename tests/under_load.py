"""`poe under-load`: do the tests pass while other processes use the machine?

Runs the README's test command, `pytest -n 6`, with the arguments given, while 8 processes burn CPU. They are ended by
pid. Status: pytest's."""

from __future__ import annotations

import subprocess
import sys

from tests.support.load import busy

PROCESSES = 8


def main() -> int:
    with busy(PROCESSES):
        return subprocess.run([sys.executable, "-m", "pytest", "-n", "6", *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
