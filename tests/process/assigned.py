"""Ranks whose assignment hook raises, exits, forks or cannot be sent to their monitor."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from resilience.inprocess import CallWrapper, Compose, Wrapper
from resilience.inprocess.rank_assignment import FilterGroupedByKey, RankAssignment, ShiftRanks
from resilience.inprocess.state import State

PATIENT = {
    "soft_timeout": timedelta(seconds=60),
    "hard_timeout": timedelta(seconds=90),
    "barrier_timeout": timedelta(seconds=240),
    "completion_timeout": timedelta(seconds=240),
}


class FailsOn(RankAssignment):
    """Shifts ranks, but raises on some initial ranks: at the call of the function, or after iteration 0."""

    def __init__(self, ranks: list[int], at_entry: bool, how: str = "raises") -> None:
        self.ranks = ranks
        self.at_entry = at_entry
        self.how = how
        self.rank_pid = os.getpid()

    def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:
        is_entry = state.status.name == "INITIALIZED"
        if state.initial_rank in self.ranks and (is_entry == self.at_entry) and state.iteration == 0:
            self.fail()
        return ShiftRanks()(state, terminated)

    def fail(self) -> None:
        is_rank = os.getpid() == self.rank_pid  # not its monitor, which stands in for it
        if self.how.startswith("is killed") and is_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how.endswith("and forks") and os.fork():
            return
        if self.how == "forks" and (not is_rank or os.fork()):
            return
        if self.how in ("exits", "is killed"):
            sys.exit(3)
        raise KeyError("no such rack")


def fails_on(ranks: list[int], at_entry: bool, how: str = "raises") -> tuple[int, int, int] | str:
    """Rank 1 raises in iteration 0. Return (iteration, rank, world size) at the end."""

    @Wrapper(
        rank_assignment=FailsOn(ranks, at_entry, how),
        **PATIENT,
    )
    def function(call: CallWrapper | None = None) -> tuple[int, int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "1":
            raise ValueError("all restart")
        while call.iteration == 0:
            time.sleep(0.005)
        return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    pid = os.getpid()
    try:
        return function()
    except KeyError as error:
        if os.getpid() != pid:
            Path("child.new").write_text(f"{error!r}, {threading.active_count()} thread")
            Path("child.new").rename("child")
            os._exit(0)
        raise


def raises_before_a_filter(is_in_filter: bool, at_entry: bool) -> tuple[int, int, int]:
    """Rank 1 raises before two filters, or in the first of them. Return (iteration, rank, world size) at the end."""
    is_due = False

    def no_such_rack(rank: int, is_here: bool) -> None:
        if rank == 1 and is_here and is_due:
            raise KeyError("no such rack")

    class Before(RankAssignment):
        def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:
            nonlocal is_due
            is_due = state.iteration == 0 and (state.status.name == "INITIALIZED") == at_entry
            no_such_rack(state.rank, not is_in_filter)
            return state, terminated

    def node(rank: int, world_size: int) -> str:
        no_such_rack(rank, is_in_filter)
        return str(rank)

    @Wrapper(
        rank_assignment=Compose(
            ShiftRanks(),
            FilterGroupedByKey("all", lambda count: count >= 2),
            FilterGroupedByKey(node, lambda count: True),
            Before(),
        ),
        **PATIENT,
    )
    def function(call: CallWrapper | None = None) -> tuple[int, int, int]:
        assert call is not None
        if call.iteration == 0 and not at_entry:
            if os.environ["RANK"] == "2":
                raise ValueError("all restart")
            while True:
                time.sleep(0.005)
        return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return function()


def _loaded_by_path(path: Path) -> Any:
    """Load a module as plug-in systems do: no import would find it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def beside_a_thread(where: str) -> int:
    """Make a call beside a thread, with a hook of a module beside the script, of one that is loaded by its path, or of
    the script itself."""
    source = "from resilience.inprocess.rank_assignment import ShiftRanks\n\n\nclass Mine(ShiftRanks):\n    pass\n"
    if where != "script":
        folder = Path("scripts").absolute()  # not the current folder, where any new interpreter looks
        folder.mkdir()
        (folder / "hooks_beside_the_script.py").write_text(source)
        if where == "module":
            sys.path.insert(0, str(folder))
            module = importlib.import_module("hooks_beside_the_script")
        else:
            module = _loaded_by_path(folder / "hooks_beside_the_script.py")
    else:
        module = sys.modules["__main__"]
        exec(source, module.__dict__)  # as a script does
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(120,), name="user-thread")
    thread.start()

    @Wrapper(rank_assignment=module.Mine())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            raise ValueError("all restart")
        return call.iteration

    try:
        return function()
    finally:
        end.set()
        thread.join()


def is_refused_first() -> int:
    """Rank 0 makes calls that are refused before they begin."""

    @Wrapper()
    def function(number: int, call: CallWrapper | None = None) -> int:
        return number

    if os.environ["RANK"] == "0":
        for _ in range(2):
            try:
                function(1, verbose=True)  # type: ignore[call-arg]
            except TypeError:
                pass
    return function(7)
