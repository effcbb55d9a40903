"""What is the state of a rank at this moment?  Puts page, process, stacks and log into a record.

Gathered when a limit is exceeded, before any signal to the rank, and after its end. Nothing here waits for the rank:
missing evidence is left out, and the record says so."""

from __future__ import annotations

import contextlib
import functools
import linecache
import time
from collections import deque
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from resilience.core import hang_kind, watch
from resilience.core.observation import Doing, Observation
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import HANGS, Exit, Frame, Hang, InterruptionRecord, OpenSection, ProcessInfo
from resilience.facts.limits import Limit, Limits
from resilience.monitor.collectives import last_collectives
from resilience.monitor.page import MonitorSide, PageView
from resilience.system import files, processes, stacks
from resilience.system.background import READ_LIMIT, WRITER, asked
from resilience.system.channel import connect

SAMPLE_EVERY = 0.5  # least seconds between two samples of the CPU time; the monitor wakes once a second
SAMPLES = 8  # samples that are kept, those of the last 4 to 8 seconds
SAMPLE = 0.06  # seconds between two samples for one measurement: six ticks of the CPU time clock


class _Sample(NamedTuple):
    """The process at one moment. at: monotonic seconds."""

    at: float
    state: processes.ProcessState | None
    runnable: processes.Runnable | None

    @classmethod
    def reported(cls, at: float, process: ProcessInfo | None, is_blocked: bool) -> _Sample:
        """Return what a program has reported about itself. is_blocked: it was in the kernel before as well; reading or
        writing a page takes a moment."""
        if process is None or process.state is None or process.cpu_s_delta is None:
            return cls(at, None, None)
        state = "S" if process.state == "D" and not is_blocked else process.state
        seconds = process.runnable_s
        return cls(
            at,
            processes.ProcessState(state, process.cpu_s_delta, process.rss_bytes or 0, process.threads or 0, 0, None),
            None if seconds is None else processes.Runnable(seconds, turns=-1),
        )

    def or_else(self, fallback: _Sample) -> _Sample:
        return self if self.state is not None else fallback

    def since(self, before: _Sample) -> ProcessInfo | None:
        """Return what the process did since an earlier sample."""
        now, earlier = self.state, before.state
        if now is None or earlier is None:
            return None if now is None else ProcessInfo(now.state, rss_bytes=now.rss_bytes, threads=now.threads)
        interval, runnable = self.at - before.at, None
        if self.runnable is not None and before.runnable is not None:
            runnable = self.runnable.since(before.runnable, interval, now.state == earlier.state == "R")
        return ProcessInfo(
            state=now.state,
            cpu_s_delta=now.cpu_s - earlier.cpu_s,
            over_s=interval,
            # A dead process has no memory: its last size shows which process grew.
            rss_bytes=now.rss_bytes if now.wait_status is None else earlier.rss_bytes,
            threads=now.threads,
            runnable_s=runnable,
        )


NO_SAMPLE = _Sample(float("-inf"), None, None)


class _Seen(NamedTuple):
    """The process before any signal. longer: over more of its silence than `process`. waits_in: the kernel function in
    which its main thread slept. shows_life: signs of another kind came in the second half of its silence."""

    process: ProcessInfo | None
    longer: ProcessInfo | None
    waits_in: str
    shows_life: bool


