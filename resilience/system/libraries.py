"""Which shared libraries has this process loaded?

The answer comes from the dynamic linker's own list, not from /proc/self/maps. If the file of a library was replaced
after it was loaded, the linker finds it only by the name in this list: `…/numpy/_core/../../numpy.libs/…`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_RTLD_DI_LINKMAP = 2  # <dlfcn.h>


class _Link(ctypes.Structure):
    """The beginning of struct link_map, <link.h>."""


_Link._fields_ = [
    ("l_addr", ctypes.c_void_p),
    ("l_name", ctypes.c_char_p),
    ("l_ld", ctypes.c_void_p),
    ("l_next", ctypes.POINTER(_Link)),
]


def loaded(part: str) -> Iterator[ctypes.CDLL]:
    """Yield each loaded library whose file name contains `part`. No file is opened."""
    for path in _paths():
        if part in os.path.basename(path):
            try:
                yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            except OSError:  # another thread has just unloaded it
                continue


def _paths() -> list[str]:
    program = ctypes.CDLL(None)
    program.dlinfo.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    link = ctypes.POINTER(_Link)()
    paths = []
    if program.dlinfo(program._handle, _RTLD_DI_LINKMAP, ctypes.byref(link)) == 0:
        while link:
            paths.append(os.fsdecode(link.contents.l_name or b""))
            link = link.contents.l_next
    return paths
