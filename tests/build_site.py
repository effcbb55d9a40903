"""Builds the documentation as a site: the Markdown pages as they are, by Sphinx with MyST and Furo.

`python -m tests.build_site` writes `build/site`; a warning ends it with 1. The navigation is that of `docs/index.md`:
its sections and the links in them. The pages are copied first, because a link may lead out of `docs/`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
DEMONSTRATION = ROOT / "docs" / "demonstration.html"
COPIED = ("*.md", "LICENSE", "docs/**/*", "examples/**/*", "dashboards/**/*", "tests/**/*.md", "tests/campaign/*")
WITH_ALL_PAGES = ("docs/runbooks/index.md", "docs/decisions/README.md")  # each lists the pages of its folder
CONFIGURATION = {
    "project": "resilience",
    "extensions": ["myst_parser"],
    "html_theme": "furo",
    "html_title": "resilience",
    "myst_heading_anchors": 4,
    "myst_links_external_new_tab": False,
    "root_doc": "README",
    "exclude_patterns": ["docs/changes/[!R]*"],
}


def main() -> None:
    source, site = BUILD / "site-source", BUILD / "site"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    write_source(source)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(site)]
    ended = subprocess.run(command, check=False)
    if not ended.returncode:
        link_to_demonstration(site)
        shutil.copyfile(site / "README.html", site / "index.html")
        print(f"written: {(site / 'index.html').relative_to(ROOT)}")
    raise SystemExit(ended.returncode)


def write_source(source: Path) -> None:
    """Write what Sphinx builds the site from."""
    for path in sorted(path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()):
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (source / "conf.py").write_text("".join(f"{name} = {value!r}\n" for name, value in CONFIGURATION.items()))
    trees = map(tree, navigation().items())
    (source / "README.md").write_text("\n".join([(ROOT / "README.md").read_text(), *trees]))
    for page in WITH_ALL_PAGES:
        with (source / page).open("a") as file:
            file.write("\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n")


def link_to_demonstration(site: Path) -> None:
    """Let links open the recorded report. Sphinx takes a page that it did not make for a file to be downloaded."""
    (downloaded,) = site.glob(f"_downloads/*/{DEMONSTRATION.name}")
    shutil.copyfile(downloaded, site / "docs" / DEMONSTRATION.name)
    link = re.compile(rf'download="" href="((?:\.\./)*)_downloads/\w+/{DEMONSTRATION.name}"')
    for page in site.rglob("*.html"):
        text = page.read_text()
        if link.search(text):
            page.write_text(link.sub(rf'href="\1docs/{DEMONSTRATION.name}"', text))


def navigation() -> dict[str, list[str]]:
    """Return the pages of each section of docs/index.md, as paths from the repository's root."""
    sections: dict[str, list[str]] = {}
    for part in re.split(r"^## ", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, table = part.partition("\n")
        links = re.findall(r"^\| \[[^\]]+\]\(([^)]+\.md)\)", table, flags=re.MULTILINE)
        sections[title] = [] if sections else ["docs/index.md"]
        sections[title] += [str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in links]
    return sections


def tree(section: tuple[str, list[str]]) -> str:
    title, pages = section
    listed = "\n".join(page.removesuffix(".md") for page in pages)
    return f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n"


if __name__ == "__main__":
    main()
