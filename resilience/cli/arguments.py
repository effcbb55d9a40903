"""The parser of all commands: an argument that it refuses is shown like any other text."""

from __future__ import annotations

import argparse
from typing import NoReturn

from resilience.core.printable import printable


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose messages a terminal shows and does not obey."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        super().error(printable(message))
