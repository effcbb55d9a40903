"""Which facts can the toolkit record?  The catalogue of events, each defined once.

An event is a fact in the past tense with only its own fields. The record around it says which process wrote it and
when (`facts.records`). The class is the whole definition: tag, level, docstring, and fields with units in their names
(`_s` seconds, `_bytes`, `_ns`). Log lines, spans and metrics are views of the record, defined in `telemetry.log`,
`telemetry.spans` and `telemetry.metrics`. `docs/events.md` is generated from this module."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import msgspec

from resilience.facts.identity import Seconds, WorldSize
from resilience.facts.interruptions import Collective, Exit, Frame, Hang, Interruption, InterruptionRecord, ProcessInfo

Level = Literal["debug", "info", "warning", "error"]
StageName = Literal[
    "initialize",
    "health_check",
    "run",
    "restart",
    "detect",
    "abort",
    "abort_hook",
    "agree",
    "finalize",
    "check",
    "collect",
    "regroup",
    "resume",
]
Outcome = Literal["completed", "interrupted", "failed", "left", "lost"]
CycleReason = Literal["first", "failure", "membership", "request"]
CycleOutcome = Literal["completed", "failed", "interrupted", "preempted", "shutdown", "exhausted", "excluded"]
ProgressSign = Literal["heartbeat", "step", "ping", "section", "entry"]
CyclePhase = Literal["gate", "rendezvous", "spawn", "import", "run", "stop"]
PHASES: tuple[str, ...] = ("detect", "abort", "agree", "finalize", "check", "collect", "regroup", "resume")


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag_field="event"):
    """Base of all events."""

    level: ClassVar[Level] = "info"


class CallStarted(Event, frozen=True, tag="call.started"):
    """A wrapped function was called; the ranks are about to meet.

    restarts_left: how often torchrun may start the ranks again; None if it has not started them."""

    function: str
    world_size: WorldSize
    resilience_version: str
    torch_version: str
    python_version: str
    hostname: str
    monitor: Literal["forked", "executed"]
    monitor_reason: str = ""  # why the monitor was executed instead of forked, or should have been
    monitor_start_s: Seconds = 0.0
    restarts_left: int | None = None


class ConfigurationAdvised(Event, frozen=True, tag="configuration.advised"):
    """Two settings of this job conflict, one does not exist, or one costs more than another would.

    Rank 0 records this once per job."""

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
    """A stage of an iteration, or a phase of a restart, began on this rank. The abort hook runs beside the function."""

    level: ClassVar[Level] = "debug"
    stage: StageName


class StageEnded(Event, frozen=True, tag="stage.ended"):
    """A stage of an iteration, or a phase of a restart, ended on this rank.

    ended_ago_s: how long before this record it ended, if the record was written later."""

    level: ClassVar[Level] = "debug"
    stage: StageName
    outcome: Outcome
    duration_s: Seconds
    closed_by: Literal["rank", "monitor"] = "rank"
    ended_ago_s: Seconds = 0.0


class GarbageCollected(Event, frozen=True, tag="garbage.collected"):
    """This rank freed memory of the interrupted iteration.

    objects: unreachable objects that were found. groups_left: threads that still drop process groups."""

    level: ClassVar[Level] = "debug"
    objects: int
    passes: int
    duration_s: float
    groups_left: int = 0


class RestartEnded(Event, frozen=True, tag="restart.ended"):
    """This rank made its first progress after an interruption: the restart is over.

    duration_s: from detection to the first heartbeat, step, ping or section after entry. If the function sends none,
    sign is "entry" and duration_s ends with the entry. The event then comes with the entry if this rank's function has
    sent none before in this call, else when it is left. step: the step with which the function continued, if known by
    then."""

    interruption: str
    duration_s: Seconds
    sign: ProgressSign
    step: int | None = None


class FirstStepReported(Event, frozen=True, tag="first_step.reported"):
    """This rank reported the first step of its function in a call: later steps are counted from it. If the function
    loaded a checkpoint, it is no step 0. Only the first iteration of a call has this
    event; later ones have `restart.ended` and `restart.step`.

    after_s: since the function was entered."""

    level: ClassVar[Level] = "debug"
    step: int
    after_s: Seconds


class RestartStep(Event, frozen=True, tag="restart.step"):
    """This rank reported its first step after a restart that had ended with another signal, such as a section in which
    the function loaded its checkpoint. step: the step with which the function continued."""

    level: ClassVar[Level] = "debug"
    step: int


class RankInterrupted(Event, frozen=True, tag="rank.interrupted"):
    """A rank's iteration was interrupted; the record says what this process knows about it."""

    level: ClassVar[Level] = "error"
    record: InterruptionRecord


