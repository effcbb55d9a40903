"""etcd as the job's store: it survives the loss of any agent.

A request that fails is repeated: etcd may be restarting, or choosing a leader. The given endpoint and the addresses
that etcd's members advertise take turns. How long an agent may go on without an answer is decided elsewhere
(`agent_heartbeat`), as for any other store.

python-etcd could change to another member by itself. But it then forgets the given endpoint, and stays at an advertised
address for good, even if that cannot be reached from here (0.0.0.0, a name inside a container). So each client of
python-etcd has one server.

Uses etcd's v2 API (`--enable-v2=true`) through python-etcd, as torch does. torch's own EtcdStore reads the whole
directory to check one key, has no compare_set, and splits keys if their base64 form has a slash."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core.agent_protocol import Seconds
from resilience.errors import ConfigurationError
from resilience.facts.encoding import text
from resilience.launcher.rendezvous.conf import choice, number, whole

T = TypeVar("T")
FOLDER = "/resilience"
PAUSE = 0.5  # seconds between two attempts of one request
CONNECT_LIMIT = 3.0  # seconds for a connection to an advertised address, which may be unreachable from here


class Server(NamedTuple):
    """One address of etcd. host: as in a URL."""

    protocol: str
    host: str
    port: int


class EtcdStore(dist.Store):
    """A torch Store in a folder of etcd. One thread. Every method raises OSError if etcd does not answer."""

    def __init__(
        self,
        create_client: Callable[[Server], Any],
        endpoint: Server,
        folder: str,
        timeout: timedelta,
        is_cut: threading.Event,
    ) -> None:
        """create_client: returns python-etcd's client of one server, without a request; endpoint: as the user gave it;
        timeout: longest time in which a request is repeated; is_cut: set once this agent may send no more requests.

        Raises: OSError."""
        super().__init__()
        self._timeout = timeout
        self._folder = folder
        self._is_cut = is_cut
        self._create_client = create_client
        self._endpoint = self._server = endpoint
        self._servers: Sequence[Server] = [endpoint]
        self._has_answered = False
        self._client: Any = None
        self._found = ""  # the key that the last `check` found
        self._ask(lambda: None)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._client.write(self._place(key), _text(value)))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value. A key that the last `check` found is not waited for: if it is gone, it
        was deleted, and the last agent of a job deletes all keys.

        Raises: LookupError if the key was deleted, TimeoutError."""
        value = self._read(key)
        if value is None and key != self._found:
            self.wait([key])
            value = self._read(key)
        if value is None:
            raise LookupError(f"{key} was deleted while it was read")
        return value.encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        for key in keys:
            self._found = key if self._read(key) is not None else ""
            if not self._found:
                return False
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. A key costs three requests at most, unless it is created and deleted repeatedly.

        Raises: TimeoutError."""
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + limit
        for key in keys:
            while not self._exists_or_wait(key, deadline - time.monotonic()):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{key} is not in etcd after {limit:g} s")

    def add(self, key: str, amount: int) -> int:
        while True:
            value = self._read(key)
            if value is not None and amount == 0:
                return int(value)
            total = str(int(value or 0) + amount)
            if self._replace(key, value, total):
                return int(total)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        while True:
            value = self._read(key)
            if (value or "") != _text(expected_value):
                return (_text(expected_value) if value is None else value).encode("latin-1")
            if self._replace(key, value, _text(desired_value)):
                return _text(desired_value).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        import etcd

        try:
            self._ask(lambda: self._client.delete(self._place(key)))
        except etcd.EtcdKeyNotFound:
            return False
        return True

    deleteKey = delete_key  # noqa: N815 - a PrefixStore calls it by this name

    def forget(self) -> None:
        """Delete everything that is in the folder."""
        import etcd

        try:
            self._ask(lambda: self._client.delete(self._folder, recursive=True, dir=True))
        except etcd.EtcdKeyNotFound:
            pass  # another agent deleted it

    def _replace(self, key: str, value: str | None, new_value: str) -> bool:
        import etcd

        condition: dict[str, Any] = {"prevExist": False} if value is None else {"prevValue": value}
        try:
            self._ask(lambda: self._client.write(self._place(key), new_value, **condition))
        except (etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist, etcd.EtcdKeyNotFound):
            return False
        return True

    def _exists_or_wait(self, key: str, limit: float) -> bool:
        """Return True if a key exists. If not, wait at most `limit` seconds for a change of it before returning False:
        etcd delays its answer until then."""
        import etcd

        place = self._place(key)
        try:
            self._ask(lambda: self._client.read(place))
            return True
        except etcd.EtcdKeyNotFound as error:
            index = int(error.payload["index"])
        if limit > 0:
            with contextlib.suppress(etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared):
                self._ask(lambda: self._client.watch(place, index=index + 1, timeout=limit))
        return False

    def _read(self, key: str) -> str | None:
        import etcd

        try:
            return str(self._ask(lambda: self._client.read(self._place(key))).value)
        except etcd.EtcdKeyNotFound:
            return None

    def _ask(self, operation: Callable[[], T]) -> T:
        """Perform an operation, again and again if etcd fails: at one server after the other, at least once at each.

        It may take effect twice, because an answer may be lost. Only the counts of a cycle's nodes are then wrong: one
        failed node counts as two, so min-healthy may restart a cycle that could have continued; one finished node
        counts as two in the text about a premature completion."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        attempts = 0
        while True:
            attempts += 1
            try:
                return _ask_once(lambda: self._perform(operation))
            except OSError as error:
                self._leave_server()
                is_wrong_server = isinstance(error, ConnectionRefusedError) and not self._has_answered
                is_last = attempts >= len(self._servers) and time.monotonic() + PAUSE >= deadline
                if is_wrong_server or is_last or self._is_cut.wait(PAUSE):
                    raise

    def _perform(self, operation: Callable[[], T]) -> T:
        if self._client is None:
            client = self._create_client(self._server)
            self._servers = _servers(self._endpoint, client.machines) or self._servers
            self._has_answered = True
            self._client = client
        return operation()

    def _leave_server(self) -> None:
        """Let the next attempt go to the next server."""
        self._client = None
        position = self._servers.index(self._server) + 1 if self._server in self._servers else 0
        self._server = self._servers[position % len(self._servers)]

    def _place(self, key: str) -> str:
        return f"{self._folder}/{urlsafe_b64encode(text(key).encode()).decode()}"


