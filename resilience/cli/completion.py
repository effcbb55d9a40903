"""`resilience completion SHELL`: print a script that completes commands, options and runs in a shell.

The script contains the words from the parsers of all commands. The shell then completes without starting Python:
`resilience run --help` alone takes seconds, because its parser is torchrun's and imports torch."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping

from resilience.cli.arguments import Parser
from resilience.system.render import say

SHELLS = ("bash", "zsh")
ZSH_HEAD = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
SCRIPT = """\
# Completes `resilience` in {shell}; printed by `resilience completion {shell}`.
_resilience() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" takes_run=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} help --version"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
        case "${{COMP_WORDS[1]}} $previous" in
{values}
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
    if [ -n "$takes_run" ]; then
        COMPREPLY+=( $(cd "${{RESILIENCE_RUN_DIR:-resilience-runs}}" 2>/dev/null && compgen -d -X '.*' -- "$current") )
    fi
}}
complete -o default -F _resilience resilience
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Print a shell script that completes commands, options and runs."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # a wrapped path cannot be copied
    parser.epilog = (
        "bash:\n"
        "  resilience completion bash \\\n"
        "    > ~/.local/share/bash-completion/completions/resilience\n"
        "zsh, and source that file in ~/.zshrc:\n"
        "  resilience completion zsh > ~/.resilience.zsh\n"
        "Repeat this after an upgrade."
    )
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")


def run(arguments: argparse.Namespace) -> int:
    """Print the script; return the exit status."""
    from resilience.cli import VERBS

    head = ZSH_HEAD if arguments.shell == "zsh" else ""
    say((head + script(arguments.shell, {verb: parser_of(verb) for verb in VERBS})).rstrip("\n"))
    return 0


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    if verb == "run":
        from resilience.launcher import arguments as launcher_arguments

        return launcher_arguments.parser()
    parser = Parser(prog=f"resilience {verb}", allow_abbrev=False)
    add_options: Callable[[argparse.ArgumentParser], None] = importlib.import_module(f"resilience.cli.{verb}").configure
    add_options(parser)
    return parser


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for these commands."""
    cases, values = [], []
    for verb, parser in parsers.items():
        actions = list(_actions(parser))
        takes_run = " takes_run=1" if any(action.metavar == "RUN" for action in actions) else ""
        cases.append(f'            {verb}) words="{" ".join(_words(actions))}"{takes_run} ;;')
        for action in actions:
            if action.option_strings and action.nargs != 0:
                options = "|".join(f'"{verb} {option}"' for option in action.option_strings)
                choices = " ".join(map(str, action.choices or ()))
                values.append(f'            {options}) words="{choices}" takes_run="" ;;')
    cases.append(f'            help) words="{" ".join(parsers)}" ;;')
    return SCRIPT.format(shell=shell, commands=" ".join(parsers), cases="\n".join(cases), values="\n".join(values))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its subcommands, except those that help hides."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)


def _words(actions: list[argparse.Action]) -> list[str]:
    """Return the words that can be completed: long options, and the choices of positional arguments."""
    words: dict[str, None] = {}
    for action in actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        plain = [option for option in long if "_" not in option]  # torchrun accepts most options in two spellings
        words |= dict.fromkeys((plain or long) if action.option_strings else map(str, action.choices or ()))
    return list(words)
