"""Which budgets are met?  Rows of measurements, judged against the budget and rendered.

A row holds every single measurement, so the JSON written beside the table can be judged again. The
shown value is the median; a budget is met if ours is within it and, where a factor over the peer is
asked for, the peer's median is at least that many times ours."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

Unit = Literal["s", "bytes", "share"]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Row(msgspec.Struct, kw_only=True):
    """One thing measured on both sides, in `unit`; every measurement is kept."""

    what: str
    unit: Unit
    budget: float | None = None
    factor: float | None = None  # how many times ours the peer's value has to be
    ours: list[float] = []
    peer: list[float] = []
    peer_at_least: float | None = None  # the peer had not finished after this long
    notes: list[str] = []

    @property
    def ratio(self) -> float | None:
        """Return peer / ours, of the medians; a lower bound where the peer had not finished."""
        other = median(self.peer) if self.peer else self.peer_at_least
        return other / median(self.ours) if self.ours and other is not None and median(self.ours) > 0 else None

    @property
    def verdict(self) -> str:
        """Return "yes", "no: why", or "-" where there is neither budget nor factor, or no measurement of ours."""
        if (self.budget is None and self.factor is None) or not self.ours:
            return "-"
        value = median(self.ours)
        if self.budget is not None and value > self.budget:
            return f"no: over by {show(value - self.budget, self.unit)}"
        if self.factor is not None and self.ratio is not None and self.ratio < self.factor:
            return f"no: {self.ratio:.3g} ×, not {self.factor:.0f} ×"
        return "yes" if self.factor is None or self.ratio is not None else "yes, beside no peer"


class Machine(msgspec.Struct, frozen=True):
    """Where the figures come from."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    load: float  # one-minute load average at the start


class Report(msgspec.Struct):
    """One run of the benchmarks."""

    date: str
    machine: Machine
    versions: dict[str, str]
    quick: bool
    rows: list[Row]
    problems: list[str] = []  # jobs that could not be measured
    seconds: float = 0.0


def show(value: float, unit: Unit) -> str:
    """Render a value with three significant digits and a unit that fits it."""
    if unit == "share":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    size = abs(value)
    if size >= 0.9995 or value == 0:
        return f"{value:.3g} s"
    if size >= 0.0009995:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def cells(row: Row) -> list[str]:
    """Return what | budget | ours | peer | ratio | met? of one row."""
    wanted = [] if row.budget is None else [f"≤ {show(row.budget, row.unit)}"]
    if row.factor is not None:
        wanted.append(f"≥ {row.factor:.0f} ×")
    budget = ", ".join(wanted) or "-"
    peer = _summary(row.peer, row.unit)
    if not row.peer and row.peer_at_least is not None:
        peer = f"> {show(row.peer_at_least, row.unit)}"
    ratio = "-" if row.ratio is None else f"{'' if row.peer else '> '}{_round(row.ratio)} ×"
    return [row.what, budget, _summary(row.ours, row.unit), peer, ratio, row.verdict]


HEAD = ["what", "budget", "ours", "peer", "ratio", "met?"]


def text(rows: Sequence[Row]) -> str:
    """Return the table for a terminal, numbered notes beneath it."""
    lines, notes = _numbered(rows)
    widths = [max(len(line[column]) for line in (HEAD, *lines)) for column in range(len(HEAD))]
    out = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (HEAD, ["-" * width for width in widths], *lines)
    ]
    return "\n".join([*out, "", *notes])


def markdown(report: Report) -> str:
    """Return the table for the docs, with machine, versions and date."""
    machine = report.machine
    lines, notes = _numbered(report.rows)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return "\n".join(
        [
            f"Measured on {report.date}: {machine.cpu}, {machine.cores} cores, "
            f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.system}, "
            f"load {machine.load:.1f} at the start; "
            f"{versions}.{' A quick run.' if report.quick else ''} Median (smallest - largest, n).",
            "",
            *("| " + " | ".join(line) + " |" for line in (HEAD, ["---"] * len(HEAD), *lines)),
            "",
            *notes,
            "",
        ]
    )


def _numbered(rows: Sequence[Row]) -> tuple[list[list[str]], list[str]]:
    """Return the cells of all rows, with references to the notes, and the notes, each once."""
    notes: list[str] = []
    lines = []
    for row in rows:
        line = cells(row)
        for note in row.notes:
            if note not in notes:
                notes.append(note)
            line[0] += f" [{notes.index(note) + 1}]"
        lines.append(line)
    return lines, [f"{number}. {note}" for number, note in enumerate(notes, 1)]


def publish(report: Report, page: Path) -> None:
    """Replace the measured part of a docs page. Raises: ValueError if the page has no such part."""
    before, after = split(page)
    page.write_text(f"{before}{BEGIN}\n{markdown(report)}{END}{after}")


def split(page: Path) -> tuple[str, str]:
    """Return what stands before and after the measured part. Raises: ValueError if there is none."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no part between {BEGIN!r} and {END!r} to put the table into")
    return before, after


def this_machine() -> Machine:
    """Describe this machine."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"Linux {platform.release()}",
        load=os.getloadavg()[0],
    )


def today() -> str:
    """Return the date for the report."""
    return time.strftime("%Y-%m-%d")


def commit() -> str:
    """Return the checkout's commit, empty outside a checkout."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _summary(values: Sequence[float], unit: Unit) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return show(values[0], unit)
    return f"{show(median(values), unit)} ({show(min(values), unit)} - {show(max(values), unit)}, {len(values)})"


def _round(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
