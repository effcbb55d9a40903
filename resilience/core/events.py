"""The catalogue: every fact the toolkit can state, each defined once.

An event is a past-tense fact with only its own fields; who states it and when is the record's part
(`core.records`). Its class is its whole definition: tag, level, docstring, fields with their units in
the name (`_s` seconds, `_bytes`, `_ns`). Log line, span and metric are views of its record, listed in
`telemetry.log`, `telemetry.spans` and `telemetry.metrics`; `docs/events.md` is generated from here."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import msgspec

from resilience.core.attribution import Collective, Frame, Hang, Interruption, InterruptionRecord
from resilience.core.identity import Seconds, WorldSize

Level = Literal["debug", "info", "warning", "error"]
Layer = Literal["inprocess", "launcher"]
StageName = Literal[
    "initialize",
    "health_check",
    "run",
    "restart",
    "detect",
    "agree",
    "abort",
    "finalize",
    "check",
    "collect",
    "regroup",
    "resume",
]
Outcome = Literal["completed", "interrupted", "failed", "left", "lost"]
CycleReason = Literal["first", "failure", "membership", "request"]
CycleOutcome = Literal["completed", "failed", "interrupted", "preempted", "shutdown", "exhausted", "excluded"]
CyclePhase = Literal["gate", "rendezvous", "spawn", "import", "run", "stop"]
PHASES: tuple[str, ...] = ("detect", "agree", "abort", "finalize", "check", "collect", "regroup", "resume")


class Event(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="event"):
    """Base of all events."""

    level: ClassVar[Level] = "info"


class CallStarted(Event, frozen=True, tag="call.started"):
    """A wrapped function was called; all ranks are about to meet."""

    function: str
    world_size: WorldSize
    resilience_version: str
    torch_version: str
    python_version: str
    hostname: str
    monitor: Literal["forked", "executed"]
    monitor_reason: str = ""  # why the monitor was executed instead of forked
    monitor_start_s: Seconds = 0.0


class ConfigurationAdvised(Event, frozen=True, tag="configuration.advised"):
    """Two settings of this job work against each other. Told once per job, by rank 0."""

    level: ClassVar[Level] = "warning"
    advice: str


class CallEnded(Event, frozen=True, tag="call.ended"):
    """The wrapped function's call ended on this rank."""

    outcome: Outcome
    iterations: int
    duration_s: Seconds
    error: str = ""


class IterationStarted(Event, frozen=True, tag="iteration.started"):
    """All ranks met and this rank is about to initialise and enter the function."""

    active_world_size: WorldSize
    state: Literal["active", "inactive"]


class IterationEnded(Event, frozen=True, tag="iteration.ended"):
    """An iteration ended on this rank."""

    outcome: Outcome
    duration_s: Seconds
    closed_by: Literal["rank", "monitor"] = "rank"


class StageStarted(Event, frozen=True, tag="stage.started"):
    """A stage of an iteration, or a phase of a restart, began on this rank."""

    level: ClassVar[Level] = "debug"
    stage: StageName


class StageEnded(Event, frozen=True, tag="stage.ended"):
    """A stage of an iteration, or a phase of a restart, ended on this rank.

    ended_ago_s: how long before this record, where it is told afterwards."""

    level: ClassVar[Level] = "debug"
    stage: StageName
    outcome: Outcome
    duration_s: Seconds
    closed_by: Literal["rank", "monitor"] = "rank"
    ended_ago_s: Seconds = 0.0


class GarbageCollected(Event, frozen=True, tag="garbage.collected"):
    """Memory that the interrupted iteration had left was freed on this rank.

    objects: unreachable objects that were found. groups_left: threads that still drop process groups."""

    level: ClassVar[Level] = "debug"
    objects: int
    passes: int
    duration_s: float
    groups_left: int = 0


class RestartEnded(Event, frozen=True, tag="restart.ended"):
    """This rank made its first progress after an interruption: the restart is over.

    duration_s: from detection to the first heartbeat, step or ping after entry; with sign "entry",
    where the function shows none, to the entry. step: the one the function went on with, where known."""

    interruption: str
    duration_s: Seconds
    sign: Literal["heartbeat", "step", "ping", "section", "entry"]
    step: int | None = None


class Interrupted(Event, frozen=True, tag="rank.interrupted"):
    """A rank's iteration was interrupted; the record says what is known of it here."""

    level: ClassVar[Level] = "error"
    record: InterruptionRecord


