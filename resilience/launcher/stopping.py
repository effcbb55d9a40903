"""What do signals to this agent and its workers request?  Facts for `core.supervision` and `core.stopping`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from resilience.core.agent_protocol import NodeProtocol
from resilience.core.cycle import CycleDecision
from resilience.core.stopping import AGENT_LIMIT, on_workers_sigterm
from resilience.core.supervision import Supervision

if TYPE_CHECKING:
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.signals import Signals
    from resilience.launcher.witnesses import Witnesses
    from resilience.launcher.worker.worker_processes import EndedWorker


class NodeSignals:
    """Signals to one node. Main thread only."""

    def __init__(
        self,
        supervision: Supervision,
        run: Callable[[NodeProtocol[None]], None],
        monitors: Monitors,
        signals: Signals,
        witnesses: Witnesses,
    ) -> None:
        """run: runs a protocol of this agent."""
        self._supervision = supervision
        self._run = run
        self._monitors = monitors
        self._signals = signals
        self._witnesses = witnesses

    # -- signals to the agent -------------------------------------------------------------------

    def asked(self) -> CycleDecision | None:
        """Return the decision that the signals so far request, None before the first. While a node is about to leave,
        another signal may still stop the job. Raises: StoreError."""
        for number in self._signals.take():
            self._run(self._supervision.signalled(number, signal.Signals(number).name))
        return self._supervision.stop

    def is_hurried(self, verdict: CycleDecision) -> bool:
        """Return True if a person asks again during the stop: SIGINT or SIGQUIT that is not this agent's first signal.
        If the others continue, keep the signal: it is for this node only."""
        if verdict.again is not None:
            return False
        self._signals.ignore_first()
        is_hurried = self._signals.is_hurried()
        self._signals.take()
        return is_hurried

    # -- SIGTERM to a worker --------------------------------------------------------------------

    def may_be_preemption(self, ended: EndedWorker) -> bool:
        """Return True if a worker ended by SIGTERM and we do not know yet whether the whole node was meant."""
        is_for_worker = ended.local_rank in self._witnesses.condemned or self._witnesses.is_ended_for_hang(ended)
        return ended.code == -signal.SIGTERM and not is_for_worker

    def await_signal(self) -> bool:
        """After a worker ended by SIGTERM: wait until it is clear whether this agent also receives a signal."""
        began = time.monotonic()
        while (target := on_workers_sigterm(self._signals.has_any(), time.monotonic() - began)) == "wait":
            self._signals.wait(AGENT_LIMIT)
        return target == "agent"

    def end_terminated_workers(self) -> None:
        """End workers whose program catches SIGTERM to look for a stop, if only the worker was signalled."""
        now = time.monotonic()
        for local_rank, caught_at in self._witnesses.sigterms.items():
            if local_rank not in self._witnesses.condemned and on_workers_sigterm(False, now - caught_at) == "failure":
                self._witnesses.condemned.add(local_rank)
                self._monitors.dismiss_one(local_rank, "SIGTERM to this worker")
