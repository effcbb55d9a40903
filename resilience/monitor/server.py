"""Watches one rank from another process.  A short loop around `core.watch`.

The monitor sleeps until the next deadline, a message from its rank, or the rank's death. It then reads the page, calls
`core.watch.decide`, emits the events, and performs the commands. The loop is the same in a Wrapper and under the
launcher. What differs is in two parts: the `Subject`, which is what the monitor watches, and the `FindingsReceiver`,
which passes findings on to the job: through the shared store in a Wrapper, to the agent under the launcher. Telemetry
never steers the loop: records that cannot be written are counted."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec

from resilience.attribution.symptoms import main_stack
from resilience.calibration.limits_file import of_rank, raised
from resilience.core import hang_kind, watch
from resilience.core.limits import with_recorded_names
from resilience.core.observation import Doing, Observation, Sign
from resilience.core.pace import Pace
from resilience.core.standstills import NOTICEABLE, Standstill, longest, longest_sleep
from resilience.core.watch import Decision, Finding, Watch, decide
from resilience.errors import DecodeError
from resilience.facts import deadlines, events, tracebacks
from resilience.facts.deadlines import exceeded_in_words, silence_in_words
from resilience.facts.identity import FileOwner, Job, Origin
from resilience.facts.interruptions import Detector, Exit, Interruption, InterruptionRecord
from resilience.facts.limits import Limits
from resilience.facts.records import Record
from resilience.monitor import messages
from resilience.monitor.duration_recorder import DurationRecorder, Position
from resilience.monitor.evidence import Witness
from resilience.monitor.listening import Listener
from resilience.monitor.loader_workers import LoaderWorkers
from resilience.monitor.oom import OomKills
from resilience.monitor.page import NAMES, Closed, MonitorSide, PageView
from resilience.monitor.snapshots import Snapshots
from resilience.monitor.suspicions import Suspicions
from resilience.system import processes, stacks
from resilience.system.background import WRITER
from resilience.system.channel import Channel, ChannelClosed
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile, write_job

FLUSH_EVERY = 15.0  # seconds between two writes of the timing histograms
EXIT_LIMIT = 0.05  # seconds to learn how a dying rank ended
MOST_MESSAGES = 256  # of the rank that are read before its signs of life are checked again
MOST_ROUNDS = 64  # batches of these after its end: its child may still hold the channel
REFUSED_EVERY = 1.0  # seconds between two reports of refused messages
NAMES_FULL = (
    f"the program uses more than {NAMES - 1} names of sections, hooks and collectives; the other ones are recorded as "
    "(more), and sections among them have no limit of their own"
)


class FindingsReceiver(Protocol):
    """The receiver of a monitor's findings. Only `finish` blocks, and no method raises."""

    @property
    def are_others_seen(self) -> bool:
        """True once the other ranks' state is on record, since the last call of `interrupt`."""
        ...

    def begin(self, begin: messages.Begin) -> None: ...
    def suspect(self, rank: int, suspicion: events.HangSuspected) -> None: ...
    def seek_others(self) -> None:
        """Ask where the other ranks of the node are. `Suspicions.others_found` takes the answer, if one comes."""

    def started(self, origin: Origin) -> None:
        """Note that an iteration has begun: the rank enters its function or waits as a spare, or the iteration was
        interrupted. Called more than once for an iteration."""

    def hung_up(self) -> None:
        """Send remaining messages at once: the rank is about to stop listening."""

    def interrupt(self, record: InterruptionRecord) -> None: ...
    def host(self, iteration: int) -> None: ...
    def stand_in(self, record: InterruptionRecord) -> None: ...
    def finish(self) -> events.Event | None:
        """Complete all work, as the last call. Return the event about representing the rank, if any."""


class Subject(Protocol):
    """What a monitor watches: a rank that calls functions of a Wrapper (`calling_rank.CallingRank`), or a worker of the
    launcher (`worker.WorkerMonitor`). The loop calls these methods."""

    @property
    def announced_at(self) -> float | None:
        """When the rank announced heartbeats, in monotonic seconds, None if it did not."""
        ...

    def handle(self, message: messages.FromRank) -> None:
        """Handle one message of the rank."""

    def heard(self) -> None:
        """Note that messages were read."""

    def recorded(self) -> None:
        """Note that durations were recorded."""

    def completed(self, observation: Observation) -> Observation:
        """Return an observation with what only the subject knows."""
        ...

    def died(self) -> None:
        """Note that the rank is gone, once."""

    def due(self, due: float) -> float:
        """Return when the loop has to look again at the latest. due: because of what it knows itself."""
        ...

    def send(self, number: int) -> None:
        """Send the rank a signal."""

    def end_loader_workers(self) -> None:
        """See to the data loader workers of a dead rank, as the last work of the loop."""