class InterruptionArrived(Event, frozen=True, tag="interruption.arrived"):
    """An interruption record got its place in the store, whose order of arrival tells what came first."""

    level: ClassVar[Level] = "debug"
    initial_rank: int
    interruption: Interruption
    iteration: int
    position: int  # from 1


class OutcomeSeen(Event, frozen=True, tag="iteration.decided"):
    """This rank learned that its iteration was decided as interrupted. `stack`: where its main thread was
    at that moment, innermost frame last, which tells who waited for whom. `silent_for_s`: for how long the rank of
    the first record had been silent, if it hung: all ranks that were at work have lost that time. `sections`: those
    that were open, outermost first. `collectives`: the last ones that it entered. `hang`: in which way it hung itself,
    if another rank's hang is the reason. `waits_in`: the kernel's function that its main thread slept in."""

    level: ClassVar[Level] = "debug"
    by: int | None = None  # initial rank of the first record, where known
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    silent_for_s: Seconds | None = None
    sections: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    hang: Hang | None = None
    waits_in: str = ""


class RankFellSilent(Event, frozen=True, tag="rank.fell_silent"):
    """A limit was exceeded: the rank showed no sign of life for longer than allowed."""

    level: ClassVar[Level] = "warning"
    limit: str
    severity: Literal["soft", "hard"]
    allowed_s: Seconds
    silent_for_s: Seconds


class OthersSeen(Event, frozen=True, tag="others.seen"):
    """A rank hung, and before anything was sent to it or cut it was put on record where the other ranks were.

    rank: the initial rank that hung. missing: initial ranks of which that is not on record, because they did not answer
    in time. elsewhere: ranks of other nodes, which were not asked. duration_s: for how long the others were waited
    for."""

    level: ClassVar[Level] = "debug"
    rank: int
    missing: tuple[int, ...] = ()
    elsewhere: int = 0
    duration_s: Seconds = 0.0


class HangsWatched(Event, frozen=True, tag="hangs.watched"):
    """By what a hang is noticed in this run; told once at its start.

    limits: those that somebody has set or calibrated, in seconds, by what they hold for. first_s and least_s: of the
    rule for silences that no limit is set for: until the job has shown its pauses, and the least one after that;
    None where the rule is switched off."""

    limits: dict[str, Seconds]
    first_s: Seconds | None = None
    least_s: Seconds | None = None


class HangSuspected(Event, frozen=True, tag="hang.suspected"):
    """A rank is silent for long, and nobody has set a limit for what it does: it is ended after `allowed_s`.

    kind: the innermost open section, empty where none is open. longest_s: the longest silence of that kind before.
    is_learned: the limit follows from that; else the job has not shown its pauses yet. hang: in which way it seems to
    hang. stack: of its main thread, innermost frame last."""

    level: ClassVar[Level] = "warning"
    kind: str
    silent_for_s: Seconds
    longest_s: Seconds
    allowed_s: Seconds
    is_learned: bool
    hang: Hang | None = None
    stack: tuple[Frame, ...] = ()
    step: int | None = None


class RankSuspected(Event, frozen=True, tag="rank.suspected"):
    """A rank is late against its own past: it is silent for longer than it ever was, and its learned limit is far.

    limit: the learned limit that will end it after `allowed_s`. longest_s: the longest healthy duration known. hang: in
    which way it seems to hang. stack: of its main thread, innermost frame last. look_s: how long the look took."""

    level: ClassVar[Level] = "warning"
    limit: str
    silent_for_s: Seconds
    longest_s: Seconds
    allowed_s: Seconds
    hang: Hang | None = None
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    look_s: Seconds = 0.0


class ProgressUnknown(Event, frozen=True, tag="rank.progress_unknown"):
    """The function runs, and nothing is armed that could show a lack of progress: no ping, heartbeat
    or section with a limit, and no step limit. A loop without progress would not be noticed."""

    level: ClassVar[Level] = "warning"
    running_for_s: Seconds


class RankSignalled(Event, frozen=True, tag="rank.signalled"):
    """The monitor sent signals to its rank, after the evidence had been taken."""

    level: ClassVar[Level] = "warning"
    signals: tuple[str, ...]
    reason: str


