"""How does a process appear in lists of processes? Its name (`ps`), its command (`ps -f`) and its environment.

A forked process has those of the process that it was forked from. The kernel lets a process say where its own command
and environment are in memory, without a privilege (PR_SET_MM_MAP, Linux 3.18, where CONFIG_CHECKPOINT_RESTORE is set,
as distributions do). Where it refuses, the command is written in the place of the old one, as far as there is room,
and the environment in /proc stays that of the other process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence

NAME_BYTES = 15  # of a name; the kernel cuts off the rest
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # include/uapi/linux/prctl.h
_UNCHANGED = 0xFFFFFFFF  # no descriptor: the file of the program stays the same
_map = struct.Struct("=11QQII")  # struct prctl_mm_map, where pointers have 64 bits


def name(text: str) -> None:
    """Set the name of this process, which threads inherit that are started later."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(os.fsencode(text)[:NAME_BYTES])


def show(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Show this command as that of this process, and these variables if any are given. They are not set here."""
    command_text = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = {} if environment is None else environment
    environment_text = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in variables.items())
    start, size = _old_command()
    if not _moved(command_text, environment_text) and start and size > 1:
        ctypes.memmove(start, command_text[: size - 1].ljust(size, b"\0"), size)


def _moved(command: bytes, environment: bytes) -> bool:
    """Let the kernel read the command and, unless it is empty, the environment from memory of ours."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    # Kept for good: the kernel reads it whenever somebody looks.
    memory = libc.malloc(len(command) + len(environment))
    if not memory:
        return False
    ctypes.memmove(memory, command + environment, len(command) + len(environment))
    end = memory + len(command)
    at = _fields()
    variables = (end, end + len(environment)) if environment else (at(50), at(51))
    values = _map.pack(
        *(at(26), at(27), at(45), at(46), at(47), libc.sbrk(0) or 0, at(28)),  # code, data, heap, stack
        *(memory, end, *variables),
        *(0, 0, _UNCHANGED),  # what the kernel told the loader stays
    )
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, values, ctypes.c_ulong(len(values)), ctypes.c_ulong(0)) == 0:
        return True
    libc.free(memory)
    return False


def _old_command() -> tuple[int, int]:
    at = _fields()
    return at(48), at(49) - at(48)


def _fields() -> Callable[[int], int]:
    """Return a function that returns a number of /proc/self/stat, by its place in proc(5)."""
    with open("/proc/self/stat", "rb") as file:
        values = file.read().rpartition(b")")[2].split()
    return lambda place: int(values[place - 3])
