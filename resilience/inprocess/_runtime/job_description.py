"""What is known about a job without a launcher of ours?  Its name, command, configuration and place, for job.json."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from pathlib import Path

import torch

from resilience.errors import DecodeError
from resilience.facts.configuration import abridged
from resilience.facts.identity import Job, Origin
from resilience.facts.masking import masked
from resilience.system.environment import Exporting, LauncherRendezvous, Settings
from resilience.telemetry.recording import configuration_of, read_job


def job_of(origin: Origin, function: str) -> Job:
    """Return the content of job.json."""
    from resilience import __version__

    assert origin.world_size is not None
    return Job(
        job_id=origin.job_id,
        attempt=origin.attempt,
        world_size=origin.world_size,
        function=function,
        command=abridged(masked(sys.argv)),
        hostname=socket.gethostname(),
        resilience_version=__version__,
        torch_version=str(torch.__version__),
        python_version=sys.version.split()[0],
        created_wall_ns=time.time_ns(),
        configuration=configuration_of(None, Settings.from_environment().calibration_key, origin.world_size),
        traceparent=Exporting.from_environment().traceparent,
        launch=endpoint(),
    )


def endpoint() -> str:
    """Return the text that distinguishes this launch from others of the same job at the same time."""
    rendezvous = LauncherRendezvous.from_environment()
    return f"{rendezvous.host}:{rendezvous.port}"


def launch_in(folder: Path) -> str:
    """Return the launch that a run folder belongs to, empty if it cannot be read."""
    try:
        return read_job(folder).launch
    except (OSError, DecodeError):
        return ""


def new_job_id() -> str:
    """Return a name for a job that has none."""
    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
