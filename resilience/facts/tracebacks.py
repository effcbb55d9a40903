"""Which exception ended a program?  Reads the last traceback that its interpreter printed.

A program without a Wrapper leaves only its last output lines. The last traceback in them gives type, message and
frames; tracebacks that Python prints above it give the causes. A traceback that ordinary output follows was printed by
a program that continued, so it ended nothing. torch's prefix of each line (`[rank0]: `), colours and tqdm's progress
bars are dropped. A traceback without its last line counts as an unknown exception. The fingerprint is that of a caught
exception (`facts.fingerprints`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from resilience.facts import fingerprints
from resilience.facts.interruptions import Cause, ExceptionInfo, Frame

BEGIN = "Traceback (most recent call last):"
CUT_OFF = "unknown exception"  # type of a traceback without its last line
MOST_FRAMES = 60
MOST_CAUSES = 5
MOST_MESSAGE = 2000  # characters
MOST_LINES = 10  # of a message that are kept; a message has no more lines, except indented ones
_RELATIONS: dict[str, Literal["cause", "context"]] = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_GROUP = "Exception Group Traceback (most recent call last):"
_MARGIN = re.compile(r"^  \| ?")  # before each line of a group's own traceback
_PART_MARGIN = re.compile(r"^    \| ?")
_PART = re.compile(r"^(  \+-|    )\+-+ (\d+|\.\.\.) -+$")  # before each part of a group
_FRAME = re.compile(r'^\s*File "(.+)", line (\d{1,9}), in (.+)$')
_DUMPED = re.compile(r"^object (type name|repr)\s*: (.+)$")
_RAISED = re.compile(r"^([^\W\d]\w*(?:\.(?:\w+|<locals>|<lambda>))*)(?:: (.*))?$")
_GLOG = re.compile(r"^\[?[WEIF]\d{4} \d\d:\d\d:\d\d")  # lines of torch's C++ code and of its Python loggers
# C++ frames at the end of torch's messages, and what loggers and the interpreter print after a traceback.
_NOT_COUNTED = re.compile(r"^frame #\d+: |^wandb: |^\S+:\d+: \w*Warning: ")
_IGNORED = "Exception ignored in"  # a traceback follows that ends no program
# A traceback that begins on the line of other output, such as a progress bar. After a word and a blank, as in `Original
# Traceback …`, it is one that a message quotes.
_BEGINS_LATE = re.compile(
    rf"(?<![A-Za-z:|] )(?:\[rank\d+\]: ?)?((?:  \+ Exception Group )?{re.escape(BEGIN)}$|{_IGNORED}.*)"
)
_BAR = re.compile(r"\[\d+:[\d:]+(?:<[\d:?]+)?, +[\d.?]+ ?[^\s/]*/")  # times and rate in tqdm's progress bar
_DIGITS = re.compile(r"\d+")
_LOGGED = re.compile(r"^[\[(]?\d{4}-\d\d-\d\d|^[\[(]?\d\d:\d\d:\d\d|^\[?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


def parse(lines: Sequence[str]) -> ExceptionInfo | None:
    """Return the exception of the last traceback in these lines, None if there is none."""
    text = _without_margins(list(_without_bars(lines)))
    begins = [number for number, line in enumerate(text) if line.lstrip() == BEGIN and not _is_ignored(text, number)]
    if not begins or _has_continued(text[: begins[0]], text[begins[-1] :]):
        return None
    raised = _raised(text[begins[-1] :])
    if raised is None:
        return None
    causes = _parts(text[begins[-1] :])
    for begin, following in reversed(list(itertools.pairwise(begins))):
        relation = _relation(text[begin:following])
        cause = _raised(text[begin:following])
        if relation is None or cause is None:
            break
        causes.append(Cause(cause.type, cause.message, relation, cause.stack))
    return msgspec.structs.replace(raised, causes=tuple(causes[:MOST_CAUSES]))


def without_prefix(line: str) -> str:
    """Return a line without torch's prefix, `[rank0]: `."""
    return _PREFIX.sub("", line)


def is_of_group(line: str, is_previous: bool) -> bool:
    """Return True if a line is of the traceback of an exception group. is_previous: the line before it is of one."""
    return line == f"  + {_GROUP}" or (is_previous and line.startswith(("  |", "  +", "    ")))


