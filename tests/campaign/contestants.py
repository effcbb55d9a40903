"""How is a contestant started, and where is its verdict?  One small adapter each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tests.campaign.cases import STEPS, Case

HEARTBEAT_S = 6  # of a worker that the launcher watches
PORTS = 21000


@dataclass(frozen=True)
class Verdict:
    """What a contestant says of a case. rank: None if it names none. blamed: all ranks that it names, with its
    confidence. is_unknown: it says that it does not know."""

    rank: int | None = None
    what: str = ""
    confidence: float = 0.0
    blamed: tuple[tuple[int, float], ...] = ()
    is_unknown: bool = True
    incidents: int = 0


class Contestant(Protocol):
    """What every contestant has: a name, a command for a case, and its verdict once the job is over."""

    name: str
    gives_verdicts: bool

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        """Return the processes that make up the job: arguments and variables of each."""
        ...

    def verdict(self, case: Case, folder: Path) -> Verdict: ...


def _train(folder: Path, mode: str) -> list[str]:
    return ["-m", "tests.campaign.train", str(folder), str(STEPS), mode]


class Ours:
    """This package, in the mode of the case."""

    name = "ours"
    gives_verdicts = True

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        shared = {
            "RESILIENCE_RUN_DIR": str(folder / "runs"),
            "RESILIENCE_JOB_ID": "job",
            "RESILIENCE_STEP_TIMEOUT": "6",
        }
        if case.mode == "wrapper":
            port = str(PORTS + case.number % 5000)
            ranks = []
            for rank in range(case.world):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world)}
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                ranks.append(([sys.executable, *_train(folder, "wrapper")], shared | place | address))
            return ranks
        options = ["--standalone", f"--nproc-per-node={case.world}", "--max-restarts=3"]
        if case.mode == "launcher":
            options.append(f"--ft-rank-heartbeat-timeout={HEARTBEAT_S}")
        else:
            options.append("--ft-restart-policy=min-healthy")
        program = str(Path(sys.executable).with_name("resilience"))
        return [([program, "run", *options, *_train(folder, case.mode)], shared)]

    def verdict(self, case: Case, folder: Path) -> Verdict:
        runs = sorted((folder / "runs").glob("job*"))
        if not runs:
            return Verdict()
        program = str(Path(sys.executable).with_name("resilience"))
        done = subprocess.run([program, "report", str(runs[0]), "--json"], capture_output=True, timeout=120, text=True)
        incidents: list[dict[str, Any]] = json.loads(done.stdout)["incidents"] if done.returncode == 0 else []
        if not incidents:
            return Verdict()
        told = incidents[0]["verdict"]
        culprits = told.get("culprits", [])
        blamed = tuple((int(each["rank"]), float(each["confidence"])) for each in culprits)
        chief = next(
            (each for each in culprits if each["rank"] == told.get("first")), culprits[0] if culprits else None
        )
        if chief is None or told["what"] == "unknown":
            return Verdict(None, told["what"], 0.0, blamed, True, len(incidents))
        return Verdict(chief["rank"], chief["what"], chief["confidence"], blamed, False, len(incidents))


class Torchrun:
    """torchrun of the installed torch, with its defaults. It says which rank failed first, and with what exit code."""

    name = "torchrun"
    gives_verdicts = True
    variables: ClassVar[dict[str, str]] = {}
    _ROOT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)
    _CLASSES: ClassVar = {"-9": "killed", "-15": "told_to_stop", "-11": "crashed", "-6": "crashed", "1": "exception"}

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        options = ["--standalone", f"--nproc-per-node={case.world}", "--max-restarts=3"]
        return [([sys.executable, "-m", "torch.distributed.run", *options, *_train(folder, "plain")], self.variables)]

    def verdict(self, case: Case, folder: Path) -> Verdict:
        """Its summary stands on stderr when the job fails for good, and a line for each failed worker before."""
        text = (folder / "output").read_text(errors="replace")
        found = self._ROOT.search(text)
        if found is not None:
            rank, code = int(found[1]), found[2]
        else:
            line = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
            if line is None:
                return Verdict()
            rank, code = int(line[2]), line[1]
        return Verdict(rank, self._CLASSES.get(code, "exited"), 1.0, ((rank, 1.0),), False, 1)


class TunedTorchrun(Torchrun):
    """torchrun with a store of its own for each restart, and a limit for collectives like the limits of ours."""

    name = "torchrun, tuned"
    variables: ClassVar = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CAMPAIGN_GROUP_TIMEOUT": "6"}


CONTESTANTS: dict[str, Contestant] = {each.name: each for each in (Ours(), Torchrun(), TunedTorchrun())}


def environment(folder: Path, more: dict[str, str]) -> dict[str, str]:
    """Return what each process of a job gets: one thread for arithmetic, and the repository on the path."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "TORCHELASTIC_"))},
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }
