"""Faults for the scripts beside this module."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path


def fail_once(kind: str, folder: Path) -> None:
    """Crash, be killed or hang, the first time this is called in `folder`. kind: nothing else does nothing."""
    if kind not in ("crash", "kill", "hang"):
        return
    try:
        (folder / "failed").touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"fault: {kind}", flush=True)
    if kind == "crash":
        raise ValueError("planned fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