class RankExited(Event, frozen=True, tag="rank.exited"):
    """The rank's process ended. `goodbye`: it had left the wrapper cleanly before."""

    goodbye: bool
    code: int | None = None
    signal: str | None = None
    oom: bool | None = None
    noticed_by: Literal["mutex", "pidfd", "channel"] = "pidfd"


class RankLeft(Event, frozen=True, tag="rank.left"):
    """The rank leaves the wrapper with an exception and takes no further part."""

    level: ClassVar[Level] = "warning"
    error: str


class RankStoodInFor(Event, frozen=True, tag="rank.stood_in_for"):
    """A gone rank was represented until the others went on without it."""

    initial_rank: int
    result: Literal["excluded", "completed", "discarded", "failed"]
    duration_s: Seconds
    error: str = ""


class EvidenceCaptured(Event, frozen=True, tag="evidence.captured"):
    """Stacks of a rank were taken. method: own-thread by a thread of the rank, which cannot harm it; faulthandler by
    a signal, only where the GIL is held or the rank is killed next; none says that there are none. reason: why
    there are none, or why not by a safer method."""

    method: Literal["own-thread", "faulthandler", "py-spy", "none"]
    threads: int
    reason: str = ""
    path: str = ""


class CollectivesCut(Event, frozen=True, tag="abort.cut"):
    """Abort shut this rank's own collective connections, so that blocked threads come free."""

    sockets: int
    store_connections: int
    method: Literal["epoll", "shape", "none"]
    duration_s: Seconds


class AbortStuck(Event, frozen=True, tag="abort.stuck"):
    """The main thread has slept for the abort limit where nothing frees it; the process has to go."""

    level: ClassVar[Level] = "error"
    limit_s: Seconds
    where: str


class GroupAborted(Event, frozen=True, tag="abort.group"):
    """The abort of an accelerator's process group ended, failed, or was given up after RESILIENCE_ABORT_WAIT.

    A group whose abort was given up is left behind, and its abort goes on in a thread."""

    group: str  # torch's name of it
    backend: str
    duration_s: float
    outcome: Literal["aborted", "failed", "timed out"]
    error: str = ""
    note: str = ""  # what a person should know of such an abort


class AbortDelayed(Event, frozen=True, tag="abort.delayed"):
    """The main thread has not left the function within the abort limit. It is given until hard_timeout.

    where: file:line function. store: the kind of store that it uses there, such as a FileStore of the user's."""

    level: ClassVar[Level] = "warning"
    limit_s: float
    where: str
    store: str = ""


class AbortFailed(Event, frozen=True, tag="abort.failed"):
    """The abort hook raised; the restart goes on."""

    level: ClassVar[Level] = "error"
    error: str


class InterruptDelivered(Event, frozen=True, tag="interrupt.delivered"):
    """The main thread left the wrapped function because it was interrupted."""

    level: ClassVar[Level] = "debug"
    duration_s: Seconds
    signals: int


class InterruptSwallowed(Event, frozen=True, tag="interrupt.swallowed"):
    """User code caught the interruption and went on; it is delivered again."""

    level: ClassVar[Level] = "warning"
    file: str
    line: int
    function: str


class HookFailed(Event, frozen=True, tag="hook.failed"):
    """A hook of the wrapper raised."""

    level: ClassVar[Level] = "error"
    hook: str
    error: str


class MonitorStarted(Event, frozen=True, tag="monitor.started"):
    """A monitor began to watch its rank."""

    rank_pid: int


class MonitorLost(Event, frozen=True, tag="monitor.lost"):
    """A rank's monitor is gone; the rank goes on unmonitored."""

    level: ClassVar[Level] = "error"
    monitor_pid: int
    reason: str


class MonitorEnded(Event, frozen=True, tag="monitor.ended"):
    """A monitor stopped watching; nothing more will be recorded for its rank."""

    dropped_records: int = 0


class NodeFellSilent(Event, frozen=True, tag="node.fell_silent"):
    """Another node's counter in the store did not change for longer than heartbeat_timeout."""

    level: ClassVar[Level] = "error"
    silent_node: str
    allowed_s: Seconds
    silent_for_s: Seconds
    ranks: tuple[int, ...] = ()


class StoreHosted(Event, frozen=True, tag="store.hosted"):
    """This monitor hosts a store: the wrapper's own, or that of an iteration's process groups."""

    purpose: Literal["wrapper", "iteration"]
    address: str
    port: int
    duration_s: Seconds


