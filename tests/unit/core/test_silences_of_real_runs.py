"""No healthy silence of real training runs exceeds the limits that nobody has set.

The runs are those of tests/fixtures/README.md."""

from __future__ import annotations

from functools import cache

import pytest

from resilience.core import silences
from resilience.core.silences import ENOUGH, NONE, Silence
from resilience.facts.limits import Rule
from tests.fixtures.timings import unpacked
from tests.support.real_runs import START_UP, Play, Run, as_sections, as_steps, start_up, whole
from tests.support.silent_jobs import LOOK, SilentJob

DURATIONS = {  # of one rank each, without those of blocks and epochs, which hold steps
    "flux_nvidia_n16": 17_330,
    "gnn_supermicro_h100": 196_757,
    "llama405b_nebius_n128": 1_584,
    "llama8b_1node_many": 64_400,
    "llama8b_cisco_n8": 73_112,
    "nanogpt_medium": 108_605,
    "nanogpt_small_2024": 159_325,
    "resnet_mxnet_azure_n8": 3_370,
    "rgat_h200_dell": 96_358,
    "ssd_l40s_dell": 36_685,
    "unet3d_supermicro": 2_512,
}
STARTS = "gpt3_startup_skew_11616ranks"
WITHOUT_STEPS = "unet3d_supermicro"

runs_of_all = cache(unpacked)


def judged(play: Play, runs: list[Run]) -> int:
    """Play runs to the rule, check that it ends none, and return how many silences it judged."""
    number = 0
    for run in runs:
        job = SilentJob()
        for _ in play(job, run):
            pass
        assert job.silence is not None  # after the last look, which judges the last silences
        assert job.kills == []
        assert job.shortest_limit >= Rule().least > LOOK
        number += job.judged
    return number


def test_every_data_set_is_played() -> None:
    assert {*DURATIONS, STARTS} == runs_of_all().keys()
    assert sum(map(len, runs_of_all().values())) == 194


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("play", [as_steps, pytest.param(as_sections, marks=pytest.mark.slow)])
def test_no_duration_of_a_real_run_is_ended(play: Play, name: str) -> None:
    assert judged(play, runs_of_all()[name]) == DURATIONS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DURATIONS.keys() - {WITHOUT_STEPS}))
def test_no_real_run_is_ended_with_its_steps_inside_blocks_and_evaluations_between_them(name: str) -> None:
    runs = runs_of_all()[name]
    assert judged(whole, runs) >= sum(len(run.get("block", run.get("epoch", ()))) for run in runs)


FEW_PAUSES = "flux_nvidia_n16"  # its first long steps come after hundreds of short ones


def kills(play: Play, runs: list[Run]) -> list[Silence]:
    """Play runs to the rule, and return the silences at which it ends them."""
    jobs = [SilentJob() for _ in runs]
    for job, run in zip(jobs, runs, strict=True):
        for _ in play(job, run):
            pass
        assert job.silence is not None  # looks at the last silences
    return [kill for job in jobs for kill in job.kills]


@pytest.mark.parametrize("play", [as_steps, whole])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == FEW_PAUSES else pytest.mark.slow)
        for name in sorted(DURATIONS.keys() - {WITHOUT_STEPS})
    ],
)
def test_no_real_run_is_ended_by_a_limit_that_is_learned_from_one_kind_of_pause(
    play: Play, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No real run shows three kinds of pause, so the limit is learned here from the first one."""
    monkeypatch.setattr(silences, "has_shown_its_pauses", lambda shown: True)
    assert kills(play, runs_of_all()[name]) == []


def test_limits_without_a_pause_of_their_kind_would_have_ended_real_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "has_shown_its_pauses", lambda shown: True)
    monkeypatch.setattr(silences, "has_paused", lambda shown, kind: shown.silences.get(kind, NONE).count >= ENOUGH)
    assert len(kills(as_steps, runs_of_all()[FEW_PAUSES])) == 10


def test_no_rank_is_ended_that_waits_in_its_start_for_the_last_of_11616() -> None:
    runs = runs_of_all()[STARTS]
    assert [len(run[START_UP]) for run in runs] == [11_616] * 3
    assert judged(start_up, runs) == 3 * 11_616


def test_shorter_limits_would_have_ended_a_real_first_step_of_960_s() -> None:
    job = SilentJob(Rule(first=100.0))
    for _ in as_steps(job, runs_of_all()["nanogpt_medium"][0]):
        pass
    assert [silence.allowed for silence in job.kills] == [600.0]
