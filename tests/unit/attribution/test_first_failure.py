"""The sentence about who failed first."""

from __future__ import annotations

import msgspec
import pytest

from resilience.attribution.culprits import Culprit
from resilience.attribution.first_failure import LONGEST, cause_in_words, failure_in_words, judged
from resilience.attribution.incident import Incident, nodes_of_suspects
from resilience.attribution.verdict import Verdict
from resilience.facts import events
from resilience.facts.interruptions import Detector, ExceptionInfo, Exit, Interruption, InterruptionRecord

KILLED = InterruptionRecord(
    1, Interruption.TERMINATED, "process 7 ended (SIGKILL)", exit=Exit(signal="SIGKILL"), node="b"
)
ECHO = InterruptionRecord(
    0, Interruption.EXCEPTION, exception=ExceptionInfo("RuntimeError", "connection closed", "f"), node="a"
)


def incident(verdict: Verdict, *records: InterruptionRecord) -> Incident:
    nodes = nodes_of_suspects(verdict, {0: "a", 1: "b", 2: "c"}, records)
    return Incident(1, 0, 0, 0, 0, "restarted", "kind", verdict, records=records, nodes=nodes)


def test_rank_that_the_verdict_blames_is_named_and_not_the_one_that_reported_first() -> None:
    verdict = Verdict("killed", "host", first=0, culprits=(Culprit(1, "killed", 0.95, 1),))
    assert failure_in_words(incident(verdict, ECHO, KILLED)) == "rank 1 failed first (SIGKILL)"
    assert failure_in_words(incident(verdict, ECHO, KILLED), has_nodes=True) == "rank 1 on b failed first (SIGKILL)"


def test_event_of_a_verdict_has_the_words_of_the_terminal() -> None:
    verdict = Verdict("killed", "host", first=1, culprits=(Culprit(1, "killed", 0.95, 1),))
    found = incident(verdict, KILLED)
    assert judged(found) == events.IncidentJudged(failure_in_words(found), "killed", 0, 0, 1, 0.95, ("b",), 0)
    nobody = judged(incident(Verdict("unknown", "unknown"), ECHO))
    assert (nobody.rank, nobody.confidence, nobody.sentence, nobody.nodes) == (
        None,
        0.0,
        "which rank failed first is not known",
        (),
    )


def test_candidates_and_a_common_cause_on_several_nodes_blame_no_node() -> None:
    first, second = Culprit(0, "exception", 0.4, 14), Culprit(1, "exception", 0.4, 14)
    assert judged(incident(Verdict("unknown", "unknown", candidates=(first, second)), ECHO)).nodes == ()
    assert judged(incident(Verdict("common", "user_code", culprits=(first, second)), ECHO)).nodes == ()
    assert judged(incident(Verdict("common", "user_code", culprits=(first,)), ECHO)).nodes == ("a",)
    assert judged(incident(Verdict("exception", "user_code", culprits=(first, second)), ECHO)).nodes == ("a", "b")


def test_node_of_an_interruption_is_blamed_once() -> None:
    verdict = Verdict("killed", "host", first=1, culprits=(Culprit(1, "killed", 0.95, 1),))
    again = msgspec.structs.replace(incident(verdict, KILLED), is_judged=True)
    assert (judged(again).rank, judged(again).nodes) == (1, ())


def test_unsure_verdict_says_so() -> None:
    candidates = tuple(Culprit(rank, "exception", 0.4, 2) for rank in (0, 2))
    words = failure_in_words(incident(Verdict("unknown", "unknown", candidates=candidates), ECHO))
    assert words == "which rank failed first is not known (candidates: ranks 0, 2)"


def test_rank_that_broke_in_the_restart_is_not_said_to_have_failed_first() -> None:
    began, broke = Culprit(0, "hung", 0.4, 7), Culprit(1, "killed", 0.5, 1)
    verdict = Verdict("killed", "host", culprits=(broke,), candidates=(began,))
    words = "which rank failed first is not known (candidates: rank 0); rank 1 broke in the restart (SIGKILL)"
    assert failure_in_words(incident(verdict, ECHO, KILLED)) == words


def test_rank_without_a_record_is_named_with_its_class() -> None:
    verdict = Verdict("hung", "user_code", culprits=(Culprit(2, "stopped", 0.7, 7),))
    assert failure_in_words(incident(verdict, ECHO)) == "rank 2 failed first (stopped)"


def test_cause_is_not_the_error_that_the_abort_caused_on_the_rank_that_is_blamed() -> None:
    verdict = Verdict("hung", "user_code", first=0, culprits=(Culprit(0, "waits_for_lock", 0.9, 10),))
    cut = msgspec.structs.replace(ECHO, origin="consequence")
    hung = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, detector=Detector("step", 4.0), node="a")
    sentence = "rank 0 on a failed first (waiting for a lock)"
    assert failure_in_words(incident(verdict, cut), has_nodes=True) == sentence
    assert failure_in_words(incident(verdict, cut, hung)) == "rank 0 failed first (hung: step limit 4 s)"


def test_cause_is_not_that_the_rank_that_is_blamed_waited_for_the_others_to_complete() -> None:
    verdict = Verdict("went_on", "user_code", first=0, culprits=(Culprit(0, "went_on", 0.7, 10),))
    waited = InterruptionRecord(0, Interruption.UNRESPONSIVE, "late", detector=Detector("completion_barrier", 4.0))
    assert failure_in_words(incident(verdict, waited)) == "rank 0 failed first (continued while others waited)"


def test_ranks_that_failed_alike_are_named_together() -> None:
    verdict = Verdict("common", "user_code", culprits=tuple(Culprit(rank, "exception", 0.5, 14) for rank in range(3)))
    text = failure_in_words(incident(verdict, ECHO))
    assert text == "ranks 0-2 failed in the same way (RuntimeError: connection closed)"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict("communication", "unknown"), "no rank is to blame (all wait at the same line)"),
        (Verdict("unknown", "unknown"), "which rank failed first is not known"),
        (
            Verdict("hung", "unknown"),
            "which rank failed first is not known (a rank waited, and the rank it waited for is unknown)",
        ),
        (Verdict("store_lost", "host"), "the job's store was lost"),
    ],
)
def test_failure_without_a_culprit_names_no_culprit(verdict: Verdict, text: str) -> None:
    assert failure_in_words(incident(verdict, ECHO)) == text


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (KILLED, "SIGKILL"),
        (
            InterruptionRecord(0, Interruption.TERMINATED, exit=Exit(signal="SIGKILL", oom=True)),
            "SIGKILL, out of memory",
        ),
        (InterruptionRecord(0, Interruption.TERMINATED, exit=Exit(code=3)), "exit code 3"),
        (
            InterruptionRecord(0, Interruption.HARD_TIMEOUT, detector=Detector("step", 4.0), hang="stopped"),
            "hung: step limit 4 s, the process is stopped",
        ),
        (InterruptionRecord(0, Interruption.UNRESPONSIVE, "node b is lost"), "node b is lost"),
        (InterruptionRecord(0, Interruption.EXCEPTION, exception=ExceptionInfo("E", "a\nb", "f")), "E: a b"),
    ],
)
def test_cause_is_short(record: InterruptionRecord, cause: str) -> None:
    assert cause_in_words(record) == cause


def test_long_cause_is_cut() -> None:
    cause = cause_in_words(InterruptionRecord(0, Interruption.UNRESPONSIVE, "x" * 1000))
    assert len(cause) == LONGEST and cause.endswith("…")