class StoreLost(Event, frozen=True, tag="store.lost"):
    """The wrapper's store does not answer any more; where an agent tells it, that of the job."""

    level: ClassVar[Level] = "error"
    error: str


class TelemetryDropped(Event, frozen=True, tag="telemetry.dropped"):
    """Records or measurements were lost; control flow did not notice."""

    level: ClassVar[Level] = "warning"
    signal: Literal["record", "span", "metric", "log", "timing"]
    reason: str
    count: int


class ExportStarted(Event, frozen=True, tag="export.started"):
    """The node's exporter began to serve metrics or to send spans; `note` tells what is unexpected."""

    exporter: Literal["prometheus", "otlp"]
    endpoint: str
    note: str = ""


class ExportFailed(Event, frozen=True, tag="export.failed"):
    """Metrics or spans cannot be exported. The record files hold everything; the job does not notice."""

    level: ClassVar[Level] = "warning"
    exporter: Literal["prometheus", "otlp"]
    reason: str


# -- the launcher's agent ------------------------------------------------------------------------


class CycleStarted(Event, frozen=True, tag="cycle.started"):
    """The agent starts its node's workers. `why`: what made a new cycle necessary."""

    why: CycleReason
    restarts_used: int  # in the whole job
    max_restarts: int


class CycleEnded(Event, frozen=True, tag="cycle.ended"):
    """The workers of a cycle are gone from this node; `duration_s` from the cycle's start.

    silent_for_s: of the rank whose hang ended the cycle, on any node. step: the highest before that. failed_node: the
    node of the rank that failed first, empty if no rank did."""

    outcome: CycleOutcome
    duration_s: Seconds
    detail: str = ""
    silent_for_s: Seconds | None = None
    step: int | None = None
    failed_node: str = ""


class CyclePhaseStarted(Event, frozen=True, tag="cycle.phase.started"):
    """A leg of a cycle began on this node."""

    phase: CyclePhase


class CyclePhaseEnded(Event, frozen=True, tag="cycle.phase.ended"):
    """A leg of a cycle ended on this node."""

    phase: CyclePhase
    outcome: Outcome
    duration_s: Seconds


class RendezvousCompleted(Event, frozen=True, tag="rendezvous.completed"):
    """All nodes of a cycle met. `mode`: where group ranks come from."""

    group_rank: int
    nodes: int
    world_size: WorldSize
    mode: Literal["infrastructure", "deterministic", "backend"]
    store: str


class WorkerStarted(Event, frozen=True, tag="worker.started"):
    """A worker process was started. `why_cold`: why it could not be forked from the zygote."""

    local_rank: int
    worker_rank: int
    worker_pid: int
    how: Literal["warm", "cold"]
    why_cold: str = ""


class WorkerExited(Event, frozen=True, tag="worker.exited"):
    """The agent collected a worker's exit status. `expected`: it finished, or was stopped on purpose."""

    local_rank: int
    worker_rank: int
    worker_pid: int
    code: int | None
    signal: str | None
    expected: bool


class WorkerProgressed(Event, frozen=True, tag="worker.progressed"):
    """A worker showed its first sign of progress since its start, or told its first step.

    after_s: since its monitor watches it, which is its start. ago_s: how long before this record."""

    sign: Literal["heartbeat", "step", "ping", "section"]
    after_s: Seconds
    step: int | None = None
    ago_s: Seconds = 0.0


class WorkerSeen(Event, frozen=True, tag="worker.seen"):
    """A rank hangs: where another rank of the same cycle was at that moment, before either was sent a signal. On other
    nodes, before it was stopped.

    hang: in which way it hung itself, if it did. stack: of its main thread, innermost frame last. collectives: the last
    ones that it entered."""

    hang: Hang | None = None
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    collectives: tuple[Collective, ...] = ()


class RestartDecided(Event, frozen=True, tag="restart.decided"):
    """The job's budget was asked after a failure: another cycle, or the end."""

    level: ClassVar[Level] = "warning"
    verdict: Literal["restart", "stop"]
    fingerprint: str
    why: str
    restarts_used: int
    restarts_left: int
    same_in_a_row: int


