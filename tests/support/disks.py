"""Small file systems in memory: one that fills up, one that can only be read."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs on a new folder. options: of mount, such as size=4m or ro. Skips the test where that is refused."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"FULL DISKS ARE NOT TESTED HERE: run as root with CAP_SYS_ADMIN ({made.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Freezing:
    """A disk that can be frozen: whoever writes to it waits, until it thaws."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True, timeout=240)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.folder)], check=False, timeout=240)


@contextlib.contextmanager
def freezing(folder: Path) -> Iterator[Freezing]:
    """Mount a file system of its own on a new folder. Skips the test where that is refused."""
    folder.mkdir()
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=240)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"DISKS THAT DO NOT ANSWER ARE NOT TESTED HERE: run as root with loop devices ({error})")
    disk = Freezing(folder)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=240)


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    fd = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, b"." * 4096)
    finally:
        os.close(fd)


def lose_descriptor(fd: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each write to this descriptor fail with an error number until it is closed: the server that knew it is gone.
    A new descriptor of the same number works."""
    write, close, is_closed = os.write, os.close, list[bool]()

    def write_to_server(to: int, data: bytes) -> int:
        if to == fd and not is_closed:
            raise OSError(number, os.strerror(number))
        return write(to, data)

    def note_closed(closing: int) -> None:
        close(closing)
        if closing == fd:
            is_closed.append(True)

    monkeypatch.setattr(os, "write", write_to_server)
    monkeypatch.setattr(os, "close", note_closed)
