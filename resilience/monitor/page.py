"""A rank's signs of life, in memory that its monitor shares.

One page a process: a memfd that both map. The rank only stores words into it, without a lock, a system
call or an allocation; the monitor reads when it wakes, also after the rank was killed. A word is eight
bytes and written whole. What belongs together is either guarded by a sequence word (odd while it is
being written) or published by one last store. Layout and version live in this module alone."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from resilience.core.restart import Seat
from resilience.core.watch import Doing
from resilience.errors import ConfigurationError, MonitorError

MAGIC = 0x52_45_53_49_4C_01  # "RESIL", layout 1
NAMES = 128  # different section and hook names
NAME_BYTES = 64
SECTIONS = 64  # open at the same time
RING = 4096  # finished sections and heartbeat gaps that the monitor has not folded yet

# Words, by index.
_MAGIC = 0
_WATCHDOG, _PING, _HEARTBEAT, _STEP, _STEP_AT = 1, 2, 3, 4, 5
_SECTION_LEFT, _HEAD, _NAME_COUNT, _GOODBYE = 6, 7, 8, 9
_SEQUENCE = 10
_STATE = 11  # iteration, doing, since, hook, rank, world size, active world size, initial rank
_STATE_WORDS = 8
_MUTEX = 24  # 16 words: a pthread_mutex_t has 40 bytes on x86-64, 48 on aarch64
_OPEN = 40
_RING = _OPEN + 2 * SECTIONS
_NAMES_AT = (_RING + 3 * RING) * 8
SIZE = _NAMES_AT + NAMES * NAME_BYTES
HEARTBEAT_NAME = 0  # ring entries of heartbeat gaps carry this name id; names count from 1

_DOING = tuple(Doing)
_NS = 1e-9


class Page:
    """The shared memory itself. Whoever starts the monitor creates it; the other side attaches."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, SIZE)
        self.words = memoryview(self.memory)[:_NAMES_AT].cast("Q")

    @classmethod
    def create(cls) -> Page:
        """Return a new page. Its descriptor is inherited when forked."""
        fd = os.memfd_create("resilience-page", 0)
        os.ftruncate(fd, SIZE)
        page = cls(fd)
        _Mutex(page).initialise()
        page.words[_MAGIC] = MAGIC
        return page

    @classmethod
    def attach(cls, fd: int) -> Page:
        """Map a page made elsewhere. Raises: MonitorError if it has another layout."""
        page = cls(fd)
        if page.words[_MAGIC] != MAGIC:
            raise MonitorError(
                f"the page has layout {page.words[_MAGIC]:#x}, expected {MAGIC:#x}: rank and monitor run different "
                "versions of this package; restart the job with one version"
            )
        return page


