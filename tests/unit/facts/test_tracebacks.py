"""What a dead program's last lines say of the exception that ended it."""

from __future__ import annotations

import traceback

import pytest

from resilience.facts.interruptions import Cause, Frame
from resilience.facts.tracebacks import MOST_CAUSES, MOST_LINES, parse

PROGRAM = """
def look_up(key):
    return {{}}[key]

def load():
    try:
        look_up("seven")
    except KeyError as error:
        raise {raising}

load()
"""


def last_lines(program: str) -> list[str]:
    """Return what the interpreter writes at the end of a program that raises."""
    try:
        exec(compile(program, "<string>", "exec"), {})
    except Exception as error:
        own = error.with_traceback(None if error.__traceback__ is None else error.__traceback__.tb_next)
        return "".join(traceback.format_exception(own)).splitlines()
    pytest.fail("the program does not raise")


LOOKED_UP = (Frame("<string>", 7, "load"), Frame("<string>", 3, "look_up"))


@pytest.mark.parametrize(
    ("raising", "relation"), [("ValueError('no seven') from error", "cause"), ("ValueError('no seven')", "context")]
)
def test_cause_of_an_exception_is_read_with_its_frames(raising: str, relation: str) -> None:
    found = parse(["loading", *last_lines(PROGRAM.format(raising=raising))])
    assert found is not None
    assert (found.type, found.message, found.stack[-1]) == ("ValueError", "no seven", Frame("<string>", 9, "load"))
    assert found.causes == (Cause("KeyError", "'seven'", relation, LOOKED_UP),)  # type: ignore[arg-type]


def test_exception_that_hides_its_context_has_no_cause() -> None:
    found = parse(last_lines(PROGRAM.format(raising="ValueError('no seven') from None")))
    assert found is not None
    assert (found.type, found.causes) == ("ValueError", ())


def test_traceback_that_was_printed_before_is_no_cause() -> None:
    earlier = last_lines("raise OSError('handled')")
    found = parse([*earlier, "going on", *last_lines("raise ValueError('no')")])
    assert found is not None
    assert (found.type, found.message, found.causes) == ("ValueError", "no", ())


RECURSIVE = """
def f(n):
    try:
        f(n - 1) if n else 1 / 0
    except Exception as error:
        raise ValueError(n) from error

f(9)
"""


def test_chain_of_causes_is_cut() -> None:
    found = parse(last_lines(RECURSIVE))
    assert found is not None
    assert [cause.message for cause in found.causes] == ["8", "7", "6", "5", "4"]
    assert len(found.causes) == MOST_CAUSES


TORN = ["Traceback (most recent call last):", '  File "train.py", line 31, in <module>', "    next(loader)"]


def test_exception_is_known_though_another_one_came_while_it_was_printed() -> None:
    dump = [
        "     object address  : 0x7f6f8d3a6e40",
        "object refcount : 5",
        "object type     : 0x7f6fb0050f20",
        "object type name: ConnectionResetError",
        "object repr     : ConnectionResetError(104, 'Connection reset by peer')",
        "lost sys.stderr",
    ]
    raised = parse(TORN + dump)
    assert raised is not None
    assert (raised.type, raised.message) == (
        "ConnectionResetError",
        "ConnectionResetError(104, 'Connection reset by peer')",
    )
    assert raised.stack == (Frame("train.py", 31, "<module>"),)


def test_traceback_without_its_last_line_is_an_unknown_exception() -> None:
    raised = parse(TORN)
    assert raised is not None and (raised.type, raised.message) == ("unknown exception", "")
    assert parse(TORN[:1]) is None


def test_note_is_part_of_the_message_where_only_the_traceback_is_known() -> None:
    frame = '  File "a.py", line 1, in <module>'
    found = parse(["Traceback (most recent call last):", frame, "ValueError: no", "a note"])
    assert found is not None
    assert found.message == "no\na note"


RAISED = last_lines("raise ValueError('bad batch')")


