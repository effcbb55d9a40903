"""The campaign's cases, truth and score."""

from __future__ import annotations

import ast
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.campaign import __main__ as main
from tests.campaign import cases, injector, scoring
from tests.campaign.__main__ import Campaign, load
from tests.campaign.cases import Case
from tests.campaign.contestants import CONTESTANTS, Contestant, Verdict
from tests.campaign.running import Measures, Outcome, Step, measure
from tests.support.record_streams import Fault, job

KILL = Case(3, 7, "wrapper", 4, "sigkill", 2, 5, ("killed",))
PAIR = Case(
    4,
    8,
    "wrapper",
    4,
    "sigkill",
    2,
    5,
    ("killed",),
    second="sleep",
    second_rank=1,
    second_classes=("hung",),
    delay_ms=300,
)
RIGHT = Verdict(2, "killed", 0.95, ((2, 0.95),), False, 1)


def outcome(case: Case = KILL, verdict: Verdict = RIGHT, **known: object) -> Outcome:
    told = {
        "recovered": True,
        "is_equal": True,
        "is_injected": True,
        "is_wedged": False,
        "duration_s": 9.0,
        "orphans": 0,
    }
    return Outcome(case, "ours", verdict, **{**told, **known})  # type: ignore[arg-type]


def test_cases_follow_from_their_seeds() -> None:
    assert list(cases.whole(300)) == list(cases.whole(300))
    assert list(cases.quick()) == list(cases.quick())
    assert list(cases.whole(50, first=1000)) != list(cases.whole(50, first=2000))


def test_whole_campaign_has_every_fault_in_every_mode_and_size() -> None:
    kinds = {(case.mode, case.world, case.fault) for case in cases.whole(3 * 3 * len(cases.FAULTS))}
    assert kinds == {(mode, world, fault) for mode in cases.MODES for world in (2, 4, 8) for fault in cases.FAULTS}


def test_one_more_barrier_is_ambiguous_with_two_ranks_alone() -> None:
    """Which of two ranks has left the order, nothing says. No other fault of the whole campaign is ambiguous."""
    every = list(cases.whole(3 * 3 * len(cases.FAULTS)))
    expected = {(mode, 2, "barrier") for mode in cases.MODES}
    assert {(case.mode, case.world, case.fault) for case in every if case.ambiguous} == expected


def test_wide_campaign_has_pairs_harmless_events_every_kind_and_eight_ranks_in_every_mode() -> None:
    every = list(cases.wide(24 * 20))
    assert every == list(cases.wide(24 * 20))
    for mode in cases.MODES:
        of_mode = [case for case in every if case.mode == mode]
        assert {case.kind for case in of_mode} == set(cases.KINDS)
        assert {case.fault for case in of_mode if case.is_harmless} == set(cases.WATCHED)
        assert any(case.world == 8 for case in of_mode)
        pairs = [case for case in of_mode if case.second]
        assert all(case.rank != case.second_rank and 0 <= case.delay_ms <= 500 for case in pairs)
    assert {case.fault for case in every if case.second} >= {*cases.ENDS, *cases.HANGS, "monitor"}


def test_set_of_large_jobs_has_every_training_with_eight_ranks_and_pairs_with_two_and_eight() -> None:
    every = list(cases.large(24 * 20))
    assert every == list(cases.large(24 * 20)) != list(cases.large(24 * 20, first=2000))
    pairs = [case for case in every if case.second]
    others = [case for case in every if not case.second]
    assert {(case.mode, case.world) for case in pairs} == {(mode, world) for mode in cases.MODES for world in (2, 8)}
    expected = {(mode, 8, kind) for mode in cases.MODES for kind in cases.KINDS if kind != "ddp"}
    assert {(case.mode, case.world, case.kind) for case in others} == expected
    assert all(case.rank != case.second_rank < case.world for case in pairs)
    assert {case.fault for case in others if case.kind == "loader"} >= cases.LOADER.keys()
    left_order = [case for case in pairs if {case.fault, case.second} == {"barrier", "monitor"}]
    assert left_order and all(bool(case.ambiguous) is (case.world == 2) for case in left_order)


