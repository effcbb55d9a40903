"""A real Prometheus and a real Alertmanager, on free ports of the loopback address, ended with the test."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.ranks import free_port

PROGRAMS = ("prometheus", "prometheus-alertmanager")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WAITS = {"JobGone": "20s"}  # Prometheus hears of a removed target up to 5 s late
LOOK_EVERY = 0.5  # seconds


def get(url: str) -> Any:
    """Return what an API answers. Raises: OSError; AssertionError with the server's words for a wrong request."""
    try:
        return json.load(STRAIGHT.open(url, timeout=90))
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()}") from None


class Server:
    """One of the programs. port: where it answers."""

    def __init__(self, program: str, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (folder / f"{program}.log").open("wb")
        arguments = [program, f"--web.listen-address=127.0.0.1:{self.port}", *options]
        self._process = subprocess.Popen(arguments, stdout=self._log, stderr=subprocess.STDOUT, cwd=folder)

    def await_ready(self, limit: float = 120.0) -> None:
        deadline = time.monotonic() + limit
        while True:
            assert self._process.poll() is None, Path(self._log.name).read_text()[-2000:]
            try:
                STRAIGHT.open(f"{self.url}/-/ready", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"not ready after {limit} s"
                time.sleep(LOOK_EVERY)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Prometheus(Server):
    """A Prometheus with the API that Grafana uses."""

    def instant(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the series of a query, without those that are not a number. at: Unix seconds; now by default."""
        found = self._ask("query", query=query, **({} if at is None else {"time": at}))["result"]
        return [each for each in found if not math.isnan(float(each["value"][1]))]

    def matrix(self, query: str) -> list[dict[str, Any]]:
        """Return the samples of a range vector, such as `up[5m]`, as they were scraped."""
        found: list[dict[str, Any]] = self._ask("query", query=query)["result"]
        return found

    def range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a query over a range that have a number somewhere in it."""
        found = self._ask("query_range", query=query, start=start, end=end, step=step)["result"]
        return [each for each in found if any(not math.isnan(float(value)) for _, value in each["values"])]

    def exemplars(self, query: str, start: float, end: float) -> list[dict[str, Any]]:
        return [
            exemplar
            for series in self._ask("query_exemplars", query=query, start=start, end=end)
            for exemplar in series["exemplars"]
        ]

    def label_values(self, selector: str, label: str, start: float) -> list[str]:
        """Return what Grafana makes of `label_values(selector, label)`."""
        values: list[str] = self._ask(f"label/{label}/values", **{"match[]": selector, "start": start})
        return values

    def await_query(self, query: str, limit: float = 120.0) -> list[dict[str, Any]]:
        """Wait until a query has an answer."""
        deadline = time.monotonic() + limit
        while True:
            if found := self.instant(query):
                return found
            assert time.monotonic() < deadline, f"no answer to {query} within {limit} s"
            time.sleep(LOOK_EVERY)

    def _ask(self, what: str, **parameters: Any) -> Any:
        answer = get(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        assert answer["status"] == "success", answer
        return answer["data"]


class Pager:
    """What Alertmanager calls: keeps the names of alerts that came as firing."""

    def __init__(self) -> None:
        self.paged: list[dict[str, Any]] = []
        pager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pager.paged += [alert for alert in body["alerts"] if alert["status"] == "firing"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def names(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.paged}

    def await_page(self, name: str, limit: float = 120.0) -> dict[str, Any]:
        """Wait until an alert has come, and return it."""
        deadline = time.monotonic() + limit
        while name not in self.names():
            assert time.monotonic() < deadline, f"no {name} within {limit} s; came: {self.names()}"
            time.sleep(LOOK_EVERY)
        return next(alert for alert in self.paged if alert["labels"]["alertname"] == name)

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class Watching:
    """Prometheus, Alertmanager and who is paged."""

    def __init__(self, prometheus: Prometheus, alertmanager: Server, pager: Pager) -> None:
        self.prometheus, self.alertmanager, self.pager = prometheus, alertmanager, pager

    def all_alerts(self) -> list[dict[str, Any]]:
        """Return what Alertmanager holds, silenced ones too."""
        alerts: list[dict[str, Any]] = get(f"{self.alertmanager.url}/api/v2/alerts")
        return alerts


@contextmanager
def watching(folder: Path, rules: Path, discovered: list[str]) -> Iterator[Watching]:
    """Start both on the exported rules, evaluated and scraped every second, alerts without waiting.

    rules: the exported folder. discovered: paths of file_sd, which may come into being later."""
    made = folder / "prometheus"
    made.mkdir()
    for name in ("recording.yaml", "alerts.yaml"):
        content = yaml.safe_load((rules / "prometheus" / name).read_text())
        for group in content["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "alert" in rule:
                    rule["for"] = WAITS.get(rule["alert"], "0s")
        (made / name).write_text(yaml.safe_dump(content))
    pager = Pager()
    example = yaml.safe_load((rules / "alertmanager.yaml").read_text())
    example["route"] |= {"group_wait": "1s", "group_interval": "2s"}
    example["receivers"][-1]["webhook_configs"][0]["url"] = pager.url
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(example))
    alertmanager = Server(
        "prometheus-alertmanager",
        folder,
        f"--config.file={folder / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'alertmanager'}",
        "--cluster.listen-address=",
    )
    config = yaml.safe_load((rules / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager.port}"]
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": discovered, "refresh_interval": "1s"}]
    (made / "prometheus.yaml").write_text(yaml.safe_dump(config))
    prometheus = Prometheus(
        "prometheus",
        folder,
        f"--config.file={made / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        "--enable-feature=exemplar-storage",
    )
    try:
        alertmanager.await_ready()
        prometheus.await_ready()
        yield Watching(prometheus, alertmanager, pager)
    finally:
        prometheus.end()
        alertmanager.end()
        pager.end()
