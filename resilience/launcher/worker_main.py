"""Makes a forked process like a fresh interpreter that was told to run a script or a module.

What a program can see of its interpreter is set as `python -u script …` or `python -u -m module …` would
set it: arguments, path, environment, the module `__main__`, unbuffered output, signals, threads of
numerical libraries, seeds. It ends by the interpreter's own way out, so that exit handlers run and the
status is the same. Known differences: modules that torch imports are imported already, and hash seeds
are equal in all workers of a node."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import io
import os
import random
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

KEPT_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}  # by the interpreter itself
_paths = list(sys.path[1:])  # without what the agent's own script put there


def why_not(arguments: Sequence[str]) -> str:
    """Return why these arguments of an interpreter need a fresh one, empty if they do not."""
    if arguments[:1] != ("-u",) and list(arguments[:1]) != ["-u"]:
        return "it is no call of the interpreter as torchrun makes it"
    rest = list(arguments[1:])
    if rest[:1] == ["-m"]:
        return "" if len(rest) > 1 else "no module is named"
    if not rest or not os.path.isfile(rest[0]):
        return "the script is no file"  # a fresh interpreter says so, or runs the folder
    return "the script is an archive" if rest[0].endswith((".zip", ".pyz", ".pyc")) else ""


def become(arguments: Sequence[str], environment: dict[str, str], folder: str) -> NoReturn:
    """Run what `python ARGUMENTS` would run, and end this process."""
    _reset_signals()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _reset_streams()
    _reset_threads(environment)
    _reset_chance()
    rest = list(arguments[1:])
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *arguments]
    if rest[0] == "-m":
        sys.argv = ["-m", *rest[2:]]
        sys.path[:] = [os.getcwd(), *_paths]
        _end(_called(lambda: runpy._run_module_as_main(rest[1])))  # type: ignore[attr-defined]
    sys.argv = rest
    sys.path[:] = [os.path.dirname(os.path.realpath(rest[0])), *_paths]
    _end(_called(lambda: _run_script(rest[0], main)))


def _run_script(path: str, main: types.ModuleType) -> None:
    main.__file__ = os.path.abspath(path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__package__=None, __spec__=None, __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _called(call: Any) -> int:
    """Run the program; answers its exit status, and says what the interpreter would say."""
    try:
        call()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _report(error: BaseException) -> None:
    """Print the traceback as the interpreter would, and leave it where the agent looks for it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    if isinstance(error, Exception):  # into TORCHELASTIC_ERROR_FILE, if that is set
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
    sys.excepthook(type(error), error, traceback)


def _end(status: int) -> NoReturn:
    """Leave as the interpreter does: threads, exit handlers, modules, buffers."""
    ctypes.pythonapi.Py_Exit(status)
    os._exit(status)  # not reached


def _reset_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - KEPT_IGNORED:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reset_streams() -> None:
    """Standard streams as after `python -u`: what is written goes out at once."""
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, sys.stdout.errors), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"
        stream: Any = io.TextIOWrapper(raw, encoding, errors, newline="\n", write_through=True)
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset_threads(environment: dict[str, str]) -> None:
    """Let numerical libraries use as many threads as a fresh process would, by its environment."""
    count = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    torch = sys.modules.get("torch")
    if torch is not None and count.isdecimal() and int(count):
        torch.set_num_threads(int(count))
    blas = environment.get("OPENBLAS_NUM_THREADS") or count
    threads = int(blas) if blas.isdecimal() and int(blas) else len(os.sched_getaffinity(0))
    if threads > 1:  # the zygote has it at 1
        for library in _openblas():
            for name in (
                "scipy_openblas_set_num_threads64_",
                "openblas_set_num_threads64_",
                "openblas_set_num_threads",
            ):
                if hasattr(library, name):
                    getattr(library, name)(threads)
                    break


def _openblas() -> list[ctypes.CDLL]:
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line.rsplit("/", 1)[-1]}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def _reset_chance() -> None:
    """Seeds as different as fresh processes have them."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
