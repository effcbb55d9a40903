"""A call's session is closed however its opening ends."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.inprocess import session as session_module
from resilience.inprocess.session import Session


def test_session_is_closed_if_an_interrupt_arrives_before_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(list[Session]):
        def append(self, _: Session) -> None:
            raise KeyboardInterrupt

    class Fake(Session):
        def __init__(self, *_: Any) -> None:
            pass

        def _close(self) -> None:
            closed.append(self)

    closed: list[Session] = []
    monkeypatch.setattr(session_module, "_open", Interrupting())
    wrapper: Any = None
    with pytest.raises(KeyboardInterrupt), Fake.open(wrapper, "function", 0, wrapper):
        pytest.fail("the body ran")
    assert len(closed) == 1
