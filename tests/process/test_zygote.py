"""The zygote: what it forks, and what becomes of workers when it, or its agent, is lost."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import Job

Agent = Callable[..., dict[str, Any]]


@pytest.fixture
def agent(start: Callable[..., Job]) -> Agent:
    """Run an agent of `zygotes`; answers what it found."""

    def run(what: str, **options: Any) -> dict[str, Any]:
        job = start(1, f"tests.process.zygotes:{what}", **options)
        (ended,) = job.wait_ranks()
        job.ran_to_its_end = True
        assert ended.code == 0, job.output()
        found: dict[str, Any] = ended.value
        found["shown"] = (job.folder / f"{job.key}-0.1").read_text()
        return found

    return run


def test_worker_that_is_signalled_as_soon_as_its_pid_is_known_ends(agent: Agent) -> None:
    assert agent("stop_at_once")["ends"] == [-signal.SIGTERM] * 8


def test_lost_zygote_disturbs_no_worker_and_the_next_start_cold(agent: Agent) -> None:
    found = agent("lose_zygote")
    first, second = found["answers"]
    assert (first["how"], first["codes"], first["out"]) == ("warm", [10, 11], ["rank 0\n", "rank 1\n"])
    assert (second["how"], second["codes"], second["out"]) == ("cold", [10, 11], ["rank 0\n", "rank 1\n"])
    assert second["reason"] == "the zygote is gone (SIGKILL)"
    assert found["ran"] == ["0", "0", "1", "1"]


def test_zygote_that_does_not_answer_is_awaited_once_and_forks_again_after_its_answer(agent: Agent) -> None:
    found = agent("silence_zygote")
    assert [(answer["how"], answer["reason"]) for answer in found["answers"]] == [
        ("cold", "the zygote did not fork within 0.8 s"),
        ("cold", "the zygote has not answered an earlier order yet"),
        ("warm", ""),
    ]
    assert [answer["codes"] for answer in found["answers"]] == [[10, 11]] * 3
    assert found["ran"] == ["0"] * 3 + ["1"] * 3  # no process of the late answer


@pytest.mark.parametrize("when", ["before", "while"])  # before the order, and while it is carried out
def test_zygote_that_is_stopped_is_continued_and_forks_the_next_workers(agent: Agent, when: str) -> None:
    found = agent("stop_zygote", when=when)
    (answer,) = found["answers"]
    assert (answer["how"], answer["reason"], answer["codes"]) == ("warm", "", [10, 11])
    assert found["ran"] == ["0", "1"]


def test_zygote_that_dies_before_it_answers_is_gone_though_its_workers_wait(agent: Agent) -> None:
    found = agent("lose_forking_zygote")
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"]) == ("cold", [10, 11])
    assert answer["reason"].startswith("the zygote is gone")
    assert found["ran"] == ["0", "1"]


@pytest.mark.parametrize("descriptors", [250, 5])  # of a message: three workers in one order, and in three
def test_failed_fork_lets_none_run_and_all_start_cold_and_the_next_warm(agent: Agent, descriptors: int) -> None:
    found = agent("fail_to_fork", descriptors=descriptors)
    answer, later = found["answers"]
    assert (answer["how"], answer["codes"]) == ("cold", [10, 11, 12])
    assert answer["reason"] == "the zygote could not fork: Resource temporarily unavailable"
    assert (later["how"], later["reason"], later["codes"]) == ("warm", "", [10, 11, 12])
    assert found["ran"] == ["0", "0", "1", "1", "2", "2"]


def test_preload_for_which_no_process_can_be_forked_leaves_the_zygote_as_it_was(agent: Agent) -> None:
    found = agent("fail_to_preload")
    (answer,) = found["answers"]
    assert (answer["how"], answer["reason"], answer["codes"]) == ("warm", "", [10])
    assert found["left_out"] == [["colorsys"]]
    assert found["outcomes"] == [["colorsys"]]  # of the next time


def test_order_that_cannot_be_given_is_carried_out_cold_and_the_next_one_warm(agent: Agent) -> None:
    found = agent("without_memory")
    first, second = found["answers"]
    assert (first["how"], first["codes"]) == ("cold", [10])
    assert "no descriptor is left" in first["reason"]
    assert (second["how"], second["codes"]) == ("warm", [10])
    assert found["ran"] == ["0", "0"]


def test_more_workers_than_a_message_can_carry_are_forked_all_the_same(agent: Agent) -> None:
    found = agent("in_several_orders")
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"]) == ("warm", [10, 11, 12, 13, 14])
    assert answer["out"] == [f"rank {rank}\n" for rank in range(5)]


def test_zygote_and_workers_end_with_their_agent(start: Callable[..., Job]) -> None:
    job = start(1, "tests.process.zygotes:be_killed")
    job.await_sign("ready", 0)
    zygote = os.pidfd_open(int((job.folder / "zygote").read_text()))
    workers = [os.pidfd_open(int(pid)) for pid in (job.folder / "pids").read_text().split()]
    job.signal(0, signal.SIGKILL)
    assert all(has_ended(process, 20.0) for process in (zygote, *workers))
    job.wait_ranks()
    job.ran_to_its_end = True
    for fd in (zygote, *workers):
        os.close(fd)


def test_process_with_threads_is_not_forked(agent: Agent) -> None:
    found = agent("with_a_thread")
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], found["zygote"]) == ("cold", [10], 0)
    assert answer["reason"].startswith("2 threads run")


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("program", "the workers' program is /bin/echo, not this interpreter"),
        ("variable", "PYTHONOPTIMIZE is not as it was when the agent started"),
        ("shadow", "numpy.py takes the place of a module that is imported already"),
        ("option", "the agent's own interpreter has the option -O"),
        ("folder", "the script is not a file"),
    ],
)
def test_program_that_needs_a_fresh_interpreter_gets_one(agent: Agent, why: str, reason: str) -> None:
    (answer,) = agent("start_cold", why=why)["answers"]
    assert answer["how"] == "cold"
    assert answer["reason"].endswith(reason)
    assert answer["codes"] == ([0] if why == "program" else [10])


@pytest.mark.parametrize(("redirects", "is_kept"), [("NONE", False), ("OUT", True), ("ALL", True)])
def test_output_goes_where_torchelastic_sends_it(agent: Agent, redirects: str, is_kept: bool) -> None:
    found = agent("write_to", redirects=redirects)
    (answer,) = found["answers"]
    assert answer["how"] == "warm"
    assert answer["out"] == (["rank 0\n", "rank 1\n"] if is_kept else [])
    assert sorted(found["shown"].splitlines()) == ([] if is_kept else ["rank 0", "rank 1"])


def test_worker_has_a_module_that_the_successor_of_the_zygote_has_imported(agent: Agent) -> None:
    found = agent("preload", modules=["harmless"])
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], answer["out"]) == ("warm", [0], ["False\n"])
    assert found["outcomes"] == [["harmless", "refused:", ""]]
    assert found["has_changed"]
    assert found["is_left"] == []


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("with_a_thread", "2 threads run"),
        ("with_a_file", "its import changes open descriptors"),
        ("with_a_folder", "its import leaves a temporary folder"),
        ("with_a_cache", "its import leaves a temporary folder"),
        ("with_a_child", "its import changes child processes"),
        ("with_a_handler", "its import changes handlers of signals"),
        ("that_fails", "RuntimeError: on purpose"),
        ("that_is_not_there", "ModuleNotFoundError"),
    ],
)
def test_module_that_spoils_a_fork_is_refused_and_the_others_are_kept(agent: Agent, module: str, why: str) -> None:
    found = agent("preload", modules=[module, "harmless"])
    refused, kept = found["outcomes"]
    assert refused[:2] == ["refused:", module]
    assert refused[2].startswith(why)
    assert kept == ["harmless", "refused:", ""]
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], answer["out"]) == ("warm", [0], ["False\n"])


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("that_dies", "the process that imported them is gone (SIGABRT)"),
        ("with_long_names", "they import too many modules to report"),
    ],
)
def test_module_that_ends_the_process_or_has_no_result_costs_no_worker(agent: Agent, module: str, why: str) -> None:
    found = agent("preload", modules=["harmless", module])
    assert found["outcomes"] == [["refused:", "harmless", module, why]]
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], answer["out"]) == ("warm", [0], ["True\n"])
    assert not found["has_changed"]


def test_module_whose_import_does_not_end_is_refused_and_the_zygote_stays_as_it_was(agent: Agent) -> None:
    found = agent("preload", modules=["that_waits"], import_limit=0.5)
    assert found["outcomes"] == [["refused:", "that_waits", "the import did not end within 0.5 s"]]
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], answer["out"]) == ("warm", [0], ["True\n"])
    assert not found["has_changed"]
    assert found["is_left"] == []


def test_module_whose_import_removes_its_temporary_folder_is_preloaded(agent: Agent) -> None:
    found = agent("preload", modules=["with_a_trial", "harmless"])
    assert found["outcomes"] == [["with_a_trial", "harmless", "refused:", ""]]


def test_process_that_imports_modules_is_continued_if_it_is_stopped(agent: Agent) -> None:
    found = agent("preload", modules=["that_stops", "harmless"])
    assert found["outcomes"] == [["that_stops", "harmless", "refused:", ""]]


def test_learned_module_that_ends_the_process_leaves_the_zygote_as_it_was(agent: Agent) -> None:
    found = agent("preload", modules=[], learned=("that_dies",))
    assert found["outcomes"] == [["refused:", "that_dies", "the process that imported them is gone (SIGABRT)"]]
    (answer,) = found["answers"]
    assert (answer["how"], answer["codes"], answer["out"]) == ("warm", [0], ["True\n"])
    assert not found["has_changed"]


def has_ended(pidfd: int, limit: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(limit * 1000))
