"""Grafana's own types take the dashboards: `@grafana/schema`, by the TypeScript compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server import ROOT

SCHEMA, COMPILER = "@grafana/schema@13", "typescript@5"
# What a data source adds to queries and annotations is not in the schema; a query's own fields stand with Prometheus.
HEAD = """\
import { type AnnotationQuery, type Dashboard, type DataQuery, ThresholdsMode } from "@grafana/schema";
type Query = DataQuery & { expr: string; range?: boolean; instant?: boolean };
type Annotation = AnnotationQuery<Query> & { titleFormat?: string; tagKeys?: string };
type Checked = Omit<Partial<Dashboard>, "annotations"> & { annotations: { list?: Annotation[] } };
export const board = """
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext")
DASHBOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not here: apt-get install npm"),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiler and the schema."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text('{"name": "types", "private": true}')
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", SCHEMA, COMPILER]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{SCHEMA} cannot be had: {done.stderr[-300:]}")
    return folder


def complaints(folder: Path, name: str, board: str) -> str:
    """Return what the compiler says of a dashboard."""
    # A string is no member of an enum for the compiler, though it is what Grafana stores.
    board = board.strip().replace('"mode": "absolute"', '"mode": ThresholdsMode.Absolute')
    (folder / f"{name}.ts").write_text(f"{HEAD}{board} satisfies Checked;\n")
    command = [str(folder / "node_modules/.bin/tsc"), *OPTIONS, f"{name}.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafanas_types_take_the_dashboard(compiler: Path, path: Path) -> None:
    assert complaints(compiler, path.stem, path.read_text()) == ""


def test_compiler_finds_what_is_wrong(compiler: Path) -> None:
    (path,) = (path for path in DASHBOARDS if path.stem == "overview")
    for right, wrong in (
        ('"title": "', '"titel": "'),
        ('"h": ', '"h": "high", "was": '),
        ('"panels": [', '"panels": [1,'),
    ):
        assert complaints(compiler, "wrong", path.read_text().replace(right, wrong, 1))