class EtcdSettings(msgspec.Struct, frozen=True):
    """How etcd is used, from `--rdzv-conf`. folder: of the job's keys; timeout: seconds for a request; certificate,
    key: files of this client's certificate; ca_certificate: file with the authority that etcd's certificate comes
    from."""

    folder: str
    timeout: Seconds = 60.0
    protocol: str = "http"
    certificate: str | None = None
    key: str | None = None
    ca_certificate: str | None = None


def settings_of(parameters: RendezvousParameters) -> EtcdSettings:
    """Read the settings. Raises: ConfigurationError."""
    attempt = whole(parameters, "attempt", 0)  # keys that a killed attempt left behind must not mix with ours
    name = parameters.run_id + (f" {attempt}" if attempt else "")
    return EtcdSettings(
        folder=f"{FOLDER}/{urlsafe_b64encode(name.encode()).decode()}",
        timeout=number(parameters, "read_timeout", 60.0),
        protocol=choice(parameters, "protocol", ("http", "https")),
        certificate=parameters.get("ssl_cert"),
        key=parameters.get("ssl_cert_key"),
        ca_certificate=parameters.get("ca_cert"),
    )


def connect(settings: EtcdSettings, host: str, port: int, is_cut: threading.Event | None = None) -> EtcdStore:
    """Return a new client.

    host: as in a URL, so an IPv6 address has brackets; is_cut: set once this agent may send no more requests.
    Raises: ConfigurationError, OSError."""
    try:
        import etcd
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"a rendezvous on etcd needs python-etcd on every node: {error}") from error

    import urllib3

    endpoint = Server(settings.protocol, host, port)
    certificate, key = settings.certificate, settings.key

    def create_client(server: Server) -> Any:
        client = etcd.Client(
            host=server.host,
            port=server.port,
            read_timeout=settings.timeout,
            protocol=server.protocol,
            cert=(certificate, key) if certificate and key else certificate,
            ca_cert=settings.ca_certificate,
        )
        # Otherwise urllib3 repeats a request three times by itself, each time with the full timeout.
        client.http.connection_pool_kw["retries"] = urllib3.Retry(
            total=None, connect=0, read=0, other=0, status=0, redirect=3
        )
        if server != endpoint:  # the constructor accepts only a number
            client._read_timeout = urllib3.Timeout(min(CONNECT_LIMIT, settings.timeout), settings.timeout)
        return client

    timeout = timedelta(seconds=settings.timeout)
    return EtcdStore(create_client, endpoint, settings.folder, timeout, is_cut or threading.Event())


def _servers(endpoint: Server, urls: Sequence[str]) -> list[Server]:
    """Return the given endpoint and the members at these URLs. Return an empty list if no URL can be used: a restarted
    member may not know the others yet."""
    matches = [re.fullmatch(r"(https?)://(.+):(\d+)/?", url) for url in urls]
    members = [Server(match[1], match[2], int(match[3])) for match in matches if match]
    return list(dict.fromkeys([endpoint, *members])) if members else []


def _ask_once(operation: Callable[[], T]) -> T:
    """Perform an operation.

    Raises: ConnectionRefusedError if the server has no v2 API or the wrong certificate, another OSError if etcd fails;
    python-etcd's exceptions that answer the question."""
    import etcd
    import urllib3

    try:
        return operation()
    except (etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist, etcd.EtcdKeyNotFound):
        raise
    except (etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared):
        raise
    except (etcd.EtcdException, urllib3.exceptions.HTTPError) as error:
        answer = getattr(error, "payload", None)
        if answer and "status" not in answer:  # python-etcd adds it to each answer that is JSON
            raise ConnectionRefusedError(
                f"the server answers, but not with etcd's v2 API: {str(error).strip()}"
            ) from error
        cause = getattr(error, "cause", None) or error.__context__ or error  # python-etcd's own text does not name it
        reason = getattr(cause, "reason", None) or cause
        if isinstance(reason, urllib3.exceptions.SSLError):
            raise ConnectionRefusedError(f"TLS fails: {reason}") from error
        raise ConnectionError(f"etcd does not answer: {reason}") from error


def _text(value: str | bytes) -> str:
    """Return a value as text with one character per byte: etcd's values are text."""
    return value.decode("latin-1") if isinstance(value, bytes) else text(value).encode().decode("latin-1")
