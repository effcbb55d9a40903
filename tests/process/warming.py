"""Workers that are started warm and cold by one agent, so that a test can compare what they do.

The agent is a rank of the fork server, where torch is imported already: starting it takes a tenth of a
second. Its workers' scripts are in `scripts/semantics`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from resilience.launcher.worker import zygote as zygotes
from resilience.launcher.worker.workers import Workers, WorkersSpec, start
from resilience.launcher.worker.zygote import Zygote
from resilience.system.processes import become_subreaper

SCRIPTS = Path(__file__).parent / "scripts" / "semantics"
LIMIT = 240.0  # seconds: a cold worker imports torch


def specification(
    arguments: Sequence[str], zygote: Zygote | None, folder: Path, workers: int = 1, **fields: Any
) -> WorkersSpec:
    """Describe workers as torchrun would, with all they write in files."""
    folder.mkdir(exist_ok=True)
    environment = fields.pop("environment", {})
    defaults = {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(workers), **environment}
    return WorkersSpec(
        name="default",
        entrypoint=fields.pop("entrypoint", sys.executable),
        args=dict.fromkeys(range(workers), ("-u", *arguments)),
        envs={rank: {**defaults, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)},
        logs_specs=DefaultLogsSpecs(
            log_dir=str(folder), redirects=fields.pop("redirects", Std.ALL), tee=fields.pop("tee", Std.NONE)
        ),
        zygote=zygote,
        **fields,
    )


def told(workers: Workers) -> dict[str, Any]:
    """Wait for workers; answers how they were started, how they ended and what they wrote, by local rank."""
    codes = [handler.proc.wait(LIMIT) for _, handler in sorted(workers.subprocess_handlers.items())]
    result = {
        "how": workers.how,
        "reason": workers.reason,
        "codes": codes,
        "out": [Path(path).read_text(errors="surrogateescape") for _, path in sorted(workers.stdouts.items()) if path],
        "errors": [json.loads(Path(path).read_text()) for path in workers.error_files.values() if os.path.exists(path)],
        "err": [Path(path).read_text(errors="surrogateescape") for _, path in sorted(workers.stderrs.items()) if path],
    }
    workers.close()
    return result


def stdin_from(text: str) -> None:
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    os.dup2(read, 0)
    os.close(read)


def run(
    arguments: list[str],
    ways: Sequence[str] = ("warm", "cold"),
    stdin: str = "",
    cwd: str = "",
    workers: int = 1,
    environment: dict[str, str | None] | None = None,
    deaf: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Run one program in several ways; answers what is told of each.

    environment: of the workers beside the agent's; None takes one away. deaf: signals that were ignored
    when the agent was started."""
    become_subreaper()
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)
    here = Path.cwd()
    if cwd == "<deleted>":
        os.mkdir("deleted")
        os.chdir("deleted")
        os.rmdir("../deleted")
    elif cwd:
        os.chdir(cwd)
    stdin_from(stdin)
    zygotes.ANSWER_LIMIT = 60.0  # also on a busy host
    zygote = Zygote.start()
    given = {name: value for name, value in (environment or {}).items() if value is not None}
    for name in {*(environment or {})} - {*given}:
        os.environ.pop(name, None)
    answers = []
    for way in ways:
        stdin_from(stdin)
        spec = specification(arguments, zygote if way == "warm" else None, here / way, workers, environment=given)
        answers.append(told(start(spec)))
    zygote.close()
    return answers
