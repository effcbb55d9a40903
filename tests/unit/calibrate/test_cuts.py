"""The verdict of an incident says whether an occurrence that a limit ended was a hang."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilience.attribution.culprits import Culprit
from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import Class
from resilience.attribution.verdict import Verdict
from resilience.calibrate import cuts
from resilience.calibrate.cuts import Verdicts
from resilience.facts.records import to_line
from resilience.telemetry.durations import Value
from tests.support.record_streams import Fault, Kind, job

KILLED = Value("data", 5, 5, 0.0, 2.0, "killed")
CUT_OFF = Value("data", 5, 5, 0.0, 2.0, "cut")
UNSURE = (Culprit(2, "stopped", 0.4, 4), Culprit(3, "stopped", 0.4, 4))
BLAMED, WAITING = 1, 0


@pytest.mark.parametrize(
    ("kind", "blamed", "others"),
    [
        ("stopped", "hang", "hang"),
        ("native", "killed", "killed"),
        ("busy", "killed", "killed"),  # a long computation looks like an endless one, and others wait for either
        ("hang", "killed", "killed"),
        ("exception", "killed", "hang"),
        ("kill", "killed", "hang"),
    ],
)
def test_killed_occurrence_counts_as_a_hang_only_if_the_verdict_shows_a_hang(
    tmp_path: Path, kind: Kind, blamed: str, others: str
) -> None:
    folder = job([Fault(kind, 1, 0, 20)], world=3).write(tmp_path / "run")
    verdicts = Verdicts([folder])
    assert verdicts.judged(1, (0, 0), KILLED).end == blamed
    assert verdicts.judged(2, (0, 0), KILLED).end == others
    assert verdicts.judged(1, (0, 7), KILLED).end == "killed"  # an iteration without an incident


def test_clocks_of_nodes_with_folders_of_their_own_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = job([Fault("kill", 1, 0)], world=2).files
    offsets: dict[str, int] = {}
    known: dict[str, int] = {}
    for rank, lines in files.items():
        node, ahead_ns = "ab"[rank], rank * 10**9
        (tmp_path / node / "records").mkdir(parents=True)
        (tmp_path / node / "records" / f"{node}-{rank}.jsonl").write_bytes(
            b"".join(
                to_line(
                    msgspec.structs.replace(
                        line, wall_ns=line.wall_ns + ahead_ns, origin=msgspec.structs.replace(line.origin, node=node)
                    )
                )
                for line in lines
            )
        )

    def noted(_: object, of_nodes: dict[str, int], errors: dict[str, int]) -> tuple[Incident, ...]:
        offsets.update(of_nodes)
        known.update(errors)
        return ()

    monkeypatch.setattr(cuts, "fold", noted)
    Verdicts([tmp_path / "a", tmp_path / "b"]).judged(0, (0, 0), KILLED)
    assert offsets["b"] - offsets["a"] == pytest.approx(10**9, abs=10**6)
    assert known.keys() == {"a", "b"} and max(known.values()) < 10**9


def judged(monkeypatch: pytest.MonkeyPatch, rank: int, *incidents: Incident, value: Value = KILLED) -> str:
    """Return the end of an occurrence of this rank in iteration 0 of a run with these incidents."""
    monkeypatch.setattr(cuts, "fold", lambda records, offsets, clock_errors: incidents)
    return Verdicts([]).judged(rank, (0, 0), value).end


def incident(*culprits: Culprit, candidates: tuple[Culprit, ...] = ()) -> Incident:
    verdict = Verdict(culprits[0].what if culprits else "unknown", "unknown", culprits=culprits, candidates=candidates)
    return Incident(1, 0, 0, 0, 0, "restarted", "hang", verdict)


@pytest.mark.parametrize(
    "what",
    [
        "storage_stall",
        "input_stall",
        "busy_without_progress",
        "hung",
        "went_on",
        "desynchronised",
        "hook_hung",
        "waits_for_lock",  # of a thread that saves
        "blocked_in_kernel",  # at the one moment at which its state was read
        "blocked_in_native_code",  # a computation in C
    ],
)
def test_wait_for_a_rank_that_may_be_healthy_may_be_healthy_too(monkeypatch: pytest.MonkeyPatch, what: Class) -> None:
    assert judged(monkeypatch, BLAMED, incident(Culprit(BLAMED, what, 0.7, 7))) == "killed"
    assert judged(monkeypatch, WAITING, incident(Culprit(BLAMED, what, 0.7, 7))) == "killed"


def test_wait_is_a_hang_if_one_of_several_culprits_is_known_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    culprits = Culprit(BLAMED, "hung", 0.7, 7), Culprit(2, "stopped", 0.9, 4)
    assert judged(monkeypatch, WAITING, incident(*culprits)) == "hang"
    assert judged(monkeypatch, BLAMED, incident(*culprits)) == "killed"


def test_nothing_is_a_hang_while_there_are_only_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 2, 3):
        assert judged(monkeypatch, rank, incident(candidates=UNSURE)) == "killed"


def test_candidate_beside_a_culprit_did_not_only_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    both = incident(Culprit(BLAMED, "stopped", 0.9, 4), candidates=UNSURE)
    assert judged(monkeypatch, 2, both) == "killed"
    assert judged(monkeypatch, WAITING, both) == "hang"


def test_end_of_the_whole_cycle_does_not_judge_an_iteration_with_an_incident_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = incident(Culprit(BLAMED, "hung", 0.7, 7))
    verdict = Verdict("crashed", "unknown", culprits=(Culprit(2, "crashed", 0.95, 1),))
    later = Incident(2, 0, 0, 0, -1, "restarted", "exit", verdict, layer="launcher")
    assert judged(monkeypatch, WAITING, own, later) == "killed"
    assert judged(monkeypatch, WAITING, later) == "hang"


def test_cut_that_no_limit_made_stays_what_it_is_without_an_incident(tmp_path: Path) -> None:
    verdicts = Verdicts([tmp_path])
    for end in ("cut", "hang"):
        assert verdicts.judged(0, (0, 0), Value("data", 0, 0, 0.0, 1.0, end)).end == end


def test_occurrence_that_a_restart_cut_off_is_a_hang_if_the_verdict_shows_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = incident(Culprit(BLAMED, "stopped", 0.9, 4))
    assert judged(monkeypatch, BLAMED, stopped, value=CUT_OFF) == "hang"


def test_occurrence_that_a_restart_cut_off_may_be_healthy_if_another_rank_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be an evaluation of its own, which the stopped rank had not reached."""
    stopped = incident(Culprit(BLAMED, "stopped", 0.9, 4))
    assert judged(monkeypatch, WAITING, stopped, value=CUT_OFF) == "cut"
    assert judged(monkeypatch, WAITING, stopped, value=KILLED) == "hang"


def test_occurrence_that_a_restart_cut_off_may_be_healthy_if_another_rank_failed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = incident(Culprit(BLAMED, "exception", 0.9, 2))
    assert judged(monkeypatch, WAITING, failed, value=CUT_OFF) == "cut"
    assert judged(monkeypatch, WAITING, failed, value=KILLED) == "hang"  # a limit ended its wait for the failed rank


def test_short_occurrence_that_a_restart_cut_off_needs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[Incident, ...]:
        raise AssertionError("the records were read")

    monkeypatch.setattr(cuts, "fold", refuse)
    assert Verdicts([]).judged(WAITING, (0, 0), CUT_OFF, usual_s=CUT_OFF.s).end == "cut"
