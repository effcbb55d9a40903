"""Which limits can a rank have?  Allowed silences, learned or set, and the settings of the rule for silences.

`core.watch` compares a rank's signs of life with them. `monitor.config` and `inprocess._runtime.session` build them
from options, `calibration.limits_file` from a file."""

from __future__ import annotations

import msgspec

from resilience.facts.deadlines import Start
from resilience.facts.phases import Phases

Seconds = float


class Rule(msgspec.Struct, frozen=True):
    """The settings, in seconds. first: the limit until enough is known. least: the shortest learned limit. margin: time
    between asking all ranks to restart and ending the rank; None ends it at once."""

    first: Seconds = 600.0
    least: Seconds = 60.0
    margin: Seconds | None = None


class Limit(msgspec.Struct, frozen=True):
    """Allowed silence in seconds. Past `soft` all ranks restart, past `hard` the rank is ended. None never fires."""

    soft: Seconds | None = None
    hard: Seconds | None = None


NO_LIMIT = Limit()

LATE = 1.25  # times the longest healthy duration: a rank is suspected
LEAST = 0.25  # of the limit: a look costs time, and short pauses of a busy host are normal
SOON = 0.75  # of the limit: a later suspicion would be useless


class Learned(msgspec.Struct, frozen=True):
    """The basis of a learned limit, in seconds: the limit, and median and 99th percentile of the observed durations.
    first: number of occurrences after a start with a separate limit. least_median_s: median of the fastest rank, while
    median_s is of the slowest. longest_s: the longest healthy one. outside_s: limit outside known phases. 0: none."""

    timeout_s: Seconds
    median_s: Seconds
    p99_s: Seconds
    first: int = 0
    least_median_s: Seconds = 0.0
    longest_s: Seconds = 0.0
    outside_s: Seconds = 0.0

    @property
    def suspected_s(self) -> Seconds | None:
        """Return after how long a rank is suspected, None if the limit leaves no room for a suspicion."""
        late = max(LATE * self.longest_s, LEAST * self.timeout_s)
        return late if self.longest_s > 0.0 and late < SOON * self.timeout_s else None


class First(msgspec.Struct, frozen=True):
    """The limits of the first `occurrences` of a deadline after a start, by the kind of start."""

    occurrences: int = 0
    limits: dict[Start, Limit] = {}


class OfRanks(msgspec.Struct, frozen=True):
    """A learned limit of a group of similar ranks (`calibration.rank_groups`)."""

    ranks: str
    limit: Limit
    learned: Learned


class Outside(msgspec.Struct, frozen=True):
    """A learned limit outside known phases after a cold start, for deadlines in `Observation.aligned`."""

    limit: Limit
    phases: Phases


class Limits(msgspec.Struct, frozen=True):
    """All limits in force for one rank.

    watchdog: since the main thread last ran bytecode; while it waits for the job's store, since any other thread did
    (then hard only). store: replaces all others while the main thread waits for the job's store and runs no bytecode;
    counts from when the store's answer was due (hard only). ping: since the last manual ping, once armed. hook: since a
    hook was entered (hard only). leave: since the interruption, until the function is left (hard only). abort: seconds
    after the interruption in which no hard limit ends the rank, because its abort may still run. step: since the step
    counter last rose, once used. heartbeat: between heartbeats. initial_heartbeat: from their announcement, or a later
    opening or closing of a section, to the first one. sections: by name, while open. out_of_section: while no section
    is open, after the first one. warmup: replaces the limit for the first `warmup_occurrences` occurrences of a
    section, by name; warmup_heartbeat: of a gap between heartbeats, None: as usual. The first `warmup_occurrences` gaps
    between steps have at least the limit that the rule has after a start. first: the same, but learned, by deadline;
    takes precedence over these. signal: ends a rank past a hard limit. grace: seconds between that and
    SIGKILL. safety_factor: for limits that the rank calculates from its observations. shadow: limits that are checked
    and reported but end nothing. learned: the basis of learned limits, by deadline. rule: the rule for silences without
    another limit; None switches it off. defaults: names of limits that were not set by the user; they do not switch off
    the rule, the one between heartbeats applies only if heartbeats were announced, and the one of the first heartbeat
    only until the program shows another sign of life. groups: learned limits of groups
    of ranks, by deadline, valid in a world of `group_world` ranks; a monitor picks its rank's
    (`calibration.limits_file.of_rank`). outside: learned limits outside known phases, by deadline. ends_suspects: a
    rank that all others wait for is ended before its learned limit (`core.suspicion`). worlds: the smallest and the
    largest world for which learned limits hold, None for any. unlearned: the limits in a world of another size."""

    watchdog: Limit = NO_LIMIT
    store: Limit = NO_LIMIT
    ping: Limit = NO_LIMIT
    hook: Limit = NO_LIMIT
    leave: Limit = NO_LIMIT
    abort: Seconds = 0.0
    step: Limit = NO_LIMIT
    heartbeat: Limit = NO_LIMIT
    initial_heartbeat: Limit = NO_LIMIT
    out_of_section: Limit = NO_LIMIT
    sections: dict[str, Limit] = {}
    warmup: dict[str, Limit] = {}
    warmup_heartbeat: Limit | None = None
    warmup_occurrences: int = 0
    first: dict[str, First] = {}
    signal: str = "SIGTERM"
    grace: Seconds = 5.0
    safety_factor: float = 5.0
    shadow: Limits | None = None
    learned: dict[str, Learned] = {}
    rule: Rule | None = None
    defaults: tuple[str, ...] = ()
    groups: dict[str, tuple[OfRanks, ...]] = {}
    group_world: int = 0
    outside: dict[str, Outside] = {}
    ends_suspects: bool = False
    worlds: tuple[int, int] | None = None
    unlearned: Limits | None = None
