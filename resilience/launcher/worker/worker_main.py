"""Makes a forked process like a fresh interpreter that runs a script or a module.

It sets everything that a program can see of its interpreter as `python -u script …` or `python -u -m module …` would:
arguments, path, environment, the module `__main__`, unbuffered output, signals, threads of numerical libraries, seeds,
its name in process lists. The process exits the interpreter's own way, so exit handlers run and the status is the same.
Known differences: modules that torch imports are imported already, with the environment of that time; hash seeds are
equal in all workers of a node; sys.flags are the agent's; a stack printed while the program runs begins with our
frames; code of .pth files ran once in the agent. Any other difference prevents the fork of a worker: `fork_safety`."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import glob
import importlib
import importlib.machinery
import io
import multiprocessing.process
import os
import re
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

from resilience.errors import error_in_words
from resilience.launcher.worker import fork_safety, script_variables
from resilience.launcher.worker.hidden import Hidden, HiddenModules, c_environment
from resilience.launcher.worker.notes import ModuleImported, Note, VariablesSetTooLate
from resilience.system import exit_status, libraries, titles

FAILED = 1
LEARNED = (
    "lightning",
    "pytorch_lightning",
    "torch",
    "transformers",
)  # their imports are reported, for the next workers
_IONBF = 2  # of <stdio.h>
PATHS = (
    sys.path[:] if getattr(sys.flags, "safe_path", False) else sys.path[1:]
)  # without the folder of the agent's own script
_OPENBLAS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    groups: Sequence[HiddenModules],
    tell: Callable[[Note], None],
) -> NoReturn:
    """Run what `python ARGUMENTS` would run in the current folder, and end this process.

    groups: modules that stay hidden until the program imports them; tell: sends notes to the agent."""
    command = [sys.executable, *arguments]
    titles.name(f"rank{environment.get('RANK', '')} {os.path.basename(_program(arguments))}")  # before any thread
    titles.show(_title(command, environment), environment)
    _reset_signals()
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    _reset_streams()
    _reset_threads(environment)
    _reset_seeds()
    _reset_identity(command)
    hidden = Hidden(groups, functools.partial(_apply, tell), lambda name: tell(ModuleImported(name)), LEARNED)
    program_arguments = list(arguments[1:])
    if program_arguments[0] == "-m":
        sys.argv = ["-m", *program_arguments[2:]]
        _reset_path(os.getcwd)
        _end(_run_program(_run_module, program_arguments[1]), hidden)
    sys.argv = program_arguments
    _reset_path(lambda: os.path.dirname(os.path.realpath(program_arguments[0])))
    _end(_run_program(_run_script, program_arguments[0]), hidden)


# -- the program -----------------------------------------------------------------------------------


def _run_module(name: str) -> None:
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(path: str) -> None:
    with contextlib.suppress(OSError):  # the current folder was deleted
        path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # not normalized, like the interpreter
    namespace = sys.modules["__main__"].__dict__  # keep no reference to the module, so that it dies when modules do
    namespace["__file__"] = path
    namespace["__cached__"] = None
    namespace["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, namespace)


def _run_program(call: Callable[[str], None], argument: str) -> int:
    """Run the program, print what the interpreter would print, and return the exit status."""
    try:
        try:
            call(argument)
        finally:
            try:
                _remove_sigchld_handler()
            except Exception as error:  # the handler raised again
                _remove_sigchld_handler()
                print(
                    f"signal handler raised after the program had ended: {error_in_words(error)}",
                    file=sys.stderr,
                )
    except SystemExit as error:
        return exit_status.note(_status(error))
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        try:
            _show(error)
        except SystemExit as exit_request:  # the program's own hook may leave
            return exit_status.note(_status(exit_request))
        if isinstance(error, KeyboardInterrupt):
            exit_status.note(-signal.SIGINT)
            return _die_by_sigint()
        return exit_status.note(FAILED)
    return exit_status.note(0)


def _remove_sigchld_handler() -> None:
    """Remove the handler of SIGCHLD. Torch's handler raises an error for each lost data loader process, usually while
    the previous such error is being printed; the interpreter then gives up and prints no stack."""
    if callable(signal.getsignal(signal.SIGCHLD)):
        signal.signal(signal.SIGCHLD, _do_nothing)


def _do_nothing(*_: object) -> None:
    """Ignore a signal by a handler. With SIG_DFL or SIG_IGN, Python would complain about a pending one."""


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
    except BaseException as hook_error:
        print("Error in sys.excepthook:", file=sys.stderr)
        hook_error.__traceback__ = _without_our_frames(hook_error.__traceback__)
        hook_error.__suppress_context__ = True
        traceback.print_exception(hook_error)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _without_our_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _die_by_sigint() -> int:
    """Make this process die by SIGINT after cleanup, as the interpreter does; return the exit status that causes it.

    exit() passes its status to on_exit handlers: this calls raise(SIGINT) after Python and its handler are gone."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), None)
    return signal.SIGINT


