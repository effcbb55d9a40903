"""Modules that are hidden from a worker's program: which imports restore them, and which variables came too late."""

from __future__ import annotations

import importlib
import logging
import logging.config
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from resilience.launcher.worker.hidden import Hidden, HiddenModules


class Late(NamedTuple):
    package: str
    names: list[str]


Hide = Callable[..., list[Late]]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hide]:
    """Hide the modules `big` and `small`. `big` reads BIG_ and SMALL_, and imports `small`, which reads SMALL_.

    Return the list to which changes are added."""

    def hide_both(small: ModuleType | None = None, name: str = "small") -> list[Late]:
        late: list[Late] = []
        monkeypatch.setitem(sys.modules, "big", ModuleType("big"))
        monkeypatch.setitem(sys.modules, name, small or ModuleType(name))
        groups = [
            HiddenModules(
                "big", {"big": sys.modules["big"]}, lambda name: name.startswith(("BIG_", "SMALL_")), (name,)
            ),
            HiddenModules(name, {name: sys.modules[name]}, lambda name: name.startswith("SMALL_")),
        ]
        Hidden(groups, lambda package, names: late.append(Late(package, names)), lambda name: None, ())
        return late

    finders = list(sys.meta_path)
    yield hide_both
    sys.meta_path[:] = finders


def test_import_also_restores_the_packages_that_it_would_import(hide: Hide) -> None:
    hide()
    assert not {"big", "small"} & set(sys.modules)
    importlib.import_module("big")
    assert {"big", "small"} <= set(sys.modules)


def test_variable_set_after_an_import_is_not_late_for_a_package_that_it_imported(
    hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = hide()
    importlib.import_module("big")
    monkeypatch.setenv("SMALL_NUMBER", "1")
    importlib.import_module("small")
    assert late == []


def test_variable_set_before_an_import_is_late_once(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    late = hide()
    monkeypatch.setenv("SMALL_NUMBER", "1")
    importlib.import_module("big")
    importlib.import_module("small")
    assert late == [Late("big", ["SMALL_NUMBER"])]


def test_package_imported_by_itself_is_compared_by_itself(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    late = hide()
    monkeypatch.setenv("BIG_NUMBER", "1")
    importlib.import_module("small")
    assert late == []
    assert "big" not in sys.modules
    importlib.import_module("big")
    assert late == [Late("big", ["BIG_NUMBER"])]


class Pausing(ModuleType):
    """A package. The import of a module in it waits, once it has missed that module in `sys.modules`, until another
    thread, which imports `big`, has ended or waits for it."""

    other: threading.Thread | None = None
    folder = ""

    @property
    def __path__(self) -> list[str]:
        if self.other is None:
            self.other = threading.Thread(target=importlib.import_module, args=("big",), daemon=True)
            self.other.start()
            while self.other.is_alive() and not importlib._bootstrap._blocking_on.get(self.other.ident):  # type: ignore[attr-defined]
                time.sleep(0.001)
        return [self.folder]


def test_module_that_two_threads_import_at_once_is_not_executed_again(
    hide: Hide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Pausing("package")
    package.folder = str(tmp_path)
    (tmp_path / "small.py").write_text("is_executed = True")
    monkeypatch.setitem(sys.modules, "package", package)
    hide(name="package.small")
    importlib.import_module("package.small")
    assert package.other is not None
    package.other.join()
    assert not hasattr(sys.modules["package.small"], "is_executed")
    assert "big" in sys.modules


def test_module_whose_import_an_exception_cut_short_is_not_executed_again(
    hide: Hide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler, or another thread, may raise in the middle of an import."""

    class Raises(ModuleType):
        is_cut = False

        def __setattr__(self, name: str, value: object) -> None:
            if name == "__spec__" and value is None and not self.is_cut:
                super().__setattr__("is_cut", True)
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    hide(Raises("small"))
    (tmp_path / "small.py").write_text("is_executed = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("small")
    assert "small" not in sys.modules
    importlib.import_module("small")
    assert not hasattr(sys.modules["small"], "is_executed")


@pytest.fixture
def unset() -> Iterator[None]:
    os.unsetenv("BIG_NUMBER")
    yield
    os.unsetenv("BIG_NUMBER")


@pytest.mark.usefixtures("unset")
def test_variable_that_only_c_code_sees_is_late_too(hide: Hide) -> None:
    late = hide()
    os.putenv("BIG_NUMBER", "1")
    importlib.import_module("big")
    assert late == [Late("big", ["BIG_NUMBER"])]


@pytest.mark.usefixtures("unset")
def test_variable_that_is_removed_for_c_code_alone_is_late_too(hide: Hide) -> None:
    os.putenv("BIG_NUMBER", "1")
    late = hide()
    os.unsetenv("BIG_NUMBER")
    importlib.import_module("big")
    assert late == [Late("big", ["BIG_NUMBER"])]


@pytest.mark.usefixtures("unset")
def test_variable_that_only_c_code_sees_and_that_stays_is_not_late(hide: Hide) -> None:
    os.putenv("BIG_NUMBER", "1")
    late = hide()
    importlib.import_module("big")
    assert late == []


@pytest.mark.usefixtures("unset")
def test_variable_of_a_mapping_that_replaces_os_environ_is_late_too(
    hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = hide()
    monkeypatch.setattr(os, "environ", {**os.environ, "BIG_NUMBER": "1"})
    importlib.import_module("big")
    assert late == [Late("big", ["BIG_NUMBER"])]


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger of the package `chatty`, which is hidden with it."""
    logger = logging.getLogger("chatty.inner")
    monkeypatch.setitem(sys.modules, "chatty", ModuleType("chatty"))
    before, finders = dict(logging.root.manager.loggerDict), list(sys.meta_path)
    group = HiddenModules("chatty", {"chatty": sys.modules["chatty"]}, lambda name: False, loggers=[logger])
    Hidden([group], lambda package, names: None, lambda name: None, ())
    yield logger
    sys.meta_path[:] = finders
    logging.root.manager.loggerDict.clear()
    logging.root.manager.loggerDict.update(before)
    del logging.root.manager.loggerDict["chatty.inner"]


def test_logger_of_a_hidden_module_is_not_disabled_by_a_configuration(logger: logging.Logger) -> None:
    others = {
        name: each.disabled
        for name, each in logging.root.manager.loggerDict.items()
        if isinstance(each, logging.Logger) and each is not logger
    }
    logging.config.dictConfig({"version": 1})
    for name, is_disabled in others.items():
        logging.getLogger(name).disabled = is_disabled
    importlib.import_module("chatty")
    assert logging.getLogger("chatty.inner") is logger
    assert not logger.disabled


def test_logger_that_the_program_configures_before_the_import_is_the_modules_own(logger: logging.Logger) -> None:
    program_logger = logging.getLogger("chatty.inner")
    program_logger.setLevel(logging.ERROR)
    importlib.import_module("chatty")
    assert logger.level == logging.ERROR
    program_logger.setLevel(logging.INFO)
    assert logger.level == logging.INFO


def test_logger_above_that_of_a_hidden_module_becomes_its_parent(logger: logging.Logger) -> None:
    parent = logging.getLogger("chatty")
    assert logger.parent is not parent
    importlib.import_module("chatty")
    assert logger.parent is parent
