"""Is every line of the protocol needed?  Takes away one guard or step at a time; each must be missed.

`python -m tests.mutate` forces each condition of `core.restart` and `core.watch` true and false, drops each step,
each command and each operand of a condition, lets each guarded write overwrite, and swaps neighbouring steps. A
mutant lives in memory only. It runs schedules of `tests.restart_simulation.cluster`, and the properties of the
module's own tests, until one breaks. It also takes a rank's initial number for its current one and the other way
round, and puts in the bugs of BY_HAND, which schedules alone have to find. The launcher's decisions are mutated
likewise, methods too, and so that all who use a function get the mutant; the modules' own tests kill each of them. With
`--launcher` only these modules are mutated, and their mutants run schedules of `tests.launcher_simulation` too, which
takes long. Prints every mutant with what killed it and ends with status 1 if one survives that EQUIVALENT does not
explain."""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import inspect
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import tests.support.examples  # noqa: F401
from resilience.core import (
    agent_liveness,
    budget,
    control,
    cycle_nodes,
    job_budget,
    membership,
    rendezvous,
    rendezvous_log,
    restart,
    shared_list,
    stopping,
    supervision,
    terms,
    watch,
)
from tests.launcher_simulation import schedules
from tests.launcher_simulation.jobs import Job
from tests.restart_simulation.cluster import Cluster
from tests.restart_simulation.faults import (
    LIMITS,
    VICTIMS,
    Schedule,
    draw,
    everywhere,
    late_returns,
    raised_everywhere,
)
from tests.unit.core import (
    test_agent_liveness,
    test_budget,
    test_control,
    test_cycle_nodes,
    test_job_budget,
    test_membership,
    test_rendezvous,
    test_rendezvous_log,
    test_restart,
    test_stopping,
    test_supervision,
    test_terms,
    test_waiting_costs,
    test_watch,
)
from tests.unit.restart_simulation import test_launcher_simulation

# Mutants that nobody can tell from the original, each with the reason. What is not needed should go instead.
EQUIVALENT = {
    (
        "Rendezvous._await_membership",
        "without condition is_time or now >= deadline",
    ): "it looks at the last cycle more often, to no other end",
    (
        "Rendezvous._await_membership",
        "without condition now >= deadline",
    ): "no look is later than the deadline, unless the limit is shorter than an interval",
    (
        "Rendezvous._is_spare",
        "without condition self.arrivals.last.rank_of(self.id) is not None",
    ): "a node of the last cycle waits again only once that has ended",
    (
        "weighed_silence",
        "without condition limits.rule is not None",
    ): "a silence has a row only if there is a rule; the types do not say so",
    (
        "_has_ended",
        "without condition record.detector is not None",
    ): "it is asked only of a record that has a detector; the types do not say so",
    (
        "_place_left",
        "swapped: unassigned = (yield from numbered(keys.unassigned, initial_world_size)) / "
        "discarded = (yield from numbered(keys.discarded, initial_world_size))",
    ): "a rank is on one of the two lists only, and both only grow",
    (
        "stand_in",
        "swapped: yield from arrive(keys.last_call, seat.rank, seat.world_size) / "
        "yield from mark_terminated(keys, seat.rank)",
    ): "the mark has to precede the arrival at the end barrier; it does, before or after those at the others",
    (
        "stand_in",
        "swapped: yield from arrive(keys.start, seat.rank, seat.world_size, str(seat.initial_rank)) / "
        "yield from arrive(keys.last_call, seat.rank, seat.world_size)",
    ): "no rank waits at one of these barriers for the arrival at the other",
    (
        "iterate",
        "swapped: if result.end is End.RETURNED and (yield from _complete(keys, seat, limits)) == COMPLETED: / "
        "if result.end in (End.FAILED, End.FATAL) and (yield from _report_failure(keys, seat, result)) == COMPLETED:",
    ): "a result satisfies at most one of the two conditions",
    (
        "Supervision.signalled",
        "without yield Emit(events.StopRequested(detail, self.rules.grace, leaves))",
    ): "an event changes nothing",
    (
        "Supervision._mode",
        "if on_signal(asked) == 'stop' -> False",
    ): "it is asked once more when this agent is on the list, and the answer is the same",
    (
        "Supervision.ended_by_error",
        "if standing.again is None -> False",
    ): "the rendezvous is closed with that verdict already",
    (
        "Supervision.why_not_continued",
        "if verdict is None -> True",
    ): "the verdict that stands is read once more",
    (
        "Supervision.why_not_continued",
        "if verdict.again is not None -> True",
    ): "the rendezvous is closed already, and the leader finds that",
    ("Supervision.look", "without condition not is_new"): "it is how soon an agent looks at the others",
    ("Supervision._weigh", "if nodes.waiting > 1 -> False"): "it is said to a person only",
    ("_is_continued", "without yield from ()"): "it is asked for no operation, and what it returns is false",
    (
        "Rendezvous._await_membership",
        "if self._notices == heard -> False",
    ): "it is how soon an agent looks for the first time",
    (
        "Rendezvous._hear",
        "without condition leader == self.id",
    ): "its own count rises, and it has not given up the lead that it holds",
    (
        "Rendezvous._lead",
        "if known.last.cycle >= number -> False",
    ): "it forms the cycle after the newest one, as the leader of that would",
    (
        "Rendezvous._lead",
        "without condition is_time",
    ): "agents are looked at once in an interval, however often it asks",
    ("Rendezvous.has_agents", "if newest.closed -> True"): "the log has what changed since the membership before",
    ("CycleNodes._weighed", "if count -> True"): "it reads keys that nobody has written",
    ("neighbour", "if rank is None -> False"): "an agent looks around only in a cycle of which it has a seat",
    ("_with_previous", "without filter rank is not None"): "a rank that is None is compared with numbers only",
    ("_with_previous", "if previous is not None -> True"): "a rank that is None is compared with numbers only",
}