class InterruptionArrived(Event, frozen=True, tag="interruption.arrived"):
    """An interruption record arrived in the store. The store's order of arrival shows which came first. `fault_of`: if
    the record is of the rank's own fault, the initial rank whose own fault was the first of the iteration."""

    level: ClassVar[Level] = "debug"
    initial_rank: int
    interruption: Interruption
    iteration: int
    position: int  # from 1
    fault_of: int | None = None


class IterationDecided(Event, frozen=True, tag="iteration.decided"):
    """This rank learned that its iteration was decided as interrupted. `stack`: its main thread's stack at that moment,
    innermost frame last, which shows which rank waited for which. `silent_for_s`: how long the rank of the first record
    had been silent, if it hung; all ranks that were at work lost that time. `sections`: the open sections, outermost
    first. `collectives`: the last ones that it entered. `hang`: how this rank itself hung, if another rank's hang is
    the reason. `waits_in`: the kernel function in which its main thread slept. `is_own`: the first record shows that
    rank's own fault, so records of other ranks came later. `process`: after a hang, its process at that moment, with
    its CPU use since its monitor had looked before; without `over_s`: since the process began."""

    level: ClassVar[Level] = "debug"
    by: int | None = None  # initial rank of the first record, if known
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    silent_for_s: Seconds | None = None
    sections: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    hang: Hang | None = None
    waits_in: str = ""
    is_own: bool = False
    process: ProcessInfo | None = None


class RankFellSilent(Event, frozen=True, tag="rank.fell_silent"):
    """A limit was exceeded: the rank was silent for longer than allowed."""

    level: ClassVar[Level] = "warning"
    limit: str
    severity: Literal["soft", "hard"]
    allowed_s: Seconds
    silent_for_s: Seconds


class OthersSeen(Event, frozen=True, tag="others.seen"):
    """A rank hung. Before any signal or cut, the positions of the other ranks were recorded.

    rank: the initial rank that hung. missing: initial ranks without a recorded position, because they did not answer in
    time. elsewhere: number of ranks on other nodes, which were not asked. duration_s: how long the monitor waited for
    the answers."""

    level: ClassVar[Level] = "debug"
    rank: int
    missing: tuple[int, ...] = ()
    elsewhere: int = 0
    duration_s: Seconds = 0.0


class HangsWatched(Event, frozen=True, tag="hangs.watched"):
    """How hangs are detected in this run; recorded once at its start.

    limits: those that were set or calibrated, in seconds, by what they apply to. first_s and least_s belong to the rule
    for silences without a limit: first_s applies until the job has shown its pauses, least_s is the smallest limit
    after that. Both are None if the rule is switched off. in_wrapper: in the function of a Wrapper; else in workers.
    first_steps: after a start, so many steps have more time than a limit for steps that was set."""

    limits: dict[str, Seconds]
    first_s: Seconds | None = None
    least_s: Seconds | None = None
    in_wrapper: bool = False
    first_steps: int = 0


