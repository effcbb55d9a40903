"""The processes of the demonstration: forked ranks, the faults injected into them, and their progress.

The parent imports torch and has a single thread; each rank is a fork of it. A planned fault hits once, in the process
that has its rank at that step. The parent is a child subreaper: it adopts orphans of its ranks, so it knows when the
last process has ended. Ranks write their progress to the `DemoBoard`."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
from torch import Tensor

from resilience.demo.board import DemoActivity, DemoBoard
from resilience.demo.faults import HANG_LIMIT, DemoFault
from resilience.demo.train import Task, Trained, train
from resilience.facts import encoding
from resilience.inprocess.compose import Compose
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.initialize import Initialize, RetryController
from resilience.inprocess.rank_filter import MaxActiveWorldSize
from resilience.inprocess.state import State
from resilience.inprocess.wrap import Wrapper
from resilience.system.exit_signals import ENDING_SIGNALS, signals_deferred
from resilience.system.listening_sockets import listen_beside_free_ports

SOFT_TIMEOUT = timedelta(seconds=HANG_LIMIT)
STEP_LIMIT = 5 * HANG_LIMIT  # seconds without a step; a loop without progress still sends signs of life
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class DemoPlan(msgspec.Struct, frozen=True):
    """One run. spares: processes beyond `ranks`. folder: for results and output of the ranks."""

    ranks: int
    spares: int
    task: Task
    faults: tuple[DemoFault, ...]
    folder: str
    run_dir: str
    job_id: str
    wrapped: bool


# -- in a rank ----------------------------------------------------------------------------------


class Disturber:
    """The training observer of one process: shows its progress and injects the planned faults."""

    def __init__(self, board: DemoBoard, process: int, faults: tuple[DemoFault, ...]) -> None:
        self._board = board
        self._process = process
        self._faults = faults

    def begins(self, step: int, rank: int) -> None:
        self._board.progress(self._process, step)
        iteration = self._board.row(self._process).iteration
        for number, fault in enumerate(self._faults):
            strike = self._board.struck(number)
            if strike is None and (fault.step, fault.rank) == (step, rank):
                self._board.strike(number, self._process)
                _strike(fault)
            if strike is not None and strike.iteration < iteration:
                self._board.came_back(number, self._process, step)

    def finished(self, step: int, rank: int, loss: float) -> None:
        self._board.progress(self._process, step + 1, loss)


def _strike(fault: DemoFault) -> None:
    match fault.kind:
        case "exception":
            raise ValueError(f"planned fault: step {fault.step} of rank {fault.rank} has no data")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()  # like a data loader whose server does not answer


class ShowSeat(Initialize):
    """Writes the rank of the process to the board when an iteration begins."""

    def __init__(self, board: DemoBoard, process: int) -> None:
        self._board = board
        self._process = process

    def __call__(self, state: State) -> State:
        doing = DemoActivity.STARTING if state.rank < state.active_world_size else DemoActivity.WAITING
        self._board.seat(self._process, doing, state.rank, state.iteration)
        return state


class ShowRestart(Finalize):
    """Shows on the board that the rank is restarting."""

    def __init__(self, board: DemoBoard, process: int) -> None:
        self._board = board
        self._process = process

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        self._board.do(self._process, DemoActivity.RESTARTING)
        return state, exc


def _wrapper(plan: DemoPlan, board: DemoBoard, process: int) -> Wrapper:
    return Wrapper(
        initialize=Compose(RetryController(max_iterations=len(plan.faults) + 10), ShowSeat(board, process)),
        finalize=ShowRestart(board, process),
        rank_filter=MaxActiveWorldSize(plan.ranks),
        monitor_thread_interval=timedelta(seconds=0.5),
        monitor_process_interval=timedelta(seconds=0.5),
        progress_watchdog_interval=timedelta(seconds=0.5),
        soft_timeout=SOFT_TIMEOUT,
        hard_timeout=3 * SOFT_TIMEOUT,
        heartbeat_timeout=4 * SOFT_TIMEOUT,
        barrier_timeout=10 * SOFT_TIMEOUT,
        completion_timeout=10 * SOFT_TIMEOUT,
        termination_grace_time=timedelta(seconds=1),
        monitor_process_logfile=str(Path(plan.folder).absolute() / "monitor-{rank}.log"),
    )


def _take_part(plan: DemoPlan, board: DemoBoard, process: int, text: Tensor) -> None:
    function: Callable[..., Trained | None] = train
    if plan.wrapped:
        function = _wrapper(plan, board, process)(train)
    else:
        board.seat(process, DemoActivity.STARTING, process, 0)
    trained = function(plan.task, text, Disturber(board, process, plan.faults))
    board.do(process, DemoActivity.FINISHED)
    if trained is not None:
        _result_path(plan, process).write_bytes(encoding.to_json(trained))


def _result_path(plan: DemoPlan, process: int) -> Path:
    return Path(plan.folder) / f"result-{process}.json"


# -- in the parent ------------------------------------------------------------------------------


class Team:
    """The processes of one run. Leaving the context ends all of them."""

    def __init__(self, plan: DemoPlan, text: Tensor) -> None:
        self.plan = plan
        self.size = plan.ranks + plan.spares
        self.board = DemoBoard(self.size, len(plan.faults))
        self.pids: list[int] = []
        self.ended: dict[int, int] = {}  # process -> exit code, or the negative signal number
        self.left_behind = 0  # processes that still ran after all should have ended
        self._text = text

    def __enter__(self) -> Team:
        Path(self.plan.folder).mkdir(parents=True, exist_ok=True)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with listen_beside_free_ports("127.0.0.1") as listener:
            port = listener.getsockname()[1]  # clients get the port after rank 0's monitor listens on it
        gc.freeze()  # else the first collection in a rank copies the pages that it shares with the others
        sys.stdout.flush()
        with signals_deferred():
            for process in range(self.size):
                self.pids.append(self._fork(process, port))
        return self

    def _fork(self, process: int, port: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_rank(process, port, parent)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _become_rank(self, process: int, port: int, parent: int) -> NoReturn:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        os.setpgid(0, 0)  # Ctrl-C goes to the parent, which ends the ranks
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        self._redirect(process)
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK"):
            os.environ.pop(name, None)
        os.environ.update(
            RANK=str(process),
            WORLD_SIZE=str(self.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RESILIENCE_RUN_DIR=self.plan.run_dir,
            RESILIENCE_JOB_ID=self.plan.job_id,
            RESILIENCE_RUN_FOLDER=os.path.join(self.plan.run_dir, self.plan.job_id),
            RESILIENCE_STEP_TIMEOUT=f"{STEP_LIMIT:g}",
            # torch's store looks up the name of ::ffff:127.0.0.1, which no hosts file contains. If the name server
            # does not answer, each lookup takes glibc's default of 5 s, several times.
            RES_OPTIONS="timeout:1 attempts:1",
        )
        _take_part(self.plan, self.board, process, self._text)
        sys.stdout.flush()
        os._exit(0)

    def _redirect(self, process: int) -> None:
        output = os.open(self.output_of(process), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)

    def output_of(self, process: int) -> Path:
        """Return the path of a rank's output, which ends with its last traceback."""
        return Path(self.plan.folder) / f"output-{process}.log"

    def reap(self) -> bool:
        """Record which ranks have ended. Return True if all have."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.pids:
                self.ended[self.pids.index(pid)] = os.waitstatus_to_exitcode(status)
        return len(self.ended) == self.size

    def results(self) -> dict[int, Trained]:
        """Return the result of each process that trained to the end."""
        paths = {process: _result_path(self.plan, process) for process in range(self.size)}
        return {
            process: encoding.from_json(path.read_bytes(), Trained) for process, path in paths.items() if path.is_file()
        }

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with signals_deferred():
            for process, pid in enumerate(self.pids):
                if process not in self.ended:
                    os.kill(pid, signal.SIGKILL)  # an unreaped child: its pid cannot have been reused
            # Monitors still write their last records; they become our children after their rank has ended.
            descendants = self._await_children(10.0 if kind is None else 2.0)
            self.left_behind = len(descendants)
            for orphan in descendants:
                orphan.kill()
            self._await_children(5.0)

    def _await_children(self, limit: float) -> list[psutil.Process]:
        """Wait until no descendant is left. Return those that still run after `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            self.reap()
            descendants = psutil.Process().children(recursive=True)
            if not descendants or time.monotonic() > deadline:
                return descendants
            time.sleep(0.02)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
