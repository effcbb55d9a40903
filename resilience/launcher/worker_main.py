"""Makes a forked process like a fresh interpreter that was told to run a script or a module.

What a program can see of its interpreter is set as `python -u script …` or `python -u -m module …` would
set it: arguments, path, environment, the module `__main__`, unbuffered output, signals, threads of
numerical libraries, seeds, its name in lists of processes. It ends by the interpreter's own way out, so
that exit handlers run and the status is the same. Known differences: modules that torch imports are
imported already, with the environment as it was then; hash seeds are equal in all workers of a node;
sys.flags are the agent's; a stack that is printed while the program runs begins with frames of ours. What
else would differ keeps a worker from being forked: `fresh`."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import io
import multiprocessing.process
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from resilience.adapters import titles
from resilience.launcher import fresh, script_variables
from resilience.launcher.hidden import Group, Hidden

FAILED = 1
LEARNED = ("lightning", "pytorch_lightning", "torch", "transformers")  # their imports are noted, for the next workers
_IONBF = 2  # of <stdio.h>
PATHS = sys.path[:] if getattr(sys.flags, "safe_path", False) else sys.path[1:]  # without the agent's own script's
_OPENBLAS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def become(
    arguments: Sequence[str], environment: Mapping[str, str], groups: Sequence[Group], tell: Callable[[str], None]
) -> NoReturn:
    """Run what `python ARGUMENTS` would run in the present folder, and end this process.

    groups: modules that the program is to find only when it imports them; tell: takes notes for the agent."""
    command = [sys.executable, *arguments]
    titles.name(f"rank{environment.get('RANK', '')} {os.path.basename(_program(arguments))}")  # before any thread
    titles.show(_title(command, environment), environment)
    _reset_signals()
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    _reset_streams()
    _reset_threads(environment)
    _reset_chance()
    _reset_identity(command)
    hidden = Hidden(groups, functools.partial(_apply, tell), lambda name: tell(f"import {name}"), LEARNED)
    rest = list(arguments[1:])
    if rest[0] == "-m":
        sys.argv = ["-m", *rest[2:]]
        _reset_path(os.getcwd)
        _end(_called(_run_module, rest[1]), hidden)
    sys.argv = rest
    _reset_path(lambda: os.path.dirname(os.path.realpath(rest[0])))
    _end(_called(_run_script, rest[0]), hidden)


# -- the program -----------------------------------------------------------------------------------


def _run_module(name: str) -> None:
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(path: str) -> None:
    with contextlib.suppress(OSError):  # the present folder is deleted
        path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # and no tidier than that
    space = sys.modules["__main__"].__dict__  # and no name for the module, which must die when modules do
    space["__file__"] = path
    space["__cached__"] = None
    space["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, space)


def _called(call: Callable[[str], None], argument: str) -> int:
    """Run the program; answers its exit status, and says what the interpreter would say."""
    try:
        call(argument)
    except SystemExit as error:
        return _status(error)
    except BaseException as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        try:
            _show(error)
        except SystemExit as instead:  # the program's own hook may leave
            return _status(instead)
        if isinstance(error, KeyboardInterrupt):
            return _die_by_sigint()
        return FAILED
    return 0


def _status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr)
    return FAILED


def _show(error: BaseException) -> None:
    """Let the program's hook print an exception, as the interpreter does. Raises: SystemExit, if the hook does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        second.__traceback__ = _without_ours(second.__traceback__)
        second.__suppress_context__ = True
        traceback.print_exception(second)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _without_ours(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _die_by_sigint() -> int:
    """Have this process die by SIGINT once all is cleaned up, as the interpreter does; answers the status for it.

    exit() hands its status to handlers of this kind: raise(SIGINT), when Python is gone and its handler with it."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), None)
    return signal.SIGINT


def _end(status: int, hidden: Hidden) -> NoReturn:
    """Leave as the interpreter does: threads, exit handlers, modules, buffers."""
    hidden.show_all()
    ctypes.pythonapi.Py_Exit(status)
    os._exit(status)  # not reached


# -- the interpreter -------------------------------------------------------------------------------


def _reset_signals() -> None:
    """Let go of Python's handlers, as exec does. What is ignored or blocked stays so, across exec too."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def _reset_streams() -> None:
    """Standard streams as after `python -u`, for C as well: what is written goes out at once."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for name, mode, fd in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        stream: Any = None
        with contextlib.suppress(OSError):  # nobody has given us this one
            os.fstat(fd)
            raw = io.FileIO(fd, mode, closefd=False)
            raw.name = f"<{name}>"
            buffer: Any = io.BufferedReader(raw) if mode == "r" else raw
            stream = io.TextIOWrapper(
                buffer, encoding, "backslashreplace" if fd == 2 else errors, newline="\n", write_through=True
            )
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    libc = ctypes.CDLL(None)
    for name in ("stdin", "stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _IONBF, 0)


def _reset_path(first: Callable[[], str]) -> None:
    """Set the path. Folders that were not there when it was first searched may be there now."""
    sys.path[:] = PATHS
    if not getattr(sys.flags, "safe_path", False):
        with contextlib.suppress(OSError):  # the present folder is deleted
            sys.path.insert(0, first())
    importlib.invalidate_caches()


def _reset_identity(command: list[str]) -> None:
    """Be the main process of its own, with a module `__main__` of its own."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    sys.orig_argv = command
    with contextlib.suppress(AttributeError):  # before Python 3.13 it keeps the zygote's
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    process: Any = multiprocessing.process
    process.current_process().authkey = os.urandom(32)
    process.ORIGINAL_DIR = None
    tempfile.tempdir = None  # a module that is preloaded may have asked for it
    with contextlib.suppress(OSError):
        process.ORIGINAL_DIR = os.getcwd()


def _program(arguments: Sequence[str]) -> str:
    """Return the script or module of `python -u SCRIPT` and `python -u -m MODULE`."""
    return arguments[2] if arguments[1] == "-m" else arguments[1]


def _title(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command for lists of processes: rank and node before the interpreter, and then what it runs."""
    rank, node = environment.get("RANK"), environment.get("RESILIENCE_NODE")
    if rank is None:
        return list(command)
    where = f"rank {rank} on {node}" if node else f"rank {rank}"
    return [f"{where}: {command[0]}", *command[1:]]


# -- libraries -------------------------------------------------------------------------------------


def _apply(tell: Callable[[str], None], package: str, names: list[str]) -> None:
    """Let variables have their effect that the program has set before it imported this package, where that can be;
    tell of the others."""
    late = [name for name in names if name not in script_variables.APPLIED]
    if late:
        tell(f"late {package} {' '.join(late)}")
    if any(name.endswith("_NUM_THREADS") for name in names):
        _reset_threads(os.environ, None)
    distributed = sys.modules.get("torch.distributed")
    if "TORCH_DISTRIBUTED_DEBUG" in names and distributed is not None:
        distributed.set_debug_level_from_env()


def _reset_threads(environment: Mapping[str, str], before: Mapping[str, str] | None = fresh.AT_START) -> None:
    """Let numerical libraries use as many threads as a fresh process would, by its environment.

    before: the variables by which they have as many as they have, None if that is unknown."""
    cores = len(os.sched_getaffinity(0))
    openmp = _positive(environment.get("OMP_NUM_THREADS", "").split(",")[0])
    torch = sys.modules.get("torch")
    if torch is not None and (before is None or environment.get("OMP_NUM_THREADS") != before.get("OMP_NUM_THREADS")):
        _call_each("gomp", ("omp_set_num_threads",), openmp or cores)
        torch.set_num_threads(torch.get_num_threads())  # as MKL has it, which knows cores; and in every thread
    wanted = min(cores, _positive(environment.get("OPENBLAS_NUM_THREADS", "")) or openmp or cores)
    if wanted > 1 or before is None:  # the zygote has it at 1
        _call_each("openblas", _OPENBLAS, wanted)


def _call_each(part: str, names: Sequence[str], argument: int) -> None:
    """Call the first of these functions that a library has, in each one loaded whose file name has this part."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        columns = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    for path in sorted({column[5] for column in columns if len(column) == 6}):
        if part in os.path.basename(path):
            library = ctypes.CDLL(path)
            function = next((getattr(library, name) for name in names if hasattr(library, name)), None)
            if function is not None:
                function(argument)


def _positive(text: str) -> int:
    text = text.strip()
    return int(text) if text.isdecimal() else 0


def _reset_chance() -> None:
    """Seeds as different as fresh processes have them. Python's own generator sees to it at a fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