# Modules of the launcher's protocol, each with the tests of its own.
LAUNCHER: dict[ModuleType, tuple[ModuleType, ...]] = {
    membership: (test_membership, test_rendezvous_log, test_rendezvous, test_waiting_costs),
    rendezvous_log: (test_rendezvous_log,),
    agent_liveness: (test_agent_liveness,),
    rendezvous: (test_rendezvous, test_waiting_costs),
    shared_list: (test_job_budget,),
    job_budget: (test_job_budget,),
    budget: (test_budget, test_job_budget),
    cycle_nodes: (test_cycle_nodes, test_waiting_costs),
    control: (test_control,),
    stopping: (test_stopping,),
    supervision: (test_supervision, test_waiting_costs),
    terms: (test_terms,),
}


# Bugs that no general rule makes: function -> (beginning of a statement, what it becomes; {} is the statement).
BY_HAND = {
    # A success that came after the limit is ignored.
    "_complete": ("yield from report(keys, missed_completion(", "return ({}) and INTERRUPTED"),
}
MADE_BY_HAND = "by hand: "
OTHER_RANK = {"rank": "initial_rank", "initial_rank": "rank"}

Nodes = list[ast.AST]


class Mutant(NamedTuple):
    """One change to one function of a module. `apply` makes it in a copy of the function, given its nodes."""

    function: str
    line: int
    change: str
    apply: Callable[[Nodes], None]


ORIGINAL = Mutant("", 0, "none", lambda nodes: None)


# -- making mutants ------------------------------------------------------------------------------------------------


def mutants_of(module: ModuleType) -> Iterator[Mutant]:
    """Yield every mutant of the functions of a module."""
    for name, function in _functions(module):
        asserted = {part for node in ast.walk(function) if isinstance(node, ast.Assert) for part in ast.walk(node)}
        for number, node in enumerate(ast.walk(function)):
            if node in asserted:  # said to the type checker, and true
                continue
            beginning, form = BY_HAND.get(function.name, (None, ""))
            if beginning is not None and isinstance(node, ast.Expr) and ast.unparse(node).startswith(beginning):
                change = form.format(ast.unparse(node))
                yield Mutant(name, node.lineno, f"{MADE_BY_HAND}{change}", partial(_replace, number, change))
            for change, apply in _launcher_changes(node, number) if module in LAUNCHER else _changes(node, number):
                yield Mutant(name, getattr(node, "lineno", function.lineno), change, apply)


def mutated(module: ModuleType, mutant: Mutant) -> ModuleType:
    """Return a copy of the module with the mutant in it. Classes stay the original's."""
    functions = [function for name, function in _functions(module) if name == function.name]
    for function in functions:
        if function.name == mutant.function:
            mutant.apply(list(ast.walk(function)))
    tree = ast.Module(body=[*ast.parse("from __future__ import annotations").body, *functions], type_ignores=[])
    changed = ModuleType(module.__name__)
    vars(changed).update(vars(module))
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), vars(changed))
    return changed


