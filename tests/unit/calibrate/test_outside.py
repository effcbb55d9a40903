"""Which limit holds outside known phases if some occurrences did not end by themselves?"""

from __future__ import annotations

import random

import pytest

from resilience.calibrate.held_out import backtest
from resilience.calibrate.limits import Target, calibrate
from resilience.calibrate.observed import ObservedCut, ObservedDeadline, ObservedRun, StartValues
from resilience.calibrate.timings import Input
from resilience.calibration.limits_file import Deadline
from resilience.calibration.unended import Cut
from resilience.facts.configuration import Configuration

PHASE_EVERY, PAUSE_EVERY = 200, 101
AT_PHASE, ELSEWHERE = 400, 450


def run(seed: int, phase_s: float, pause_s: float, cut: ObservedCut | None) -> ObservedRun:
    """Return a run of 2,400 steps of 1 s, slower at each phase, and at pauses between them."""
    chance = random.Random(seed)
    values = [chance.lognormvariate(0.0, 0.02) for _ in range(2400)]
    values[37::PAUSE_EVERY] = [pause_s] * len(values[37::PAUSE_EVERY])
    values[PHASE_EVERY::PHASE_EVERY] = [phase_s] * len(values[PHASE_EVERY::PHASE_EVERY])
    deadline = ObservedDeadline(
        starts=[StartValues("cold", dict(enumerate(values[:16])))],
        kept=[(number, seconds, float(number)) for number, seconds in enumerate(values)],
        n=len(values),
        max_s=max(values),
        cuts=[cut] if cut is not None else [],
    )
    return ObservedRun(f"r{seed}", Configuration("train.py", world_size=1), 1, 2500.0, {"step": deadline})


def learned(phase_s: float, pause_s: float, cut: ObservedCut | None = None) -> Deadline:
    """Return the limits of three runs, of which the last has this cut."""
    runs = [run(seed, phase_s, pause_s, cut if seed == 2 else None) for seed in range(3)]
    return calibrate(Input(runs, []), Target(min_timeout=0.01)).deadlines["step"]


@pytest.mark.parametrize("end", ["cut", "killed"])
@pytest.mark.parametrize("number", [AT_PHASE, ELSEWHERE])
def test_occurrence_that_did_not_end_by_itself_makes_no_shorter_limit_outside_phases(end: str, number: int) -> None:
    """It raises the usual limit. A limit outside phases that was not worth storing before is not worth it now."""
    before, after = learned(1.6, 1.2), learned(1.6, 1.2, ObservedCut(Cut(600.0, end), number, "cold"))  # type: ignore[arg-type]
    assert before.outside is None and after.outside is None
    assert (before.timeout_s or 0.0) < (after.timeout_s or 0.0) == pytest.approx(5 * 1.6)


def test_occurrence_that_did_not_end_by_itself_raises_a_limit_outside_phases_that_exists() -> None:
    before = learned(2.5, 1.2).outside
    at_phase = learned(2.5, 1.2, ObservedCut(Cut(600.0, "killed"), AT_PHASE, "cold")).outside
    elsewhere = learned(2.5, 1.2, ObservedCut(Cut(600.0, "killed"), ELSEWHERE, "cold")).outside
    assert before is not None and at_phase == before
    assert elsewhere is not None and elsewhere.phases == before.phases
    assert before.timeout_s < elsewhere.timeout_s == pytest.approx(5 * 1.2)
    assert "a limit ended 1 occurrence" in elsewhere.warnings[0]


@pytest.mark.parametrize(
    ("longest_s", "pause_s", "cut"),
    [(2.8, 1.5, Cut(1.45 * 2.8, "cut")), (2.5, 1.2, Cut(3.0, "killed")), (2.5, 1.2, Cut(3.9, "killed"))],
)
def test_limit_outside_phases_goes_if_it_is_raised_to_nearly_the_usual_one(
    longest_s: float, pause_s: float, cut: Cut
) -> None:
    """The occurrence took unusually long for those outside phases, but hardly for all."""
    assert learned(longest_s, pause_s).outside is not None
    assert learned(longest_s, pause_s, ObservedCut(cut, ELSEWHERE, "cold")).outside is None


@pytest.mark.parametrize(("at_phase_s", "exceeded"), [(2.5, 1), (1.0, 0)])
def test_backtest_counts_a_limit_outside_phases_until_a_phase_at_which_the_run_is_not_slow(
    at_phase_s: float, exceeded: int
) -> None:
    runs = [run(seed, 2.5, 1.2, None) for seed in range(3)]
    kept = runs[2].deadlines["step"].kept
    kept[AT_PHASE] = (AT_PHASE, at_phase_s, float(AT_PHASE))
    kept[ELSEWHERE] = (ELSEWHERE, 4.0, float(ELSEWHERE))  # above the limit outside phases, below the usual one
    (answer,) = [each for each in backtest(runs, Target(min_timeout=0.01)).answers if each.left_out == "r2"]
    assert (answer.exceeded, answer.outside_exceeded) == (0, exceeded)
    assert (answer.outside_exposure < PHASE_EVERY) is not bool(exceeded)
