"""Which series are recorded, and which conditions raise an alert?  Each alert has a runbook.

Rules cover all jobs of all clusters at once, so every aggregation keeps `cluster` and `job_id`. (A label that no
series has costs nothing.) A critical alert about a job silences the alerts about its ranks and sections
(`alertmanager.yaml`). Thresholds are starting points: plain numbers here and in the exported files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dashboards.generator.queries import (
    BEGAN,
    BRIDGED,
    OF_JOB,
    counted,
    fold,
    goodput,
    grown,
    labelled,
    of_nodes,
    or_zero,
    quantile,
    restarts,
    select,
)
from resilience.telemetry.catalogue import OTHER, SLOW_BY_LAUNCHER_S, SLOW_IN_PLACE_S

RUNBOOKS_UID = "resilience-runbooks"
EVERY, SLOW = "30s", "2m"  # between two evaluations
GROUPS = ("resilience.recording", "resilience.recording.slow", "resilience.alerts")  # evaluated in this order
NO_SCOPE = ()
NEAR = 0.67  # share of a limit; from here on `calibration.limits_file.NEAR_MISS` considers the limit too short
START_LIMIT_S = 3600  # healthy jobs were observed with a first step of 960 s
_START_LIMIT = f"{START_LIMIT_S}s"
ENOUGH = 500  # samples of a section; enough to learn a limit

Severity = Literal["critical", "warning", "info"]
Level = Literal["end", "job", "node", "rank", "section"]


class Recording(msgspec.Struct, frozen=True):
    """A recording rule. is_slow: it looks back an hour or more, which is too expensive for every evaluation."""

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
    """An alert. wait: how long the condition must hold. summary: its text. board: the dashboard that it links to.
    culprit: the rank or node to blame, as far as metrics show. command: the subcommand of `resilience` to run."""

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


def _asked(promql: str, if_found: str, otherwise: str) -> str:
    """Return a template that Prometheus fills in from a query about the alert's job."""
    template_query = f'printf "{promql}" $labels.cluster $labels.job_id | query'
    return f"{{{{ with {template_query} }}}}{if_found}{{{{ else }}}}{otherwise}{{{{ end }}}}"


RUN = "RUN"  # placeholder if the run folder is unknown
_FOLDER = _asked(f"last_over_time(resilience_run_info{_OF_JOB}[6h])", '{{ . | first | label "folder" }}', RUN)
UNKNOWN = "unknown"
_SILENT_RANK = _asked(
    f"topk(1, resilience_rank_silence_seconds{_OF_JOB})",
    'rank {{ . | first | label "rank" }} on {{ . | first | label "node" }}, silent for '
    "{{ . | first | value | humanizeDuration }}",
    UNKNOWN,
)
_FAULTY_NODE = _asked(
    f"topk(1, last_over_time(node:resilience_blamed:count6h{_OF_JOB}[6h]) > 0)",
    'node {{ . | first | label "node" }}, times blamed within 6 hours: {{ . | first | value | humanize }}',
    UNKNOWN,
)

_VERDICT = _asked(
    f"topk(1, last_over_time(resilience_verdict_timestamp_seconds{_OF_JOB}[6h]))",
    '{{ . | first | label "sentence" }}',
    UNKNOWN,
)

_JOB = ", ".join(OF_JOB)
# How long the alert for a lost or failed job lasts. Prometheus must have scraped the job's endpoint within that time.
_REMEMBERED, _REMEMBERED_S = "6h", 21_600
_NODE = f"{_JOB}, node"
_BLAMED = grown(
    "resilience_blamed_total",
    f'culprit_node!="{OTHER}"',
    by=(*OF_JOB, "culprit_node"),
    window="6h",
    scope=NO_SCOPE,
    has_left=True,  # the node that recorded the verdicts
)
_FILE_AT = "resilience_written_timestamp_seconds"  # changes every 15 s
# A file that stands still is known by its own changes: the clocks of the node and of Prometheus may differ by minutes.
_FILE_CHANGES = f"max by ({_NODE}) (changes({_FILE_AT}[5m]))"
_FILE_ENDED = f"max by ({_NODE}) (resilience_ended_timestamp_seconds)"
_STOPPED = "node:resilience_file:stopped"
_SOON_S = 300  # clocks of two nodes may differ by minutes, and a file is written for the last time after the end


