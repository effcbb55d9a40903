"""What does the whole account cost a job in which nothing goes wrong?

The same two ranks make steps of 100 ms with ten sections, a heartbeat and a step number, unwatched and watched, with
nothing to export to, with everything on, and with every exporter dead; the jobs take turns. A difference of half a
percent drowns in the noise of a step's own duration, so the cost itself is measured:

- CPU time of the rank (`CLOCK_PROCESS_CPUTIME_ID`: all its threads, those that we started included) over all steps,
  less that of an unwatched rank. Sections sleep instead of computing, so that nothing else moves that clock.
- CPU time of everything else that the job started (agent or monitors, zygote, store) over the same steps, a rank. It
  runs on other cores than a rank's, or in its place where there are none.
- Wall time of the calls in the rank, each timed by itself; the median over all steps, less that of the timing.

Run by itself this module is what everything is exported to: a receiver that takes all spans, and a scraper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from statistics import mean, median
from typing import Any, Literal

import msgspec

from tests.benchmarks.processes import descendants, free_port, is_running
from tests.benchmarks.table import Row, show

Variant = Literal["off", "files", "on", "dead", "wrapper files", "wrapper on", "wrapper dead"]
VARIANTS: tuple[Variant, ...] = ("off", "files", "on", "dead", "wrapper files", "wrapper on", "wrapper dead")
RANKS, SECTIONS, STEP = 2, 10, 0.1  # seconds
WARM_UP = 10  # steps before the first that counts
LIMIT = 180.0  # seconds for a job
SHARE = 0.005  # of a step that everything together may cost
_MODES = {"files": "records only", "on": "everything exported", "dead": "every exporter dead"}
SCRIPT = """
import json, os, sys, time
import resilience
from resilience.inprocess import Wrapper

folder, steps, warm_up, sections, nap = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
is_wrapped = sys.argv[6] == "wrapped"
rank = os.environ["RANK"]
names = [f"section {number}" for number in range(sections)]
log = resilience.get_logger()
clock, cpu = time.perf_counter_ns, time.process_time_ns

def say(name, content=""):
    path = os.path.join(folder, f"{name}-{rank}")
    with open(path + "~", "w") as file:
        file.write(content)
    os.rename(path + "~", path)

def make(step):
    called = 0
    for name in names:
        began = clock()
        section = resilience.section(name)
        section.__enter__()
        inside = clock()
        time.sleep(nap)
        leaves = clock()
        section.__exit__(None, None, None)
        called += clock() - leaves + inside - began
    began = clock()
    resilience.heartbeat()
    resilience.step(step)
    if is_wrapped:
        log.info("step done", loss=2.5, tokens=4096)
    return called + clock() - began

def train():
    calls, walls = [], []
    for step in range(warm_up):
        make(step)
    say("begun", str(os.getpid()))
    began = cpu()
    for step in range(warm_up, warm_up + steps):
        at = clock()
        calls.append(make(step))
        walls.append(clock() - at)
    spent = cpu() - began
    say("ended", json.dumps({"cpu": spent / steps / 1e9, "calls": calls, "walls": walls}))
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)

(Wrapper()(train) if is_wrapped else train)()
"""


class Cost(msgspec.Struct, frozen=True):
    """One job, a step and a rank. Seconds. cpu: of the rank; watchers: CPU of everything else; calls: wall time in our
    calls; step: how long one took. spans, scrapes: what reached the other end."""

    cpu: float
    watchers: float
    calls: float
    step: float
    spans: int = 0
    scrapes: int = 0


def measure(variant: Variant, steps: int, folder: Path) -> Cost:
    """Run one job. Raises: RuntimeError if it did not complete, or was not exported where it had to be."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    shell, _, mode = variant.rpartition(" ")
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENCE_RUN_DIR": str(folder / "runs")}
    with _exporting(mode, port, folder, environment) as other_end:
        processes = _start(variant == "off", bool(shell), steps, folder, environment)
        try:
            found = _watched(processes, folder, other_end.pid)
        finally:
            for process in processes:
                _end(process)
        told = other_end.told()
    cost = _cost(found, steps)
    if mode == "on" and not (told.get("spans") and told.get("scrapes")):
        raise RuntimeError(f"overhead, {variant}: nothing was exported: {told}")
    return msgspec.structs.replace(cost, spans=told.get("spans", 0), scrapes=told.get("scrapes", 0))


