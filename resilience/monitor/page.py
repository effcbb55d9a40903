"""A rank's signs of life, in memory that it shares with its monitor.

One page per process: a memfd that both map. The rank only stores words into it, without a lock, a system call or an
allocation. The monitor reads when it wakes, even after the rank was killed. A word has eight bytes and is written
whole. Words that belong together are either guarded by a sequence word (odd during a write) or published by one last
store. Layout and version are defined in this module alone.

CPython lets signal handlers, pending calls and other threads run only after a call and at a backward jump; 3.10 also
at a forward jump. So each writer first makes its calls and decisions. From where it chooses a slot, or a place in a
ring, to its last store there is no call and no jump. The page stays consistent even if an interrupt is raised in the
middle of a writer, or if threads share it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import operator
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from resilience.core.observation import Doing
from resilience.errors import ConfigurationError, ConfigurationTypeError, MonitorError
from resilience.facts.deadlines import NAME_BYTES, recorded_name
from resilience.facts.encoding import text
from resilience.facts.seats import Seat

Away = Literal["", "begins", "interrupted", "ends"]

MAGIC = 0x52_45_53_49_4C_0A  # "RESIL", layout 10
NOTE = 32 * 1024  # bytes at most in the monitor's note for its successor
NAMES = 128  # different names of sections, hooks and collectives
SECTIONS = 64  # open at the same time
RING = 4096  # finished sections, heartbeat gaps, steps and beginnings that the monitor has not yet read
COLLECTIVES = 256  # the most recently entered ones

# Words, by index. Those up to the ring of finished sections are copied at once, in ascending order: the sequence
# word comes before all words that it guards.
_MAGIC = 0
_SEQUENCE = 1
_WATCHDOG, _PING, _HEARTBEAT, _STEP, _STEP_AT, _SECTION_LEFT = 2, 3, 4, 5, 6, 7
_SIGNS = slice(_PING, _SECTION_LEFT + 1)  # cleared when an iteration begins
_GOODBYE, _IS_LOCKED, _LEFT = 8, 9, 23  # _GOODBYE and _LEFT hold the number of a call + 1
_STOP, _ASKS = 10, 22  # requests to the program; whether it checks for them
_ASKED, _ENDED = 1, 2  # the job is asked to stop; this process is being ended, whether the job stops or not
_ITERATION, _DOING_NOW, _SINCE, _HOOK = 11, 12, 13, 14
_RANK, _WORLD_SIZE, _ACTIVE_WORLD_SIZE, _INITIAL_RANK = 15, 16, 17, 18
_NAME_COUNT, _HEAD, _COLLECTIVE_HEAD = 19, 20, 21
_MUTEX = 24  # 16 words: a pthread_mutex_t has 40 bytes on x86-64, 48 on aarch64
_STORE_DUE, _RAN, _COLLECTIVES_FROM = 40, 41, 42
_NOTE_BYTES = 43  # in the monitor's note; 0: there is none
_EXIT_STATUS = 44  # + 1, of a program whose interpreter shuts down; 0: unknown
_IS_ENDED = 45  # a client has ended the monitoring
_AWAY = 46  # since when the function does not run, after it ran: it was interrupted or has returned; 0: it runs
_OPEN = 47
_OPEN_WORDS = 2  # name, entered at
_RING = _OPEN + _OPEN_WORDS * SECTIONS
_RING_WORDS = 3  # name, duration, when
_COLLECTIVE_RING = _RING + _RING_WORDS * RING
_COLLECTIVE_WORDS = 6  # group, sequence, name of the operation, entered at, left at, members
_NAMES_AT = (_COLLECTIVE_RING + _COLLECTIVE_WORDS * COLLECTIVES) * 8
_NOTE_AT = _NAMES_AT + NAMES * NAME_BYTES
SIZE = _NOTE_AT + NOTE
_HEARTBEAT_NAME = 0  # ring entries of heartbeat gaps carry this name; names count from 1
_FAILED = 1 << 32  # added to the name if an exception left the section
_NAME = _FAILED - 1  # the bits of the name
_IS_STEP = 1 << 33  # instead of a name: the step rose, by the low 32 bits
MOST_RISE = _FAILED - 1  # stands for all larger ones too
_IS_BEGINNING = 1 << 34  # instead of a name: the signs of life are cleared; the next word holds the iteration + 1
_IS_LEAVING = 1 << 36  # instead of a name: the function does not run from now on
_IS_RETURN = 1 << 37  # instead of a name: all times so far are later by the duration, but not later than now
_IS_INTERRUPTED = 1 << 38  # instead of a name: the function was interrupted within open sections
_BEGINS_ANEW = 1 << 39  # added to the name of an open section: it begins anew when the function runs again
_AWAYS: dict[int, Away] = {_IS_LEAVING: "begins", _IS_RETURN: "ends", _IS_INTERRUPTED: "interrupted"}
# Added to the name of a heartbeat or section that another page has too: that page's monitor records it.
COPY = 1 << 35

_DOING = tuple(Doing)
_DOING_NUMBER = {doing: number for number, doing in enumerate(_DOING)}
_IN_HOOK = _DOING_NUMBER[Doing.HOOK]
_IN_FUNCTION = _DOING_NUMBER[Doing.FUNCTION]
_RUNNING = frozenset((_IN_FUNCTION, _DOING_NUMBER[Doing.ENDING]))
_NO_SIGNS = memoryview(bytes(8 * (_SECTION_LEFT + 1 - _PING))).cast("q")
_NO_SECTIONS = memoryview(bytes(8 * (_RING - _OPEN))).cast("q")
_SHORT = 1_000_000_000  # ns: an answer of the store that is less overdue is left in all durations
_READS = 110  # attempts before a reader gives up on a rank that was stopped or killed during a write: 0.1 s
_READS_AT_ONCE = 10  # the others 1 ms apart, for a rank that was preempted during a write
_LOOK_EVERY = 0.005  # seconds between checks for a rank that has not locked its mutex yet
_NS = 1e-9
_python = ctypes.PyDLL(None)  # a handle of our own: argument types that others set on the shared one bind all its users


class Page:
    """The shared memory itself. The process that starts the monitor creates it; the other side attaches."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, SIZE)
        self.words = memoryview(self.memory)[:_NAMES_AT].cast("q")

    @classmethod
    def create(cls) -> Page:
        """Return a new page. A fork inherits its descriptor; a new program must be passed it. Raises: OSError."""
        fd = os.memfd_create("resilience-page", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SIZE)
            page = cls(fd)
        except OSError:  # a mapping has a descriptor of its own, and no other one may be left
            os.close(fd)
            raise
        _Mutex(page).initialise()
        page.words[_MAGIC] = MAGIC
        return page

    @classmethod
    def attach(cls, fd: int) -> Page:
        """Map a page created elsewhere. Raises: MonitorError if it is not a page, or has another layout."""
        if os.fstat(fd).st_size != SIZE:
            raise MonitorError(
                f"the page has {os.fstat(fd).st_size} bytes, expected {SIZE}: rank and monitor run different "
                "versions of this package, or this is not a page; restart the job with one version"
            )
        page = cls(fd)
        if page.words[_MAGIC] != MAGIC:
            raise MonitorError(
                f"the page has layout {page.words[_MAGIC]:#x}, expected {MAGIC:#x}: rank and monitor run different "
                "versions of this package; restart the job with one version"
            )
        return page

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped as long as it is used."""
        os.close(self.fd)


Opened = dict[str, tuple[int, int]]
"""The open sections of an iteration: name -> (slot, entered at)."""


class RankSide:
    """The rank's side: stores only.

    Signs of life and sections may come from any thread, everything else from the main thread. In a forked child the
    object writes into private memory: the page belongs to the parent."""

    on_progress: Callable[[str], None] | None = None  # called with the kind of each sign, in user code's thread
    first_heartbeat: int = 0  # monotonic ns
    longest_gap: int = 0  # ns between heartbeats
    longest_outside: int = 0  # ns between the end of the last open section and the next one
    longest: dict[str, int]  # ns in a section, by name; without sections that an exception left

    _asked_at: int = 0  # monotonic ns
    _holds_mutex: bool = False
    _open: Opened  # a new one in each iteration
    _free: list[int]  # a stack of slots, _top of them free
    _top: int

    def __init__(self, page: Page) -> None:
        self._page: Page | None = page
        self._memory: mmap.mmap | bytearray = page.memory
        self._words = page.words
        self._ids: dict[str, int] = {}
        self.longest = {}
        self._forget_sections()
        _rank_sides.add(self)

    # -- hot path -------------------------------------------------------------------------------

    def heartbeat(self, mark: int = 0) -> None:
        """Send a sign of life. mark: COPY, or 0."""
        if (report := self.on_progress) is not None:
            report("heartbeat")
        words = self._words
        now = time.monotonic_ns()
        before = words[_HEARTBEAT]
        if now < before:  # a signal handler or another thread was faster
            now = before
        words[_HEARTBEAT] = now
        if before:
            gap = now - before
            if before < (away := words[_AWAY]):
                gap = away - before
            head = words[_HEAD]
            index = _RING + head % RING * _RING_WORDS
            words[index] = _HEARTBEAT_NAME | mark
            words[index + 1] = gap
            words[index + 2] = now
            words[_HEAD] = head + 1
            if gap > self.longest_gap:
                self.longest_gap = gap
        elif not self.first_heartbeat:
            self.first_heartbeat = now

    def enter(self, name: str, mark: int = 0) -> Opened:
        """Open a section; return what `leave_if_open` takes. mark: COPY, or 0. Raises: ConfigurationError if it is
        already open, or too many are."""
        if (report := self.on_progress) is not None:
            report("section")
        words = self._words
        number = self._ids.get(name) or self._name(name)
        now = time.monotonic_ns()
        if name in self._open or not self._top:
            raise self._cannot_open(name)
        if not self._open and (left_at := words[_SECTION_LEFT]):
            outside = (words[_AWAY] if left_at < words[_AWAY] else now) - left_at
            if outside > self.longest_outside:
                self.longest_outside = outside
        opened = self._open  # no call and no jump from here on
        self._top = top = self._top - 1
        slot = self._free[top]
        opened[name] = (slot, now)
        words[slot + 1] = now
        words[slot] = number | mark  # valid from here on
        return opened

    def leave(self, name: str, failed: bool = False) -> None:
        """Close a section. failed: an exception left it. Raises: ConfigurationError if it is not open."""
        if not self.leave_if_open(name, failed):
            raise ConfigurationError(
                f"section {name!r} cannot be closed: it is not open; open sections: {sorted(self._open) or 'none'}"
            )

    def leave_if_open(self, name: str, failed: bool = False, opened: Opened | None = None) -> bool:
        """Close a section, unless it is not open: return False then. opened: what `enter` returned. A new iteration
        closes all sections of the last one, also those of a thread that has outlived it and ends them now."""
        words = self._words
        flag = _FAILED if failed else 0
        longest = self.longest.get(name, 0)
        now = time.monotonic_ns()
        if opened is not None and opened is not self._open:
            return False
        try:
            slot, entered = self._open[name]
        except KeyError:
            return False
        now += (entered - now) * (entered > now)  # the function began again in another thread after `now` was read
        away = words[_AWAY]
        head = words[_HEAD]
        index = _RING + head % RING * _RING_WORDS
        words[index] = marked = words[slot] | flag
        words[index + 1] = duration = now - entered - (now - away) * (entered < away)
        words[index + 2] = entered
        words[_HEAD] = head + 1
        words[_SECTION_LEFT] = now  # before the slot: once no section is open, this is the end of the last one
        words[slot] = 0
        del self._open[name]
        self._free[self._top] = slot
        self._top += 1
        if duration > longest and not marked & _FAILED:
            self.longest[name] = duration
        return True

    def interrupt(self, name: str) -> None:
        """Note that the function was interrupted within an open section: it counts as failed, and begins anew with the
        function."""
        words = self._words
        try:
            slot, _ = self._open[name]
        except KeyError:  # a thread has closed it
            return
        words[slot] |= _FAILED | _BEGINS_ANEW
        self._append(_IS_INTERRUPTED, 0, time.monotonic_ns())

    def leave_all(self) -> None:
        """Close every open section."""
        for name in self.open_sections:
            self.leave_if_open(name)

    def leave_copy(self, name: str, failed: bool = False) -> None:
        """Close a section that is open as a COPY, and no other one."""
        slot, _ = self._open.get(name, (None, 0))
        if slot is not None and self._words[slot] & COPY:
            self.leave_if_open(name, failed)

    def leave_copies(self) -> None:
        """Close every section that is open as a COPY."""
        for name in self.open_sections:
            self.leave_copy(name)

    def step(self, number: int) -> None:
        """Store the training step. Only a step above the highest so far counts as progress."""
        number = operator.index(number)  # integers of numpy and torch overflow below
        words = self._words
        now = time.monotonic_ns()
        if number + 1 > words[_STEP]:
            rise = number + 1 - words[_STEP]
            before = words[_STEP_AT]
            if now < before:  # as above
                now = before
            if rise > MOST_RISE:
                rise = MOST_RISE
            gap = ((away if before < (away := words[_AWAY]) else now) - before) if before else 0
            words[_STEP] = number + 1  # 0 means: never
            words[_STEP_AT] = now
            head = words[_HEAD]
            index = _RING + head % RING * _RING_WORDS
            words[index] = _IS_STEP | rise
            words[index + 1] = gap
            words[index + 2] = now
            words[_HEAD] = head + 1
        if (report := self.on_progress) is not None:  # after the store: the callback reads the step
            report("step")

    def ping(self) -> None:
        """Report progress; arms the ping limit of this iteration."""
        if (report := self.on_progress) is not None:
            report("ping")
        words = self._words
        now = time.monotonic_ns()
        words[_PING] = now

    def tick(self) -> None:
        """Prove that the main thread runs bytecode."""
        self._words[_WATCHDOG] = time.monotonic_ns()

    def ran(self) -> None:
        """Prove that a thread beside the main thread runs: the process is not stopped, and its GIL is free."""
        self._words[_RAN] = time.monotonic_ns()

    def collective_entered(self, group: int, sequence: int, operation: str, members: int = 0) -> int:
        """Store that a collective is entered, and return the argument for `collective_left`. Any thread.

        members: the ranks of the group, packed by `core.wait_for.pack`."""
        words = self._words
        number = self._ids.get(operation) or self._name(operation)
        now = time.monotonic_ns()
        head = words[_COLLECTIVE_HEAD]
        index = _COLLECTIVE_RING + head % COLLECTIVES * _COLLECTIVE_WORDS
        words[index] = group
        words[index + 1] = sequence
        words[index + 2] = number
        words[index + 3] = now
        words[index + 4] = 0
        words[index + 5] = members
        words[_COLLECTIVE_HEAD] = head + 1
        return head

    def collective_left(self, token: int) -> None:
        """Store that a collective is over. Does nothing if newer ones have overwritten its entry."""
        words = self._words
        now = time.monotonic_ns()
        if words[_COLLECTIVE_HEAD] - token <= COLLECTIVES:
            words[_COLLECTIVE_RING + token % COLLECTIVES * _COLLECTIVE_WORDS + 4] = now

    # -- state ----------------------------------------------------------------------------------

    def doing(self, doing: Doing, hook: str = "") -> None:
        """Store what the rank does from now on. The time from the end of the function to its next beginning is left
        out of everything that lasts over it: open sections, and the gaps between signs of life."""
        words = self._words
        number = 0 if not hook else self._ids.get(hook) or self._name(hook)
        doing_number = _DOING_NUMBER[doing]  # before the stores, because it calls the hash function of an enum
        now, away = time.monotonic_ns(), words[_AWAY]
        was_running, is_running = words[_DOING_NOW] in _RUNNING, doing_number in _RUNNING
        if is_running and not was_running:
            self._leave_out(now - away, now)
            away = 0
        elif was_running and not is_running:
            self._append(_IS_LEAVING, 0, now)
            away = now
        words[_SEQUENCE] |= 1  # not + 1: an interrupted writer must not swap odd and even
        words[_SINCE] = now  # first: a reader that meets a half-written page must not count from an old moment
        words[_HOOK] = number
        words[_STORE_DUE] = 0
        words[_AWAY] = away
        words[_DOING_NOW] = doing_number
        words[_SEQUENCE] += 1

    def later(self, at: float) -> float:
        """Return how a time (monotonic s) counts once the function runs: later by the time for which it does not."""
        away, now = self._words[_AWAY], time.monotonic()
        return at if self._words[_DOING_NOW] in _RUNNING else min(at + now - away * _NS, now)

    def ends(self, status: int | None = None) -> None:
        """Store that a program is over and its interpreter shuts down: no sign of life is due any more.

        status: the exit status with which the process will end, or the negative number of a signal; None if it is
        unknown."""
        self._words[_EXIT_STATUS] = 0 if status is None else status + 1
        if self._words[_DOING_NOW] == _DOING_NUMBER[Doing.FUNCTION]:  # else no limit applies, now as before
            self.doing(Doing.ENDING)

    def asks_store(self, allowed: float) -> None:
        """Store that the main thread asks the job's store, and that its own limit is `allowed` seconds."""
        words = self._words
        now = time.monotonic_ns()
        due = now + int(allowed * 1e9)
        self._asked_at = now
        words[_SEQUENCE] |= 1
        words[_STORE_DUE] = due
        words[_SEQUENCE] += 1

    def store_answered(self) -> None:
        """Store that the main thread has its answer, or an error. The wait does not count towards other limits. A hook
        has chosen to wait: only the time after the answer was due does not count towards its limit. The same holds for
        signs of life and sections of the function, which may wait for the store for as long as it likes."""
        words = self._words
        now = time.monotonic_ns()
        due = words[_STORE_DUE]
        if not due:
            return
        from_then = due if words[_DOING_NOW] == _IN_HOOK else self._asked_at
        waited = now - from_then if now > from_then else 0
        try:
            if words[_DOING_NOW] == _IN_FUNCTION and now - due > _SHORT:
                self._leave_out(now - due, now)
        finally:  # also if a signal handler raises: no answer is due
            words[_SEQUENCE] |= 1
            words[_WATCHDOG] = now
            words[_SINCE] += waited
            words[_STORE_DUE] = 0
            words[_SEQUENCE] += 1

    def _leave_out(self, waited: int, now: int) -> None:
        """Let what lasts now count as if the last `waited` ns had not passed. What began within them begins now."""
        self._append(_IS_RETURN, waited, now)  # first: its reader then waits with what began earlier
        for name in self.open_sections:
            self._begin_later(name, waited, now)
        for sign in (_PING, _HEARTBEAT, _STEP_AT, _SECTION_LEFT):
            if self._words[sign]:
                self._sign_later(sign, waited, now)
        if self._words[_AWAY]:  # an exception that comes now does not let it count again
            self._words[_AWAY] = now

    def _begin_later(self, name: str, waited: int, now: int) -> None:
        words, opened = self._words, self._open
        try:
            slot, entered = opened[name]
        except KeyError:  # a thread has closed it
            return
        begins = entered + waited
        begins -= (begins - now) * ((begins > now) | (words[slot] & _BEGINS_ANEW != 0))
        words[slot + 1] = begins
        opened[name] = slot, begins
        words[slot] &= ~_BEGINS_ANEW

    def _sign_later(self, sign: int, waited: int, now: int) -> None:
        words = self._words
        at = words[sign] + waited
        words[sign] = at - (at - now) * (at > now)

    def _append(self, kind: int, duration: int, at: int) -> None:
        words = self._words
        head = words[_HEAD]
        index = _RING + head % RING * _RING_WORDS
        words[index] = kind
        words[index + 1] = duration
        words[index + 2] = at
        words[_HEAD] = head + 1

    def set_seat(self, seat: Seat) -> None:
        """Store the rank's place in an iteration that is about to begin.

        Signs of the previous iteration are cleared: armed limits are disarmed, and sections that are still open
        were left by an interruption, or are stale."""
        words = self._words
        free = _all_slots()
        now = time.monotonic_ns()
        self._open, self._free, self._top = {}, free, SECTIONS
        head = words[_HEAD]
        index = _RING + head % RING * _RING_WORDS
        words[index] = _IS_BEGINNING
        words[index + 1] = seat.iteration + 1
        words[index + 2] = now
        words[_HEAD] = head + 1
        words[_SEQUENCE] |= 1
        words[_ITERATION] = seat.iteration + 1  # ENTRY is -1
        words[_RANK] = seat.rank
        words[_WORLD_SIZE] = seat.world_size
        words[_ACTIVE_WORLD_SIZE] = seat.active_world_size
        words[_INITIAL_RANK] = seat.initial_rank
        words[_COLLECTIVES_FROM] = words[_COLLECTIVE_HEAD]
        words[_SIGNS] = _NO_SIGNS
        words[_OPEN:_RING] = _NO_SECTIONS
        words[_SEQUENCE] += 1

    def forget_signs(self) -> None:
        """Clear the signs of life so far: no limit counts from them, and no gap reaches across this moment. Sections
        that are open stay so."""
        words = self._words
        now = time.monotonic_ns()
        head = words[_HEAD]
        index = _RING + head % RING * _RING_WORDS
        words[index] = _IS_BEGINNING
        words[index + 1] = words[_ITERATION]
        words[index + 2] = now
        words[_HEAD] = head + 1
        words[_SEQUENCE] |= 1
        words[_SIGNS] = _NO_SIGNS
        words[_SEQUENCE] += 1

    def collectives(self) -> list[CollectiveEntry]:
        """Return the last collectives of this iteration, in the monitor's form. Any thread."""
        page = self._page
        return [] if page is None else MonitorSide(page).collectives()

    @property
    def step_value(self) -> int | None:
        """Return the highest step of this iteration, None before the first."""
        return self._words[_STEP] - 1 if self._words[_STEP] else None

    @property
    def open_sections(self) -> tuple[str, ...]:
        """Return the names of the open sections, in the order of opening."""
        return tuple(self._open)

    def ongoing(self) -> tuple[int, int, dict[str, int]]:
        """Return what lasts now, in ns: the gap between heartbeats, the time outside sections, each open section. 0 if
        there is none."""
        words, opened = self._words, self._open.copy()  # another thread may close one meanwhile
        beaten_at, left_at = words[_HEARTBEAT], 0 if opened else words[_SECTION_LEFT]
        away, now = words[_AWAY], time.monotonic_ns()

        def lasts(since: int) -> int:
            return (away if since < away else now) - since if since else 0

        return lasts(beaten_at), lasts(left_at), {name: lasts(entered) for name, (_, entered) in opened.items()}

    def lock_life(self) -> None:
        """Hold the mutex. Its release by the kernel shows this process's death. Main thread."""
        page = self._page
        assert page is not None
        # It must stay mapped to the very end, beyond the interpreter's: the kernel's list of the locks that a thread
        # holds runs through it. First, because a signal handler may raise once the lock is held.
        _python.Py_IncRef(ctypes.py_object(page.memory))
        _Mutex(page).lock()
        self._holds_mutex = True
        self._words[_IS_LOCKED] = 1

    def unlock_life(self) -> None:
        """Release the mutex, if this page holds it: nothing waits for it any more. Main thread."""
        page, is_held = self._page, self._holds_mutex
        self._holds_mutex = False
        if page is not None and is_held:
            _Mutex(page).unlock()
            _python.Py_DecRef(ctypes.py_object(page.memory))

    def close(self) -> None:
        """Unmap the page; the monitor keeps it. Later signs of life have no effect. Main thread."""
        self.unlock_life()
        self.let_go()

    def is_stop_requested(self) -> bool:
        """Return True if the job is asked to stop. Also shows the monitor that this program checks."""
        words = self._words
        words[_ASKS] = 1
        return words[_STOP] & _ASKED != 0

    def is_wanted(self) -> bool:
        """Return True if this program is neither asked to stop nor about to be ended."""
        return self._words[_STOP] == 0

    def say_goodbye(self, call: int) -> None:
        """Note that the store knows this rank's end in a call: it has completed the call, or is excluded."""
        self._words[_GOODBYE] = call + 1

    def leave_call(self, call: int) -> None:
        """Note that this rank has left a call. Without a goodbye, its monitor has to represent it."""
        self._words[_LEFT] = call + 1

    def end_monitoring(self) -> None:
        """Note that a client has ended the monitoring of a worker: another process may be watched in its place."""
        self._words[_IS_ENDED] = 1

    # -- helpers --------------------------------------------------------------------------------

    def _forget_sections(self) -> None:
        free = _all_slots()
        self._open, self._free, self._top = {}, free, SECTIONS

    def _name(self, name: str) -> int:
        """Return a name's number, a new one if needed. All names beyond the last number share it."""
        if not isinstance(name, str):
            raise ConfigurationTypeError(f"a name must be a str, not {type(name).__name__}: {name!r}")
        if not name:
            raise ConfigurationError("a name must not be empty: say what the section is for, such as 'data'")
        recorded = recorded_name(name).encode()  # a zero byte would end a name here
        padded, overflow = recorded.ljust(NAME_BYTES, b"\0"), b"(more)".ljust(NAME_BYTES, b"\0")
        number = self._words[_NAME_COUNT] + 1
        if number > NAMES:
            return NAMES
        start = _NAMES_AT + (number - 1) * NAME_BYTES
        self._memory[start : start + NAME_BYTES] = padded if number < NAMES else overflow
        self._words[_NAME_COUNT] = number
        self._ids[name] = number
        return number

    def _cannot_open(self, name: str) -> ConfigurationError:
        if name in self._open:
            return ConfigurationError(
                f"section {name!r} is already open; close it before you open it again, or give the inner one "
                "another name"
            )
        return ConfigurationError(f"{SECTIONS} sections are already open, which is the limit; close some")

    @property
    def is_let_go(self) -> bool:
        """Return True if no monitor can read this page, as in a forked child."""
        return self._page is None

    def let_go(self) -> None:
        """Write into private memory of this process from now on."""
        self._page = None
        self._memory = bytearray(SIZE)
        self._words = memoryview(self._memory)[:_NAMES_AT].cast("q")
        self._ids = {}
        self._forget_sections()
        self.on_progress = None


