"""How do a cycle's workers start?  Warm from the zygote, cold as fresh interpreters where that cannot be.

Both are torchelastic's SubprocessContext, so redirection, tee, log and error files and NUMA binding are
its own. The context says how it started its workers, and why not warm."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from resilience.errors import LaunchError
from resilience.launcher import worker_main
from resilience.launcher.zygote import Order, Zygote

AT_ONCE = 100  # workers of an order: each has two descriptors


@dataclasses.dataclass(frozen=True)
class WorkersSpec:
    """What workers are started from; fields as torchelastic's `start_processes` has them."""

    name: str
    entrypoint: Callable[..., Any] | str | None
    args: dict[int, tuple[Any, ...]]
    envs: dict[int, dict[str, str]]
    logs_specs: LogsSpecs
    log_line_prefixes: dict[int, str] | None = None
    start_method: str = "spawn"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    zygote: Zygote | None = None


class Workers(SubprocessContext):
    """The processes of one cycle. how, reason: warm or cold, and why not warm."""

    def __init__(self, spec: WorkersSpec) -> None:
        assert isinstance(spec.entrypoint, str)
        super().__init__(
            spec.name,
            spec.entrypoint,
            spec.args,
            spec.envs,
            spec.logs_specs,
            spec.log_line_prefixes,
            spec.numa_options,
            spec.duplicate_stdout_filters,
            spec.duplicate_stderr_filters,
        )
        self._zygote = spec.zygote
        self.reason = self._why_cold(spec)
        self.how: Literal["warm", "cold"] = "cold" if self.reason else "warm"

    @staticmethod
    def _why_cold(spec: WorkersSpec) -> str:
        if spec.zygote is None:
            return "--cold"
        if spec.entrypoint != sys.executable:
            return "it is no Python program"
        return spec.zygote.why_not or worker_main.why_not(tuple(map(str, spec.args[0])))

    def _start(self) -> None:
        if self.how == "cold":
            super()._start()  # type: ignore[no-untyped-call]
            return
        handlers = {
            local_rank: WarmHandler(
                self.entrypoint,
                self.args[local_rank],
                self.envs[local_rank],
                self.stdouts[local_rank],
                self.stderrs[local_rank],
                local_rank,
                self._numa_options,
            )
            for local_rank in range(self.nprocs)
        }
        self.subprocess_handlers = dict(handlers)
        ordered = [handler for handler in handlers.values() if handler.order is not None]
        try:
            assert self._zygote is not None
            orders = [handler.order for handler in ordered if handler.order is not None]
            forked = [
                worker
                for first in range(0, len(orders), AT_ONCE)
                for worker in self._zygote.spawn(orders[first : first + AT_ONCE])
            ]
        except LaunchError as error:
            self.how, self.reason = "cold", str(error)
            for handler in ordered:
                handler.start_cold()
            return
        for handler, process in zip(ordered, forked, strict=True):
            handler.proc = process  # type: ignore[assignment]  # it has the part of Popen that is used


class WarmHandler(SubprocessHandler):
    """torchelastic's handler of one worker, which is ordered here and forked with the others."""

    def __init__(self, *args: Any) -> None:
        self.order: Order | None = None
        super().__init__(*args)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[0] != sys.executable:  # wrapped, to bind it to a NUMA node
            return super()._popen(args, env)
        out = 1 if self._stdout is None else self._stdout.fileno()
        err = 2 if self._stderr is None else self._stderr.fileno()
        self.order = Order(tuple(args[1:]), env, os.getcwd(), out, err)
        return None

    def start_cold(self) -> None:
        """Start a fresh interpreter instead."""
        assert self.order is not None
        self.proc = super()._popen((sys.executable, *self.order.arguments), self.order.environment)


def start(spec: WorkersSpec) -> Workers:
    """Start the workers. Raises: OSError."""
    workers = Workers(spec)
    try:
        workers.start()
    except BaseException:
        workers.close()
        raise
    return workers
