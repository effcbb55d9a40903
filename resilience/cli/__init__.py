"""The command `resilience`: find the verb, parse its arguments, call it.

Each verb is a module with `configure(parser)` and `run(arguments) -> exit status`; only the one that is
asked for is imported, so that `resilience report` does not wait for torch."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from resilience.cli.arguments import Parser
from resilience.cli.render import say
from resilience.errors import ConfigurationError

VERBS = {
    "run": "run a job on every rank; replace what dies or hangs (takes what torchrun takes)",
    "demo": "lose ranks in three ways, go on each time, and prove that nothing was lost",
    "calibrate": "learn limits from runs, with a stated rate of false alarms",
    "logs": "merge what all ranks, monitors and agents said into one timeline",
    "report": "tell what broke in a run, where, since when, and what it cost",
    "incidents": "group the incidents of many runs: which fault came how often, where, at what cost",
    "trace": "tell whom a restart waited for; write a run's spans for trace viewers",
    "status": "show how a job is doing now: ranks, steps, open sections, restarts",
    "dashboards": "write dashboards, rules and alerts for Prometheus and Grafana",
    "completion": "print a script that completes these commands in bash or zsh",
}
WRONG_USE = 2  # exit status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: the verb's, or 2 for wrong use."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a run holds may have characters that this terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        from resilience import __version__

        say(f"resilience {__version__}")
        return 0
    if arguments[:1] == ["help"] and len(arguments) == 2:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(_help())
        return 0 if arguments else WRONG_USE
    verb = arguments[0]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are: {', '.join(VERBS)}"
        return _wrong(f"there is no command {verb!r}; {hint}")
    module = importlib.import_module(f"resilience.cli.{verb}")
    if hasattr(module, "main"):  # it has a parser of its own
        return _called(verb, lambda: module.main(arguments[1:]))
    parser = Parser(prog=f"resilience {verb}", allow_abbrev=False)
    module.configure(parser)
    return _called(verb, lambda: module.run(parser.parse_args(arguments[1:])))


def _called(verb: str, call: Callable[[], int]) -> int:
    try:
        status = call()
        sys.stdout.flush()
        return status
    except ConfigurationError as error:
        return _wrong(f"{verb}: {error}")
    except BrokenPipeError:
        # Whoever read this has seen enough; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _wrong(message: str) -> int:
    say(f"resilience {message}" if not message.startswith("there") else f"resilience: {message}", sys.stderr)
    return WRONG_USE


def _help() -> str:
    lines = [
        "usage: resilience COMMAND [options]",
        "",
        "Keeps distributed training alive, and explains every interruption.",
        "",
    ]
    lines += [f"  {verb:12}{what}" for verb, what in VERBS.items()]
    lines += ["", "resilience help COMMAND shows the options of a command."]
    return "\n".join(lines)
