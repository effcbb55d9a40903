"""Everything that goes to a terminal goes through `resilience.facts.printable`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.modules import tree_of

PACKAGE = Path(__file__).parents[2] / "resilience"
WRITERS = {
    # They make the text printable themselves, or write what `render` has made so.
    "calibrate/terminal.py",
    "logs/terminal.py",
    "system/render.py",
    "trace/export.py",
    "telemetry/log.py",
    # What the interpreter would write for a program that raises: the program's own output.
    "launcher/worker/worker_main.py",
}
POSIX_WRITERS = {
    "system/terminal.py",  # the callers' bytes
    "inprocess/_runtime/monitor_process.py",
    "launcher/worker/zygote.py",
}


def test_only_known_modules_write_to_standard_streams() -> None:
    assert {name for name, tree in _modules() if _writes(tree)} == WRITERS


def test_only_known_modules_write_to_their_descriptors() -> None:
    assert {name for name, tree in _modules() if _writes_descriptor(tree)} == POSIX_WRITERS


def test_callers_of_the_terminal_make_their_bytes_printable() -> None:
    writers = {"terminal.put", "terminal.put_or_say_why", "terminal.say"}
    callers = {name for name, tree in _modules() if writers & _calls(tree)}
    assert callers == {
        "launcher/console.py",
        "launcher/output/teed_output.py",
        "launcher/output/terminal_copy.py",
        "monitor/program.py",
        "telemetry/elastic.py",
        "telemetry/standard.py",
    }
    for name in callers:
        assert "printable" in (PACKAGE / name).read_text(encoding="utf-8")


def test_parsers_of_commands_make_their_messages_printable() -> None:
    makers = {name for name, tree in _modules() if "argparse.ArgumentParser" in _calls(tree)}
    assert makers <= {"cli/arguments.py"}


@cache
def _modules() -> list[tuple[str, ast.AST]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), tree_of(path)) for path in paths]


@cache
def _calls(tree: ast.AST) -> set[str]:
    return {_dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _dotted(node: ast.AST) -> str:
    """Return a name with its attributes, as it is written; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _writes(tree: ast.AST) -> bool:
    streams = {f"{stream}.{method}" for stream in ("sys.stdout", "sys.stderr", "out") for method in ("write", "buffer")}
    return bool(_calls(tree) & (streams | {"print"}))


def _writes_descriptor(tree: ast.AST) -> bool:
    """Return whether a module writes to descriptor 1 or 2, or to one that its caller gives."""
    writes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _dotted(node.func) == "os.write"]
    return any(isinstance(node.args[0], ast.Constant) or _dotted(node.args[0]) == "descriptor" for node in writes)