def _latest(metric: str, by: str, *matchers: str) -> str:
    """Return a time from the files for node-exporter, also of hosts that are gone: their series end with them."""
    return f"max by ({by}) (last_over_time({select(metric, *matchers, scope=NO_SCOPE)}[{_REMEMBERED}]))"


def _ended(by: str, *matchers: str) -> str:
    """Return when a job or a node ended. No value if one of these files was written later: another node continued, or
    the job started again."""
    ended = _latest("resilience_ended_timestamp_seconds", by, *matchers)
    return f"({ended} > {_latest(_FILE_AT, by)} - {_SOON_S})"


def _living(metric: str) -> str:
    """Return a selector of a metric without the files for node-exporter that dead processes left behind."""
    return f"({metric} unless on ({_NODE}) {_STOPPED})"


def _ranks(state: str = "") -> str:
    """Return the ranks of each node by state, or in one state."""
    matchers = (f'state="{state}"',) if state else ()
    return of_nodes("resilience_ranks", _living(select("resilience_ranks", *matchers, scope=NO_SCOPE)))


_OF_ALL = fold("sum", OF_JOB, _ranks())
_WAITING = f"max by ({_NODE}) ({_living('resilience_node_waiting')}) > 0"
_WAITED = f"max by ({_NODE}) (resilience_node_waiting offset 5m) > 0"
_AT_WORK = f'on ({_JOB}) job:resilience_ranks:sum{{state="active"}}'
# At a start or a restart all nodes wait, and their scrapes differ by some seconds. So a node is a spare if it waits and
# the job has active ranks, both now and 5 minutes ago.
_SPARE_NODES = f"{_WAITING} and on ({_NODE}) {_WAITED} and {_AT_WORK} > 0 and {_AT_WORK} offset 5m > 0"
_BEATS = counted("resilience_heartbeat_interval_seconds_count", by=OF_JOB, scope=NO_SCOPE)
_ENDS = counted("resilience_section_duration_seconds_count", by=OF_JOB, scope=NO_SCOPE)
_OLD_FILES = f"({_STOPPED} < {_REMEMBERED_S})"
# Targets with an entry in the run directory. A job that ends well removes it; an entry from HTTP discovery remains.
_TARGETS = 'job_id!="", outcome=""'
_ANNOUNCED = f'{_TARGETS}, discovery!="http"'
_FRESH, _STARTED = "job:resilience_file:fresh", "job:resilience_start_timestamp_seconds:min"

RECORDINGS = (
    # The seconds since a file was written, if it has stood still for 5 minutes or is gone with its host, and nothing
    # says that the node has ended or that it lives.
    Recording(
        _STOPPED,
        f"time() - {_latest(_FILE_AT, _NODE)} unless on ({_NODE}) {_FILE_CHANGES} > 0 "
        f"unless on ({_NODE}) {_ended(_NODE)} unless on ({_NODE}) max by ({_NODE}) (up{{{_TARGETS}}}) == 1",
    ),
    Recording(_FRESH, f"max by ({_JOB}) ({_FILE_CHANGES} > 0 unless on ({_NODE}) {_FILE_ENDED})"),
    # A job exists while a node reports its start. The exporter of a node may change, which leaves a short gap.
    Recording(_STARTED, fold("min", OF_JOB, _living(f"last_over_time({BEGAN}[{BRIDGED}])"))),
    Recording("job:resilience_ranks:sum", fold("sum", (*OF_JOB, "state"), _ranks())),
    Recording("job:resilience_spare_nodes:count", f"sum by ({_JOB}) ({_SPARE_NODES})"),
    # Ranks of a Wrapper, and nodes of the launcher: 0 if there are none of both.
    Recording(
        "job:resilience_spares:count",
        f"{or_zero(fold('sum', OF_JOB, _ranks('inactive')), _OF_ALL)} "
        f"+ {or_zero('job:resilience_spare_nodes:count', _OF_ALL)}",
    ),
    Recording("job:resilience_step:max", fold("max", OF_JOB, _living("resilience_step"))),
    Recording("job:up:max", fold("max", OF_JOB, f"up{{{_ANNOUNCED}}}")),
    Recording("job:resilience_signs:count", f"({_BEATS} + {_ENDS}) or {_BEATS} or {_ENDS}"),
    Recording("job:resilience_goodput:ratio1h", goodput(OF_JOB, "1h", NO_SCOPE), is_slow=True),
    Recording(
        "job:resilience_goodput_without_idle:ratio1h", goodput(OF_JOB, "1h", NO_SCOPE, has_idle=False), is_slow=True
    ),
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
        "node:resilience_blamed:count6h",
        # The label `node` is that of the node that recorded the verdict.
        f'sum by ({_NODE}) (label_replace({_BLAMED}, "node", "$1", "culprit_node", "(.*)"))',
        is_slow=True,
    ),
    Recording(
        "job:resilience_telemetry_dropped:count15m",
        grown("resilience_telemetry_dropped_total", by=(*OF_JOB, "signal", "reason"), window="15m", scope=NO_SCOPE),
    ),
)