class HangSuspected(Event, frozen=True, tag="hang.suspected"):
    """A rank has been silent for long, and no set limit applies to what it does. It is ended after `allowed_s`.

    kind: the innermost open section, empty if none is open. longest_s: the longest silence of that kind before.
    is_learned: the limit follows from longest_s; else the job has not shown its pauses yet. hang: how the rank seems to
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
    """A rank is late compared with its own past: it has been silent for longer than ever before, but its learned limit
    is still far away.

    limit: the learned limit that ends it after `allowed_s`. longest_s: the longest healthy duration known. hang: how it
    seems to hang. stack: of its main thread, innermost frame last. look_s: how long it took to examine the rank."""

    level: ClassVar[Level] = "warning"
    limit: str
    silent_for_s: Seconds
    longest_s: Seconds
    allowed_s: Seconds
    hang: Hang | None = None
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    look_s: Seconds = 0.0


class RankSuspicionCompared(Event, frozen=True, tag="rank.suspicion_compared"):
    """A rank is suspected and waits for nobody, so the other ranks of its node were looked at.

    limit: the learned limit that it approaches. waiting: ranks that waited in a collective. busy: ranks that did not.
    missing: ranks that did not answer in time. elsewhere: number of ranks on other nodes, which are not asked. look:
    number of the look, from 1. is_confirmed: this look and the one before found the same: all of these ranks wait for
    the suspect, and it stands still. duration_s: how long the monitor waited for the answers."""

    limit: str
    waiting: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    elsewhere: int = 0
    look: int = 1
    is_confirmed: bool = False
    duration_s: Seconds = 0.0


class RankProgressUnknown(Event, frozen=True, tag="rank.progress_unknown"):
    """The function runs, but no limit on progress is armed: no ping, heartbeat or section with a limit, and no step
    limit. A loop without progress would go unnoticed."""

    level: ClassVar[Level] = "warning"
    running_for_s: Seconds


class RankSignalled(Event, frozen=True, tag="rank.signalled"):
    """The monitor sent signals to its rank, after it had taken the evidence."""

    level: ClassVar[Level] = "warning"
    signals: tuple[str, ...]
    reason: str


class RankExited(Event, frozen=True, tag="rank.exited"):
    """The rank's process ended. `goodbye`: it had left the wrapper cleanly before that."""

    goodbye: bool
    code: int | None = None
    signal: str | None = None
    oom: bool | None = None
    noticed_by: Literal["mutex", "pidfd", "channel"] = "pidfd"

    @property
    def status(self) -> Exit:
        """How the process ended."""
        return Exit(self.code, self.signal, self.oom)


class LoaderWorkersKilled(Event, frozen=True, tag="loader_workers.killed"):
    """Data loader workers of a dead rank did not end by themselves, and its monitor killed them. pids: theirs."""

    level: ClassVar[Level] = "warning"
    pids: tuple[int, ...]


class RankLeft(Event, frozen=True, tag="rank.left"):
    """The rank leaves the wrapper with an exception and takes no further part."""

    level: ClassVar[Level] = "warning"
    error: str


class RankStoodInFor(Event, frozen=True, tag="rank.stood_in_for"):
    """A monitor represented a dead rank until the other ranks continued without it. failed: it could not. A monitor
    that could not begin tries again until barrier_timeout is over; a later record then shows the end."""

    initial_rank: int
    result: Literal["excluded", "completed", "discarded", "failed"]
    duration_s: Seconds
    error: str = ""


class EvidenceCaptured(Event, frozen=True, tag="evidence.captured"):
    """Stacks of a rank were taken. method: own-thread, by a thread of the rank, which cannot harm it; faulthandler, by
    a signal, used only if the GIL is held or the rank is killed next; none, no stacks exist. reason: why there are
    none, or why no safer method was used."""

    method: Literal["own-thread", "faulthandler", "py-spy", "none"]
    threads: int
    reason: str = ""
    path: str = ""


class AbortCut(Event, frozen=True, tag="abort.cut"):
    """The abort shut this rank's own collective connections, which frees blocked threads."""

    sockets: int
    store_connections: int
    method: Literal["epoll", "shape", "none"]
    duration_s: Seconds


class AbortStuck(Event, frozen=True, tag="abort.stuck"):
    """The main thread has slept for the abort limit in a place where nothing can free it; the process must end."""

    level: ClassVar[Level] = "error"
    limit_s: Seconds
    where: str


class AbortGroup(Event, frozen=True, tag="abort.group"):
    """The abort of an accelerator's process group ended, failed, or was given up after RESILIENCE_ABORT_WAIT.

    A group whose abort was given up is abandoned, and its abort continues in a thread."""

    group: str  # torch's name of the group
    backend: str
    duration_s: float
    outcome: Literal["aborted", "failed", "timed out"]
    error: str = ""
    note: str = ""  # what a user should know about such an abort


class AbortDelayed(Event, frozen=True, tag="abort.delayed"):
    """The main thread has not left the function within the abort limit. It has until hard_timeout.

    where: file:line function. store: the kind of store that it uses there, such as the user's FileStore."""

    level: ClassVar[Level] = "warning"
    limit_s: float
    where: str
    store: str = ""


