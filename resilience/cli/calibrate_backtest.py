"""`resilience calibrate --backtest`: does the rule keep its word on these data?

Every answer is tested on a run that it did not see, beside the rule of thumb and the plain maximum fitted
on the same part. The exit status is 1 if a rated answer was exceeded significantly more often than stated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from resilience.analysis.calibrate import Held, Target, Test, backtest, geometric_mean, upper_rate
from resilience.analysis.timings import Run
from resilience.cli.render import Line, say_json, seconds, show, table, width_of_terminal, wrap
from resilience.core import encoding

WORSE = 1  # exit status, also where too little could be tested
LEAST_SHARE = 0.3  # of the recorded durations, that have to be tested


class Summary(msgspec.Struct, frozen=True):
    """All answers of one size of training data. n: None for all data. exceeded, nvrx_exceeded,
    plain_exceeded, exposure: summed over answers; ratios: geometric means to the rule of thumb. recorded: durations
    that could have been tested; untested: deadlines that were not tested, and why."""

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

    @property
    def says_too_little(self) -> bool:
        """Whether so little of what was recorded could be tested that the test says nothing."""
        return self.n is None and self.exposure < LEAST_SHARE * self.recorded


def run(runs: Sequence[Run], target: Target, sizes: Sequence[int], as_json: bool) -> int:
    """Test the rule, print how it did, return the exit status."""
    summaries, shown = [], []
    for size in sizes or (None,):
        test = backtest(runs, target, size)
        summaries.append(summarise(test, size))
        shown.append(test.answers)
    if as_json:
        made = {"summaries": summaries, "answers": shown}
        say_json(encoding.to_json_page(made))
    else:
        for summary, held in zip(summaries, shown, strict=True):
            show(_lines(summary, held))
    return WORSE if any(summary.worse or summary.says_too_little for summary in summaries) else 0


def summarise(test: Test, size: int | None) -> Summary:
    """Add the answers up."""
    held = test.answers
    rated = [each for each in held if each.is_rated]
    return Summary(
        n=size,
        answers=len(held),
        rated=len(rated),
        share=len(rated) / len(held) if held else 0.0,
        ratio=geometric_mean([each.timeout_s / each.nvrx_s for each in held]),
        rated_ratio=geometric_mean([each.timeout_s / each.nvrx_s for each in rated]),
        exposure=sum(each.exposure for each in held),
        exceeded=sum(each.exceeded for each in held),
        rated_exposure=sum(each.exposure for each in rated),
        rated_exceeded=sum(each.exceeded for each in rated),
        nvrx_exceeded=sum(each.nvrx_exceeded for each in held),
        plain_exceeded=sum(each.plain_exceeded for each in held),
        worse=sum(each.is_worse for each in held),
        recorded=test.recorded,
        untested=test.untested,
    )


def _lines(summary: Summary, held: Sequence[Held]) -> list[Line]:
    width = width_of_terminal()
    title = "all data" if summary.n is None else f"the first {summary.n} durations"
    shown: list[Line] = [((f"fitted on {title}, tested on what was left out", "bold"),), ()]
    by_deadline: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for each in held:
        by_deadline[each.configuration, each.deadline].append(each)
    rows = []
    for (_, name), group in by_deadline.items():
        exposure, exceeded = sum(each.exposure for each in group), sum(each.exceeded for each in group)
        limits = sorted(each.timeout_s for each in group)
        ratio = geometric_mean([each.timeout_s / each.nvrx_s for each in group])
        rows.append(
            (
                name,
                seconds(limits[len(limits) // 2]),
                f"{sum(each.is_rated for each in group)}/{len(group)}",
                str(exposure),
                str(exceeded),
                f"{upper_rate(exceeded, exposure):.1e}",
                str(sum(each.nvrx_exceeded for each in group)),
                str(sum(each.plain_exceeded for each in group)),
                "-" if ratio is None else f"{ratio:.2f}",
            )
        )
    header = ("deadline", "timeout", "rated", "tested", "over", "rate <", "5x over", "max over", "/ 5x")
    shown += table(header, rows, width, 0) if rows else [(("  no deadline has so many durations", "dim"),)]
    shown += [
        (),
        (
            (
                f"  {summary.answers} answers, {summary.rated} with a rate; {summary.exceeded} of {summary.exposure} "
                f"durations over the limit, {summary.worse} answers worse than stated",
                "red" if summary.worse else "",
            ),
        ),
    ]
    is_little = summary.says_too_little
    share = f"  {summary.exposure} of {summary.recorded} recorded durations were tested"
    shown.append(((share + ": too few to say anything" if is_little else share, "red" if is_little else ""),))
    for name, why in summary.untested.items():
        shown += [((line, "yellow"),) for line in wrap(f"  {name} was not tested: {why}", width)]
    return [*shown, ()]