_SAMPLES = counted(
    "resilience_section_duration_seconds_count", 'outcome="completed"', by=(*OF_JOB, "section"), scope=NO_SCOPE
)
_WAS_ALIVE = f"max_over_time(job:up:max[{_REMEMBERED}]) == 1"
_LEFT_FAILED = f'max by ({_JOB}) (up{{job_id!="", outcome="failed"}})'
# One node knows how the whole job ended. Another one may have been killed before, or may have lost all its ranks.
_ENDED_WELL = _ended(_JOB, 'outcome=~"completed|stopped"')
_COMPLETED = _ended(_JOB, 'outcome="completed"')
_ENDED_FAILED = f"""(time() - {_ended(_JOB, 'outcome="failed"')} < {_REMEMBERED_S})"""


def _unchanged(recorded: str) -> str:
    """Return an expression for a series with the same value as 15 minutes ago. After a scrape gap it has no value."""
    return f"({recorded} == {recorded} offset 15m)"


_SIGNS, _STEP = "job:resilience_signs:count", "job:resilience_step:max"
_RANK = f"{_JOB}, node, rank"
_BUDGET = f"min by (cluster, job_id, layer) {_living('resilience_restart_budget_remaining')}"
_EXISTS = f"on ({_JOB}) {_STARTED}"
# Progress is read from the run folder: where no node can read it, nothing is known about progress.
_NO_FOLDER = f"on ({_JOB}) (max by ({_JOB}) {_living('resilience_run_folder_up')} == 0)"
_FOLDER_DOWN = f"(min by ({_JOB}) (max_over_time(resilience_run_folder_up[5m])) == 0)"

