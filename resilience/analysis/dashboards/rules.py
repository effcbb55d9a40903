"""What is recorded, and what wakes somebody?  Recording rules and alerts, each with its runbook.

Rules look at all jobs of all clusters at once, so every aggregation keeps `cluster` and `job_id` (a label that
no series has costs nothing). A critical alert about a job silences those about its ranks and sections
(`alertmanager.yaml`). Thresholds are starting points: they are numbers here, and in the exported files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from resilience.analysis.dashboards.queries import (
    BEGAN,
    OF_JOB,
    fold,
    goodput,
    grown,
    matched,
    or_zero,
    quantile,
    restarts,
    select,
)

RUNBOOKS_UID = "resilience-runbooks"
EVERY, SLOW = "30s", "2m"  # between two evaluations
GROUPS = ("resilience.recording", "resilience.recording.slow", "resilience.alerts")  # evaluated in this order
NO_SCOPE = ()
NEAR = 0.67  # of a limit; `core.timeouts.NEAR_MISS` calls the limit too short from there on
START_LIMIT_S = 3600  # a first step of 960 s was seen on healthy jobs
ENOUGH = 500  # samples of a section from which a limit can be learned

Severity = Literal["critical", "warning", "info"]
Level = Literal["end", "job", "node", "rank", "section"]


class Recording(msgspec.Struct, frozen=True):
    """A recording rule. is_slow: it looks back an hour or more, which costs too much to do all the time."""

    record: str
    expr: str
    is_slow: bool = False


class Runbook(msgspec.Struct, frozen=True):
    """What an alert means, what to look at, what to do."""

    means: str
    look: tuple[str, ...]
    do: tuple[str, ...]

    def markdown(self) -> str:
        """Return the page, without its heading."""
        parts = [
            f"**What it means.** {self.means}\n",
            "**What to look at**\n",
            *(f"{number}. {step}" for number, step in enumerate(self.look, 1)),
            "",
            "**What to do**\n",
            *(f"- {step}" for step in self.do),
        ]
        return "\n".join(parts) + "\n"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert. wait: how long it must hold. summary and board: what it says, and the dashboard it leads to. culprit:
    who is blamed, as far as metrics know. command: the subcommand of `resilience` to run."""

    name: str
    expr: str
    wait: str
    severity: Severity
    level: Level
    summary: str
    board: str
    runbook: Runbook
    culprit: str = ""
    command: str = "report"


_OF_JOB = "{cluster=%q, job_id=%q}"


def _asked(query: str, found: str, otherwise: str) -> str:
    """A part of an annotation that Prometheus fills in from a query about the alert's job."""
    ask = f'printf "{query}" $labels.cluster $labels.job_id | query'
    return f"{{{{ with {ask} }}}}{found}{{{{ else }}}}{otherwise}{{{{ end }}}}"


RUN = "RUN"  # where nobody knows the run folder
_FOLDER = _asked(f"last_over_time(resilience_run_info{_OF_JOB}[6h])", '{{ . | first | label "folder" }}', RUN)
UNKNOWN = "unknown"
_SILENT_RANK = _asked(
    f"topk(1, resilience_rank_silence_seconds{_OF_JOB})",
    'rank {{ . | first | label "rank" }} on {{ . | first | label "node" }}, silent for '
    "{{ . | first | value | humanizeDuration }}",
    UNKNOWN,
)
_FAULTY_NODE = _asked(
    f"topk(1, last_over_time(node:resilience_faults:count6h{_OF_JOB}[6h]) > 0)",
    'node {{ . | first | label "node" }}, where {{ . | first | value | humanize }} faults began within 6 hours',
    UNKNOWN,
)

_VERDICT = _asked(
    f"topk(1, last_over_time(resilience_verdict_timestamp_seconds{_OF_JOB}[6h]))",
    '{{ . | first | label "sentence" }}',
    UNKNOWN,
)

_JOB = ", ".join(OF_JOB)
_FIRST = 'origin="first", interruption!="unresponsive"'  # another node counts a node that is lost
_BEATS = fold("sum", OF_JOB, "resilience_heartbeat_interval_seconds_count")
_ENDS = fold("sum", OF_JOB, "resilience_section_duration_seconds_count")
_RANKS = fold("sum", OF_JOB, "resilience_ranks")