class AbortFailed(Event, frozen=True, tag="abort.failed"):
    """The abort hook raised; the restart continues."""

    level: ClassVar[Level] = "error"
    error: str


class InterruptDelivered(Event, frozen=True, tag="interrupt.delivered"):
    """The main thread left the wrapped function because it was interrupted.

    timed_out_groups: number of gloo groups that were closed by a timeout, because the cut alone did not free it."""

    level: ClassVar[Level] = "debug"
    duration_s: Seconds
    signals: int
    timed_out_groups: int = 0


class InterruptSwallowed(Event, frozen=True, tag="interrupt.swallowed"):
    """User code caught the interruption and continued; the interruption is delivered again."""

    level: ClassVar[Level] = "warning"
    file: str
    line: int
    function: str


class SignalDeferred(Event, frozen=True, tag="signal.deferred"):
    """A signal handler of the program raised while a restart was under way, and the exception was dropped; or the
    interruption cut the handler short. The handler is called again when the wrapped function runs next, at the latest
    when the call is over. If the call raises, its own exception is the one that is raised; what the handler raises then
    becomes a note of it.

    signal: its name; error: type and message of the exception; stack: where it was raised, innermost frame last."""

    level: ClassVar[Level] = "warning"
    signal: str
    error: str
    stack: tuple[Frame, ...] = ()


class HookFailed(Event, frozen=True, tag="hook.failed"):
    """A hook of the wrapper raised, or a step of the package failed: torch's modes could not be restored at the end of
    a call (hook: torch modes), a rank could not record how it left (leave), a rank or its monitor could not host the
    store of an iteration (hosting), a monitor's work ended (monitor, supervision), or a rank without a working monitor
    could not show in the store that it lives (sign of life)."""

    level: ClassVar[Level] = "error"
    hook: str
    error: str


class MonitorStarted(Event, frozen=True, tag="monitor.started"):
    """A monitor began to watch its rank."""

    rank_pid: int


class MonitorLost(Event, frozen=True, tag="monitor.lost"):
    """A rank's monitor is gone; the rank continues unmonitored. monitor_pid: 0 if no other one could be started in its
    place. is_replaced: it lived and did not answer, so the launcher's agent ended it."""

    level: ClassVar[Level] = "error"
    monitor_pid: int
    reason: str
    is_replaced: bool = False


class MonitorEnded(Event, frozen=True, tag="monitor.ended"):
    """A monitor stopped watching its rank; no further records of the rank follow."""

    dropped_records: int = 0


class NodeFellSilent(Event, frozen=True, tag="node.fell_silent"):
    """Another node's counter in the store did not change for longer than heartbeat_timeout."""

    level: ClassVar[Level] = "error"
    silent_node: str
    allowed_s: Seconds
    silent_for_s: Seconds
    ranks: tuple[int, ...] = ()


class StoreHosted(Event, frozen=True, tag="store.hosted"):
    """This monitor hosts a store: the wrapper's own, or the store of an iteration's process groups."""

    purpose: Literal["wrapper", "iteration"]
    address: str
    port: int
    duration_s: Seconds


class StoreLost(Event, frozen=True, tag="store.lost"):
    """The wrapper's store no longer answers this process. In an agent's record: the job's store; other nodes may still
    reach it."""

    level: ClassVar[Level] = "error"
    error: str


class TelemetryDropped(Event, frozen=True, tag="telemetry.dropped"):
    """Records or measurements were lost; the job is not affected."""

    level: ClassVar[Level] = "warning"
    signal: Literal["record", "span", "metric", "log", "timing"]
    reason: str
    count: int


class ExportStarted(Event, frozen=True, tag="export.started"):
    """The node's exporter began to serve metrics or to send spans; `note` says what is unexpected."""

    exporter: Literal["prometheus", "otlp"]
    endpoint: str
    note: str = ""


class ExportFailed(Event, frozen=True, tag="export.failed"):
    """Metrics or spans cannot be exported. The record files contain everything; the job is not affected."""

    level: ClassVar[Level] = "warning"
    exporter: Literal["prometheus", "otlp"]
    reason: str
    is_at_start: bool = False  # nothing is exported at all
    signal: Literal["", "metric", "span"] = (
        ""  # what is not exported; "" as usual: metrics by prometheus, spans by otlp
    )

    @property
    def exported(self) -> Literal["metric", "span"]:
        """Return what is not exported."""
        return self.signal or ("metric" if self.exporter == "prometheus" else "span")


