"""Modules that are hidden from a worker's program: which imports restore them, and which variables came too late."""

from __future__ import annotations

import importlib
import logging
import logging.config
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import pytest

from resilience.launcher.worker.hidden import Hidden, HiddenModules


class Late(NamedTuple):
    package: str
    names: list[str]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Late]]]:
    """Hide the modules `big` and `small`. `big` reads BIG_ and SMALL_, and imports `small`, which reads SMALL_.

    Return the list to which changes are added."""

    def hide_both() -> list[Late]:
        late: list[Late] = []
        for name in ("big", "small"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        groups = [
            HiddenModules(
                "big", {"big": sys.modules["big"]}, lambda name: name.startswith(("BIG_", "SMALL_")), ("small",)
            ),
            HiddenModules("small", {"small": sys.modules["small"]}, lambda name: name.startswith("SMALL_")),
        ]
        Hidden(groups, lambda package, names: late.append(Late(package, names)), lambda name: None, ())
        return late

    finders = list(sys.meta_path)
    yield hide_both
    sys.meta_path[:] = finders


Hide = Callable[[], list[Late]]


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
