"""What does a rank look like at this moment?  Page, process, stacks and log, put into a record.

Gathered when a limit is exceeded, before anything is sent to the rank, and when it has ended. Nothing here
waits for the rank: what cannot be had is left out, and the record says so."""

from __future__ import annotations

import contextlib
import functools
import linecache
import time
from pathlib import Path
from typing import Literal

import msgspec

from resilience.adapters import files, processes, stacks
from resilience.adapters.background import READ_LIMIT, WRITER
from resilience.adapters.channel import connect
from resilience.core import events, hangs, watch
from resilience.core.attribution import Frame, Hang, InterruptionRecord, OpenSection, ProcessInfo
from resilience.core.identity import Origin
from resilience.core.watch import Doing
from resilience.monitor.collectives import last_collectives
from resilience.monitor.page import MonitorSide, PageView

SAMPLE_EVERY = 0.5  # seconds at least between two looks at the CPU time; the monitor wakes once a second
SAMPLE = 0.06  # seconds of a look for this purpose: six ticks of the clock that counts CPU time


class Witness:
    """Knows one rank. `page`, `program` and `dump` change when another program attaches.

    rank: the process whose life is watched. program: the one that shows signs of life, mostly the same.
    logs: files whose ends are told, `log_lines` in all. drain: the socket of the process that writes them, if it is not
    the rank itself. has_iterations: the page tells of iterations. ask: has a
    thread of the program leave its stacks in the dump."""

    def __init__(self, page: MonitorSide, rank: processes.Process, dump: stacks.Dump | None) -> None:
        self.page = page
        self.rank = rank
        self.program = rank
        self.dump = dump
        self.origin: Origin | None = None
        self.logs: tuple[Path, ...] = ()
        self.log_lines = 5
        self.drain = ""
        self.has_iterations = True
        self.ask: stacks.Ask = lambda number: False
        self._sample: tuple[float, processes.ProcessState | None] = (float("-inf"), None)
        self._seen: tuple[ProcessInfo | None, str] = (None, "")  # before the rank was touched

    def take_stacks(self, thorough: bool) -> stacks.Stacks:
        """Return the stacks of the program."""
        return stacks.capture(self.program, self.dump, thorough, self.ask)

    def enrich(
        self,
        record: InterruptionRecord,
        seen: watch.Observation,
        limits: watch.Limits,
        process: Literal["now", "seen", "none"] = "now",
    ) -> InterruptionRecord:
        """Add to a record what the page and the system show of the rank now. process: its state now, the one that was
        seen last, or none."""
        view = self.page.read()
        origin = self.origin
        record = msgspec.structs.replace(
            record,
            iteration=view.iteration if record.iteration is None and self.has_iterations else record.iteration,
            active_rank=view.rank if record.active_rank is None and self.has_iterations else record.active_rank,
            node=origin.node if origin is not None else record.node,
            pid=self.rank.pid,
            detected_wall_ns=record.detected_wall_ns or time.time_ns(),
            stage=record.stage or view.hook or (None if view.doing is Doing.OUTSIDE else view.doing.value),
            log_tail=self._log_tail(),
        )
        if process != "none":
            state = self._seen[0] if process == "seen" else self._process_info(record.silent_for_s)
            record = msgspec.structs.replace(record, process=state)
        # A rank that has restarted meanwhile shows the signs of its next iteration.
        is_same = record.iteration == view.iteration or not self.has_iterations
        return self._with_signs(record, view, seen, limits) if is_same else record

    def see(self, silent_for: float | None, waits_in: str = "") -> None:
        """Keep the state of the program as it is now, before anything is sent to it: a signal ends a system call, and a
        stopped process goes on to be killed. silent_for: seconds without a sign of life; None takes no time.
        waits_in: what the program has seen of itself."""
        self._seen = self._process_info(silent_for), waits_in or processes.waits_in(self.program.pid)

    def look(self) -> events.WorkerSeen:
        """Return where the program is now, though no limit of its own is exceeded."""
        self.see(0.0)
        taken = self.take_stacks(thorough=False)
        stack = taken.threads[0].frames if taken.threads else ()  # the main thread's
        return events.WorkerSeen(
            self.hang(stack, taken.is_gil_held),
            stack,
            self.page.read().step,
            last_collectives(self.page.collectives()),
        )

    def hang(self, stack: tuple[Frame, ...], is_gil_held: bool) -> Hang | None:
        """Return in which way the program hangs, by the state that was seen last. stack: the main thread's."""
        process, waits_in = self._seen
        line = linecache.getline(stack[-1].file, stack[-1].line) if stack else ""
        return hangs.classify(process, stack, line, waits_in, is_gil_held)

    def take_sample(self, now: float) -> None:
        """Remember the CPU time and memory used so far, now and then, for a later comparison."""
        if now - self._sample[0] >= SAMPLE_EVERY:
            seen = processes.state(self.program.pid)
            if seen is None or seen.wait_status is None:  # of one that is going, the memory may be gone already
                self._sample = (now, seen)

    def _with_signs(
        self, record: InterruptionRecord, view: PageView, seen: watch.Observation, limits: watch.Limits
    ) -> InterruptionRecord:
        """Add the signs of life that the page shows."""
        now = time.monotonic()
        beats = [at for at in (view.heartbeat_at, view.step_at, view.ping_at) if at is not None]
        return msgspec.structs.replace(
            record,
            last_heartbeat_age_s=now - max(beats) if beats else None,
            step=view.step if record.step is None else record.step,
            open_sections=tuple(
                OpenSection(sign.name, now - sign.seen_at, shortest(watch.section_limit(limits, seen, sign)))
                for sign in seen.open_sections
            ),
            last_collectives=last_collectives(self.page.collectives()),
            progress_unknown=not watch.shows_progress(limits, seen),
        )

    def _process_info(self, silent_for: float | None) -> ProcessInfo | None:
        """The program's state now; CPU use since the last sample tells blocked from busy."""
        state = self.program.state()
        if state is None:
            return None
        at, before = self._sample
        now = time.monotonic()
        if silent_for is not None and now - at > silent_for and state.wait_status is None:
            # That sample is of a time when it was well.
            before, at = state, now
            time.sleep(SAMPLE)
            state, now = self.program.state() or state, time.monotonic()
        elif state.state == "D":
            time.sleep(SAMPLE)  # a page is read or written for a moment; a hang in the kernel lasts
            state = self.program.state() or state
        return ProcessInfo(
            state=state.state,
            cpu_s_delta=state.cpu_s - before.cpu_s if before is not None else None,
            over_s=now - at if before is not None else None,
            # What is gone has no memory any more: how much it had tells who grew.
            rss_bytes=before.rss_bytes if state.wait_status is not None and before is not None else state.rss_bytes,
            threads=state.threads,
        )

    def _log_tail(self) -> tuple[str, ...]:
        """The last lines of the logs, those of the last log first of all."""
        if self.drain and not WRITER.is_stalled:
            with contextlib.suppress(OSError):  # it is gone, or slow: then the files lack what it has
                asking = connect(self.drain, READ_LIMIT)
                asking.send(b"keep")
                asking.receive(READ_LIMIT)
                asking.close()
        lines: tuple[str, ...] = ()
        for path in reversed(self.logs):
            wanted = self.log_lines - len(lines)
            with contextlib.suppress(OSError):  # the disk does not answer
                lines = (
                    WRITER.ask(functools.partial(files.tail, path, wanted), READ_LIMIT) if wanted > 0 else ()
                ) + lines
        return lines


def shortest(limit: watch.Limit) -> float | None:
    """Return the seconds after which a limit fires first, None if it never does."""
    return limit.soft if limit.soft is not None else limit.hard
