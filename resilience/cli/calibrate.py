"""`resilience calibrate`: learn limits from runs, with a stated rate of false alarms.

Reads, fits and prints; writes the file of limits only if all went well. `calibrate diff OLD NEW` tells
two such files apart, `--backtest` holds the rule to account on the same data."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from resilience.adapters import timeouts_file
from resilience.analysis import timings
from resilience.analysis.calibrate import DEFAULT, Target, calibrate, unlike
from resilience.cli import calibrate_backtest, calibrate_plot
from resilience.cli.arguments import Parser
from resilience.cli.render import Line, cut, say, say_json, seconds, show, table, width_of_terminal, wrap
from resilience.cli.run_argument import run_or_file
from resilience.core import encoding
from resilience.core.calibration import unlike_runs
from resilience.core.configuration import differences
from resilience.core.deadlines import HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, STEP, section_of, split
from resilience.core.timeouts import Deadline, Timeouts
from resilience.errors import ConfigurationError

ALL_RATED, NO_SUCH_SECTION, SOME_PROVISIONAL, SOME_INSUFFICIENT = 0, 1, 3, 4  # exit statuses
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPILOG = """\
Exit status: 0 every limit is `ok` or `tentative`; 2 wrong use or bad input; 3 some are short or provisional;
4 for some there are too few data; the limits of first occurrences (`.first`) do not count. 1 --backtest: an
answer is significantly worse than stated, or too little could be tested; or no run has a section that
--section names."""
FOOTNOTE = (
    "rate: expected false alarms in 30 d at most, by the fitted tail; count: by counting alone (95 %). No method "
    "covers a kind of pause that did not occur in these runs: it may come as often as `count` says"
)
NO_FLAGS = "torchelastic watches neither sections nor steps nor heartbeats, so there is no flag that holds these limits"
_COLOURS = {"ok": "green", "tentative": "cyan", "short": "cyan", "provisional": "yellow", "insufficient": "red"}


def main(arguments: Sequence[str]) -> int:
    """Run the verb; return its exit status."""
    if arguments[:1] == ["diff"]:
        return _diff(arguments[1:])
    parser = Parser(prog="resilience calibrate", allow_abbrev=False)
    configure(parser)
    return run(parser.parse_args(arguments))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Learn how long healthy sections, steps and heartbeats may take, from runs that were recorded."
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder, job within RESILIENCE_RUN_DIR, timings file, or table (.csv, .csv.gz)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the limits here (YAML); an old one there is taken over"
    )
    parser.add_argument("--json", action="store_true", help="print the limits as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions (SVG)")
    parser.add_argument(
        "--format",
        choices=["resilience", "nvrx", "torchelastic"],
        default="resilience",
        help="nvrx: print the flags for ft_launcher instead; torchelastic: it has none",
    )
    parser.add_argument(
        "--target-false-alarms",
        type=float,
        default=DEFAULT.false_alarms,
        metavar="A",
        help="false alarms of the whole job within the horizon; default %(default)g",
    )
    parser.add_argument(
        "--horizon", type=duration, default=DEFAULT.horizon_s, metavar="T", help="such as 30d (default), 12h"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="ranks of the job to come; default: as observed"
    )
    parser.add_argument("--section", action="append", default=[], metavar="NAME", help="only this one, repeatable")
    parser.add_argument("--min-timeout", type=duration, default=DEFAULT.min_timeout, metavar="T", help="default 1s")
    parser.add_argument("--max-timeout", type=duration, default=None, metavar="T", help="default: none")
    parser.add_argument("--pool", action="store_true", help="put runs of different configurations together")
    parser.add_argument("--backtest", action="store_true", help="fit on all runs but one, count on that one")
    parser.add_argument(
        "--n", type=_numbers, default=[], metavar="N,…", help="--backtest: fit on the first N durations only"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, fit, print, write."""
    target = _target(arguments)
    old = _previous(arguments.out)
    runs = [run_or_file(path) for path in arguments.runs]
    given = timings.read(runs, frozenset(arguments.section), _progress("reading"))
    for note in (*given.notes, *unlike(given.runs)):
        say(f"resilience calibrate: {note}", sys.stderr)
    if given.unmatched:
        for name in given.unmatched:
            say(f"resilience calibrate: no run has a section {name!r} (--section)", sys.stderr)
        return NO_SUCH_SECTION
    if arguments.backtest:
        return calibrate_backtest.run(given.runs, target, arguments.n, arguments.json)
    found = calibrate(given, target, old, _progress("fitting"))
    if arguments.plot is not None:
        calibrate_plot.write(arguments.plot, given, found)
    if arguments.out is not None:
        timeouts_file.write(arguments.out, found)
    if arguments.json:
        say_json(encoding.to_json_page(found))
    elif arguments.format == "torchelastic":
        say(f"resilience calibrate: {NO_FLAGS}", sys.stderr)
    elif arguments.format != "resilience":
        say(_flags(found))
    else:
        show(lines(found, width_of_terminal()))
    return status(found)


