"""What is recorded if a call could not begin, mostly because it never reached its store?

Its monitor has no run folder yet, because ranks agree on the job's name through the store. So the rank itself writes
the record: into the job's folder if the launcher names it, otherwise into a folder whose name all ranks of the start
derive alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from resilience.errors import error_in_words
from resilience.facts import events
from resilience.facts.identity import FileOwner, Job, Origin, safe_name
from resilience.inprocess._runtime.operations import is_of_store
from resilience.system.environment import LauncherRendezvous, Settings, launched_folder
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile, write_job


def record(
    settings: Settings,
    node: str,
    call: int,
    rank: int,
    world_size: int,
    error: BaseException,
    duration: float,
    job: Callable[[Origin], Job],
) -> Path:
    """Record that this rank's call ended with `error` after `duration` seconds. Return the run folder."""
    origin = Origin(
        job_id=settings.job_id or _unstarted_name(),
        node=node,
        role="rank",
        pid=os.getpid(),
        attempt=settings.attempt_hint,
        cycle=settings.cycle or 0,
        call=call,
        initial_rank=rank,
        rank=rank,
        world_size=world_size,
    )
    folder = launched_folder() or Path(settings.run_dir).absolute() / _folder_name(settings)
    file = RecordFile(folder / "records" / f"{FileOwner(node, rank).name}.jsonl")
    message = error_in_words(error, 2000)
    emitter = Emitter(origin, [file])
    if is_of_store(error):
        emitter.emit(events.StoreLost(message))
    emitter.emit(events.CallEnded(outcome="left", iterations=0, duration_s=duration, error=message[:500]))
    file.close()
    write_job(job(origin), folder)
    return folder


def _folder_name(settings: Settings) -> str:
    """Return a name that no attempt uses, because the ranks have not agreed on an attempt."""
    return (
        safe_name(_unstarted_name())
        if settings.job_id is None
        else f"{safe_name(settings.job_id)}@{safe_name(_unstarted_name())}"
    )


def _unstarted_name() -> str:
    rendezvous = LauncherRendezvous.from_environment()
    return f"unstarted-{rendezvous.host}-{rendezvous.port}-{time.strftime('%Y%m%d')}"
