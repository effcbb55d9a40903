"""Nothing that reads is left out of the fuzz, and each target reads what it is given undamaged."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import resilience
from resilience.cli import VERBS
from resilience.cli.completion import parser_of
from resilience.run_folder.query import VIEWS
from tests.fuzz.commands import COMMANDS, NO_READERS, WITHOUT_END, Runs, called
from tests.fuzz.decoders import decoder_targets
from tests.fuzz.readers import file_targets

PACKAGE = Path(resilience.__file__).parent
MAKERS = ("reader", "lines_reader")
Decoder = tuple[str, str]
"""Module, and the name in it."""


def made_decoders() -> Iterator[Decoder]:
    """Yield every decoder that the package makes; without a name if it is not assigned to one of its module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_bytes())
        named = {
            id(node.value): target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in MAKERS and not _is_of_csv(node.func):
                yield module, named.get(id(node), f"<line {node.lineno}>")


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _is_of_csv(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "csv"


def test_every_decoder_reads_undamaged_inputs_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: Counter[Decoder] = Counter()

    def counting(decoder: Decoder, decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(data: Any) -> Any:
            value = decode(data)
            decoded[decoder] += 1
            return value

        return read

    known = list(made_decoders())
    unnamed = [decoder for decoder in known if decoder[1].startswith("<")]
    assert not unnamed, "assign a decoder to a name of its module, so that this test can observe it"
    for module, name in known:
        of_module = importlib.import_module(module)
        monkeypatch.setattr(of_module, name, counting((module, name), getattr(of_module, name)))
    for target in (*decoder_targets(tmp_path), *file_targets(tmp_path)):
        for data in target.inputs:
            target.feed(data, random.Random(0))
    assert set(known) - set(decoded) == set(), "add a target to tests/fuzz/decoders.py or tests/fuzz/readers.py"


def test_every_command_is_fed_or_known_to_read_no_run() -> None:
    fed = {command.split()[0] for command in COMMANDS}
    assert fed | set(NO_READERS) == set(VERBS)
    assert not fed & set(NO_READERS)
    reading = {verb for verb in VERBS if any(action.metavar == "RUN" for action in parser_of(verb)._actions)}
    assert reading == fed


def test_every_option_of_a_command_that_reads_is_fed() -> None:
    words = {verb: set[str]() for verb in VERBS}
    for command in COMMANDS:
        words[command.split()[0]] |= set(command.split())
    forgotten = [
        f"{verb} {missing}"
        for verb in sorted({command.split()[0] for command in COMMANDS})
        for action in parser_of(verb)._actions
        for missing in _unfed(action, words[verb] | set(WITHOUT_END.get(verb, ())))
    ]
    assert not forgotten, "add commands with these options to tests/fuzz/commands.py"


def _unfed(action: argparse.Action, words: set[str]) -> list[str]:
    """Return what of an option no command has: the option itself, or one of its choices. The default need not be named.
    A level is a filter, not another output."""
    if not action.option_strings or isinstance(action, argparse._HelpAction):
        return []
    if not words & set(action.option_strings):
        return action.option_strings[:1]
    choices = [] if action.dest == "level" else [str(choice) for choice in action.choices or ()]
    return [choice for choice in choices if choice not in words and choice != action.default]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_reads_a_whole_run(command: str, runs: Runs) -> None:
    if "--sql" in command:
        pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    views = list(VIEWS) if "{view}" in command else ["", ""]
    for view, run in zip(views, itertools.cycle((runs.wrapped, runs.launched)), strict=False):
        try:
            called(runs.arguments(command, run, view))
        finally:
            runs.repair(runs.limits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fuzz") / "commands")
