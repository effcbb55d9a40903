"""What was raised?  Turns an exception into values, and releases what it holds.

A traceback keeps every frame of the failed call alive, and with the frames the collectives that they wait for
and their sockets. So an exception is described once, when it is caught. Its frames are then cleared; the
traceback itself stays printable."""

from __future__ import annotations

import builtins
import contextlib
import dis
import os
import sys
import time
import traceback
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal

import resilience
from resilience.core.communication import left_communication
from resilience.errors import MOST_TEXT, RankShouldRestart, RestartAbort, error_in_words, message_of
from resilience.facts import fingerprints
from resilience.facts.interruptions import (
    Cause,
    Detector,
    ExceptionInfo,
    FaultOrigin,
    Frame,
    Interruption,
    InterruptionRecord,
)
from resilience.system.environment import rank_and_world_size
from resilience.system.frames import MAX_FRAMES, current_frames, is_wrapper, places_of, stack_of_traceback
from resilience.system.signal_handlers import MAX_LINKS, is_from_signal

if TYPE_CHECKING:
    from resilience.inprocess.state import State

_Group: Any = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11
_PACKAGE = os.path.join(os.path.dirname(resilience.__file__), "")
MAX_FRAMES_OF_CAUSE = 20  # the innermost ones
MAX_CAUSES, MAX_NOTES, MAX_NOTE = 5, 5, 500  # causes, notes, characters of one and of a cause's message


def describe(error: BaseException) -> ExceptionInfo:
    """Return type, message, stack (innermost last), notes, causes and fingerprint of an exception."""
    stack = stack_of_traceback(error.__traceback__)
    name = _name(error)
    return ExceptionInfo(
        type=name,
        message=message_of(error),
        fingerprint=fingerprints.of_exception(name, _printed(error), stack),
        stack=stack,
        chain=tuple(error_in_words(link, 200) for link in _chain(error)),
        notes=_notes(error),
        causes=_causes(error),
    )


def _printed(error: BaseException) -> str:
    """Return the message as a traceback shows it: that of a syntax error is without its place, and one that cannot be
    printed is the same text whatever `__str__` raises."""
    shown: object = error
    if isinstance(error, SyntaxError):
        with contextlib.suppress(Exception):  # a property of its class may raise
            shown = error.msg
    try:
        return str(shown)[:MOST_TEXT]
    except (Exception, SystemExit):
        return fingerprints.UNPRINTABLE


def record_of(
    error: BaseException,
    kind: Interruption,
    stage: str,
    origin: FaultOrigin,
    state: State,
    node: str,
    step: int | None,
) -> InterruptionRecord:
    """Return the record of an exception that left a stage of this rank's iteration."""
    return InterruptionRecord(
        rank=state.initial_rank,
        interruption=kind,
        message=error_in_words(error, MOST_TEXT),
        exception=describe(error),
        origin=origin,
        detector=Detector("exception"),
        iteration=state.iteration,
        active_rank=state.rank,
        node=node,
        pid=os.getpid(),
        detected_wall_ns=time.time_ns(),
        stage=stage,
        step=step,
    )


def restarts_all(error: BaseException) -> bool:
    """Return True if all ranks restart from this failure, False if it ends its rank.

    torch's CheckpointException derives from BaseException. `torch.distributed.checkpoint` raises it on every rank
    when saving or loading fails on one: treated as a BaseException it would end the whole job."""
    return isinstance(error, (Exception, RankShouldRestart)) or _checkpoint_failures(error) is not None


def ends_rank_by_signal(error: BaseException) -> bool:
    """Return True if a signal ends this rank: Ctrl-C, or a handler of the program raised SystemExit or the like."""
    return is_from_signal(error) and not restarts_all(error)


def leaving(error: BaseException | None, outside: BaseException | None) -> BaseException | None:
    """Return the exception by which this rank leaves while `error` is handled, or None: that of a signal, or a
    RestartAbort that was raised while no other exception was handled, so no abort has led to it. Not any SystemExit:
    the function may handle that of a parser, say, and train meanwhile. outside: what the caller of the wrapped function
    handles meanwhile; it does not count."""
    for _ in range(MAX_LINKS):
        if error is None or error is outside:
            break
        gives_up = isinstance(error, RestartAbort) and error.__context__ is outside
        if gives_up or ends_rank_by_signal(error):
            return error
        error = error.__context__
    return None


def own_cause(error: BaseException | None, origin: FaultOrigin) -> Exception | None:
    """Return the exception for the hooks: this rank's own failure, the cause of a user's RankShouldRestart, or this
    rank's failure to save."""
    cause = error.__cause__ if isinstance(error, RankShouldRestart) else error
    failures = None if cause is None else _checkpoint_failures(cause)
    if failures:
        cause = failures.get(rank_and_world_size()[0], next(iter(failures.values())))[0]
    return cause if isinstance(cause, Exception) and origin == "own" else None


