"""Draws the report's page for the docs: a real job with real faults, in a real Chromium, on a desk and on a phone.

`python -m tests.draw_report` runs `tests/process/scripts/slow_loader.py` under the launcher (a loader that stops four
times, a rank that is killed once), writes `docs/pictures/report/*.png`, and prints what the commands of
`docs/operating.md` say about the same job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.browser import Browser

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures" / "report"
SCRIPT = ROOT / "tests" / "process" / "scripts" / "slow_loader.py"
JOB = "job7"
LIMITS = ["--ft-rank-section-timeouts", "data:3,reduce:6,checkpoint:6", "--ft-rank-out-of-section-timeout", "6"]
COMMANDS = (
    ["status", JOB],
    ["report", JOB],
    ["trace", JOB, "--incident", "1"],
    ["logs", JOB, "--around", "5", "--level", "warning"],
)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "RESILIENCE_RUN_DIR": str(folder / "runs"),
            "RESILIENCE_JOB_ID": JOB,
            "COLUMNS": "80",
        }
        shutil.copy(SCRIPT, folder / "train.py")
        command = ["run", "--nproc-per-node", "4", "--max-restarts", "20", *LIMITS, "train.py", "step"]
        resilience(command, environment, folder)
        for command in COMMANDS:
            print(
                without_paths(f"$ resilience {' '.join(command)}\n{resilience(command, environment, folder)}", folder)
            )
        page = folder / "report.html"
        resilience(["report", JOB, "--html", str(page)], environment, folder)
        page.write_text(without_paths(page.read_text(), folder))
        with Browser() as browser:
            for name, width, height, scheme in (
                ("desk", 1000, 1180, "light"),
                ("desk-dark", 1000, 1180, "dark"),
                ("phone", 390, 1180, "light"),
            ):
                browser.open(page, width, scheme=scheme)
                browser.picture(PICTURES / f"{name}.png", height)
            browser.open(page, 1000)
            browser.run(
                "document.querySelectorAll('details.incident').forEach(d => { d.open = d.id === 'incident-1' })"
            )
            browser.run(
                "document.querySelectorAll('#incident-1 details')"
                ".forEach(d => { d.open = /^rank 1|^Ev/.test(d.innerText) })"
            )
            browser.run(
                "[...document.querySelector('main').children].forEach(e => e.id === 'incident-1' || e.remove())"
            )
            browser.picture(PICTURES / "incident.png", browser.run("Math.ceil(document.body.scrollHeight)"))
            assert browser.errors == []


def without_paths(text: str, folder: Path) -> str:
    """Return a text in which the paths of this machine are replaced by made-up ones. folder: the one that a command ran
    in."""
    places = {
        str(folder): "/home/me",
        folder.name: "me",
        sys.prefix: "/home/me/env",
        sys.base_prefix: "/usr",
        str(ROOT): "/home/me/env/lib",
    }
    for path, name in places.items():
        text = text.replace(path, name)
    return text


def resilience(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-m", "resilience.cli", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"resilience {' '.join(arguments)} ended with {done.returncode}:\n{shown}")
    return done.stdout


if __name__ == "__main__":
    main()
