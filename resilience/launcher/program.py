"""Can the workers' program start at all?  Looked at after a worker has failed.

A script that is not there, a module that nobody finds and a syntax error fail in the same way each time. The answer
comes from the files, not from what the worker printed. Nothing of the program is imported or run. Where the files do
not tell, the program counts as one that can start."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

ARCHIVES = (".zip", ".pyz", ".pyc")


def why_not(entrypoint: str, arguments: Sequence[str]) -> str:
    """Return why `ENTRYPOINT ARGUMENTS` cannot start in the present folder, empty if it can, or if that is unknown."""
    if entrypoint != sys.executable or list(arguments[:1]) != ["-u"] or len(arguments) < 2:
        return ""  # --no-python: any program
    if arguments[1] != "-m":
        return _of_script(arguments[1])
    return _of_module(arguments[2]) if len(arguments) > 2 else ""


def has_module(name: str, path: Sequence[str]) -> bool:
    """Return True if a module or package of this name is found. Nothing is imported."""
    importlib.invalidate_caches()
    return _found(name, path) is not None


def _of_script(path: str) -> str:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except FileNotFoundError:
        return f"there is no file {os.path.abspath(path)}"
    except OSError:
        return ""  # a folder; or a file server that may answer next time
    if path.endswith(ARCHIVES) or source.startswith(b"PK"):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{os.path.abspath(path)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    except (ValueError, MemoryError, RecursionError):
        return ""
    return ""


def file_of(module: str) -> str:
    """Return the file that `python -m MODULE` runs in the present folder, empty if there is none, or none in Python."""
    importlib.invalidate_caches()
    spec = _main_of(module, _found(module, [os.getcwd(), *sys.path]))
    return spec.origin if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else ""


def _of_module(name: str) -> str:
    importlib.invalidate_caches()
    found = _found(name, [os.getcwd(), *sys.path])
    if found is None:
        return f"there is no module {name}"
    if _main_of(name, found) is None:
        return f"the package {name} has no module __main__"
    return _of_script(path) if (path := file_of(name)) else ""


def _main_of(name: str, spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return what is run of a module: of a package its module __main__."""
    if spec is not None and spec.submodule_search_locations is not None:
        return _found_in(spec, f"{name}.__main__")
    return spec


def _found(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where an interpreter with this path finds a module, None if nowhere."""
    parts = name.split(".")
    spec = _found_on_the_path(parts[0], path)
    for number in range(1, len(parts)):
        spec = spec and _found_in(spec, ".".join(parts[: number + 1]))
    return spec


def _found_on_the_path(name: str, path: Sequence[str]) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, list(path))
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return found or next((spec for find in finders if (spec := find(name, None)) is not None), None)


def _found_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, package.submodule_search_locations or ())
