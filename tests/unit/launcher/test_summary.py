"""What the launcher's last message says about a job that did not complete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilience.core.cycle import CycleDecision
from resilience.facts.events import CycleOutcome
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.launcher.summary import success, summary

RUN = Path("/runs/job")
EARLIER = InterruptionRecord(3, Interruption.TERMINATED, "process 77 ended (SIGKILL)", node="a")
TABLE = ("cycle  what", "0      SIGKILL", "1      SIGKILL")


@pytest.mark.parametrize("outcome", ["shutdown", "excluded", "preempted"])
def test_earlier_failures_are_not_shown_as_the_reason_for_an_end_that_no_failure_caused(outcome: CycleOutcome) -> None:
    text = summary(CycleDecision(outcome, "a", detail="training is done"), RUN, EARLIER, TABLE)
    assert "training is done" in text
    assert "SIGKILL" not in text


@pytest.mark.parametrize("outcome", ["failed", "exhausted"])
def test_failures_are_shown_as_the_reason_for_an_end_that_they_caused(outcome: CycleOutcome) -> None:
    text = summary(CycleDecision(outcome, "a"), RUN, EARLIER, TABLE)
    assert "first failure: rank 3 on a: process 77 ended (SIGKILL)" in text
    assert "0      SIGKILL" in text


@pytest.mark.parametrize(
    "verdict",
    [
        CycleDecision("excluded", "a", exit_code=95, detail="unhealthy: the health check failed"),
        CycleDecision("failed", "a", exit_code=1, detail="node a found no place in time"),
        CycleDecision("preempted", "a", exit_code=143, detail="SIGTERM to the agent of a, which leaves"),
    ],
    ids=lambda verdict: verdict.outcome,
)
def test_node_that_leaves_does_not_say_that_the_job_continues_because_it_may_be_the_only_one(
    verdict: CycleDecision,
) -> None:
    first, *_ = summary(verdict, RUN, has_left=True).splitlines()
    assert first == f"resilience run: this node leaves the job: {verdict.detail}"


@pytest.mark.parametrize(
    ("restarts", "in_place", "how"),
    [
        (0, 0, "completed; "),
        (0, 1, "completed after 1 restart in place; "),
        (2, 0, "completed after 2 restarts by the launcher; "),
        (1, 3, "completed after 1 restart by the launcher and 3 in place since; "),
    ],
)
def test_restarts_of_both_layers_are_counted(restarts: int, in_place: int, how: str) -> None:
    assert success(RUN, restarts, in_place).startswith(f"resilience run: {how}to see what happened:")


@pytest.mark.parametrize(
    ("lines", "words"), [(1, "last line of its output:"), (3, "last 3 lines of its output:"), (20, "last 10 lines of ")]
)
def test_output_of_a_failed_rank_is_introduced_by_the_number_of_lines_that_follow(lines: int, words: str) -> None:
    tail = tuple(f"line {number}" for number in range(lines))
    record = msgspec.structs.replace(EARLIER, log_tail=tail)
    text = summary(CycleDecision("failed", "a"), RUN, record)
    assert f"  {words}" in text
    assert text.count("    line ") == min(lines, 10)
