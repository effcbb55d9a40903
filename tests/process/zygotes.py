"""What agents do with their zygote in test_zygote. Each is a rank of the fork server."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import Std

from resilience.launcher.worker import worker_main
from resilience.launcher.worker import zygote as zygotes
from resilience.launcher.worker.workers import start
from resilience.launcher.worker.zygote import Zygote
from resilience.system.processes import become_subreaper
from tests.process.warming import specification, told
from tests.support.signs import hold, show
from tests.support.stops import await_stops

zygotes.ANSWER_LIMIT = 60.0  # also on a busy host
# Each worker that runs leaves a file of its own; then it does what it is told.
WORKER = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / f"ran.{os.environ['RANK']}.{os.getpid()}").touch()
while len(sys.argv) > 1 and not (here / sys.argv[1]).exists():
    time.sleep(0.005)
sys.stdout.write(f"rank {os.environ['RANK']}\\n")  # in one go: print writes the line and its end apart
sys.exit(10 + int(os.environ["RANK"]))
"""


def script() -> str:
    path = Path("worker.py").absolute()
    path.write_text(WORKER)
    return str(path)


def ran() -> list[str]:
    """The ranks that have run, one entry a process."""
    return sorted(path.name.split(".")[1] for path in Path().glob("ran.*"))


def lose_zygote() -> dict[str, Any]:
    """Workers run, the zygote is killed, the workers go on; then the next are started."""
    become_subreaper()
    zygote = Zygote.start()
    workers = start(specification([script(), "go"], zygote, Path("first"), 2))
    os.kill(zygote.pid, signal.SIGKILL)
    os.waitid(os.P_PID, zygote.pid, os.WEXITED | os.WNOWAIT)
    Path("go").touch()
    answers = [told(workers), told(start(specification([script()], zygote, Path("second"), 2)))]
    zygote.close()
    return {"answers": answers, "ran": ran()}


def silence_zygote() -> dict[str, Any]:
    """The zygote does not carry out its first order until it may; workers are started before that, twice, and then."""
    fork_all, may_fork = zygotes._fork_all, Path("may_fork").absolute()

    def wait(*order: Any) -> bytes:
        while not may_fork.exists():
            time.sleep(0.01)
        return fork_all(*order)

    become_subreaper()
    zygotes._fork_all = wait
    zygote = Zygote.start()
    zygotes.ANSWER_LIMIT = 0.3
    answers = [told(start(specification([script()], zygote, Path("first"), 2)))]
    zygotes.ANSWER_LIMIT = 3600.0  # the next start does not wait
    answers.append(told(start(specification([script()], zygote, Path("second"), 2))))
    may_fork.touch()
    poll = select.poll()
    poll.register(zygote._line, select.POLLIN)
    poll.poll()  # for the late answer
    answers.append(told(start(specification([script()], zygote, Path("third"), 2))))
    zygote.close()
    return {"answers": answers, "ran": ran()}


def stop_zygote(when: str) -> dict[str, Any]:
    """The zygote is stopped before it gets its order, or when it has got it."""
    fork_all = zygotes._fork_all

    def stop(*order: Any) -> bytes:
        os.kill(os.getpid(), signal.SIGSTOP)
        return fork_all(*order)

    become_subreaper()
    if when == "while":
        zygotes._fork_all = stop
    zygotes.ANSWER_LIMIT = 60.0
    zygote = Zygote.start()
    if when == "before":
        os.kill(zygote.pid, signal.SIGSTOP)
        await_stops([zygote.pid])
    answer = told(start(specification([script()], zygote, Path("workers"), 2)))
    zygote.close()
    return {"answers": [answer], "ran": ran()}


def lose_forking_zygote() -> dict[str, Any]:
    """The zygote is killed when its workers wait at the gate, before it answers."""
    fork_all = zygotes._fork_all

    def die(*order: Any) -> bytes:
        fork_all(*order)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    become_subreaper()
    zygotes._fork_all = die
    zygotes.ANSWER_LIMIT = 3600.0
    zygote = Zygote.start()
    answer = told(start(specification([script()], zygote, Path("workers"), 2)))
    return {"answers": [answer], "ran": ran()}


