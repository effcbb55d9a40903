"""Which modules can the zygote import in advance without harm?

A module that the zygote has imported costs a restart nothing. After the import, the process must still be safe to fork,
and a program must find everything as if it had imported the module itself. A module that starts a thread or a process,
opens a file, a socket or a device, handles a signal, or leaves a temporary folder, which the exit handlers of the first
worker would remove for all, breaks that: it is refused, with the reason."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from resilience.errors import error_in_words
from resilience.facts.encoding import text
from resilience.launcher.worker import environment_reads, worker_main
from resilience.launcher.worker.fork_safety import WORKER_VARIABLES
from resilience.launcher.worker.hidden import HiddenModules, present_loggers
from resilience.launcher.worker.script_variables import is_read_at_import, is_read_by_numpy
from resilience.system import native_threads
from resilience.system.environment import one_blas_thread

groups: list[HiddenModules] = []  # modules of this process that programs import again


class Loaded(msgspec.Struct, frozen=True):
    """The outcome of preloading. refused: these modules cannot be preloaded, and none of the others was kept.
    found: file of each newly imported top-level module; reads: variables that they read. is_learned: the user did not
    name these modules; workers have imported them. is_tried: False if no process could be forked to import them."""

    modules: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    why: str = ""
    found: dict[str, str] = {}
    reads: tuple[str, ...] = ()
    duration_s: float = 0.0
    is_learned: bool = False
    is_tried: bool = True


def begin() -> None:
    """Register the modules of torch and numpy, which this process has imported."""
    torch_modules, loggers = _modules_of("torch", set()), present_loggers()
    groups.append(HiddenModules("torch", torch_modules, is_read_at_import, ("numpy",), loggers))  # numpy has no loggers
    groups.append(HiddenModules("numpy", _modules_of("numpy", set()), is_read_by_numpy))


def load(modules: Sequence[str], learned: Sequence[str] = (), worker_variables: Sequence[str] = ()) -> Loaded:
    """Import modules in this order. If one of them is refused, this process is unusable afterwards.

    learned: names that workers have tried to import; a name that cannot be imported is left out.
    worker_variables: variables that differ between workers, besides WORKER_VARIABLES."""
    began = time.monotonic()
    sys.path[:] = worker_main.PATHS  # as in workers, except for the script's folder
    known_names, known_loggers = set(sys.modules), present_loggers()
    before, environment = _state(), dict(os.environ)
    reads: dict[str, set[str]] = defaultdict(set)
    temporary: list[str | bytes] = []
    for name in (*modules, *learned):
        with one_blas_thread(), environment_reads.recorded(reads), _temporary_paths(temporary):
            try:
                importlib.import_module(name)
            except BaseException as error:  # whatever a module raises
                if name in modules:
                    return Loaded(refused=(name,), why=text(error_in_words(error))[:300])
        reason = cannot_fork() or _difference(before, _state()) or _why_worker_specific(reads, worker_variables)
        if not reason and any(map(os.path.lexists, temporary)):
            reason = "its import leaves a temporary folder or file, which workers would share"
        if reason:
            return Loaded(refused=(name,), why=reason, is_learned=name not in modules)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    gc.collect()
    gc.freeze()  # a garbage collection in a worker must not copy shared pages
    new_loggers = present_loggers() - known_loggers
    for package in {name.partition(".")[0] for name in set(sys.modules) - known_names} - set(sys.stdlib_module_names):
        loggers = [logger for logger in new_loggers if logger.name.partition(".")[0] == package]
        groups.append(
            HiddenModules(package, _modules_of(package, known_names), reads[package].__contains__, (), loggers)
        )
    files = {
        name: str(getattr(sys.modules[name], "__file__", None) or "")
        for name in set(sys.modules) - known_names
        if "." not in name
    }
    names = (*modules, *sorted({name.partition(".")[0] for name in learned}))
    variables = tuple(sorted(set().union(*reads.values())))
    return Loaded(names, found=files, reads=variables, duration_s=time.monotonic() - began, is_learned=not modules)


def _modules_of(package: str, known_names: set[str]) -> dict[str, ModuleType]:
    """Return the imported modules of a package except known ones."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package and name not in known_names and isinstance(module, ModuleType)
    }


@contextlib.contextmanager
def _temporary_paths(paths: list[str | bytes]) -> Iterator[None]:
    """Note the folders and files that `tempfile` makes and leaves to its caller."""
    make_folder, make_file = tempfile.mkdtemp, tempfile.mkstemp

    @functools.wraps(make_folder)
    def noted_folder(*args: Any, **kwargs: Any) -> Any:
        paths.append(make_folder(*args, **kwargs))
        return paths[-1]

    @functools.wraps(make_file)
    def noted_file(*args: Any, **kwargs: Any) -> Any:
        fd, path = make_file(*args, **kwargs)
        paths.append(path)
        return fd, path

    tempfile.mkdtemp, tempfile.mkstemp = noted_folder, noted_file
    try:
        yield
    finally:
        tempfile.mkdtemp, tempfile.mkstemp = make_folder, make_file


def _why_worker_specific(reads: Mapping[str, set[str]], worker_variables: Sequence[str]) -> str:
    for package, names in reads.items():
        specific = [name for name in sorted(names) if name.startswith(WORKER_VARIABLES) or name in worker_variables]
        if specific:
            return f"{package} reads {specific[0]} at its import, which differs between workers"
    return ""


def cannot_fork() -> str:
    """Return why this process must not be forked; empty if it may be."""
    if others := native_threads.others():
        names = ", ".join(sorted([native_threads.process_name(), *others]))
        return f"{1 + len(others)} threads run ({names}), and a fork has only one"
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/dev/nvidia"):
                return "CUDA is in use, which does not survive a fork"
    return ""


def _state() -> dict[str, object]:
    """Return the state that an import must not change, by its name for messages."""
    return {
        "open descriptors": _descriptors(),
        "handlers of signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "child processes": Path(f"/proc/self/task/{os.getpid()}/children").read_bytes(),
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "the current folder": os.stat(os.curdir).st_ino,
    }


def _descriptors() -> dict[str, str]:
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    return descriptors


def _difference(before: dict[str, object], after: dict[str, object]) -> str:
    changed = [name for name, value in before.items() if after[name] != value]
    return f"its import changes {' and '.join(changed)}" if changed else ""
