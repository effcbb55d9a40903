"""Where can a node's metrics be read?  Over HTTP, in its run folder, and in a file for node-exporter.

Each shows the same view (`telemetry.metrics`), formatted on request. The server answers `/metrics`, as Prometheus text
or OpenMetrics, and `/sd`: every node of the job that has an entry for file_sd (`telemetry.targets`), for Prometheus's
`http_sd`. The file is for clusters that only collect what node-exporter finds in a folder. There, no discovery tells
Prometheus which job a series belongs to, so the series carry their own labels."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from resilience.errors import error_in_words
from resilience.facts import encoding, events
from resilience.system import descriptors, files
from resilience.system.background import NO_ANSWER, READ_LIMIT, Writer, asked
from resilience.system.client_sockets import addresses_of
from resilience.telemetry.final_state import Outcome
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.otlp import Emit
from resilience.telemetry.targets import FOLDER, PARAMETER, Targets, announced

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

MOST_CONNECTIONS = 16  # concurrent; each has a thread
ENDING = 4  # additional threads that may be about to end
BACKLOG = 128  # connections that wait to be accepted; the kernel delays any further one by a second or more
CONNECTION_LIMIT = 10.0  # seconds; a scrape takes milliseconds
PAUSE = 0.2  # seconds between attempts to accept if no descriptor is left
PORTS_TRIED = 32  # from the requested port upwards
_PORT_TAKEN = {errno.EADDRINUSE, errno.EACCES}
LOOKUP_LIMIT = 10.0  # seconds for the address of RESILIENCE_METRICS_HOST
DISCOVERY = "/sd"
WRITTEN, ENDED = "resilience_written_timestamp_seconds", "resilience_ended_timestamp_seconds"
FORGOTTEN_AFTER = 24 * 3600.0  # seconds without a write after which one of our files counts as abandoned
_LONGEST_NAME = 200  # bytes; file names may have 255, and a longer temporary name is written first


class Exposition:
    """A view in Prometheus's format. Raises: ImportError without prometheus_client."""

    def __init__(self, metrics: MetricView) -> None:
        import prometheus_client

        self._client = prometheus_client
        self._metrics = metrics
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self.registry.register(metrics)

    def text(self) -> bytes:
        """Return the metrics as Prometheus text, which has no exemplars."""
        return self._client.generate_latest(self.registry)

    def labelled(self, labels: Mapping[str, str], with_gauges: bool) -> bytes:
        """Return the same text with additional labels on each series."""
        registry = self._client.CollectorRegistry(auto_describe=False)
        registry.register(_Labelled(self._metrics, labels, with_gauges))
        return self._client.generate_latest(registry)


class _Labelled:
    """A view whose series have labels for job and node."""

    def __init__(self, metrics: MetricView, labels: Mapping[str, str], with_gauges: bool) -> None:
        self._metrics, self._labels, self._with_gauges = metrics, dict(labels), with_gauges

    def collect(self) -> Iterable[Family]:
        for family in self._metrics.collect():
            if family.name == WRITTEN:
                family.add_sample(WRITTEN, {}, time.time())
            if self._with_gauges or family.type != "gauge" or family.name in (WRITTEN, ENDED):
                family.samples = [
                    sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples
                ]
                yield family


# -- the file for node-exporter ----------------------------------------------------------------


class TextFile:
    """The metrics of one node as a file in the folder of node-exporter's textfile collector."""

    def __init__(self, folder: Path, job_id: str, node: str, exposition: Exposition, emit: Emit) -> None:
        """folder: must exist, because node-exporter reads no other one. Raises: NotADirectoryError."""
        if not folder.is_dir():
            raise NotADirectoryError(
                f"RESILIENCE_METRICS_TEXTFILE or --metrics-textfile is {folder}, which is no folder; give the one that "
                "node-exporter reads (its --collector.textfile.directory)"
            )
        self._path = folder / file_name(job_id, node)
        self._labels = {"job_id": encoding.text(job_id), "node": encoding.text(node)}
        self._exposition = exposition
        self._emit = emit
        self._has_failed = False
        self._thread = Writer()  # the folder may block it
        self._thread.submit(lambda: _remove_abandoned(folder, time.time()))
        emit(events.ExportStarted("prometheus", str(self._path)))

    def write(self, is_last: bool = False) -> None:
        """Replace the file; report a failed write once. Wait for READ_LIMIT at most.

        is_last: the node's part of the job is over. Counters and the job's outcome stay for collection. Other gauges
        are removed, because they would show forever the state of ranks that no longer exist."""
        exposition = self._exposition.labelled(self._labels, with_gauges=not is_last)
        cause = ""
        try:
            is_written = self._thread.ask(lambda: _replaced(self._path, exposition), READ_LIMIT)
        except OSError:
            is_written, cause = False, f": {NO_ANSWER}"
        if not is_written and not self._has_failed:
            self._emit(events.ExportFailed("prometheus", f"{self._path} cannot be written{cause}"))
        self._has_failed = not is_written
        if is_last:
            self._thread.leave()