@pytest.mark.parametrize(
    "output",
    [
        ["step 100 loss 2.1"] * 20,
        ["step 8 loss 2.1"],  # like the lines before
        ["2026-01-02 03:04:05,678 INFO retrying"],
        ["[03:04:05] retrying"],
        ["WARNING:root:retrying"],
    ],
)
def test_traceback_that_ordinary_output_follows_ended_nothing(output: list[str]) -> None:
    assert parse(["step 7 loss 2.2", *RAISED, *output]) is None


@pytest.mark.parametrize(
    "output",
    [
        [],
        ["", "W1123 14:32:09.123456 77 torch/distributed/run.py:792] closing"],
        ["[W1123 14:32:09.123456 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called"],
        ["sys:1: ResourceWarning: unclosed <socket>"],
        ["wandb: Run summary:"] * 30,
        [
            "Exception ignored in: <function Loader.__del__ at 0x7f>",
            *last_lines("raise OSError('closed')"),
            *["x"] * 20,
        ],
    ],
)
def test_what_is_printed_while_a_program_ends_hides_no_exception(output: list[str]) -> None:
    found = parse(["step 7 loss 2.2", *RAISED, *output])
    assert found is not None
    assert (found.type, found.stack) == ("ValueError", (Frame("<string>", 1, "<module>"),))


BAR = "Epoch 3:  30%|███       | 3/10 [00:12<00:28, 4.06s/it, loss=2.1]"
WITHOUT_TOTAL = "Epoch 3: 3tok [00:12, 4.06tok/s]"


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
@pytest.mark.parametrize(
    "bar", [BAR, f"{BAR}   ", WITHOUT_TOTAL, f"{BAR}\x1b[A", "3/10 [=>...] - loss: 2.1", "batch 3..."]
)
def test_traceback_on_the_line_of_a_progress_bar_is_read(bar: str, prefix: str) -> None:
    lines = [prefix + line for line in last_lines(PROGRAM.format(raising="ValueError('no seven') from error"))]
    expected = parse(lines)
    assert expected is not None and expected.type == "ValueError"
    assert parse(["loading", bar + lines[0], *lines[1:]]) == expected


def test_progress_bar_that_is_drawn_again_at_the_end_is_neither_output_nor_message() -> None:
    drawn_before = ["Epoch 3:   0%|          | 0/10 [00:00<?, ?it/s]", f"{BAR}{RAISED[0]}"]
    assert parse([*drawn_before, *RAISED[1:-1], "ValueError: slots [10:30, 11:00] overlap"]) is not None
    for rest in ([BAR], [WITHOUT_TOTAL, BAR.replace("4.06s/it", "1.10it/s")], [BAR] * 20):
        assert parse([*drawn_before, *RAISED[1:], *rest]) == parse(RAISED)


def test_exception_group_on_the_line_of_a_progress_bar_is_read() -> None:
    lines = last_lines(GROUP.format(raising="raise ExceptionGroup('tasks failed', caught)"))
    expected = parse(lines)
    assert expected is not None and len(expected.causes) == 3
    assert parse(["loading", BAR + lines[0], *lines[1:], BAR]) == expected
    assert parse([f"{BAR}[rank0]: {lines[0]}", *(f"[rank0]: {line}" for line in lines[1:]), BAR]) == expected


def test_exception_that_the_interpreter_ignored_on_the_line_of_a_progress_bar_ended_nothing() -> None:
    ignored = [f"{BAR}Exception ignored in: <function Loader.__del__ at 0x7f>", *last_lines("raise OSError('closed')")]
    assert parse([*ignored, BAR]) is None
    assert parse([*ignored, BAR + RAISED[0], *RAISED[1:]]) == parse(RAISED)
    assert parse([*RAISED, *ignored]) == parse(RAISED)


@pytest.mark.parametrize("words", ["Original ", "traceback : ", "see the Remote "])
def test_traceback_that_a_message_quotes_is_part_of_the_message(words: str) -> None:
    """As in an error that DataLoader raises for its worker."""
    quoted = [words + RAISED[0], *RAISED[1:]]
    found = parse([*RAISED[:-1], "OSError: in worker 0.", *quoted])
    assert found is not None
    assert (found.type, found.message.splitlines()[1]) == ("OSError", quoted[0])


