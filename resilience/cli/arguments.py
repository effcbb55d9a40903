"""The argument parser of all subcommands, and a check that several of them share.

A rejected argument is escaped before it is printed, like any other text."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from resilience.errors import ConfigurationError
from resilience.facts.printable import usage_error
from resilience.system.render import say


class Parser(argparse.ArgumentParser):
    """An argparse parser whose error messages contain no terminal control sequences."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        super().error(usage_error(message))

    def print_help(self, file: Any = None) -> None:
        """Write the help. Raises: OSError, which argparse would ignore if stdout is not buffered (PYTHONUNBUFFERED)."""
        say(self.format_help().rstrip("\n"), file)


def refuse_together(option: str, advice: str = "; leave one of them out", **others: object) -> None:
    """Raise ConfigurationError if one of the other options, by name, is given together with `option`."""
    given = [f"--{name}" for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ConfigurationError(f"{option} cannot be combined with {', '.join(given)}{advice}")
