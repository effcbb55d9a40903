"""How a new file follows an earlier one."""

from __future__ import annotations

from resilience.core.timeouts import Deadline, succeed


def test_limit_that_is_kept_has_its_own_ratios_to_the_new_durations() -> None:
    fresh = Deadline(2.0, "short", "", 1e-6, ratio_to_max=2.0, ratio_to_median=4.0, max_s=1.0, median_s=0.5)
    known = succeed({"step": fresh}, {"step": Deadline(100.0, "ok", "", 1e-6)})["step"]
    assert (known.timeout_s, known.ratio_to_max, known.ratio_to_median) == (100.0, 100.0, 200.0)


def test_limit_that_is_raised_without_a_fit_has_its_own_ratios() -> None:
    fresh = Deadline(None, "insufficient", "", 1e-6, max_s=3.0, median_s=1.0)
    known = succeed({"step": fresh}, {"step": Deadline(2.0, "ok", "", 1e-6)})["step"]
    assert (known.timeout_s, known.ratio_to_max, known.ratio_to_median) == (15.0, 5.0, 15.0)