def _without_bars(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines without colours, torch's prefix and progress bars: a bar that is still open is drawn again when
    the interpreter ends. A traceback that begins on the line of other output gets a line of its own."""
    for line in lines:
        plain = fingerprints.COLOURS.sub("", line)  # Python 3.13 and later colour a traceback at a terminal
        late = _BEGINS_LATE.search(plain)
        parts = [plain[: late.start()], late[1]] if late is not None and plain[: late.start()].strip() else [plain]
        yield from (without_prefix(part) for part in parts if not _BAR.search(part))


def _without_margins(text: Sequence[str]) -> list[str]:
    """Return the lines, with the tracebacks of exception groups like those of other exceptions. The lines about parts
    stay as they are."""
    plain: list[str] = []
    is_group = False
    for line in text:
        is_group = is_of_group(line, is_group)
        begins = is_group and line.endswith(_GROUP) and line.startswith("  +")
        plain.append(BEGIN if begins else _MARGIN.sub("", line) if is_group else line)
    return plain


def _parts(block: Sequence[str]) -> list[Cause]:
    """Return the exceptions of the group whose traceback these lines are, none if it is no group."""
    places = [number for number, line in enumerate(block) if _PART.match(line)]
    parts = []
    for place, following in itertools.pairwise([*places, len(block)]):
        inner = itertools.takewhile(_PART_MARGIN.match, block[place + 1 : following])
        lines = [_PART_MARGIN.sub("", line) for line in inner]
        begins = [number for number, line in enumerate(lines) if line in (BEGIN, _GROUP)]
        part = _raised(lines[begins[-1] :] if begins else ["", *lines])
        if part is not None:
            parts.append(Cause(part.type, part.message, "part", part.stack))
    return parts


def _is_ignored(text: Sequence[str], begin: int) -> bool:
    """Return True if the interpreter ignored the exception of the traceback that begins in this line."""
    return begin > 0 and text[begin - 1].startswith(_IGNORED)


def _has_continued(before: Sequence[str], block: Sequence[str]) -> bool:
    """Return True if ordinary output follows the traceback in these lines. A message may have several lines, so output
    is recognised by a time or a level, by lines like those before any traceback, or by its length."""
    last = next((number for number, line in enumerate(block) if number and line[:1] not in ("", " ")), len(block))
    following = itertools.takewhile(lambda line: not line.startswith(_IGNORED), block[last + 1 :])
    rest = [line for line in following if line.strip() and not _GLOG.match(line) and not _NOT_COUNTED.match(line)]
    usual = {_DIGITS.sub("0", line) for line in before}
    return (
        sum(line[:1] not in (" ", "\t") for line in rest) > MOST_LINES
        or any(_LOGGED.match(line) for line in rest)
        or any(_DIGITS.sub("0", line) in usual for line in rest)
    )


def _relation(lines: Sequence[str]) -> Literal["cause", "context"] | None:
    """Return how the traceback in these lines led to the next one, None if it did not."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return _RELATIONS.get(last.strip())


def _raised(text: Sequence[str]) -> ExceptionInfo | None:
    """Return the exception of the traceback that begins in the first line."""
    frames: list[Frame] = []
    name, message, has_message = "", "", True
    for number in range(1, len(text)):
        line = text[number]
        frame = _FRAME.match(line)
        if frame is not None:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        elif line[:1] not in ("", " "):
            raised = _RAISED.match(line)
            if raised is None:
                name, message = _dumped(text[number:])
                break
            name, message = raised[1], "\n".join([raised[2] or "", *_more(text[number + 1 :])]).strip()
            has_message = raised[2] is not None  # else further lines are notes
            break
    if not name and frames:
        name = CUT_OFF
    if not name:
        return None
    stack, message = tuple(frames[-MOST_FRAMES:]), message[:MOST_MESSAGE]
    return ExceptionInfo(
        type=name,
        message=message,
        fingerprint=fingerprints.of_exception(name, message if has_message else "", stack),
        stack=stack,
    )


def _dumped(lines: Sequence[str]) -> tuple[str, str]:
    """Return type and `repr` of an exception from CPython's object dump. CPython prints it instead of the last line if
    printing the exception raised another one."""
    fields = {match[1]: match[2] for line in lines if (match := _DUMPED.match(line))}
    return fields.get("type name", ""), fields.get("repr", "")


def _more(lines: Sequence[str]) -> list[str]:
    """Return the further lines of a message, up to a line that certainly does not belong to it."""
    message = itertools.takewhile(
        lambda line: line.strip() not in _RELATIONS and not line.startswith(_IGNORED) and not _PART.match(line),
        lines[:MOST_LINES],
    )
    return [line for line in message if line and not _GLOG.match(line)]