def _all_slots() -> list[int]:
    return list(range(_RING - _OPEN_WORDS, _OPEN - 1, -_OPEN_WORDS))


_rank_sides: weakref.WeakSet[RankSide] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for side in list(_rank_sides):
        side.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class OpenEntry(msgspec.Struct, frozen=True):
    """An open section; entered_at in monotonic seconds. is_copy: another page has it too."""

    name: str
    entered_at: float
    is_copy: bool = False


class PageView(msgspec.Struct, frozen=True):
    """A page's content at one moment. Times are monotonic seconds; None means never in this iteration."""

    iteration: int
    doing: Doing
    since: float
    hook: str
    rank: int
    world_size: int
    active_world_size: int
    initial_rank: int
    watchdog_at: float | None
    ping_at: float | None
    heartbeat_at: float | None
    step: int | None
    step_at: float | None
    section_left_at: float | None  # when the last section was closed; others may be open
    open_sections: tuple[OpenEntry, ...]
    store_due_at: float | None  # when the store's answer, for which the rank waits, is due
    ran_at: float | None  # when a thread beside its main thread last ran
    goodbye_call: int | None  # the last call that this rank said goodbye to
    left_call: int | None  # the last call that it left
    exit_status: int | None  # with which the process will end, once its program is over; < 0: by this signal
    away_since: float | None = None  # when the function ended, until it runs again

    def ended(self, since: float, now: float) -> float:
        """Return the end, at the latest `now`, of what has lasted since then: the time after the function does not
        count, unless it began in that time."""
        return now if self.away_since is None or since >= self.away_since else self.away_since

    @property
    def sign_times(self) -> list[float]:
        """Return when the signs of life came, as far as there were any: the last ping, heartbeat, step and end of a
        section, and the start of each open section."""
        times = (self.ping_at, self.heartbeat_at, self.step_at, self.section_left_at)
        return [at for at in times if at is not None] + [section.entered_at for section in self.open_sections]

    @property
    def last_sign_at(self) -> float | None:
        """Return when the last sign of life came, None if there was none."""
        return max(self.sign_times, default=None)