# How long a lost or failed job pages. Prometheus must have seen it alive within that time.
_REMEMBERED, _REMEMBERED_S = "6h", 21_600
_NODE = f"{_JOB}, node"
_FILE_AGE = f"(time() - max by ({_NODE}) (resilience_written_timestamp_seconds))"
_FILE_ENDED = f"max by ({_NODE}) (resilience_ended_timestamp_seconds)"
_FRESH_FILES = f"max by ({_JOB}) ({_FILE_AGE} < 180 unless on ({_NODE}) {_FILE_ENDED})"
_OLD_FILES = f"(({_FILE_AGE} > 180) < {_REMEMBERED_S} unless on ({_NODE}) {_FILE_ENDED})"
# Targets whose entry lies in the run directory: it goes when the job ends well. What came over HTTP stays for ever.
_TARGETS = 'job_id!="", outcome=""'
_ANNOUNCED = f'{_TARGETS}, discovery!="http"'

RECORDINGS = (
    Recording("job:resilience_ranks:sum", fold("sum", (*OF_JOB, "state"), "resilience_ranks")),
    Recording(
        "job:resilience_spares:count",
        or_zero(fold("sum", OF_JOB, select("resilience_ranks", 'state="inactive"', scope=NO_SCOPE)), _RANKS),
    ),
    Recording("job:resilience_step:max", fold("max", OF_JOB, "resilience_rank_step")),
    Recording("job:resilience_file:fresh", _FRESH_FILES),
    Recording("job:up:max", fold("max", OF_JOB, f"up{{{_ANNOUNCED}}}")),
    Recording("job:resilience_signs:count", f"({_BEATS} + {_ENDS}) or {_BEATS} or {_ENDS}"),
    Recording("job:resilience_goodput:ratio1h", goodput(OF_JOB, "1h", NO_SCOPE), is_slow=True),
    Recording("job:resilience_restarts:count30m", restarts(OF_JOB, "30m", NO_SCOPE)),
    Recording(
        "job:resilience_restart_duration_seconds:p95_1h",
        quantile(
            0.95,
            grown(
                "resilience_restart_duration_seconds_bucket", by=(*OF_JOB, "layer", "le"), window="1h", scope=NO_SCOPE
            ),
        ),
        is_slow=True,
    ),
    Recording(
        "node:resilience_faults:count6h",
        grown("resilience_interruptions_total", _FIRST, by=(*OF_JOB, "node"), window="6h", scope=NO_SCOPE),
        is_slow=True,
    ),
    Recording(
        "job:resilience_telemetry_dropped:count15m",
        grown("resilience_telemetry_dropped_total", by=(*OF_JOB, "signal", "reason"), window="15m", scope=NO_SCOPE),
    ),
)

_SAMPLES = 'resilience_section_duration_seconds_count{outcome="completed"}'
_JOB_IS_THERE = fold("max", OF_JOB, BEGAN)
_WAS_ALIVE = f"max_over_time(job:up:max[{_REMEMBERED}]) == 1"
_FRESH = "job:resilience_file:fresh"
_LEFT_FAILED = f'max by ({_JOB}) (up{{job_id!="", outcome="failed"}})'
_ENDED_FAILED = f'max by ({_JOB}) (time() - resilience_ended_timestamp_seconds{{outcome="failed"}} < {_REMEMBERED_S})'


def _unchanged(recorded: str) -> str:
    """What is known to be what it was 15 minutes ago. After a gap of Prometheus nothing is known."""
    return f"({recorded} == {recorded} offset 15m)"


_SIGNS, _STEP = "job:resilience_signs:count", "job:resilience_step:max"
_RANK = f"{_JOB}, node, rank"
_BUDGET = "min by (cluster, job_id, layer) (resilience_restart_budget_remaining)"