def _start(
    is_off: bool, is_wrapped: bool, steps: int, folder: Path, environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    script = [str(folder / "train.py"), str(folder), str(steps), str(WARM_UP), str(SECTIONS), str(STEP / SECTIONS)]
    script.append("wrapped" if is_wrapped else "plain")
    commands: list[tuple[list[str], dict[str, str]]] = []
    if is_off or is_wrapped:
        port = str(free_port())
        for rank in range(RANKS):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            commands.append((script, place | meeting))
    else:
        commands.append((["-m", "resilience.launcher", f"--nproc-per-node={RANKS}", "--no-output-files", *script], {}))
    processes = []
    for number, (command, place) in enumerate(commands):
        with (folder / f"{number}.log").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**environment, **place},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
    return processes


def _watched(processes: list[subprocess.Popen[bytes]], folder: Path, other_end: int | None) -> list[dict[str, Any]]:
    """Follow a job to its end; answers what its ranks measured, and the CPU seconds of the others beside it."""
    _await([folder / f"begun-{rank}" for rank in range(RANKS)], processes, folder)
    ranks = {int((folder / f"begun-{rank}").read_text()) for rank in range(RANKS)}
    began, before = time.monotonic(), _cpu_of_watchers(ranks, other_end)
    _await([folder / f"ended-{rank}" for rank in range(RANKS)], processes, folder)
    passed, after = time.monotonic() - began, _cpu_of_watchers(ranks, other_end)
    # What ended meanwhile is gone with its time: nothing of ours does while a job runs.
    spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    found = [json.loads((folder / f"ended-{rank}").read_text()) for rank in range(RANKS)]
    (folder / "go").touch()
    for process in processes:
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise RuntimeError(f"overhead: a process ended with {status}:\n{_output(folder)}")
    for each in found:
        each["watchers"] = spent / passed / RANKS
    return found


def _await(paths: list[Path], processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"overhead: no {paths[0].name}:\n{_output(folder)}")
        time.sleep(0.01)


