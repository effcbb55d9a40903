"""Do this node's NVIDIA devices answer their driver?

Asks the management library (NVML). It needs no CUDA context and no memory on a device, and a process can leave it
again. A device that fell off the bus answers with an error. If its driver hangs, it does not answer at all, so the
caller needs a limit. Source: NVIDIA, NVML API reference, device queries and nvmlReturn_t."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from resilience.facts import encoding

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED, _NO_PERMISSION = 0, 3, 4
_DEVICES = Path("/dev")


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def find() -> Any:
    """Return the library, None if this node has no such library or no device."""
    if not any(path.name[6:].isdecimal() for path in _DEVICES.glob("nvidia*")):
        return None
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def faults(library: Any) -> list[str]:
    """Return the faults of the devices that this process may use."""
    code = library.nvmlInit_v2()
    if code != _SUCCESS:
        return [f"NVML does not start: {_error_text(library, code)}"]
    try:
        count = ctypes.c_uint()
        code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if code != _SUCCESS:
            return [f"NVML does not count devices: {_error_text(library, code)}"]
        codes = ((number, _device_code(library, number)) for number in range(count.value))
        return [f"GPU {number}: {_error_text(library, code)}" for number, code in codes if code != _SUCCESS]
    finally:
        library.nvmlShutdown()


def _device_code(library: Any, number: int) -> int:
    """Return a device's error code. A device that is not ours, or has no memory of its own, counts as healthy."""
    handle, memory = ctypes.c_void_p(), _Memory()
    code = int(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)))
    if code == _SUCCESS:
        code = int(library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    return _SUCCESS if code in (_NOT_SUPPORTED, _NO_PERMISSION) else code


def _error_text(library: Any, code: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    text = library.nvmlErrorString(code)
    return f"{encoding.text(text) if text else 'error'} ({code})"
