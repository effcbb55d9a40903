"""How does a process appear in lists of processes?  Its name (`ps`), its command (`ps -f`) and its environment.

A forked process has those of its parent. The kernel lets an unprivileged process set where its own command and
environment are in memory (PR_SET_MM_MAP, Linux 3.18, with CONFIG_CHECKPOINT_RESTORE, as in distributions). If the
kernel refuses, the command overwrites the old one, as far as there is room, and the environment in /proc stays the
parent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence

NAME_BYTES = 15  # the kernel cuts off a longer name
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # include/uapi/linux/prctl.h
_UNCHANGED = 0xFFFFFFFF  # no descriptor: the program's file stays the same
_map = struct.Struct("=11QQII")  # struct prctl_mm_map, where pointers have 64 bits


def name(text: str) -> None:
    """Set the name of this process. Threads started later inherit it."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(os.fsencode(text)[:NAME_BYTES])


def show(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Show this command for this process, and these variables if given. They are not set in the process."""
    command_text = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = {} if environment is None else environment
    environment_text = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in variables.items())
    start, size = _old_command()
    if not _place_in_memory(command_text, environment_text) and start and size > 1:
        ctypes.memmove(start, command_text[: size - 1].ljust(size, b"\0"), size)


def _place_in_memory(command: bytes, environment: bytes) -> bool:
    """Make the kernel read the command and, unless it is empty, the environment from our memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    # Never freed: the kernel reads it for each list of processes.
    memory = libc.malloc(len(command) + len(environment))
    if not memory:
        return False
    ctypes.memmove(memory, command + environment, len(command) + len(environment))
    end = memory + len(command)
    field = _fields()
    variables = (end, end + len(environment)) if environment else (field(50), field(51))
    values = _map.pack(
        *(
            field(26),
            field(27),
            field(45),
            field(46),
            field(47),
            libc.sbrk(0) or 0,
            field(28),
        ),  # code, data, heap, stack
        *(memory, end, *variables),
        *(0, 0, _UNCHANGED),  # the loader's data from the kernel stay
    )
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, values, ctypes.c_ulong(len(values)), ctypes.c_ulong(0)) == 0:
        return True
    libc.free(memory)
    return False


def _old_command() -> tuple[int, int]:
    field = _fields()
    return field(48), field(49) - field(48)


def _fields() -> Callable[[int], int]:
    """Return a function that returns a number in /proc/self/stat by its place in proc(5)."""
    with open("/proc/self/stat", "rb") as file:
        values = file.read().rpartition(b")")[2].split()
    return lambda place: int(values[place - 3])
