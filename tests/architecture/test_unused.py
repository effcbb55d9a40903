"""No function, class or method of the package is left over: something else in the package names it.

A name counts wherever it stands outside its own definition: in code, in a string, or in the report's template. So a
method that shares its name with one in use is not found."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.generate_docs import stable_names
from tests.support.modules import tree_of
from tests.support.server import ROOT

PACKAGE = ROOT / "resilience"
WORD = re.compile(r"[A-Za-z_]\w*")
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

CALLED_FROM_OUTSIDE = {
    r"demo/train\.py:forward": "torch calls a module's",
    r"facts/encoding\.py:compose_mapping_node": "PyYAML calls a loader's",
    r"inprocess/_runtime/monitor_process\.py:persistent_id": "pickle calls it",
    r"inprocess/nested_restarter\.py:NestedRestarter\w+": "names of the compatible API",
    r"integrations/lightning\.py:(on_\w+|teardown)": "Lightning calls a callback's",
    r"integrations/transformers\.py:on_\w+": "transformers calls a callback's",
    r"launcher/agent\.py:(_assign_worker_ranks|_invoke_run|_shutdown)": "torch's elastic agent calls them",
    r"launcher/arguments\.py:(_fill_text|_format_action_invocation)": "argparse calls them for the help",
    r"launcher/output/destinations\.py:reify": "torch's elastic agent calls it on a LogsSpecs",
    r"launcher/rendezvous/handler\.py:(get_backend|next_rendezvous|num_nodes_waiting)": (
        "torch's elastic agent calls a rendezvous handler's"
    ),
    r"launcher/worker/hidden\.py:(create|exec)_module": "the import system calls a loader's",
    r"launcher/worker/script_variables\.py:visit_\w+": "ast.NodeVisitor calls them",
    r"launcher/worker/workers\.py:_popen": "torchelastic's SubprocessHandler calls it",
    r"system/environment\.py:settings_table": "tests/generate_docs.py writes docs/settings.md with it",
    r"telemetry/prometheus\.py:(address_string|log_message)": "http.server calls a handler's",
    r"telemetry/prometheus\.py:(get_request|handle_error|process_request(_thread)?|server_bind|service_actions)": (
        "socketserver calls a server's"
    ),
}


def test_every_function_class_and_method_is_used() -> None:
    names = unused_names(sorted(PACKAGE.rglob("*.py")), words_of_other_files(), PACKAGE)
    needed = {name: [pattern for pattern in CALLED_FROM_OUTSIDE if re.fullmatch(pattern, name)] for name in names}
    assert [name for name, patterns in needed.items() if not patterns] == [], "delete it, or say who calls it"
    assert set(CALLED_FROM_OUTSIDE) - {pattern for patterns in needed.values() for pattern in patterns} == set()


def test_unused_names_are_found(tmp_path: Path) -> None:
    """Recursion is no use; a string is one, and so is a name in another module."""
    (tmp_path / "a.py").write_text(
        '"""left"""\n'
        "import b\n"
        "class Kind:\n"
        '    """Documents that left is used."""\n'
        "    def left(self): return self.left()\n"
        "    def by_name(self): return getattr(self, 'called')\n"
        "    def called(self): return b.used()\n"
        "    def __len__(self): return 0\n"
        "def recursive(): return recursive()\n"
        "Kind().by_name()\n"
    )
    (tmp_path / "b.py").write_text("def used(): pass\ndef public(): pass\nclass Alone: pass\n")
    found = set(unused_names(sorted(tmp_path.glob("*.py")), {"public"}, tmp_path))
    assert found == {"a.py:left", "a.py:recursive", "b.py:Alone"}


def unused_names(paths: list[Path], other: set[str], root: Path) -> Iterator[str]:
    """Yield the definitions of these modules that nothing else names. other: names that are used elsewhere."""
    nodes = {path: list(ast.walk(tree_of(path))) for path in paths}
    uses: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in paths:
        for name, line in names_in(nodes[path]):
            uses[name].append((path, line))
    for path in paths:
        for node in nodes[path]:
            if isinstance(node, DEFINITION) and not node.name.startswith("__") and node.name not in other:
                own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if all(place == path and line in own for place, line in uses[node.name]):
                    yield f"{path.relative_to(root)}:{node.name}"


def names_in(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield each name that the nodes of a module use, and its line; not those of docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Name(id=name, lineno=line) | ast.Attribute(attr=name, lineno=line):
                yield name, line
            case ast.alias(name=name, lineno=line) | ast.keyword(arg=str(name), lineno=line):
                yield from ((part, line) for part in name.split("."))
            case ast.Constant(value=str(text), lineno=line) if id(node) not in docstrings:
                yield from ((word, line) for word in WORD.findall(text))
            case _:
                pass


def words_of_other_files() -> set[str]:
    """Return the names for users, and those in entry points and in the report's template."""
    public = {line.rpartition(".")[2] for line in stable_names() if line.startswith("python ") and "(" not in line}
    texts = [(ROOT / "pyproject.toml").read_text(), *(path.read_text() for path in PACKAGE.rglob("*.j2"))]
    return public.union(*(WORD.findall(text) for text in texts))