def test_pairs_in_handlers_aim_at_every_handler_of_every_mode() -> None:
    every = list(cases.handlers(26, first=7))
    assert every == list(cases.handlers(26, first=7)) != list(cases.handlers(26, first=8))
    assert {(case.mode, case.place) for case in every[:13]} == {
        (mode, place) for mode, places in cases.HANDLERS.items() for place in places
    }
    for case in every:
        assert case.rank != case.second_rank and case.world == 4
        assert case.firsts() == {case.rank}, "what strikes in a handler of the first fault cannot be the first"


def test_set_of_further_faults_has_each_in_every_mode() -> None:
    every = list(cases.more(3 * len(cases.LATER), first=7))
    assert every == list(cases.more(len(every), first=7)) != list(cases.more(len(every), first=8))
    assert {(case.mode, case.fault) for case in every} == {(mode, each) for mode in cases.MODES for each in cases.LATER}
    assert all(case.ambiguous for case in every if case.fault == "shape")
    assert all(bool(case.ambiguous) is (case.world == 2) for case in every if case.fault == "skipped")
    assert {case.fault for case in every if case.is_harmless} == {"monitor_stopped"}


def job_of(case: Case, root: Path) -> Path:
    """Return the folder of a case's job, with its truth beside it."""
    folder = root / "0003"
    folder.mkdir()
    injector.truth_of(folder).write_text(cases.to_json(case))
    return folder


def test_fault_of_all_ranks_strikes_each_once_and_each_is_rightly_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = replace(KILL, fault=cases.EVERYWHERE, classes=cases.LATER[cases.EVERYWHERE])
    struck: list[str] = []
    monkeypatch.setattr(injector, "break_by", struck.append)
    folder = job_of(everywhere, tmp_path)
    injector.strike(folder, 2, 4)
    assert struck == []
    for rank in (*range(4), *range(4)):
        injector.strike(folder, rank, 5)
    assert struck == ["exception"] * 4 and (folder / "injected").exists()
    common = tuple((rank, 0.9) for rank in range(4))
    assert scoring.is_passed(outcome(everywhere, Verdict(0, "common", 0.9, common, False, 1)))
    assert not scoring.is_passed(outcome(everywhere, Verdict(0, "killed", 0.9, common, False, 1)))


@pytest.mark.parametrize("name", ["barrier", "all_reduce"])
def test_only_the_next_collective_is_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[object, ...]] = []
    monkeypatch.setattr(dist, name, lambda *arguments: entered.append(arguments))
    injector.break_by("skipped" if name == "barrier" else "shape")
    for _ in range(2):
        getattr(dist, name)(torch.ones(1))
    changed = [] if name == "barrier" else [1000]
    assert [arguments[0].numel() for arguments in entered] == [*changed, 1]  # type: ignore[attr-defined]


def test_fault_in_a_handler_strikes_once_in_its_rank_after_the_first_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[str] = []
    monkeypatch.setattr(injector, "break_by", lambda fault, waits=True: struck.append(fault))
    folder = job_of(replace(PAIR, place="finalize"), tmp_path)
    injector.strike_in(folder, 1, "finalize")  # before the first fault
    injector.strike(folder, 2, 5)
    injector.strike(folder, 1, 5)  # not at a step
    injector.strike_in(folder, 1, "abort")
    injector.strike_in(folder, 3, "finalize")
    assert struck == ["sigkill"]
    for _ in range(2):
        injector.strike_in(folder, 1, "finalize")
    assert struck == ["sigkill", "sleep"]


def campaign(out: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int], stops_at: int = -1) -> Campaign:
    """Return a campaign of 6 cases whose jobs are not started."""

    def run(case: Case, contestant: Contestant, folder: Path, right: str) -> Outcome:
        if case.number == stops_at:
            raise KeyboardInterrupt
        ran.append(case.number)
        return outcome(case)

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr(main.table, "commit", lambda: "c0ffee")
    monkeypatch.setattr(main.table, "today", lambda: "2026-11-27")
    monkeypatch.setattr(main, "undisturbed", lambda contestant, kind, folder: "result")
    chosen = [replace(KILL, number=number) for number in range(6)]
    return Campaign(CONTESTANTS["ours"], chosen, list(load(out / "results.jsonl")), out, out)