class AnalysisFailed(Event, frozen=True, tag="analysis.failed"):
    """The terminal does not name the rank that failed first, after a restart or at the job's end, because the analysis
    of the records failed. The records are whole: `resilience report` may say more."""

    level: ClassVar[Level] = "warning"
    reason: str


# -- the launcher's agent ------------------------------------------------------------------------


class CycleStarted(Event, frozen=True, tag="cycle.started"):
    """The agent starts its node's workers. `why`: the reason for the new cycle."""

    why: CycleReason
    restarts_used: int  # in the whole job
    max_restarts: int


class CycleEnded(Event, frozen=True, tag="cycle.ended"):
    """All workers of a cycle have ended on this node. duration_s: since the cycle's start.

    silent_for_s: silence of the rank whose hang ended the cycle, on any node. step: the highest one that a worker of
    this node reported in the cycle. failed_node: the node of the rank that failed first, empty if no rank failed."""

    outcome: CycleOutcome
    duration_s: Seconds
    detail: str = ""
    silent_for_s: Seconds | None = None
    step: int | None = None
    failed_node: str = ""


class CyclePhaseStarted(Event, frozen=True, tag="cycle.phase.started"):
    """A phase of a cycle began on this node."""

    phase: CyclePhase


class CyclePhaseEnded(Event, frozen=True, tag="cycle.phase.ended"):
    """A phase of a cycle ended on this node."""

    phase: CyclePhase
    outcome: Outcome
    duration_s: Seconds


class RendezvousCompleted(Event, frozen=True, tag="rendezvous.completed"):
    """All nodes of a cycle met. `mode`: the source of group ranks."""

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
    """A worker showed progress for the first time since its start, or reported its first step.

    after_s: since its monitor began to watch, which is the worker's start. ago_s: how long before this record."""

    sign: Literal["heartbeat", "step", "ping", "section"]
    after_s: Seconds
    step: int | None = None
    ago_s: Seconds = 0.0


class WorkerSeen(Event, frozen=True, tag="worker.seen"):
    """When a rank hung, another rank of the same cycle was at this place, recorded before either got a signal. On other
    nodes the place is recorded before the rank is stopped.

    hang: how this rank itself hung, if it did. stack: of its main thread, innermost frame last. collectives: the last
    ones that it entered. is_suspicion: the other rank was only suspected, and may have gone on. exit, log_tail: if its
    program had failed and only its interpreter still shut down: how its process would end, and its last lines."""

    hang: Hang | None = None
    stack: tuple[Frame, ...] = ()
    step: int | None = None
    collectives: tuple[Collective, ...] = ()
    is_suspicion: bool = False
    exit: Exit | None = None
    log_tail: tuple[str, ...] = ()


class RestartDecided(Event, frozen=True, tag="restart.decided"):
    """After a failure, the job's budget decided: another cycle, or the end. lost_node: whose loss was the failure."""

    level: ClassVar[Level] = "warning"
    verdict: Literal["restart", "stop"]
    fingerprint: str
    why: str
    restarts_used: int
    restarts_left: int
    same_in_a_row: int
    lost_node: str | None = None


class IncidentJudged(Event, frozen=True, tag="incident.judged"):
    """The verdict on an interruption, in the words that the terminal shows. It needs the ranks' records, so it comes
    after the restart. cycle, call, iteration: what was interrupted; call and iteration are None for a cycle of the
    launcher, and iteration for a call's entry. rank: the one blamed first, None if no rank is named. confidence: 0 to
    1, of that rank. nodes: of the blamed ranks; empty if no rank is blamed, if ranks of several nodes failed in the
    same way, or if an earlier verdict has named nodes for this interruption."""

    level: ClassVar[Level] = "warning"
    sentence: str
    what: str
    cycle: int
    iteration: int | None = None
    rank: int | None = None
    confidence: float = 0.0
    nodes: tuple[str, ...] = ()
    call: int | None = None


