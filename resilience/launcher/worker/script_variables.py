"""Does a program set a variable that torch, numpy or another preloaded module reads only while it is imported?

The answer comes from the syntax trees of the script and of modules beside it. Nothing is imported or run. Cases that
this overlooks (a computed name, a library that sets variables) are found in the worker itself: see `hidden`."""

from __future__ import annotations

import ast
import functools
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

# Torch, numpy and the libraries that they load read variables with these prefixes when they are imported. Found by
# recording every getenv of an import, and every read of os.environ (tests/process/test_late_variables.py).
READ_BY_NUMPY = ("GFORTRAN_", "GOMP_", "GOTO_", "KMP_", "MKL", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_")
READ_AT_IMPORT = (
    *READ_BY_NUMPY,
    *("ACC_", "COMPILE_STROBELIGHT_", "DNNL_", "FX_", "KINETO_", "ONEDNN_", "PYTORCH_", "TORCH"),
)
# Torch reads these when it uses them. Lightning sets the one about NVML before it imports torch.
READ_LATER = (
    *("PYTORCH_KERNEL_CACHE_PATH", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("PYTORCH_TUNABLEOP_", "TORCHELASTIC_", "TORCH_CUDA_ARCH_LIST", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("TORCH_DIST_INIT_BARRIER", "TORCH_ELASTIC_", "TORCH_EXTENSIONS_DIR", "TORCH_FORCE_", "TORCH_HOME", "TORCH_NCCL_"),
)
# A change of these can be applied at any time (`worker_main._apply`).
APPLIED = frozenset({"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"})
MOST_FILES = 100  # of a program that are read


Kind = Literal["set", "set default", "remove"]


class Write(NamedTuple):
    """The program sets a variable, sets it if unset, or removes it. value: None if unknown."""

    kind: Kind
    name: str
    value: str | None
    file: str
    line: int


class Import(NamedTuple):
    """The program imports a module. level: of a relative import; names: imported from it."""

    module: str
    level: int
    names: tuple[str, ...]


Statements = tuple[tuple[Write | Import, ...], tuple[Write | Import, ...]]  # at import, and in functions


def is_read_at_import(name: str) -> bool:
    """Return True if torch, numpy or what they load may read this variable only when they are imported."""
    return name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER)


def is_read_by_numpy(name: str) -> bool:
    """Return True if numpy or the libraries that it loads may read this variable only when they are imported."""
    return name.startswith(READ_BY_NUMPY)


def why_not(file: str, folder: str, environments: Collection[Mapping[str, str]], preloaded: Collection[str]) -> str:
    """Return which variable a program sets too late for a warm worker; empty if none.

    file: of its main module; folder: of its own modules; environments: of its workers; preloaded: variables that
    preloaded modules have read."""
    is_imported = False
    for write in _walk(file, folder):
        if isinstance(write, Import):
            is_imported |= write.module.partition(".")[0] == "torch" and not write.level
        elif write.name in APPLIED or not any(_differs(write, environment) for environment in environments):
            continue
        elif not is_imported and is_read_at_import(write.name):
            return f"{write.file}, line {write.line}, sets {write.name} before torch is imported"
        elif write.name in preloaded:
            return f"{write.file}, line {write.line}, sets {write.name}, which a preloaded module has read already"
    return ""


def _differs(write: Write, environment: Mapping[str, str]) -> bool:
    if write.kind == "set":
        return write.value is None or environment.get(write.name) != write.value
    return (write.name in environment) == (write.kind == "remove")


def _walk(file: str, folder: str) -> Iterator[Write | Import]:
    """Yield what the program does at its start, in source order; then what its functions do."""
    visited: set[str] = set()
    later: list[Write | Import] = []

    def visit(path: str) -> Iterator[Write | Import]:
        if path in visited or len(visited) >= MOST_FILES:
            return
        visited.add(path)
        at_once, in_functions = _read(path)
        for statement in at_once:
            if isinstance(statement, Import):
                for module in _own_files(statement, path, folder):
                    yield from visit(module)
            yield statement
        later.extend(in_functions)

    yield from visit(file)
    yield from later


def _own_files(statement: Import, file: str, folder: str) -> list[str]:
    """Return the files of the program's own modules that an import executes."""
    if statement.level:
        folder = os.path.dirname(file)
        for _ in range(statement.level - 1):
            folder = os.path.dirname(folder)
    files = []
    parts = statement.module.split(".") if statement.module else []
    for number in range(1, len(parts) + 1):
        files += _candidates(os.path.join(folder, *parts[:number]))
    for name in statement.names:
        files += _candidates(os.path.join(folder, *parts, name))
    return [path for path in files if os.path.isfile(path)]


def _candidates(path: str) -> list[str]:
    return [os.path.join(path, "__init__.py"), f"{path}.py"]


def _read(path: str) -> Statements:
    """Return what a module does when it is imported, and what its functions do. A restart parses only files that have
    changed since."""
    try:
        status = os.stat(path)
        return _parse(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return (), ()


@functools.lru_cache(maxsize=MOST_FILES)
def _parse(path: str, version: tuple[int, int, int]) -> Statements:
    with open(path, "rb") as file:
        source = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    reader = _Reader(path)
    reader.visit(tree)
    return tuple(reader.at_once), tuple(reader.in_functions)


class _Reader(ast.NodeVisitor):
    """Collects imports and writes to the environment, in source order."""

    def __init__(self, path: str) -> None:
        self.at_once: list[Write | Import] = []
        self.in_functions: list[Write | Import] = []
        self._file = path
        self._depth = 0

    def _add(self, statement: Write | Import) -> None:
        (self.in_functions if self._depth else self.at_once).append(statement)

    def _write(self, key: ast.expr | None, value: ast.expr | None, node: ast.AST, kind: Kind = "set") -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            literal = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
            self._add(Write(kind, key.value, literal, self._file, getattr(node, "lineno", 0)))

    def visit(self, node: ast.AST) -> None:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        self._depth += is_function
        super().visit(node)
        self._depth -= is_function

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(Import(alias.name, 0, ()))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add(Import(node.module or "", node.level, tuple(alias.name for alias in node.names)))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environment(target.value):
                self._write(target.slice, node.value, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if _is_environment(node.target):
            self._write_all(node.value, node)
        elif isinstance(node.target, ast.Subscript) and _is_environment(node.target.value):
            self._write(node.target.slice, None, node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environment(target.value):
                self._write(target.slice, None, node, "remove")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return
        arguments = [*node.args, None, None]
        if function.attr == "putenv" or (_is_environment(function.value) and function.attr == "__setitem__"):
            self._write(arguments[0], arguments[1], node)
        elif function.attr == "unsetenv" or (_is_environment(function.value) and function.attr == "pop"):
            self._write(arguments[0], None, node, "remove")
        elif _is_environment(function.value) and function.attr == "setdefault":
            self._write(arguments[0], arguments[1], node, "set default")
        elif _is_environment(function.value) and function.attr == "update":
            for argument in node.args:
                self._write_all(argument, node)
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._write(ast.Constant(keyword.arg), keyword.value, node)

    def _write_all(self, mapping: ast.expr, node: ast.AST) -> None:
        if isinstance(mapping, ast.Dict):
            for key, value in zip(mapping.keys, mapping.values, strict=True):
                self._write(key, value, node)


def _is_environment(node: ast.expr) -> bool:
    """Return True for `os.environ`, and for `environ` by itself."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