def _end(status: int, hidden: Hidden) -> NoReturn:
    """Exit as the interpreter does: threads, exit handlers, modules, buffers."""
    hidden.show_all()
    ctypes.PyDLL(None).Py_Exit(status)
    os._exit(status)  # not reached


# -- the interpreter -------------------------------------------------------------------------------


def _reset_signals() -> None:
    """Reset Python's handlers, as exec does. Ignored and blocked signals stay so, as across exec."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def _reset_streams() -> None:
    """Set up standard streams as after `python -u`, also for C: output is unbuffered."""
    opened = next(stream for stream in (sys.__stdin__, sys.__stdout__, sys.stdout) if stream is not None)
    encoding, errors = opened.encoding, opened.errors  # as the interpreter chose them; it leaves out closed streams
    for name, mode, fd in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        stream: Any = None
        with contextlib.suppress(OSError):  # this descriptor is closed
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
    """Set the path, and clear import caches: folders that were missing before may exist now."""
    sys.path[:] = PATHS
    if not getattr(sys.flags, "safe_path", False):
        with contextlib.suppress(OSError):  # the current folder was deleted
            sys.path.insert(0, first())
    importlib.invalidate_caches()


def _reset_identity(command: list[str]) -> None:
    """Become a main process with its own module `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    sys.orig_argv = command
    with contextlib.suppress(AttributeError):  # before Python 3.13, the thread keeps the zygote's id
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    process: Any = multiprocessing.process
    process.current_process().authkey = os.urandom(32)
    process.ORIGINAL_DIR = None
    tempfile.tempdir = None  # a preloaded module may have set it
    with contextlib.suppress(OSError):
        process.ORIGINAL_DIR = os.getcwd()


def _program(arguments: Sequence[str]) -> str:
    """Return the script or module of `python -u SCRIPT` and `python -u -m MODULE`."""
    return arguments[2] if arguments[1] == "-m" else arguments[1]


def _title(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command for process lists: rank and node, then the interpreter and what it runs."""
    rank, node = environment.get("RANK"), environment.get("RESILIENCE_NODE")
    if rank is None:
        return list(command)
    where = f"rank {rank} on {node}" if node else f"rank {rank}"
    return [f"{where}: {command[0]}", *command[1:]]


# -- libraries -------------------------------------------------------------------------------------


def _apply(tell: Callable[[Note], None], package: str, names: list[str]) -> None:
    """Apply variables that the program set before it imported this package, if possible; report the others."""
    late = [name for name in names if name not in script_variables.APPLIED]
    if late:
        tell(VariablesSetTooLate(package, tuple(late)))
    if any(name.endswith("_NUM_THREADS") for name in names):
        _reset_threads(c_environment(), None)
    distributed = sys.modules.get("torch.distributed")
    if "TORCH_DISTRIBUTED_DEBUG" in names and distributed is not None:
        distributed.set_debug_level_from_env()


def _reset_threads(environment: Mapping[str, str], before: Mapping[str, str] | None = fork_safety.AT_START) -> None:
    """Let numerical libraries use as many threads as in a fresh process with this environment.

    before: the variables that set their present number of threads, None if unknown."""
    cores = len(os.sched_getaffinity(0))
    openmp = _positive_number(environment.get("OMP_NUM_THREADS", "").split(",")[0])
    torch = sys.modules.get("torch")
    if torch is not None and (before is None or environment.get("OMP_NUM_THREADS") != before.get("OMP_NUM_THREADS")):
        _call_each("gomp", ("omp_set_num_threads",), openmp or cores)
        count = torch.get_num_threads()  # MKL's, which is at most the physical cores, until the number is set
        torch.set_num_threads(min(count, _physical_cores()) if torch.backends.mkl.is_available() else count)
    thread_count = min(cores, _positive_number(environment.get("OPENBLAS_NUM_THREADS", "")) or openmp or cores)
    if thread_count > 1 or before is None:  # it is 1 in the zygote
        _call_each("openblas", _OPENBLAS, thread_count)


def _physical_cores() -> int:
    """Return how many cores the host has. Not by psutil: the program would find it imported, or we a file of this name
    beside its script."""
    siblings, topology = set(), "/sys/devices/system/cpu/cpu[0-9]*/topology"
    for path in glob.glob(f"{topology}/core_cpus_list") or glob.glob(f"{topology}/thread_siblings_list"):  # Linux < 5.3
        with contextlib.suppress(OSError), open(path) as file:
            siblings.add(file.read())
    return len(siblings) or os.cpu_count() or 1


def _call_each(part: str, names: Sequence[str], argument: int) -> None:
    """Call the first of these functions that exists, in each loaded library whose file name contains `part`."""
    for library in libraries.loaded(part):
        function = next((getattr(library, name) for name in names if hasattr(library, name)), None)
        if function is not None:
            function(argument)


def _positive_number(value: str) -> int:
    value = value.strip()
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else 0


def _reset_seeds() -> None:
    """Seed generators as differently as in fresh processes. Python's own generator reseeds itself at a fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
