"""A forked worker is like a fresh interpreter: what it sees, writes, and how it ends.

Each script of `scripts/semantics` is run both ways. Here one agent starts its workers warm and cold;
whole jobs under torchrun and under `resilience run` are compared in test_like_torchrun, DataLoaders there alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.warming import SCRIPTS
from tests.support.ranks import Job

pytestmark = pytest.mark.timeout(900)  # cold workers import torch

Both = Callable[..., list[dict[str, Any]]]
SIGNALLED = {"interrupt": -signal.SIGINT, "kill": -signal.SIGKILL, "terminate": -signal.SIGTERM}
ENDS = {
    "well": 0,
    "thread": 0,
    "exit": 3,
    "exit-none": 0,
    "exit-true": 1,
    "exit-negative": 255,
    "exit-text": 1,
    "exit-tuple": 1,
    "exit-now": 4,
    "exception": 1,
    "group": 1,
    "base": 1,
    "hook": 1,
    "hook-exits": 7,
    "thread-exception": 0,
    "abort": -signal.SIGABRT,
    **SIGNALLED,
}


@pytest.fixture
def both(start: Callable[..., Job]) -> Both:
    """Run a program warm and cold; answers what is told of each."""

    def run(*arguments: str, **options: Any) -> list[dict[str, Any]]:
        job = start(1, "tests.process.warming:run", arguments=list(arguments), **options)
        (ended,) = job.wait_ranks(600.0)
        job.ran_to_its_end = True
        assert ended.code == 0, job.output()
        answers: list[dict[str, Any]] = ended.value
        return answers

    return run


def assert_same(answers: list[dict[str, Any]], code: int = 0) -> str:
    """The warm worker did what the cold one did; answers what both wrote to stdout."""
    warm, cold = answers
    assert (warm["how"], warm["reason"], cold["how"]) == ("warm", "", "cold")
    assert warm["out"] == cold["out"]
    assert warm["err"] == cold["err"]
    assert warm["codes"] == cold["codes"] == [code] * len(cold["codes"]), warm["err"]
    return "\n".join(cold["out"])


@pytest.mark.parametrize(
    "name",
    ["main_module", "pickled", "signals", "process", "environment", "command", "warns", "hidden", "late", "loggers"],
)
def test_script_sees_and_does_the_same(both: Both, name: str) -> None:
    assert assert_same(both(str(SCRIPTS / f"{name}.py")))


@pytest.mark.parametrize("how", ENDS)
def test_worker_ends_the_same(both: Both, how: str) -> None:
    assert_same(both(str(SCRIPTS / "ends.py"), how), ENDS[how])


def test_crash_in_c_shows_the_programs_stack_above_ours(both: Both) -> None:
    warm, cold = both(str(SCRIPTS / "ends.py"), "crash")
    assert (warm["how"], warm["codes"], cold["codes"]) == ("warm", [-signal.SIGSEGV], [-signal.SIGSEGV])
    frames = [[line for line in each["err"][0].splitlines() if line.startswith("  File")] for each in (warm, cold)]
    assert frames[0][: len(frames[1])] == frames[1]
    assert all("resilience/launcher" in frame for frame in frames[0][len(frames[1]) :][:3])


def test_arguments_arrive_as_they_were_given(both: Both) -> None:
    out = assert_same(both(str(SCRIPTS / "arguments.py"), "a b", "", "--", "-x", "'\"$HOME", "ünï", "\udcff"))
    assert "'a b', '', '--', '-x'" in out


@pytest.mark.parametrize("path", ["arguments.py", "./arguments.py", "../semantics/arguments.py", "link.py"])
def test_script_is_named_in_any_way(both: Both, path: str, tmp_path: Path) -> None:
    folder = SCRIPTS
    if path == "link.py":
        folder = tmp_path
        (tmp_path / path).symlink_to(SCRIPTS / "arguments.py")
    assert_same(both(path, cwd=str(folder)))


@pytest.mark.parametrize("path", ["ends.py", "./ends.py", "../semantics/ends.py"])
def test_traceback_names_the_script_as_usual(both: Both, path: str) -> None:
    assert_same(both(path, "exception", cwd=str(SCRIPTS)), 1)


@pytest.mark.parametrize(
    "arguments", [["package"], ["package.module"], ["package.module", "a b"], ["no_such_module"], ["package.no_such"]]
)
def test_module_is_run_the_same(both: Both, arguments: list[str]) -> None:
    assert_same(both("-m", *arguments, cwd=str(SCRIPTS)), int(len(arguments) > 1 or "no_such" in arguments[0]))


def test_script_that_cannot_be_compiled_is_reported_as_usual(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text('"""Cannot be compiled."""\n\nvalue = = 1\n')
    assert_same(both(str(script)), 1)


def test_modules_are_found_and_children_work(both: Both, tmp_path: Path) -> None:
    assert_same(both(str(SCRIPTS / "imports.py"), str(tmp_path)))
    assert_same(both(str(SCRIPTS / "children.py")))


def test_streams_are_unbuffered_and_stdin_is_the_agents(both: Both) -> None:
    out = assert_same(both(str(SCRIPTS / "streams.py"), stdin="one\r\ntwo\n"))
    assert "'one\\r\\ntwo\\n'" in out
    assert out.endswith("from C, from Python, from C again")


def test_signals_that_were_ignored_before_stay_so(both: Both) -> None:
    assert_same(both(str(SCRIPTS / "signals.py"), deaf=[signal.SIGUSR2, signal.SIGTSTP]))


def test_environment_that_is_no_text_arrives(both: Both) -> None:
    assert_same(
        both(str(SCRIPTS / "environment.py"), environment={"ODD": "\udcfe\udcff", "EMPTY": "", "LINES_": "a\nb"})
    )


def test_folder_that_is_deleted_stops_nobody(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.path.lexists('x'), sys.path[0])\n")
    assert_same(both(str(script), cwd="<deleted>"))


def test_chance_differs_between_workers_and_seeds_hold(both: Both) -> None:
    answers = both(str(SCRIPTS / "seeds.py"), workers=2, ways=["warm", "cold"])
    told = [json.loads(out) for answer in answers for out in answer["out"]]
    assert [answer["how"] for answer in answers] == ["warm", "cold"]
    assert len({json.dumps(each["same"]) for each in told}) == 1
    for column in zip(*(each["different"] for each in told), strict=True):
        assert len(set(column)) == 4


def test_torch_is_as_it_was_imported(both: Both) -> None:
    assert_same(both(str(SCRIPTS / "torch_state.py")))


def test_error_file_is_written_only_by_scripts_that_use_record(both: Both) -> None:
    warm, cold = both(str(SCRIPTS / "recorded.py"))
    assert (warm["how"], warm["codes"], cold["codes"]) == ("warm", [1], [1])
    assert warm["err"] == cold["err"]
    messages = [each["errors"][0]["message"] for each in (warm, cold)]
    assert [message["message"] for message in messages] == ["ValueError: on purpose"] * 2
    assert messages[0]["extraInfo"]["py_callstack"] == messages[1]["extraInfo"]["py_callstack"]
    assert [each["errors"] for each in both(str(SCRIPTS / "ends.py"), "exception")] == [[], []]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": None}, marks=pytest.mark.slow),
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"},
        pytest.param({"OMP_NUM_THREADS": None, "OPENBLAS_NUM_THREADS": None}, marks=pytest.mark.slow),
        pytest.param({"OMP_NUM_THREADS": "2,1", "OPENBLAS_NUM_THREADS": "1"}, marks=pytest.mark.slow),
    ],
)
def test_threads_are_as_many_as_the_environment_says(both: Both, environment: dict[str, str | None]) -> None:
    assert_same(both(str(SCRIPTS / "threads.py"), environment=environment))
