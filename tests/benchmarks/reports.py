"""What does the report of a very large run cost: its page, its making, and the wait until a browser shows it? And what
does a look at its status cost?

10,000 ranks with 50 restarts, every record of every rank on disk (`tests.support.large_run`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.benchmarks import restart_line
from tests.benchmarks.table import Row
from tests.support.browser import WHERE, Browser, path_of_browser
from tests.support.large_run import RESTARTS, write

LARGEST, SOON = 20.0 * 2**20, 3.0  # bytes, seconds
MOST_CPU, MOST_MEMORY, LOOK = 100.0, 2.0**30, 2.0  # seconds, bytes, seconds
FEW, LINE, INCIDENT = 8, 2.0, 10.0  # ranks, seconds, seconds
WIDTHS = {"desk": 1200, "phone": 390}


def rows(folder: Path, world: int, openings: int) -> Iterator[Row]:
    """Write a run, make its report and open it. world: 10,000, or fewer for a quick look."""
    run, page = write(folder / "large", world), folder / "large.html"
    what = f"report of {world} ranks, {RESTARTS} restarts"
    records = sum(path.stat().st_size for path in (run / "records").iterdir())
    took, memory = _measured(_MAKE, "report", str(run), "--html", str(page))
    (decoded,) = _measured(_DECODE, str(run / "records"))
    (looked,) = _measured(_LOOK, "status", str(run))
    note = f"of {records / 2**30:.2g} GiB of records, by one process; decoding them alone takes {decoded:.3g} s"
    yield Row(what=f"{what}: the page", unit="bytes", budget=LARGEST, ours=[float(page.stat().st_size)])
    yield Row(what=f"{what}: making it, CPU time", unit="s", budget=MOST_CPU, ours=[took], notes=[note])
    yield Row(what=f"{what}: making it, peak memory", unit="bytes", budget=MOST_MEMORY, ours=[memory * 1024])
    yield Row(what=f"status of {world} ranks, {RESTARTS} restarts", unit="s", budget=LOOK, ours=[looked])
    if path_of_browser() is None:
        raise RuntimeError(WHERE)
    with Browser() as browser:
        for name, width in WIDTHS.items():
            opened, painted = [], []
            for _ in range(openings):
                opened.append(browser.open(page, width))
                first = browser.run("performance.getEntriesByType('paint').map(paint => paint.startTime)[0] ?? null")
                painted += [] if first is None else [first / 1e3]
            seen = (
                f"first paint after {median(painted):.2g} s (median of {len(painted)})" if painted else "paint not told"
            )
            yield Row(
                what=f"{what}: opening it, {name}",
                unit="s",
                budget=SOON,
                ours=opened,
                notes=[f"Chromium, {name}: {seen}"],
            )


def incident_rows(folder: Path, world: int, repeats: int) -> Iterator[Row]:
    """How soon is one incident told, by the line of its restart and by `report --incident`? world: 10,000, or fewer for
    a quick look, beside a job of 8 ranks."""
    lines = []
    for number in range(repeats):
        for kind in restart_line.FAULTS:
            run = folder / f"line-{kind}-{number}"
            run.mkdir(parents=True)
            took, line = restart_line.told(run, restart_line.write(run, kind, FEW))
            if f"rank {FEW // 2} failed first" not in line:
                raise RuntimeError(f"the line of a restart says: {line}")
            lines.append(took)
    yield Row(what=f"line of a restart of {FEW} ranks, after the restart", unit="s", budget=LINE, ours=lines)
    for size, limit in ((FEW, LINE), (world, INCIDENT)):
        run = folder / f"incident-{size}"
        run.mkdir(parents=True)
        restart_line.write(run, "kill", size)
        looked = [_measured(_LOOK, "report", str(run), "--incident", "1")[0] for _ in range(repeats)]
        yield Row(what=f"report --incident of {size} ranks, one restart", unit="s", budget=limit, ours=looked)


def _measured(program: str, *arguments: str) -> tuple[float, ...]:
    """Run a program in a process of its own; return the numbers in its last line."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}")
    return tuple(map(float, done.stdout.splitlines()[-1].split()))


_MAKE = """
import re, sys, time
from resilience.cli import main
code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())
print(time.process_time(), peak[1])
sys.exit(code)
"""
_DECODE = """
import sys, time
from pathlib import Path
from resilience.facts.records import from_lines
for path in Path(sys.argv[1]).iterdir():
    from_lines(path.read_bytes())
print(time.process_time())
"""
_LOOK = """
import contextlib, io, sys, time
began = time.perf_counter()
from resilience.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
print(time.perf_counter() - began)
sys.exit(code)
"""