ALERTS = (
    Alert(
        name="JobGone",
        expr=(
            f"((job:up:max == 0 and on ({_JOB}) {_WAS_ALIVE}) or max by ({_JOB}) {_OLD_FILES}) "
            f"unless on ({_JOB}) {_LEFT_FAILED} unless on ({_JOB}) {_FRESH}"
        ),
        wait="5m",
        severity="critical",
        level="end",
        summary="Job {{ $labels.job_id }} is gone: nobody has said how it ended",
        board="overview",
        runbook=Runbook(
            "No node of the job answers Prometheus, and no agent or monitor has said that the job ended. It was killed "
            "(out of memory, power, `kill -9`, a scheduler without a grace period), or its network is cut. A job that "
            "ends well removes its entries from `.targets` of the run directory, and in the file for node-exporter it "
            "says so. The alert ends after 6 hours.",
            (
                "The scheduler: does the job still exist, and how did it end (`sacct`, `kubectl describe pod`)?",
                "On the node of rank 0: `dmesg` (out of memory), processes named `resilience`, the network.",
                "`resilience report RUN`: the last records, and where each rank was.",
            ),
            (
                "It is gone: start it again; the run folder keeps its account.",
                "It runs, and only the network between Prometheus and it is cut: mend that.",
                "It was ended on purpose by SIGKILL: delete its files in `.targets`, or let the alert expire.",
            ),
        ),
    ),
    Alert(
        name="JobFailed",
        expr=(
            f"((({_LEFT_FAILED} and on ({_JOB}) {_WAS_ALIVE}) unless on ({_JOB}) job:up:max == 1) or {_ENDED_FAILED}) "
            f"unless on ({_JOB}) {_FRESH}"
        ),
        wait="0s",
        severity="critical",
        level="end",
        summary="Job {{ $labels.job_id }} ended in failure",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The job ended without having completed: its budget of restarts was used up, no restart can cure its "
            "failure, or every call of the wrapped function failed. The alert ends after 6 hours. A failure before the "
            "first scrape shows only in the file for node-exporter.",
            (
                "`resilience report RUN`: the last incident, its verdict and the exception.",
                "Dashboard *Restarts*: what used the restarts up.",
                "The launcher's last lines on standard error: its table of failures.",
            ),
            (
                "Remove the cause, and start the job again from its last checkpoint.",
                "The failures were the machines': drain the nodes that the report names; more `--max-restarts`.",
            ),
        ),
    ),
    Alert(
        name="StartStalled",
        expr=(
            f"(time() - min by ({_JOB}) ({BEGAN}) > {START_LIMIT_S}) "
            f"unless on ({_JOB}) {_SIGNS} > 0 unless on ({_JOB}) {_STEP} "
            f'unless on ({_JOB}) resilience_restart_iteration{{layer="inprocess"}} '
            f"unless on ({_JOB}) resilience_ended_timestamp_seconds"
        ),
        wait="1m",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} began {{ $value | humanizeDuration }} ago and has shown no progress since",
        board="hangs",
        command="status",
        runbook=Runbook(
            "An hour after its start the job has given no sign of progress: no step, no heartbeat, no section that "
            "ended, and no wrapped function was entered. It waits for nodes, it loads for very long, it hangs, or the "
            "program gives no signs at all. In the last case no hang of it can be noticed either.",
            (
                "`resilience status RUN`: does it wait in the rendezvous for nodes, or do workers run?",
                "Workers run: `py-spy dump --pid PID` of one of them; do they read data, compile, or wait?",
            ),
            (
                "Nodes are missing: bring them, or let the job start with fewer (`--nnodes MIN:MAX`).",
                "It loads: mark that as a section with a limit, so that a hang in it is ended.",
                "The program gives no signs: call `resilience.step(n)` in its loop; one line.",
            ),
        ),
    ),
    Alert(
        name="JobStalled",
        expr=(
            f"({_unchanged(_SIGNS)} or {_unchanged(_STEP)}) "
            f"unless on ({_JOB}) ({_SIGNS} unless {_unchanged(_SIGNS)}) "
            f"unless on ({_JOB}) ({_STEP} unless {_unchanged(_STEP)}) "
            f"and on ({_JOB}) {_JOB_IS_THERE}"
        ),
        wait="5m",
        severity="critical",
        level="job",
        summary="Job {{ $labels.job_id }} makes no progress: no heartbeat, no section ended, no step in 15 minutes",
        board="hangs",
        culprit=_SILENT_RANK,
        command="status",
        runbook=Runbook(
            "Ranks of the job are there, but for 15 minutes none of them has sent a heartbeat, left a section or told "
            "a higher step. Either all wait for one (a hang that no limit ends), or all do something long that says "
            "nothing of itself. The toolkit restarts what exceeds a limit; this alert is for what has none.",
            (
                "Dashboard *Hangs*: is one rank silent for longer than the others? Is a section open?",
                "`resilience report RUN`: its last incident, and which ranks wait at which line.",
                "`resilience status RUN`: steps of all ranks; one that is behind is who the others wait for.",
                "If nothing stands out: `py-spy dump --pid PID` of two ranks, `dmesg` of their nodes, the storage.",
            ),
            (
                "One rank stands out: end its process (`kill PID`); the others restart without it or with a spare.",
                "All wait at the same collective: suspect the network or different shapes; end one rank to restart.",
                "The program works, but silently: mark what it does as a section, or send heartbeats.",
                "Set a limit, so that the next time nobody is woken: `resilience calibrate RUN`.",
            ),
        ),
    ),
    Alert(
        name="RankHeartbeatStale",
        expr=(
            f"topk by ({_JOB}) (1, (max by ({_RANK}) (resilience_rank_silence_seconds) > 120) "
            f'and on ({_RANK}) resilience_rank_state{{state=~"active|suspect|unmonitored"}} == 1 '
            f"unless on ({_RANK}) resilience_rank_section_open_seconds)"
        ),
        wait="1m",
        severity="warning",
        level="rank",
        summary="Rank {{ $labels.rank }} of job {{ $labels.job_id }} on {{ $labels.node }} has given no sign of life "
        "for {{ $value | humanizeDuration }}",
        board="hangs",
        culprit="rank {{ $labels.rank }} on {{ $labels.node }}",
        command="status",
        runbook=Runbook(
            "A rank that takes part gave its last sign of life (heartbeat, ping, step, end of a section) more than two "
            "minutes ago, and no section of it is open that would explain it. Its limit, if it has one, is longer than "
            "that. Of all such ranks of a job the alert names the one that has been silent for longest.",
            (
                "Dashboard *Node* with the rank's node: do its neighbours go on?",
                "Dashboard *Hangs*: step skew. If the others stand still too, they wait for this one.",
                "On the node: is the process there, in which state (`ps -o stat,wchan`), is the host out of memory?",
            ),
            (
                "State D or T: storage or somebody's signal; see to the node.",
                "The process is gone or its monitor is: see MonitorDown.",
                "It works, but silently for long stretches: mark them as sections, or lengthen the alert's 120 s.",
                "It hangs: end it (`kill PID`), and set a limit for heartbeats so that this is done for you.",
            ),
        ),
    ),
    Alert(
        name="SectionNearLimit",
        expr=f"max by ({_JOB}, section) (resilience_timeout_headroom_ratio) > {NEAR}",
        wait="1m",
        severity="warning",
        level="section",
        summary="Section {{ $labels.section }} of job {{ $labels.job_id }} has used {{ $value | humanizePercentage }} "
        "of its limit",
        board="sections",
        command="calibrate",
        runbook=Runbook(
            "A section of the program took, or is taking, more than two thirds of its limit. At the limit its rank is "
            "restarted or ended. Either it hangs, and that is right, or the limit is too short and is about to end a "
            "healthy job.",
            (
                "Dashboard *Sections & calibration*: have durations grown slowly, or did one stand out?",
                "Dashboard *Hangs*, open sections: is it one rank, or all?",
                "What the section waits for: storage, network, a larger batch, a new data set.",
            ),
            (
                "Durations have grown for a reason: calibrate anew (`resilience calibrate RUN`) or set a longer limit.",
                "One rank only: see to its node before it is restarted again and again.",
                "It hangs: do nothing; the limit will fire, and `resilience report RUN` will tell.",
            ),
        ),
    ),
    Alert(
        name="RestartLoop",
        expr="job:resilience_restarts:count30m >= 5",
        wait="0s",
        severity="critical",
        level="job",
        summary="Job {{ $labels.job_id }} restarted {{ $value | humanize }} times within 30 minutes",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The job fails again and again: five restarts, in processes or by the launcher, within half an hour. It "
            "costs machines and hardly moves.",
            (
                "Dashboard *Restarts*: one kind of interruption, or several? One node, or all?",
                "`resilience report RUN`: is it the same exception, the same rank, the same step?",
                "Dashboard *Overview*, progress: does the step grow between restarts?",
            ),
            (
                "The same node each time: see NodeRepeatOffender.",
                "The same step and exception: data or code; stop the job, and begin after the bad batch.",
                "Out of memory: smaller batch, or find the leak; a restart does not cure it.",
                "The store or the network: see to them; restarts will go on until they work.",
            ),
        ),
    ),
    Alert(
        name="RestartBudgetLow",
        expr=(
            f"({_BUDGET} <= 1) and on ({_JOB}, layer) "
            f"max by ({_JOB}, layer) (max_over_time(resilience_restart_budget_remaining[6h])) > 1"
        ),
        wait="0s",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} has {{ $value | humanize }} restarts left",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The launcher counts restarts against `--max-restarts`, and one at most is left of it. When none is left, "
            "the next failure ends the job.",
            (
                "Dashboard *Restarts*: restarts left, and what used them up.",
                "The launcher's last lines: its table of failures tells cycle, rank, node and what for each.",
            ),
            (
                "Make sure that the last checkpoint is recent.",
                "Remove the cause (see RestartLoop, NodeRepeatOffender).",
                "If the failures are the machines' and the job is long, start it anew with a larger `--max-restarts`.",
            ),
        ),
    ),
    Alert(
        name="NodeRepeatOffender",
        expr=(
            "node:resilience_faults:count6h >= 3 "
            f"and on ({_JOB}) count by ({_JOB}) (count by ({_JOB}, node) (resilience_ranks)) > 1"
        ),
        wait="0s",
        severity="warning",
        level="node",
        summary="Node {{ $labels.node }} failed first {{ $value | humanize }} times within 6 hours in job "
        "{{ $labels.job_id }}",
        board="restarts",
        culprit="node {{ $labels.node }}",
        runbook=Runbook(
            "Three faults or more within six hours began on this node, of a job that has others. What only followed "
            "from another node's fault is not counted, nor is a node that was lost: another one counts it. That names "
            "where the symptom is; it proves no broken hardware.",
            (
                "Dashboard *Restarts*, nodes that failed first: does it stand out from the others?",
                "`resilience report RUN`: the verdicts that name its ranks, and how sure they are.",
                "On the node: `dmesg` (Xid, MCE, link down), temperature, ECC counters, disk, free memory.",
            ),
            (
                "The verdicts that name its ranks have a confidence of 0.9 or more: drain the node, and let the job go "
                "on with a spare; run the vendor's diagnosis before it comes back.",
                "All its faults are one exception of user code at one rank: the data of that rank, not the node.",
            ),
        ),
    ),
    Alert(
        name="RestartSlow",
        expr=(
            'job:resilience_restart_duration_seconds:p95_1h{layer="inprocess"} > 30 '
            'or job:resilience_restart_duration_seconds:p95_1h{layer="launcher"} > 240'
        ),
        wait="0s",
        severity="warning",
        level="job",
        summary="Restarts of job {{ $labels.job_id }} ({{ $labels.layer }}) take {{ $value | humanizeDuration }} (p95)",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "From the detection to the first progress it took 5 % of the ranks more than 30 s within the processes, or "
            "more than 4 min by the launcher, within the last hour. A restart waits for the slowest rank.",
            (
                "Dashboard *Restarts*, phases: which one is slow, at the median or only at the 95th percentile?",
                "`resilience report RUN`: which rank was last in that phase.",
                "A point in the heat map leads to the trace of that restart.",
            ),
            (
                "`abort`, `finalize`, `check`: hooks of yours; give them limits, or do less in them.",
                "`agree`, `regroup`, `rendezvous`: the store or the network; a node that is slow to answer.",
                "`resume`, `import`, `spawn`: loading of code, data or a checkpoint; nearer storage, or fewer imports.",
            ),
        ),
    ),
    Alert(
        name="GoodputLow",
        expr=(
            "job:resilience_goodput:ratio1h < 0.9 "
            f"and on ({_JOB}) sum by ({_JOB}) (resilience_productive_seconds_total offset 1h) > 0"
        ),
        wait="15m",
        severity="warning",
        level="job",
        summary="Goodput of job {{ $labels.job_id }} was {{ $value | humanizePercentage }} within the last hour",
        board="overview",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "Less than 90 % of the rank-seconds of the last hour were productive: at work, and neither silent in a "
            "hang nor done again after a restart.",
            (
                "Dashboard *Overview*, lost time by cause.",
                "`resilience report RUN`: cost of each incident, and the steps that were lost.",
            ),
            (
                "startup: loading takes long; it is paid again at each start by the launcher.",
                "restart: see RestartSlow if they are long, RestartLoop if they are many.",
                "hang: limits are longer than they need to be; `resilience calibrate RUN`.",
                "rework: checkpoints are far apart; it is unknown, and counts as nothing, where no step is reported.",
                "idle: spares, and ranks that have finished before the others.",
            ),
        ),
    ),
    Alert(
        name="SparesExhausted",
        expr="job:resilience_spares:count == 0 and max_over_time(job:resilience_spares:count[1d]) > 0",
        wait="1m",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} has no spare rank left",
        board="overview",
        command="status",
        runbook=Runbook(
            "The job had inactive ranks, ready to take the place of a lost one, and has none now. The next loss makes "
            "it go on with fewer ranks, or wait, or end, as its rank assignment says.",
            (
                "Dashboard *Overview*, ranks by state: which were terminated or excluded, and when?",
                "`resilience report RUN`: why they were lost; are their nodes healthy?",
            ),
            (
                "Bring nodes back, or add new ones; by the launcher they join at the next cycle.",
                "Make sure that the last checkpoint is recent.",
            ),
        ),
    ),
    Alert(
        name="MonitorDown",
        expr=(
            f'sum by ({_JOB}, node) (resilience_ranks{{state="unmonitored"}}) > 0 '
            f"or (max by ({_NODE}) (up{{{_TARGETS}}}) == 0 and on ({_JOB}) max by ({_JOB}) (up{{{_TARGETS}}}) == 1) "
            f"or ({_OLD_FILES} and on ({_JOB}) {_FRESH})"
        ),
        wait="2m",
        severity="warning",
        level="node",
        summary="Ranks of job {{ $labels.job_id }} on {{ $labels.node }} are not watched, or their endpoint does not "
        "answer",
        board="self",
        culprit="node {{ $labels.node }}",
        command="status",
        runbook=Runbook(
            "Either a rank's monitor is gone, so that nobody would end the rank when it hangs, or the node's endpoint "
            "does not answer while those of other nodes do, so that nothing is known of it.",
            (
                "Dashboard *Self*, endpoints; dashboard *Node*, monitors and states of ranks.",
                "On the node: are processes named `resilience` there? Out of memory? Was the node itself lost?",
                "`resilience report RUN` names a node that fell silent.",
            ),
            (
                "Monitors under the launcher are replaced; of a Wrapper's they are with the next restart.",
                "The endpoint alone is gone: another monitor of the node takes over; if not, end any rank of it.",
                "The node is gone: drain it. Its entry in `.targets` goes with the end of the job.",
            ),
        ),
    ),
    Alert(
        name="TelemetryDropping",
        expr="job:resilience_telemetry_dropped:count15m > 0",
        wait="0s",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} loses telemetry ({{ $labels.signal }}: {{ $labels.reason }})",
        board="self",
        runbook=Runbook(
            "Records, spans or measurements were lost within 15 minutes. The job itself does not notice, but its "
            "account has gaps.",
            (
                "Dashboard *Self*: which signal, for which reason, and whether an exporter fails.",
                "`sink`: the disk of the run folder is full or cannot be written. `queue`, `export`: the collector.",
            ),
            (
                "Make room, or mend the collector; nothing has to be restarted.",
                "`overrun`: sections that end faster than the monitor reads them; mark longer ones.",
            ),
        ),
    ),
    Alert(
        name="TimeoutsUncalibrated",
        expr=(
            f"max by ({_JOB}, section) (resilience_calibration_stale) > 0 "
            f"or (sum by ({_JOB}, section) ({_SAMPLES}) >= {ENOUGH} "
            f'unless on ({_JOB}, section) resilience_section_timeout_seconds{{source="calibrated"}})'
        ),
        wait="1h",
        severity="info",
        level="section",
        summary="Section {{ $labels.section }} of job {{ $labels.job_id }} has no learned limit, or a stale one",
        board="sections",
        command="calibrate",
        runbook=Runbook(
            f"A section has run {ENOUGH} times or more without a learned limit, or its learned limit no longer agrees "
            "with what is seen, so that a longer one holds in its place. Hangs in it are found late, or not at all.",
            (
                "Dashboard *Sections & calibration*: durations, limits and where they come from.",
                "`resilience calibrate RUN`: what it would set, and with how many false alarms.",
            ),
            (
                "`resilience calibrate RUN`, then start the next run with the file that it writes.",
                "On trial first: with RESILIENCE_TIMEOUTS_SHADOW=1 it is only told what the limits would have done.",
            ),
        ),
    ),
)