class JobEnded(Event, frozen=True, tag="job.ended"):
    """The agent leaves: the job is over on this node. `is_clean`: the job was preempted, and all workers of the node
    ended with exit status 0 in time."""

    outcome: CycleOutcome
    exit_code: int
    detail: str = ""
    is_clean: bool = False


class StopRequested(Event, frozen=True, tag="stop.requested"):
    """The whole job, or this node alone (`leaves`), was asked to stop. Workers that call `stop_requested` have at
    most `grace_s` for a last checkpoint, before they get the signal."""

    source: str
    grace_s: Seconds
    leaves: bool = False


class ControlRequested(Event, frozen=True, tag="control.requested"):
    """A rank asked for a decision about its node or the workload."""

    action: str
    description: str
    local_rank: int


class NodeExcluded(Event, frozen=True, tag="node.excluded"):
    """This node takes no further part in the job; the others continue without it if they can."""

    level: ClassVar[Level] = "warning"
    why: str


class NodeUnhealthy(Event, frozen=True, tag="node.unhealthy"):
    """A health check of this node failed, before a cycle or while workers ran."""

    level: ClassVar[Level] = "warning"
    check: str
    detail: str


class NodeWarned(Event, frozen=True, tag="node.warned"):
    """A health check of this node found a problem that does not exclude it. Recorded once for each check and cause."""

    level: ClassVar[Level] = "warning"
    check: str
    detail: str


class OutputLost(Event, frozen=True, tag="output.lost"):
    """Some of a worker's output is not in its usual place; the worker is not affected.

    place: "file", it could not be written to `path`; "rotated", rotation removed it from `path`; "terminal", it was not
    shown, but `path` has it. count: bytes of this path and place so far; the last record has the sum. is_shown: the
    launcher's terminal shows this worker's output."""

    level: ClassVar[Level] = "warning"
    place: Literal["file", "rotated", "terminal"]
    path: str
    count: int
    why: str = ""
    is_shown: bool = True


class DrainLost(Event, frozen=True, tag="drain.lost"):
    """The process that reads workers' output is gone, and another process replaces it. Output that it had read but not
    passed on is lost; `output.lost` counts it."""

    level: ClassVar[Level] = "error"
    drain_pid: int
    why: str


class DrainStopped(Event, frozen=True, tag="drain.stopped"):
    """The process that reads workers' output had been stopped; the agent resumed it."""

    level: ClassVar[Level] = "warning"
    drain_pid: int


class StoreProcessLost(Event, frozen=True, tag="store_process.lost"):
    """The process that hosts this node's stores ended. `is_job_store`: the job's store was lost with it, so the job
    ends. Otherwise another process replaces it. `is_cycle_store`: it hosted the store that the workers of the cycle
    use, which they have lost."""

    level: ClassVar[Level] = "error"
    store_pid: int
    why: str
    is_job_store: bool = False
    is_cycle_store: bool = False


class StoreProcessStopped(Event, frozen=True, tag="store_process.stopped"):
    """The process that hosts this node's stores had been stopped; the agent resumed it."""

    level: ClassVar[Level] = "warning"
    store_pid: int


class ZygoteLost(Event, frozen=True, tag="zygote.lost"):
    """Workers can no longer be forked from the preloaded process; they start cold."""

    level: ClassVar[Level] = "warning"
    why: str


class WorkersNotForked(Event, frozen=True, tag="workers.not_forked"):
    """The preloaded process could not fork the workers of this cycle, so they start cold. The next ones are forked if
    it can."""

    level: ClassVar[Level] = "warning"
    why: str


class ModulesPreloaded(Event, frozen=True, tag="modules.preloaded"):
    """The zygote imported modules, so restarted workers have them at once. `refused`: modules that cannot be preloaded
    and that each worker imports; `why` is the reason. `is_learned`: they were chosen because workers imported them;
    then `modules` names their packages."""

    modules: tuple[str, ...]
    refused: tuple[str, ...] = ()
    why: str = ""
    duration_s: float = 0.0
    is_learned: bool = False


class ModulesTooLate(Event, frozen=True, tag="modules.too_late"):
    """The first workers started without these modules of `--preload`, whose import had not ended after `waited_s`
    seconds. Workers that start once it has ended have them."""

    level: ClassVar[Level] = "warning"
    modules: tuple[str, ...]
    waited_s: float


