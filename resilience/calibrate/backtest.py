"""`resilience calibrate --backtest`: are fitted limits exceeded as rarely as they state?

Each limit is tested on a run that it was not fitted on, next to the rule of thumb (5 times the maximum) and the plain
maximum of the same data. The exit status is 1 if a limit was exceeded significantly more often than it states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from resilience.calibrate.held_out import Backtest, TestedLimit, backtest, geometric_mean, upper_rate
from resilience.calibrate.limits import Target
from resilience.calibrate.timings import ObservedRun
from resilience.facts import encoding
from resilience.facts.in_words import count, seconds
from resilience.system.render import Line, say_json, show, table, width_of_terminal, wrap

WORSE = 1  # exit status; also if too few durations could be tested
NOT_TESTED = (
    "no deadline has that many durations in a known order: a table has all of them in order, but a run folder keeps "
    "only a sample"
)


class Summary(msgspec.Struct, frozen=True):
    """All tested limits for one size of training data. n: durations fitted on, None for all. exceeded, nvrx_exceeded,
    plain_exceeded, exposure: sums over the limits. ratios: geometric means relative to the rule of thumb. recorded:
    durations that could have been tested. untested: deadlines that were not tested, with the reason. too_little: tested
    and recorded durations of each deadline whose limit claims something and had too small a test. outside_exposure,
    outside_exceeded, outside_worse: the same of the limits outside known phases."""

    n: int | None
    answers: int
    rated: int
    share: float
    ratio: float | None
    rated_ratio: float | None
    exposure: int
    exceeded: int
    rated_exposure: int
    rated_exceeded: int
    nvrx_exceeded: int
    plain_exceeded: int
    worse: int
    recorded: int = 0
    untested: dict[str, str] = {}
    too_little: dict[str, tuple[int, int]] = {}
    outside_exposure: int = 0
    outside_exceeded: int = 0
    outside_worse: int = 0

    @property
    def is_worse(self) -> bool:
        """Whether a limit was exceeded significantly more often than stated."""
        return self.worse + self.outside_worse > 0


def run(runs: Sequence[ObservedRun], target: Target, sizes: Sequence[int], as_json: bool) -> int:
    """Run the backtest, print the result, return the exit status."""
    summaries, answers = [], []
    for size in sizes or (None,):
        test = backtest(runs, target, size)
        summaries.append(summarise(test, size))
        answers.append(test.answers)
    if as_json:
        page = {"summaries": summaries, "answers": answers}
        say_json(encoding.to_json_page(page))
    else:
        for summary, tested_limits in zip(summaries, answers, strict=True):
            show(_lines(summary, tested_limits))
    is_tested = any(summary.exposure for summary in summaries)
    return WORSE if not is_tested or any(summary.is_worse or summary.too_little for summary in summaries) else 0


def summarise(test: Backtest, size: int | None) -> Summary:
    """Return the sums and means of a backtest."""
    answers = test.answers
    rated = [answer for answer in answers if answer.is_rated]
    return Summary(
        n=size,
        answers=len(answers),
        rated=len(rated),
        share=len(rated) / len(answers) if answers else 0.0,
        ratio=geometric_mean([answer.timeout_s / answer.nvrx_s for answer in answers]),
        rated_ratio=geometric_mean([answer.timeout_s / answer.nvrx_s for answer in rated]),
        exposure=sum(answer.exposure for answer in answers),
        exceeded=sum(answer.exceeded for answer in answers),
        rated_exposure=sum(answer.exposure for answer in rated),
        rated_exceeded=sum(answer.exceeded for answer in rated),
        nvrx_exceeded=sum(answer.nvrx_exceeded for answer in answers),
        plain_exceeded=sum(answer.plain_exceeded for answer in answers),
        worse=sum(answer.is_worse for answer in answers),
        recorded=test.recorded,
        untested=test.untested,
        too_little=test.too_little,
        outside_exposure=sum(answer.outside_exposure for answer in answers),
        outside_exceeded=sum(answer.outside_exceeded for answer in answers),
        outside_worse=sum(answer.is_outside_worse for answer in answers),
    )


def _lines(summary: Summary, answers: Sequence[TestedLimit]) -> list[Line]:
    width = width_of_terminal()
    title = "all data" if summary.n is None else f"the first {count(summary.n, 'duration')}"
    output: list[Line] = [((f"fitted on {title}, tested on the data left out", "bold"),), ()]
    by_deadline: dict[tuple[str, str], list[TestedLimit]] = defaultdict(list)
    for answer in answers:
        by_deadline[answer.configuration, answer.deadline].append(answer)
    rows: list[tuple[str, ...]] = []
    for (_, name), group in by_deadline.items():
        exposure, exceeded = sum(answer.exposure for answer in group), sum(answer.exceeded for answer in group)
        limits = sorted(answer.timeout_s for answer in group)
        ratio = geometric_mean([answer.timeout_s / answer.nvrx_s for answer in group])
        rows.append(
            (
                name,
                seconds(limits[len(limits) // 2]),
                f"{sum(answer.is_rated for answer in group)}/{len(group)}",
                str(exposure),
                str(exceeded),
                f"{upper_rate(exceeded, exposure):.1e}",
                str(sum(answer.nvrx_exceeded for answer in group)),
                str(sum(answer.plain_exceeded for answer in group)),
                "-" if ratio is None else f"{ratio:.2f}",
            )
        )
        rows += _outside_row(group)
    header = ("deadline", "timeout", "rated", "tested", "over", "rate <", "5x over", "max over", "/ 5x")
    if rows:
        output += table(header, rows, width, 0)
    elif summary.n is not None:
        output += _indented(NOT_TESTED, "dim", width)
    output += [(), *_sums(summary, width)]
    output += _indented(f"{summary.exposure} of {summary.recorded} recorded durations were tested", "", width)
    for name, (tested, recorded) in summary.too_little.items():
        share = f"{tested} of {recorded} recorded durations were tested"
        reason = f" ({summary.untested[name]})" if name in summary.untested else ""
        output += _indented(f"{name}: {share}: too few for a result{reason}", "red", width)
    for name, reason in summary.untested.items():
        if name not in summary.too_little:
            output += _indented(f"{name} was not tested: {reason}", "yellow", width)
    return [*output, ()]


def _sums(summary: Summary, width: int) -> list[Line]:
    """Return how many durations exceeded their limits, in all."""
    sums = (
        f"{count(summary.answers, 'limit')} tested, {summary.rated} with a rate; {summary.exceeded} of "
        f"{count(summary.exposure, 'duration')} exceeded their limit, "
        f"{count(summary.worse, 'limit')} did worse than stated"
    )
    output = _indented(sums, "red" if summary.worse else "", width)
    if summary.outside_exposure:
        sums = (
            f"outside known phases {summary.outside_exceeded} of {count(summary.outside_exposure, 'duration')} "
            f"exceeded the shorter limit, {count(summary.outside_worse, 'limit')} did worse than stated"
        )
        output += _indented(sums, "red" if summary.outside_worse else "", width)
    return output


def _outside_row(group: Sequence[TestedLimit]) -> list[tuple[str, ...]]:
    """Return the row of the limits outside known phases, if a deadline has any."""
    tested = [(answer, answer.outside_s) for answer in group if answer.outside_s is not None]
    if not tested:
        return []
    exposure = sum(answer.outside_exposure for answer, _ in tested)
    exceeded = sum(answer.outside_exceeded for answer, _ in tested)
    limits = sorted(limit for _, limit in tested)
    ratio = geometric_mean([limit / answer.nvrx_s for answer, limit in tested])
    return [
        (
            "  outside",
            seconds(limits[len(limits) // 2]),
            f"{sum(answer.outside_status in ('ok', 'tentative') for answer, _ in tested)}/{len(tested)}",
            str(exposure),
            str(exceeded),
            f"{upper_rate(exceeded, exposure):.1e}",
            "-",
            "-",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    ]


def _indented(text: str, style: str, width: int) -> list[Line]:
    return [((f"  {line}", style),) for line in wrap(text, width - 2)]
