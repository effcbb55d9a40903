"""A process that has imported torch once and forks ranks from then on.

Starting eight ranks costs 22 s by spawn and under 1 s by fork. The server has a single thread (OpenBLAS is
held to one), so that what it forks is clean. It reads a JSON request a line from stdin and answers with a
JSON line for each process that began or ended. Its arguments are modules that it imports too. It adopts
what a rank leaves behind, its monitor above all, so that nobody's end is lost. It ends when its stdin
closes, and its ranks end with it."""

from __future__ import annotations

import ctypes
import gc
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
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    import torch
    import torch.distributed

    import resilience.inprocess._runtime.call
    import resilience.inprocess._runtime.session
    import resilience.inprocess.wrap  # noqa: F401

    torch.set_num_threads(1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # As the launcher's zygote does: else the first collection in a rank copies 70 MiB of shared pages.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads after its imports, expected 1: no safe fork")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session, which closes stdin
    answer({"ready": os.getpid()})
    serve(read)


def serve(wakeups: int) -> None:
    buffer = b""
    while True:
        ready, _, _ = select.select([0, wakeups], [], [])
        if wakeups in ready:
            os.read(wakeups, 4096)
            reap()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                start(json.loads(line))


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


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
    server = os.getpid()
    pid = os.fork()
    if pid:
        answer({"started": pid, "key": request["key"]})
        return
    code = 70
    try:
        code = run(request, server)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(request: dict[str, Any], server: int) -> int:
    """Be one rank: own process group, own output, gone when the server goes."""
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return 70  # it went before we could ask to go with it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
    name = f"{request['folder']}/{request['key']}"
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(f"{name}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(request["folder"])
    os.environ.update(request["env"])
    code, outcome = call(request["target"], request["kwargs"])
    with open(f"{name}.tmp", "wb") as file:
        pickle.dump(outcome, file)
    os.rename(f"{name}.tmp", f"{name}.result")  # whole, or not there
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def call(target: str, kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer the exit status and what to tell of the call, as the interpreter would end it."""
    module, _, function = target.partition(":")
    try:
        return 0, {"value": getattr(importlib.import_module(module), function)(**kwargs)}
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code, {"error": repr(error), "type": type(error).__name__}
    except BaseException as error:
        traceback.print_exc()
        return 1, {"error": str(error), "type": type(error).__name__}


if __name__ == "__main__":
    main()