class VariablesTooLate(Event, frozen=True, tag="variables.too_late"):
    """A program set variables before it imported `package`, but the warm worker had already imported it, and the values
    could not be applied. They have no effect in this cycle; from the next cycle on, workers start cold."""

    level: ClassVar[Level] = "warning"
    worker_rank: int
    package: str
    names: tuple[str, ...]


class ElasticMeasured(Event, frozen=True, tag="elastic.measured"):
    """torchelastic put a value on its own stream of metrics; torch's documentation explains it."""

    level: ClassVar[Level] = "debug"
    name: str
    value: float


class ElasticTold(Event, frozen=True, tag="elastic.told"):
    """torchelastic recorded its own event about its agent or a worker; names and states are torch's."""

    level: ClassVar[Level] = "debug"
    name: str
    source: str
    state: str
    worker_rank: int | None = None
    duration_s: Seconds | None = None
    error: str = ""


class TimeoutsFitFailed(Event, frozen=True, tag="timeouts.fit_failed"):
    """A job could not fit the limit of a deadline from its durations; `error` is the reason. The longest observed times
    give the limit instead."""

    level: ClassVar[Level] = "warning"
    deadline: str
    error: str


class TimeoutsLoaded(Event, frozen=True, tag="timeouts.loaded"):
    """Learned limits are in force from the start of this run. `note`: what a user should know about them."""

    source: str
    deadlines: int
    is_same_configuration: bool
    is_shadow: bool
    note: str = ""


class TimeoutsShadowAlarm(Event, frozen=True, tag="timeouts.shadow_alarm"):
    """A learned limit was exceeded. In force it would have ended the rank; in shadow mode it is only recorded."""

    level: ClassVar[Level] = "warning"
    limit: str
    allowed_s: Seconds
    silent_for_s: Seconds


class TimeoutsStale(Event, frozen=True, tag="timeouts.stale"):
    """Present durations do not agree with those that a limit was learned from; `fallback_s` applies instead."""

    level: ClassVar[Level] = "warning"
    deadline: str
    why: str
    fallback_s: Seconds


class TimeoutsUnlearned(Event, frozen=True, tag="timeouts.unlearned"):
    """Learned limits do not hold in this cycle, because no cycle with so many ranks was observed. Configured limits
    hold. One agent records this once, until the number of ranks changes.

    world_size: ranks of this cycle; least_world_size, most_world_size: ranks with which learned limits hold."""

    level: ClassVar[Level] = "warning"
    world_size: WorldSize
    least_world_size: WorldSize
    most_world_size: WorldSize


class TimeoutsUnread(Event, frozen=True, tag="timeouts.unread"):
    """A rank could not read the limits that an earlier start has calculated. Configured limits hold for it, while other
    ranks may use those of the file."""

    level: ClassVar[Level] = "warning"
    file: str
    error: str


AnyEvent = (
    CallStarted
    | ConfigurationAdvised
    | CallEnded
    | IterationStarted
    | IterationEnded
    | StageStarted
    | StageEnded
    | RestartEnded
    | FirstStepReported
    | RestartStep
    | RankInterrupted
    | InterruptionArrived
    | IterationDecided
    | RankFellSilent
    | HangsWatched
    | HangSuspected
    | RankSuspected
    | RankSuspicionCompared
    | RankProgressUnknown
    | RankSignalled
    | RankExited
    | LoaderWorkersKilled
    | RankLeft
    | RankStoodInFor
    | EvidenceCaptured
    | AbortCut
    | GarbageCollected
    | AbortStuck
    | AbortGroup
    | AbortDelayed
    | AbortFailed
    | InterruptDelivered
    | InterruptSwallowed
    | SignalDeferred
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
    | StoreProcessLost
    | StoreProcessStopped
    | ZygoteLost
    | WorkersNotForked
    | ModulesPreloaded
    | AnalysisFailed
    | ModulesTooLate
    | VariablesTooLate
    | ElasticMeasured
    | ElasticTold
    | TimeoutsFitFailed
    | TimeoutsLoaded
    | TimeoutsShadowAlarm
    | TimeoutsStale
    | TimeoutsUnlearned
    | TimeoutsUnread
)
CATALOGUE: tuple[type[Event], ...] = get_args(AnyEvent)
"""All events, in the order of the pages."""
