"""The score as pictures: how sure and how right verdicts are, and who names the culprit.  SVG, from the raw results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.campaign import scoring
from tests.campaign.running import Outcome
from tests.campaign.scoring import Share

WIDTH, LEFT, TOP, SIDE = 640, 60, 40, 360
BAR = 26  # height of a contestant's row


def reliability(outcomes: Iterable[Outcome]) -> str:
    """Return a diagram: the share of right blame for each confidence. It has to lie on the diagonal or above."""
    parts = [_text(LEFT, 22, "share of blamed ranks that were broken, by confidence")]
    for tenth in range(0, 11, 2):
        value = tenth / 10
        parts += [_line(LEFT, _y(value), LEFT + SIDE, _y(value), "grid")]
        parts += [
            _text(LEFT - 8, _y(value) + 4, f"{value:g}", "end"),
            _text(_x(value), _y(0) + 18, f"{value:g}", "middle"),
        ]
    parts.append(_line(_x(0), _y(0), _x(1), _y(1), "even"))
    for level, share in scoring.by_confidence(outcomes).items():
        low, high = share.interval
        parts.append(_line(_x(level), _y(low), _x(level), _y(high), "range"))
        parts.append(f'<circle cx="{_x(level):.1f}" cy="{_y(share.good / share.count):.1f}" r="4"/>')
    parts.append(_text(LEFT + SIDE + 16, _y(0.5), "bars: 95 % interval"))
    return _svg(TOP + SIDE + 40, parts)


def contestants(outcomes: Sequence[Outcome]) -> str:
    """Return a diagram with two bars for each contestant: cases that recovered, and culprits named first. It has only
    the kind of cases that all contestants ran: one fault in DDP with 2 or 4 ranks."""
    outcomes = [each for each in outcomes if each.case.kind == "ddp" and each.case.world < 8 and not each.case.second]
    names = sorted({each.contestant for each in outcomes})
    parts = [_text(LEFT, 22, "share of cases: recovered (above), culprit named first (below); line: 95 % interval")]
    for row, name in enumerate(names):
        top = TOP + row * (2 * BAR + 12)
        cases = [each for each in outcomes if each.contestant == name]
        judged = scoring.judged(cases)
        shares = (
            Share(sum(each.recovered for each in cases), len(cases)),
            Share(sum(map(scoring.is_first, judged)), len(judged)),
        )
        parts.append(_text(10, top + BAR + 4, name))
        for place, share in enumerate(shares):
            parts += _bar(top + place * BAR, share)
    return _svg(TOP + len(names) * (2 * BAR + 12) + 10, parts)


def _bar(top: float, share: Share) -> list[str]:
    left, width = 200.0, 300.0
    if not share.count:
        return [_text(left, top + 17, "gives no verdict")]
    low, high = share.interval
    middle = top + BAR / 2 - 2
    return [
        f'<rect x="{left:.0f}" y="{top + 3:.0f}" width="{width * share.good / share.count:.1f}" height="{BAR - 9}"/>',
        _line(left + width * low, middle, left + width * high, middle, "range"),
        _text(left + width + 12, top + 17, f"{share.good} of {share.count}"),
    ]


def _x(value: float) -> float:
    return LEFT + SIDE * value


def _y(value: float) -> float:
    return TOP + SIDE * (1 - value)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(height: float, parts: Iterable[str]) -> str:
    style = (
        "text{font:12px sans-serif;fill:#333}rect{fill:#9ab8d8}circle{fill:#1f4e79}.grid{stroke:#ddd}"
        ".even{stroke:#888;stroke-dasharray:4}.range{stroke:#1f4e79;stroke-width:2}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}">'
    white = f'<rect width="{WIDTH}" height="{height:.0f}" style="fill:#fff"/>'
    return "\n".join((head, f"<style>{style}</style>", white, *parts, "</svg>")) + "\n"