def status(found: Timeouts) -> int:
    """Return the exit status that these limits deserve. First occurrences are few: they have a rate after 30 starts."""
    states = {deadline.status for name, deadline in found.deadlines.items() if split(name)[1] is None}
    if "insufficient" in states:
        return SOME_INSUFFICIENT
    return SOME_PROVISIONAL if states & {"short", "provisional"} else ALL_RATED


def _target(arguments: argparse.Namespace) -> Target:
    if not 0.0 < arguments.target_false_alarms < math.inf:
        raise ConfigurationError(
            f"--target-false-alarms is {arguments.target_false_alarms:g}, expected a number above 0"
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
    return timeouts_file.read(out) if out is not None and out.exists() else None


# -- on the terminal -------------------------------------------------------------------------------


def lines(found: Timeouts, width: int) -> list[Line]:
    """Return the limits as a table, with the reason of each that claims no rate."""
    shown: list[Line] = [
        (
            (
                f"at most {found.target_false_alarms:g} false alarms of the whole job in "
                f"{found.horizon_s / 86400:g} d at {found.ranks} ranks",
                "bold",
            ),
        ),
        (),
    ]
    has_old = any(deadline.previous_timeout_s is not None for deadline in found.deadlines.values())
    rows = [_row(name, deadline)[: None if has_old else -1] for name, deadline in found.deadlines.items()]
    header = ("deadline", "n/runs", "median", "max", "timeout", "status", "rate", "count", "old")
    shown += table(header[: None if has_old else -1], rows, width, 0)
    shown += [(), *(((f"  {line}", "dim"),) for line in wrap(f"{FOOTNOTE}{_unlike(found)}", width - 2))]
    for name, deadline in found.deadlines.items():
        text = "; ".join((deadline.reason, *_each(deadline), *_of_groups(deadline), *deadline.warnings))
        wrapped = wrap(f"{name} is {deadline.status}: {text}", width - 4)
        shown += [
            ((f"  {wrapped[0]}", _COLOURS[deadline.status]),),
            *(((f"    {line}", ""),) for line in wrapped[1:]),
        ]
    return shown


def _unlike(found: Timeouts) -> str:
    """Return what so many runs cannot exclude."""
    runs = max((deadline.runs for deadline in found.deadlines.values()), default=0)
    share = f"; {runs} runs do not exclude that {unlike_runs(runs):.0%} of later runs have one"
    return share if runs > 1 else ""


def _of_groups(deadline: Deadline) -> tuple[str, ...]:
    """Return the limits of groups of ranks that are not alike."""
    limits = (f"{group.ranks}: {seconds(group.timeout_s)} ({group.status})" for group in deadline.groups)
    return (f"ranks are not alike, so groups have limits of their own: {', '.join(limits)}",) if deadline.groups else ()


def _each(deadline: Deadline) -> tuple[str, ...]:
    """Return what a rated limit says of one occurrence."""
    upper = deadline.false_alarms_per_occurrence.model_upper
    return () if upper is None else (f"an occurrence exceeds the limit with a probability of {upper:.2g} at most",)


def _row(name: str, deadline: Deadline) -> tuple[str, ...]:
    alarms = deadline.expected_false_alarms_per_month
    return (
        name,
        f"{deadline.n}/{deadline.runs}",
        seconds(deadline.median_s or None),
        seconds(deadline.max_s or None),
        "-" if deadline.timeout_s is None else seconds(deadline.timeout_s),
        deadline.status,
        "-" if alarms.model_upper is None else f"{alarms.model_upper:.2g}",
        "-" if alarms.distribution_free_upper is None else f"{alarms.distribution_free_upper:.2g}",
        _change(deadline),
    )


def _change(deadline: Deadline) -> str:
    old, new = deadline.previous_timeout_s, deadline.timeout_s
    if old is None:
        return "-"
    return seconds(old) + ("" if new is None else f" ({new / old - 1:+.0%})")


def _flags(found: Timeouts) -> str:
    """Return the limits as flags of ft_launcher."""
    plain = {
        name: d.timeout_s for name, d in found.deadlines.items() if d.timeout_s is not None and split(name)[1] is None
    }
    initial = found.deadlines.get(INITIAL_HEARTBEAT)
    flags = []
    if (beat := plain.pop(HEARTBEAT, None)) is not None:
        flags.append(f"--ft-rank_heartbeat_timeout={beat:.6g}")
    if initial is not None and initial.timeout_s is not None:
        flags.append(f"--ft-initial_rank_heartbeat_timeout={initial.timeout_s:.6g}")
    outside = plain.pop(OUT_OF_SECTION, None)
    plain.pop(STEP, None)  # it watches no steps
    if plain:
        sections = ",".join(f"{section_of(name)}:{value:.6g}" for name, value in plain.items())
        flags.append(f"--ft-rank_section_timeouts={sections}")
    if outside is not None:
        flags.append(f"--ft-rank_out_of_section_timeout={outside:.6g}")
    return " ".join(flags)


def _progress(what: str) -> timings.Progress | None:
    """Return a progress bar for a terminal, None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def tell(name: str, done: int, total: int) -> None:
        bar = "#" * (20 * done // max(1, total))
        text = cut(f"{what} [{bar:20}] {done}/{total} {name}", width_of_terminal() - 1)
        sys.stderr.write(f"\r\x1b[K{text}" if done < total else "\r\x1b[K")
        sys.stderr.flush()

    return tell


# -- diff ------------------------------------------------------------------------------------------


def _diff(arguments: Sequence[str]) -> int:
    parser = Parser(prog="resilience calibrate diff", description="Tell two files of limits apart.")
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--json", action="store_true")
    read = parser.parse_args(list(arguments))
    old, new = timeouts_file.read(read.old), timeouts_file.read(read.new)
    rows = []
    for name in sorted({*old.deadlines, *new.deadlines}):
        before, after = old.deadlines.get(name), new.deadlines.get(name)
        rows.append((name, before, after))
    if read.json:
        changes = {name: {"old": before, "new": after} for name, before, after in rows}
        found = differences(old.configuration, new.configuration, old.ranks)
        say_json(encoding.to_json_page({"configuration": found, "deadlines": changes}))
        return 0
    found = differences(old.configuration, new.configuration, old.ranks)
    for difference in found:
        weight = "serious" if difference.why else "harmless"
        wrapped = wrap(f"configurations differ ({weight}): {difference.words}", width_of_terminal())
        show([((line, "red" if difference.why else "yellow"),) for line in wrapped])
    header = ("deadline", "old", "new", "change", "status")
    show(table(header, [_change_row(*row) for row in rows], width_of_terminal(), 0))
    return 0


def _change_row(name: str, before: Deadline | None, after: Deadline | None) -> tuple[str, ...]:
    old = None if before is None else before.timeout_s
    new = None if after is None else after.timeout_s
    states = " → ".join(dict.fromkeys("-" if each is None else each.status for each in (before, after)))
    change = f"{new / old - 1:+.1%}" if old and new else "-"
    return name, "-" if old is None else seconds(old), "-" if new is None else seconds(new), change, states


# -- values ----------------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Read a duration such as 90, 90s, 5m, 12h, 30d; return seconds."""
    found = re.fullmatch(r"([0-9.]+)\s*([smhd]?)", text)
    try:
        value = float(found[1]) * UNITS[found[2] or "s"] if found else -1.0
    except ValueError:
        value = -1.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration above 0; write 90, 90s, 5m, 12h or 30d")
    return value


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 100,1000,20000")
    return [int(part) for part in parts]
