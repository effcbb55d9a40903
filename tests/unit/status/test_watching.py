"""What the screen says of the speed while ranks' snapshots grow old and new again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.status.watching import RATE_OVER, _Looker


def look(looker: _Looker, at: float, step: int, is_old: bool = False) -> None:
    now: Any = SimpleNamespace(ranks=[SimpleNamespace(step=step, is_old=is_old)])
    looker._note(now, at)


@pytest.mark.parametrize(("silent_s", "rate"), [(RATE_OVER / 2, 2.0), (RATE_OVER * 2, None)])
def test_speed_is_shown_until_all_snapshots_are_older_than_its_window(
    silent_s: float, rate: float | None, tmp_path: Path
) -> None:
    looker = _Looker(tmp_path)
    look(looker, 100.0, 10)
    look(looker, 105.0, 20)
    look(looker, 105.0 + silent_s, 20, is_old=True)
    assert looker.latest()[2] == rate
