"""The README's two commands are single lines, agree with the project file, and CI runs them as they stand."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import distribution

from tests.support.server import ROOT

README = (ROOT / "README.md").read_text()
CI = ROOT / ".ci" / "run"


def commands() -> list[str]:
    return re.findall(r"^```bash\n(.*)\n```$", README, flags=re.MULTILINE)


def test_readme_has_two_commands_of_one_line() -> None:
    demo, tests = commands()
    assert demo.endswith(".venv/bin/resilience demo")
    assert tests.endswith(".venv/bin/pytest -n 6")
    assert README.count("```bash") == 2


def test_commands_name_what_is_there() -> None:
    extras = set(distribution("torch-resilience").metadata.get_all("Provides-Extra") or [])
    for command in commands():
        (constraints,) = re.findall(r" -c (\S+)", command)
        assert "torch==" in (ROOT / constraints).read_text()
        (wanted,) = re.findall(r"-e '\.\[([\w,]+)\]'", command)
        assert set(wanted.split(",")) <= extras
    scripts = {entry.name for entry in distribution("torch-resilience").entry_points}
    assert "resilience" in scripts


def test_ci_runs_the_commands_of_the_readme() -> None:
    shown = subprocess.run(["bash", CI, "--show"], cwd="/", capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == list(reversed(commands()))


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []
