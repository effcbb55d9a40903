"""`resilience status`: fits the terminal at any size of the world, and tells the end by its exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from resilience.cli import main
from resilience.status.state import FaultNow, Now, RankNow, Section
from resilience.status.view import status_lines
from resilience.system.render import plain
from tests.support.launch_streams import Fault, launched
from tests.unit.status.test_state import START, agent_killed, show


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))


def test_lost_job_says_since_when_it_is_silent() -> None:
    lost = msgspec.structs.replace(now(4), phase="lost", since_s=90_000.0, last_record_s=12_263.0)
    head = plain(next(iter(status_lines(lost, 80, 20))))
    assert head.endswith("lost  for 3 h 24 min")


def now(world: int, node: str = "node") -> Now:
    ranks = tuple(
        RankNow(
            rank,
            f"{node}{rank // 8}",
            "suspect" if rank == 5 else "active",
            "run",
            100_000 + rank % 3,
            1.5,
            Section("checkpoint of the whole model", 3000.0, 3600.0) if rank % 2 else None,
            2,
            1.0,
        )
        for rank in range(world)
    )
    return Now(
        run="/runs/job",
        job_id="job",
        phase="running",
        since_s=4000.0,
        last_record_s=2.0,
        nodes=-(-world // 8),
        world_size=world,
        states={"active": world - 1, "suspect": 1},
        ranks=ranks,
        cycle=3,
        restarts=3,
        restarts_left=7,
        failure=FaultNow("ValueError: a message that is\nlonger than a line " * 20, 5, 100.0),
    )


@pytest.mark.parametrize("world", [8, 256, 10_000])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("node", ["n", "a-node-with-a-very-long-name.of.some.cluster"])
def test_fits_the_terminal_at_any_size(world: int, width: int, node: str) -> None:
    lines = [plain(line) for line in status_lines(now(world, node), width, 12)]
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    assert any(line.split()[:1] == ["5"] and "suspect" in line for line in lines)


def test_restarts_in_place_are_counted_since_the_last_restart_by_the_launcher() -> None:
    restarted = msgspec.structs.replace(now(8), iterations=2)
    lines = [plain(line) for line in status_lines(restarted, 120, 12)]
    assert any("3 by the launcher (cycle 3), 7 left; 2 in place since" in line for line in lines)


def test_says_what_it_shows() -> None:
    text = "\n".join(plain(line) for line in status_lines(now(8), 120, 12))
    for part in (
        "Run job  running  for 1 h 06 min",
        "8 ranks on 1 node: 7 active, 1 suspect",
        "3 by the launcher (cycle 3), 7 left",
        "step       100000 to 100002",
        "1 min 40 s ago, rank 5: ValueError",
        "50m00s / 1h00m",
    ):
        assert part in text


def test_damaged_records_are_said_before_anything_that_follows_from_them() -> None:
    damaged = msgspec.structs.replace(now(8), damaged=3)
    lines = [plain(line) for line in status_lines(damaged, 80, 12)]
    (said,) = [number for number, line in enumerate(lines) if "3 lines could not be read" in line]
    assert said < next(number for number, line in enumerate(lines) if "7 active" in line)
    assert not any("could not be read" in plain(line) for line in status_lines(now(8), 80, 12))


@pytest.mark.parametrize(("faults", "status"), [([], 0), ([Fault("exhausted", 1)], 1), ([Fault("kill", 1)], 0)])
def test_exit_status_tells_the_end(
    faults: list[Fault], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(faults).write(tmp_path / "runs" / "mine")
    assert main(["status", "mine", "--watch"]) == status
    assert "ended" in capsys.readouterr().out


def test_exit_status_tells_that_the_agent_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent_killed().write(tmp_path / "runs" / "mine")
    assert main(["status", "mine"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "lost all ranks ended" in shown
    assert main(["status", "mine", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["phase"] == "lost"


def test_exit_status_tells_that_the_job_shows_no_sign_of_life(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = launched(is_running=True).write(tmp_path / "runs" / "mine")
    show(folder, 0, cycle=0)
    assert main(["status", "mine"]) == 0  # a program that reports nothing new may be well
    show(folder, 0, cycle=0, alive_at=160.0)
    capsys.readouterr()
    assert main(["status", "mine"]) == 0  # a file has just changed: the clock of the node may be behind
    for path in (*(folder / "records").iterdir(), *(folder / "timings").iterdir()):
        os.utime(path, (START, START))
    capsys.readouterr()
    assert main(["status", "mine"]) == 1
    assert "no sign of life for" in " ".join(capsys.readouterr().out.split())


def test_name_of_a_job_means_its_newest_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched([Fault("exhausted", 1)]).write(tmp_path / "runs" / "mine")
    for attempt in (1, 10, 9):
        launched(is_running=attempt == 10).write(tmp_path / "runs" / f"mine@{attempt}")
    launched().write(tmp_path / "runs" / "mine else")
    for name, folder in (("mine", "mine@10"), ("mine@0", "mine"), ("mine@9", "mine@9"), ("mine else", "mine else")):
        main(["status", name, "--json"])
        assert Path(json.loads(capsys.readouterr().out)["run"]).name == folder


def test_json_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched([Fault("hang", 1)], is_running=True).write(tmp_path / "runs" / "mine")
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["phase"], told["cycle"], told["states"]) == ("running", 1, {"active": 2})
    assert msgspec.convert(told, Now).ranks[1].state == "active"


def test_folder_without_records_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "mine" / "records").mkdir(parents=True)
    assert main(["status", "mine"]) == 2
    assert "has no records yet" in capsys.readouterr().err
