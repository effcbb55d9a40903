"""What do signals to this agent and its workers ask for?  Facts for `core.stopping`, and what follows from its answers.

An agent that leaves a cycle puts itself on a list in the store, so that each knows of those before it, also of one that
is signalled at the same moment."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from resilience.core import events
from resilience.core.cycle import Verdict
from resilience.core.stopping import AGENT_LIMIT, Asked, Mode, on_signal, on_workers_sigterm
from resilience.launcher.shared_list import SharedList

if TYPE_CHECKING:
    from resilience.launcher.account import Account
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.rendezvous import Handler
    from resilience.launcher.running import Ended
    from resilience.launcher.signals import Signals
    from resilience.launcher.witnesses import Witnesses


class Stopping:
    """Signals to one node. Main thread only."""

    def __init__(
        self,
        account: Account,
        handler: Handler,
        monitors: Monitors,
        signals: Signals,
        witnesses: Witnesses,
        least: int,
        mode: Mode,
        grace: float,
    ) -> None:
        """least: nodes of a cycle; mode: `--on-sigterm`; grace: seconds for a checkpoint."""
        self._account = account
        self._handler = handler
        self._monitors = monitors
        self._signals = signals
        self._witnesses = witnesses
        self._least, self._mode, self._grace = least, mode, grace
        self._stop: Verdict | None = None

    # -- signals to the agent -------------------------------------------------------------------

    def asked(self) -> Verdict | None:
        """Return what the signals so far ask for, None before the first. A node that is to leave may still be told to
        stop the job. Raises: StoreError."""
        for number in self._signals.take():
            if self._stop is None or self._stop.again is not None:
                self._stop = self._verdict(number)
        return self._stop

    def _verdict(self, number: int) -> Verdict:
        detail = f"{signal.Signals(number).name} to the agent of {self._account.node}"
        leaves = self._answer(number) == "leave"
        if leaves:
            detail += ", which leaves"
        self._account.emit(events.StopRequested(detail, self._grace, leaves))
        again: Literal["membership"] | None = "membership" if leaves else None
        return Verdict("preempted", self._account.node, again, exit_code=128 + number, detail=detail)

    def _answer(self, number: int) -> Mode:
        """Return whether this node leaves or the job stops."""
        handler = self._handler
        if handler.formation.rank_of(handler.id) is None:
            return "leave"  # it waits for a place
        name = signal.Signals(number).name
        asked = Asked(name, self._mode, handler.is_host, handler.others(()), self._least)
        if on_signal(asked) == "stop":
            return "stop"
        entries = SharedList(handler.job_store, f"leaving/{handler.cycle}")
        leaving: list[str] = []

        def is_listed() -> bool:
            leaving.extend(entries.read())
            return handler.id in leaving

        entries.append(handler.id, is_listed)
        before = leaving[: leaving.index(handler.id)]
        return on_signal(msgspec.structs.replace(asked, others=handler.others(before)))

    # -- SIGTERM to a worker --------------------------------------------------------------------

    def may_be_preemption(self, ended: Ended) -> bool:
        """Return True if a worker ended by a SIGTERM of which it is not known yet for whom it was meant."""
        is_ours = ended.local_rank in self._witnesses.condemned or self._witnesses.is_ended_for_hang(ended)
        return ended.code == -signal.SIGTERM and not is_ours

    def await_signal(self) -> bool:
        """A worker ended by SIGTERM: wait until it is known whether this agent is signalled too."""
        began = time.monotonic()
        while (meant := on_workers_sigterm(self._signals.has_any(), time.monotonic() - began)) == "wait":
            self._signals.wait(AGENT_LIMIT)
        return meant == "agent"

    def end_terminated_workers(self) -> None:
        """A worker that looks for a stop catches SIGTERM. If that was for it alone, it ends like any other."""
        now = time.monotonic()
        for local_rank, at in self._witnesses.sigterms.items():
            if local_rank not in self._witnesses.condemned and on_workers_sigterm(False, now - at) == "failure":
                self._witnesses.condemned.add(local_rank)
                self._monitors.dismiss_one(local_rank, "SIGTERM to this worker")
