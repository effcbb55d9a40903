"""What does a monitor observe of its rank?  The input of `core.watch`, the same for real and simulated ranks.

`monitor.worker` builds an observation from the shared page, the process and the job's store."""

from __future__ import annotations

from enum import Enum

import msgspec

from resilience.core.silences import Silence
from resilience.core.standstills import Standstill
from resilience.facts.deadlines import Start

Seconds = float


class Doing(Enum):
    """The rank's present activity, as far as it matters for limits."""

    OUTSIDE = "outside"  # not in a wrapped call: no limit applies
    WAITING = "waiting"  # in a barrier or waiting for an outcome: only the watchdog applies
    HOOK = "hook"  # in user code of initialize, finalize, health check …: the hook limit applies
    FUNCTION = "run"  # in the wrapped function: all limits apply
    ENDING = "ending"  # the program is over and its interpreter shuts down: no sign of life is due any more
    STARTING = "starting"  # no program of the worker is attached yet: only the rule for silences applies


class Sign(msgspec.Struct, frozen=True):
    """One sign of life and when it was last observed (observer's monotonic clock). occurrence: its number since the
    last start, from 1."""

    name: str
    seen_at: Seconds
    occurrence: int = 1


class Suspicion(msgspec.Struct, frozen=True):
    """A confirmed suspicion: the rank is late compared with its own past, and two looks found that the others wait for
    it. limit: the learned one. began: of the silence. allowed: seconds after which the rank was suspected."""

    limit: str
    began: Seconds
    allowed: Seconds


class Observation(msgspec.Struct, frozen=True):
    """A monitor's observation of its rank at one moment. Times are on the monitor's monotonic clock; None means never
    in this iteration, or not armed."""

    iteration: int = 0
    doing: Doing = Doing.OUTSIDE
    since: Seconds = 0.0  # when the rank began its present activity
    hook: str = ""
    watchdog_at: Seconds | None = None
    ping_at: Seconds | None = None
    step_at: Seconds | None = None
    heartbeat_at: Seconds | None = None
    heartbeats_from: Seconds | None = None  # when heartbeats were announced
    start: Start = "cold"  # the last start of this rank; the counts below begin with it
    heartbeat_gaps: int = 0  # number of gaps that have ended
    step_gaps: int = 0
    outside_gaps: int = 0
    aligned: frozenset[str] = frozenset()  # deadlines whose positions are known to be those of the observed runs
    section_left_at: Seconds | None = None  # when the last section was closed; others may be open
    open_sections: tuple[Sign, ...] = ()
    interrupted_at: Seconds | None = None  # when this iteration was decided as interrupted
    is_in_abort_hook: bool = False  # a thread beside the main thread is; the main thread is interrupted only after it
    silence: Silence | None = None  # the present one, None if no sign of life is expected
    store_due_at: Seconds | None = None  # when the store's answer is due that the main thread waits for
    ran_at: Seconds | None = None  # when a thread other than the main thread last ran
    is_stuck: bool = False  # the rank reported that its abort did not free it
    is_gone: bool = False
    said_goodbye: bool = False  # the store has everything about it: it completed the call, or is excluded
    has_left: bool = False  # it has left the call
    is_dismissed: bool = False  # it is being ended on purpose
    is_awaited: bool = False  # the other ranks wait in the store until it is represented there: it is a Wrapper's
    agent_lost_at: Seconds | None = None
    are_others_seen: bool = True  # the other ranks' positions were recorded since the present finding
    suspicion: Suspicion | None = None
    standstills: tuple[Standstill, ...] = ()  # of the observer, so perhaps of the rank too

    @property
    def is_outside(self) -> bool:
        """Return True if no limit applies to the rank's present activity. After the goodbye only hooks have a limit: no
        rank waits for this one, but its process must end."""
        is_over = self.said_goodbye and self.doing is not Doing.HOOK
        return self.doing is Doing.OUTSIDE or self.has_left or is_over
