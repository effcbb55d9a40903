"""Text and values become bytes, and bytes values, in one module alone: `resilience.facts.encoding`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.modules import tree_of

PACKAGE = Path(__file__).parents[2] / "resilience"
ENCODING = PACKAGE / "facts" / "encoding.py"
CODECS = {
    ("msgspec", "json"), ("msgspec", "msgpack"), ("msgspec", "yaml"), ("msgspec", "toml"), ("msgspec", "convert"),
    ("msgspec", "DecodeError"), ("msgspec", "ValidationError"), ("msgspec", "MsgspecError"),
    ("json", "loads"), ("json", "load"), ("json", "dumps"), ("json", "dump"),
    ("yaml", "safe_load"), ("yaml", "safe_dump"), ("yaml", "load"), ("yaml", "dump"), ("yaml", "YAMLError"),
}  # fmt: skip
ALLOWED = {
    # It reads files that the package ships, and writes them for other programs.
    "telemetry/dashboard_files.py": {"json.dumps", "json.loads", "yaml.dump", "yaml.safe_load", ".read_text()"},
    # The ends of names that are cut to a number of bytes: no half character is left.
    "facts/identity.py": {".decode(errors='ignore')"},
    "facts/deadlines.py": {".decode(errors='ignore')"},
    "telemetry/prometheus.py": {".decode(errors='ignore')"},
    # Keys of a keyboard.
    "status/screen.py": {".decode(errors='ignore')"},
    # Numbers and addresses that the kernel writes.
    "system/collectives.py": {"open(errors='replace')"},
    "system/interrupt.py": {"open(errors='replace')"},
    # Bytes of etcd's own protocol, one character each, and base64.
    "launcher/rendezvous/etcd_store.py": {".decode()"},
}


def test_only_one_module_encodes_and_decodes() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != ENCODING:
            uses = _uses(tree_of(path))
            name = str(path.relative_to(PACKAGE))
            if more := uses - ALLOWED.get(name, set()):
                found[name] = sorted(more)
    assert not found, f"use resilience.facts.encoding: {found}"


def test_every_exception_to_that_is_still_needed() -> None:
    unused = {name: sorted(allowed - _uses(tree_of(PACKAGE / name))) for name, allowed in ALLOWED.items()}
    assert not {name: uses for name, uses in unused.items() if uses}


def test_forbidden_uses_are_seen() -> None:
    code = "msgspec.json.decode(b)\njson.loads(b)\nb.decode()\nopen(p, errors='replace')\np.read_text()"
    expected = {"msgspec.json", "json.loads", ".decode()", "open(errors='replace')", ".read_text()"}
    assert _uses(ast.parse(code)) == expected


def _uses(tree: ast.AST) -> set[str]:
    """Return what a module does that `encoding` is for."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in CODECS:
                found.add(f"{module}.{name}")
            case ast.ImportFrom(module=("json" | "yaml" | "msgspec" | "msgspec.json" | "msgspec.msgpack")):
                found.add(f"from {node.module}")
            case ast.Call(func=ast.Attribute(attr="decode"), args=[], keywords=[]):
                found.add(".decode()")
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[], keywords=[]):
                found.add(".read_text()")
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), keywords=keywords):
                dot = "." if isinstance(node.func, ast.Attribute) else ""
                errors = [keyword.value for keyword in keywords if keyword.arg == "errors"]
                lossy = [each.value for each in errors if isinstance(each, ast.Constant)]
                found |= {f"{dot}{name}(errors={each!r})" for each in lossy if each in ("replace", "ignore")}
    return found