ALERTS = (
    Alert(
        name="JobGone",
        expr=(
            f"((job:up:max == 0 and on ({_JOB}) {_WAS_ALIVE}) or max by ({_JOB}) {_OLD_FILES}) "
            f"unless on ({_JOB}) {_LEFT_FAILED} unless on ({_JOB}) {_FRESH} "
            f"unless on ({_JOB}) {_ENDED_WELL} unless on ({_JOB}) {_ENDED_FAILED}"
        ),
        wait="5m",
        severity="critical",
        level="end",
        summary="Job {{ $labels.job_id }} is gone without a report of how it ended",
        board="overview",
        runbook=Runbook(
            "No node of the job answers Prometheus, and no agent or monitor reported the end of the job. It was killed "
            "(out of memory, power, `kill -9`, a scheduler without a grace period), or its network is down. A job that "
            "ends well removes its entries from `.targets` in the run directory and reports its end in the file for "
            "node-exporter. The alert ends after 6 hours.",
            (
                "The scheduler: does the job still exist? How did it end (`sacct`, `kubectl describe pod`)?",
                "On the node of rank 0: `dmesg` (out of memory), processes named `resilience`, the network.",
                "`resilience report RUN`: the last records, and where each rank was.",
            ),
            (
                "The job is gone: start it again. The run folder keeps its records.",
                "The job runs, but Prometheus cannot reach it: repair the network.",
                "Someone stopped it with SIGKILL on purpose: delete its files in `.targets`, or let the alert expire.",
            ),
        ),
    ),
    Alert(
        name="JobFailed",
        expr=(
            f"((({_LEFT_FAILED} and on ({_JOB}) {_WAS_ALIVE}) unless on ({_JOB}) job:up:max == 1) or {_ENDED_FAILED}) "
            f"unless on ({_JOB}) {_FRESH} unless on ({_JOB}) {_COMPLETED}"
        ),
        wait="0s",
        severity="critical",
        level="end",
        summary="Job {{ $labels.job_id }} ended in failure",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The job ended without completing: its restart budget is used up, a restart cannot fix its failure, or "
            "every call of the wrapped function failed. Ranks that were asked to stop have not failed, unless another "
            "rank of their node failed in the 45 s before. The alert ends after 6 hours. A failure before the first "
            "scrape is visible only in the file for node-exporter.",
            (
                "`resilience report RUN`: the last incident, its verdict and the exception.",
                "Dashboard *Restarts*: what used up the restarts.",
                "The launcher's last lines on standard error: its table of failures.",
            ),
            (
                "Fix the cause, and start the job again from its last checkpoint.",
                "The machines failed: drain the nodes that the report names, and raise `--max-restarts`.",
            ),
        ),
    ),
    Alert(
        name="StartStalled",
        expr=(
            f"(time() - {_STARTED} > {START_LIMIT_S}) "
            # The step has no value while no monitor can write it.
            f"unless on ({_JOB}) {_SIGNS} > 0 unless on ({_JOB}) last_over_time({_STEP}[{_START_LIMIT}]) "
            f'unless on ({_JOB}) resilience_restart_iteration{{layer="inprocess"}} '
            f"unless on ({_JOB}) resilience_ended_timestamp_seconds unless {_NO_FOLDER}"
        ),
        wait="1m",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} started {{ $value | humanizeDuration }} ago and has made no progress yet",
        board="hangs",
        command="status",
        runbook=Runbook(
            "An hour after its start the job has shown no progress: no step, no heartbeat, no finished section, no "
            "call of a wrapped function. It waits for nodes, loads for very long, hangs, or the program sends no "
            "signals of progress at all. In the last case, hangs cannot be detected either.",
            (
                "`resilience status RUN`: does the job wait for nodes in the rendezvous, or do workers run?",
                "If workers run: `py-spy dump --pid PID` on one of them. Does it read data, compile, or wait?",
            ),
            (
                "Nodes are missing: add them, or let the job start with fewer (`--nnodes MIN:MAX`).",
                "It loads: mark loading as a section with a limit, so that a hang in it is detected.",
                "The program sends no signals: call `resilience.step(n)` in its loop. That is one line.",
            ),
        ),
    ),
    Alert(
        name="JobStalled",
        expr=(
            f"({_unchanged(_SIGNS)} or {_unchanged(_STEP)}) "
            f"unless on ({_JOB}) ({_SIGNS} unless {_unchanged(_SIGNS)}) "
            f"unless on ({_JOB}) ({_STEP} unless {_unchanged(_STEP)}) "
            f"and {_EXISTS} unless {_NO_FOLDER}"
        ),
        wait="5m",
        severity="critical",
        level="job",
        summary="Job {{ $labels.job_id }} makes no progress: no heartbeat, finished section or step in 15 minutes",
        board="hangs",
        culprit=_SILENT_RANK,
        command="status",
        runbook=Runbook(
            "The ranks run, but for 15 minutes no rank has sent a heartbeat, left a section or reported a higher step. "
            "Either all wait for one rank (a hang without a limit), or all do something long without signals of "
            "progress. The toolkit restarts ranks that exceed a limit; this alert covers work without a limit.",
            (
                "Dashboard *Hangs*: has one rank been silent longer than the others? Is a section open?",
                "`resilience report RUN`: the last incident, and the line at which each rank waits.",
                "`resilience status RUN`: steps of all ranks. The others wait for the rank that is behind.",
                "If nothing stands out: `py-spy dump --pid PID` on two ranks, `dmesg` on their nodes, the storage.",
            ),
            (
                "One rank stands out: kill its process (`kill PID`). The others restart without it or with a spare.",
                "All wait at the same collective: suspect the network or mismatched shapes; kill one rank to restart.",
                "The program works without signals of progress: mark its work as a section, or send heartbeats.",
                "Set a limit, so that the next hang is restarted automatically: `resilience calibrate RUN`.",
            ),
        ),
    ),
    Alert(
        name="RankHeartbeatStale",
        expr=(
            f"topk by ({_JOB}) (1, (max by ({_RANK}) {_living('resilience_rank_silence_seconds')} > 120) "
            f'and on ({_RANK}) resilience_rank_state{{state=~"active|suspect|unmonitored"}} == 1 '
            f"unless on ({_RANK}) resilience_rank_section_open_seconds)"
        ),
        wait="1m",
        severity="warning",
        level="rank",
        summary="Rank {{ $labels.rank }} of job {{ $labels.job_id }} on {{ $labels.node }} has shown no sign of life "
        "for {{ $value | humanizeDuration }}",
        board="hangs",
        culprit="rank {{ $labels.rank }} on {{ $labels.node }}",
        command="status",
        runbook=Runbook(
            "An active rank sent its last sign of life (heartbeat, ping, step, start or end of a section) more than "
            "two minutes ago, and it has no open section that would explain the silence. Its limit, if any, is longer. "
            "If several ranks of a job are silent, the alert names the one with the longest silence.",
            (
                "Dashboard *Node*, the rank's node: do the other ranks there make progress?",
                "Dashboard *Hangs*: step skew. If the other ranks have stopped too, they wait for this one.",
                "On the node: does the process exist? In which state (`ps -o stat,wchan`)? Is the host out of memory?",
            ),
            (
                "State D: storage; state T: stopped by a signal. Check the node.",
                "The process or its monitor is gone: see MonitorDown.",
                "It works for long without signals: mark that work as sections, or raise the 120 s of this alert.",
                "It hangs: kill it (`kill PID`), and set a heartbeat limit, so that this happens automatically.",
            ),
        ),
    ),
    Alert(
        name="SectionNearLimit",
        expr=f"max by ({_JOB}, section) {_living('resilience_timeout_headroom_ratio')} > {NEAR}",
        wait="1m",
        severity="warning",
        level="section",
        summary="Section {{ $labels.section }} of job {{ $labels.job_id }} has used {{ $value | humanizePercentage }} "
        "of its limit",
        board="sections",
        command="calibrate",
        runbook=Runbook(
            "A section took, or is taking, more than two thirds of its limit. At the limit its rank is restarted or "
            "killed. Either the section hangs and the restart is right, or the limit is too short and is about to "
            "interrupt a healthy job.",
            (
                "Dashboard *Sections & calibration*: have durations grown slowly, or is one an outlier?",
                "Dashboard *Hangs*, open sections: one rank, or all?",
                "Possible causes: storage, network, a larger batch, a new data set.",
            ),
            (
                "Durations grew for a good reason: calibrate again (`resilience calibrate RUN`) or set a longer limit.",
                "One rank only: check its node before it is restarted repeatedly.",
                "It hangs: do nothing. The limit will fire, and `resilience report RUN` will show the cause.",
            ),
        ),
    ),
    Alert(
        name="RestartLoop",
        expr=f"job:resilience_restarts:count30m >= 5 and {_EXISTS}",
        wait="0s",
        severity="critical",
        level="job",
        summary="Job {{ $labels.job_id }} restarted {{ $value | humanize }} times within 30 minutes",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The job fails repeatedly: five restarts, in place or by the launcher, within half an hour. It uses its "
            "machines but makes hardly any progress.",
            (
                "Dashboard *Restarts*: one kind of interruption, or several? One node, or all?",
                "`resilience report RUN`: the same exception, rank and step each time?",
                "Dashboard *Overview*, progress: does the step increase between restarts?",
            ),
            (
                "The same node each time: see NodeRepeatOffender.",
                "The same step and exception: data or code. Stop the job, and resume after the bad batch.",
                "Out of memory: use a smaller batch, or find the leak. A restart does not fix it.",
                "The store or the network: repair it before the restarts are used up. A lost store ends the job.",
            ),
        ),
    ),
    Alert(
        name="RestartBudgetLow",
        expr=(f"({_BUDGET} <= 1) and on ({_JOB}, layer) max by ({_JOB}, layer) (resilience_restart_budget_max) > 1"),
        wait="0s",
        severity="warning",
        level="job",
        summary="Restarts left of job {{ $labels.job_id }}: {{ $value | humanize }}",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "The launcher counts restarts against `--max-restarts`, and at most one is left. When none is left, the "
            "next failure ends the job.",
            (
                "Dashboard *Restarts*: restarts left, and what used up the others.",
                "The launcher's last lines: its table of failures shows cycle, rank, node and kind of each.",
            ),
            (
                "Make sure that the last checkpoint is recent.",
                "Fix the cause (see RestartLoop, NodeRepeatOffender).",
                "If machines fail and the job is long, start it again with a larger `--max-restarts`.",
            ),
        ),
    ),
    Alert(
        name="NodeRepeatOffender",
        expr=(
            "node:resilience_blamed:count6h >= 3 "
            f"and on ({_JOB}) count by ({_JOB}) (count by ({_JOB}, node) (resilience_ranks)) > 1 and {_EXISTS}"
        ),
        wait="0s",
        severity="warning",
        level="node",
        summary="Node {{ $labels.node }} was blamed {{ $value | humanize }} times within 6 hours in job "
        "{{ $labels.job_id }}",
        board="restarts",
        culprit="node {{ $labels.node }}",
        runbook=Runbook(
            "The verdicts on three or more interruptions within six hours blame ranks of this node, in a job with "
            "several nodes. A rank that only waited for another node does not count; the loss of this node does. An "
            "interruption counts for no node if its verdict has only candidates, if ranks of several nodes failed in "
            "the same way, or if it has no verdict. The alert names the place of the symptom; it does not prove broken "
            "hardware.",
            (
                "Dashboard *Restarts*, blamed nodes: does this node stand out?",
                "`resilience report RUN`: the verdicts that name its ranks, and their confidence.",
                "On the node: `dmesg` (Xid, MCE, link down), temperature, ECC counters, disk, free memory.",
            ),
            (
                "The verdicts that name its ranks have a confidence of 0.9 or more: drain the node, and let the job "
                "continue with a spare. Run the vendor's diagnosis before you use the node again.",
                "All its faults are the same user exception on one rank: suspect the data of that rank, not the node.",
            ),
        ),
    ),
    Alert(
        name="RestartSlow",
        expr=(
            f'(job:resilience_restart_duration_seconds:p95_1h{{layer="inprocess"}} > {SLOW_IN_PLACE_S:g} '
            f'or job:resilience_restart_duration_seconds:p95_1h{{layer="launcher"}} > {SLOW_BY_LAUNCHER_S:g}) '
            f"and {_EXISTS}"
        ),
        wait="0s",
        severity="warning",
        level="job",
        summary="Restarts of job {{ $labels.job_id }} ({{ $labels.layer }}) take {{ $value | humanizeDuration }} (p95)",
        board="restarts",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "Within the last hour, 5 % of the ranks needed more than 30 s for a restart in place, or more than 4 min "
            "for a restart by the launcher, from detection to first progress. A restart waits for the slowest rank.",
            (
                "Dashboard *Restarts*, phases: which one is slow, at the median or only at the 95th percentile?",
                "`resilience report RUN`: which rank was last in that phase.",
                "A point in the heat map links to the trace of that restart.",
            ),
            (
                "`abort`, `finalize`, `check`: your hooks. Give them limits, or do less in them.",
                "`agree`, `regroup`, `rendezvous`: the store or the network, or a slow node.",
                "`resume`, `spawn`, script start (`import`): loading of code, data or checkpoints. Use faster storage, "
                "fewer imports.",
            ),
        ),
    ),
    Alert(
        name="GoodputLow",
        expr=(
            "job:resilience_goodput_without_idle:ratio1h < 0.9 "
            f"and on ({_JOB}) sum by ({_JOB}) (resilience_productive_seconds_total offset 1h) > 0 and {_EXISTS}"
        ),
        wait="15m",
        severity="warning",
        level="job",
        summary="Goodput of job {{ $labels.job_id }}, without idle ranks, was {{ $value | humanizePercentage }} within "
        "the last hour",
        board="overview",
        culprit=_FAULTY_NODE,
        runbook=Runbook(
            "Less than 90 % of the rank-seconds of the last hour were productive, that is, spent at work that was "
            "neither silent in a hang nor repeated after a restart. Idle ranks (spares, and ranks that finished before "
            "the others) do not count here, so a job may keep as many spares as it needs. They do count as lost in the "
            "goodput of dashboards and reports.",
            (
                "Dashboard *Overview*, lost time by cause.",
                "`resilience report RUN`: the cost and the lost steps of each incident.",
            ),
            (
                "startup: loading takes long, and repeats at each start by the launcher.",
                "restart: see RestartSlow for long restarts, RestartLoop for many.",
                "hang: limits are longer than necessary; `resilience calibrate RUN`.",
                "rework: checkpoints are far apart. Without reported steps, rework is unknown and counts as 0.",
            ),
        ),
    ),
    Alert(
        name="SparesExhausted",
        # Spares show only once the wrapped function is entered. Until then, and between two cycles of a launcher, all
        # ranks are active or terminated, and no node is a spare. So the wait exceeds the longest start: 960 s observed.
        expr=(
            f"last_over_time(job:resilience_spares:count[{BRIDGED}]) == 0 "
            "and max_over_time(job:resilience_spares:count[1d]) > 0"
        ),
        wait="20m",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} has no spare rank or node left",
        board="overview",
        command="status",
        runbook=Runbook(
            "The job had spares, ready to replace a lost rank, and has none now: inactive ranks of a Wrapper, or nodes "
            "of the launcher that had waited for a place for 5 minutes while the job ran. After the next loss it "
            "continues with fewer ranks, waits, or ends, depending on its rank assignment and on `--nnodes`. Spares do "
            "not show during a restart by a launcher, from the end of a cycle until the ranks enter the wrapped "
            "function. Therefore the alert waits for 20 minutes, and fires wrongly if such a restart takes longer.",
            (
                "Dashboard *Overview*, ranks by state: when were ranks terminated or excluded?",
                "`resilience report RUN`: why were they lost? Are their nodes healthy?",
                "`resilience status RUN`: has a launcher just restarted the job, whose scripts still load?",
            ),
            (
                "Bring nodes back, or add new ones. Under the launcher they join at the next cycle.",
                "Make sure that the last checkpoint is recent.",
            ),
        ),
    ),
    Alert(
        name="MonitorDown",
        expr=(
            f"{fold('sum', (*OF_JOB, 'node'), _ranks('unmonitored'))} > 0 "
            f"or (max by ({_NODE}) (up{{{_TARGETS}}}) == 0 and on ({_JOB}) max by ({_JOB}) (up{{{_TARGETS}}}) == 1) "
            f"or ({_OLD_FILES} and on ({_JOB}) {_FRESH})"
        ),
        wait="2m",
        severity="warning",
        level="node",
        summary="Ranks of job {{ $labels.job_id }} on {{ $labels.node }} are not monitored, or their endpoint does not "
        "answer",
        board="self",
        culprit="node {{ $labels.node }}",
        command="status",
        runbook=Runbook(
            "Either a rank's monitor is gone, so a hang of the rank would not be detected, or the node's endpoint does "
            "not answer while those of other nodes do, so its state is unknown.",
            (
                "Dashboard *Self*, endpoints; dashboard *Node*, monitors and states of ranks.",
                "On the node: do processes named `resilience` run? Is it out of memory? Was the node itself lost?",
                "`resilience report RUN` names a node that went silent.",
            ),
            (
                "The launcher replaces a lost monitor. A Wrapper goes on without it until the call ends.",
                "Only the endpoint is gone: another monitor of the node takes over. If not, kill any rank of the node.",
                "The node is gone: drain it. The end of the job removes its entry in `.targets`.",
            ),
        ),
    ),
    Alert(
        name="TelemetryDropping",
        expr=(
            "job:resilience_telemetry_dropped:count15m > 0 "
            f"or {labelled(labelled(_FOLDER_DOWN, 'signal', 'record', 'job_id'), 'reason', 'sink', 'job_id')}"
        ),
        wait="0s",
        severity="warning",
        level="job",
        summary="Job {{ $labels.job_id }} loses telemetry ({{ $labels.signal }}: {{ $labels.reason }})",
        board="self",
        runbook=Runbook(
            "Records, spans or measurements were lost within 15 minutes, or the run folder of a node has not answered, "
            "or could not be written, for 5 minutes. The job is not affected, but its records and reports have gaps. "
            "While no run folder of the job is up, nothing is known about its progress, and JobStalled does not fire.",
            (
                "Dashboard *Self*: which signal, for which reason? Does an exporter fail? Which run folder is not up?",
                "`sink`: the disk of the run folder is full, not writable, or does not answer. Records that it refused "
                "count once it takes others. `queue`, `export`: the collector.",
            ),
            (
                "Free disk space, or repair the file server or the collector. No restart is needed.",
                "`overrun`: sections end faster than the monitor reads them. Mark longer ones.",
            ),
        ),
    ),
    Alert(
        name="TimeoutsUncalibrated",
        expr=(
            f"(max by ({_JOB}, section) {_living('resilience_calibration_stale')} > 0 "
            f"or ({_SAMPLES} >= {ENOUGH} "
            f'unless on ({_JOB}, section) resilience_section_timeout_seconds{{source="calibrated"}})) '
            f"and {_EXISTS} unless {_NO_FOLDER}"
        ),
        wait="1h",
        severity="info",
        level="section",
        summary="Section {{ $labels.section }} of job {{ $labels.job_id }} has no learned limit, or a stale one",
        board="sections",
        command="calibrate",
        runbook=Runbook(
            f"A section has run {ENOUGH} times or more without a learned limit, or its learned limit disagrees with "
            "current durations, so a longer limit applies instead. Hangs in it are detected late, or not at all.",
            (
                "Dashboard *Sections & calibration*: durations, limits and their sources.",
                "`resilience calibrate RUN`: the limits it would set, with their false-alarm rates.",
            ),
            (
                "`resilience calibrate RUN --out FILE`, then start the next run with that file.",
                "To try limits first, set RESILIENCE_TIMEOUTS_SHADOW=1: they only report what they would have done.",
            ),
        ),
    ),
)


