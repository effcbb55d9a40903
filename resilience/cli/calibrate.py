"""`resilience calibrate`: learn limits from recorded runs, with a stated rate of false alarms.

Reads timings, fits limits and prints them; writes the limits file only if everything succeeded. `calibrate diff OLD
NEW` compares two limits files. `--backtest` tests the fitting rule on the same data."""

from __future__ import annotations

import argparse
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from resilience.calibrate import backtest as calibrate_backtest
from resilience.calibrate import plot as calibrate_plot
from resilience.calibrate import timings
from resilience.calibrate.limits import DEFAULT, Target, calibrate, unlike
from resilience.calibrate.tables import LONGEST
from resilience.calibrate.terminal import changed_lines, difference_lines, launcher_flags, lines, progress
from resilience.calibration.differences import differences
from resilience.calibration.fitting import FEWEST
from resilience.calibration.limits_file import Timeouts
from resilience.cli.arguments import Parser, refuse_together
from resilience.cli.run_argument import run_or_file
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.facts.deadlines import parse_name
from resilience.system import files, timeouts_file
from resilience.system.render import complain, cut, say, say_json, show, width_of_terminal

ALL_RATED, NO_SUCH_SECTION, SOME_PROVISIONAL, SOME_INSUFFICIENT = 0, 1, 3, 4  # exit statuses
DEFAULT_FORMAT = "resilience"
LEAST_TARGET = 1e-9  # false alarms; fewer cannot be told from none
MOST_DIGITS = 18  # of a number; Python refuses to read thousands of them
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPILOG = """\
Exit status: 0: every limit is `ok` or `tentative`. 1: no run has a section that --section names; or, with
--backtest, a limit is exceeded significantly more often than stated, or too few durations of a deadline could be
tested. 2: wrong use or bad input. 3: some limits are short or provisional. 4: some limits have too few data. Limits of
first occurrences (`.first`) do not count."""
NO_FLAGS = "torchelastic watches neither sections nor steps nor heartbeats, so it has no flag for these limits"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; return its exit status."""
    if arguments[:1] == ["diff"]:
        return _diff(arguments[1:])
    parser = Parser(prog="resilience calibrate", allow_abbrev=False)
    configure(parser)
    return run(parser.parse_args(arguments))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Learn from recorded runs how long healthy sections, steps and heartbeat intervals may take. "
        "`resilience calibrate diff OLD NEW` compares two files of limits."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder, job in RESILIENCE_RUN_DIR, timings file, or table (.csv, .csv.gz)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the limits to this file (YAML); an existing file of the same configuration is merged",
    )
    parser.add_argument("--json", action="store_true", help="print the limits as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions to this file (SVG)")
    parser.add_argument(
        "--format",
        choices=[DEFAULT_FORMAT, "nvrx", "torchelastic"],
        default=DEFAULT_FORMAT,
        help="resilience: print a table; nvrx: print flags for ft_launcher; torchelastic: say why it has no such "
        "flags; default %(default)s",
    )
    parser.add_argument(
        "--target-false-alarms",
        type=float,
        default=DEFAULT.false_alarms,
        metavar="A",
        help="number of false alarms that are acceptable in a whole job within the horizon; default %(default)g",
    )
    parser.add_argument(
        "--horizon",
        type=duration,
        default=DEFAULT.horizon_s,
        metavar="T",
        help="period for --target-false-alarms, such as 12h; default 30d",
    )
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="number of ranks of future jobs; default: as observed"
    )
    parser.add_argument(
        "--section", action="append", default=[], metavar="NAME", help="calibrate only this section; repeatable"
    )
    parser.add_argument(
        "--min-timeout",
        type=duration,
        default=DEFAULT.min_timeout,
        metavar="T",
        help="shortest limit, such as 30s; default 1s",
    )
    parser.add_argument(
        "--max-timeout", type=duration, default=None, metavar="T", help="longest limit, such as 2h; default: none"
    )
    parser.add_argument(
        "--pool",
        action="store_true",
        help="combine runs, and an existing --out file, even if their configurations differ",
    )
    parser.add_argument(
        "--backtest",
        action="store_true",
        help="test the fit: leave out each run in turn, fit on the others, and test on it",
    )
    parser.add_argument(
        "--n",
        type=_numbers,
        default=[],
        metavar="N,…",
        help=f"with --backtest: fit only on the first N durations; several numbers, each at least {FEWEST}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the runs, fit limits, print and write them; return the exit status."""
    _check_backtest(arguments)
    if arguments.format != DEFAULT_FORMAT:
        refuse_together(f"--format {arguments.format}", json=arguments.json)
    target = _target(arguments)
    previous = _previous(arguments.out)
    runs = [run_or_file(path) for path in arguments.runs]
    observed = timings.read(runs, frozenset(arguments.section), progress("reading"))
    _check_plot(arguments.plot, arguments.out, observed)
    for note in (*observed.notes, *unlike(observed.runs)):
        complain(f"resilience calibrate: {note}")
    if observed.unmatched:
        for name in observed.unmatched:
            complain(f"resilience calibrate: no run has a section {name!r} (--section)")
        return NO_SUCH_SECTION
    if arguments.backtest:
        return calibrate_backtest.run(observed.runs, target, arguments.n, arguments.json)
    timeouts = calibrate(observed, target, previous, progress("fitting"))
    if arguments.out is not None:
        timeouts_file.write(arguments.out, timeouts)
    if arguments.plot is not None:
        calibrate_plot.write(arguments.plot, observed, timeouts)
    if arguments.json:
        say_json(encoding.to_json_page(timeouts))
    elif arguments.format == "torchelastic":
        complain(f"resilience calibrate: {NO_FLAGS}")
    elif arguments.format != DEFAULT_FORMAT:
        say(launcher_flags(timeouts))
    else:
        show(lines(timeouts, width_of_terminal()))
    return status(timeouts)


