"""Can the workers' program start at all?  The agent asks after a worker has failed.

A missing script, a missing module and a syntax error fail the same way every time. The answer comes from the files,
not from what the worker printed. Nothing of the program is imported or run. If the files do not show it, we assume that
the program can start. A file server may not answer, so files are read in another thread, for a limited time."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import MAGIC_NUMBER

from resilience.system.background import ASK_LIMIT, asked

LIMIT = ASK_LIMIT  # seconds for a program's files, of which up to 100 are read and parsed


def why_not(entrypoint: str, arguments: Sequence[str]) -> str:
    """Return why `ENTRYPOINT ARGUMENTS` cannot start in the current folder; empty if it can or if that is unknown."""
    if not is_python(entrypoint, arguments):
        return ""
    try:
        return asked(lambda: _why_files_cannot_start(arguments), LIMIT)
    except Exception:  # whatever a file server, a parser or a finder of modules raises
        return ""


def is_python(entrypoint: str, arguments: Sequence[str]) -> bool:
    """Return True for a Python script or module. With --no-python the program may be anything."""
    return entrypoint == sys.executable and list(arguments[:1]) == ["-u"] and len(arguments) >= 2


def is_archive(path: str) -> bool:
    """Return True if the interpreter runs this file as a zip program or as compiled code, not as source text.

    As in the interpreter, the content decides: PEX and shiv make zip programs without an ending, with `#!` in front.
    Raises: OSError."""
    with open(path, "rb") as file:
        is_compiled = path.endswith(".pyc") or file.read(2) == MAGIC_NUMBER[:2]
        return is_compiled or zipfile.is_zipfile(file)


def _why_files_cannot_start(arguments: Sequence[str]) -> str:
    if arguments[1] != "-m":
        return _why_script_cannot_start(arguments[1])
    return _why_module_cannot_start(arguments[2]) if len(arguments) > 2 else ""


def has_module(name: str, path: Sequence[str]) -> bool:
    """Return True if this interpreter finds a module or package of this name. Nothing is imported."""
    importlib.invalidate_caches()
    return _find(name, path) is not None


def _why_script_cannot_start(path: str) -> str:
    try:
        if is_archive(path):
            return ""
        with open(path, "rb") as file:
            source = file.read()
    except FileNotFoundError:
        return f"there is no file {os.path.abspath(path)}"
    except OSError:
        return ""  # it is a folder; or a file server failed and may answer next time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""  # null bytes and unknown encodings have none
        return f"{os.path.abspath(path)}{line}: {type(error).__name__}: {error.msg}"
    except (ValueError, MemoryError, RecursionError):
        return ""
    return ""


def file_of(module: str) -> str:
    """Return the file that `python -m MODULE` runs in the current folder; empty if it is missing or not Python."""
    importlib.invalidate_caches()
    spec = _main_module(module, _find(module, [os.getcwd(), *sys.path]))
    return spec.origin if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else ""


def _why_module_cannot_start(name: str) -> str:
    importlib.invalidate_caches()
    spec = _find(name, [os.getcwd(), *sys.path])
    if spec is None:
        return f"there is no module {name}"
    if _main_module(name, spec) is None:
        return f"the package {name} has no module __main__"
    return _why_script_cannot_start(path) if (path := file_of(name)) else ""


def _main_module(name: str, spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the module that `python -m` runs: for a package, its module __main__."""
    if spec is not None and spec.submodule_search_locations is not None:
        return _find_in_package(spec, f"{name}.__main__")
    return spec


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a module for an interpreter with this path; None if it is not found."""
    parts = name.split(".")
    spec = _find_top_level(parts[0], path)
    for number in range(1, len(parts)):
        spec = spec and _find_in_package(spec, ".".join(parts[: number + 1]))
    return spec


def _find_top_level(name: str, path: Sequence[str]) -> ModuleSpec | None:
    path_spec = PathFinder.find_spec(name, list(path))
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return path_spec or next((spec for find in finders if (spec := find(name, None)) is not None), None)


def _find_in_package(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, package.submodule_search_locations or ())
