"""What do signals to this agent and its workers ask for?  Facts for `core.supervision` and `core.stopping`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from resilience.core.agent_protocol import Protocol
from resilience.core.cycle import Verdict
from resilience.core.stopping import AGENT_LIMIT, on_workers_sigterm
from resilience.core.supervision import Supervision

if TYPE_CHECKING:
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.running import Ended
    from resilience.launcher.signals import Signals
    from resilience.launcher.witnesses import Witnesses


class Stopping:
    """Signals to one node. Main thread only."""

    def __init__(
        self,
        supervision: Supervision,
        run: Callable[[Protocol[None]], None],
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

    def asked(self) -> Verdict | None:
        """Return what the signals so far ask for, None before the first. A node that is to leave may still be told to
        stop the job. Raises: StoreError."""
        for number in self._signals.take():
            self._run(self._supervision.signalled(number, signal.Signals(number).name))
        return self._supervision.stop

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
