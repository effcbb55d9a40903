"""Hooks that tell an outer launcher about restarts.  Names of the compatible API from its release 0.4 on.

There each of them writes a line for the launcher's log. Here they do nothing: the restarts of the Wrapper and of
`resilience run` are in the same records, and `resilience report` shows both. Code that composes them runs unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilience.inprocess.abort import Abort
from resilience.inprocess.completion import Completion
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.later_releases import missing
from resilience.inprocess.state import State
from resilience.inprocess.terminate import Terminate


class _NoReport:
    """Returns the state as it is. special_rank: the initial rank that reports in the compatible API; unused."""

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = special_rank

    def __call__(self, state: State) -> State:
        return state


class NestedRestarterHandlingCompleted(_NoReport, Initialize):
    """For `initialize`; without effect."""


class NestedRestarterHandlingStarting(_NoReport, Abort):
    """For `abort`; without effect."""


class NestedRestarterFinalized(_NoReport, Completion):
    """For `completion`; without effect."""


class NestedRestarterAborted(_NoReport, Terminate):
    """For `terminate`; without effect."""


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