class RankMonitor:
    """The loop of one monitor. `run` returns when the rank is gone and its end is on record."""

    def __init__(
        self,
        page: MonitorSide,
        channel: Channel | None,
        rank: processes.Process,
        receiver: FindingsReceiver,
        dump: stacks.Dump | None,
        subject: Subject,
        selector: selectors.BaseSelector | None = None,
        listener: Listener | None = None,
        raised: Mapping[str, float] = MappingProxyType({}),
        is_cold: bool | None = None,
    ) -> None:
        """subject: what is watched. selector: its other descriptors are served too; their data are called when they
        are ready. listener: knows which silences the rank has shown. raised: learned limits that did not fit earlier
        processes of the rank, and the longer ones in their place. is_cold: whether the rank's process has started cold,
        None if that is unknown."""
        self.page = page
        self.channel = channel
        self.rank = rank
        self._receiver = receiver
        self._dump = dump
        self._subject = subject
        self.witness = Witness(page, rank, dump)
        self.witness.ask = self._ask_for_stacks
        self._watch = Watch()
        self._emitter: Emitter | None = None
        self._file: RecordFile | None = None
        self._folder: Path | None = None
        self._origin: Origin | None = None
        self.recorder: DurationRecorder | None = None
        self._is_cold = is_cold
        self.suspicions = Suspicions(self.look, receiver.seek_others, self.emit)
        self.listener = listener or Listener()
        self._observation = Observation()
        self._flush_at = time.monotonic() + FLUSH_EVERY
        self._snapshots = Snapshots()
        self._interrupted: tuple[int, float] | None = None  # iteration, time
        self._stuck_in: int | None = None
        self._own_record: InterruptionRecord | None = None  # the rank's last one in this call
        self.has_completed = False  # the rank has completed this call
        self._has_told_of_names = False  # True once it was reported that there are too many
        self._refused: Counter[str] = Counter()  # messages, by reason
        self._refused_at = float("-inf")
        self._expected_at = time.monotonic()  # the latest time at which this process was to run
        self._standstills: list[Standstill] = []
        self.raised = dict(raised)  # learned limits that no longer fit, and the longer ones in their place
        self._limits_of_all = Limits()  # of all groups of ranks
        self._group_rank: int | None = None  # the rank whose group's limits hold; None: the limits of all ranks
        self._unlearned: Limits | None = None  # that hold once fewer ranks are active; None: the same ones
        self._most_active = 0  # ranks in any iteration
        self.is_gone = False
        self.loader_workers = LoaderWorkers()
        self.status: Exit | None = None
        self._noticed_by: Literal["mutex", "pidfd"] = "pidfd"
        self.is_over = False
        self._oom_kills = OomKills()
        self._stacks = stacks.NONE
        self._open: dict[str, Record] = {}  # stages and iterations that the rank has begun but not ended
        self._pace = Pace()
        self._wake_read, self._wake_write = os.pipe()
        self._death: threading.Thread | None = None
        self._selector = selector or selectors.DefaultSelector()
        self._selector.register(self.rank.pidfd, selectors.EVENT_READ, lambda: self._rank_gone("pidfd"))
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: self._rank_gone("mutex"))
        if channel is not None:
            self._selector.register(channel, selectors.EVENT_READ, self._receive)
            self._watch_mutex()

    def run(self) -> None:
        """Watch until the rank is gone and its end is represented."""
        due = min(self._flush_at, self._snapshots.due)
        while not self.is_over:
            self._sleep(self._subject.due(due))
            now = self._clock()
            if not self._pace.looks(now, due):
                continue
            self._pace = self._pace.looked(now)
            view = self.record_durations(now)
            self._report_refused_messages(now)
            self._observation = self._observe(view)
            decision = decide(self._watch, self._observation, now)
            is_ending = self.is_gone or self._watch.kill_at is not None
            self.suspicions.weigh(self._watch.limits, self._observation, is_ending, now)
            if not decision.commands and not self.is_gone and self.witness.take_sample(now):
                self.loader_workers.look(self.rank.pid)
                self._oom_kills.look()
            self._watch = decision.state
            self._perform(decision)
            self.is_over |= self._is_dismissed_by_rank()
            late_at = self.suspicions.next_look(self._watch.limits, self._observation, now)
            silence_at = self._weigh_silence(now)
            if now >= self._snapshots.due:
                self._write_snapshot()
            moments = (decision.wake_at, late_at, silence_at, self._flush_at, self._snapshots.due)
            due = min(wake_time for wake_time in moments if wake_time is not None)
        self._close()

    # -- for its subject ------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Return the limits that apply now."""
        return self._watch.limits

    @property
    def finding(self) -> Finding | None:
        """Return why the rank is ended, None if it is not."""
        return self._watch.finding

    @property
    def said_goodbye(self) -> bool:
        """Return True if the rank had said goodbye when the loop last looked."""
        return self._observation.said_goodbye

    def connect(
        self, page: MonitorSide, channel: Channel, dump: stacks.Dump, program: processes.Process, is_locked: bool
    ) -> None:
        """Watch the program that stores into `page` from now on. is_locked: the rank holds the page's mutex."""
        self.page = self.witness.page = page
        self.channel = channel
        self.witness.watch_program(program)
        self._dump = self.witness.dump = dump
        self._selector.register(channel, selectors.EVENT_READ, self._receive)
        if is_locked:
            self._watch_mutex()

    def disconnect(self) -> None:
        """Release the connected program."""
        if self.channel is not None:
            self.hung_up()
        self.record_durations(time.monotonic())
        if self.witness.program is not self.rank:
            self.witness.program.close()
            self.witness.watch_program(self.rank)
        if self._dump is not None:
            os.close(self._dump.fd)
            self._dump = self.witness.dump = None

    def continue_from(self, tail: int, position: Position, raised: Mapping[str, float]) -> None:
        """Continue where another monitor of this program stopped. tail: number of the page's entries that it has read.
        position: of its records of durations. raised: learned limits that did not fit, and longer ones."""
        self.page.continue_at(tail)
        self.raised |= raised
        self.limit(self.limits)
        lost = 0 if self.recorder is None else self.recorder.continue_from(position)
        if lost:
            self.emit(events.TelemetryDropped("timing", "the lost monitor had not written them", lost))

    def reaped(self, status: Exit) -> None:
        """Take the rank's exit status from its parent."""
        if self.status in (None, Exit()):
            self.status = status

    def stop_waking_for_end(self) -> None:
        """Note how the rank ended, and wake up for that no more: the loop may continue for a while."""
        if self.status is None:
            self.status = self.rank.exit_status(EXIT_LIMIT)
        self._selector.unregister(self.rank.pidfd)
        self._selector.unregister(self._wake_read)

    def stop(self) -> None:
        """Stop watching; leave the rank alone."""
        self.is_over = True

    def release(self) -> None:
        """Release what the loop holds, after it has ended. Its selector may be used further."""
        for fd in (self.rank.pidfd, self._wake_read):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        if self._file is not None:
            self._file.close()
        if self._death is not None:
            self._death.join(1.0)
        if self._death is None or not self._death.is_alive():  # else the thread may still write there
            os.close(self._wake_read)
            os.close(self._wake_write)
            self.rank.close()

    # -- waking ---------------------------------------------------------------------------------

    def _watch_mutex(self) -> None:
        """Notice the rank's death by the page's mutex, long before the process's memory is freed."""
        self._death = threading.Thread(
            target=self._await_death, args=(self.page,), name="resilience-death", daemon=True
        )
        try:
            self._death.start()
        except RuntimeError:  # this host or process has no thread left: the pidfd reports the death, a little later
            self._death = None

    def _await_death(self, page: MonitorSide) -> None:
        while not page.wait_for_death(60.0):  # repeat: the call has a limit, the rank's life has none
            if threading.current_thread() is not self._death:
                return
        if threading.current_thread() is not self._death:
            return  # the rank has attached again: the new page's thread reports its death
        # At once: the rank's parent may reap it at any moment.
        status = self.rank.exit_status(EXIT_LIMIT)
        if status == Exit() and not self.rank.has_ended():
            return  # it lives, as after `exec`; or it ends and /proc cannot be read: then the pidfd reports its end
        self.status = status
        os.write(self._wake_write, b"x")

    def _sleep(self, due: float) -> None:
        """Wait until a descriptor is ready or a check is due, and handle what is ready."""
        now = self._clock()
        sleep_until = now + longest_sleep(watch.every_limit(self._watch.limits))
        self._expected_at = wake_at = max(now, min(sleep_until, self._pace.wake_at(now, due)))
        resting = None if self._pace.reads(now) else self.channel
        if resting is not None:
            self._selector.unregister(resting)
        ready = self._selector.select(wake_at - now)
        self._clock()
        if resting is not None:
            self._selector.register(resting, selectors.EVENT_READ, self._receive)
        for key, _ in ready:
            is_rank = key.fileobj is self.channel
            self._pace = self._pace.heard() if is_rank else self._pace.asked()
            key.data()

    def _clock(self) -> float:
        """Return the time. Notice if this process stood still, since it was to wake or since the last call."""
        now = time.monotonic()
        if now - self._expected_at > NOTICEABLE:
            self._standstills = longest([*self._standstills, Standstill(self._expected_at, now)])
            if self.recorder is not None:
                self.recorder.stood_still(self._expected_at, now)
        self._expected_at = now
        return now

    def _rank_gone(self, noticed_by: Literal["mutex", "pidfd"]) -> None:
        if not self.is_gone:
            for _ in range(MOST_ROUNDS):  # first read its last messages
                if not self._receive():
                    break
            self.is_gone = True
            self._noticed_by = noticed_by
            emitter, file = self._emitter, self._file

            def report(pids: tuple[int, ...]) -> None:
                if emitter is not None and file is not None:
                    emitter.emit(events.LoaderWorkersKilled(pids))
                    file.close()  # its owner may have closed it before

            inherited = None if self._dump is None else self._dump.fd
            self.loader_workers.outlived(self.rank, inherited, report)
            self._subject.died()

    def _receive(self) -> bool:
        """Handle the rank's messages. Return True if there may be more."""
        has_more = self._read_messages()
        self._subject.heard()
        return has_more

    def _read_messages(self) -> bool:
        for _ in range(MOST_MESSAGES):
            if self.channel is None:
                return False
            try:
                data = self.channel.receive(0.0)
            except ChannelClosed:
                self.hung_up()
                return False
            if data is None:
                return False
            try:
                self._subject.handle(messages.decode_for_monitor(data))
            except DecodeError as error:
                self.refuse(f"malformed message: {error}"[:200])
        return True

    def hung_up(self) -> None:
        """Close the channel after the rank. If the rank has not begun a call, it could not, and needs no monitor."""
        assert self.channel is not None
        self._pace = self._pace.asked()
        self._receiver.hung_up()
        self._selector.unregister(self.channel)
        self.channel.close()  # the rank waits for this
        self.channel = None
        self.is_over |= self._origin is None

    def _is_dismissed_by_rank(self) -> bool:
        """Return True if the rank's call is over: the rank has closed its end, and the store knows how it left."""
        observation = self._observation
        return (
            self.channel is None and observation.has_left and (observation.said_goodbye or self._watch.is_represented)
        )

    def refuse(self, reason: str) -> None:
        """Count a message that the rank must not send."""
        self._refused[reason] += 1

    def _report_refused_messages(self, now: float) -> None:
        """Emit refused messages summed up by reason, because one sender may send many."""
        if self._refused and now - self._refused_at >= REFUSED_EVERY and self._emitter is not None:
            self._refused_at = now
            for reason, count in self._refused.most_common(8):
                self.emit(events.TelemetryDropped("record", reason, count))
            self._refused.clear()

    # -- the rank's messages --------------------------------------------------------------------

    def begin_call(self, begin: messages.Begin) -> None:
        """Watch the rank in its next call."""
        if self._has_left() and not self._watch.is_represented:
            self._represent()  # in the previous call, while the receiver still knows it
        self._own_record, self.has_completed = None, False
        self.open(begin.origin, Path(os.fsdecode(begin.folder)), begin.limits, begin.job)
        self._receiver.begin(begin)

    def host(self, iteration: int) -> None:
        """Host an iteration's store."""
        self._receiver.host(iteration)

    def look_soon(self, record: Record | None = None) -> None:
        """Look again soon, because the rank has sent something. record: at once if it is not a record."""
        if record is None:
            self._pace = self._pace.asked()
        elif record.origin.rank != 0:  # rank 0 soon requests the iteration's store, and all ranks wait for it
            self._pace = self._pace.recorded(time.monotonic())

    def open(self, origin: Origin, folder: Path, limits: Limits, job: Job | None = None) -> None:
        """Write this rank's records to `folder` from now on, and apply these limits."""
        unlearned = (limits.shadow or limits).unlearned
        unlearned = unlearned and msgspec.structs.replace(unlearned, rule=limits.rule)
        self._unlearned = unlearned and with_recorded_names(unlearned)
        self._folder = folder
        if self.recorder is None:
            self.recorder = DurationRecorder(folder, origin)
            self.recorder.process_started(origin.cycle, self._is_cold)
        self._watch = Watch()
        self._limits_of_all, self._group_rank = limits, origin.initial_rank
        self.limit(of_rank(limits, origin.initial_rank, origin.world_size))
        self._origin = self.witness.origin = msgspec.structs.replace(origin, role="monitor", pid=os.getpid())
        self.witness.logs = (folder / "logs" / f"{self._name}.jsonl",)
        if self._file is None:
            self._file = RecordFile(folder / "records" / f"{self._name}.jsonl")
            self._emitter = Emitter(self._origin, [self._file])
            self.emit(events.MonitorStarted(rank_pid=self.rank.pid))
            if job is not None:
                WRITER.submit(lambda: write_job(job, folder))
        assert self._emitter is not None
        self._emitter.move(call=origin.call)

    def _seated(self, rank: int | None) -> None:
        """Apply the limits of the rank's group only while it does the work of its initial rank. After ranks were lost,
        it may do that of a rank in another group; then the limits of all ranks hold, which are the longest."""
        group_rank = rank if rank == self._initial_rank else None
        if self._unlearned is not None and self._origin is not None and group_rank != self._group_rank:
            self._group_rank = group_rank
            limits = of_rank(self._limits_of_all, group_rank, self._origin.world_size)
            if limits.shadow is not None:
                limits = msgspec.structs.replace(self._watch.limits, shadow=limits.shadow)
            self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Apply these limits from now on. A learned limit that no longer fits stays replaced, although the sender does
        not know that."""
        limits = with_recorded_names(limits)
        for name, longer in self.raised.items():
            if name in limits.learned:
                limits = raised(limits, name, longer)
        self._watch = msgspec.structs.replace(self._watch, limits=limits)
        self.suspicions.expect(limits)
        if self.raised:
            self.suspicions.forget()
        if self.recorder is not None:
            expected = limits.shadow or limits
            phases = {name: outside.phases for name, outside in expected.outside.items()}
            self.recorder.expect(expected.learned, phases)

    @property
    def _name(self) -> str:
        """Return the name of this rank's files."""
        return "" if self._origin is None else FileOwner(self._origin.node, self._origin.initial_rank).name

    def take(self, record: Record) -> None:
        """Write a record of the rank, with additions that only its monitor can make."""
        event = record.event
        match event:
            case events.RankInterrupted(interruption) if interruption.rank == self._initial_rank:
                self._own_record = interruption
                event = events.RankInterrupted(self._enrich(interruption, process="none"))
                record = msgspec.structs.replace(record, event=event)
            case events.IterationDecided():
                decided_at = record.mono_ns * 1e-9
                if event.silent_for_s is not None:  # a rank hangs; this one was soon cut and interrupted
                    process = self.witness.see_as_of(decided_at, event.silent_for_s, event.process, event.waits_in)
                    hang = self.witness.hang(event.stack, is_gil_held=False)
                    event = msgspec.structs.replace(event, hang=hang, process=process)
                    record = msgspec.structs.replace(record, event=event)
                self._interrupted = (record.origin.iteration or 0, decided_at)
            case events.AbortStuck():
                self._stuck_in = record.origin.iteration
            case events.StageStarted(stage):
                self._open[stage] = record
                if stage == "run":
                    self._receiver.started(record.origin)
            case events.StageEnded(stage):
                self._open.pop(stage, None)
            case events.IterationStarted():
                self._open["iteration"] = record
                self._most_active = max(self._most_active, event.active_world_size)
                if event.active_world_size < self._most_active:
                    self._forget_learned()
                self._seated(record.origin.rank)
            case events.IterationEnded(outcome):
                if outcome == "interrupted":  # perhaps in a hook before the function
                    self._receiver.started(record.origin)
                self._open.pop("iteration", None)
                self.has_completed = outcome == "completed"
            case _:  # no other event matters here
                pass
        if self._emitter is not None and record.origin.iteration is not None:
            origin = record.origin
            self._emitter.move(iteration=origin.iteration, rank=origin.rank, world_size=origin.world_size)
        if self._file is not None:
            self._file.take(record)

    def _forget_learned(self) -> None:
        """Apply the configured limits only: with fewer ranks a step may take longer than the learned ones allow."""
        if self._unlearned is not None:
            limits = self._watch.limits
            limits = self._unlearned if limits.shadow is None else msgspec.structs.replace(limits, shadow=None)
            self._watch = msgspec.structs.replace(self._watch, limits=limits)
            self.suspicions.expect(limits)
            if self.recorder is not None:
                self.recorder.expect({}, {})
            self._unlearned = None

    def emit(self, *new: events.Event) -> None:
        if self._emitter is not None:
            self._emitter.emit(*new)

    # -- observing ------------------------------------------------------------------------------

    def _observe(self, view: PageView | None = None) -> Observation:
        """Return the present observation. view: the page as the listener knows it, so that a section that ends right
        now does not seem to be silent outside of it; by default as it is now."""
        view = self.page.read() if view is None else view
        call = None if self._origin is None else self._origin.call
        interrupted_at, rule = self._interrupted_at(view.iteration), self._watch.limits.rule
        observation = Observation(
            iteration=view.iteration,
            doing=view.doing,
            since=view.since,
            hook=view.hook,
            watchdog_at=view.watchdog_at,
            ping_at=view.ping_at,
            step_at=view.step_at,
            heartbeat_at=view.heartbeat_at,
            start="cold" if self.recorder is None else self.recorder.how,
            heartbeat_gaps=self._ended(deadlines.HEARTBEAT),
            step_gaps=self._ended(deadlines.STEP),
            outside_gaps=self._ended(deadlines.OUT_OF_SECTION),
            aligned=frozenset() if self.recorder is None else self.recorder.aligned,
            section_left_at=view.section_left_at,
            open_sections=tuple(
                Sign(section.name, section.entered_at, self._ended(deadlines.of_section(section.name)) + 1)
                for section in view.open_sections
            ),
            interrupted_at=interrupted_at,
            silence=None if rule is None else self.listener.silence(rule, view.since),
            store_due_at=view.store_due_at,
            ran_at=view.ran_at,
            is_in_abort_hook=self._is_in_abort_hook(view.iteration),
            is_stuck=self._stuck_in == view.iteration and view.doing is Doing.FUNCTION,
            is_gone=self.is_gone,
            said_goodbye=call is not None and view.goodbye_call == call,
            has_left=call is not None and view.left_call == call,
            is_awaited=self.witness.has_iterations,
            are_others_seen=self._are_others_seen(),
            suspicion=self.suspicions.confirmed,
            standstills=tuple(self._standstills),
        )
        return self._subject.completed(observation)

    def _are_others_seen(self) -> bool:
        """Return True if this rank may be signalled: the other ranks' state is on record, or there are none."""
        is_alone = self._origin is None or self._origin.world_size == 1
        has_finding = self._watch.finding is not None
        return is_alone or (has_finding and self._receiver.are_others_seen)

    def _ended(self, deadline: str) -> int:
        """Return how many occurrences have ended since the last start."""
        return 0 if self.recorder is None else self.recorder.occurrences(deadline)

    def _is_in_abort_hook(self, iteration: int) -> bool:
        """Return True if the abort hook of this iteration runs. The end of an earlier one may be lost."""
        began = self._open.get("abort_hook")
        return began is not None and began.origin.iteration == iteration

    def _interrupted_at(self, iteration: int) -> float | None:
        """Return when this iteration was interrupted, None if it was not."""
        is_this = self._interrupted is not None and self._interrupted[0] == iteration
        return self._interrupted[1] if self._interrupted is not None and is_this else None

    # -- commands -------------------------------------------------------------------------------

    def _perform(self, decision: Decision) -> None:
        for command in decision.commands:
            match command:
                case watch.CaptureEvidence(finding):
                    self._capture(finding)
                case watch.AskRestart(finding):
                    self._ask_restart(finding)
                case watch.NoteUnknown(running_for):
                    self.emit(events.RankProgressUnknown(running_for))
                case watch.SendSignal(finding, name):
                    self._signal(finding, (name,) if name == "SIGKILL" else (name, "SIGCONT"))
                case watch.Kill(finding):
                    self._signal(finding, ("SIGKILL",))
                case watch.StandIn():
                    self._rank_died()
                case watch.Represent():
                    self._represent()
                case watch.Finish():
                    self._rank_finished()

    def _capture(self, finding: Finding) -> None:
        self.emit(events.RankFellSilent(finding.limit, finding.severity, finding.allowed, finding.silent_for))
        self.witness.see(finding.silent_for)
        self._stacks = self.witness.take_stacks(thorough=finding.severity == "hard")
        if self.witness.has_iterations and self.page.read().iteration != self._observation.iteration:
            self._stacks = stacks.Stacks("none", reason="the rank has restarted meanwhile")
        self._has_worked()
        self.emit(events.EvidenceCaptured(self._stacks.method, len(self._stacks.threads), self._stacks.reason))

    def look(self) -> events.WorkerSeen:
        """Return where the program is."""
        position = self.witness.look()
        self._has_worked()
        return position

    def _has_worked(self) -> None:
        """Note that this process did something that takes long; the host did not stand still."""
        self._expected_at = time.monotonic()

    def _ask_for_stacks(self, number: int) -> bool:
        return self.channel is not None and self.channel.send(messages.encode(messages.ShowStacks(number)))

    def _ask_restart(self, finding: Finding) -> None:
        soft, is_abort_hook = finding.severity == "soft", finding.limit == watch.ABORT_HOOK
        record = self._enrich(
            InterruptionRecord(
                rank=self._initial_rank,
                interruption=Interruption.SOFT_TIMEOUT if soft else Interruption.HARD_TIMEOUT,
                message=silence_in_words(finding.limit, finding.silent_for, finding.allowed),
                detector=Detector(finding.limit, finding.allowed),
                silent_for_s=finding.silent_for,
                # The rank may have restarted while its stacks were taken: a restart takes less time than that may.
                iteration=self._observation.iteration if self.witness.has_iterations else None,
                stage="abort" if is_abort_hook else self._observation.hook or self._observation.doing.value,
                stacks=self._stacks.threads,
                stack_method=self._stacks.method if self._stacks.threads else f"none: {self._stacks.reason}",
            ),
            process="seen",
        )
        hang = self.witness.hang(main_stack(record), self._stacks.is_gil_held)
        if hang is not None and not is_abort_hook:  # a thread beside the main thread runs that hook
            record = msgspec.structs.replace(record, hang=hang, message=f"{record.message}: {hang_kind.WORDS[hang]}")
        self.emit(events.RankInterrupted(record))
        self._receiver.interrupt(record)

    def _signal(self, finding: Finding, names: tuple[str, ...]) -> None:
        self.emit(events.RankSignalled(names, finding.limit))
        for name in names:
            self._subject.send(signal.Signals[name])

    def _rank_died(self) -> None:
        status = self._exit_status()
        self.emit(events.RankExited(goodbye=False, code=status.code, signal=status.signal, noticed_by=self._noticed_by))
        finding = self._watch.finding
        cause = "" if finding is None else f": {_cause(finding)}"
        end = "killed" if finding is not None and status.signal == "SIGKILL" else "ended"
        record = self._enrich(
            InterruptionRecord(
                rank=self._initial_rank,
                interruption=Interruption.TERMINATED,
                message=f"process {self.rank.pid} {end} ({_status_text(status)}){cause}",
                exit=status,
                detector=Detector("exit"),
                stacks=() if self._dump is None else self._dump.last_words(),
            )
        )
        if status.code and record.exception is None:
            exception = tracebacks.parse(record.log_tail)
            if exception is not None:
                record = msgspec.structs.replace(record, exception=exception, interruption=Interruption.EXCEPTION)
        self.emit(events.RankInterrupted(record))
        self._close_open_spans()
        self._receiver.stand_in(record)
        self.is_over = True

    def _has_left(self) -> bool:
        """Return True if the rank has left its call without a goodbye."""
        observation = self._observe()
        return observation.has_left and not observation.said_goodbye

    def _represent(self) -> None:
        """Represent a rank that left its call without a record in the store, or that SIGKILL has not ended. Its process
        continues."""
        record = self._own_record
        if self._watch.ended_by is not None:
            record = self._enrich(
                InterruptionRecord(
                    rank=self._initial_rank,
                    interruption=Interruption.HARD_TIMEOUT,
                    message=f"SIGKILL has not ended process {self.rank.pid} within {watch.UNENDED:g} s: it is stuck "
                    "in the kernel, or the first process of its container",
                    detector=Detector("monitor"),
                )
            )
        elif record is None:
            record = self._enrich(
                InterruptionRecord(
                    rank=self._initial_rank,
                    interruption=Interruption.BASE_EXCEPTION,
                    message=f"process {self.rank.pid} left the wrapped function, and an exception kept it from "
                    "recording that in the store",
                    detector=Detector("monitor"),
                )
            )
            if not self.has_completed:
                self.emit(events.RankInterrupted(record))
        self._close_open_spans()
        self._receiver.stand_in(record)

    def _exit_status(self) -> Exit:
        """Return how the rank ended. Out of memory: it got SIGKILL, and the count of OOM kills has just risen."""
        status = self.status or self.rank.exit_status(EXIT_LIMIT)
        if status == Exit() and self._dump is not None:
            status = Exit(signal=self._dump.fatal_signal())
        if status.signal == "SIGKILL" and status.oom is None:
            status = self.status = msgspec.structs.replace(status, oom=self._oom_kills.have_risen())
        return status

    def _rank_finished(self) -> None:
        status = self._exit_status()
        goodbye = self._observation.said_goodbye
        self.emit(events.RankExited(goodbye, status.code, status.signal, noticed_by=self._noticed_by))
        self.is_over = True

    @property
    def _initial_rank(self) -> int:
        return -1 if self._origin is None or self._origin.initial_rank is None else self._origin.initial_rank

    def _enrich(
        self, record: InterruptionRecord, process: Literal["now", "seen", "none"] = "now"
    ) -> InterruptionRecord:
        return self.witness.enrich(record, self._observe(), self._watch.limits, process)

    def _close_open_spans(self) -> None:
        """End the stages and iterations that the dead rank left open, innermost first."""
        now_ns = time.monotonic_ns()
        for name, record in reversed(list(self._open.items())):
            duration = (now_ns - record.mono_ns) / 1e9
            if name == "iteration":
                self.emit(events.IterationEnded("lost", duration, closed_by="monitor"))
            else:
                self.emit(events.StageEnded(name, "lost", duration, closed_by="monitor"))  # type: ignore[arg-type]
        self._open.clear()

    def record_durations(self, now: float) -> PageView:
        """Record what has ended since the last call. Return the page as it was then."""
        before = self.page.read()
        finished, overrun = self.page.drain()
        view = self.page.read()
        self._listen(finished, view)
        if self.recorder is not None:
            self.recorder.take(
                finished,
                view.open_sections,
                self._subject.announced_at,
                before.heartbeat_at,
                before.step,
                view.away_since,
            )
            if overrun:
                self.recorder.entries_lost()
            if self.recorder.has_near_miss:  # the next occurrence may take a little longer
                self._replace_stale_limits()
        if overrun:
            self.emit(events.TelemetryDropped("timing", "the page's ring was overrun", overrun))
        if self.page.are_names_full and not self._has_told_of_names:
            self._has_told_of_names = True
            self.emit(events.TelemetryDropped("timing", NAMES_FULL, 1))
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_EVERY
            self._write_timings()
        self._subject.recorded()
        return view

    def _listen(self, finished: list[Closed], view: PageView) -> None:
        """Learn how long a healthy rank is silent."""
        is_ended = self._watch.kill_at is not None or self._watch.asked_in == view.iteration
        is_healthy = (
            not is_ended and not self._observation.is_dismissed and self._interrupted_at(view.iteration) is None
        )
        self.listener.take(finished, view, is_healthy, self._standstills)

    def _weigh_silence(self, now: float) -> float | None:
        """Report a long silence that only the rule limits. Return when to check again."""
        silence = watch.weighed_silence(self._watch.limits, self._observation)
        if silence is None or self._watch.kill_at is not None:
            return None
        if now < silence.suspect_at:
            return silence.suspect_at
        shown = self._observation.silence  # it has the same start however long the host has stood still meanwhile
        begun = self._observation.since if shown is None else shown.since
        if not self.is_gone and self.listener.is_suspect(msgspec.structs.replace(silence, since=begun), now):
            position = self.look()
            suspected = events.HangSuspected(
                silence.kind,
                now - silence.since,
                silence.longest,
                silence.allowed,
                silence.is_learned,
                position.hang,
                position.stack,
                position.step,
            )
            self.emit(suspected)
            self._receiver.suspect(self._initial_rank, suspected)
        return None

    def _replace_stale_limits(self) -> None:
        """Replace learned limits that no longer fit by longer ones. One on trial ends nothing, so it stays."""
        assert self.recorder is not None
        for name, reason, longer in self.recorder.stale():
            # Each worker's recorder compares with the limit of the file, which an earlier worker may have replaced.
            if name not in self._watch.limits.learned or longer <= self.raised.get(name, 0.0):
                continue
            self.emit(events.TimeoutsStale(name, reason, longer))
            self.raised[name] = longer
            self._watch = msgspec.structs.replace(self._watch, limits=raised(self._watch.limits, name, longer))
            self.suspicions.forget()

    def _write_timings(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()
            if unreadable := self.recorder.take_unreadable():
                reason = f"earlier durations of this rank cannot be decoded; they are kept in timings/{unreadable}"
                self.emit(events.TelemetryDropped("timing", reason, 1))
            self._replace_stale_limits()

    def _write_snapshot(self, is_last: bool = False) -> None:
        origin, view = self._origin, self.page.read()
        now = time.monotonic()  # read last: it is no earlier than anything on the page
        if origin is not None:
            origin = msgspec.structs.replace(origin, iteration=view.iteration if self.witness.has_iterations else None)
        self._snapshots.write(self._folder, origin, view, self._observe(view), self._watch.limits, now, is_last)

    def _close(self) -> None:
        self.record_durations(time.monotonic())
        if self.recorder is not None:
            finding = self._watch.finding
            if self._observation.said_goodbye and finding is None:
                self.recorder.ended_well(self.page.read())
            elif self.is_gone:
                self.recorder.cut(self.page.read(), finding, self._watch.found_at)
        self._write_timings()
        self._write_snapshot(is_last=self.is_gone)
        result = self._receiver.finish()  # with the node's last exports, which read what was just written
        if result is not None:
            self.emit(result)
        if self.recorder is not None:
            self.recorder.close()
        self._report_refused_messages(float("inf"))
        self._subject.end_loader_workers()
        self.emit(events.MonitorEnded(dropped_records=0 if self._file is None else self._file.dropped))


def _cause(finding: Finding) -> str:
    if finding.limit == watch.AGENT_LOST:
        return "its agent was lost"
    return exceeded_in_words(finding.limit, finding.allowed)


def _status_text(status: Exit) -> str:
    if status.signal is not None:
        return status.signal + (", out of memory" if status.oom else "")
    return "exit status unknown" if status.code is None else f"exit code {status.code}"
