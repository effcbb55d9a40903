"""What does an agent learn about warm starts while workers run?

Which modules the zygote has preloaded, and which it could not; which modules workers have imported themselves, so the
zygote can preload them for the next workers; which variables a program set too late for a warm worker. Main thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from resilience.facts import events
from resilience.launcher.event_reporter import NodeEvents
from resilience.launcher.worker.notes import ModuleImported, Note, VariablesSetTooLate
from resilience.launcher.worker.zygote import Zygote

FIRST_LIMIT = 20.0  # seconds that the first workers wait for the modules of --preload
LOOK = 0.1  # seconds between polls for a signal meanwhile
SETTLED = 2.0  # seconds without another import before the zygote imports what workers have imported


class WarmStart:
    """One node's zygote, and what the agent knows about it."""

    def __init__(self, reporter: NodeEvents, zygote: Zygote | None) -> None:
        self._reporter = reporter
        self._zygote = zygote
        self._is_first = True
        self._imported: dict[str, None] = {}  # modules that workers imported, in their order, not yet preloaded
        self._imported_at = 0.0
        self._refused: set[str] = set()  # modules that cannot be preloaded
        self._is_lost = False

    @property
    def pids(self) -> set[int]:
        return set() if self._zygote is None else self._zygote.pids

    def prepare(self, is_interrupted: Callable[[], bool]) -> None:
        """Take over preloaded modules before workers start. Only the first workers wait for them, without signals."""
        deadline = time.monotonic() + (FIRST_LIMIT if self._is_first else 0.0)
        self._take_preloaded(0.0)
        while self._is_preloading and time.monotonic() < deadline and not is_interrupted():
            self._take_preloaded(LOOK)
        if self._is_first and self._zygote is not None and self._zygote.being_preloaded and not is_interrupted():
            self._reporter.emit(events.ModulesTooLate(self._zygote.being_preloaded, FIRST_LIMIT))
        self._is_first = False

    def started(self, why_not_forked: str) -> None:
        """Report why the zygote could not fork the workers that have just started; empty if it was not asked or could.
        `look` reports that a zygote is lost."""
        if why_not_forked and self._zygote is not None and not self._zygote.why_not:
            self._reporter.emit(events.WorkersNotForked(why_not_forked))

    def look(self, notes: Iterable[tuple[int, Note]], is_cut_off: bool) -> None:
        """Take over preloaded modules, process the workers' notes (by rank), and report both.

        is_cut_off: do nothing; the workers must end soon, and a successor may take seconds to fork or to end."""
        if self._zygote is None or is_cut_off:
            return
        self._take_preloaded(0.0)
        for rank, note in notes:
            self._take_note(rank, note, self._zygote)
        if self._imported and time.monotonic() - self._imported_at >= SETTLED and not self._zygote.is_preloading:
            self._zygote.preload((), tuple(self._imported))
            self._imported.clear()
        if self._zygote.pid and self._zygote.why_not and not self._is_lost:
            self._is_lost = True
            self._reporter.emit(events.ZygoteLost(self._zygote.why_not))

    @property
    def _is_preloading(self) -> bool:
        return self._zygote is not None and self._zygote.is_preloading

    def _take_preloaded(self, limit: float) -> None:
        for loaded in self._zygote.succeed(limit) if self._zygote is not None else ():
            self._refused |= set(loaded.refused) if loaded.is_tried else set()
            duration = round(loaded.duration_s, 3)
            self._reporter.emit(
                events.ModulesPreloaded(loaded.modules, loaded.refused, loaded.why, duration, loaded.is_learned)
            )

    def _take_note(self, rank: int, note: Note, zygote: Zygote) -> None:
        match note:
            case ModuleImported(module):
                if module not in self._refused:
                    self._imported[module] = None
                    self._imported_at = time.monotonic()
            case VariablesSetTooLate(package, names):
                if names and not zygote.why_unsuited:  # a program can damage its notes
                    zygote.why_unsuited = f"the program sets {names[0]} before it imports {package}"
                    self._reporter.emit(events.VariablesTooLate(rank, package, names))