class RankSide:
    """The rank's side: stores only. Used by the main thread, and by the ticker for the watchdog."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._words = page.words
        self._ids: dict[str, int] = {}
        self._slots: dict[str, tuple[int, int]] = {}  # open sections: name -> (slot, entered at)
        self._free = list(range(_OPEN + 2 * (SECTIONS - 1), _OPEN - 2, -2))
        self._pid = os.getpid()
        self.on_progress: Callable[[str], None] | None = None  # told of the first sign of an iteration
        self.heartbeat = self._make_heartbeat()

    # -- hot path -------------------------------------------------------------------------------

    def _make_heartbeat(self) -> Callable[[], None]:
        words, now_ns = self._words, time.monotonic_ns

        def heartbeat() -> None:
            now = now_ns()
            before = words[_HEARTBEAT]
            words[_HEARTBEAT] = now
            if before:
                head = words[_HEAD]
                at = _RING + head % RING * 3
                words[at] = HEARTBEAT_NAME
                words[at + 1] = now - before
                words[at + 2] = now
                words[_HEAD] = head + 1
            if self.on_progress is not None:
                self.on_progress("heartbeat")

        return heartbeat

    def enter(self, name: str) -> None:
        """Open a section. Raises: ConfigurationError if it is open already, or too many are."""
        if name in self._slots or not self._free:
            raise self._cannot_open(name)
        number = self._ids.get(name) or self._name(name)
        slot = self._free.pop()
        now = time.monotonic_ns()
        self._slots[name] = (slot, now)
        self._words[slot + 1] = now
        self._words[slot] = number  # valid from here on
        if self.on_progress is not None:
            self.on_progress("section")

    def leave(self, name: str) -> None:
        """Close a section. Raises: ConfigurationError if it is not open."""
        try:
            slot, entered = self._slots.pop(name)
        except KeyError:
            raise ConfigurationError(
                f"section {name!r} was closed and is not open; open are {sorted(self._slots) or 'none'}"
            ) from None
        words = self._words
        now = time.monotonic_ns()
        head = words[_HEAD]
        at = _RING + head % RING * 3
        words[at] = words[slot]
        words[at + 1] = now - entered
        words[at + 2] = entered
        words[_HEAD] = head + 1
        words[slot] = 0
        words[_SECTION_LEFT] = now
        self._free.append(slot)

    def leave_all(self) -> None:
        """Close every open section."""
        for name in list(self._slots):
            self.leave(name)

    def step(self, number: int) -> None:
        """Note the training step. Only a step above the highest so far counts as progress."""
        words = self._words
        if number + 1 > words[_STEP]:
            words[_STEP] = number + 1  # 0 means: never
            words[_STEP_AT] = time.monotonic_ns()
        if self.on_progress is not None:
            self.on_progress("step")

    def ping(self) -> None:
        """Show progress; arms the ping limit of this iteration."""
        self._words[_PING] = time.monotonic_ns()
        if self.on_progress is not None:
            self.on_progress("ping")

    def tick(self) -> None:
        """Prove that the main thread runs bytecode."""
        self._words[_WATCHDOG] = time.monotonic_ns()

    # -- state ----------------------------------------------------------------------------------

    def doing(self, doing: Doing, hook: str = "") -> None:
        """Tell what the rank is busy with from now on."""
        number = 0 if not hook else self._ids.get(hook) or self._name(hook)
        words = self._words
        words[_SEQUENCE] += 1
        words[_STATE + 1] = _DOING.index(doing)
        words[_STATE + 2] = time.monotonic_ns()
        words[_STATE + 3] = number
        words[_SEQUENCE] += 1

    def set_seat(self, seat: Seat) -> None:
        """Tell the rank's place in an iteration that is about to begin; what was armed is disarmed."""
        words = self._words
        words[_SEQUENCE] += 1
        words[_STATE] = seat.iteration + 1  # ENTRY is -1
        words[_STATE + 4] = seat.rank
        words[_STATE + 5] = seat.world_size
        words[_STATE + 6] = seat.active_world_size
        words[_STATE + 7] = seat.initial_rank
        words[_SEQUENCE] += 1
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Forget signs of the iteration before: its sections were left by an exception or are stale."""
        self._slots.clear()
        self._free = list(range(_OPEN + 2 * (SECTIONS - 1), _OPEN - 2, -2))
        words = self._words
        for slot in range(_OPEN, _RING, 2):
            words[slot] = 0
        for word in (_PING, _HEARTBEAT, _STEP, _STEP_AT, _SECTION_LEFT):
            words[word] = 0

    @property
    def step_value(self) -> int | None:
        """The highest step of this iteration, None before the first."""
        return self._words[_STEP] - 1 if self._words[_STEP] else None

    def is_open(self, name: str) -> bool:
        """Whether a section is open; one interrupted by a restart is not any more."""
        return name in self._slots

    @property
    def open_sections(self) -> tuple[str, ...]:
        """Names of the open sections, outermost first."""
        return tuple(self._slots)

    def lock_life(self) -> None:
        """Hold the mutex whose release by the kernel tells of this process's death. Main thread."""
        _Mutex(self._page).lock()

    def say_goodbye(self, is_leaving: bool = True) -> None:
        """Tell whether the end of this process would be a clean one."""
        self._words[_GOODBYE] = int(is_leaving)

    # -- names ----------------------------------------------------------------------------------

    def _name(self, name: str) -> int:
        number = self._words[_NAME_COUNT] + 1
        if number > NAMES:
            return NAMES  # the last name stands for all that came too late
        text = name.encode()[:NAME_BYTES] if number < NAMES else b"(more)"
        start = _NAMES_AT + (number - 1) * NAME_BYTES
        self._page.memory[start : start + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")
        self._words[_NAME_COUNT] = number
        self._ids[name] = number
        return number

    def _cannot_open(self, name: str) -> ConfigurationError:
        if name in self._slots:
            return ConfigurationError(
                f"section {name!r} is open already; close it before it is opened again, or give the inner one "
                "another name"
            )
        return ConfigurationError(f"{SECTIONS} sections are open at once, which is the most; close some")


class OpenEntry(msgspec.Struct, frozen=True):
    """A section that is open; entered_at in monotonic seconds."""

    name: str
    entered_at: float


class PageView(msgspec.Struct, frozen=True):
    """One look at a page. Times are monotonic seconds; None means never in this iteration."""

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
    section_left_at: float | None
    open_sections: tuple[OpenEntry, ...]
    said_goodbye: bool


class Closed(msgspec.Struct, frozen=True):
    """A finished section, or a heartbeat gap (name empty); duration in seconds."""

    name: str
    duration: float
    at: float


class MonitorSide:
    """The monitor's side: reads only, except for the mutex."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._words = page.words
        self._names: list[str] = []
        self._tail = 0

    def read(self) -> PageView:
        """Return what the page shows now."""
        words = self._words
        state = self._read_state()
        entries = []
        for slot in range(_OPEN, _RING, 2):
            number = words[slot]
            if number:
                entered = words[slot + 1]
                if words[slot] == number:
                    entries.append(OpenEntry(self._name_of(number), entered * _NS))
        entries.sort(key=lambda entry: entry.entered_at)
        step = words[_STEP]
        return PageView(
            iteration=state[0] - 1,
            doing=_DOING[state[1]],
            since=state[2] * _NS,
            hook=self._name_of(state[3]) if state[3] else "",
            rank=state[4],
            world_size=state[5],
            active_world_size=state[6],
            initial_rank=state[7],
            watchdog_at=self._time(_WATCHDOG),
            ping_at=self._time(_PING),
            heartbeat_at=self._time(_HEARTBEAT),
            step=step - 1 if step else None,
            step_at=self._time(_STEP_AT),
            section_left_at=None if entries else self._time(_SECTION_LEFT),
            open_sections=tuple(entries),
            said_goodbye=bool(words[_GOODBYE]),
        )

    def drain(self) -> tuple[list[Closed], int]:
        """Return what was finished since the last call, and how many entries were overwritten unread."""
        words = self._words
        head = words[_HEAD]
        lost = max(0, head - self._tail - RING)
        entries = []
        for count in range(self._tail + lost, head):
            at = _RING + count % RING * 3
            number = words[at]
            name = self._name_of(number) if number != HEARTBEAT_NAME else ""
            entries.append(Closed(name, words[at + 1] * _NS, words[at + 2] * _NS))
        overwritten = max(0, words[_HEAD] - RING - self._tail - lost)  # while they were being read
        self._tail = head
        return entries[overwritten:], lost + min(overwritten, len(entries))

    def wait_for_death(self, limit: float) -> bool:
        """Block until the rank's main thread is gone, at most `limit` seconds; answers whether it is."""
        return _Mutex(self._page).owner_died(limit)

    def _read_state(self) -> tuple[int, ...]:
        words = self._words
        for _ in range(10_000):
            before = words[_SEQUENCE]
            state = tuple(words[_STATE : _STATE + _STATE_WORDS])
            if before % 2 == 0 and words[_SEQUENCE] == before:
                return state
        return state  # the rank died while writing: what is there is what there is

    def _time(self, word: int) -> float | None:
        return self._words[word] * _NS or None

    def _name_of(self, number: int) -> str:
        while len(self._names) < number <= self._words[_NAME_COUNT]:
            start = _NAMES_AT + len(self._names) * NAME_BYTES
            raw = self._page.memory[start : start + NAME_BYTES]
            self._names.append(raw.rstrip(b"\0").decode(errors="replace"))
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
        self._check("pthread_mutex_lock", self._libc.pthread_mutex_lock(self._at))

    def owner_died(self, limit: float) -> bool:
        until = time.time() + limit  # the call takes wall time; a clock step only shortens or repeats it
        deadline = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
        result = self._libc.pthread_mutex_timedlock(self._at, deadline)
        if result == errno.EOWNERDEAD:
            self._libc.pthread_mutex_consistent(self._at)
            self._libc.pthread_mutex_unlock(self._at)
            return True
        if result == 0:
            # Nobody held it: the rank has not locked it yet, or was found dead before.
            self._libc.pthread_mutex_unlock(self._at)
            return True
        if result != errno.ETIMEDOUT:
            raise MonitorError(f"waiting for the rank's death failed: {os.strerror(result)}")
        return False

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result:
            raise MonitorError(f"{name} failed: {os.strerror(result)}")
