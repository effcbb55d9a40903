"""`resilience status RUN`: a live job: ranks, states, steps, open sections against their limits, restarts.

Read from the run folder alone, at once or again and again (--watch). Exit status: 0 while the job runs or once it
has completed, 1 if it ended otherwise."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator

import msgspec

from resilience.analysis.status import Now, RankNow, Watcher, order
from resilience.cli.render import Line, brief, count, cut, field, may_paint, seconds, show, table, width_of_terminal
from resilience.cli.report import find_run
from resilience.errors import ConfigurationError

EVERY = 1.0  # seconds between two looks with --watch
LEAST_ROWS = 8
AROUND = 9  # lines beside the table
_HEADER = ("rank", "node", "state", "step", "section", "open / limit", "silent")
_NODE, _SECTION = 8, 10  # columns that these two get at least
_STYLES = {"running": "green", "starting": "cyan", "restarting": "yellow", "ended": "bold"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show how a job is doing: ranks, states, steps, open sections against their limits, restarts."
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="folder of the run, or its name within RESILIENCE_RUN_DIR; default: the newest one there",
    )
    parser.add_argument("--watch", action="store_true", help="look again every second, until the job ends")
    parser.add_argument("--json", action="store_true", help="print a JSON object, with --watch one a line")
    parser.add_argument("--all", action="store_true", help="show every rank, not only as many as fit")


def run(arguments: argparse.Namespace) -> int:
    """Show the job; return the exit status. Raises: ConfigurationError for an argument that names no run."""
    folder = find_run(arguments.run)
    watcher = Watcher(folder)
    try:
        while True:
            now = watcher.look()
            if now is None and not arguments.watch:
                raise ConfigurationError(f"{folder} has nothing on record yet; --watch waits for it")
            if now is not None:
                _show(now, arguments)
            if not arguments.watch or (now is not None and now.phase == "ended"):
                return 0 if now is None or now.is_well else 1
            time.sleep(EVERY)
    except KeyboardInterrupt:
        return 0


def _show(now: Now, arguments: argparse.Namespace) -> None:
    if arguments.json:
        encoded = msgspec.json.encode(now)
        text = encoded if arguments.watch else msgspec.json.format(encoded)
        sys.stdout.write(text.decode() + "\n")
        sys.stdout.flush()
        return
    is_live = arguments.watch and may_paint(sys.stdout)
    if is_live:
        sys.stdout.write("\x1b[H\x1b[2J")  # home, clear
    height = shutil.get_terminal_size((80, 24)).lines
    rows = len(now.ranks) if arguments.all else max(LEAST_ROWS, height - AROUND)
    show(status_lines(now, width_of_terminal(), rows))
    if arguments.watch and not is_live:
        sys.stdout.write("\n")


def status_lines(now: Now, width: int, rows: int) -> Iterator[Line]:
    """Yield the job for a terminal of `width` columns, with `rows` ranks at most."""
    yield (
        ("Run ", "bold"),
        (cut(now.job_id, width - 30), "bold cyan"),
        (f"  {now.phase}", _STYLES[now.phase]),
        (f"  for {seconds(now.since_s)}" if now.phase != "ended" else "", "dim"),
    )
    if now.outcome is not None:
        detail = f": {now.detail}" if now.detail else ""
        yield from field("ended", f"{now.outcome}{detail}", width, "green" if now.is_well else "red", indent=2)
    size = "?" if now.world_size is None else count(now.world_size, "rank")
    states = ", ".join(f"{number} {state}" for state, number in now.states.items())
    world = f"{size} on {count(now.nodes, 'node')}" + (f": {states}" if states else "")
    yield from field("world", world, width, indent=2)
    yield from field("restarts", _restarts(now), width, indent=2)
    steps = [rank.step for rank in now.ranks if rank.step is not None and rank.is_well]
    if steps:
        low, high = min(steps), max(steps)
        yield from field("step", f"{low}" if low == high else f"{low} to {high}", width, indent=2)
    if now.failure is not None:
        text = f"{seconds(now.failure.ago_s)} ago, rank {now.failure.rank}: {now.failure.what}"
        yield from field("last fault", cut(text.replace("\n", " "), 2 * (width - 13)), width, "yellow", indent=2)
    if now.ranks and now.phase != "ended":
        yield ()
        shown = list(now.ranks) if len(now.ranks) <= rows else order(now.ranks)[:rows]
        yield from _table(shown, width)
        if len(now.ranks) > len(shown):
            yield ((f"  … and {len(now.ranks) - len(shown)} more ranks, nearer to what they should be", "dim"),)


def _restarts(now: Now) -> str:
    parts = []
    if now.restarts is not None:
        left = f", {now.restarts_left} left" if now.restarts_left is not None else ""
        parts.append(f"{now.restarts} by the launcher (cycle {now.cycle}){left}")
    if now.iterations or not parts:
        parts.append(f"{now.iterations} in place")
    return "; ".join(parts)


def _table(ranks: list[RankNow], width: int) -> list[Line]:
    rows = [
        (
            str(rank.rank),
            rank.node,
            rank.state,
            "" if rank.step is None else str(rank.step),
            _section(rank),
            _age(rank),
            "" if rank.silent_s is None else brief(rank.silent_s),
        )
        for rank in ranks
    ]
    others = sum(max(len(row[column]) for row in (_HEADER, *rows)) for column in (0, 2, 3, 5, 6)) + 2 * len(_HEADER)
    node = min(max(len(row[1]) for row in (_HEADER, *rows)), max(_NODE, width - others - _SECTION))
    rows = [(row[0], cut(row[1], node), *row[2:]) for row in rows]
    lines = table(_HEADER, rows, width, wide=4)
    return [lines[0], *((((text, _style(rank)),)) for rank, ((text, _),) in zip(ranks, lines[1:], strict=True))]


def _style(rank: RankNow) -> str:
    if not rank.is_well:
        return "red"
    return "yellow" if rank.section is not None and rank.section.share >= 0.8 else ""


def _section(rank: RankNow) -> str:
    if rank.section is None:
        return "" if rank.doing in ("", "run") else f"({rank.doing})"
    return rank.section.name + (f" +{rank.sections - 1}" if rank.sections > 1 else "")


def _age(rank: RankNow) -> str:
    section = rank.section
    if section is None:
        return ""
    return f"{brief(section.open_s)} / {'–' if section.limit_s is None else brief(section.limit_s)}"
