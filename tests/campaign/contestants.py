"""How is a contestant started, and where is its verdict?  One small adapter each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tests.campaign.cases import GROUP_TIMEOUT, LIMIT, STEPS, USER_PORT, Case

PORTS = 21000
PEERS = "CAMPAIGN_PEERS"  # variable of the campaign: a folder in which other contestants are installed


@dataclass(frozen=True)
class Verdict:
    """What a contestant says of a case. rank: None if it names none. blamed: all ranks that it names, with its
    confidence, in any incident. is_unknown: it says that it does not know. detected_ns: Unix time."""

    rank: int | None = None
    what: str = ""
    confidence: float = 0.0
    blamed: tuple[tuple[int, float], ...] = ()
    is_unknown: bool = True
    incidents: int = 0
    detected_ns: int | None = None


class Contestant(Protocol):
    """What every contestant has: a name, a command for a case, and its verdict once the job is over."""

    name: str
    gives_verdicts: bool
    states_confidence: bool

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        """Return the processes that make up the job: arguments and variables of each."""
        ...

    def verdict(self, folder: Path) -> Verdict:
        """Return what the contestant says. It learns only where the job ran, nothing of the truth."""
        ...


def limit_s(case: Case) -> int:
    """Return the seconds of silence after which a rank hangs: more where many processes share the processors."""
    return (6 if case.world <= 4 else 12) * case.patience


def _train(case: Case, folder: Path, mode: str) -> list[str]:
    return ["-m", "tests.campaign.train", str(folder), str(STEPS), mode, case.kind]


class Ours:
    """This package, in the mode of the case."""

    name = "ours"
    gives_verdicts = True
    states_confidence = True

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        shared = {
            "RESILIENCE_RUN_DIR": str(folder / "runs"),
            "RESILIENCE_JOB_ID": "job",
            "RESILIENCE_STEP_TIMEOUT": str(limit_s(case)),
            "RESILIENCE_HANG_FIRST_LIMIT": str(limit_s(case)),  # in the first steps
            LIMIT: str(limit_s(case)),
        }
        if case.mode == "wrapper":
            port = str(PORTS + case.number % 5000)
            ranks = []
            for rank in range(case.world):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world)}
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                ranks.append(([sys.executable, *_train(case, folder, "wrapper")], shared | place | address))
            return ranks
        options = ["--standalone", f"--nproc-per-node={case.world}", "--max-restarts=3", "--ft-hang-first-limit=600"]
        if case.mode == "launcher":
            options.append(f"--ft-rank-heartbeat-timeout={limit_s(case)}")
        else:
            options.append("--ft-restart-policy=min-healthy")
        program = str(Path(sys.executable).with_name("resilience"))
        return [([program, "run", *options, *_train(case, folder, case.mode)], shared)]

    def verdict(self, folder: Path) -> Verdict:
        runs = sorted((folder / "runs").glob("job*"))
        if not runs:
            return Verdict()
        program = str(Path(sys.executable).with_name("resilience"))
        command = [program, "report", str(runs[0]), "--json"]
        done = subprocess.run(command, env=environment(folder, {}), capture_output=True, timeout=600, text=True)
        if done.returncode != 0:
            return Verdict(what=f"no report: {done.stderr[-200:]}")
        incidents: list[dict[str, Any]] = json.loads(done.stdout)["incidents"]
        if not incidents:
            return Verdict()
        # A lost monitor interrupts no rank. It is an incident of its own, with a Wrapper only if nothing else breaks in
        # that iteration, and no answer to what broke elsewhere.
        chief = next((each for each in incidents if each["verdict"]["what"] != "monitor_lost"), incidents[0])
        told, detected = chief["verdict"], chief.get("detected_wall_ns")
        blamed = tuple(
            (int(culprit["rank"]), float(culprit["confidence"]))
            for each in incidents
            for culprit in each["verdict"].get("culprits", [])
        )
        culprits = told.get("culprits", [])
        named = next(
            (each for each in culprits if each["rank"] == told.get("first")), culprits[0] if culprits else None
        )
        if named is None or told["what"] == "unknown":
            return Verdict(None, told["what"], 0.0, blamed, True, len(incidents), detected)
        return Verdict(named["rank"], named["what"], named["confidence"], blamed, False, len(incidents), detected)


class Torchrun:
    """torchrun of the installed torch, with its defaults. It says which rank failed first, and with what exit code, and
    not how sure it is: the confidence of 1 is this adapter's."""

    name = "torchrun"
    gives_verdicts = True
    states_confidence = False
    variables: ClassVar[dict[str, str]] = {}
    _ROOT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)
    _STAMP = re.compile(r"^E(\d{4}) (\d\d:\d\d:\d\d)\.(\d{6}) .*failed \(exitcode", re.M)
    _CLASSES: ClassVar = {"-9": "killed", "-15": "told_to_stop", "-11": "crashed", "-6": "crashed", "1": "exception"}

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        options = ["--standalone", f"--nproc-per-node={case.world}", "--max-restarts=3"]
        return [
            (
                [sys.executable, "-m", "torch.distributed.run", *options, *_train(case, folder, "plain")],
                self.variables,
            )
        ]

    def verdict(self, folder: Path) -> Verdict:
        """Its summary stands on stderr when the job fails for good, and a line for each failed worker before."""
        text = (folder / "output").read_text(errors="replace")
        found, at = self._ROOT.search(text), self._noticed_ns(folder, text)
        if found is not None:
            rank, code = int(found[1]), found[2]
        else:
            line = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
            if line is None:
                return Verdict()
            rank, code = int(line[2]), line[1]
        return Verdict(rank, self._CLASSES.get(code, "exited"), 1.0, ((rank, 1.0),), False, 1, at)

    def _noticed_ns(self, folder: Path, text: str) -> int | None:
        """Return when its first line about a failed worker was written, by the stamp that it has: local time."""
        line = self._STAMP.search(text)
        if line is None:
            return None
        written = time.localtime((folder / "output").stat().st_mtime)
        moment = time.strptime(f"{written.tm_year}{line[1]} {line[2]}", "%Y%m%d %H:%M:%S")
        return int(time.mktime(moment)) * 10**9 + int(line[3]) * 1000