def stop_at_once() -> dict[str, Any]:
    """Workers get SIGTERM as soon as the agent knows their pids."""
    become_subreaper()
    zygote = Zygote.start()
    order = zygotes.Order(("-c", "import time; time.sleep(60)"), dict(os.environ), 1, 2)
    ends = []
    for _ in range(8):
        (worker,) = zygote.spawn([order])
        os.killpg(worker.pid, signal.SIGTERM)
        try:
            ends.append(worker.wait(10))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            ends.append(worker.wait(10))
    zygote.close()
    return {"ends": ends}


def fail_to_fork(descriptors: int) -> dict[str, Any]:
    """The host has no room for the last worker's process; for the next workers it has."""
    fork, agent, zygotes.MOST_FDS = os.fork, os.getpid(), descriptors
    become_subreaper()
    made, room = [0], Path("room").absolute()

    def failing() -> int:
        made[0] += 1
        # zygote, in between, worker 0, worker 1, worker 2
        if made[0] == 5 and os.getpid() != agent and not room.exists():
            raise BlockingIOError(errno.EAGAIN, "no room")
        return fork()

    os.fork = failing
    zygote = Zygote.start()
    os.fork = fork
    answers = [told(start(specification([script()], zygote, Path("first"), 3)))]
    room.touch()
    answers.append(told(start(specification([script()], zygote, Path("second"), 3))))
    zygote.close()
    return {"answers": answers, "ran": ran()}


def fail_to_preload() -> dict[str, Any]:
    """The host has no room for a process that imports modules; later it has."""
    fork, agent, room = os.fork, os.getpid(), Path("room").absolute()
    become_subreaper()

    def failing() -> int:
        if os.getpid() != agent and not room.exists():
            raise BlockingIOError(errno.EAGAIN, "no room")
        return fork()

    os.fork = failing
    zygote = Zygote.start()
    os.fork = fork
    zygote.preload(["colorsys"])
    assert not zygote.is_preloading
    left_out = [list(outcome.refused) for outcome in zygote.succeed(0.0)]
    room.touch()
    answer = told(start(specification([script()], zygote, Path("workers"))))
    zygote.preload(["colorsys"])
    outcomes = [list(outcome.modules) for outcome in zygote.succeed(60.0)]
    zygote.close()
    return {"answers": [answer], "left_out": left_out, "outcomes": outcomes}