def runbook_place(alert: str) -> int:
    """Return the number of an alert's runbook, from 1."""
    return 1 + [other.name for other in ALERTS].index(alert)


def annotations_of(alert: Alert, grafana: str) -> dict[str, str]:
    """Return the annotations of an alert. Alerts about restarts include the text of the last verdict.

    grafana: URL of Grafana."""
    culprit = {"culprit": alert.culprit} if alert.culprit else {}
    if alert.board == "restarts":
        culprit["verdict"] = _VERDICT
    return {
        "summary": alert.summary,
        **culprit,
        "run_folder": _FOLDER,
        "command": f"resilience {alert.command} '{_FOLDER}'",
        "dashboard_url": f"{grafana}/d/resilience-{alert.board}?var-job={{{{ $labels.job_id | urlquery }}}}",
        "runbook_url": f"{grafana}/d/{RUNBOOKS_UID}/runbooks?viewPanel={runbook_place(alert.name)}",
    }


def recording_rules() -> dict[str, Any]:
    """Return the file of recording rules."""
    groups = []
    for name, every, is_slow in ((GROUPS[0], EVERY, False), (GROUPS[1], SLOW, True)):
        rules = [{"record": rule.record, "expr": rule.expr} for rule in RECORDINGS if rule.is_slow == is_slow]
        groups.append({"name": name, "interval": every, "rules": rules})
    return {"groups": groups}


