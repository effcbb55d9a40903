"""The command `resilience`: find the subcommand, parse its arguments, call it.

Each subcommand is a module with `configure(parser)` and `run(arguments) -> exit status`. Only the requested
module is imported: `resilience report` does not wait for torch."""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from resilience.cli.arguments import Parser
from resilience.errors import ConfigurationError
from resilience.system import unwritten_stdout
from resilience.system.render import complain, say

VERBS = {
    "run": "run a job like torchrun, and replace ranks that die or hang",
    "demo": "train, recover from three injected faults, and compare the result",
    "calibrate": "learn limits from recorded runs, with a stated false-alarm rate",
    "logs": "merge the logs of ranks, monitors and agents into one timeline",
    "report": "show what broke in a run, where, since when, and what it cost",
    "incidents": "group the incidents of many runs by fault: count, place, cost",
    "trace": "show which rank a restart waited for; export spans to viewers",
    "status": "show the state of a job now: ranks, steps, open sections, restarts",
    "dashboards": "write dashboards, rules and alerts for Prometheus and Grafana",
    "completion": "print a shell completion script for bash or zsh",
}
WRONG_USE = 2  # exit status
_OF_STDOUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
_TO_FILE = ("-o", "--out", "--html")  # beginnings of options that name a file for the result
COLLECT_EVERY = 200_000  # net new objects before a collection; Python's default is 700


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status of the subcommand, or 2 for wrong use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and arguments[:1] != ["run"]:  # workers need it as it was opened
        sys.stdout.reconfigure(errors="backslashreplace")  # a run may contain characters that this terminal cannot show
    if arguments[:1] in (["--version"], ["-V"]):
        from resilience import __version__

        return _called("--version", lambda: _printed(f"resilience {__version__}", 0))
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _called("help", lambda: _printed(_help(), 0 if arguments else WRONG_USE))
    verb = arguments[0]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"did you mean {close[0]!r}? The" if close else "the"
        return _wrong(f"resilience: unknown command {verb!r}; {hint} commands are: {', '.join(VERBS)}")
    module = importlib.import_module(f"resilience.cli.{verb}")
    if verb == "run":
        return _called(verb, lambda: module.main(arguments[1:]), writes_file=True)
    writes_file = any(argument.startswith(_TO_FILE) for argument in arguments[1:])
    with _stdout_unless_closed() if writes_file else contextlib.nullcontext():
        if hasattr(module, "main"):  # this subcommand parses its own arguments
            return _called(verb, lambda: module.main(arguments[1:]), writes_file)
        parser = Parser(prog=f"resilience {verb}", allow_abbrev=False)
        module.configure(parser)
        with _few_collections():
            return _called(verb, lambda: module.run(parser.parse_args(arguments[1:])), writes_file)


@contextlib.contextmanager
def _stdout_unless_closed() -> Iterator[None]:
    """Let a closed stdout lead to /dev/null: the result goes to a file."""
    if sys.stdout is not None:
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Make Python search for reference cycles less often. Millions of records contain none, and scanning them
    repeatedly takes nearly half the time of a report on 10,000 ranks."""
    previous_thresholds = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *previous_thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*previous_thresholds)


def _called(verb: str, call: Callable[[], int], writes_file: bool = False) -> int:
    """Call a command. writes_file: its result goes to a file, or it is a job: it needs no stdout."""
    if sys.stdout is None and not writes_file:
        return unwritten_stdout.complain(verb, "it is closed")
    status = unwritten_stdout.CLOSED_PIPE  # until the command returns one
    try:
        try:
            status = call()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConfigurationError as error:
        return _wrong(f"resilience {verb}: {error}")
    except BrokenPipeError:  # the reader closed the pipe
        unwritten_stdout.discard()
    except OSError as error:
        if verb == "run" or error.filename is not None or error.errno not in _OF_STDOUT:
            raise
        return unwritten_stdout.status_after(verb, error)
    return status


def _printed(text: str, status: int) -> int:
    say(text)
    return status


def _wrong(message: str) -> int:
    complain(message)
    return WRONG_USE


def _help() -> str:
    lines = [
        "usage: resilience COMMAND [options]",
        "",
        "Keeps distributed training running and explains every interruption.",
        "",
    ]
    lines += [f"  {verb:12}{summary}" for verb, summary in VERBS.items()]
    lines += ["", "resilience help COMMAND shows the options of a command."]
    return "\n".join(lines)
