"""What does the engineer on call read first?  The launcher's last message.

It names the first failing rank, its exception with the user's own frame, its last output lines, and the command
that explains more. Everything comes from the records in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilience.core.cycle import CycleDecision
from resilience.facts.in_words import count
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.user_frames import user_frame
from resilience.telemetry.log import as_people_read

LINES = 10  # of the failed rank's output


def summary(
    verdict: CycleDecision,
    folder: Path,
    record: InterruptionRecord | None = None,
    failures: Sequence[str] = (),
    is_clean: bool = False,
    has_left: bool = False,
    sentence: str = "",
) -> str:
    """Return the last message of a launcher whose job did not complete. failures: lines of a table. is_clean: the job
    was preempted, and all workers here exited with 0. has_left: this node leaves, and others may stay. sentence: the
    verdict."""
    outcome = LEAVES if has_left else f"the job {CLEAN if is_clean else _WORDS[verdict.outcome]}"
    lines = [f"resilience run: {outcome}" + (f": {verdict.detail}" if verdict.detail else "")]
    if not verdict.is_failure:
        record, failures = None, ()
    if record is not None:
        lines += _failure(record, sentence)
    if len(failures) > 2:
        lines += ["  all failures:", *(f"    {line}" for line in failures)]
    lines += _command(folder)
    return "\n".join(lines)


def success(folder: Path, restarts: int, in_place: int = 0) -> str:
    """Return the last message of a launcher whose job completed. restarts: by the launcher. in_place: since the last of
    them."""
    parts = [f"{count(restarts, 'restart')} by the launcher"] if restarts else []
    if in_place:
        parts.append(f"{in_place} in place since" if restarts else f"{count(in_place, 'restart')} in place")
    after = f" after {' and '.join(parts)}" if parts else ""
    return "\n".join([f"resilience run: completed{after}; to see what happened:", *_command(folder)])


def _command(folder: Path) -> list[str]:
    """Return the command that explains the run, on a line of its own for copying."""
    return [f"  resilience report {folder}"]


CLEAN = "was preempted cleanly; all workers exited with status 0"
LEAVES = "this node leaves the job"  # which may continue, or have no other node
_WORDS = {
    "completed": "completed",
    "failed": "failed",
    "interrupted": "was interrupted",
    "preempted": "was asked to stop",
    "shutdown": "was shut down by a rank's request",
    "exhausted": "failed and is not restarted",
    "excluded": "ended because a node left",
}


def _failure(record: InterruptionRecord, sentence: str) -> list[str]:
    where = f"rank {record.rank}" + (f" on {record.node}" if record.node else "")
    lines = [f"  {sentence}" if sentence else f"  first failure: {where}: {record.message}"]
    exception = record.exception
    if exception is not None:
        if exception.in_words not in sentence:
            lines.append(f"  {exception.in_words}")
        frame = user_frame(exception.stack) or (exception.stack[-1] if exception.stack else None)
        if frame is not None:
            lines.append(f"  at {frame.file}:{frame.line} in {frame.function}")
    if record.log_tail and record.interruption is not Interruption.EXCEPTION:
        lines.append(f"  {_last_lines_in_words(len(record.log_tail))}:")
        lines += [f"    {as_people_read(line)}" for line in record.log_tail[-LINES:]]
    return lines


def _last_lines_in_words(lines: int) -> str:
    if lines == 1:
        return "last line of its output"
    return f"last {min(lines, LINES)} lines of its output"
