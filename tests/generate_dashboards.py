"""Writes `dashboards/` and the runbooks in `docs/runbooks/`, which are made from the code.

`python -m tests.generate_dashboards` writes them; with `--check` it only says which are stale, and exits with 1."""

from __future__ import annotations

import sys
from pathlib import Path

from resilience.analysis.dashboards.export import texts
from resilience.analysis.dashboards.rules import ALERTS

ROOT = Path(__file__).parents[1]
MADE = "<!-- Made by tests/generate_dashboards.py from the code; change it there. -->\n"


def runbooks() -> dict[str, str]:
    """Return the pages, by their path."""
    index = f"# Runbooks\n\n{MADE}\nOne page for each [alert](../dashboards.md).\n\n"
    index += "| alert | severity | says |\n|---|---|---|\n"
    pages = {}
    for alert in ALERTS:
        index += f"| [{alert.name}]({alert.name}.md) | {alert.severity} | {_plain(alert.summary)} |\n"
        facts = f"Severity {alert.severity}, about a {alert.level}; fires when this holds for {alert.wait}:\n"
        head = f"# {alert.name}\n\n{MADE}\n{facts}\n```text\n{alert.expr}\n```\n\n"
        pages[f"docs/runbooks/{alert.name}.md"] = head + alert.runbook.markdown()
    return {"docs/runbooks/index.md": index, **pages}


def _plain(summary: str) -> str:
    for name in ("job_id", "rank", "node", "section", "layer", "signal", "reason"):
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", f"*{name}*")
    while "{{" in summary:
        before, _, rest = summary.partition("{{")
        summary = before + "*value*" + rest.partition("}}")[2]
    return summary


def files() -> dict[str, str]:
    """Return all files that are made, by their path."""
    return {**{f"dashboards/{name}": text for name, text in texts().items()}, **runbooks()}


def main(arguments: list[str]) -> int:
    stale = []
    for name, text in files().items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    print("stale:" if "--check" in arguments else "written:", ", ".join(stale) or "none")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
