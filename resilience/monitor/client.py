"""What user code calls to show that it lives and where it is.

`section`, `heartbeat` and `step` store into the page of the rank's monitor. Outside a wrapped function
and without the launcher there is no page: they do nothing then, so that a training script runs
unchanged without us."""

from __future__ import annotations

from types import TracebackType

from resilience.monitor.page import RankSide

_page: RankSide | None = None


def activate(page: RankSide) -> None:
    """Let user code reach `page` from now on."""
    global _page
    _page = page


def deactivate() -> None:
    """Let user code's signs go nowhere from now on."""
    global _page
    _page = None


def heartbeat() -> None:
    """Show a sign of life."""
    if _page is not None:
        _page.heartbeat()


def step(number: int) -> None:
    """Tell the training step that is about to be done, counted from 0. Only a rise is progress."""
    if _page is not None:
        _page.step(number)


class section:  # noqa: N801  reads as a statement: `with resilience.section("data"):`
    """Name a stretch of the program. Sections may nest and overlap; each is timed, and limited where a
    limit is set for its name.

    Raises: ConfigurationError if a section of this name is open already."""

    __slots__ = ("_name", "_page")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._page = _page  # where it is opened is where it is closed
        if _page is not None:
            _page.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._page is not None and self._page.is_open(self._name):
            self._page.leave(self._name, failed=kind is not None)
