"""An exception is shown whole where one incident is shown, and its user's frames come first everywhere."""

from __future__ import annotations

from pathlib import Path

from resilience.core.cycle import CycleDecision
from resilience.facts.interruptions import Cause, ExceptionInfo, Frame, Interruption, InterruptionRecord
from resilience.launcher.summary import summary
from resilience.report.evidence import exception_lines, last_lines
from resilience.system.render import plain

MAIN = Frame("/home/me/train.py", 90, "<module>")
LOAD = Frame("/home/me/data.py", 34, "next_batch")
TORCH = Frame("/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 700, "__next__")
OURS = Frame("/site/resilience/inprocess/_runtime/call.py", 300, "_call_function")
LOOK_UP = Frame("/home/me/cache.py", 7, "look_up")
ERROR = ExceptionInfo(
    "ValueError",
    "bad batch",
    "f",
    (MAIN, OURS, LOAD, TORCH),
    ("KeyError: 'seven'",),
    ("batch 17", "seed 4"),
    (Cause("KeyError", "'seven'", "cause", (LOOK_UP, TORCH), ("of shard 3",)), Cause("OSError", "gone", "context")),
)


def shown(error: ExceptionInfo, is_whole: bool) -> list[str]:
    return [plain(line).strip() for line in exception_lines(error, 200, "", is_whole)]


def test_frames_of_the_user_come_first_and_libraries_after_them() -> None:
    assert shown(ERROR, is_whole=True) == [
        "what       ValueError: bad batch",
        "at /home/me/data.py:34 in next_batch",
        "from /home/me/train.py:90 in <module>",
        "and 2 frames of libraries:",
        f"{TORCH.file}:700 in __next__",
        f"{OURS.file}:300 in _call_function",
        "note: batch 17",
        "note: seed 4",
        "caused by KeyError: 'seven'",
        "at /home/me/cache.py:7 in look_up",
        "and 1 frame of libraries:",
        f"{TORCH.file}:700 in __next__",
        "note: of shard 3",
        "while handling OSError: gone",
    ]


def test_report_of_many_incidents_shows_the_users_frames_and_causes_of_each() -> None:
    assert shown(ERROR, is_whole=False) == [
        "what       ValueError: bad batch",
        "at /home/me/data.py:34 in next_batch",
        "from /home/me/train.py:90 in <module>",
        "note: batch 17",
        "note: seed 4",
        "caused by KeyError: 'seven'",
        "at /home/me/cache.py:7 in look_up",
        "note: of shard 3",
        "while handling OSError: gone",
    ]


def test_causes_of_an_older_record_are_shown_without_frames() -> None:
    assert shown(ExceptionInfo("ValueError", "no", "f", (), ("KeyError: 'x'",)), is_whole=True)[-1] == (
        "caused by KeyError: 'x'"
    )


def test_deep_recursion_is_counted_unless_all_is_wanted() -> None:
    deep = ExceptionInfo("RecursionError", "deep", "f", tuple(Frame("/home/me/a.py", n, "f") for n in range(50)))
    assert shown(deep, is_whole=False)[-1] == "… and 46 more frames; --incident N shows all"
    assert len(shown(deep, is_whole=True)) == 51


LOGGED = (
    '{"ts":"2026-11-22T07:50:12.123456Z","mono_ns":1,"seq":0,"level":"error","event":"cannot read","schema":1,"pid":7,'
    '"job_id":"job","rank":1,"initial_rank":1,"path":"a.bin",'
    '"exception":"Traceback (most recent call last):\\nOSError"}'
)
READ = "07:50:12.123 error    cannot read  path=a.bin\nTraceback (most recent call last):\nOSError"


def test_last_lines_are_shown_as_a_person_wrote_them() -> None:
    odd = ["step 7", '{"loss": 2.5}', '{"ts": 1, "level": {}, "event": []}', "{torn"]
    assert last_lines([*odd, LOGGED]) == [*odd, READ]


def test_last_words_of_the_launcher_show_them_so_too() -> None:
    record = InterruptionRecord(1, Interruption.TERMINATED, "process 7 ended", log_tail=(LOGGED,))
    text = summary(CycleDecision("failed", "node"), Path("/runs/job"), record)
    assert "07:50:12.123 error    cannot read  path=a.bin" in text
    assert "mono_ns" not in text


def test_exception_without_a_message_is_its_type_alone() -> None:
    assert shown(ExceptionInfo("ValueError", "", "f"), is_whole=False)[0] == "what       ValueError"