def origin_of(error: BaseException, is_cutting: bool) -> FaultOrigin:
    """Return whose fault an exception is, as far as this rank knows. is_cutting: the watcher had begun to cut when the
    exception left the function.

    A CheckpointException names the failed ranks, and reaches all ranks after the failure. On a named rank it is that
    rank's own fault, even if another rank reported it first. On the other ranks it is a consequence. No abort sends a
    signal that ends a rank."""
    if ends_rank_by_signal(error):
        return "own"
    failures = _checkpoint_failures(error)
    if failures is not None:
        named = failures.get(rank_and_world_size()[0])
        if named is not None and not isinstance(named[0], RankShouldRestart):
            return "own"
    if is_cutting:
        return "consequence"
    if failures is not None:
        return "communication"
    return "communication" if left_communication_call(error) else "own"


def left_communication_call(error: BaseException) -> bool:
    """Return True if an exception, or one of its causes, left a communication call. A peer's end shows there too."""
    return any(map(_left_communication, (error, *_chain(error))))


def _checkpoint_failures(error: BaseException) -> dict[int, Any] | None:
    """Return a CheckpointException's map of failed ranks, None for any other exception."""
    checkpoint = sys.modules.get("torch.distributed.checkpoint.api")  # not imported, so not raised either
    return error.failures if checkpoint is not None and isinstance(error, checkpoint.CheckpointException) else None


def _left_communication(error: BaseException) -> bool:
    places = places_of(error.__traceback__)
    names = _names_at(places[-1][0].f_code, places[-1][1]) if places and type(error) is RuntimeError else set[str]()
    return left_communication(describe(error), names)


def _names_at(code: CodeType, line: int | None) -> set[str]:
    """Return the names that a line of a function refers to."""
    spans = [(begin, end) for begin, end, number in code.co_lines() if number == line]
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if isinstance(instruction.argval, str) and any(begin <= instruction.offset < end for begin, end in spans)
    }


def release(error: BaseException) -> None:
    """Clear the locals of every finished frame that the exception and its causes hold."""
    for link in (error, *_chain(error)):
        traceback.clear_frames(link.__traceback__)


def release_own(error: BaseException) -> None:
    """Clear the locals of this package's finished frames only: they hold connections to the store.

    A traceback also keeps the callers of its frames alive, whether they are in the traceback or not."""
    for link in (error, *_chain(error)):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            for caller, _ in traceback.walk_stack(frame):
                if caller.f_code.co_filename.startswith(_PACKAGE):
                    with contextlib.suppress(RuntimeError):  # still running
                        caller.clear()


def note_later(error: BaseException, raised: BaseException) -> None:
    """Add a note to `error`: what a signal handler raised later, with its traceback. `raised` was raised while `error`
    was handled. Before Python 3.11 a traceback shows no notes, but our records have them."""
    for link in (raised, *_chain(raised)):
        if link.__context__ is error:
            link.__context__ = None  # the note is about the handler only
    text = f"afterwards a signal handler raised {error_in_words(raised)}\n"
    try:
        lines = traceback.format_exception(raised)
    except Exception:  # before Python 3.13 it may call a `__getattr__` of the program, which may raise anything
        lines = traceback.format_tb(raised.__traceback__)
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list):  # user code may set it to anything
        notes.append(text + "".join(lines))


def stack_of(thread: int) -> tuple[Frame, ...]:
    """Return the present stack of a thread of this process, innermost frame last. Reads no source file."""
    frame = current_frames().get(thread)
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        if not is_wrapper(frame.f_code.co_filename):
            frames.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


def _chain(error: BaseException) -> list[BaseException]:
    """Return the causes of an exception, nearest first, without repeats."""
    links: list[BaseException] = []
    visited = {id(error)}
    link = error.__cause__ or error.__context__
    while link is not None and id(link) not in visited and len(links) < 10:
        links.append(link)
        visited.add(id(link))
        link = link.__cause__ or link.__context__
    return links


def _name(error: BaseException) -> str:
    kind, module = type(error).__qualname__, type(error).__module__
    return kind if module in ("builtins", "__main__") else f"{module}.{kind}"


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = vars(error).get("__notes__")  # getattr() would call the program's `__getattr__`, which may raise anything
    if not isinstance(notes, list):  # user code may set it to anything
        return ()
    return tuple(note[:MAX_NOTE] for note in notes[:MAX_NOTES] if isinstance(note, str))


def _causes(error: BaseException) -> tuple[Cause, ...]:
    """Return the exceptions that Python's traceback shows above this one, nearest first, and the parts of a group."""
    causes: list[Cause] = []
    visited = {id(error)}
    link: BaseException | None = error
    while link is not None and len(causes) < MAX_CAUSES:
        for part in getattr(link, "exceptions", ()) if isinstance(link, _Group) else ():
            causes.append(_cause(part, "part"))
        is_named = link.__cause__ is not None
        following = link.__cause__ if is_named or link.__suppress_context__ else link.__context__
        link = None if following is None or id(following) in visited else following
        if link is not None:
            visited.add(id(link))
            causes.append(_cause(link, "cause" if is_named else "context"))
    return tuple(causes[:MAX_CAUSES])


def _cause(error: BaseException, relation: Literal["cause", "context", "part"]) -> Cause:
    stack = stack_of_traceback(error.__traceback__)[-MAX_FRAMES_OF_CAUSE:]
    return Cause(_name(error), message_of(error)[:MAX_NOTE], relation, stack, _notes(error))
