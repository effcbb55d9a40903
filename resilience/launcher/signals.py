"""Which signals has the agent received?

A handler only notes the number and makes a descriptor readable, which ends the agent's wait; it never acts. A signal
that was ignored when the agent started (SIGHUP under nohup) stays ignored."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

from resilience.errors import ConfigurationError, LaunchError


class Signals:
    """The signals that ask the agent to stop. Main thread only."""

    def __init__(self, names: str) -> None:
        """names: in the format of torchrun's --signals-to-handle. Raises: ConfigurationError, LaunchError."""
        self.names = names
        numbers = [number for number in map(_number, names.split(",")) if number is not None]
        self._received: list[int] = []  # all signals so far
        self._known = 0  # how many of them `take` has returned
        try:
            self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise LaunchError(f"signals cannot be handled: {error}; this host lacks the resources for it") from error
        # Python runs a handler only once the main thread has left C++, where a silent store can hold it.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def fileno(self) -> int:
        """Return a descriptor that is readable after a signal has arrived."""
        return self._read

    def has_any(self) -> bool:
        """Return True if a signal has arrived that `take` has not returned."""
        return len(self._received) > self._known

    def has_arrived(self) -> bool:
        """Return True if any signal has arrived so far, also one whose handler waits until the main thread leaves C++.
        Any thread."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(self._received or poll.poll(0))

    @property
    def first(self) -> int | None:
        """Return the first signal that has arrived, None if none has."""
        return self._received[0] if self._received else None

    def is_hurried(self) -> bool:
        """Return True if a person has sent a signal that `take` has not returned: SIGINT or SIGQUIT."""
        return not {signal.SIGINT, signal.SIGQUIT}.isdisjoint(self._received[self._known :])

    def ignore_first(self) -> None:
        """Ignore this agent's first signal, which may still come: the job already stops, for a signal to another agent.

        Ctrl-C in `srun` reaches all agents, but not at the same time."""
        self._known = max(self._known, 1)

    @staticmethod
    def to_workers(number: int | None) -> int:
        """Return the signal that ends this node's workers: the one that asked an agent to stop, SIGTERM if there is
        none, or if it is ignored here and so by the workers too (SIGHUP under nohup, SIGINT in a shell's background).
        """
        if number is None or signal.getsignal(number) is signal.SIG_IGN:
            return signal.SIGTERM
        return number

    def wait(self, limit: float) -> None:
        """Wait for a signal that `take` has not returned, for at most `limit` seconds."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll(limit * 1000)

    def take(self) -> list[int]:
        """Return the signals that arrived since the last call, in order."""
        try:
            os.read(self._read, 4096)  # first, so that a signal that arrives meanwhile makes it readable again
        except BlockingIOError:
            pass
        taken = self._received[self._known :]
        self._known += len(taken)
        return taken

    def take_first(self) -> int:
        """Return the first signal that has not been taken. Later ones may be a person's haste, and remain."""
        self._known += 1
        return self._received[self._known - 1]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        try:
            os.write(self._write, b"x")
        except BlockingIOError:
            pass  # readable already


def _number(name: str) -> int | None:
    name = name.strip()
    if not name:
        return None
    if name not in signal.Signals.__members__:
        raise ConfigurationError(
            f"--signals-to-handle contains {name!r}, which is not a signal here; expected names such as SIGTERM,SIGINT"
        )
    if name in ("SIGKILL", "SIGSTOP"):
        raise ConfigurationError(
            f"--signals-to-handle contains {name!r}, which no process can handle; expected names such as SIGTERM,SIGINT"
        )
    return int(signal.Signals[name])