def _functions(module: ModuleType) -> list[tuple[str, ast.FunctionDef]]:
    """Return the functions that are mutated, by name: the module's own, and the launcher's methods."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    found = [(node.name, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for owner in tree.body if module in LAUNCHER else ():
        if isinstance(owner, ast.ClassDef):
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
            found += [(f"{owner.name}.{method.name}", method) for method in methods]
    return found


@contextlib.contextmanager
def planted(module: ModuleType, mutant: Mutant) -> Iterator[None]:
    """Have all who use a function of the module run the mutant in its place."""
    if not mutant.function:
        yield
        return
    definition = dict(_functions(module))[mutant.function]
    mutant.apply(list(ast.walk(definition)))
    definition.decorator_list = []
    tree = ast.Module(body=[*ast.parse("from __future__ import annotations").body, definition], type_ignores=[])
    names = dict(vars(module))
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), names)
    owner, _, name = mutant.function.rpartition(".")
    function: Any = vars(vars(module)[owner])[name] if owner else vars(module)[name]
    function = getattr(function, "fget", function)
    original, function.__code__ = function.__code__, names[definition.name].__code__
    try:
        yield
    finally:
        function.__code__ = original


def _changes(node: ast.AST, number: int) -> Iterator[tuple[str, Callable[[Nodes], None]]]:
    """Yield what can be changed at one node, the `number`-th of its function."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        for value in (True, False):
            yield f"{_words(node)} {_text(node.test)} -> {value}", partial(_force, number, value)
    if isinstance(node, ast.BoolOp):
        for place, operand in enumerate(node.values):
            yield f"without condition {_text(operand)}", partial(_drop_operand, number, place)
    if isinstance(node, ast.comprehension):
        for place, condition in enumerate(node.ifs):
            yield f"without filter {_text(condition)}", partial(_drop_filter, number, place)
    if isinstance(node, ast.Attribute) and node.attr in OTHER_RANK and ast.unparse(node.value) == "seat":
        other = OTHER_RANK[node.attr]
        yield f"{_text(node)} -> seat.{other} in line {node.lineno}:{node.col_offset}", partial(_rename, number, other)
    if _is_step(node):
        yield f"without {_text(node)}", partial(_drop_step, number)
    if isinstance(node, ast.Yield) and _text(node).startswith("(yield CompareSet("):
        yield f"overwrites: {_text(node)}", partial(_overwrite, number)
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        for place, element in enumerate(node.elts):
            if isinstance(element, ast.Call):
                yield f"without command {_text(element)}", partial(_drop_element, number, place)
    body = getattr(node, "body", None)
    if isinstance(body, list):
        for place, (first, second) in enumerate(pairwise(body)):
            if _has_step(first) and _has_step(second) and not isinstance(second, ast.Return):
                yield f"swapped: {_text(first)} / {_text(second)}", partial(_swap, number, place)


def _launcher_changes(node: ast.AST, number: int) -> Iterator[tuple[str, Callable[[Nodes], None]]]:
    """Yield what can be changed in a method as well, where a call that is made for its effect is a step. The order of
    steps is left alone: most of them are a wish to read something, and the next to read something else."""
    yield from (
        (change, apply)
        for change, apply in _changes(node, number)
        if not change.startswith(("swapped", "without command"))
    )
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"without {_text(node)}", partial(_drop_step, number)


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom)


def _has_step(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))


def _words(node: ast.AST) -> str:
    return "while" if isinstance(node, ast.While) else "if"