def alert_rules(grafana: str) -> dict[str, Any]:
    """Return the file of alerts. grafana: URL of Grafana."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity, "level": alert.level},
            "annotations": annotations_of(alert, grafana),
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": GROUPS[2], "interval": EVERY, "rules": rules}]}


_ABOUT_PROGRESS = "JobStalled|StartStalled|RankHeartbeatStale|SectionNearLimit"
# Which alerts silence which others of the same job or node: one cause, one page.
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
    ("MonitorDown", "RankHeartbeatStale", ("cluster", "job_id", "node")),
    # The open section of a rank without a monitor seems to last. The alert has no node: it is about all ranks.
    ("MonitorDown", "SectionNearLimit", ("cluster", "job_id")),
)


def _silences(cause: str, silenced: str, equal: tuple[str, ...]) -> dict[str, Any]:
    return {
        "source_matchers": [f'alertname=~"{cause}"'],
        "target_matchers": [f'alertname=~"{silenced}"'],
        "equal": list(equal),
    }


def alertmanager() -> dict[str, Any]:
    """Return an example for Alertmanager: one message per job, and the alerts that another one silences."""
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


def unit_test_file(tests: list[dict[str, Any]], every: str = EVERY) -> dict[str, Any]:
    """Return a file for `promtool test rules` that is stored in a folder next to the rules. every: between evaluations.

    Without a given order, promtool evaluates groups in any order at the same instant: an alert would see the values of
    its recording rules of now or of one evaluation earlier."""
    return {
        "rule_files": ["../recording.yaml", "../alerts.yaml"],
        "evaluation_interval": every,
        "group_eval_order": list(GROUPS),
        "tests": tests,
    }