class Witness:
    """Gathers the evidence on one rank. `page`, `program` and `dump` change when another program attaches.

    rank: the process whose life is watched. program: the one that shows signs of life, usually the same.
    logs: files whose last lines are recorded, `log_lines` in all. drain: the socket of the process that writes them,
    if it is not the rank itself. has_iterations: the page shows iterations. ask: makes a thread of the program write
    its stacks to the dump."""

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
        self._are_sources_lost = False
        self._samples = deque([NO_SAMPLE], SAMPLES)  # the last one is the newest
        self._seen_before_signal = _Seen(None, None, "", False)  # before the rank was touched

    def take_stacks(self, thorough: bool) -> stacks.Stacks:
        """Return the stacks of the program."""
        return stacks.capture(self.program, self.dump, thorough, self.ask)

    def enrich(
        self,
        record: InterruptionRecord,
        observation: Observation,
        limits: Limits,
        process: Literal["now", "seen", "none"] = "now",
    ) -> InterruptionRecord:
        """Add the present state of the rank to a record, from the page and the system. process: its state now, the last
        one seen, or none."""
        view = self.page.read()
        origin = self.origin
        stage = record.stage or view.hook or (None if view.doing is Doing.OUTSIDE else view.doing.value)
        # The record may show an earlier moment than the page, when the program had not ended yet.
        shows_the_end = record.exit is None and record.interruption in HANGS and stage == Doing.ENDING.value
        # A rank that has since restarted shows the rank and the signs of life of its next iteration.
        is_same = record.iteration in (None, view.iteration) or not self.has_iterations
        record = msgspec.structs.replace(
            record,
            iteration=view.iteration if record.iteration is None and self.has_iterations else record.iteration,
            active_rank=view.rank
            if record.active_rank is None and self.has_iterations and is_same
            else record.active_rank,
            node=origin.node if origin is not None else record.node,
            pid=self.rank.pid,
            exit=_coming_exit(view) if shows_the_end else record.exit,
            detected_wall_ns=record.detected_wall_ns or time.time_ns(),
            stage=stage,
            log_tail=self._log_tail(),
        )
        if process != "none":
            state = self._seen_before_signal.process if process == "seen" else self._process(record.silent_for_s)[0]
            record = msgspec.structs.replace(record, process=state)
        return self._with_signs_of_life(record, view, observation, limits) if is_same else record

    def see(self, silent_for: float) -> None:
        """Store the program's present state before any signal: a signal ends a system call, and a stopped process
        is continued before it is killed. silent_for: seconds without a sign of life."""
        sign_times, now = self.page.read().sign_times, time.monotonic()
        shows_life = hang_kind.shows_life((now - at for at in sign_times), silent_for)
        slept_in = processes.waits_in(self.program.pid)
        self._seen_before_signal = _Seen(*self._process(silent_for), slept_in, shows_life)

    def see_as_of(
        self, moment: float, silent_for: float, process: ProcessInfo | None, waits_in: str
    ) -> ProcessInfo | None:
        """Store the state of the program at a moment (monotonic seconds), as it has reported it itself: a late monitor
        would see its restart. Return its process, with its CPU use since the last sample before.

        silent_for: for how long there had been silence. process: with its CPU time since it began."""
        earlier = [sample for sample in self._samples if sample.at <= moment - SAMPLE]  # a tick of the clock is long
        before = earlier[-1] if earlier else NO_SAMPLE
        oldest = min(earlier, key=lambda sample: abs(sample.at - (moment - silent_for)), default=NO_SAMPLE)
        now = _Sample.reported(moment, process, is_blocked=before.state is not None and before.state.state == "D")
        shown, longer = now.since(before), None if oldest.state is None else now.since(oldest)
        if shown is not None and shown.over_s is not None and shown.over_s > silent_for:
            shown, longer = _in_the_end(shown, shown.over_s, silent_for), None
        self._seen_before_signal = _Seen(shown, longer, waits_in, shows_life=False)
        return shown

    def look(self) -> events.WorkerSeen:
        """Return the program's present position, without any exceeded limit."""
        self.see(0.0)
        stacks_taken = self.take_stacks(thorough=False)
        stack = stacks_taken.threads[0].frames if stacks_taken.threads else ()  # the main thread
        view = self.page.read()
        coming_exit = _coming_exit(view)
        return events.WorkerSeen(
            self.hang(stack, stacks_taken.is_gil_held),
            stack,
            view.step,
            last_collectives(self.page.collectives()),
            exit=coming_exit,
            log_tail=() if coming_exit is None else self._log_tail(),
        )

    def hang(self, stack: tuple[Frame, ...], is_gil_held: bool) -> Hang | None:
        """Return how the program hangs, from the last stored state. stack: the main thread's."""
        program = self._seen_before_signal
        line = self._line_of(stack[-1]) if stack else ""
        return hang_kind.classify(
            program.process, stack, line, program.waits_in, is_gil_held, program.longer, program.shows_life
        )

    def _line_of(self, frame: Frame) -> str:
        """Return a line of the program's source, empty if it cannot be read, as from a file server that does not
        answer: often that is what the program hangs in. It gets one chance, since a thread waits for it."""
        if not self._are_sources_lost:
            try:
                return asked(functools.partial(linecache.getline, frame.file, frame.line), READ_LIMIT)
            except (OSError, RuntimeError):  # it does not answer; no thread could be started
                self._are_sources_lost = True
        return ""

    def watch_program(self, program: processes.Process) -> None:
        """Watch this program from now on; what is known about another one does not count."""
        self.program = program
        self._samples = deque([NO_SAMPLE], SAMPLES)

    def take_sample(self, now: float) -> bool:
        """Store the CPU time and memory used so far, now and then, for a later comparison. Return True if it did."""
        if now - self._samples[-1].at < SAMPLE_EVERY:
            return False
        sample = self._look_at_process()
        if sample.state is None or sample.state.wait_status is None:  # else the memory may be gone already
            self._samples.append(sample)
        return True

    def _with_signs_of_life(
        self, record: InterruptionRecord, view: PageView, observation: Observation, limits: Limits
    ) -> InterruptionRecord:
        """Add the signs of life that the page shows."""
        now = time.monotonic()
        return msgspec.structs.replace(
            record,
            last_heartbeat_age_s=None if view.last_sign_at is None else now - view.last_sign_at,
            step=view.step if record.step is None else record.step,
            open_sections=tuple(
                OpenSection(sign.name, now - sign.seen_at, shortest(watch.section_limit(limits, observation, sign)))
                for sign in observation.open_sections
            ),
            last_collectives=last_collectives(self.page.collectives()),
            progress_unknown=not watch.shows_progress(limits, observation),
        )

    def _process(self, silent_for: float | None) -> tuple[ProcessInfo | None, ProcessInfo | None]:
        """Return the program's present state, with its CPU use since the last sample: that distinguishes blocked from
        busy. And the same with its CPU use over more of its silence, None if unknown."""
        before, now = self._samples[-1], self._look_at_process()
        state, known = now.state, before.state
        if state is None:  # gone already; its last size shows which process grew
            return None if known is None else ProcessInfo(rss_bytes=known.rss_bytes, threads=known.threads), None
        page = self.page.read()
        since = now.at - silent_for if silent_for else page.since
        beat = max((since, *page.sign_times))
        # After a standstill of this process, the first sample since then shows only what the rank did afterwards.
        oldest = min(self._samples, key=lambda sample: abs(sample.at - beat))
        if silent_for is not None and now.at - before.at > silent_for and state.wait_status is None:
            before = now  # the sample is from a healthy time
            time.sleep(SAMPLE)
            now = self._look_at_process().or_else(before)
        elif state.state == "D":
            time.sleep(SAMPLE)  # a page is read or written for a moment; a hang in the kernel lasts
            now = self._look_at_process().or_else(now)
        return now.since(before), None if oldest.state is None else now.since(oldest)

    def _look_at_process(self) -> _Sample:
        return _Sample(time.monotonic(), self.program.state(), processes.runnable(self.program.pid))

    def _log_tail(self) -> tuple[str, ...]:
        """Return the last lines of the logs, starting from the last log."""
        if self.drain and not WRITER.is_stalled:
            with contextlib.suppress(OSError):  # if it is gone, or slow, the files lack its last lines
                connection = connect(self.drain, READ_LIMIT)
                connection.send(b"keep")
                connection.receive(READ_LIMIT)
                connection.close()
        lines: tuple[str, ...] = ()
        for path in reversed(self.logs):
            missing = self.log_lines - len(lines)
            with contextlib.suppress(OSError):  # the disk does not answer
                lines = (
                    WRITER.ask(functools.partial(files.tail, path, missing), READ_LIMIT) if missing > 0 else ()
                ) + lines
        return lines


def _in_the_end(process: ProcessInfo, over_s: float, last_s: float) -> ProcessInfo:
    """Return what is certain of the last seconds of a longer time: the least for which the main thread was runnable."""
    least = None if process.runnable_s is None else max(0.0, process.runnable_s - (over_s - last_s))
    return msgspec.structs.replace(process, cpu_s_delta=None, over_s=last_s, runnable_s=least)


def shortest(limit: Limit) -> float | None:
    """Return the seconds after which a limit fires first, None if it never does."""
    return limit.soft if limit.soft is not None else limit.hard


def _coming_exit(view: PageView) -> Exit | None:
    """Return how a process will end whose program has failed; its interpreter still shuts down. None for others."""
    status = view.exit_status
    if not status:
        return None
    return Exit(code=status) if status > 0 else Exit(signal=processes.signal_name(-status))