def _replaced(path: Path, content: bytes) -> bool:
    """Replace a file in a folder that exists. Return True on success."""
    return path.parent.is_dir() and files.replace(path, content)  # which creates a folder


def file_name(job_id: str, node: str) -> str:
    """Return the name of a node's file; names that are too long are cut and made unique by a hash."""
    name = f"resilience-{job_id}-{node}"
    name = encoding.text(name)
    if len(name.encode()) > _LONGEST_NAME:
        mark = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = name.encode()[: _LONGEST_NAME - len(mark)].decode(errors="ignore") + mark
    return f"{name}.prom"


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove files of jobs that ended long ago; otherwise node-exporter would show them forever."""
    for path in folder.glob("resilience-*.prom"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile: nothing depends on it
            if now - path.stat().st_mtime > FORGOTTEN_AFTER:
                path.unlink()


# -- the server --------------------------------------------------------------------------------


class MetricsServer:
    """Serves the metrics of a node, and the addresses of the other nodes, from its own threads."""

    def __init__(self, host: str, port: int, exposition: Exposition, folder: Path, node: str, emit: Emit) -> None:
        """port: 0 for any; the next free one is used if it is taken. folder: the run folder. Raises: OSError if none is
        free, or the address is not this host's."""
        import prometheus_client

        # Compressing about ten kilobytes would cost more CPU time than everything else.
        self._metrics = prometheus_client.make_wsgi_app(exposition.registry, disable_compression=True)
        self._folder, self._targets = folder, Targets(folder, node)
        self._folder_thread = Writer()  # the folder may block it
        self._server = _listening(host, port, emit)
        self._server.set_app(self._answer)
        self.port: int = self._server.server_port
        self._target = f"{_public_address(host)}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="resilience-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this host or process has no thread left
            self._server.server_close()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://{self._target}/metrics"

    def announce(self) -> bool:
        """Let Prometheus find this node; return False if the entry cannot be written."""
        return self._targets.announce(self._target)

    def renew(self, is_first: bool) -> None:
        """Renew this node's entry. is_first: as for `Targets.renew`."""
        self._targets.renew(is_first)

    def leave(self, outcome: Outcome | None, is_first: bool) -> None:
        """Let Prometheus see how the job ended. is_first: as for `Targets.leave`."""
        self._targets.leave(outcome, is_first)

    def close(self, timeout: float) -> None:
        """Stop serving, within `timeout` seconds."""
        # Ends within the server's own poll interval (0.5 s); running scrapes have their own threads.
        thread = threading.Thread(target=self._stop, name="resilience-metrics-close", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is left: the server ends with this process
            thread.start()
            thread.join(timeout)

    def _stop(self) -> None:
        self._folder_thread.leave()
        self._server.shutdown()
        self._server.socket.close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != DISCOVERY:
            job_id = encoding.text(self._folder.name)  # as `Targets` writes it
            if urllib.parse.parse_qs(environ.get("QUERY_STRING", "")).get(PARAMETER, [job_id]) != [job_id]:
                start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"this is job {job_id}\n".encode()]
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        try:
            entries = self._folder_thread.ask(lambda: announced(self._folder), READ_LIMIT)
        except OSError:  # Prometheus keeps the nodes that it knows
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{NO_ANSWER}\n".encode()]
        start_response("200 OK", [("Content-Type", "application/json; charset=utf-8")])
        return [entries]


