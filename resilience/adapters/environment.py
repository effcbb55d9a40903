"""What the environment says.  The only place that reads it.

Each setting is one field of `Settings`: name, type, unit, default and meaning stand there and nowhere
else; the table in the docs is made from them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import msgspec

from resilience.errors import ConfigurationError

DISTRIBUTED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)
"""What the wrapper changes for the function, and puts back when it is left."""


def _described(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings outside function signatures. A field `x` is the variable RESILIENCE_X."""

    run_dir: Annotated[str, _described("folder that holds a folder for each job")] = "./resilience-runs"
    job_id: Annotated[
        str | None,
        _described("name of the job; else SLURM_JOB_ID, TORCHELASTIC_RUN_ID unless `none`, else agreed by the ranks"),
    ] = None
    attempt: Annotated[int, _described("launch by the scheduler, from 0; else SLURM_RESTART_COUNT")] = 0
    cycle: Annotated[
        int | None, _described("start of the workers by the launcher, from 0; else agreed by the ranks")
    ] = None
    metrics_port: Annotated[
        int | None, _described("port of the node's Prometheus endpoint, on the loopback address; none without it")
    ] = None
    interrupt_signal: Annotated[
        int | None, _described("number or name of the signal that interrupts the main thread; default SIGRTMIN+9")
    ] = None
    step_timeout: Annotated[
        float | None, _described("seconds without a higher `resilience.step(n)` after which all restart")
    ] = None
    section_timeouts: Annotated[
        dict[str, float], _described("`name:seconds,…`: limits of sections, after which all restart")
    ] = {}
    run_id: str = "none"
    restart_count: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Return the settings in force. Raises: ConfigurationError, naming the variable."""
        env = os.environ if environment is None else environment
        run_id = env.get("TORCHELASTIC_RUN_ID", "none")
        job_id = env.get("RESILIENCE_JOB_ID") or env.get("SLURM_JOB_ID") or (run_id if run_id != "none" else None)
        restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            run_dir=env.get("RESILIENCE_RUN_DIR") or "./resilience-runs",
            job_id=None if job_id is None else _checked_job_id(job_id),
            attempt=_integer(env, "RESILIENCE_ATTEMPT", env.get("SLURM_RESTART_COUNT", "0")) or 0,
            cycle=_integer(env, "RESILIENCE_CYCLE", restarts if run_id != "none" else ""),
            metrics_port=_integer(env, "RESILIENCE_METRICS_PORT", ""),
            interrupt_signal=_signal(env.get("RESILIENCE_INTERRUPT_SIGNAL", "")),
            step_timeout=_seconds(env.get("RESILIENCE_STEP_TIMEOUT", ""), "RESILIENCE_STEP_TIMEOUT"),
            section_timeouts=_sections(env.get("RESILIENCE_SECTION_TIMEOUTS", "")),
            run_id=run_id,
            restart_count=int(restarts) if restarts.isdigit() else 0,
        )


def _integer(env: Mapping[str, str], name: str, default: str) -> int | None:
    text = env.get(name, "") or default
    if not text:
        return None
    if not text.isdigit():
        raise ConfigurationError(f"{name} is {text!r}, expected a whole number from 0; set it to one, or unset it")
    return int(text)


def _seconds(text: str, name: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} has {text!r}, expected seconds above 0, such as 120 or 0.5")
    return value


def _sections(text: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = part.rpartition(":")
        if not colon or not name:
            raise ConfigurationError(
                f"RESILIENCE_SECTION_TIMEOUTS has {part!r}, expected name:seconds, such as data:30,checkpoint:600"
            )
        limit = _seconds(value, f"RESILIENCE_SECTION_TIMEOUTS, section {name!r},")
        if limit is not None:
            limits[name] = limit
    return limits


def _signal(text: str) -> int | None:
    if not text:
        return None
    number = int(text) if text.isdigit() else getattr(signal.Signals, text, None)
    base, plus, offset = text.partition("+")
    if number is None and base == "SIGRTMIN" and plus and offset.isdigit():
        number = signal.SIGRTMIN + int(offset)
    if number is None or not 1 <= number <= signal.SIGRTMAX or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigurationError(
            f"RESILIENCE_INTERRUPT_SIGNAL is {text!r}, expected the number or name of a signal that can be caught, "
            "such as SIGRTMIN+9"
        )
    return int(number)


def _checked_job_id(job_id: str) -> str:
    if "/" in job_id or job_id in (".", "..") or "\0" in job_id:
        raise ConfigurationError(f"job id {job_id!r} cannot name a folder; use letters, digits, '-', '_' and '.'")
    return job_id


def node_name() -> str:
    """Return the name of this node: the host, and the group rank where a launcher gave one."""
    group = os.environ.get("GROUP_RANK")
    host = socket.gethostname().replace("/", "-")
    return host if group is None else f"{host}-g{group}"


@contextmanager
def scoped_environment() -> Iterator[None]:
    """Put the variables of DISTRIBUTED back as they were when the body is left."""
    before = {name: os.environ.get(name) for name in DISTRIBUTED}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