def without_memory() -> dict[str, Any]:
    """The agent has no descriptor or memory left for the first workers' order; for the second ones' it has."""

    def fail(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    become_subreaper()
    zygote = Zygote.start()
    create, os.memfd_create = os.memfd_create, fail
    first = told(start(specification([script()], zygote, Path("first"))))
    os.memfd_create = create
    second = told(start(specification([script()], zygote, Path("second"))))
    return {"answers": [first, second], "ran": ran()}


def in_several_orders() -> dict[str, Any]:
    """More workers than a message has room for descriptors."""
    zygotes.MOST_FDS = 7
    become_subreaper()
    zygote = Zygote.start()
    answer = told(start(specification([script()], zygote, Path("workers"), 5)))
    zygote.close()
    return {"answers": [answer], "ran": ran()}


def be_killed() -> None:
    """An agent with workers, which holds until it is killed."""
    become_subreaper()
    zygote = Zygote.start()
    workers = start(specification([script(), "go"], zygote, Path("workers"), 2))
    Path("zygote").write_text(str(zygote.pid))
    Path("pids").write_text(" ".join(map(str, workers.pids().values())))
    show("ready", 0)
    hold("never", 0)


def with_a_thread() -> dict[str, Any]:
    """A thread runs in the agent, so there is no fork."""
    become_subreaper()
    let_go = threading.Event()
    thread = threading.Thread(target=let_go.wait, name="mine")
    thread.start()
    zygote = Zygote.start()
    answer = told(start(specification([script()], zygote, Path("workers"))))
    let_go.set()
    thread.join()
    zygote.close()
    return {"answers": [answer], "ran": ran(), "zygote": zygote.pid}


def start_cold(why: str) -> dict[str, Any]:
    """A program that cannot be forked."""
    become_subreaper()
    path, fields = script(), dict[str, Any]()
    arguments, environment = [path], {}
    if why == "program":
        fields["entrypoint"] = "/bin/echo"
    if why == "variable":
        environment["PYTHONOPTIMIZE"] = "1"
    if why == "shadow":
        Path("numpy.py").write_text("")
    if why == "option":
        sys.orig_argv = [sys.orig_argv[0], "-O", *sys.orig_argv[1:]]
    if why == "folder":
        Path("program").mkdir()
        Path(path).rename("program/__main__.py")
        arguments = ["program"]
    zygote = Zygote.start()
    answer = told(start(specification(arguments, zygote, Path("workers"), environment=environment, **fields)))
    zygote.close()
    return {"answers": [answer], "ran": ran()}


def write_to(redirects: str) -> dict[str, Any]:
    """Workers whose output goes to the agent's own, to files, or to both."""
    become_subreaper()
    zygote = Zygote.start()
    spec = specification([script()], zygote, Path("workers"), 2, redirects=Std[redirects], log_line_prefixes=None)
    answer = told(start(spec))
    zygote.close()
    return {"answers": [answer], "ran": ran()}


MODULES = {
    "harmless": "import os\nimported_by = os.getpid()",
    "with_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "with_a_file": "import os\nfile = os.open(os.devnull, os.O_RDONLY)",
    "with_a_folder": "import atexit, shutil, tempfile\nmade = tempfile.mkdtemp()\natexit.register(shutil.rmtree, made)",
    "with_a_cache": "import tempfile\nfolder = tempfile.TemporaryDirectory()",
    "with_a_trial": "import tempfile\nwith tempfile.TemporaryDirectory():\n    pass",
    "with_a_child": "import subprocess\nprocess = subprocess.Popen(['sleep', '60'])",
    "with_a_handler": "import signal\nsignal.signal(signal.SIGUSR2, print)",
    "that_fails": "raise RuntimeError('on purpose')",
    "that_dies": "import os\nos.abort()",
    "that_stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "that_waits": "import threading\nthreading.Event().wait()",
    "with_long_names": "import sys\nfor number in range(1000):\n    sys.modules[f'{number:0100}'] = sys",
}
IMPORTING = """
import os, sys
import harmless
sys.stdout.write(f"{harmless.imported_by == os.getpid()}\\n")
"""


def preload(modules: list[str], learned: tuple[str, ...] = (), import_limit: float | None = None) -> dict[str, Any]:
    """A successor imports modules, and takes over; then a worker imports one of them too."""
    zygotes.IMPORT_LIMIT = zygotes.IMPORT_LIMIT if import_limit is None else import_limit
    zygotes.KILL_LIMIT = 60.0
    become_subreaper()
    folder = Path("modules").absolute()
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    worker_main.PATHS.insert(0, str(folder))
    script = Path("importing.py").absolute()
    script.write_text(IMPORTING)
    zygote = Zygote.start()
    first = zygote.pid
    zygote.preload(modules, learned)
    outcomes = zygote.succeed(60.0)
    answer = told(start(specification([str(script)], zygote, Path("workers"))))
    second = zygote.pid
    zygote.close()
    return {
        "answers": [answer],
        "outcomes": [[*outcome.modules, "refused:", *outcome.refused, outcome.why] for outcome in outcomes],
        "has_changed": second != first,
        "is_left": [pid for pid in (first, second) if Path(f"/proc/{pid}").exists()],
    }