class _Threads(ThreadingMixIn, WSGIServer):
    """One thread per connection, bounded in number and time: an old connection must give way to a new one."""

    request_queue_size = BACKLOG

    daemon_threads = True

    def __init__(self, address: tuple[Any, ...], handler: type[WSGIRequestHandler], emit: Emit) -> None:
        super().__init__(address, handler)
        self._emit = emit
        self._has_reported = False
        self._since: dict[socket.socket, float] = {}  # open connections, oldest first
        self._threads_alive = 0
        self._lock = threading.Lock()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Raises: OSError."""
        try:
            return super().get_request()
        except OSError:
            if descriptors.are_scarce():
                self._report_refusal()
            time.sleep(PAUSE)  # no descriptor is left while the connection waits: avoid a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread, unless threads or descriptors are scarce."""
        with self._lock:
            for oldest in list(self._since)[: max(0, len(self._since) + 1 - MOST_CONNECTIONS)]:
                self._hang_up(oldest)
            are_scarce = descriptors.are_scarce()
            is_refused = are_scarce or self._threads_alive >= MOST_CONNECTIONS + ENDING
            if not is_refused:
                self._threads_alive += 1
                self._since[request] = time.monotonic()
        if is_refused:
            self.shutdown_request(request)
            if are_scarce:
                self._report_refusal()
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is left: the server closes the connection
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends or is closed by us."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _report_refusal(self) -> None:
        """Report once that connections are refused because descriptors are scarce."""
        if not self._has_reported:
            self._has_reported = True
            self._emit(
                events.ExportFailed(
                    "prometheus",
                    f"connections are refused while this process can open fewer than {descriptors.reserve()} more "
                    "files: those are for the job. Raise the limit of open files (`ulimit -Hn`) before the job starts",
                )
            )

    def _ended(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
            self._threads_alive -= 1

    def service_actions(self) -> None:
        """Close connections that have exceeded their time. The server calls this twice a second."""
        late = time.monotonic() - CONNECTION_LIMIT
        with self._lock:
            for request in [request for request, since in self._since.items() if since < late]:
                self._hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore readers that are gone, or whose connection we closed."""

    def _hang_up(self, request: socket.socket) -> None:
        """Close a connection, which ends its thread."""
        del self._since[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


def _server_class(family: int) -> type[_Threads]:
    return type("_Threads", (_Threads,), {"address_family": family})


class _Silent(WSGIRequestHandler):
    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _public_address(host: str) -> str:
    """Return the address for other hosts: this host's name if the server listens on all addresses."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def serve(host: str, port: int, exposition: Exposition, folder: Path, node: str, emit: Emit) -> MetricsServer | None:
    """Start a server on the port, or on the next free one, and announce it. If it cannot start, report why and return
    None.

    port: 0 for any."""
    try:
        server = MetricsServer(host, port, exposition, folder, node, emit)
    except OSError as error:
        reason = f"cannot start: {_why_not_served(host, port, error)}"
        emit(events.ExportFailed("prometheus", reason[:500], is_at_start=True))
        return None
    note = "" if server.port == port or not port else f"port {port} is taken"
    emit(events.ExportStarted("prometheus", server.endpoint, note))
    if not server.announce():
        emit(
            events.ExportFailed(
                "prometheus", f"{folder.parent / FOLDER} cannot be written: file_sd does not find this node"
            )
        )
    return server


def _listening(host: str, port: int, emit: Emit) -> _Threads:
    """Return a server that listens on the port, or on the next free one. Raises: OSError."""
    family, _, _, _, address = _resolved(host)[0]
    last = min(port + PORTS_TRIED, 65536) - 1 if port else 0
    while True:
        try:
            return _server_class(family)((address[0], port), _Silent, emit)
        except OSError as error:
            if error.errno not in _PORT_TAKEN or port >= last:
                raise
            port += 1


def _resolved(host: str) -> list[Any]:
    """Return a host's addresses. Raises: OSError, ETIMEDOUT after LOOKUP_LIMIT."""
    lookup = functools.partial(addresses_of, host, None, socket.SOCK_STREAM)
    try:
        return lookup(socket.AI_PASSIVE | socket.AI_NUMERICHOST)
    except (
        socket.gaierror
    ):  # a name: in another thread, which a name server that does not answer may hold up for minutes
        return asked(functools.partial(lookup, socket.AI_PASSIVE), LOOKUP_LIMIT)


def _why_not_served(host: str, port: int, error: OSError) -> str:
    """Return why no server listens, and what to do about it."""
    if error.errno in _PORT_TAKEN:
        return f"no port from {port} on is free on {host}: {error}"
    if error.errno == errno.ETIMEDOUT:
        why = f"whose address was not found within {LOOKUP_LIMIT:g} s"
    elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        why = f"which is no address of this host: {error.strerror or error}"
    else:
        return error_in_words(error)
    return f"RESILIENCE_METRICS_HOST or --metrics-host is {host!r}, {why}; give an address of this host, or 0.0.0.0"
