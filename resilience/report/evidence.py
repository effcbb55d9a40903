"""How does a terminal show the evidence of one rank: its exception with causes and notes, and its last log lines?

Frames of the user's code come first, innermost first. Frames of libraries follow, or are only counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilience.facts.in_words import count
from resilience.facts.interruptions import Cause, ExceptionInfo, Frame
from resilience.facts.user_frames import is_users
from resilience.system.render import Line, cut, field
from resilience.telemetry.log import as_people_read

SHOWN_FRAMES = 4  # of the user's code, in the short form
SHOWN_CAUSES, SHOWN_NOTES = 2, 2
LONGEST = 480  # characters of a message, in the short form
LAST_LINES = 20  # of a rank's output, in the whole form
_RELATIONS = {"cause": "caused by", "context": "while handling", "part": "part"}


def frame_in_words(frame: Frame) -> str:
    """Return file, line and function of a frame."""
    return f"{frame.file}:{frame.line} in {frame.function}"


def exception_lines(error: ExceptionInfo, width: int, by: str = "", is_whole: bool = False) -> Iterator[Line]:
    """Yield an exception. by: prefix that names the rank. is_whole: include every frame, cause and note."""
    text = f"{by}{error.in_words}"
    yield from field("what", text if is_whole else cut(text, LONGEST), width, "bold")
    yield from _frames(error.stack, width, is_whole)
    yield from _notes(error.notes, width, is_whole)
    causes = error.causes if error.causes else _from_chain(error)
    for cause in causes if is_whole else causes[:SHOWN_CAUSES]:
        description = cause.in_words
        text = f"{_RELATIONS[cause.relation]} {description}"
        yield from field("", text if is_whole else cut(text, LONGEST // 3), width)
        yield from _frames(cause.stack, width, is_whole, most=SHOWN_FRAMES if is_whole else 1)
        yield from _notes(cause.notes, width, is_whole)
    if not is_whole and len(causes) > SHOWN_CAUSES:
        yield from field("", f"… and {count(len(causes) - SHOWN_CAUSES, 'more cause')}", width, "dim")


def _from_chain(error: ExceptionInfo) -> tuple[Cause, ...]:
    """Return the causes of a record from an older version, which has no frames for them."""
    return tuple(Cause(link, "", "cause") for link in error.chain)


def _frames(stack: Iterable[Frame], width: int, is_whole: bool, most: int = SHOWN_FRAMES) -> Iterator[Line]:
    frames = list(reversed(tuple(stack)))
    user_frames = [frame for frame in frames if is_users(frame)]
    visible = user_frames if is_whole else user_frames[:most]
    for number, frame in enumerate(visible):
        yield from field("", f"{'from' if number else 'at'} {frame_in_words(frame)}", width)
    libraries = [frame for frame in frames if not is_users(frame)]
    left_out = len(user_frames) - len(visible)
    if is_whole and libraries:
        yield from field("", f"and {count(len(libraries), 'frame')} of libraries:", width, "dim")
        for frame in libraries:
            yield from field("", f"  {frame_in_words(frame)}", width, "dim")
    elif left_out:
        yield from field("", f"… and {count(left_out, 'more frame')}; --incident N shows all", width, "dim")


def _notes(notes: Iterable[str], width: int, is_whole: bool) -> Iterator[Line]:
    for number, note in enumerate(notes):
        if is_whole or number < SHOWN_NOTES:
            yield from field("", f"note: {note if is_whole else cut(note, LONGEST // 3)}", width)


def last_lines(log_tail: Iterable[str], most: int = LAST_LINES) -> list[str]:
    """Return the last lines that a rank wrote, readable."""
    return [as_people_read(line) for line in tuple(log_tail)[-most:]]