def _text(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def _force(number: int, value: bool, nodes: Nodes) -> None:
    nodes[number].test = ast.Constant(value)  # type: ignore[attr-defined]


def _rename(number: int, attribute: str, nodes: Nodes) -> None:
    nodes[number].attr = attribute  # type: ignore[attr-defined]


def _replace(number: int, statement: str, nodes: Nodes) -> None:
    (new,) = ast.parse(f"def function():\n    {statement}").body[0].body  # type: ignore[attr-defined]
    for parent in nodes:
        body = getattr(parent, "body", None)
        if isinstance(body, list) and nodes[number] in body:
            body[body.index(nodes[number])] = new


def _drop_operand(number: int, place: int, nodes: Nodes) -> None:
    node = nodes[number]
    assert isinstance(node, ast.BoolOp)
    node.values[place] = ast.Constant(isinstance(node.op, ast.And))


def _drop_filter(number: int, place: int, nodes: Nodes) -> None:
    nodes[number].ifs[place] = ast.Constant(True)  # type: ignore[attr-defined]


def _drop_step(number: int, nodes: Nodes) -> None:
    nodes[number].value = ast.Constant(None)  # type: ignore[attr-defined]


def _drop_element(number: int, place: int, nodes: Nodes) -> None:
    del nodes[number].elts[place]  # type: ignore[attr-defined]


def _swap(number: int, place: int, nodes: Nodes) -> None:
    body: list[ast.stmt] = nodes[number].body  # type: ignore[attr-defined]
    body[place], body[place + 1] = body[place + 1], body[place]


def _overwrite(number: int, nodes: Nodes) -> None:
    """`yield CompareSet(key, value)` becomes `(yield Set(key, value)) or value`."""
    node = nodes[number]
    assert isinstance(node, ast.Yield) and isinstance(node.value, ast.Call)
    plain = ast.Yield(ast.Call(ast.Name("Set", ast.Load()), node.value.args, []))
    new = ast.BoolOp(ast.Or(), [plain, copy.deepcopy(node.value.args[1])])
    for parent in nodes:
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, new)
            elif isinstance(value, list) and node in value:
                value[value.index(node)] = new


# -- killing them --------------------------------------------------------------------------------------------------

Trial = Callable[[ModuleType], object]

DRAWN, DRAWN_JOBS = 4000, 500
MEMORY = 8 << 30  # bytes of address space of one trial
LONG = ("test_drawn_schedules", "test_fault_before_any_operation")  # such schedules are trials of their own
KINDS: tuple[schedules.Kind, ...] = ("crash", "partition", "pause", "signal")
EVERYWHERE = [
    schedule
    for victim in VICTIMS
    for restarts in (0, 1)
    for schedule in everywhere(victim, ranks=3, rank=1, restarts=restarts, block=2)
] + [schedule for times in (1, 2, 99) for schedule in raised_everywhere(times, ranks=3, rank=1, restarts=1)]
LATE = late_returns(ranks=3, rank=1, limit=LIMITS[-1])


def trials_of(module: ModuleType, with_schedules: bool = True) -> Iterator[tuple[str, Trial]]:
    """Yield what a mutant has to pass, as (name, trial). with_schedules: those of the launcher, which take long.

    The protocol is proven by schedules and its own tests see to the rest; for the watch it is the other way round."""
    if module in LAUNCHER:
        for tests in LAUNCHER[module]:
            yield from ((name, partial(_ignore_module, test)) for name, test in _tests_without_fixtures(tests))
        if not with_schedules:
            return
        yield from (("", partial(_run_job, schedules.draw(seed))) for seed in range(60))
        for name, test in _tests_without_fixtures(test_launcher_simulation):
            yield name, partial(_ignore_module, test)
        some = chain(*map(partial(schedules.everywhere, node=1), KINDS))
        yield from (("", partial(_run_job, schedule)) for schedule in some)
        yield from (("", partial(_run_job, schedules.draw(seed))) for seed in range(60, DRAWN_JOBS))
    elif module is restart:
        yield from _tests_of(test_restart, "protocol")  # first: they take milliseconds
        yield from protocol_schedules()
    else:
        yield from _tests_of(test_watch, "watcher")
        yield from (("", partial(_run_watcher, draw(seed))) for seed in range(DRAWN))


def protocol_schedules() -> Iterator[tuple[str, Trial]]:
    """Yield the schedules that a mutant of the protocol has to pass. One of BY_HAND has to pass nothing else: it is in
    the list because schedules missed it, and a unit test that ends it would hide that they miss it again."""
    some = chain(map(draw, range(300)), LATE, EVERYWHERE)
    yield from (("", partial(_run_protocol, schedule)) for schedule in some)
    yield from (("", partial(_run_protocol, draw(seed))) for seed in range(300, DRAWN))


def _run_job(schedule: schedules.Schedule, _: ModuleType) -> object:
    return Job(schedule).run()


def _ignore_module(test: Callable[[], object], _: ModuleType) -> object:
    return test()


