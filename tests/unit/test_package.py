"""`poe package` refuses a wheel with files that users do not need."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from tests.package import IN_WHEEL, ROOT, unexpected_in_wheel

GENERATOR = sorted((ROOT / "dashboards" / "generator").rglob("*.py"))


def wheel(folder: Path, names: set[str]) -> Path:
    path = folder / "package.whl"
    with zipfile.ZipFile(path, "w") as opened:
        for name in names:
            opened.writestr(name, "")
    return path


def test_wheel_with_the_generator_of_the_dashboards_is_refused(tmp_path: Path) -> None:
    """Wherever in the package, and also beside it."""
    files = {path.relative_to(ROOT / "dashboards").as_posix() for path in GENERATOR}
    names = {f"{folder}/{name}" for name in files for folder in ("resilience/dashboards", "dashboards")}
    names |= {name.replace("/generator/", "/made/") for name in names}
    problems = unexpected_in_wheel(wheel(tmp_path, names | IN_WHEEL))
    assert "generator/rules.py" in files
    assert set(problems) == {f"{name} is in the wheel" for name in names}


def test_wheel_with_the_files_of_the_dashboards_is_accepted(tmp_path: Path) -> None:
    names = {f"resilience/{name.relative_to(ROOT)}" for name in (ROOT / "dashboards" / "prometheus").rglob("*.yaml")}
    assert unexpected_in_wheel(wheel(tmp_path, names | IN_WHEEL)) == []


def test_wheel_is_built_without_the_generator_of_the_dashboards() -> None:
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel.force-include]\n")
    included = re.findall(r'^"(.+)" = "resilience/.+"$', rest.partition("\n\n")[0], re.MULTILINE)
    assert "dashboards/grafana" in included
    assert [path for path in included if any((ROOT / path).rglob("*.py")) or path.endswith(".py")] == []
