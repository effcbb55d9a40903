"""How does a report look on a terminal?  What broke, where, since when, what it cost, what to do next.

`report_lines` formats the whole report. `incident_lines` formats a single incident; the page and the demonstration use
it too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from resilience.attribution.advice import named, ranks_in_words
from resilience.attribution.cost import time_unknown_in_words
from resilience.attribution.culprits import RULES
from resilience.attribution.incident import Cost, Incident
from resilience.attribution.symptoms import main_stack
from resilience.attribution.verdict_words import verdict_statements
from resilience.core.hang_kind import WORDS as HANGS
from resilience.facts.deadlines import silence_in_words
from resilience.facts.in_words import about_in_words, count, seconds
from resilience.facts.interruptions import Frame, InterruptionRecord
from resilience.facts.user_frames import is_ours, user_frame
from resilience.report.condensed import Report
from resilience.report.counterfactual import WhatIf, least_change_last, what_if_in_words
from resilience.report.evidence import LAST_LINES, exception_lines, frame_in_words, last_lines
from resilience.run_folder.load import incomplete_in_words, unread_timings_in_words
from resilience.system.render import (
    Line,
    clock,
    cut,
    date,
    field,
    moments,
    phase_name,
    short_path,
    table,
)

LISTED = 12  # missing items and notes; the others are only counted
LEAST_SERIES = 5  # consecutive incidents of the same failure from which on only the first and the last are shown
BAR = 22
NO_STEP = "rework unknown: no step reported"
REWORK_UNKNOWN = "rework unknown: the step before or after the restart is not on record"
SEVERAL_FUNCTIONS = "rework unknown: several wrapped functions were called before the restart"
STEP_TIME_UNKNOWN = "rework unknown: how long a step took is not on record"
TIMES_UNKNOWN = "unknown: too many records are missing"
STACK_SHOWN = 3  # innermost frames
WORTH = 0.01  # share of the total time; a change that saves less is not shown
STAGES = {  # of a record, in words; of others the name says what the rank was doing: initialize, finalize, barrier …
    "starting": "before its program began",
    "ending": "while its program ended",
    "outside": "outside of the wrapped function",
}
SURE = 0.7  # confidence; from here on, rules that could not run are not listed
_KINDS: dict[str, str] = {
    "exception": "exception",
    "base_exception": "left",
    "soft_timeout": "hang",
    "hard_timeout": "hang, killed",
    "terminated": "process died",
    "unresponsive": "unresponsive",
    "monitor_process_exception": "monitor died",
    "store_lost": "store lost",
}
_HOSTS: dict[str, str] = {"node_lost": "node lost", "agent_lost": "agent lost"}  # by what the verdict says


# -- the whole report --------------------------------------------------------------------------


def report_lines(condensed: Report, width: int, now_ns: int) -> Iterator[Line]:
    """Yield the report for a terminal of `width` columns. now_ns: UTC."""
    yield from _header(condensed, width, now_ns)
    if condensed.incidents:
        yield ()
        moment = moments(condensed.started_wall_ns, condensed.last_wall_ns)
        yield from incident_table(condensed.incidents, width, moment)
        for entry in _folded(condensed.incidents):
            yield ()
            if isinstance(entry, Incident):
                yield from incident_lines(entry, width)
            else:
                yield from field("…", f"{_more_like(entry)}; --incident N shows one, --json all", width, indent=0)
    if condensed.notes:
        yield ()
        yield (("Notes", "bold"),)
        for note in condensed.notes[:LISTED]:
            ranks = f" ({named(note.ranks)})" if note.ranks else ""
            yield from field("-", note.what + ranks, width, indent=2, gutter=2)
        yield from _rest(len(condensed.notes))
    if condensed.missing:
        yield ()
        yield (("Missing", "bold yellow"),)
        for missing in condensed.missing[:LISTED]:
            place = missing.file + (f", line {missing.line}" if missing.line is not None else "")
            yield from field("-", f"{place}: {missing.what}", width, indent=2, gutter=2)
        yield from _rest(len(condensed.missing))


def _folded(incidents: Iterable[Incident]) -> Iterator[Incident | list[Incident]]:
    """Yield the incidents, but those between the first and the last of a series of the same failure as one list."""
    series: list[Incident] = []
    for incident in (*incidents, None):
        if series and (incident is None or series[-1].number not in incident.same_as):
            yield from series if len(series) < LEAST_SERIES else (series[0], series[1:-1], series[-1])
            series = []
        if incident is not None:
            series.append(incident)


def _more_like(folded: list[Incident]) -> str:
    return f"{len(folded)} more of the same failure"


def _rest(total: int) -> Iterator[Line]:
    if total > LISTED:
        yield ((f"  … and {total - LISTED} more; --json shows all", "dim"),)


def _header(condensed: Report, width: int, now_ns: int) -> Iterator[Line]:
    functions = ", ".join(condensed.functions)
    attempt = f", attempt {condensed.attempt}" if condensed.attempt else ""
    name = cut(condensed.job_id, width - len("Run ") - len(attempt)) + attempt
    left = width - len("Run ") - len(name) - 2
    yield (("Run ", "bold"), (name, "bold cyan"), (f"  {cut(functions, left)}" if left > 1 else "", "dim"))
    if as_of := as_of_in_words(condensed, now_ns):
        yield from field("as of", as_of, width, "bold yellow", indent=2)
    recorded_s = None
    if condensed.started_wall_ns is not None and condensed.last_wall_ns is not None:
        recorded_s = (condensed.last_wall_ns - condensed.started_wall_ns) / 1e9
    spans = [count(condensed.iterations, "iteration")]
    if condensed.calls > 1:
        spans.insert(0, count(condensed.calls, "call"))
    if condensed.launched is not None:
        spans = [count(condensed.launched.cycles, "cycle"), *(spans if condensed.calls else [])]
    if condensed.attempts > 1:
        spans.insert(0, count(condensed.attempts, "attempt"))
    yield from field(
        "started",
        f"{date(condensed.started_wall_ns)}, records cover {seconds(recorded_s)}, {', '.join(spans)}",
        width,
        indent=2,
    )
    nodes = ", ".join(condensed.nodes[:4]) + (f" … {len(condensed.nodes) - 4} more" if len(condensed.nodes) > 4 else "")
    size = "?" if condensed.world_size is None else count(condensed.world_size, "rank")
    yield from field("world", f"{size} on {count(len(condensed.nodes), 'node')}: {nodes}", width, indent=2)
    if condensed.versions:
        yield from field("versions", ", ".join(f"{k} {v}" for k, v in condensed.versions.items()), width, indent=2)
    yield from _completeness(condensed, width)
    is_well = (
        condensed.completed
        and not (condensed.left or condensed.open or condensed.stopped)
        and condensed.completeness.has_all_records
    )
    style = "green" if is_well else "yellow"
    yield from field("ended", condensed.end, width, style, indent=2)
    errors = dict.fromkeys(left.error for left in condensed.left)
    for error in list(errors)[:3]:
        ranks = [left.rank for left in condensed.left if left.error == error]
        yield from field("", f"{named(ranks)}: {error}", width, indent=2)
    yield from _times(condensed, width)
    yield from _restarts(condensed, width)
    if condensed.incidents:
        losses = [seconds(condensed.lost_s)] if condensed.lost_s is not None else []
        losses += [count(condensed.lost_steps, "step")] if condensed.lost_steps else []
        about = about_in_words(condensed.completeness.has_all_records)
        lost = f", lost {about}{' and '.join(losses)}" if losses else ""
        lost += unknown_in_words(condensed.unknown_cost, condensed.unknown_rework)
        yield from field("incidents", f"{about}{len(condensed.incidents)}{lost}", width, "bold", indent=2)
    else:
        none = "none" if condensed.completeness.has_all_records else "none in the readable records"
        yield from field("incidents", none, width, indent=2)


def unknown_in_words(unknown_cost: int, unknown_rework: int) -> str:
    """Return what a sum of costs lacks, "" if nothing: numbers of incidents."""
    lacks = f"; cost of {count(unknown_cost, 'incident')} unknown" if unknown_cost else ""
    return lacks + (f"; {rework_unknown_in_words(unknown_rework)}" if unknown_rework else "")


def rework_unknown_in_words(incidents: int) -> str:
    """Return that a sum lacks the repeated steps of some incidents."""
    return f"rework of {count(incidents, 'incident')} unknown"


def at_most_in_words(unknown_rework: int) -> str:
    """Return what precedes a productive share: unknown rework counts as productive."""
    return "at most " if unknown_rework else ""


def unread_in_words(condensed: Report) -> str:
    """Return which timings cannot be read, and what that means; "" if none are known."""
    unread = unread_timings_in_words(condensed.completeness)
    return f"{unread}; sections, steps per second and what-ifs lack them" if unread else ""


def as_of_in_words(condensed: Report, now_ns: int) -> str:
    """Return the time of the last record if the end of the run is not recorded, else "". now_ns: UTC."""
    if condensed.is_ended or condensed.last_wall_ns is None:
        return ""
    age_s = max(0, now_ns - condensed.last_wall_ns) / 1e9
    return f"{clock(condensed.last_wall_ns)} UTC, {seconds(age_s)} ago (the last record)"


def _completeness(condensed: Report, width: int) -> Iterator[Line]:
    if missing := incomplete_in_words(condensed.records_completeness):
        yield from field("records", missing, width, "bold yellow", indent=2)
    if unread := unread_in_words(condensed):
        yield from field("timings", unread, width, "yellow", indent=2)


def _times(condensed: Report, width: int) -> Iterator[Line]:
    """Yield the productive share of the time, what lost the rest, and which changes would have saved some of it."""
    spent = condensed.times
    if spent is None:
        yield from field("time", TIMES_UNKNOWN, width, "yellow", indent=2)
    if spent is not None and spent.ettr is None and spent.unknown_s:
        yield from field("time", f"productive share unknown: {time_unknown_in_words(spent)}", width, indent=2)
    if spent is None or spent.ettr is None:
        return
    lost = {"start-up": spent.startup_s, "restarts": spent.restart_s, "silence": spent.hang_s}
    lost |= {"rework": spent.rework_s or 0.0, "idle": spent.idle_s}
    known = [f"{name} {seconds(value)}" for name, value in lost.items() if value >= 0.0005]
    unknown = [rework_unknown_in_words(condensed.unknown_rework)] if condensed.unknown_rework else []
    parts = ", ".join(known + unknown)
    share = f"{at_most_in_words(condensed.unknown_rework)}{100 * spent.ettr:.1f} %"
    text = f"{share} of {seconds(spent.total_s)} productive{f'; lost: {parts}' if parts else ''}"
    if spent.unknown_s >= WORTH * spent.total_s:
        text += f"; {time_unknown_in_words(spent)}"
    if not condensed.completeness.has_all_records:
        text += f" (of {count(spent.ranks, 'rank')})"
    yield from field("time", text, width, indent=2)
    best_answers: dict[str, WhatIf] = {}
    for answer in sorted(condensed.what_ifs, key=least_change_last):
        if answer.saved_s >= WORTH * spent.total_s:
            best_answers[answer.kind] = answer
    if best_answers:
        at_most = at_most_in_words(condensed.unknown_rework)
        changes = "; ".join(
            f"{at_most}{100 * candidate.ettr:.1f} % with {what_if_in_words(candidate)}, if {candidate.assumes}"
            for candidate in best_answers.values()
        )
        yield from field("what if", changes, width, indent=2)


def _restarts(condensed: Report, width: int) -> Iterator[Line]:
    """Yield how often the job was restarted, and how fast its ranks came back."""
    layers = {"inprocess": "in place", "launcher": "by the launcher"}
    about, parts = about_in_words(condensed.completeness.has_all_records), []
    for took in condensed.restarts:
        ranks = count(took.ranks, "rank restart")
        durations = f"durations {TIMES_UNKNOWN}"
        if took.median_s is not None:
            durations = f"median {seconds(took.median_s)}, 95 % within {seconds(took.p95_s)}"
        ranks += f", {took.undone} of them undone by the launcher" if took.undone else ""
        parts.append(f"{about}{took.restarts} {layers[took.layer]} ({about}{ranks}, {durations})")
    if parts:
        yield from field("restarts", "; ".join(parts), width, indent=2)


def incident_table(
    incidents: Iterable[Incident], width: int, moment: Callable[[int | None], str] = clock
) -> list[Line]:
    """Return a table with one row per incident; a long series of the same failure has three. moment: writes a time."""
    rows = []
    for incident in _folded(incidents):
        if not isinstance(incident, Incident):
            rows.append(("…", "", "", "", _more_like(incident), "", ""))
            continue
        rows.append(
            (
                str(incident.number),
                moment(incident.since_wall_ns),
                _kind(incident),
                _blamed(incident),
                _where(incident),
                seconds(incident.cost.lost_s),
                "?" if incident.cost.lost_steps is None else str(incident.cost.lost_steps),
            )
        )
    return table(("#", "since", "kind", "first", "where", "cost", "steps"), rows, width, 4, 3, 2, 1)


def _kind(incident: Incident) -> str:
    if incident.kind == "unresponsive":
        return _HOSTS.get(incident.verdict.what, _KINDS[incident.kind])
    return _KINDS.get(incident.kind, incident.kind)


def _lost_nodes(incident: Incident) -> str:
    """Return the lost nodes of an incident in which a node or its agent was lost, empty for any other one: its ranks
    are the first victims, and blaming one of them would mislead."""
    if incident.kind != "unresponsive" or incident.verdict.what not in _HOSTS:
        return ""
    blamed = (incident.nodes.get(culprit.rank) for culprit in incident.verdict.culprits)  # survivors have records too
    return ", ".join(sorted({node for node in blamed if node}))


def _blamed(incident: Incident) -> str:
    verdict = incident.verdict
    if nodes := _lost_nodes(incident):
        return nodes
    ranks = [culprit.rank for culprit in verdict.culprits]
    if not ranks:
        return "unknown" if verdict.candidates or verdict.what in ("unknown", "hung") else "none"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranks_in_words(ranks, 2)}"


def _where(incident: Incident) -> str:
    """Return where the first failing rank was. A record of another rank says nothing about it."""
    first = incident.verdict.first
    record = next((record for record in incident.records if first in (None, record.rank)), None)
    section = f"{record.open_sections[-1].name}, " if record is not None and record.open_sections else ""
    if incident.where is not None:
        return f"{section}{short_path(incident.where.file, 1)}:{incident.where.line}"
    if record is not None and record.exit is not None:
        return _exit(record)
    return section.rstrip(", ") or (record.stage or "" if record is not None else "")


# -- one incident ------------------------------------------------------------------------------


def incident_lines(incident: Incident, width: int, is_whole: bool = False, with_phases: bool = True) -> Iterator[Line]:
    """Yield one incident, from what broke to what to do next. is_whole: with all evidence of the first failing rank."""
    chief, verdict = incident.chief, incident.verdict
    iteration = f"iteration {incident.iteration}" if incident.iteration >= 0 else "while ranks entered the call"
    if incident.layer == "launcher":
        iteration = f"cycle {incident.cycle}"
    step = f", step {chief.step}" if chief is not None and chief.step is not None else ""
    yield (
        (f"{incident.number}  ", "bold"),
        (_title(incident), "bold red"),
        (f"  {iteration}{step}", "dim"),
    )
    if chief is not None:
        by = "" if verdict.first in (None, chief.rank) else f"rank {chief.rank}: "
        yield from _what(chief, by, None if by else incident.where, width, is_whole)
    if chief is not None and verdict.first in (None, chief.rank):
        yield from field("where", _place(chief), width)
        yield from _stack(chief, width, is_whole)
        yield from _log(chief, width, is_whole)
    elif incident.where is not None:
        yield from field("where", f"rank {verdict.first} was at {frame_in_words(incident.where)}", width)
    if chief is None and incident.detail:
        yield from field("what", incident.detail, width, "bold")
    yield from field("since", _since(incident), width)
    yield from _verdict(incident, width)
    if with_phases:
        yield from _phases(incident, width)
    yield from field("cost", _cost(incident), width)
    yield from field("done", "; ".join(incident.actions) or "no action recorded", width)
    if incident.same_as:
        yield from field("repeats", f"the same failure as {_numbers(incident.same_as)}", width, "yellow")
    for number, advice in enumerate(incident.advice):
        yield from field("" if number else "next", advice, width, "green")
    if incident.status == "unfinished":
        yield from field(
            "", "the end of this restart is not recorded: it is under way, or was cut off", width, "yellow"
        )


def _numbers(earlier: tuple[int, ...]) -> str:
    if len(earlier) > LISTED:
        return f"{count(len(earlier), 'incident')} from {earlier[0]} to {earlier[-1]}"
    incidents = "incident" if len(earlier) == 1 else "incidents"
    return f"{incidents} {', '.join(map(str, earlier))}"


def _title(incident: Incident) -> str:
    """Return what broke, and on which rank. An error, or the end of a process, belongs to the rank of its record. If
    the verdict blames no rank, one has only reported it."""
    chief, rank = incident.chief, incident.verdict.first
    kind = _kind(incident)
    title = f"{kind[0].upper()}{kind[1:]}"
    if nodes := _lost_nodes(incident):
        return f"{title}: {nodes}"
    if rank is None:
        return title
    if chief is not None and (chief.exception is not None or chief.exit is not None):
        rank = chief.rank
    return f"{title} on rank {rank}" if incident.verdict.culprits else f"{title}, reported by rank {rank}"


def _what(chief: InterruptionRecord, by: str, where: Frame | None, width: int, is_whole: bool) -> Iterator[Line]:
    """Yield what the record says. where: where its rank was. For a hang without a stack, or one whose stack was
    taken late, that is where it was stopped."""
    if chief.exception is not None:
        yield from exception_lines(chief.exception, width, by, is_whole)
        return
    if chief.exit is not None:
        end = "its program ended, its interpreter did not" if chief.program_had_failed else "its process ended"
        yield from field("what", f"{by}{end}: {_exit(chief)}", width, "bold")
        return
    detector = chief.detector
    if detector is not None and chief.silent_for_s is not None:
        text = silence_in_words(detector.name, chief.silent_for_s, detector.limit_s)
        yield from field("what", by + text, width, "bold")
        frame = user_frame(main_stack(chief))
        if where is not None and where != frame:
            yield from field("", f"stopped at {frame_in_words(where)}", width)
        elif frame is not None:
            yield from field("", f"at {frame_in_words(frame)}", width)
        return
    yield from field("what", by + (chief.message or "not recorded"), width, "bold")


def _exit(chief: InterruptionRecord) -> str:
    exit_status = chief.exit
    if exit_status is None or (exit_status.signal is None and exit_status.code is None):
        return "exit status unknown"
    if exit_status.signal is not None:
        return exit_status.signal + (", out of memory" if exit_status.oom else "")
    return f"exit code {exit_status.code}"


def _place(chief: InterruptionRecord) -> str:
    parts = [f"rank {chief.rank}"]
    if chief.active_rank is not None and chief.active_rank != chief.rank:
        parts[0] += f" (as rank {chief.active_rank})"
    parts += [f"node {chief.node}"] if chief.node else []
    parts += [f"pid {chief.pid}"] if chief.pid is not None else []
    parts += [STAGES.get(chief.stage, f"in {chief.stage}")] if chief.stage and chief.stage != "run" else []
    for section in chief.open_sections:
        limit = f" of {seconds(section.limit_s)}" if section.limit_s is not None else ""
        parts.append(f"section {section.name} open {seconds(section.open_s)}{limit}")
    process = chief.process
    if process is not None and process.state is not None and chief.exit is None:
        share = ""
        if process.cpu_s_delta is not None and process.over_s:
            share = f", {100 * process.cpu_s_delta / process.over_s:.0f} % CPU"
        parts.append(f"process state {process.state}{share}")
    if process is not None and process.rss_bytes and chief.exit is not None and chief.exit.oom:
        parts.append(f"had {process.rss_bytes / 2**30:.1f} GiB of memory when last seen")
    if chief.hang is not None:
        parts.append(HANGS[chief.hang])
    return ", ".join(parts)


def _user_frames(frames: Iterable[Frame]) -> list[Frame]:
    """Return the frames that belong neither to this package nor to the interpreter."""
    return [frame for frame in frames if not (is_ours(frame) or frame.file.startswith("<"))]


def _stack(chief: InterruptionRecord, width: int, is_whole: bool) -> Iterator[Line]:
    """Yield the innermost frames of a rank that hangs or crashed, innermost first."""
    frames = main_stack(chief)
    if chief.exception is not None or not frames:
        if chief.stack_method is not None and not frames:
            yield from field("stack", chief.stack_method, width)
        return
    inner = [f"{short_path(f.file)}:{f.line} {f.function}" for f in _user_frames(frames)][
        0 if is_whole else -STACK_SHOWN :
    ]
    for number, text in enumerate(reversed(inner)):
        yield from field("" if number else "stack", text, width, "dim")


def _log(chief: InterruptionRecord, width: int, is_whole: bool) -> Iterator[Line]:
    """Yield the last lines that the rank wrote."""
    for number, line in enumerate(last_lines(chief.log_tail, LAST_LINES if is_whole else 1)):
        text = line if is_whole else cut(re.sub(r"\s+", " ", line), 2 * width)
        yield from field("" if number else "last log", text, width, "dim")


def _since(incident: Incident) -> str:
    text = date(incident.since_wall_ns)
    first = incident.first_detected
    if incident.cost.hang_s:
        text += f", detected {seconds(incident.cost.hang_s)} later"
    age = None if first is None or first.exception is not None else first.last_heartbeat_age_s
    if age is not None and abs(age - (incident.cost.hang_s or 0.0)) > 0.1 * age:
        text += f"; last sign of progress {seconds(age)} before detection"
    return text


def _verdict(incident: Incident, width: int) -> Iterator[Line]:
    verdict = incident.verdict
    for number, text in enumerate(verdict_statements(incident)):
        yield from field("" if number else "verdict", text, width, "" if number else "bold")
    suspected = {verdict.first, *(suspect.rank for suspect in (*verdict.culprits, *verdict.candidates))}
    if incident.reported_first is not None and incident.reported_first not in suspected:
        yield from field("", f"rank {incident.reported_first} reported first, but its failure is a consequence", width)
    label = "cleared"
    for group in verdict.exonerated if incident.status != "continued" else ():
        yield from field(label, f"{named(group.ranks)}: {group.reason}", width, "dim")
        label = ""
    if not any(culprit.confidence >= SURE for culprit in verdict.culprits):
        label = "blind"
        by_lack: dict[str, list[int]] = {}
        for blind in verdict.rules_blind:
            by_lack.setdefault(blind.lacks, []).append(blind.rule)
        for lacks, rules in by_lack.items():
            rule_names = ", ".join(f"{rule} {RULES[rule]}" for rule in rules)
            yield from field(label, f"rule {rule_names}: lacks {lacks}", width, "dim")
            label = ""


def _phases(incident: Incident, width: int) -> Iterator[Line]:
    """Yield one line per phase. Its bar shows the share of the phase in the slowest ranks' times."""
    if not incident.phases:
        return
    yield ((" " * 3, ""), (f"{'phases':11}{'':13}{'median':>9}{'slowest':>10}", "dim"))
    total = sum(phase.took.max_s for phase in incident.phases)
    for phase in incident.phases:
        spread = phase.took
        bar = "█" * round(BAR * spread.max_s / total) if total > 0 else ""
        slowest = (spread.node or f"rank {spread.slowest}") if spread.max_s >= 0.0005 else ""
        numbers = f"{seconds(spread.median_s):>9} {seconds(spread.max_s):>9}"
        text = f"{'':14}{phase_name(phase.name):13}{numbers}  {cut(slowest, 11):11}"
        yield ((text, ""), (cut(bar, max(0, width - len(text))), "cyan"))


def _cost(incident: Incident) -> str:
    cost = incident.cost
    parts = []
    if cost.hang_s is not None:
        parts.append(f"{seconds(cost.hang_s)} silence")
    if cost.restart_s is not None:
        parts.append(f"{seconds(cost.restart_s)} restart")
    if cost.lost_steps:
        again = f" ({seconds(cost.rework_s)})" if cost.rework_s is not None else ""
        parts.append(f"{count(cost.lost_steps, 'step')} done again{again}")
    if not parts:
        return "none: no rank was interrupted" if incident.interrupted_no_rank else "unknown"
    total = f"{seconds(cost.lost_s)}: " if cost.lost_s is not None and len(parts) > 1 else ""
    unknown = ""
    if incident.has_unknown_rework:
        unknown = f"; {_why_rework_is_unknown(cost)}"
    return total + ", ".join(parts) + unknown


def _why_rework_is_unknown(cost: Cost) -> str:
    if cost.lost_steps:
        return STEP_TIME_UNKNOWN
    if not cost.has_steps:
        return NO_STEP
    return SEVERAL_FUNCTIONS if cost.has_several_functions else REWORK_UNKNOWN
