"""Records the demonstration's report for the docs: `resilience demo`, then `resilience report --html`.

`python -m tests.record_demonstration` runs both commands as the README prints them, writes the page to
`docs/demonstration.html` and its picture to `docs/pictures/demonstration.png`. Only paths and the name of this machine
are replaced in the page; everything else is what the commands wrote."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.draw_report import ROOT, resilience, without_paths
from tests.support.browser import Browser

PAGE = ROOT / "docs" / "demonstration.html"
PICTURE = ROOT / "docs" / "pictures" / "demonstration.png"
MOST_BYTES = {PAGE: 300_000, PICTURE: 150_000}
WIDTH, HEIGHT = 1000, 770  # of the picture, which shows the head of the page


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"RESILIENCE_RUN_DIR": str(folder / "runs"), "RESILIENCE_NODE": "node0"}
        print(without_paths(resilience(["demo", "--keep"], environment, folder), folder))
        resilience(["report", "--html", "page.html"], environment, folder)
        PAGE.write_text(without_paths((folder / "page.html").read_text(), folder))
    with Browser() as browser:
        browser.open(PAGE, WIDTH)
        browser.picture(PICTURE, HEIGHT)
        assert browser.errors == []
    for path, most in MOST_BYTES.items():
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size:,} bytes")
        if size > most:
            raise SystemExit(f"{path.name} has {size:,} bytes, expected {most:,} at most")


if __name__ == "__main__":
    main()