@pytest.mark.parametrize("jobs", [1, 3])
def test_parts_of_a_campaign_add_up(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        campaign(tmp_path, monkeypatch, ran, stops_at=3).run(jobs, deadline=float("inf"))
    kept = [each.case.number for each in load(tmp_path / "results.jsonl")]
    assert 3 not in kept
    assert not campaign(tmp_path, monkeypatch, ran).run(jobs, deadline=0.0), "no case begins after the deadline"
    assert campaign(tmp_path, monkeypatch, ran).run(jobs, deadline=float("inf"))
    kept_now = list(load(tmp_path / "results.jsonl"))
    assert sorted(each.case.number for each in kept_now) == list(range(6))
    assert {(each.commit, each.date) for each in kept_now} == {("c0ffee", "2026-11-27")}


def main_of(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Return the exit status of the campaign's command. No job without a fault is started."""
    monkeypatch.setattr(sys, "argv", ["campaign", "--out", str(out), *options])
    monkeypatch.setattr(main, "undisturbed", lambda contestant, kind, folder: "result")
    monkeypatch.setattr(main.signal, "signal", lambda number, handler: None)
    return main.main()


def passes(case: Case) -> Outcome:
    named = Verdict(case.rank, case.classes[0], 0.95, ((case.rank, 0.95),), False, 1) if case.classes else Verdict()
    return outcome(case, named)


@pytest.mark.parametrize(
    "options",
    [["--first-seed", "2000"], ["--worlds", "2,4"], ["--set", "wide"], ["--set", "handlers"], ["--quick"]],
    ids=" ".join,
)
def test_campaign_does_not_go_on_with_the_results_of_another_schedule(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def run(case: Case, contestant: Contestant, folder: Path, right: str) -> Outcome:
        ran.append(case.number)
        return passes(case)

    monkeypatch.setattr(main, "run", run)
    assert main_of(tmp_path, monkeypatch, "--cases", "3") == 0
    assert main_of(tmp_path, monkeypatch, "--cases", "4", "--resume", *options) == 2
    error = capsys.readouterr().err
    assert "results of two schedules must not mix" in error and "has case 0000-" in error
    assert main_of(tmp_path, monkeypatch, "--cases", "2", "--resume") == 0  # fewer cases of the same schedule
    assert main_of(tmp_path, monkeypatch, "--cases", "4", "--resume") == 0
    assert ran == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [None, 4])
def test_quick_campaign_ends_with_1_if_a_case_fails(
    wrong: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(case: Case, contestant: Contestant, folder: Path, right: str) -> Outcome:
        return replace(passes(case), recovered=case.number != wrong)

    monkeypatch.setattr(main, "run", run)
    assert main_of(tmp_path, monkeypatch, "--quick", "--numbers", "0,4,5") == int(wrong is not None)
    assert ("failed: 0004-" in capsys.readouterr().out) is (wrong is not None)


@pytest.mark.parametrize(("case_s", "ran", "status"), [(29, 2, 0), (31, 2, 1), (61, 1, 1)])
def test_quick_campaign_ends_with_1_if_it_takes_longer_than_its_bound(
    case_s: int,
    ran: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two cases, none begins after the bound. If the last one ends after it, all have passed, and it is too late."""
    now_s = 0

    def run(case: Case, contestant: Contestant, folder: Path, right: str) -> Outcome:
        nonlocal now_s
        now_s += case_s
        return passes(case)

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert main_of(tmp_path, monkeypatch, "--quick", "--numbers", "0,4", "--minutes", "1") == status
    assert len(list(load(tmp_path / "results.jsonl"))) == ran
    message = f"failed: {ran} of 2 cases took {ran * case_s} s, expected all within 60 s (--minutes 1)"
    assert (message in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize("case", [KILL, PAIR])
def test_case_is_what_its_file_says(case: Case) -> None:
    assert cases.from_json(cases.to_json(case)) == case


@pytest.mark.parametrize(
    ("first", "second", "delay_ms", "struck", "expected"),
    [
        ("sigkill", "sleep", 300, (True, True), {2}),
        ("sleep", "sigkill", 300, (True, True), {1}),
        ("sigabrt", "sleep", 300, (True, True), {2}),
        ("sigkill", "exit", 300, (True, True), {2}),
        ("sigkill", "exit", 100, (True, True), {1, 2}),
        ("lock", "sleep", 300, (True, True), {1, 2}),
        ("lock", "sleep", 300, (True, False), {2}),
        ("monitor", "sleep", 300, (True, True), {1}),
    ],
)
def test_truth_of_a_pair_says_who_may_be_named_first(
    first: str, second: str, delay_ms: int, struck: tuple[bool, bool], expected: set[int]
) -> None:
    classes = {"classes": cases.CLASSES[first], "second_classes": cases.CLASSES[second]}
    case = replace(PAIR, fault=first, second=second, delay_ms=delay_ms, **classes)
    assert case.firsts(struck) == expected


def test_measures_are_those_of_the_steps_that_the_ranks_noted() -> None:
    steps = [Step(second * 10**9, rank, second, f"old-{rank}") for second in range(6) for rank in range(3)]
    steps += [Step((5 + step) * 10**9, rank, step, f"new-{rank}") for step in range(4, cases.STEPS) for rank in (0, 1)]
    cost = measure(steps, [5_500_000_000], {2}, 6_000_000_000)
    assert cost == Measures(detect_s=0.5, recover_s=3.5, steps_repeated=2, healthy_lost=0, restarts=1)
    assert measure(steps, [5_500_000_000], {1}, None).healthy_lost == 1
    calm = [Step(step * 10**9, rank, step, f"old-{rank}") for step in range(cases.STEPS) for rank in range(2)]
    assert measure(calm, [5_500_000_000], set(), None) == Measures(None, None, 0, 0, 0)
    assert measure([], [], set(), None) == Measures()


@pytest.mark.parametrize(("resumed", "repeated"), [(4, 2), (5, 1), (6, 0), (7, 0)])
def test_step_is_repeated_if_it_had_begun_and_begins_again(resumed: int, repeated: int) -> None:
    """Steps 0 to 5 had begun."""
    steps = [Step(second * 10**9, 0, second, "old") for second in range(6)]
    steps += [Step((6 + step) * 10**9, 0, step, "new") for step in range(resumed, cases.STEPS)]
    assert measure(steps, [5_500_000_000], set(), None).steps_repeated == repeated


def test_outcome_without_measures_is_still_read() -> None:
    source = Path(__file__).parents[2] / "campaign" / "results.jsonl"
    first = next(iter(load(source)))
    assert first.measures == Measures() and first.struck == (True, False)
    assert (first.commit, first.date) == ("-", "-")


def test_page_says_of_which_commits_and_days_the_cases_are() -> None:
    rows = scoring.table([outcome(), outcome(commit="c0ffee", date="2026-11-27")]).splitlines()
    assert "| commit | -, c0ffee | -, c0ffee |" in rows and "| date | -, 2026-11-27 | -, 2026-11-27 |" in rows


def test_every_rank_that_is_blamed_counts_for_its_confidence() -> None:
    """Also one that is not named first, and one that is blamed for a harmless event."""
    second = Verdict(1, "hung", 0.9, ((1, 0.9), (2, 0.95), (0, 0.6)), False, 1)
    slow = replace(KILL, fault="slow", classes=())
    ambiguous = replace(KILL, ambiguous="either may be right")
    found = scoring.by_confidence([outcome(PAIR, second), outcome(slow, RIGHT), outcome(ambiguous, RIGHT), outcome()])
    assert found == {0.6: scoring.Share(0, 1), 0.9: scoring.Share(1, 1), 0.95: scoring.Share(2, 3)}


def test_injector_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(injector.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.partition(".")[0] in ("resilience", "tests")}


def test_campaign_is_not_in_the_wheel() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '[tool.hatch.build.targets.wheel]\npackages = ["resilience"]\n' in project


def test_every_fault_has_a_truth_and_a_way_to_strike() -> None:
    """Those of all ranks and of a loader's process strike by another one's way."""
    tree = ast.parse(Path(injector.__file__).read_text())
    strikes = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "break_by")
    patterns = [value.value for value in ast.walk(strikes) if isinstance(value, ast.MatchValue)]
    ways = {pattern.value for pattern in patterns if isinstance(pattern, ast.Constant)}
    assert {fault for fault, classes in cases.FAULTS.items() if not classes} == {"slow"}
    assert ways == cases.CLASSES.keys() - {cases.EVERYWHERE}
    assert set(cases.IN_HANDLER) <= ways


@pytest.mark.parametrize("fault", ["sigwinch", ""])
def test_fault_without_a_way_to_strike_is_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(injector.SIGNALS, "sigwinch", signal.SIGWINCH)
    with pytest.raises(NotImplementedError, match="is no fault that this injector can bring about"):
        injector.break_by(fault)


# -- the judge is blind --------------------------------------------------------------------------------


@pytest.mark.parametrize("contestant", CONTESTANTS.values(), ids=lambda each: each.name)
def test_job_is_started_alike_whatever_its_truth_is(contestant: Contestant, tmp_path: Path) -> None:
    """So nothing that a job's records hold of its command and variables tells which fault strikes, where and when."""
    other = replace(
        PAIR, number=KILL.number, seed=99, fault="gil", rank=0, step=7, classes=(), place="load", delay_ms=1
    )
    assert contestant.commands(KILL, tmp_path) == contestant.commands(other, tmp_path)


def test_folder_of_a_job_says_nothing_of_its_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def run(case: Case, contestant: Contestant, folder: Path, right: str) -> Outcome:
        folders.append(folder)
        return outcome(case)

    monkeypatch.setattr(main, "undisturbed", lambda contestant, kind, folder: "result")
    monkeypatch.setattr(main, "run", run)
    Campaign(CONTESTANTS["ours"], [KILL, PAIR], [], tmp_path, tmp_path).run(1, float("inf"))
    assert folders == [tmp_path / "0003", tmp_path / "0004"]


def test_verdict_is_the_same_whatever_the_truth_is(tmp_path: Path) -> None:
    folder = job_of(KILL, tmp_path)
    job([Fault("kill", 2, 0, 20)]).write(folder / "runs" / "job")
    (folder / "injected").write_text("1")
    first = CONTESTANTS["ours"].verdict(folder)
    assert (first.rank, first.what) == (2, "killed")
    injector.truth_of(folder).write_text(cases.to_json(replace(KILL, rank=1, fault="sleep", classes=("hung",))))
    assert CONTESTANTS["ours"].verdict(folder) == first
    injector.truth_of(folder).unlink()
    assert CONTESTANTS["ours"].verdict(folder) == first


@pytest.mark.parametrize(
    "wrong",
    [
        outcome(recovered=False),
        outcome(is_equal=False),
        outcome(is_injected=False),
        outcome(orphans=1),
        outcome(verdict=replace(RIGHT, rank=1, blamed=((1, 0.7),))),
        outcome(verdict=replace(RIGHT, what="exited")),
        outcome(verdict=replace(RIGHT, blamed=((2, 0.95), (0, 0.6)))),
        outcome(verdict=Verdict()),
        outcome(measures=Measures(healthy_lost=1)),
    ],
)
def test_quick_case_fails_for_anything_that_is_not_as_it_has_to_be(wrong: Outcome) -> None:
    assert scoring.is_passed(outcome()) and not scoring.is_passed(wrong)


def test_harmless_case_passes_if_nobody_is_accused() -> None:
    slow = replace(KILL, fault="slow", classes=())
    assert scoring.is_passed(outcome(slow, Verdict()))
    assert not scoring.is_passed(outcome(slow, RIGHT))
    assert not scoring.is_passed(outcome(slow, Verdict(), measures=Measures(restarts=1)))


def test_killed_monitor_may_be_said_and_no_more() -> None:
    monitor = replace(KILL, fault="monitor", classes=("monitor_lost",))
    said = Verdict(2, "monitor_lost", 0.9, ((2, 0.9),), False, 1)
    assert scoring.is_passed(outcome(monitor, said))
    assert scoring.is_passed(outcome(monitor, Verdict()))
    assert not scoring.is_passed(outcome(monitor, replace(said, rank=1, blamed=((1, 0.9),))))


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_rank_of_a_killed_monitor_is_healthy_so_no_other_class_is_right(confidence: float) -> None:
    monitor = replace(KILL, fault="monitor", classes=cases.WATCHED["monitor"])
    wrong = outcome(monitor, Verdict(2, "killed", confidence, ((2, confidence),), False, 1))
    assert not scoring.is_passed(wrong)
    assert scoring.accused(wrong) == ([2] if confidence > scoring.NAMED else [])
    assert scoring.by_confidence([wrong]) == {confidence: scoring.Share(0, 1)}


def test_either_rank_of_a_pair_may_be_blamed_but_only_one_be_first() -> None:
    second = Verdict(1, "hung", 0.9, ((1, 0.9), (2, 0.95)), False, 1)
    assert scoring.accused(outcome(PAIR, second)) == []
    assert not scoring.is_passed(outcome(PAIR, second)) and scoring.is_passed(outcome(PAIR))


def row(name: str, outcomes: list[Outcome]) -> str:
    """Return the cells of one row of the table."""
    (line,) = [line for line in scoring.table(outcomes).splitlines() if line.startswith(f"| {name} |")]
    return line.removeprefix(f"| {name} | ").removesuffix(" |")


def test_every_guilty_rank_has_to_be_named_but_not_in_one_place() -> None:
    name = "all guilty ranks named, of two or more"
    both, weak = ((2, 0.95), (1, 0.7)), ((2, 0.95), (1, 0.4))
    said = [replace(RIGHT, blamed=blamed) for blamed in (both, ((2, 0.95),), weak, (*both, (0, 0.6)))]
    pairs = [outcome(PAIR, verdict) for verdict in said]
    assert [scoring.names_all(each) for each in pairs] == [True, False, False, True]
    one_struck = outcome(PAIR, RIGHT, struck=(True, False))
    unknown = outcome(PAIR, replace(RIGHT, is_unknown=True))
    assert row(name, [*pairs, one_struck, unknown, outcome()]).startswith("2 of 4 (")
    assert row(name, [outcome()]) == "- | -"


def test_contestant_that_states_no_confidence_accuses_nobody() -> None:
    wrong = replace(outcome(verdict=Verdict(1, "killed", 1.0, ((1, 1.0),), False, 1)), contestant="torchrun")
    assert row("healthy rank accused", [wrong]) == "-"
    assert row("culprit first, of answered", [wrong]).startswith("0 of 1")
    assert row("healthy rank accused", [replace(wrong, contestant="ours")]).startswith("1 of 1")


def test_ambiguous_and_unanswered_cases_count_apart() -> None:
    ambiguous = replace(KILL, ambiguous="either may be right")
    outcomes = [outcome(), outcome(ambiguous), outcome(verdict=Verdict())]
    assert (len(scoring.judged(outcomes)), len(scoring.answered(outcomes))) == (2, 1)


def test_contestant_that_gives_no_verdict_is_not_judged() -> None:
    silent = replace(outcome(verdict=Verdict()), contestant="nvrx, in process, limits set")
    assert scoring.judged([silent]) == [] and "| unknown | - |" in scoring.table([silent])


@pytest.mark.parametrize("contestant", CONTESTANTS.values(), ids=lambda each: each.name)
def test_contestant_starts_as_many_ranks_as_the_case_has(contestant: Contestant, tmp_path: Path) -> None:
    """By itself, or by its launcher. Only ours runs with the package."""
    commands = contestant.commands(KILL, tmp_path)
    assert len(commands) == KILL.world or any(f"--nproc-per-node={KILL.world}" in part for part in commands[0][0])
    modes = {"wrapper", "plain", "peer-wrapper", "peer-launcher"} & {
        part for command, _ in commands for part in command
    }
    assert modes == {"wrapper"} if contestant.name == "ours" else "wrapper" not in modes


def test_interval_is_wilsons() -> None:
    low, high = scoring.Share(9, 10).interval
    assert (low, high) == (pytest.approx(0.596, abs=0.001), pytest.approx(0.982, abs=0.001))
    assert scoring.Share(0, 0).interval == (0.0, 1.0)


def test_table_has_a_column_for_each_mode_and_contestant() -> None:
    theirs = replace(outcome(), contestant="torchrun")
    header = scoring.table([outcome(), theirs]).splitlines()[0]
    assert header == "|  | ours, all modes | ours, wrapper | torchrun |"


def test_torchrun_says_who_failed_in_its_summary(tmp_path: Path) -> None:
    (tmp_path / "output").write_text(
        "E failed (exitcode: -9) local_rank: 2 (pid: 7) of binary: python\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : x\n  host      : vm\n  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 7)\n"
    )
    verdict = CONTESTANTS["torchrun"].verdict(tmp_path)
    assert (verdict.rank, verdict.what) == (2, "killed")
