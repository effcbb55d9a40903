"""`resilience status RUN`: the state of a job now: ranks, steps, open sections against their limits, restarts.

Reads only the run folder, once or repeatedly (--watch). On a terminal, --watch shows an interactive screen. Exit
status: 0 while the job runs and after it completed, 1 if it ended otherwise."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from resilience.cli.run_argument import add_run, find_readable_run
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.status.screen import is_possible
from resilience.status.state import Now, Watcher
from resilience.status.view import status_lines
from resilience.status.watching import WIDEST, on_screen, pause
from resilience.system.render import NARROWEST, say, say_json, show

LEAST_ROWS = 8
AROUND = 9  # lines above and below the table


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show the current state of a job: ranks, steps, open sections against their limits, restarts."
    add_run(parser)
    parser.add_argument(
        "--watch", action="store_true", help="refresh every second until the job ends; on a terminal, press h for help"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object; with --watch, one per line")
    parser.add_argument("--all", action="store_true", help="show all ranks, even if they do not fit on the screen")


def run(arguments: argparse.Namespace) -> int:
    """Show the job; return the exit status. Raises: ConfigurationError for an argument that names no run."""
    folder = find_readable_run(arguments.run)
    is_screen = arguments.watch and not arguments.json and not arguments.all and is_possible()
    try:
        now = on_screen(folder) if is_screen else None
        if is_screen and (now is None or now.phase != "ended"):
            return 0  # the user left the screen
        return _printed(folder, arguments, now)
    except KeyboardInterrupt:
        return 0


def _printed(folder: Path, arguments: argparse.Namespace, now: Now | None) -> int:
    """Print the state once, or with --watch until the job ends. now: the last state, if the job has ended already."""
    watcher = Watcher(folder)
    while True:
        began = time.monotonic()
        now = now or watcher.look()
        if now is None and not arguments.watch:
            raise ConfigurationError(f"{folder} has no records yet; --watch waits for them")
        if now is not None:
            _show(now, arguments)
        if not arguments.watch or (now is not None and now.phase == "ended"):
            return 0 if now is None or now.is_well else 1
        time.sleep(pause(now, time.monotonic() - began))
        now = None


def _show(now: Now, arguments: argparse.Namespace) -> None:
    if arguments.json:
        encoded = encoding.to_json(now) + b"\n" if arguments.watch else encoding.to_json_page(now)
        say_json(encoded)
        return
    columns, height = shutil.get_terminal_size((80, 24))
    rows = len(now.ranks) if arguments.all else max(LEAST_ROWS, height - AROUND)
    show(status_lines(now, min(max(columns, NARROWEST), WIDEST), rows))
    if arguments.watch and now.phase != "ended":
        say("")