class IncidentJudged(Event, frozen=True, tag="incident.judged"):
    """The verdict on an interruption, in the words that the terminal shows. It is reached once the ranks' records are
    there, so after the restart. cycle, iteration: what was interrupted; iteration is None for a cycle of the launcher.
    rank: that is blamed first, None if no rank is named. confidence: 0 to 1, of that rank."""

    level: ClassVar[Level] = "warning"
    sentence: str
    what: str
    cycle: int
    iteration: int | None = None
    rank: int | None = None
    confidence: float = 0.0


class JobEnded(Event, frozen=True, tag="job.ended"):
    """The agent leaves: the job is over on this node. `is_clean`: it was preempted, and all workers of the node ended
    with exit status 0 in time."""

    outcome: CycleOutcome
    exit_code: int
    detail: str = ""
    is_clean: bool = False


class StopRequested(Event, frozen=True, tag="stop.requested"):
    """Somebody asked the whole job to stop, or this node alone (`leaves`); workers have `grace_s` to write a
    checkpoint."""

    source: str
    grace_s: Seconds
    leaves: bool = False


class ControlRequested(Event, frozen=True, tag="control.requested"):
    """A rank asked for a decision about its node or the workload."""

    action: str
    description: str
    local_rank: int


class NodeExcluded(Event, frozen=True, tag="node.excluded"):
    """This node takes no further part in the job; the others go on without it if they can."""

    level: ClassVar[Level] = "warning"
    why: str


class NodeUnhealthy(Event, frozen=True, tag="node.unhealthy"):
    """A health check of this node failed, before a cycle or while workers ran."""

    level: ClassVar[Level] = "warning"
    check: str
    detail: str


class NodeWarned(Event, frozen=True, tag="node.warned"):
    """A health check of this node found something that does not keep it from the job. Once for each check and cause."""

    level: ClassVar[Level] = "warning"
    check: str
    detail: str


class OutputLost(Event, frozen=True, tag="output.lost"):
    """Some of what a worker wrote is not where it would be expected; the worker did not notice.

    place: "file", it could not be written to `path`; "rotated", it was removed there by rotation; "terminal", it was
    not shown, and `path` has it. count: bytes of this path and place so far; the last record has the sum."""

    level: ClassVar[Level] = "warning"
    place: Literal["file", "rotated", "terminal"]
    path: str
    count: int
    why: str = ""


class DrainLost(Event, frozen=True, tag="drain.lost"):
    """The process that reads workers' output is gone; another one goes on. What it had read and not written is lost."""

    level: ClassVar[Level] = "error"
    drain_pid: int
    why: str


class DrainStopped(Event, frozen=True, tag="drain.stopped"):
    """The process that reads workers' output had been stopped; the agent continued it."""

    level: ClassVar[Level] = "warning"
    drain_pid: int


class ZygoteLost(Event, frozen=True, tag="zygote.lost"):
    """Workers cannot be forked from the preloaded process any more; they start cold."""

    level: ClassVar[Level] = "warning"
    why: str


class ModulesPreloaded(Event, frozen=True, tag="modules.preloaded"):
    """Modules were imported in the zygote, so that restarted workers have them at once. `refused`: these cannot be
    preloaded, and are imported by each worker; `why` says why. `is_learned`: because workers have imported them; then
    `modules` names their packages."""

    modules: tuple[str, ...]
    refused: tuple[str, ...] = ()
    why: str = ""
    duration_s: float = 0.0
    is_learned: bool = False


class VariablesTooLate(Event, frozen=True, tag="variables.too_late"):
    """A program set variables before it imported `package`, but a warm worker has it imported already, and the values
    could not be applied. They have no effect in this cycle; from the next one on workers start cold."""

    level: ClassVar[Level] = "warning"
    worker_rank: int
    package: str
    names: tuple[str, ...]


class ElasticMeasured(Event, frozen=True, tag="elastic.measured"):
    """torchelastic put a value on its own stream of metrics; what it means stands in torch's documentation."""

    level: ClassVar[Level] = "debug"
    name: str
    value: float


class ElasticTold(Event, frozen=True, tag="elastic.told"):
    """torchelastic recorded an event of its own, of its agent or of a worker; names and states are torch's."""

    level: ClassVar[Level] = "debug"
    name: str
    source: str
    state: str
    worker_rank: int | None = None
    duration_s: Seconds | None = None
    error: str = ""


