"""Hides the zygote's modules from a worker's program until the program imports them.

A module imported before the fork read its environment variables before the fork. In a fresh interpreter it would read
the values that the program has set before the import. So the modules are removed from `sys.modules`, and the program's
own import brings them back, unchanged. At that moment the variables that they read are compared with those at the fork.
A change is applied if possible, and reported otherwise. The program finds `sys.modules` as in a fresh interpreter.
The loggers of these modules are hidden with them: `logging.config` disables the loggers that exist when it is called.

The variables are those of `os.environ` and those that C code sees: a library may set one by `os.putenv` or in C, which
`os.environ` does not show. A variable that only C code sees is reported also if torch would look it up in `os.environ`,
and so miss it in a fresh interpreter too."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader


_c_environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.PyDLL(None), "environ")


def c_environment() -> dict[str, str]:
    """Return the variables of this process as C code sees them."""
    variables: dict[str, str] = {}
    position = 0
    while _c_environ and (entry := _c_environ[position]) is not None:
        name, separator, value = os.fsdecode(entry).partition("=")
        if separator:  # getenv does not find the others
            variables.setdefault(name, value)  # it takes the first one
        position += 1
    return variables


def _variables() -> list[dict[str, str]]:
    return [c_environment(), dict(os.environ)]


def present_loggers() -> set[logging.Logger]:
    """Return the loggers of this process, except those of the standard library, whose modules are not hidden."""
    return {
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] not in sys.stdlib_module_names
    }


class HiddenModules:
    """Modules of one package, imported at one time. package: its top-level name."""

    def __init__(
        self,
        package: str,
        modules: Mapping[str, ModuleType],
        reads: Callable[[str], bool],
        imports: Sequence[str] = (),
        loggers: Collection[logging.Logger] = (),
    ) -> None:
        """reads: returns True if this package, or one that it imports, reads a variable of this name at its import.
        imports: other packages that it imports at once, so a fresh interpreter has both from then on.
        loggers: those that these modules have created."""
        self.package = package
        self.modules = dict(modules)
        self.reads = reads
        self.imports = tuple(imports)
        self._loggers = frozenset(loggers)
        self._attributes: list[tuple[ModuleType, str, ModuleType]] = []  # set on modules outside this group

    def hide(self) -> None:
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            holder = sys.modules.get(parent)
            if holder is not None and parent not in self.modules and vars(holder).get(child) is module:
                self._attributes.append((holder, child, module))
                delattr(holder, child)
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        loggers = logging.root.manager.loggerDict
        for name, entry in list(loggers.items()):
            children = [entry] if isinstance(entry, logging.Logger) else entry.loggerMap
            if not self._loggers.isdisjoint(children):
                del loggers[name]

    def show(self) -> None:
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        for holder, child, module in self._attributes:
            setattr(holder, child, module)
        self._attributes.clear()
        _show_loggers(self._loggers)


def _show_loggers(hidden: Collection[logging.Logger]) -> None:
    """Let the program find these loggers. One that it has created itself meanwhile is the same logger from now on."""
    manager: Any = logging.root.manager
    with cast("Any", logging)._lock:
        for logger in hidden:
            known = manager.loggerDict.get(logger.name)
            if isinstance(known, logging.Logger) and known is not logger:
                _unite(logger, known)
            manager.loggerDict[logger.name] = logger
        for logger in [entry for entry in manager.loggerDict.values() if isinstance(entry, logging.Logger)]:
            manager._fixupParents(logger)
        manager._clear_cache()


def _unite(logger: logging.Logger, program_logger: logging.Logger) -> None:
    """Let two loggers share one state: what the program has set, and then what the import has added.

    Torch sets the level of each logger that it separates from its parent, also to none."""
    logger.__dict__ = program_logger.__dict__ = {
        **vars(program_logger),
        **vars(logger),
        "level": logger.level or (program_logger.level if logger.propagate else logging.NOTSET),
        "handlers": [*program_logger.handlers, *logger.handlers],
        "filters": [*program_logger.filters, *logger.filters],
        "propagate": logger.propagate and program_logger.propagate,
        "disabled": logger.disabled or program_logger.disabled,
    }


class Hidden:
    """The first finder of `sys.meta_path`: restores a group when the program imports one of its modules."""

    def __init__(
        self,
        groups: Sequence[HiddenModules],
        on_change: Callable[[str, list[str]], None],
        on_import: Callable[[str], None],
        noted: Collection[str],
    ) -> None:
        """on_change: called when a package is restored, with the changed variables that it reads.
        on_import: called with a module of `noted` packages that the program imports and that is not hidden here."""
        self._groups = {name: group for group in groups for name in group.modules}
        self._environment = _variables()
        self._on_change, self._on_import = on_change, on_import
        self._noted = frozenset(noted)
        for group in reversed(groups):  # the later ones refer to the earlier ones
            group.hide()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        group = self._groups.get(name)
        if group is None:
            if name.partition(".")[0] in self._noted:
                self._on_import(name)
            return None
        module = group.modules[name]
        real_spec = getattr(module, "__spec__", None)
        spec = ModuleSpec(name, cast("Loader", _Loader(self, module)), origin=getattr(real_spec, "origin", None))
        spec.submodule_search_locations = getattr(real_spec, "submodule_search_locations", None)
        spec.has_location = getattr(real_spec, "has_location", False)
        return spec

    def show(self, name: str) -> None:
        """Restore the group of a module, and those that its import would import."""
        group = self._groups.get(name)
        if group is None:
            return  # another thread has restored it
        for hidden_group in (group, *filter(None, map(self._groups.get, group.imports))):
            self._restore(hidden_group)
        changed = sorted(
            {
                name
                for before, now in zip(self._environment, _variables(), strict=True)
                for name in {*before, *now}
                if group.reads(name) and before.get(name) != now.get(name)
            }
        )
        if changed:
            self._on_change(group.package, changed)

    def show_all(self) -> None:
        """Restore everything, for the end of the interpreter."""
        for group in {id(group): group for group in self._groups.values()}.values():
            self._restore(group)

    def _restore(self, group: HiddenModules) -> None:
        group.show()
        for name in group.modules:
            self._groups.pop(name, None)


class _Loader:
    """Loads a module that is imported already. The real loader handles every other attribute."""

    def __init__(self, hidden: Hidden, module: ModuleType) -> None:
        self._hidden = hidden
        self._module = module
        self._spec = getattr(module, "__spec__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._hidden.show(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._spec, "loader", None), name)
