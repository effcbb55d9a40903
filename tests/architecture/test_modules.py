"""Every module says what it is, is one thing, and raises errors of the one tree."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.core import agent_protocol, restart, watch
from resilience.facts.events import CATALOGUE
from resilience.monitor import messages
from tests.support.modules import tree_of
from tests.support.server import ROOT

MODULES = sorted((ROOT / "resilience").rglob("*.py"))
LONGEST = 400  # lines; a longer file has to be one thing, and says here which
LONG = {
    "resilience/attribution/verdict.py": "the rules of attribution, in the order in which they are tried",
    "resilience/calibration/limits_file.py": "one file format: what is written, read, merged and refused",
    "resilience/core/rendezvous.py": "one agent's part of the rendezvous: join, lead, wait, leave",
    "resilience/core/restart.py": "the restart protocol: its operations, values and steps, in one place",
    "resilience/core/supervision.py": "one agent's part in one cycle, from its start to its verdict",
    "resilience/core/watch.py": "one decision: each limit, what it applies to, and what follows",
    "resilience/facts/events.py": "the catalogue: one definition an event, in one place",
    "resilience/history/cycles.py": "what is known of a cycle, on each node and of all of them, record by record",
    "resilience/inprocess/_runtime/call.py": "one call of a wrapped function, from its entry to its end",
    "resilience/inprocess/_runtime/monitor_process.py": "one fork: the handle in the rank, the start in the monitor",
    "resilience/inprocess/_runtime/monitor_store.py": "one thread that does all store work of a monitor",
    "resilience/inprocess/_runtime/session.py": "what one call opens, and closes in the opposite order",
    "resilience/inprocess/store.py": "the stores of the compatible API, and how ranks find the one that they share",
    "resilience/launcher/cycle_supervisor.py": "the shell around `core.supervision`: performs each operation",
    "resilience/launcher/launch.py": "the composition of an agent, and its exit status",
    "resilience/launcher/output/destinations.py": "the agent's end of the drain process",
    "resilience/launcher/rendezvous/handler.py": "the object that torch asks for: an agent in its job, and its stores",
    "resilience/launcher/worker/zygote.py": "both ends of one protocol: the agent orders, the zygote forks",
    "resilience/monitor/config.py": "one table of limits, in its three forms: keywords, YAML, flags",
    "resilience/monitor/duration_recorder.py": "the durations of one rank, by kind of deadline",
    "resilience/monitor/messages.py": "one wire format: each message defined once",
    "resilience/monitor/page.py": "one layout of shared memory: who writes a field and who reads it",
    "resilience/monitor/program.py": "one process: its workers one after the other, who connects, and its agent",
    "resilience/monitor/server.py": "the loop of a monitor, and everything that one rank's witness owns",
    "resilience/monitor/worker.py": "a worker's monitor: what it adds to the loop of any monitor",
    "resilience/report/terminal.py": "one page of text, from its head to its notes",
    "resilience/run_folder/lines.py": "one reader for each kind of file in a run",
    "resilience/status/state.py": "one state, and the records that change it",
    "resilience/system/collectives.py": "the steps that free a rank from a collective, in their order",
    "resilience/system/environment.py": "the one place that reads the environment: settings, and what launchers set",
    "resilience/system/interrupt.py": "one signal, its way out of the standard library, and who swallows it",
    "resilience/system/processes.py": "one process seen from another: identity, state, children, end",
    "resilience/telemetry/durations.py": "one file format: its writer and its reader",
    "resilience/telemetry/catalogue.py": "the table of every metric",
    "resilience/telemetry/exporters.py": "the exports of one node: who runs them, and how they end",
    "resilience/telemetry/metrics.py": "every metric, and the event that moves it",
}

SHORTEST = 60  # lines; a shorter module says here why it is one
SHORT = {
    "resilience/attribution/lost_stores.py": "one question about a cycle; the module that asks it is long enough",
    "resilience/launcher/rendezvous/store_news.py": "used by two threads, unlike the handler that owns it",
    "resilience/attribution/culprits.py": "words that the rules, the verdict and all views share",
    "resilience/attribution/stack_groups.py": "one algorithm: equal stacks of 10,000 ranks become groups",
    "resilience/system/group_shutdowns.py": "stacks leave out its frames; the module that it calls is long enough",
    "resilience/attribution/verdict_words.py": "the same sentences for the terminal and the page",
    "resilience/calibration/episodes.py": "one algorithm, of the fit and of the monitor",
    "resilience/calibration/quantiles.py": "arithmetic of several fits",
    "resilience/calibration/starts.py": "one algorithm, which needs no fit",
    "resilience/calibration/recurring_phases.py": "one algorithm, of the fit and of the table of observed runs",
    "resilience/cli/__main__.py": "an entry point",
    "resilience/cli/arguments.py": "what all commands share",
    "resilience/cli/incomplete.py": "what several commands share",
    "resilience/cli/run.py": "a command",
    "resilience/run_folder/timings.py": "one kind of file, for the report and for SQL",
    "resilience/core/assignment.py": "pure, beside the hooks that may be replaced",
    "resilience/core/communication.py": "one question, of the core's and the attribution's callers",
    "resilience/core/cycle.py": "types that all agents share",
    "resilience/core/elapsed.py": "pure: it takes the time as an argument",
    "resilience/core/ladder.py": "pure: the watcher takes the time and the looks, and gets the verdict",
    "resilience/core/pace.py": "pure: the monitor's loop asks it when to wake",
    "resilience/core/shadow.py": "limits that only report, beside `core.watch`, whose limits end ranks",
    "resilience/core/shared_list.py": "a part of two protocols",
    "resilience/core/standstills.py": "one measure, of all silences",
    "resilience/core/stopping.py": "pure: `launcher.stopping` gathers the signals, the supervisor acts",
    "resilience/facts/configuration.py": "crosses processes and files: limits, durations and job.json hold it",
    "resilience/facts/fingerprints.py": "one hash, the same in all processes",
    "resilience/facts/fork_lock.py": "the one lock of the pure layers, with an exception from their contract",
    "resilience/facts/in_words.py": "words that all layers share",
    "resilience/facts/masking.py": "the one place that knows what is secret",
    "resilience/facts/phases.py": "crosses files: the file of limits holds it, and `core.watch` applies it",
    "resilience/facts/printable.py": "the one place that knows what may be displayed",
    "resilience/facts/records.py": "the envelope of all events; `facts.events` is long enough without it",
    "resilience/facts/seats.py": "a type that the store, the page and the hooks share",
    "resilience/facts/user_frames.py": "one question, of all readers of stacks",
    "resilience/fault_tolerance/config.py": "a module of the compatible API",
    "resilience/fault_tolerance/data.py": "a module of the compatible API",
    "resilience/fault_tolerance/rank_monitor_client.py": "a module of the compatible API",
    "resilience/fault_tolerance/rank_monitor_server.py": "a module of the compatible API",
    "resilience/history/completeness.py": "one kind of fact, beside the history",
    "resilience/history/other_launchers.py": "one kind of restart, beside the history of iterations",
    "resilience/history/places.py": "where records and verdicts belong, for the fold and for the views",
    "resilience/inprocess/_runtime/fork_safety.py": "two questions about a process, before its monitor starts",
    "resilience/inprocess/_runtime/forked.py": "one hazard: user code that forks",
    "resilience/inprocess/_runtime/job_description.py": "the content of one file",
    "resilience/inprocess/_runtime/launcher_check.py": "advice: needs no session",
    "resilience/inprocess/_runtime/options.py": "what all hooks share",
    "resilience/inprocess/_runtime/progress.py": "one trick of the interpreter",
    "resilience/inprocess/attribution.py": "a module of the compatible API",
    "resilience/inprocess/completion.py": "a module of the compatible API",
    "resilience/inprocess/exception.py": "a module of the compatible API",
    "resilience/inprocess/monitor_thread.py": "a module of the compatible API",
    "resilience/inprocess/nested_restarter.py": "a module of the compatible API",
    "resilience/inprocess/terminate.py": "a module of the compatible API",
    "resilience/launcher/__main__.py": "an entry point",
    "resilience/launcher/output/byte_counts.py": "memory that two processes share",
    "resilience/launcher/output/drained_stream.py": "a type that the drain process's parts share",
    "resilience/launcher/registration.py": "an entry point of torchrun",
    "resilience/launcher/worker/tied.py": "a program of its own, without the package",
    "resilience/monitor/collectives.py": "one question, of the loop and of the evidence",
    "resilience/monitor/oom.py": "one question, without the loop that asks it",
    "resilience/report/log_lines.py": "the one part of the page that reads files",
    "resilience/run_folder/rank_ranges.py": "one notation, of several commands",
    "resilience/run_folder/stamps.py": "one file format",
    "resilience/status/first_read.py": "one bound: what is read of a long file",
    "resilience/system/call_with_timeout.py": "a thread around any call, of hooks and of health checks",
    "resilience/system/checkpoint_writers.py": "parts of torch's asynchronous checkpoints, which an abort alone needs",
    "resilience/system/devices.py": "CUDA's thread-local device: kept where a call gets a thread of its own",
    "resilience/system/exit_signals.py": "the end of two full-screen commands",
    "resilience/system/exit_status.py": "known when code runs as the interpreter ends; imports nothing heavy",
    "resilience/system/health/cuda.py": "a health check, beside those of other parts of a node",
    "resilience/system/libraries.py": "the dynamic linker's list, by ctypes",
    "resilience/system/native_threads.py": "a reader of /proc, for processes that are about to fork",
    "resilience/telemetry/progress.py": "a function that another layer fills in",
    "resilience/system/timed_selector.py": "a selector with one more kind of key, for any loop",
    "resilience/system/unwritten_stdout.py": "what the commands and the launcher share",
}

LONGEST_FUNCTION = 50  # lines; a longer one does one thing, and says here which
LONG_FUNCTIONS = {
    "resilience/launcher/launch.py:launch": "puts the parts of an agent together, in an order that matters",
    "resilience/attribution/notes.py:note": "a table: one case for each event",
    "resilience/launcher/console.py:_sentence": "a table: one case for each event that people see",
    "resilience/inprocess/wrap.py:__init__": "the parameters of the compatible API",
    "resilience/core/watch.py:_rows": "a table: one row for each limit",
    "resilience/cli/calibrate.py:configure": "a table: one call for each option",
    "resilience/calibration/fitting.py:fit_pool": "the fit, step by step as the page describes it",
    "resilience/inprocess/_runtime/session.py:_begin": "the beginning of a call, in an order that matters",
    "resilience/report/terminal.py:_header": "the head of the report, line by line",
    "resilience/monitor/server.py:__init__": "the parts of a monitor, one line for each",
}

VAGUE = {"found", "told", "made", "seen", "of", "each"}  # of a local name or a parameter: they do not say what it holds

SAME_NAME = {"FaultToleranceCallback"}  # of Lightning and of transformers: each user has one of them

UNIONS = (
    restart.Operation,
    agent_protocol.Operation,
    agent_protocol.NodeOperation,
    watch.Command,
    messages.FromRank,
    messages.ToRank,
    messages.FromAgent,
    messages.ToAgent,
)
OPEN_ENDED = {
    "resilience/launcher/rendezvous/driving.py:operation": "`system.store.execute` takes all others, by its type",
}

TERMINAL = {"'TERM'", "'NO_COLOR'"}  # what a terminal can do is no setting of ours, and asked beside `isatty`


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_says_what_it_is_for(path: Path) -> None:
    header = ast.get_docstring(tree_of(path))
    assert header
    assert header.split("\n")[0].rstrip().endswith((".", "?", ":"))


def test_long_functions_are_known() -> None:
    long_functions = {
        f"{name_of(path)}:{node.name}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    }
    assert long_functions == set(LONG_FUNCTIONS)


def test_long_modules_are_known() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name for name, length in lengths.items() if length > LONGEST} == set(LONG)


def test_short_modules_have_a_reason() -> None:
    modules = [path for path in MODULES if path.name != "__init__.py"]
    short = {name_of(path) for path in modules if len(path.read_text().splitlines()) < SHORTEST}
    assert short == set(SHORT)


def test_local_names_say_what_they_hold() -> None:
    assert [name_of(path) for path in MODULES if not VAGUE.isdisjoint(local_names(tree_of(path)))] == []


def local_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds, without the fields of classes and without imports."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {part.target for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if node not in fields:
                yield name
            case ast.arg(arg=name) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case _:
                pass


def test_match_of_a_message_or_an_operation_names_each_kind() -> None:
    """Then mypy reports a new kind at each place. It does not where the last case has a wildcard or a guard."""
    kinds = {kind.__name__ for union in UNIONS for kind in typing.get_args(union)}
    open_ended = {
        f"{name_of(path)}:{ast.unparse(node.subject)}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Match) and not kinds.isdisjoint(classes_of(node))
        if node.cases[-1].guard is not None or isinstance(node.cases[-1].pattern, ast.MatchAs)
    }
    assert open_ended == set(OPEN_ENDED)


def classes_of(match: ast.Match) -> Iterator[str]:
    """Yield the names of the classes that the cases of a match statement ask for."""
    for case in match.cases:
        for node in ast.walk(case.pattern):
            if isinstance(node, ast.MatchClass):
                yield ast.unparse(node.cls).rpartition(".")[2]


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name for name, paths in places.items() if len(paths) > 1} == SAME_NAME


def test_class_of_an_event_is_named_for_its_tag() -> None:
    tags = {kind.__name__: str(kind.__struct_config__.tag) for kind in CATALOGUE}
    assert tags.keys() == {"".join(map(str.capitalize, re.split("[._]", tag))) for tag in tags.values()}


def test_errors_are_defined_in_one_place() -> None:
    strangers = [
        f"{name_of(path)}: {node.name}"
        for path in MODULES
        if path.name != "errors.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    ]
    assert strangers == []


def test_environment_is_read_in_one_place() -> None:
    readers = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        if name_of(path) != "resilience/system/environment.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.expr) and reads_environment(node)
    ]
    assert readers == []


def reads_environment(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="getenv"), args=[name, *_]):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Attribute(ast.Name("os"), "environ"), attr="get"), args=[name, *_]):
            pass
        case ast.Subscript(value=ast.Attribute(ast.Name("os"), "environ"), slice=name, ctx=ast.Load()):
            pass
        case _:
            return False
    return ast.unparse(name) not in TERMINAL


def test_only_one_module_knows_torchs_flight_recorder() -> None:
    """Its name and format differ between releases of torch."""
    knows = [module.name for module in MODULES if "_dump_fr_trace" in module.read_text()]
    assert knows == ["flight_recorder.py"]
