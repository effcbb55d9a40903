"""The command `resilience`: find the subcommand, parse its arguments, call it.

Each subcommand is a module with `configure(parser)` and `run(arguments) -> exit status`. Only the requested
module is imported: `resilience report` does not wait for torch."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from resilience.cli.arguments import Parser
from resilience.cli.render import say
from resilience.errors import ConfigurationError

VERBS = {
    "run": "run a job like torchrun, and replace ranks that die or hang",
    "demo": "train, recover from three injected faults, and compare the result",
    "calibrate": "learn limits from recorded runs, with a stated false-alarm rate",
    "logs": "merge the logs of ranks, monitors and agents into one timeline",
    "report": "show what broke in a run, where, since when, and what it cost",
    "incidents": "group the incidents of many runs by fault: count, place, cost",
    "trace": "show which rank a restart waited for; export spans to trace viewers",
    "status": "show the state of a job now: ranks, steps, open sections, restarts",
    "dashboards": "write dashboards, rules and alerts for Prometheus and Grafana",
    "completion": "print a shell completion script for bash or zsh",
}
WRONG_USE = 2  # exit status
COLLECT_EVERY = 200_000  # net new objects before a collection; Python's default is 700


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status of the subcommand, or 2 for wrong use."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a run may contain characters that this terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        from resilience import __version__

        say(f"resilience {__version__}")
        return 0
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(_help())
        return 0 if arguments else WRONG_USE
    verb = arguments[0]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are: {', '.join(VERBS)}"
        return _wrong(f"resilience: unknown command {verb!r}; {hint}")
    module = importlib.import_module(f"resilience.cli.{verb}")
    if hasattr(module, "main"):  # this subcommand parses its own arguments
        return _called(verb, lambda: module.main(arguments[1:]))
    parser = Parser(prog=f"resilience {verb}", allow_abbrev=False)
    module.configure(parser)
    with _few_collections():
        return _called(verb, lambda: module.run(parser.parse_args(arguments[1:])))


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


def _called(verb: str, call: Callable[[], int]) -> int:
    try:
        status = call()
        sys.stdout.flush()
        return status
    except ConfigurationError as error:
        return _wrong(f"resilience {verb}: {error}")
    except BrokenPipeError:
        # The reader closed the pipe. Without this, the interpreter reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _wrong(message: str) -> int:
    say(message, sys.stderr)
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