def runbook_place(alert: str) -> int:
    """Return the number of an alert's runbook, from 1."""
    return 1 + [each.name for each in ALERTS].index(alert)


def said(alert: Alert, grafana: str) -> dict[str, str]:
    """Return what an alert says; one about restarts has the last verdict, in the words of the terminal.

    grafana: URL under which Grafana is reached."""
    culprit = {"culprit": alert.culprit} if alert.culprit else {}
    if alert.board == "restarts":
        culprit["verdict"] = _VERDICT
    return {
        "summary": alert.summary,
        **culprit,
        "run_folder": _FOLDER,
        "command": f"resilience {alert.command} '{_FOLDER}'",
        "dashboard_url": f"{grafana}/d/resilience-{alert.board}?var-job={{{{ $labels.job_id }}}}",
        "runbook_url": f"{grafana}/d/{RUNBOOKS_UID}/runbooks?viewPanel={runbook_place(alert.name)}",
    }


def recording_rules(matchers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the file of recording rules. matchers: of labels, for all that is asked."""
    groups = []
    for name, every, is_slow in ((GROUPS[0], EVERY, False), (GROUPS[1], SLOW, True)):
        rules = [
            {"record": rule.record, "expr": matched(rule.expr, matchers)}
            for rule in RECORDINGS
            if rule.is_slow == is_slow
        ]
        groups.append({"name": name, "interval": every, "rules": rules})
    return {"groups": groups}


def alert_rules(grafana: str, matchers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the file of alerts. matchers: of labels, for all that is asked."""
    rules = [
        {
            "alert": alert.name,
            "expr": matched(alert.expr, matchers),
            "for": alert.wait,
            "labels": {"severity": alert.severity, "level": alert.level},
            "annotations": said(alert, grafana),
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": GROUPS[2], "interval": EVERY, "rules": rules}]}


_ABOUT_PROGRESS = "JobStalled|StartStalled|RankHeartbeatStale|SectionNearLimit"
# What makes which other alerts of the same job, or node, needless: one cause is one page.
SILENCES = (
    ("JobFailed", "JobGone", ("cluster", "job_id")),
    (
        "JobGone|JobFailed",
        f"{_ABOUT_PROGRESS}|MonitorDown|RestartLoop|RestartBudgetLow|RestartSlow|GoodputLow|"
        "SparesExhausted|NodeRepeatOffender|TelemetryDropping|TimeoutsUncalibrated",
        ("cluster", "job_id"),
    ),
    ("JobStalled", "StartStalled|RankHeartbeatStale|SectionNearLimit|GoodputLow", ("cluster", "job_id")),
    (
        "RestartLoop",
        "RankHeartbeatStale|SectionNearLimit|RestartBudgetLow|RestartSlow|GoodputLow|SparesExhausted|"
        "NodeRepeatOffender",
        ("cluster", "job_id"),
    ),
    ("StartStalled", "GoodputLow|RestartSlow|SectionNearLimit", ("cluster", "job_id")),
    ("MonitorDown", "RankHeartbeatStale|SectionNearLimit", ("cluster", "job_id", "node")),
)


def _silences(cause: str, others: str, equal: tuple[str, ...]) -> dict[str, Any]:
    return {
        "source_matchers": [f'alertname=~"{cause}"'],
        "target_matchers": [f'alertname=~"{others}"'],
        "equal": list(equal),
    }


def alertmanager() -> dict[str, Any]:
    """Return an example for Alertmanager: one message a job, and what a job's alert makes needless."""
    return {
        "route": {
            "receiver": "training",
            "group_by": ["cluster", "job_id"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "4h",
            "routes": [{"receiver": "nobody", "matchers": ['severity="info"']}],
        },
        "inhibit_rules": [_silences(*pair) for pair in SILENCES],
        "receivers": [
            {"name": "nobody"},
            {"name": "training", "webhook_configs": [{"url": "http://127.0.0.1:9099/alerts"}]},
        ],
    }


def unit_test_file(tests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a file for `promtool test rules` that lies in a folder beside the rules.

    promtool evaluates groups without a given order in any order, at the same instant: an alert would
    see its recording rules now or one evaluation later."""
    return {
        "rule_files": ["../recording.yaml", "../alerts.yaml"],
        "evaluation_interval": EVERY,
        "group_eval_order": list(GROUPS),
        "tests": tests,
    }