class Closed(msgspec.Struct, frozen=True):
    """A finished section. Without a name: a heartbeat gap, or the time to a higher step (0 for the first), or nothing
    but the beginning of an iteration, which clears all signs of life. duration: in seconds. at: when the section was
    entered, or the heartbeat, the step or the beginning came. failed: an exception left the section, so its duration
    says little. begins: the number of the iteration. rise: by how much the step rose; more than that for the first.
    is_copy: another page has it too. away: nothing but the end of the function, its interruption within open sections,
    or its next beginning: `duration` is then left out, so all earlier times count that much later, but not later than
    `at`."""

    name: str
    duration: float
    at: float
    failed: bool = False
    is_step: bool = False
    begins: int | None = None
    rise: int = 0
    is_copy: bool = False
    away: Away = ""


class CollectiveEntry(msgspec.Struct, frozen=True):
    """A collective; times in monotonic seconds. left_at: None while the rank is inside."""

    group: int
    sequence: int
    operation: str
    entered_at: float
    left_at: float | None
    members: int = 0


class MonitorSide:
    """The monitor's side: reads only, except for the mutex, the word with requests to the program, and the note that
    a monitor leaves for the one that replaces it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._words = page.words
        self._names: list[str] = []
        self._tail = 0
        self._abandoned = 0  # the sequence word at which the reader gave up on the rank

    def read(self) -> PageView:
        """Return the page's present content."""
        words = self._read_words()
        entries = [
            OpenEntry(self._name_of(words[slot] & _NAME), words[slot + 1] * _NS, bool(words[slot] & COPY))
            for slot in range(_OPEN, _RING, _OPEN_WORDS)
            if words[slot]
        ]
        entries.sort(key=lambda entry: entry.entered_at)
        step = words[_STEP]
        return PageView(
            iteration=words[_ITERATION] - 1,
            doing=_DOING[words[_DOING_NOW]],
            since=words[_SINCE] * _NS,
            hook=self._name_of(words[_HOOK]) if words[_HOOK] else "",
            rank=words[_RANK],
            world_size=words[_WORLD_SIZE],
            active_world_size=words[_ACTIVE_WORLD_SIZE],
            initial_rank=words[_INITIAL_RANK],
            watchdog_at=words[_WATCHDOG] * _NS or None,
            ping_at=words[_PING] * _NS or None,
            heartbeat_at=words[_HEARTBEAT] * _NS or None,
            step=step - 1 if step else None,
            step_at=words[_STEP_AT] * _NS or None,
            section_left_at=words[_SECTION_LEFT] * _NS or None,
            open_sections=tuple(entries),
            store_due_at=words[_STORE_DUE] * _NS or None,
            ran_at=words[_RAN] * _NS or None,
            goodbye_call=words[_GOODBYE] - 1 if words[_GOODBYE] else None,
            left_call=words[_LEFT] - 1 if words[_LEFT] else None,
            exit_status=words[_EXIT_STATUS] - 1 if words[_EXIT_STATUS] else None,
            away_since=words[_AWAY] * _NS or None,
        )

    @property
    def is_monitoring_ended(self) -> bool:
        """Return True if a client of the program has ended the monitoring."""
        return self._words[_IS_ENDED] != 0

    @property
    def are_names_full(self) -> bool:
        """Return True if a name had no place any more: it is recorded as (more)."""
        return self._words[_NAME_COUNT] >= NAMES

    def request_stop(self) -> bool:
        """Ask the program to stop. Return True if it has ever checked for such requests."""
        self._words[_STOP] |= _ASKED
        return self._words[_ASKS] != 0

    def dismiss(self) -> None:
        """Show the program that its process is being ended."""
        self._words[_STOP] |= _ENDED

    def drain(self) -> tuple[list[Closed], int]:
        """Return the entries finished since the last call, and how many were overwritten unread."""
        words = self._words
        head = words[_HEAD]
        first = max(self._tail, head - RING)
        entries = [self._closed(count) for count in range(first, head)]
        # Leave out entries overwritten during the read; the writer works one place beyond its head.
        intact = min(max(first, words[_HEAD] - RING + 1), head)
        lost = intact - self._tail
        self._tail = head
        return entries[intact - first :], lost

    @property
    def tail(self) -> int:
        """Return how many finished entries this side has read or skipped."""
        return self._tail

    def continue_at(self, tail: int) -> None:
        """Go on where another monitor stopped reading."""
        self._tail = max(0, min(tail, self._words[_HEAD]))

    def leave_note(self, note: bytes) -> None:
        """Leave a note for a monitor that replaces this one. A longer one than NOTE bytes is not left."""
        if len(note) <= NOTE:
            self._words[_NOTE_BYTES] = 0  # a monitor that is killed now leaves none
            self._page.memory[_NOTE_AT : _NOTE_AT + len(note)] = note
            self._words[_NOTE_BYTES] = len(note)

    def note(self) -> bytes:
        """Return the note of the monitor before this one, empty without one."""
        return self._page.memory[_NOTE_AT : _NOTE_AT + max(0, self._words[_NOTE_BYTES])]

    def collectives(self) -> list[CollectiveEntry]:
        """Return the last collectives that the rank entered in this iteration, oldest first."""
        words = self._words
        head = words[_COLLECTIVE_HEAD]
        first = min(head, max(words[_COLLECTIVES_FROM], head - COLLECTIVES))
        entries = [self._collective(count) for count in range(first, head)]
        return entries[max(0, words[_COLLECTIVE_HEAD] - COLLECTIVES + 1 - first) :]

    def wait_for_death(self, limit: float) -> bool:
        """Block until the rank's main thread is gone, at most `limit` seconds. Return True if it is gone.

        A rank that has not locked its mutex yet counts as alive. Raises: MonitorError."""
        deadline = time.monotonic() + limit
        while not self._words[_IS_LOCKED]:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_EVERY)
        return _Mutex(self._page).owner_died(max(0.0, deadline - time.monotonic()))

    def _read_words(self) -> list[int]:
        shared = self._words
        for attempt in range(_READS):
            words = shared[:_RING].tolist()
            # Again, after the slots: a section that ends during the copy stores this word before it frees its slot.
            # With the old word and the free slot, the rank would have been outside sections since long ago.
            words[_SECTION_LEFT] = shared[_SECTION_LEFT]
            sequence = words[_SEQUENCE]
            if (sequence % 2 == 0 and shared[_SEQUENCE] == sequence) or sequence == self._abandoned:
                return words
            if attempt >= _READS_AT_ONCE:
                time.sleep(0.001)
        self._abandoned = sequence
        return words  # half written, but there is nothing better

    def _closed(self, count: int) -> Closed:
        index = _RING + count % RING * _RING_WORDS
        number, duration, moment = self._words[index : index + _RING_WORDS]
        if number == _IS_BEGINNING:
            return Closed("", 0.0, moment * _NS, begins=duration - 1)
        if number in _AWAYS:
            return Closed("", duration * _NS, moment * _NS, away=_AWAYS[number])
        if number & _IS_STEP:
            return Closed("", duration * _NS, moment * _NS, is_step=True, rise=number & MOST_RISE)
        name = "" if number & _NAME == _HEARTBEAT_NAME else self._name_of(number & _NAME)
        return Closed(name, duration * _NS, moment * _NS, bool(number & _FAILED), is_copy=bool(number & COPY))

    def _collective(self, count: int) -> CollectiveEntry:
        index = _COLLECTIVE_RING + count % COLLECTIVES * _COLLECTIVE_WORDS
        group, sequence, number, entered, left, members = self._words[index : index + _COLLECTIVE_WORDS]
        return CollectiveEntry(group, sequence, self._name_of(number), entered * _NS, left * _NS or None, members)

    def _name_of(self, number: int) -> str:
        while len(self._names) < number <= self._words[_NAME_COUNT]:
            start = _NAMES_AT + len(self._names) * NAME_BYTES
            raw = self._page.memory[start : start + NAME_BYTES]
            self._names.append(text(raw.rstrip(b"\0")))
        return self._names[number - 1] if number <= len(self._names) else "?"


