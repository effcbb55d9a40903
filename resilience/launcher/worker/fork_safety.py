"""Does this program need a fresh interpreter?  Checks for what a fork cannot provide, each with a reason in words.

A forked worker has the zygote's interpreter, imported modules and values read from the environment at the start. If a
program would see the difference, it starts cold. `worker_main` sets what can be set after a fork."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, ModuleType

from resilience.errors import error_in_words
from resilience.facts.encoding import text
from resilience.launcher.worker import program, script_variables
from resilience.system.background import asked

# The interpreter, the loader or a library reads these once, at its start.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GOMP_", "KMP_", "MKL_", "LC_", "LANG")
# The launcher sets these differently for each worker or cycle.
WORKER_VARIABLES = (
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "RANK", "RESILIENCE_", "ROLE_"),
    *("TORCHELASTIC_", "TRACEPARENT", "WORLD_SIZE"),
)
# As words: those that end with "_" are the beginnings of names.
_WORKER_VARIABLE = re.compile(
    rb"\b(?:" + "|".join(name if name.endswith("_") else rf"{name}\b" for name in WORKER_VARIABLES).encode() + rb")\w*"
)
AT_START = dict(os.environ)  # as it was when this process imported its libraries
_ENDINGS = tuple(importlib.machinery.all_suffixes())


def why_not(
    workers: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    preloaded: Mapping[str, str] = MappingProxyType({}),
    reads: Collection[str] = (),
) -> str:
    """Return why one of these workers needs a fresh interpreter; empty if none does. The files of a program are read
    once for all of its workers.

    workers: arguments and environment of each, for `python ARGUMENTS`; preloaded: top-level modules that only the
    zygote has imported, and their files; reads: variables that these modules have read."""
    programs: dict[tuple[str, ...], list[Mapping[str, str]]] = {}  # environments of the workers, by program
    for arguments, environment in workers:
        reason = _why_command(arguments, environment)
        if reason:
            return reason
        names_module = list(arguments[1:2]) == ["-m"]
        programs.setdefault(tuple(arguments[1 : 3 if names_module else 2]), []).append(environment)
    reasons = (_why_files(words, environments, preloaded, reads) for words, environments in programs.items())
    try:
        return asked(lambda: next(filter(None, reasons), "") or _why_site(), program.LIMIT)
    except OSError as error:
        return f"the program's files cannot be read: {error.strerror}"
    except Exception as error:  # whatever a parser or a finder of modules raises: a fresh interpreter may differ
        return f"the program's files cannot be judged: {error_in_words(error)}"


def _why_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return why `python ARGUMENTS` needs a fresh interpreter in this environment, whatever its files are."""
    changed = sorted(
        name
        for name in {*environment, *AT_START}
        if name.startswith(READ_AT_START) and environment.get(name) != AT_START.get(name)
    )
    if changed:
        return f"{changed[0]} is not as it was when the agent started"
    options = options_of(sys.orig_argv)
    if options:
        return f"the agent's own interpreter has the option {options[0]}"
    return "" if list(arguments[:1]) == ["-u"] else "the command is not torchrun's call of the interpreter"


def _why_files(
    program_arguments: Sequence[str],
    environments: Collection[Mapping[str, str]],
    preloaded: Mapping[str, str],
    reads: Collection[str],
) -> str:
    """Return why the files of this program need a fresh interpreter; empty if they do not. Raises: OSError."""
    if program_arguments[:1] == ("-m",) and len(program_arguments) > 1:
        file = program.file_of(program_arguments[1])
        late = script_variables.why_not(file, os.getcwd(), environments, reads) if file else ""
        return late or _shadowing(os.curdir, preloaded)
    if program_arguments[:1] == ("-m",):
        return "no module is named"
    if not program_arguments or not os.path.isfile(program_arguments[0]):
        return "the script is not a file"  # a fresh interpreter reports that, or runs the folder
    if program.is_archive(program_arguments[0]):
        return "the script is an archive"
    folder = os.path.dirname(os.path.realpath(program_arguments[0]))
    return script_variables.why_not(program_arguments[0], folder, environments, reads) or _shadowing(folder, preloaded)


def _why_site() -> str:
    """Return which module that runs at the start of each interpreter names a variable of a worker; empty if none does.
    In a warm worker it ran at the start of the agent, without that variable."""
    for name in ("sitecustomize", "usercustomize"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            try:
                with open(file, "rb") as source:  # or compiled code, which holds its names and texts as they are
                    variable = _WORKER_VARIABLE.search(source.read())
            except OSError as error:  # of an archive, for example
                return f"{file}, which runs only when an interpreter starts, cannot be read: {error.strerror}"
            if variable is not None:
                return f"{file} names {text(variable[0])}, and runs only when an interpreter starts"
    return ""


def options_of(command: Sequence[str]) -> list[str]:
    """Return the interpreter options in a command line that a worker's command line would not have."""
    options = []
    for argument in command[1:]:
        if argument in ("-m", "-c", "-") or not argument.startswith("-"):
            break
        options += [argument] if argument != "-u" else []
    return options


def _shadowing(folder: str, preloaded: Mapping[str, str]) -> str:
    """Return which module of this folder a fresh interpreter would import instead of an imported one."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return ""
    home = os.path.realpath(folder)
    for entry in entries:
        name = entry.name.partition(".")[0]
        module = sys.modules.get(name)
        if (module is None and name not in preloaded) or name in sys.builtin_module_names or _is_frozen(module):
            continue
        file = preloaded.get(name) if module is None else getattr(module, "__file__", None)
        is_module = entry.name.endswith(_ENDINGS) or os.path.exists(os.path.join(entry.path, "__init__.py"))
        if is_module and not os.path.realpath(file or "").startswith(home + os.sep):
            return f"{entry.path} takes the place of a module that is imported already"
    return ""


def _is_frozen(module: ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