def _output(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.log")))


def _cpu_of_watchers(ranks: set[int], other_end: int | None) -> dict[int, float]:
    """CPU seconds, by process, of all that the job started and that is no rank; ended threads are counted too.

    What a library starts may belong to nobody but the benchmark, which is its subreaper."""
    found = {}
    for pid in descendants(os.getpid()):
        if pid not in ranks and pid != other_end:
            try:
                found[pid] = cpu_clock(pid)
            except OSError:
                continue  # it has just ended
    return found


def cpu_clock(pid: int) -> float:
    """Return the CPU time of a process, in seconds, that of its ended threads included. Raises: OSError."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED, see include/linux/posix-timers.h


def _cost(found: list[dict[str, Any]], steps: int) -> Cost:
    walls = [wall / 1e9 for each in found for wall in each["walls"]]
    step = median(walls)
    return Cost(
        cpu=mean(each["cpu"] for each in found),
        watchers=mean(each["watchers"] for each in found) * step,
        calls=median(call / 1e9 for each in found for call in each["calls"]),
        step=step,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, by process id."""
    below = list(descendants(process.pid))
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in below:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


# -- rows --------------------------------------------------------------------------------------


def rows(found: dict[str, list[Cost]]) -> Iterator[Row]:
    """Yield what each way of watching costs over none."""
    off = found["off"]
    idle, untimed, bare = (median(getattr(cost, name) for cost in off) for name in ("cpu", "calls", "step"))
    for variant in VARIANTS[1:]:
        costs = found[variant]
        shell, _, mode = variant.rpartition(" ")
        where = f"{'`Wrapper`' if shell else '`resilience run`'}, {_MODES[mode]}"
        step = median(cost.step for cost in costs) if costs else 0.0
        yield Row(
            what=f"a step of 100 ms with 10 sections, {where}: CPU of rank and watchers",
            unit="s",
            budget=SHARE * STEP,
            ours=[cost.cpu - idle + cost.watchers for cost in costs],
            notes=[
                f"{where}: {show(median(cost.cpu for cost in costs) - idle, 's')} in the rank, its calls take "
                f"{show(median(cost.calls for cost in costs) - untimed, 's')}; {show(step, 's')} a step, "
                f"{step / bare:.4f} × that of a rank that nobody watches"
            ]
            if costs
            else [],
        )


def scrape_row(scrapes: int) -> Row:
    """Return what a scrape costs a busy node."""
    series, costs = scrape_cost(scrapes)
    return Row(
        what=f"CPU of a scrape, 8 ranks and 10 sections on which everything has happened, {series} series",
        unit="s",
        budget=0.01,
        ours=costs,
    )


# -- the other end -----------------------------------------------------------------------------


class _OtherEnd(msgspec.Struct, frozen=True):
    """Where a job exports to. pid: of the process that receives, if there is one; file: its count."""

    pid: int | None = None
    file: Path | None = None

    def told(self) -> dict[str, int]:
        """Return what has arrived."""
        found: dict[str, int] = {} if self.file is None else json.loads(self.file.read_text())
        return found


@contextmanager
def _exporting(mode: str, port: int, folder: Path, environment: dict[str, str]) -> Iterator[_OtherEnd]:
    """Set up where a job exports to."""
    if mode == "on":
        told = folder / "told"
        command = [sys.executable, "-m", "tests.benchmarks.overhead", str(port), str(told)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        receiver = int(process.stdout.readline())
        environment |= {
            "RESILIENCE_METRICS_PORT": str(port),
            "RESILIENCE_METRICS_TEXTFILE": str(folder / "textfile"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver}",
        }
        try:
            yield _OtherEnd(process.pid, told)
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
    elif mode == "dead":
        # A collector that takes connections and never answers, a folder that cannot be, and an address of nobody.
        (folder / "file").touch()
        with socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            environment |= {
                "RESILIENCE_METRICS_PORT": str(port),
                "RESILIENCE_METRICS_HOST": "192.0.2.1",
                "RESILIENCE_METRICS_TEXTFILE": str(folder / "file"),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            }
            yield _OtherEnd()
    else:
        yield _OtherEnd()


def receive(port: int, told: Path) -> None:
    """Take spans, scrape `port` once a second as Prometheus does, and keep count in a file, until SIGTERM."""
    count = {"spans": 0, "scrapes": 0}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            count["spans"] += 1
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    while True:
        if _scrape(port):
            count["scrapes"] += 1
        beside = told.with_name("told~")
        beside.write_text(json.dumps(count))
        beside.rename(told)
        time.sleep(1.0)


def _scrape(port: int) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return bool(answer.read())
    except OSError:
        return False


# -- a scrape ----------------------------------------------------------------------------------


def scrape_cost(scrapes: int) -> tuple[int, list[float]]:
    """Return how many series a busy node with 8 ranks and 10 sections has, and CPU seconds of single scrapes of it.

    The server is a process of its own; its clock is read before and after each scrape, so that all of it counts: HTTP,
    the signs of 8 ranks read from their files, the view, the text. Raises: RuntimeError if a scrape failed."""
    command = [sys.executable, "-m", "tests.benchmarks.overhead", "serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        port, series = map(int, process.stdout.readline().split())
        found = []
        for _ in range(scrapes + 1):
            before = cpu_clock(process.pid)
            if not _scrape(port):
                raise RuntimeError("overhead: a scrape failed")
            time.sleep(0.02)  # its thread ends a moment after its answer
            found.append(cpu_clock(process.pid) - before)
        return series, found[1:]  # the first one loads what it needs
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def serve() -> None:
    """Serve a busy node until standard input ends."""
    import tempfile

    from resilience.telemetry import exposing, signs
    from tests.support.busy_node import RANKS as BUSY
    from tests.support.busy_node import SECTIONS as OPEN
    from tests.support.busy_node import busy_node, shown

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for rank in range(BUSY):
            signs.write(folder, shown(rank, OPEN))
        view = busy_node()
        view.look = lambda: signs.read_all(folder)
        exposition = exposing.Exposition(view)
        server = exposing.serve("127.0.0.1", 0, exposition, folder, "node", lambda event: None)
        assert server is not None
        print(server.port, sum(not line.startswith(b"#") for line in exposition.text().splitlines()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        receive(int(sys.argv[1]), Path(sys.argv[2]))
