"""A real Slurm on one host: munge, a controller and several node daemons, all below one folder.

Nodes are daemons with names and ports of their own; they share host, processes and network."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
READY = 30.0  # seconds


def missing() -> list[str]:
    """Return the programs that are not installed here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Slurm:
    """A cluster that runs."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = nodes
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("munge", "state", "log"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = self.folder / "munge"
        self._run(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
        )
        self._await(lambda: (munge / "socket").exists(), "munge")
        (self.folder / "slurm.conf").write_text(self._configuration())
        self._run("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for number in range(1, self.nodes + 1):
            self._run("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", f"n{number}")
        self._await(lambda: self.ask("sinfo", "-h", "-o", "%D %T") == f"{self.nodes} idle", "nodes")

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> int:
        """Queue a job; answers its number."""
        said = subprocess.run(
            ["sbatch", "--parsable", *arguments], env={**self.env, **(env or {})}, check=True, capture_output=True
        )
        return int(said.stdout)

    def state(self, job: int) -> str:
        """Return a job's state, such as RUNNING."""
        words = dict(
            word.split("=", 1) for word in self.ask("scontrol", "show", "job", str(job)).split() if "=" in word
        )
        return words.get("JobState", "")

    def exit_status(self, job: int) -> int:
        words = dict(
            word.split("=", 1) for word in self.ask("scontrol", "show", "job", str(job)).split() if "=" in word
        )
        return int(words["ExitCode"].split(":")[0])

    def await_state(self, job: int, *states: str, limit: float = 120.0) -> str:
        deadline = time.monotonic() + limit
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}, after {limit:g} s"
            time.sleep(0.1)
        return state

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, check=False, capture_output=True, text=True).stdout.strip()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, *command: str) -> None:
        log = self.folder / "log" / f"{command[0]}.{len(self._processes)}"
        with log.open("wb") as file:
            self._processes.append(subprocess.Popen(command, env=self.env, stdout=file, stderr=file))

    def _await(self, is_there: object, what: str) -> None:
        deadline = time.monotonic() + READY
        while not is_there():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{what} not ready after {READY:g} s; see {self.folder / 'log'}"
            time.sleep(0.05)

    def _configuration(self) -> str:
        host = socket.gethostname().split(".")[0]
        ports = iter(range(_free_ports(self.nodes + 1), 65536))
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={next(ports)}",
            f"AuthInfo=socket={self.folder / 'munge' / 'socket'}",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={self.folder / 'state'}",
            f"SlurmdSpoolDir={self.folder}/spool.%n",
            f"SlurmctldPidFile={self.folder / 'ctld.pid'}",
            f"SlurmdPidFile={self.folder}/slurmd.%n.pid",
            "ProctrackType=proctrack/pgid",  # linuxproc takes orphans of one node for another's: they share a host
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "KillWait=5",
            "JobRequeue=1",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
        ]
        lines += [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={next(ports)} CPUs=4 RealMemory=1000"
            for number in range(1, self.nodes + 1)
        ]
        lines.append(f"PartitionName=main Nodes=n[1-{self.nodes}] Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"


def _free_ports(count: int) -> int:
    """Return the first of some ports that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = int(probe.getsockname()[1])
    return first if first + count < 65536 else 20000


@contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Slurm]:
    """Run a cluster for the body."""
    slurm = Slurm(folder, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
