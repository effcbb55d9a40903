"""How does the evidence of one rank look?  Its exception with causes and notes, and the last lines that it wrote.

The frames of the user's own code come first, innermost first; those of libraries follow, or are counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilience.cli.render import Line, count, cut, field
from resilience.core.attribution import Cause, ExceptionInfo, Frame
from resilience.core.user_frames import is_users
from resilience.telemetry.log import as_people_read

SHOWN_FRAMES = 4  # of the user's, where not everything is wanted
SHOWN_CAUSES, SHOWN_NOTES = 2, 2
LONGEST = 480  # characters of a message, where not everything is wanted
LAST_LINES = 20  # of a rank's output, where everything is wanted
_RELATIONS = {"cause": "caused by", "context": "while handling", "part": "part"}


def frame_in_words(frame: Frame) -> str:
    """Return file, line and function of a frame."""
    return f"{frame.file}:{frame.line} in {frame.function}"


def exception_lines(error: ExceptionInfo, width: int, by: str = "", is_whole: bool = False) -> Iterator[Line]:
    """Yield an exception. by: whose it is. is_whole: with each frame, cause and note."""
    text = f"{by}{error.type}: {error.message}"
    yield from field("what", text if is_whole else cut(text, LONGEST), width, "bold")
    yield from _frames(error.stack, width, is_whole)
    yield from _notes(error.notes, width, is_whole)
    causes = error.causes if error.causes else _from_chain(error)
    for cause in causes if is_whole else causes[:SHOWN_CAUSES]:
        said = f"{cause.type}: {cause.message}" if cause.message else cause.type
        text = f"{_RELATIONS[cause.relation]} {said}"
        yield from field("", text if is_whole else cut(text, LONGEST // 3), width)
        yield from _frames(cause.stack, width, is_whole, most=SHOWN_FRAMES if is_whole else 1)
        yield from _notes(cause.notes, width, is_whole)
    if not is_whole and len(causes) > SHOWN_CAUSES:
        yield from field("", f"… and {count(len(causes) - SHOWN_CAUSES, 'more cause')}", width, "dim")


def _from_chain(error: ExceptionInfo) -> tuple[Cause, ...]:
    """The causes in a record of an older version, which has no frames of them."""
    return tuple(Cause(link, "", "cause") for link in error.chain)


def _frames(stack: Iterable[Frame], width: int, is_whole: bool, most: int = SHOWN_FRAMES) -> Iterator[Line]:
    frames = list(reversed(tuple(stack)))
    own = [frame for frame in frames if is_users(frame)]
    shown = own if is_whole else own[:most]
    for number, frame in enumerate(shown):
        yield from field("", f"{'from' if number else 'at'} {frame_in_words(frame)}", width)
    libraries = [frame for frame in frames if not is_users(frame)]
    left_out = len(own) - len(shown)
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
    """Return the last lines that a rank wrote, as their writer meant them."""
    return [as_people_read(line) for line in tuple(log_tail)[-most:]]
