"""Two jobs with real faults, scraped by a real Prometheus: what dashboards are asked about.

One is restarted in its processes, the other by the launcher. Only intervals and waits of the rules are
shortened."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience.facts.events import CycleStarted
from resilience.telemetry.dashboard_files import write
from resilience.telemetry.exporters import ExportThread, MetricsOptions
from tests.process.dashboard_jobs import END, LAUNCHED, LIMITS, RESTARTS
from tests.process.launching import launcher
from tests.support.prometheus import Watching, watching
from tests.support.ranks import free_port, started
from tests.support.server import ForkServer

JOBS = ("inprocess", "launched")
STEP = 15  # seconds between two points of a graph


@dataclass
class Scene:
    """Two jobs at work, and who watches them. began: Unix time."""

    watching: Watching
    began: float

    def series(self, expr: str, job: str, is_instant: bool, step: int = STEP) -> list[dict[str, Any]]:
        """Ask as Grafana does, for all nodes. step: seconds between two points of a graph."""
        now = time.time()
        length = round(now - self.began)
        named = {"job": job, "node": ".*", "__rate_interval": f"{STEP + 5}s", "__interval": f"{step}s"}
        named |= {"__rate_interval_ms": f"{(STEP + 5) * 1000}"}
        named |= {"__interval_ms": f"{step * 1000}", "__range": f"{length}s", "__range_s": f"{length}"}
        query = filled(expr, named)
        if is_instant:
            return self.watching.prometheus.instant(query)
        return self.watching.prometheus.range(query, self.began, now, step)


def filled(text: str, values: dict[str, str]) -> str:
    """Put in Grafana's variables."""
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], text)


@contextmanager
def stage(fork_server: ForkServer, folder: Path) -> Iterator[Scene]:
    """Start both jobs and the servers, wait until they have been through their faults, and end them at the end."""
    folders = {name: folder / name for name in (*JOBS, "exported", "servers")}
    for each in folders.values():
        each.mkdir()
    write(folders["exported"])
    began = time.time()
    environment = {
        "RESILIENCE_METRICS_PORT": "0",
        "RESILIENCE_JOB_ID": "inprocess",
        "RESILIENCE_SECTION_TIMEOUTS": LIMITS,
    }
    # Nobody listens there: exporters that fail are part of the picture.
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    served = [str(folders[name] / "runs" / ".targets" / "*.json") for name in JOBS]
    with (
        watching(folders["servers"], folders["exported"], served) as servers,
        started(
            fork_server, folders["inprocess"], 5, "tests.process.dashboard_jobs:train_in_process", {}, environment
        ) as wrapped,
    ):
        with _launched(fork_server, folders["launched"]) as launched:
            prometheus = servers.prometheus
            prometheus.await_query(f'max(resilience_restart_iteration{{job_id="inprocess"}}) >= {RESTARTS}')
            prometheus.await_query('max(resilience_restart_iteration{job_id="launched"}) >= 2')
            for name in JOBS:
                of_job = f'job_id="{name}"'
                prometheus.await_query(f"max(resilience_timeout_headroom_ratio{{{of_job}}}) > 0.67")
                # Timings come every 15 s; when they have come twice, some point of each graph has them.
                sections = f"resilience_section_duration_seconds_count{{{of_job}}}"
                prometheus.await_query(f"sum(rate({sections}[{STEP + 5}s] offset {STEP + 5}s)) > 0")
            yield Scene(servers, began)
            (folders["inprocess"] / END).touch()
            (folders["launched"] / END).touch()
            launched.wait()
        wrapped.wait_ranks()
        wrapped.ran_to_its_end = True


@contextmanager
def _launched(server: ForkServer, folder: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(
            size: int, target: str, env: Any = None, env_of: Any = None, are_agents: bool = True, **kwargs: Any
        ) -> Any:
            return stack.enter_context(started(server, folder, size, target, kwargs, env, env_of))

        environment = {"RESILIENCE_JOB_ID": "launched", "END": str(folder / END)}
        options = ("--max-restarts", "4", "--ft-rank-section-timeouts", LIMITS, "--ft-rank-heartbeat-timeout", "60")
        launched = launcher(start, folder)(LAUNCHED, *options, nproc=3, **environment)
        # What an agent exports, exported beside it; a folder that is there before the job belongs to another attempt.
        launched.await_record(CycleStarted)
        exports = ExportThread.start(
            launched.account.folder, "node0", lambda event: None, MetricsOptions(free_port()), is_agents=True
        )
        assert exports is not None
        stack.callback(exports.close)
        yield launched
