"""Builds sdist and wheel, installs the wheel into an empty environment, and uses it away from the repository. Then
unpacks the sdist, installs its extra `test`, and runs the fast part of the tests there.

`python -m tests.package` needs pip and the package index (or local files that pip knows), and some minutes: the
environment gets torch too. `--keep FOLDER` keeps the built files there. The steps are printed; the first one that fails
ends the program with 1."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
IMPORT_ALL = """
import importlib, pkgutil, resilience
optional = {"duckdb", "etcd", "lightning", "pytorch_lightning", "transformers"}
for module in pkgutil.walk_packages(resilience.__path__, "resilience."):
    if not module.name.endswith(".__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in optional:
                print(f"{module.name}: {error}")
"""
LIMIT = 3600.0  # seconds for one step; the longest are the installation of torch and the tests
IN_SDIST = {
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "docs/index.md",
    "pyproject.toml",
}
IN_SDIST |= {"CITATION.cff", "dashboards/grafana/overview.json", "docs/decisions/README.md"}
IN_SDIST |= {"tests/README.md", "tests/conftest.py", "examples/launch.py", ".ci/constraints.txt", ".ci/run"}
IN_WHEEL = {"resilience/py.typed", *(f"resilience/report/report.{suffix}" for suffix in ("css", "html.j2", "js"))}
IN_WHEEL |= {"resilience/dashboards/grafana/overview.json", "resilience/dashboards/prometheus/tests/JobGone.yaml"}
FAST_TESTS = ["tests/architecture", "tests/docs", "tests/unit"]  # a quarter of an hour, on one core


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and check sdist and wheel.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the built files here")
    parser.add_argument("--environment", type=Path, metavar="FOLDER", help="an empty environment that has torch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="package-") as name:
        work = Path(name)
        built = arguments.keep or work / "dist"
        try:
            wheel, sdist = build(work, built)
            problems = [*unexpected_in_wheel(wheel), *missing(wheel, IN_WHEEL)]
            problems += missing(sdist, IN_SDIST | set(tracked()))
            if not problems:
                given = arguments.environment
                python = given / "bin" / "python" if given else _environment(work / "environment")
                problems = problems_in_use(work, wheel, python)
                run_tests(work, sdist, python)
        except subprocess.CalledProcessError as error:
            problems = [f"{' '.join(map(str, error.cmd))}: exit status {error.returncode}"]
    for problem in problems:
        print(f"problem: {problem}", flush=True)
    return int(bool(problems))


def build(work: Path, built: Path) -> tuple[Path, Path]:
    """Build both files; the wheel is made from the sdist. Return wheel and sdist."""
    tools = _environment(work / "tools")
    _run([tools, "-m", "pip", "install", "--quiet", "build"], work)
    _run([tools, "-m", "build", "--outdir", built, ROOT], work)
    return max(built.glob("*.whl"), key=_age), max(built.glob("*.tar.gz"), key=_age)


def unexpected_in_wheel(wheel: Path) -> list[str]:
    """Return what users do not need: files beside the package, data of tests, the generator of the dashboards."""
    return [
        f"{name} is in the wheel"
        for name in _names(wheel)
        if not (name.startswith("resilience/") or ".dist-info/" in name)
        or name.endswith((".pyc", ".xz"))
        or (name.endswith(".py") if name.startswith("resilience/dashboards/") else "/tests/" in name)
    ]


def missing(archive: Path, expected: set[str]) -> list[str]:
    """Return which files an archive lacks."""
    return [f"{name} is not in {archive.name}" for name in sorted(expected - set(_names(archive)))]


def tracked() -> list[str]:
    """Return the files that git tracks; none if this is not a checkout."""
    if not (ROOT / ".git").exists():
        return []
    return _run(["git", "ls-files", "-z"], ROOT, is_read=True).split("\0")[:-1]


def problems_in_use(work: Path, wheel: Path, python: Path) -> list[str]:
    """Install the wheel and use it as a stranger does, in an empty folder. Return what is wrong."""
    wanted = f"torch-resilience[demo] @ {wheel.as_uri()}"
    _run([python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wanted], work)
    away = work / "away"
    away.mkdir()
    where = "import resilience; print(resilience.__file__)"
    if str(ROOT) in _run([python, "-c", where], away, is_read=True):
        return ["the environment imports the repository, not the wheel"]
    command = python.parent / "resilience"
    verbs = _run([python, "-c", "import resilience.cli as cli; print(*cli.VERBS)"], away, is_read=True).split()
    for verb in verbs:
        _run([command, verb, "--help"], away, is_quiet=True)
    _run([command, "completion", "bash"], away, is_quiet=True)
    for module in _run([python, "-c", IMPORT_ALL], away, is_read=True).splitlines():
        return [f"cannot be imported from the wheel: {module}"]
    _run([command, "dashboards", "export", "boards"], away)
    _run([command, "demo", "--keep"], away)
    _run([command, "report"], away, is_quiet=True)  # the newest run: the demonstration's
    return []


def run_tests(work: Path, sdist: Path, python: Path) -> None:
    """Unpack the sdist, install it with the extra `test`, and run the fast tests there, where there is no checkout.

    Raises: CalledProcessError if a test fails."""
    unpacked = work / "source"
    unpacked.mkdir()
    _run(["tar", "-xzf", sdist, "-C", unpacked], work)
    (source,) = unpacked.iterdir()
    _run([python, "-m", "pip", "install", "--quiet", "--constraint", ".ci/constraints.txt", ".[test]"], source)
    _run([python, "-m", "pytest", "-q", *FAST_TESTS], source)


def _environment(folder: Path) -> Path:
    """Create an empty environment; return its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _run(command: list[str | Path], folder: Path, is_quiet: bool = False, is_read: bool = False) -> str:
    """Run a step without the caller's Python settings; return its output if it is read. Raises: CalledProcessError."""
    print(f"$ {' '.join(map(str, command))}", flush=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    output = subprocess.PIPE if is_read else subprocess.DEVNULL if is_quiet else None
    ran = subprocess.run(command, cwd=folder, env=env, stdout=output, text=True, timeout=LIMIT, check=True)
    return ran.stdout or ""


def _names(archive: Path) -> Iterator[str]:
    """Yield the paths in an archive, without the folder that an sdist is packed in."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            yield from opened.namelist()
    else:
        with tarfile.open(archive) as opened:
            yield from (name.partition("/")[2] for name in opened.getnames())


def _age(path: Path) -> float:
    return path.stat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
