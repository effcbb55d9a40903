"""The page of `resilience report --html` in a real Chromium: readable for everybody, on every screen, at every size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.attribution.incidents import incidents_of
from resilience.cli import main
from resilience.run_folder.merge import history_of
from tests.support import launch_streams, lines
from tests.support.browser import WHERE, Browser, path_of_browser
from tests.support.large_run import RESTARTS, WORLD, write
from tests.support.lines import log_line
from tests.support.record_streams import STARTED_NS, job
from tests.unit.report.test_throughput import stepped

pytestmark = [pytest.mark.slow, pytest.mark.skipif(path_of_browser() is None, reason=WHERE)]

PHONE, DESK = 390, 1200
LARGEST = 20 * 2**20  # bytes of a page
OPEN_ALL = "document.querySelectorAll('details').forEach(d => { d.open = true })"
CONTRAST = r"""(() => {
  const parse = c => { const m = c.match(/[\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1] };
  const part = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 };
  const light = ([r, g, b]) => .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05) };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] > 0) return c } return matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0] : [255, 255, 255] };
  const bad = [], seen = new Set(); let looked = 0;
  const check = (e, ink, least, what, back = e) => { looked++; const got = ratio(ink, behind(back));
    if (got < least) { const key = what + ' ' + e.className.baseVal + e.className; if (!seen.has(key)) {
      seen.add(key); bad.push(what + ': ' + got.toFixed(2) + ' < ' + least) } } };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) { const e = n.parentElement, s = getComputedStyle(e);
    if (!n.textContent.trim() || !e.getClientRects().length) continue;
    if (['SCRIPT', 'STYLE', 'title'].includes(e.tagName)) continue;
    check(e, parse(e instanceof SVGElement ? s.fill : s.color), 4.5, e.tagName + ' ' + n.textContent.slice(0, 40)) }
  document.querySelectorAll('#bars rect, .bar rect, .phase-bar, .bin').forEach(e =>
    check(e, parse(getComputedStyle(e).fill), 3, 'shape ' + e.getAttribute('class'), e.closest('svg').parentElement));
  return { looked, bad } })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a job that restarts in its processes, of one that the launcher restarts, and of one that is well."""
    root = tmp_path_factory.mktemp("pages")
    runs = {
        "inprocess": write(root / "inprocess", world=60, restarts=5),
        "launcher": launch_streams.launched(
            [launch_streams.Fault("raise", 3), launch_streams.Fault("hang", 2)], nodes=2
        ).write(root / "launcher"),
        "well": job([], world=2).write(root / "well"),
    }
    (first, *_) = incidents_of(history_of(runs["inprocess"]))
    assert first.detected_wall_ns is not None
    said = [log_line(text, first.detected_wall_ns) for text in ("step done", "bad loss", "giving up")]
    lines.write(runs["inprocess"], "logs/node-0.jsonl", *said)
    for rank in range(4):
        stepped(runs["launcher"], rank, STARTED_NS / 1e9, [3.0, 5.0])
    return {name: made(folder, root / f"{name}.html") for name, folder in runs.items()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    """Whatever a test does, the console stays empty."""
    browser.errors.clear()
    yield
    assert browser.errors == []


def made(folder: Path, page: Path) -> Path:
    assert main(["report", str(folder), "--html", str(page)]) == 0
    return page


@pytest.mark.parametrize("name", ["inprocess", "launcher", "well"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_the_screen_and_can_be_read(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.open(pages[name], width, scheme=scheme)
    browser.run(OPEN_ALL)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    found: Any = browser.run(CONTRAST)
    assert found["looked"] > 10
    assert found["bad"] == []


@pytest.mark.parametrize("name", ["inprocess", "launcher"])
def test_no_text_of_an_incident_scrolls_sideways_on_a_phone(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name], PHONE)
    browser.run(OPEN_ALL)
    blocks = "[...document.querySelectorAll('.incident .facts, .incident pre, .incident .lines')]"
    assert browser.run(f"{blocks}.length") > 3
    assert browser.run(f"{blocks}.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0


def test_log_lines_of_an_incident_can_be_searched(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["inprocess"], DESK)
    browser.run(OPEN_ALL)
    rows = "[...document.querySelector('.logs').querySelectorAll('.lines div')].filter(e => !e.hidden).length"
    whole = browser.run(rows)
    search = (
        "const i = document.querySelector('.logs input'); i.value = 'BAD LOSS'; i.dispatchEvent(new Event('input'))"
    )
    browser.run(f"(() => {{ {search} }})()")
    assert 0 < browser.run(rows) < whole
    assert browser.run("document.querySelector('.logs output').textContent") == f"1 of {whole}"


def test_a_colour_that_is_too_pale_is_found(browser: Browser, pages: dict[str, Path]) -> None:
    """The check itself works."""
    browser.open(pages["inprocess"], DESK)
    browser.run("document.querySelector('h1').style.color = '#999'")
    assert [line.split(":")[0].split()[0] for line in browser.run(CONTRAST)["bad"]] == ["H1"]


def test_everything_can_be_reached_and_done_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["inprocess"], DESK)
    reached = []
    for _ in range(200):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] == "lanes":
            break
    assert {"A", "BUTTON", "lanes"} <= set(reached)
    shown = "document.getElementById('bars').viewBox.baseVal"
    whole = browser.run(f"{shown}.width")
    browser.press("+", "+")
    assert browser.run(f"{shown}.width") == whole / 4
    before = browser.run(f"{shown}.x")
    browser.press("ArrowRight")
    assert browser.run(f"{shown}.x") > before
    browser.press("Home")
    assert browser.run(f"[{shown}.x, {shown}.width]") == [0, whole]
    browser.press("ArrowDown")
    first = browser.run("document.getElementById('say').textContent")
    browser.press("ArrowDown")
    second = browser.run("document.getElementById('say').textContent")
    assert first.startswith("rank") and second.startswith("rank") and first != second
    for _ in range(200):
        browser.press("Tab")
        if browser.run("document.activeElement.parentElement.id") == "incident-4":
            break
    was_open = browser.run("document.getElementById('incident-4').open")
    browser.press("Enter")
    assert browser.run("document.getElementById('incident-4').open") is not was_open


def test_bar_under_the_mouse_pointer_is_described(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["inprocess"], DESK)
    browser.run("document.querySelector('#bars .own').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))")
    assert "its own fault: ValueError: bad batch" in browser.run("document.getElementById('say').textContent")


def test_essence_is_there_without_scripts(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["inprocess"], PHONE, scripts=False)
    text = browser.run("document.body.innerText")
    for part in ("5 incidents", "raised an exception", "What the ranks did", "ETTR", "a limit of 1 s", "The restart:"):
        assert part in text
    assert browser.run("[...document.querySelectorAll('button')].every(b => b.hidden)")
    assert browser.run("document.querySelectorAll('#bars rect').length") > 10


def test_prints_with_everything_unfolded(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["inprocess"], DESK)
    browser.media("print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("[...document.querySelectorAll('details')].every(d => d.open)")
    assert browser.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert browser.run("document.documentElement.scrollWidth") <= DESK


def test_ten_thousand_ranks_are_a_page_that_opens(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes is the benchmark's to say (`python -m tests.benchmarks.run --only report`)."""
    folder = write(tmp_path / "large")
    page = made(folder, tmp_path / "large.html")
    assert page.stat().st_size < LARGEST
    for width in (PHONE, DESK):
        browser.open(page, width)
        assert browser.run("document.documentElement.scrollWidth") <= width
    drawn = browser.run("[...document.querySelectorAll('#bars g')].map(g => g.dataset.say)")
    assert RESTARTS // 2 < len(drawn) <= RESTARTS + 1  # who broke, and one for all the others
    names = browser.run("[...document.querySelectorAll('#lanes > text')].map(text => text.textContent)")
    (others,) = (name for name in names if name.endswith(" ranks"))
    assert int(others.removesuffix(" ranks").replace(",", "")) >= WORLD - RESTARTS
    assert browser.run("document.querySelectorAll('details.incident').length") == RESTARTS
    assert f"{WORLD} ranks" in browser.run("document.body.innerText")
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(folder)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
