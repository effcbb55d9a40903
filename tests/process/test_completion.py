"""What a real shell offers after the script of `resilience completion` is loaded."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.cli import VERBS
from tests.support.server import ROOT

SHELL_LIMIT = 240.0

OFFERS: list[tuple[tuple[str, ...], list[str]]] = [
    (("report", "--ht"), ["--html"]),
    (("run", "--same-failure-e"), ["--same-failure-exit-code"]),
    (("run", "--nproc"), ["--nproc-per-node"]),  # torchrun's own
    (("run", "--rank-heartbeat-t"), []),
    (("run", "--start-method", "f"), ["fork", "forkserver"]),
    (("calibrate", "--format", "n"), ["nvrx"]),
    (("dashboards", "export", "--data"), ["--datasource"]),
    (("help", "st"), ["status"]),
]
"""The words of a command line, and what is offered for the last one."""

ASK = """
. {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_resilience
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

ASK_ZSH = """
. {script}
compadd() {{
    while [ "$1" != - ]; do shift; done
    shift
    print -rl -- ${{(M)@:#${{words[CURRENT]}}*}}
}}
words=({words})
CURRENT=$#words
eval "$_comps[resilience]" || true  # 1 if nothing is offered
"""
"""Outside of its line editor zsh has no `compadd`, which offers the words that begin with the present one."""


def printed(shell: str, folder: Path) -> Path:
    """Return a file with the script, as the command prints it."""
    command = [sys.executable, "-m", "resilience.cli", "completion", shell]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=SHELL_LIMIT)
    path = folder / f"resilience.{shell}"
    path.write_text(ran.stdout)
    return path


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return printed("bash", tmp_path_factory.mktemp("completion"))


@pytest.fixture(scope="module")
def zsh_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not here, so its completion was not tried: apt-get install zsh")
    return printed("zsh", tmp_path_factory.mktemp("completion"))


def offered(script: Path, folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of the words, with `folder` as the working directory."""
    ask = ASK.format(script=shlex.quote(str(script)), words=shlex.join(["resilience", *words]))
    shell = shutil.which("bash")
    assert shell is not None
    command = [shell, "--norc", "--noprofile", "-uc", ask]
    ran = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, check=False, timeout=SHELL_LIMIT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def offered_by_zsh(script: Path, folder: Path, *words: str) -> list[str]:
    """Return what zsh offers for the last of the words, with `folder` as the working directory and the home."""
    ask = ASK_ZSH.format(script=shlex.quote(str(script)), words=shlex.join(["resilience", *words]))
    command = [shutil.which("zsh") or "zsh", "-f", "-c", ask]
    environment = {"HOME": str(folder)}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SHELL_LIMIT,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.split()


def test_commands_are_offered_first(script: Path, tmp_path: Path) -> None:
    assert set(offered(script, tmp_path, "")) == {*VERBS, "help", "--version"}
    assert offered(script, tmp_path, "rep") == ["report"]


@pytest.mark.parametrize(("words", "expected"), OFFERS)
def test_options_and_their_choices_are_offered(
    script: Path, tmp_path: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    assert offered(script, tmp_path, *words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("",), [*VERBS, "help", "--version"]), *(pytest.param(*offer, marks=pytest.mark.slow) for offer in OFFERS)],
)
def test_zsh_offers_the_same(zsh_script: Path, tmp_path: Path, words: tuple[str, ...], expected: list[str]) -> None:
    assert offered_by_zsh(zsh_script, tmp_path, *words) == expected


def test_zsh_offers_the_runs_of_the_run_directory(zsh_script: Path, tmp_path: Path) -> None:
    for name in ("job6", "job7", "other", ".targets"):
        (tmp_path / "resilience-runs" / name).mkdir(parents=True)
    assert offered_by_zsh(zsh_script, tmp_path, "report", "job") == ["job6", "job7"]


def test_runs_of_the_run_directory_are_offered(script: Path, tmp_path: Path) -> None:
    for name in ("job6", "job7", "other", ".targets"):
        (tmp_path / "resilience-runs" / name).mkdir(parents=True)
    assert sorted(offered(script, tmp_path, "report", "job")) == ["job6", "job7"]
    assert offered(script, tmp_path, "report", "--html", "job") == []  # a file is expected here


def test_name_of_a_run_is_not_executed(script: Path, tmp_path: Path) -> None:
    (tmp_path / "resilience-runs" / "$(touch executed)").mkdir(parents=True)
    offered(script, tmp_path, "report", "")
    assert [path.name for path in tmp_path.rglob("executed")] == []
