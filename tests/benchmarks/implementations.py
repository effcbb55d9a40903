"""What differs between the two libraries under test, hidden behind one interface.

A measurement is written once against `Implementation`; the workload is the same to the letter. The
adaptations of the peer (0.4.1) follow its own examples: the wrapper's store takes MASTER_PORT, so the
function's process groups get a store of their own on another port, one prefix an iteration; its
renamed hooks take a frozen state."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

Side = Literal["ours", "peer"]
PEER_VERSION = "0.4.1"


class Implementation(Protocol):
    """One library under test."""

    side: Side
    name: str
    module: str  # what a user imports
    version: str
    signs_inside_wrapper: bool  # whether heartbeats and sections need a wrapped function round them

    def load(self) -> None:
        """Import everything that ranks will use."""

    def wrap(self, body: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
        """Return `body(call)` wrapped; `call` has `iteration` and `ping`."""

    def start(self) -> None:
        """Do what the library asks for before the wrapped function is called. Runs in each rank."""

    def build_group(self, iteration: int, timeout: timedelta | None) -> None:
        """Make the default process group (gloo) of an iteration."""

    def marking_abort(self, mark: Callable[[int], None]) -> Any:
        """Return the default abort, preceded by `mark(iteration)`."""

    def store(self, rank: int, world_size: int, port: int) -> Any:
        """Return the library's TCP store; rank 0 hosts it."""

    def barrier(self, store: Any, name: str, rank: int, world_size: int) -> None:
        """Wait in the library's store barrier."""

    def signs_of_life(self) -> AbstractContextManager[tuple[Callable[[], object], Callable[[], object]]]:
        """Return, for as long as the context lasts, functions for one heartbeat and one section pair."""

    def death_recorded_at(self, run_folder: Path, initial_rank: int) -> int | None:
        """Return the monotonic nanoseconds of the record that says that a rank's process ended."""


class Ours:
    """This repository."""

    side: Side = "ours"
    name = "resilience"
    module = "resilience.inprocess"
    signs_inside_wrapper = True

    def __init__(self) -> None:
        try:
            self.version = importlib.metadata.version("torch-resilience")
        except importlib.metadata.PackageNotFoundError:
            self.version = "from a checkout"

    def load(self) -> None:
        self._api = importlib.import_module(self.module)
        self._abort = importlib.import_module("resilience.inprocess.abort")
        self._store = importlib.import_module("resilience.inprocess.store")

    def wrap(self, body: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
        return _wrap(self._api, body, options)

    def start(self) -> None:
        return

    def build_group(self, iteration: int, timeout: timedelta | None) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timeout)

    def marking_abort(self, mark: Callable[[int], None]) -> Any:
        return _marking(self._abort.AbortTorchDistributed, mark)

    def store(self, rank: int, world_size: int, port: int) -> Any:
        return _tcp_store(self._store, rank, world_size, port)

    def barrier(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._store.StoreMixin.barrier(
            store, rank=rank, group_name=name, rendezvous_count=world_size, timeout=timedelta(seconds=60)
        )

    @contextmanager
    def signs_of_life(self) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        top = importlib.import_module("resilience")

        def pair() -> None:
            with top.section("step"):
                pass

        yield top.heartbeat, pair

    def death_recorded_at(self, run_folder: Path, initial_rank: int) -> int | None:
        for path in run_folder.glob(f"*/records/*-{initial_rank}.jsonl"):
            for line in path.read_bytes().splitlines():
                record = json.loads(line)
                if record["event"]["event"] == "rank.exited":
                    return int(record["mono_ns"])
        return None


class Peer:
    """NVIDIA Resiliency Extension.  Raises: ImportError if it is not installed in the right version."""

    side: Side = "peer"
    name = "nvidia-resiliency-ext"
    module = "nvidia_resiliency_ext.inprocess"
    signs_inside_wrapper = False

    def __init__(self) -> None:
        try:
            self.version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ImportError(f"{self.name} is not installed") from error
        if self.version != PEER_VERSION:
            raise ImportError(f"{self.name} {self.version} is installed, not {PEER_VERSION}")
        self._base: Any = None

    def load(self) -> None:
        self._api = importlib.import_module(self.module)
        self._abort = importlib.import_module("nvidia_resiliency_ext.inprocess.abort")
        self._store = importlib.import_module("nvidia_resiliency_ext.inprocess.store")
        importlib.import_module("nvidia_resiliency_ext.fault_tolerance")

    def wrap(self, body: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
        return _wrap(self._api, body, options)

    def start(self) -> None:
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        self._base = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["USER_PORT"]),
            int(os.environ["WORLD_SIZE"]),
            is_master=rank == 0,
            multi_tenant=True,
            wait_for_workers=True,
            use_libuv=True,
        )

    def build_group(self, iteration: int, timeout: timedelta | None) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.distributed_c10d.PrefixStore(str(iteration), self._base),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )

    def marking_abort(self, mark: Callable[[int], None]) -> Any:
        return _marking(self._abort.AbortTorchDistributed, mark)

    def store(self, rank: int, world_size: int, port: int) -> Any:
        return _tcp_store(self._store, rank, world_size, port)

    def barrier(self, store: Any, name: str, rank: int, world_size: int) -> None:
        # torch's own Store.barrier, where it has one, hides the mixin's on an instance.
        self._store.StoreMixin.reentrant_barrier(
            store, ranks=[rank], group_name=name, rendezvous_count=world_size, timeout=timedelta(seconds=60)
        )

    @contextmanager
    def signs_of_life(self) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        import multiprocessing

        tolerance = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
        socket = str(Path.cwd() / "monitor.sock")
        os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = socket
        server = tolerance.RankMonitorServer.run_in_subprocess(
            tolerance.FaultToleranceConfig(enable_nic_monitor=False, rank_section_timeouts={"step": 600.0}),
            socket,
            mp_ctx=multiprocessing.get_context("fork"),
        )
        client = tolerance.RankMonitorClient()
        client.init_workload_monitoring()

        def pair() -> None:
            client.start_section("step")
            client.end_section("step")

        try:
            yield client.send_heartbeat, pair
        finally:
            client.shutdown_workload_monitoring()
            server.terminate()
            server.join()

    def death_recorded_at(self, run_folder: Path, initial_rank: int) -> int | None:
        return None


def available() -> list[Implementation]:
    """Return ours and, if it is installed in the right version, the peer."""
    found: list[Implementation] = [Ours()]
    try:
        found.append(Peer())
    except ImportError as error:
        print(f"note: {error}; its columns stay empty", flush=True)
    return found


def _wrap(api: Any, body: Callable[[Any], Any], options: dict[str, Any]) -> Callable[[], Any]:
    def function(call: Any = None) -> Any:
        return body(call)

    function.__annotations__ = {"call": api.CallWrapper}
    wrapped: Callable[[], Any] = api.Wrapper(**options)(function)
    return wrapped


def _marking(base: Any, mark: Callable[[int], None]) -> Any:
    def call(self: Any, state: Any) -> Any:
        mark(state.iteration)
        return base.__call__(self, state)

    return type("MarkingAbort", (base,), {"__call__": call})()


def _tcp_store(module: Any, rank: int, world_size: int, port: int) -> Any:
    os.environ["RANK"] = str(rank)  # the peer's store reads it to see who hosts
    return module.TCPStore(host_name="127.0.0.1", port=port, world_size=world_size, timeout=timedelta(seconds=120))