class _Mutex:
    """A robust, process-shared pthread mutex in the page. The kernel gives it up the moment its owner
    dies, before the dead process's memory is freed, which takes about 0.1 s a GiB."""

    _libc: Any = None

    def __init__(self, page: Page) -> None:
        if _Mutex._libc is None:
            _Mutex._libc = ctypes.CDLL(None, use_errno=True)
        self._at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page.memory, _MUTEX * 8)))

    def initialise(self) -> None:
        attributes = (ctypes.c_long * 4)()
        self._check("pthread_mutexattr_init", self._libc.pthread_mutexattr_init(attributes))
        self._check("pthread_mutexattr_setpshared", self._libc.pthread_mutexattr_setpshared(attributes, 1))
        self._check("pthread_mutexattr_setrobust", self._libc.pthread_mutexattr_setrobust(attributes, 1))
        self._check("pthread_mutex_init", self._libc.pthread_mutex_init(self._at, attributes))

    def lock(self) -> None:
        result = self._libc.pthread_mutex_lock(self._at)
        if result == errno.EOWNERDEAD:  # an earlier holder died
            result = self._libc.pthread_mutex_consistent(self._at)
        self._check("pthread_mutex_lock", result)

    def unlock(self) -> None:
        self._check("pthread_mutex_unlock", self._libc.pthread_mutex_unlock(self._at))

    def owner_died(self, limit: float) -> bool:
        result = self._lock_within(limit)
        if result == errno.ETIMEDOUT:
            return False
        if result == errno.EOWNERDEAD:
            self._libc.pthread_mutex_consistent(self._at)
        elif result:
            raise MonitorError(f"waiting for the rank's death failed: {os.strerror(result)}")
        # Without EOWNERDEAD, an earlier call has found it dead.
        self._libc.pthread_mutex_unlock(self._at)
        return True

    def _lock_within(self, limit: float) -> int:
        """Lock the mutex within `limit` seconds. Return the error number."""
        if hasattr(self._libc, "pthread_mutex_clocklock"):  # glibc 2.30
            until = time.monotonic() + limit
            return int(self._libc.pthread_mutex_clocklock(self._at, time.CLOCK_MONOTONIC, _timespec(until)))
        return int(self._libc.pthread_mutex_timedlock(self._at, _timespec(time.time() + limit)))

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result:
            raise MonitorError(f"{name} failed: {os.strerror(result)}")


def _timespec(at: float) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * 2)(int(at), int(at % 1 * 1e9))
