"""Who holds a hung process's interpreter lock?  Read from outside, by marks that the process has left.

CPython notes in its runtime's memory whose the lock is, at a place that differs by version. So a process finds
the place by trying: words that read the same whenever its main thread holds the lock, and otherwise whenever
nobody does, tell. A monitor reads these words when the process hangs, if the system lets it (same user; where
Yama restricts that, the process must have allowed it). No mark, or no permission, is no answer."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Literal

Holder = Literal["main", "other", "nobody"]
Mark = tuple[int, int, int]
"""Address, the word there while the main thread holds the lock, and while nobody does."""

_TRIES = 3  # other threads may take the lock meanwhile
_MOST = 8  # words; the lock and the current thread are one or two
_AGAIN = 0.002  # seconds between two looks
_CHUNK = 4096
_WORD = 8
_SYMBOL = "_PyRuntime"
_DLADDR_SYMBOL = 1  # RTLD_DL_SYMENT, dlfcn.h
_PR_SET_PTRACER = 0x59616D61  # include/uapi/linux/prctl.h


class _Info(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Entry(ctypes.Structure):
    """Elf64_Sym of elf.h."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_ubyte),
        ("other", ctypes.c_ubyte),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def marks() -> tuple[Mark, ...]:
    """Return what shows from outside whether this process's main thread holds the interpreter's lock; () where
    that cannot be found out. Main thread. Takes 1 to 5 ms."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    try:
        start, size = _runtime()
        for _ in range(_TRIES):
            found = _differences(start, size)
            if 0 < len(found) <= _MOST and not any(free for _, _, free in found):  # else another thread had it
                return found
    except (AttributeError, OSError, ValueError):  # another C library, another interpreter
        return ()
    return ()


def holder(pid: int, known: Sequence[Mark]) -> Holder | None:
    """Return who keeps the lock of a process that left these marks, None if that cannot be seen. A lock that
    changes hands is kept by nobody."""
    if not known:
        return None
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        seen = _look(memory, known)
        time.sleep(_AGAIN)
        return seen if _look(memory, known) == seen else "nobody"
    except OSError:
        return None
    finally:
        os.close(memory)


def allow_reading(pid: int) -> None:
    """Let this process and its descendants read our memory, where the system asks for such a word."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def to_text(known: Sequence[Mark]) -> str:
    """Return marks as a word each."""
    return " ".join(f"{address:x}:{held:x}:{free:x}" for address, held, free in known)


def from_text(text: str) -> tuple[Mark, ...]:
    """Read marks back. Raises: ValueError."""
    read = [tuple(int(number, 16) for number in word.split(":")) for word in text.split()]
    return tuple((address, held, free) for address, held, free in read)


def _look(memory: int, known: Sequence[Mark]) -> Holder:
    words = [int.from_bytes(os.pread(memory, _WORD, address), "little") for address, _, _ in known]
    if all(word == held for word, (_, held, _) in zip(words, known, strict=True)):
        return "main"
    if all(word == free for word, (_, _, free) in zip(words, known, strict=True)):
        return "nobody"
    return "other"


def _runtime() -> tuple[int, int]:
    """Where the interpreter's own memory is, and how long. Raises: AttributeError, ValueError."""
    start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, _SYMBOL))
    info, entry = _Info(), ctypes.POINTER(_Entry)()
    library = ctypes.CDLL(None)
    found = library.dladdr1(ctypes.c_void_p(start), ctypes.byref(info), ctypes.byref(entry), _DLADDR_SYMBOL)
    if not found or not entry or info.name != _SYMBOL.encode():
        raise ValueError(f"{_SYMBOL} has no entry in the table of symbols")
    return start, int(entry.contents.size)


def _differences(start: int, size: int) -> tuple[Mark, ...]:
    keeping, letting_go = ctypes.PyDLL(None), ctypes.CDLL(None)  # the lock, for the time of a call
    first, free, second, free_again = (_copy(by, start, size) for by in (keeping, letting_go, keeping, letting_go))
    return tuple(
        (start + at, held, left)
        for chunk in range(0, size, _CHUNK)
        if first[chunk : chunk + _CHUNK] != free[chunk : chunk + _CHUNK]
        for at in range(chunk, min(chunk + _CHUNK, size - size % _WORD), _WORD)
        if (held := _word(first, at)) == _word(second, at) != (left := _word(free, at)) == _word(free_again, at)
    )


def _copy(library: ctypes.CDLL, start: int, size: int) -> bytes:
    copied = ctypes.create_string_buffer(size)
    library.memmove(copied, ctypes.c_void_p(start), ctypes.c_size_t(size))
    return copied.raw


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + _WORD], "little")