class TimeoutsLoaded(Event, frozen=True, tag="timeouts.loaded"):
    """Learned limits hold from the start of this run. `note`: what a person should know of that."""

    source: str
    deadlines: int
    is_same_configuration: bool
    is_shadow: bool
    note: str = ""


class TimeoutExceededInShadow(Event, frozen=True, tag="timeouts.shadow_alarm"):
    """A learned limit was exceeded; in force it would have ended the rank, in shadow mode it is told only."""

    level: ClassVar[Level] = "warning"
    limit: str
    allowed_s: Seconds
    silent_for_s: Seconds


class TimeoutsStale(Event, frozen=True, tag="timeouts.stale"):
    """What is seen now does not agree with what a limit was learned from; `fallback_s` holds instead."""

    level: ClassVar[Level] = "warning"
    deadline: str
    why: str
    fallback_s: Seconds


CATALOGUE: tuple[type[Event], ...] = (
    CallStarted,
    ConfigurationAdvised,
    CallEnded,
    IterationStarted,
    IterationEnded,
    StageStarted,
    StageEnded,
    RestartEnded,
    Interrupted,
    InterruptionArrived,
    OutcomeSeen,
    RankFellSilent,
    HangsWatched,
    HangSuspected,
    RankSuspected,
    ProgressUnknown,
    RankSignalled,
    RankExited,
    RankLeft,
    RankStoodInFor,
    EvidenceCaptured,
    CollectivesCut,
    GarbageCollected,
    AbortStuck,
    GroupAborted,
    AbortDelayed,
    AbortFailed,
    InterruptDelivered,
    InterruptSwallowed,
    HookFailed,
    MonitorStarted,
    MonitorLost,
    MonitorEnded,
    NodeFellSilent,
    StoreHosted,
    StoreLost,
    TelemetryDropped,
    ExportStarted,
    ExportFailed,
    CycleStarted,
    CycleEnded,
    CyclePhaseStarted,
    CyclePhaseEnded,
    RendezvousCompleted,
    WorkerStarted,
    WorkerExited,
    WorkerProgressed,
    WorkerSeen,
    OthersSeen,
    RestartDecided,
    IncidentJudged,
    JobEnded,
    StopRequested,
    ControlRequested,
    NodeExcluded,
    NodeUnhealthy,
    NodeWarned,
    OutputLost,
    DrainLost,
    DrainStopped,
    ZygoteLost,
    ModulesPreloaded,
    VariablesTooLate,
    ElasticMeasured,
    ElasticTold,
    TimeoutsLoaded,
    TimeoutExceededInShadow,
    TimeoutsStale,
)

AnyEvent = (
    CallStarted
    | ConfigurationAdvised
    | CallEnded
    | IterationStarted
    | IterationEnded
    | StageStarted
    | StageEnded
    | RestartEnded
    | Interrupted
    | InterruptionArrived
    | OutcomeSeen
    | RankFellSilent
    | HangsWatched
    | HangSuspected
    | RankSuspected
    | ProgressUnknown
    | RankSignalled
    | RankExited
    | RankLeft
    | RankStoodInFor
    | EvidenceCaptured
    | CollectivesCut
    | GarbageCollected
    | AbortStuck
    | GroupAborted
    | AbortDelayed
    | AbortFailed
    | InterruptDelivered
    | InterruptSwallowed
    | HookFailed
    | MonitorStarted
    | MonitorLost
    | MonitorEnded
    | NodeFellSilent
    | StoreHosted
    | StoreLost
    | TelemetryDropped
    | ExportStarted
    | ExportFailed
    | CycleStarted
    | CycleEnded
    | CyclePhaseStarted
    | CyclePhaseEnded
    | RendezvousCompleted
    | WorkerStarted
    | WorkerExited
    | WorkerProgressed
    | WorkerSeen
    | OthersSeen
    | RestartDecided
    | IncidentJudged
    | JobEnded
    | StopRequested
    | ControlRequested
    | NodeExcluded
    | NodeUnhealthy
    | NodeWarned
    | OutputLost
    | DrainLost
    | DrainStopped
    | ZygoteLost
    | ModulesPreloaded
    | VariablesTooLate
    | ElasticMeasured
    | ElasticTold
    | TimeoutsLoaded
    | TimeoutExceededInShadow
    | TimeoutsStale
)
assert set(get_args(AnyEvent)) == set(CATALOGUE)
