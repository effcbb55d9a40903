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


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    fd = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, b"." * 4096)
    finally:
        os.close(fd)
