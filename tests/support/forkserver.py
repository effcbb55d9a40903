"""A process that has imported torch once and forks ranks from then on.

Starting eight ranks costs 22 s by spawn and under 1 s by fork. The server has a single thread (OpenBLAS is
held to one), so what it forks is clean. It reads one JSON request a line from stdin and answers with one
JSON line for each rank that ended; it ends, and its ranks with it, when its stdin closes."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import select
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    import torch
    import torch.distributed

    import resilience.inprocess.call
    import resilience.inprocess.wrap  # noqa: F401

    torch.set_num_threads(1)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"the fork server has {len(tasks)} threads"
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    answer({"ready": os.getpid()})
    buffer = b""
    while True:
        ready, _, _ = select.select([0, read], [], [])
        if read in ready:
            os.read(read, 4096)
            reap()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                start(json.loads(line))


def answer(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        answer({"ended": pid, "status": status})


def start(request: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        answer({"started": pid, "key": request["key"]})
        return
    code = 70
    try:
        code = run(request)
    finally:
        os._exit(code)


def run(request: dict[str, Any]) -> int:
    """Be one rank: own process group, own output, end with the server."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = request["folder"]
    name = request["key"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/{name}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.update(request["env"])
    module, _, function = request["target"].partition(":")
    code = 0
    try:
        value = getattr(importlib.import_module(module), function)(**request["kwargs"])
        outcome: dict[str, Any] = {"value": value}
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        outcome = {"error": repr(error), "type": type(error).__name__}
    except BaseException as error:
        traceback.print_exc()
        code = 1
        outcome = {"error": str(error), "type": type(error).__name__}
    with open(f"{folder}/{name}.tmp", "wb") as file:
        pickle.dump(outcome, file)
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
