"""What NVIDIA devices answer, told by a library that is none. No device is needed, and none is used."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from resilience.system.health import nvml

LOST, NO_DRIVER, NOT_SUPPORTED, NO_PERMISSION = 15, 9, 3, 4


class Function:
    """A function of a C library: callable, and its result's type can be set."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Library:
    """NVML with these answers: of the start, of the count, and of each device (handle, memory)."""

    def __init__(self, *devices: tuple[int, int], start: int = 0, count: int = 0) -> None:
        self.is_open = False
        self.nvmlErrorString = Function({LOST: b"GPU is lost", NO_DRIVER: b"Driver Not Loaded"}.get)

        def begin() -> int:
            self.is_open = start == 0
            return start

        def end() -> int:
            self.is_open = False
            return 0

        def tell_count(number: Any) -> int:
            number._obj.value = len(devices)
            return count

        def tell_handle(number: Any, handle: Any) -> int:
            handle._obj.value = number.value + 1
            return int(devices[number.value][0])

        self.nvmlInit_v2, self.nvmlShutdown = Function(begin), Function(end)
        self.nvmlDeviceGetCount_v2 = Function(tell_count)
        self.nvmlDeviceGetHandleByIndex_v2 = Function(tell_handle)
        self.nvmlDeviceGetMemoryInfo = Function(lambda handle, memory: devices[handle.value - 1][1])


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (Library(), []),
        (Library((0, 0), (0, 0)), []),
        (Library((0, 0), (LOST, 0)), ["GPU 1: GPU is lost (15)"]),
        (Library((0, LOST), (0, 0), (LOST, 0)), ["GPU 0: GPU is lost (15)", "GPU 2: GPU is lost (15)"]),
        (Library((NO_PERMISSION, 0), (0, NOT_SUPPORTED)), []),
        (Library(start=NO_DRIVER), ["NVML does not start: Driver Not Loaded (9)"]),
        (Library(count=999), ["NVML does not count devices: error (999)"]),
    ],
)
def test_every_device_that_does_not_answer_is_named(library: Library, says: list[str]) -> None:
    assert nvml.faults(library) == says
    assert not library.is_open


def test_node_without_a_device_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "_DEVICES", tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    (tmp_path / "nvidiactl").touch()
    assert nvml.find() is None
    (tmp_path / "nvidia0").touch()
    assert nvml.find() == nvml.LIBRARY


def test_node_without_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "_DEVICES", tmp_path)
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-library.so.1")
    (tmp_path / "nvidia0").touch()
    assert nvml.find() is None