def _tests_without_fixtures(module: ModuleType) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, test in vars(module).items():
        if not name.startswith("test_") or name.startswith(LONG):
            continue
        for arguments in _parametrized(test):
            if arguments.keys() == inspect.signature(test).parameters.keys():
                yield name.removeprefix("test_").replace("_", " "), partial(test, **arguments)


def _parametrized(test: Callable[..., object]) -> Iterator[dict[str, Any]]:
    """Yield the arguments that a test is run with, but for its fixtures."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    choices = []
    for names, values, *_ in (mark.args for mark in marks):
        names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
        rows = (getattr(value, "values", value) if len(names) > 1 else (value,) for value in values)
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in product(*choices):
        yield {name: value for part in chosen for name, value in part.items()}


def _run_protocol(schedule: Schedule, mutant: ModuleType) -> object:
    return Cluster(schedule, protocol=mutant).run()


def _run_watcher(schedule: Schedule, mutant: ModuleType) -> object:
    return Cluster(schedule, watcher=mutant).run()


def _tests_of(module: ModuleType, argument: str) -> Iterator[tuple[str, Trial]]:
    for name, test in vars(module).items():
        if name.startswith("test_") and list(inspect.signature(test).parameters) == [argument]:
            yield name.removeprefix("test_").replace("_", " "), test


def killer_of(name: str, mutant: Mutant, with_schedules: bool = True) -> tuple[str, int] | None:
    """Return what first fails with the mutant and after how many trials, None if it survives. name: the module's."""
    module = sys.modules[name]
    if module in LAUNCHER:
        with planted(module, mutant):
            return _killer_of(trials_of(module, with_schedules), module)
    is_by_hand = mutant.change.startswith(MADE_BY_HAND)
    return _killer_of(protocol_schedules() if is_by_hand else trials_of(module), mutated(module, mutant))


def _killer_of(trials: Iterator[tuple[str, Trial]], changed: ModuleType) -> tuple[str, int] | None:
    for number, (what, trial) in enumerate(trials, 1):
        try:
            trial(changed)
        except (Exception, pytest.fail.Exception) as error:  # a mutant may break anything
            return getattr(error, "invariant", what or type(error).__name__), number
    return None


def _limit_memory() -> None:
    """Let a mutant that fills a list without end fail, before it takes the host's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def killers(module: ModuleType, mutants: Sequence[Mutant], with_schedules: bool) -> Iterator[tuple[str, int] | None]:
    """Yield `killer_of` for each mutant, in order. Each processor runs one at a time, in a process of its own."""
    trial = partial(killer_of, module.__name__, with_schedules=with_schedules)
    with ProcessPoolExecutor(mp_context=get_context("fork"), initializer=_limit_memory) as pool:
        yield from pool.map(trial, mutants)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    modules = {module.__name__.rpartition(".")[2]: module for module in (restart, watch, *LAUNCHER)}
    parser.add_argument("--module", choices=tuple(modules), help="mutate this one only")
    parser.add_argument("--function", help="mutate this function only")
    parser.add_argument("--launcher", action="store_true", help="mutate the modules of the launcher's protocol instead")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    survivors = count = 0
    for name, module in modules.items():
        is_short = options.module is None and not options.launcher and module in LAUNCHER
        if options.module is None and options.launcher and module not in LAUNCHER:
            continue
        if options.module not in (None, name):
            continue
        broken = killer_of(module.__name__, ORIGINAL, not is_short)
        if broken is not None:
            print(
                f"{module.__name__} itself breaks {broken[0]!r} in trial {broken[1]}: its mutants would prove nothing"
            )
            return 2
        print(f"\n{module.__name__}\n{'line':>5}  {'killed by':<36} {'after':>5}  mutant")
        mutants = [mutant for mutant in mutants_of(module) if options.function in (None, mutant.function)]
        count += len(mutants)
        for mutant, killer in zip(mutants, killers(module, mutants, not is_short), strict=True):
            reason = EQUIVALENT.get((mutant.function, mutant.change))
            survivors += (killer is None) != (reason is not None)
            what, after = killer or ("SURVIVES" if reason is None else "nothing: equivalent", "")
            print(f"{mutant.line:>5}  {what:<36} {after:>5}  {mutant.function}: {mutant.change}", flush=True)
            if reason is not None:
                print(f"{'':>50}{'' if killer is None else 'although EQUIVALENT says: '}{reason}")
    print(f"\n{count} mutants, {survivors} survive; {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
