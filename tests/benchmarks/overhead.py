"""What does the whole account cost a job in which nothing goes wrong?

The same two ranks make steps of about 100 ms with ten sections, a heartbeat and a step number, without us and watched:
with nothing to export to, with everything on, and with every exporter dead; the jobs take turns. Half a percent of a
step drowns in the noise of its duration, so the cost itself is measured:

- in the rank: the wall time of its calls, each timed where it stands, between stretches of work that empty the caches
  as a training step does (the median over all steps, less that of timing nothing in the same places), and the CPU time
  of all threads but the main one, which are ours (over all steps);
- beside it: the CPU time of everything else that the job started (agent, monitors, zygote, store), by their own clocks
  over the same steps, a rank; under the launcher less what torchrun's agent takes for the same. It runs on other cores
  than a rank's, or in its place where there are none.

Run by itself this module is what everything is exported to: a receiver that takes all spans, and a scraper."""

from __future__ import annotations

import functools
import hashlib
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
from typing import Any, Literal, get_args

import msgspec

from tests.benchmarks.processes import descendants, free_port, is_running
from tests.benchmarks.table import Row

Variant = Literal["bare", "torchrun", "files", "on", "dead", "wrapper files", "wrapper on", "wrapper dead"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
WATCHED = VARIANTS[2:]
RANKS, SECTIONS = 2, 10
STEP = 0.1  # seconds
WARM_UP = 30  # steps before the first that counts: whoever starts beside the ranks has started then
LIMIT = 180.0  # seconds for a job
SHARE = 0.005  # of a step that everything together may cost
_MODES = {"files": "records only", "on": "everything exported", "dead": "every exporter dead"}
SCRIPT = """
import hashlib, json, os, sys, time
import resilience
from resilience.inprocess import Wrapper

folder, steps, warm_up, sections, times = sys.argv[1], *map(int, sys.argv[2:6])
is_wrapped, is_bare = sys.argv[6] == "wrapped", sys.argv[6] == "bare"
rank = os.environ["RANK"]
names = [f"section {number}" for number in range(sections)]
log = resilience.get_logger()
clock = time.perf_counter_ns
data = bytearray(1 << 20)

def work():
    for _ in range(times):
        hashlib.blake2b(data)

def say(name, content=""):
    path = os.path.join(folder, f"{name}-{rank}")
    with open(path + "~", "w") as file:
        file.write(content)
    os.rename(path + "~", path)

def make(step):
    called = 0
    for name in names:
        began = clock()
        if not is_bare:
            section = resilience.section(name)
            section.__enter__()
        inside = clock()
        work()
        leaves = clock()
        if not is_bare:
            section.__exit__(None, None, None)
        called += clock() - leaves + inside - began
    began = clock()
    if not is_bare:
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
    all_threads, main_thread = time.process_time_ns(), time.thread_time_ns()
    for step in range(warm_up, warm_up + steps):
        at = clock()
        calls.append(make(step))
        walls.append(clock() - at)
    threads = time.process_time_ns() - all_threads - (time.thread_time_ns() - main_thread)
    say("ended", json.dumps({"threads": threads / steps / 1e9, "calls": calls, "walls": walls}))
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)

(Wrapper()(train) if is_wrapped else train)()
"""


class Cost(msgspec.Struct, frozen=True):
    """One job, a step and a rank. Seconds. calls: wall time in our calls; threads: CPU time of the rank's other
    threads; watchers: CPU time of everything else; step: how long one took. spans: requests of them that arrived."""

    calls: float
    threads: float
    watchers: float
    step: float
    spans: int = 0
    scrapes: int = 0


def measure(variant: Variant, steps: int, folder: Path) -> Cost:
    """Run one job. Raises: RuntimeError if it did not complete, or was not exported where it had to be."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    mode = variant.rpartition(" ")[2]
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENCE_RUN_DIR": str(folder / "runs")}
    with _exporting(mode, port, folder, environment) as other_end:
        processes = _start(variant, steps, folder, environment)
        try:
            found = _watched(processes, folder, other_end.pid)
        finally:
            for process in processes:
                _end(process)
        told = other_end.told()
    if mode == "on" and not (told.get("spans") and told.get("scrapes")):
        raise RuntimeError(f"overhead, {variant}: nothing was exported: {told}")
    return Cost(
        calls=median(call / 1e9 for each in found for call in each["calls"]),
        threads=mean(each["threads"] for each in found),
        watchers=mean(each["watchers"] for each in found) * STEP,
        step=median(wall / 1e9 for each in found for wall in each["walls"]),
        **told,
    )


def _start(variant: Variant, steps: int, folder: Path, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    is_wrapped = variant.startswith("wrapper")
    kind = "wrapped" if is_wrapped else "bare" if variant == "bare" else "plain"
    amounts = (steps, WARM_UP, SECTIONS, _work_of_a_section())
    script = [str(folder / "train.py"), str(folder), *map(str, amounts), kind]
    common = [f"--nproc-per-node={RANKS}", *script]
    if variant == "torchrun":
        commands: list[tuple[list[str], dict[str, str]]] = [
            (["-m", "torch.distributed.run", "--standalone", *common], {})
        ]
    elif variant == "bare" or is_wrapped:
        meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        commands = [(script, {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting}) for rank in range(RANKS)]
    else:
        commands = [(["-m", "resilience.launcher", "--no-output-files", *common], {})]
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


@functools.cache
def _work_of_a_section() -> int:
    """How often a MiB is hashed in the time of a section; the same number for all jobs."""
    data, times = bytearray(1 << 20), []
    for _ in range(50):
        began = time.perf_counter()
        hashlib.blake2b(data)
        times.append(time.perf_counter() - began)
    return max(1, round(STEP / SECTIONS / median(times)))


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
    """Yield what each way of watching costs."""
    timing, bare = (median(getattr(cost, name) for cost in found["bare"]) for name in ("calls", "step"))
    for variant in WATCHED:
        if not (costs := found[variant]):
            yield Row(what=f"step of 100 ms with 10 sections, {variant}", unit="s", budget=SHARE * STEP)
            continue
        shell, _, mode = variant.rpartition(" ")
        where = f"{'`Wrapper`' if shell else '`resilience run`'}, {_MODES[mode]}"
        other = 0.0 if shell else median(cost.watchers for cost in found["torchrun"])
        note = f"{where}: a step took {median(cost.step for cost in costs) / bare:.4f} × what it takes unwatched"
        yield Row(
            what=f"step of 100 ms with 10 sections, {where}: in the rank",
            unit="s",
            budget=SHARE * STEP,
            ours=[cost.calls - timing + cost.threads for cost in costs],
            notes=[note],
        )
        yield Row(
            what="… CPU of agent and monitors beside it, a step and rank",
            unit="s",
            ours=[cost.watchers - other for cost in costs],
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
        if self.file is None or not self.file.exists():
            return {}
        found: dict[str, int] = json.loads(self.file.read_text())
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
        (folder / "textfile").mkdir()
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
    lock = threading.Lock()

    def note(what: str) -> None:
        with lock:
            count[what] += 1
            beside = told.with_name("told~")
            beside.write_text(json.dumps(count))
            beside.rename(told)

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            note("spans")
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
            note("scrapes")
        time.sleep(1.0)


def _scrape(port: int) -> bool:
    headers = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
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

    from resilience.telemetry import prometheus, rank_snapshot
    from tests.support.busy_node import RANKS as BUSY
    from tests.support.busy_node import SECTIONS as OPEN
    from tests.support.busy_node import busy_node, shown

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for rank in range(BUSY):
            rank_snapshot.write(folder, shown(rank, OPEN))
        view = busy_node()
        view.look = lambda: rank_snapshot.read_all(folder)
        exposition = prometheus.Exposition(view)
        server = prometheus.serve("127.0.0.1", 0, exposition, folder, "node", lambda event: None)
        assert server is not None
        print(server.port, sum(not line.startswith(b"#") for line in exposition.text().splitlines()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        receive(int(sys.argv[1]), Path(sys.argv[2]))