def test_colours_of_a_traceback_are_left_out() -> None:
    """As Python 3.13 and later write them to a terminal."""
    coloured = [
        "Traceback (most recent call last):",
        '  File \x1b[35m"train.py"\x1b[0m, line \x1b[35m3\x1b[0m, in \x1b[35m<module>\x1b[0m',
        "    \x1b[31mstep\x1b[0m\x1b[1;31m(8)\x1b[0m",
        "\x1b[1;35mValueError\x1b[0m: \x1b[35mno seven\x1b[0m",
    ]
    found = parse(coloured)
    assert found is not None
    assert (found.type, found.message, found.stack) == ("ValueError", "no seven", (Frame("train.py", 3, "<module>"),))


@pytest.mark.parametrize(
    "lines",
    [
        ["shapes differ", "Weights: 3", "End", "Input: 4"],
        [
            "NCCL error",
            "Exception raised from run (most recent call first):",
            *(f"frame #{n}: f + 0x1" for n in range(30)),
        ],
        ["CUDA error: device-side assert triggered", "Compile with `TORCH_USE_CUDA_DSA`."],
        ["Error(s) in loading state_dict for Net:", *(f"\tsize mismatch for layer{number}" for number in range(30))],
    ],
)
def test_message_of_several_lines_is_no_ordinary_output(lines: list[str]) -> None:
    found = parse(last_lines(f"raise RuntimeError({chr(10).join(lines)!r})"))
    assert found is not None
    assert found.message.splitlines() == lines[: MOST_LINES + 1]


def test_exception_that_the_interpreter_ignored_is_not_the_one_that_ended_the_program() -> None:
    ignored = ["Exception ignored in: <function Loader.__del__ at 0x7f>", *last_lines("raise OSError('closed')")]
    found = parse([*ignored, *RAISED])
    assert found is not None and found.type == "ValueError"
    assert parse(ignored) is None


LOCAL = """
def f():
    class E(Exception):
        pass
    raise E('x')

f()
"""


def test_type_of_a_function_is_known() -> None:
    found = parse(last_lines(LOCAL))
    assert found is not None
    assert (found.type.rpartition(".")[2], found.message) == ("E", "x")
    assert "<locals>" in found.type


GROUP = """
def fail(error):
    raise error

def gather():
    caught = []
    for error in (ValueError('first\\nEnd of it'), KeyError('second'), ExceptionGroup('inner', [OSError('third')])):
        try:
            fail(error)
        except Exception as error:
            caught.append(error)
    {raising}

gather()
"""


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_exception_group_is_known_with_its_parts(prefix: str) -> None:
    lines = last_lines(GROUP.format(raising="raise ExceptionGroup('tasks failed', [*caught, TypeError('not raised')])"))
    found = parse(["step 7", *(prefix + line for line in lines)])
    assert found is not None
    assert (found.type, found.message) == ("ExceptionGroup", "tasks failed (4 sub-exceptions)")
    assert found.stack[-1].function == "gather"
    assert [(part.type, part.message, part.relation) for part in found.causes] == [
        ("ValueError", "first\nEnd of it", "part"),
        ("KeyError", "'second'", "part"),
        ("ExceptionGroup", "inner (1 sub-exception)", "part"),
        ("TypeError", "not raised", "part"),
    ]
    assert [frame.function for frame in found.causes[0].stack] == ["gather", "fail"]
    assert parse([*lines, *["step 8"] * 20]) is None


def test_exception_group_may_have_a_cause_and_be_one() -> None:
    chained = "raise ExceptionGroup('tasks failed', caught[:1]) from caught[1]"
    found = parse(last_lines(GROUP.format(raising=chained)))
    assert found is not None
    assert [(cause.type, cause.relation) for cause in found.causes] == [("ValueError", "part"), ("KeyError", "cause")]
    outer = """
    try:
        raise ExceptionGroup('tasks failed', caught[:2])
    except ExceptionGroup as group:
        raise RuntimeError('step failed') from group
"""
    found = parse(last_lines(GROUP.format(raising=outer.strip())))
    assert found is not None
    assert (found.type, found.message) == ("RuntimeError", "step failed")
    assert [(cause.type, cause.relation) for cause in found.causes] == [("ExceptionGroup", "cause")]