class TunedTorchrun(Torchrun):
    """torchrun with a store of its own for each restart, and a limit for collectives like the limits of ours."""

    name = "torchrun, tuned"
    variables: ClassVar = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", GROUP_TIMEOUT: "6"}


class PeerWrapper:
    """nvidia-resiliency-ext 0.4.1, in process, found in the folder PEERS, with our limits. It gives no verdict."""

    name = "nvrx, in process, limits set"
    gives_verdicts = False
    states_confidence = False
    variables: ClassVar[dict[str, str]] = {}

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        port = PORTS + 2 * (case.number % 2000)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), USER_PORT: str(port + 1)}
        common |= {"WORLD_SIZE": str(case.world), LIMIT: str(limit_s(case)), **self.variables}
        command = [sys.executable, *_train(case, folder, "peer-wrapper")]
        return [(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(case.world)]

    def verdict(self, folder: Path) -> Verdict:
        return Verdict()


class TunedPeerWrapper(PeerWrapper):
    """A rank in a collective is freed by gloo's timeout alone."""

    name = "nvrx, in process, tuned"
    variables: ClassVar = {GROUP_TIMEOUT: "6"}


class PeerLauncher(Torchrun):
    """ft_launcher of nvidia-resiliency-ext 0.4.1: torchrun's summary, and limits for heartbeats like those of ours."""

    name = "nvrx, ft_launcher, limits set"
    variables: ClassVar = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        limit = limit_s(case)
        options = ["--standalone", f"--nproc-per-node={case.world}", "--max-restarts=3"]
        options += [f"--ft-rank-heartbeat-timeout={limit}", "--ft-workload-check-interval=1"]
        options += ["--ft-enable-nic-monitor=False"]
        launcher = "nvidia_resiliency_ext.fault_tolerance.launcher"
        arguments = _train(case, folder, "peer-launcher")
        return [([sys.executable, "-m", launcher, *options, *arguments], self.variables)]


class TunedPeerLauncher(PeerLauncher):
    """The same, and ranks in a collective are freed by gloo's timeout, before a limit for heartbeats ends them."""

    name = "nvrx, ft_launcher, tuned"
    variables: ClassVar = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", GROUP_TIMEOUT: "4"}


class Torchft:
    """torchft 0.2.0: every rank is a replica group, which the adapter starts again. It gives no verdict."""

    name = "torchft"
    gives_verdicts = False
    states_confidence = False
    variables: ClassVar[dict[str, str]] = {}
    join_timeout_ms = 10_000  # of its README

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        options = [f"--nproc-per-node={case.world}", f"--join-timeout-ms={self.join_timeout_ms}"]
        command = [sys.executable, "-m", "tests.campaign.replicas", str(folder), str(STEPS), *options]
        return [(command, self.variables)]

    def verdict(self, folder: Path) -> Verdict:
        return Verdict()


class TunedTorchft(Torchft):
    """Limits like those of ours, instead of 60 s."""

    name = "torchft, tuned"
    variables: ClassVar = {"TORCHFT_TIMEOUT_SEC": "6", "TORCHFT_QUORUM_TIMEOUT_SEC": "20"}
    join_timeout_ms = 1000


EVERYBODY = (
    *(Ours(), Torchrun(), TunedTorchrun(), PeerWrapper(), TunedPeerWrapper(), PeerLauncher(), TunedPeerLauncher()),
    *(Torchft(), TunedTorchft()),
)
CONTESTANTS: dict[str, Contestant] = {each.name: each for each in EVERYBODY}


def environment(folder: Path, more: dict[str, str]) -> dict[str, str]:
    """Return what each process of a job gets: one thread for arithmetic, and the repository on the path."""
    root = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get(PEERS)])])
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "TORCHELASTIC_"))},
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }
