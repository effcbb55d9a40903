"""How do limits look on a terminal?  Tables of limits and of their changes, and flags of ft_launcher.

It also says how far a long calculation has come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from resilience.calibrate.timings import Progress
from resilience.calibration.differences import Difference
from resilience.calibration.fitting import unlike_runs
from resilience.calibration.limits_file import Deadline, OutsideLimit, RankGroupLimit, Timeouts
from resilience.facts.deadlines import HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, STEP, parse_name, section_of
from resilience.facts.in_words import count, seconds
from resilience.system.render import Line, cut, table, width_of_terminal, wrap

FOOTNOTE = (
    "rate: upper bound of the false alarms expected in 30 d, from the fitted tail; count: the same from counting alone "
    "(95 %). No method covers a kind of pause that did not occur in these runs: it may occur as often as `count` says"
)
DAY = 86400.0
_COLOURS = {"ok": "green", "tentative": "cyan", "short": "cyan", "provisional": "yellow", "insufficient": "red"}


def lines(timeouts: Timeouts, width: int) -> list[Line]:
    """Return the limits as a table, followed by the reason for each status."""
    output: list[Line] = [
        (
            (
                f"target: at most {_counted(timeouts.target_false_alarms, 'false alarm')} per "
                f"{_horizon(timeouts.horizon_s)} in the whole job ({count(timeouts.ranks, 'rank')})",
                "bold",
            ),
        ),
        (),
    ]
    has_previous = any(deadline.previous_timeout_s is not None for deadline in timeouts.deadlines.values())
    rows = [_row(name, deadline)[: None if has_previous else -1] for name, deadline in timeouts.deadlines.items()]
    header = ("deadline", "n/runs", "median", "max", "limit", "status", "rate", "count", "old")
    output += table(header[: None if has_previous else -1], rows, width, 0)
    output += [(), *(((f"  {line}", "dim"),) for line in wrap(f"{FOOTNOTE}{_unexcluded_share(timeouts)}", width - 2))]
    for name, deadline in timeouts.deadlines.items():
        explanation = "; ".join(
            (
                deadline.reason,
                *_occurrence_rate(deadline),
                *_group_limits(deadline),
                *_outside_limit(deadline),
                *deadline.warnings,
            )
        )
        wrapped = wrap(f"{name} is {deadline.status}: {explanation}", width - 4)
        output += [
            ((f"  {wrapped[0]}", _COLOURS[deadline.status]),),
            *(((f"    {line}", ""),) for line in wrapped[1:]),
        ]
    return output


def _counted(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"


def _horizon(period_s: float) -> str:
    return _counted(period_s / DAY, "day") if period_s >= DAY else seconds(period_s)


def _unexcluded_share(timeouts: Timeouts) -> str:
    """Return the share of later runs with a new kind of pause that these runs cannot exclude."""
    runs = max((deadline.runs for deadline in timeouts.deadlines.values()), default=0)
    if runs <= 1:
        return ""
    return f"; {runs} runs do not exclude that {unlike_runs(runs):.0%} of later runs have one"


def _group_limits(deadline: Deadline) -> tuple[str, ...]:
    """Return the limits of groups of ranks with different durations."""
    limits = (f"{group.ranks}: {seconds(group.timeout_s)} ({group.status})" for group in deadline.groups)
    return (
        (f"ranks differ in their durations, so groups of ranks have separate limits: {', '.join(limits)}",)
        if deadline.groups
        else ()
    )


def _outside_limit(deadline: Deadline) -> tuple[str, ...]:
    """Return the limit outside known phases, how far it reaches, and its warnings."""
    if (outside := deadline.outside) is None:
        return ()
    known = len(outside.phases.positions)
    where = f"outside {known} known phases the limit is" if known else "no run was slow anywhere, so the limit is"
    reach = f"up to occurrence {outside.phases.until} after a cold start"
    limit = f"{where} {seconds(outside.timeout_s)} ({outside.status}), {reach}"
    return (limit, *(f"outside phases: {warning}" for warning in outside.warnings))


def _occurrence_rate(deadline: Deadline) -> tuple[str, ...]:
    """Return the false-alarm probability of one occurrence, if the limit states one."""
    upper = deadline.false_alarms_per_occurrence.model_upper
    return () if upper is None else (f"an occurrence exceeds the limit with probability {upper:.2g} or less",)


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
    previous, current = deadline.previous_timeout_s, deadline.timeout_s
    if previous is None:
        return "-"
    return seconds(previous) + ("" if current is None else f" ({current / previous - 1:+.0%})")


# -- for another launcher ---------------------------------------------------------------------------


def launcher_flags(timeouts: Timeouts) -> str:
    """Return the limits as flags of ft_launcher. It has one limit for all occurrences, which must cover the first ones
    after each start too."""
    plain: dict[str, float] = {}
    for name, known in timeouts.deadlines.items():
        if known.timeout_s is not None:
            deadline = parse_name(name)[0]
            plain[deadline] = max(plain.get(deadline, 0.0), known.timeout_s)
    for name, known in timeouts.deadlines.items():
        if known.timeout_s is None:
            plain.pop(name, None)  # too few occurrences: the limit of the first ones need not cover later ones
    initial = plain.pop(INITIAL_HEARTBEAT, None)
    flags = []
    if (beat := plain.pop(HEARTBEAT, None)) is not None:
        flags.append(f"--ft-rank_heartbeat_timeout={beat:.6g}")
    if initial is not None:
        flags.append(f"--ft-initial_rank_heartbeat_timeout={initial:.6g}")
    outside = plain.pop(OUT_OF_SECTION, None)
    plain.pop(STEP, None)  # ft_launcher watches no steps
    if plain:
        sections = ",".join(f"{section_of(name)}:{value:.6g}" for name, value in plain.items())
        flags.append(f"--ft-rank_section_timeouts={sections}")
    if outside is not None:
        flags.append(f"--ft-rank_out_of_section_timeout={outside:.6g}")
    return " ".join(flags)


# -- progress --------------------------------------------------------------------------------------


def progress(activity: str) -> Progress | None:
    """Return a function that draws a progress bar; None if stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None

    def draw(name: str, done: int, total: int) -> None:
        bar = "#" * (20 * done // max(1, total))
        bar_line = cut(f"{activity} [{bar:20}] {done}/{total} {name}", width_of_terminal() - 1)
        sys.stderr.write(f"\r\x1b[K{bar_line}" if done < total else "\r\x1b[K")
        sys.stderr.flush()

    return draw


# -- diff ------------------------------------------------------------------------------------------


def difference_lines(changes: Iterable[Difference], width: int) -> list[Line]:
    """Return the differences between two configurations."""
    return [
        ((line, "red" if difference.why else "yellow"),)
        for difference in changes
        for line in wrap(
            f"configurations differ ({'serious' if difference.why else 'harmless'}): {difference.words}", width
        )
    ]


def changed_lines(changes: Iterable[tuple[str, Deadline | None, Deadline | None]], width: int) -> list[Line]:
    """Return the table of changed limits. changes: name, old and new limit."""
    header = ("deadline", "old", "new", "change", "status")
    return table(header, [cells for change in changes for cells in _change_rows(*change)], width, 0)


def _change_rows(name: str, old_limit: Deadline | None, new_limit: Deadline | None) -> Iterator[tuple[str, ...]]:
    yield _change_row(name, old_limit, new_limit)
    old_outside, new_outside = (limit and limit.outside for limit in (old_limit, new_limit))
    if old_outside or new_outside:
        yield _change_row(f"{name} outside phases", old_outside, new_outside)
    old_groups, new_groups = _groups_of(old_limit), _groups_of(new_limit)
    for ranks in {**old_groups, **new_groups}:
        yield _change_row(f"{name} ranks {ranks}", old_groups.get(ranks), new_groups.get(ranks))


def _groups_of(limit: Deadline | None) -> dict[str, RankGroupLimit]:
    return {} if limit is None else {group.ranks: group for group in limit.groups}


_AnyLimit = Deadline | OutsideLimit | RankGroupLimit


def _change_row(name: str, old_limit: _AnyLimit | None, new_limit: _AnyLimit | None) -> tuple[str, ...]:
    old_s = None if old_limit is None else old_limit.timeout_s
    new_s = None if new_limit is None else new_limit.timeout_s
    states = " → ".join(
        dict.fromkeys("-" if deadline is None else deadline.status for deadline in (old_limit, new_limit))
    )
    change = f"{new_s / old_s - 1:+.1%}" if old_s and new_s else "-"
    return name, "-" if old_s is None else seconds(old_s), "-" if new_s is None else seconds(new_s), change, states