def status(timeouts: Timeouts) -> int:
    """Return the exit status for these limits. First occurrences do not count: few jobs start often enough."""
    states = {deadline.status for name, deadline in timeouts.deadlines.items() if parse_name(name)[1] is None}
    if "insufficient" in states:
        return SOME_INSUFFICIENT
    return SOME_PROVISIONAL if states & {"short", "provisional"} else ALL_RATED


def _check_backtest(arguments: argparse.Namespace) -> None:
    """Raises: ConfigurationError for options that have no effect with, or without, --backtest."""
    has_format = arguments.format != DEFAULT_FORMAT
    given = {"--out": arguments.out is not None, "--plot": arguments.plot is not None, "--format": has_format}
    useless = [option for option, is_given in given.items() if is_given]
    if arguments.backtest and useless:
        raise ConfigurationError(
            f"--backtest tests limits and writes none; leave out {', '.join(useless)}, or --backtest"
        )
    if arguments.n and not arguments.backtest:
        raise ConfigurationError("--n says how much data a backtest fits on; add --backtest")


def _target(arguments: argparse.Namespace) -> Target:
    if not LEAST_TARGET <= arguments.target_false_alarms < math.inf:
        raise ConfigurationError(
            f"--target-false-alarms is {arguments.target_false_alarms:g}, expected a number from {LEAST_TARGET:g}"
        )
    if arguments.ranks < 0:
        raise ConfigurationError(f"--ranks is {arguments.ranks}, expected 1 or more")
    if arguments.max_timeout is not None and arguments.max_timeout < arguments.min_timeout:
        raise ConfigurationError(
            f"--max-timeout ({arguments.max_timeout:g} s) is below --min-timeout ({arguments.min_timeout:g} s)"
        )
    return Target(
        false_alarms=arguments.target_false_alarms,
        horizon_s=arguments.horizon,
        ranks=arguments.ranks,
        min_timeout=arguments.min_timeout,
        max_timeout=arguments.max_timeout,
        is_pooled=arguments.pool,
    )


def _previous(out: Path | None) -> Timeouts | None:
    """Return the limits of an existing --out file. Raises: ConfigurationError, also for what is no file."""
    if out is None:
        return None
    try:
        is_file = stat.S_ISREG(out.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be read: {error.strerror}") from error
    if not is_file:
        raise ConfigurationError(f"--out {out} cannot be replaced; {files.TO_REPLACE}")
    return timeouts_file.read(out)


def _check_plot(plot: Path | None, out: Path | None, observed: timings.Input) -> None:
    """Raises: ConfigurationError if the picture would replace the limits or an input."""
    if plot is None:
        return
    if out is not None and os.path.realpath(plot) == os.path.realpath(out):
        raise ConfigurationError(f"--plot {plot} is the --out file; name another file")
    if os.path.realpath(plot) in {os.path.realpath(source.path) for source in observed.sources}:
        raise ConfigurationError(f"--plot {plot} is an input; name another file")


# -- diff ------------------------------------------------------------------------------------------


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate diff`."""
    parser.description = "Compare two limits files."
    parser.add_argument("old", type=Path, metavar="OLD", help="limits file to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="limits file whose changes are shown")
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")


def _diff(arguments: Sequence[str]) -> int:
    parser = Parser(prog="resilience calibrate diff")
    configure_diff(parser)
    parsed = parser.parse_args(list(arguments))
    old_file, new_file = timeouts_file.read(parsed.old), timeouts_file.read(parsed.new)
    names = sorted({*old_file.deadlines, *new_file.deadlines})
    rows = [(name, old_file.deadlines.get(name), new_file.deadlines.get(name)) for name in names]
    configuration_changes = differences(old_file.configuration, new_file.configuration, old_file.ranks)
    if parsed.json:
        changes = {name: {"old": old_limit, "new": new_limit} for name, old_limit, new_limit in rows}
        say_json(encoding.to_json_page({"configuration": configuration_changes, "deadlines": changes}))
        return 0
    width = width_of_terminal()
    show([*difference_lines(configuration_changes, width), *changed_lines(rows, width)])
    return 0


# -- values ----------------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Parse a duration such as 90, 90s, 5m, 12h or 30d; return seconds."""
    match = re.fullmatch(r"([0-9.]+)\s*([smhd]?)", text)
    try:
        value = float(match[1]) * UNITS[match[2] or "s"] if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"{cut(text, 40)!r} is not a duration above 0 and below 30 years; write 90, 90s, 5m, 12h or 30d"
        )
    return value


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) <= MOST_DIGITS and int(part) >= FEWEST for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from {FEWEST}, such as 100,1000,20000")
    return [int(part) for part in parts]
