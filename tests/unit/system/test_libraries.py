"""Shared libraries that this process has loaded."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec._core
import pytest

from resilience.system import libraries


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    shutil.copy(msgspec._core.__file__, new)
    new.rename(path)


@pytest.mark.parametrize("change", [remove, replace])
def test_loaded_library_is_found_after_its_file_has_changed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / f"{change.__name__}d-library.so"
    shutil.copy(msgspec._core.__file__, path)
    (tmp_path / "package").mkdir()
    library = ctypes.CDLL(str(tmp_path / "package" / ".." / path.name))  # how numpy's libraries are loaded
    change(path)
    (loaded,) = libraries.loaded(f"{change.__name__}d-library")
    assert loaded._handle == library._handle


def test_library_that_is_not_loaded_is_not_found(tmp_path: Path) -> None:
    shutil.copy(msgspec._core.__file__, tmp_path / "other-library.so")
    assert list(libraries.loaded("other-library")) == []
