"""What did a round come to?  Lost ranks, restarts and leaks, from the strikes, the account and the ranks' own looks.

A healthy rank is one that no fault has struck which may end it. A restart counts from the moment at which the first
monitor or rank detected the interruption until the last rank has entered the function again. A restart took the abort
ladder if a monitor had to signal a rank, or the watcher gave its rank up (`abort.stuck`).

Growth is judged against torch's own (`tests.soak.rebuilding`), which is measured for each size of the world."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec

from resilience.facts import events
from resilience.facts.records import Record

UNINTERRUPTIBLE = "hang that cannot be interrupted"
CLASSES = {  # of a restart, by the kind of the fault that it came from
    "hang": "hang that can be interrupted",
    "stop": UNINTERRUPTIBLE,
    "hang_with_gil": UNINTERRUPTIBLE,
    "exception": "exception",
    "base_exception": "end of a rank",
    "monitor": "other",
}


HELD = ("descriptors", "threads", "processes", "anonymous_kib")
ALLOWED = {  # growth for one restart beyond torch's own, as a mean over all ranks
    "descriptors": 0.05,
    "threads": 0.02,
    "processes": 0.0,
    "anonymous_kib": 100.0,  # about what an iteration of the job holds in models and buffers
}


class Restart(msgspec.Struct):
    """One restart of one round. cause: the class of the fault before it. ladder: initial ranks that took it."""

    round: int
    iteration: int
    cause: str
    seconds: float | None
    ladder: list[int]
    ladder_healthy: list[int]


class Leak(msgspec.Struct):
    """What a rank held more after its last restart than at the same size of the world before."""

    round: int
    rank: int
    world: int
    restarts: int
    descriptors: int
    threads: int
    processes: int
    anonymous_kib: int


class RoundResult(msgspec.Struct):
    """What one round came to. failed: why it does not count as ended in good order, empty if it does."""

    number: int
    ranks: int
    loaded: bool
    seconds: float
    strikes: list[dict[str, Any]]
    ended_ranks: int
    lost_healthy: list[str]
    restarts: list[Restart]
    leaks: list[Leak]
    failed: str = ""


def strikes_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "strikes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def may_end(strikes: list[dict[str, Any]]) -> set[int]:
    """Return the ranks that were struck by a fault that may end them."""
    return {strike["rank"] for strike in strikes if strike["is_ending"] and strike["how"] == "struck"}


def restarts_of(number: int, records: list[Record], strikes: list[dict[str, Any]]) -> list[Restart]:
    """Return the restarts that the account of a round tells, in order."""
    members: dict[int | None, set[int | None]] = defaultdict(set)
    for record in records:
        if isinstance(record.event, events.IterationStarted):
            members[record.origin.iteration].add(record.origin.initial_rank)
    detected: dict[int, int] = {}
    entered: dict[int, int] = {}
    ladder: dict[int, set[int]] = defaultdict(set)
    for record in records:
        iteration, rank, event = record.origin.iteration, record.origin.initial_rank, record.event
        if iteration is None or rank is None:
            continue
        if isinstance(event, events.RankInterrupted):
            # A rank that has left before may still be represented: that interrupts nobody.
            is_member = event.record.rank in members[iteration]
            if is_member and event.record.interruption.value != "monitor_process_exception":
                detected[iteration] = min(detected.get(iteration, record.mono_ns), record.mono_ns)
        elif isinstance(event, events.IterationDecided):
            detected[iteration] = min(detected.get(iteration, record.mono_ns), record.mono_ns)
        elif isinstance(event, events.StageStarted) and event.stage == "run":
            entered[iteration] = max(entered.get(iteration, record.mono_ns), record.mono_ns)
        elif isinstance(event, (events.AbortStuck, events.RankSignalled)):
            ladder[iteration].add(rank)
    restarts = []
    ending = may_end(strikes)
    for iteration, at in sorted(detected.items()):
        following = min((entry for later, entry in entered.items() if later > iteration), default=None)
        restarts.append(
            Restart(
                round=number,
                iteration=iteration,
                cause=cause_of(strikes, at, following),
                seconds=None if following is None else (following - at) / 1e9,
                ladder=sorted(ladder[iteration]),
                ladder_healthy=sorted(ladder[iteration] - ending),
            )
        )
    return restarts


def cause_of(strikes: list[dict[str, Any]], detected: int, entered: int | None) -> str:
    """Return the class of the last fault before a restart, or of a worse one during it: a rank that cannot be
    interrupted has to be killed. All times in nanoseconds of one clock."""
    kinds = [strike["kind"] for strike in strikes if strike["mono_ns"] <= detected][-1:]
    if entered is not None:
        during = [strike["kind"] for strike in strikes if detected < strike["mono_ns"] <= entered]
        kinds = [kind for kind in during if CLASSES.get(kind) == UNINTERRUPTIBLE] or kinds
    return CLASSES.get(kinds[0], "end of a rank") if kinds else "no fault"


def leaks_of(number: int, rank: int, looks: list[dict[str, Any]]) -> Leak | None:
    """Compare a rank's last look with the second one at the same size of the world. Earlier looks than the first
    checkpoint do not count: until then the process still does things for the first time."""
    alike = [look for look in looks if look["is_warm"] and look["world"] == looks[-1]["world"]]
    if len(alike) < 3:
        return None
    first, last = alike[1], alike[-1]
    return Leak(
        round=number,
        rank=rank,
        world=last["world"],
        restarts=last["iteration"] - first["iteration"],
        **{name: last[name] - first[name] for name in HELD},
    )


# -- all rounds --------------------------------------------------------------------------------------------------------


def summary(rounds: list[RoundResult], torchs: list[Leak]) -> dict[str, Any]:
    """Return the figures of a soak. torchs: the growth of ranks without this package."""
    restarts = [restart for each in rounds for restart in each.restarts]
    growth = growth_of([leak for each in rounds for leak in each.leaks])
    torchs_growth = growth_of(torchs)
    return {
        "rounds": len(rounds),
        "rounds_failed": [f"round {each.number}: {each.failed}" for each in rounds if each.failed],
        "seconds": sum(each.seconds for each in rounds),
        "faults": dict(Counter(_name(strike) for each in rounds for strike in each.strikes).most_common()),
        "ranks": sum(each.ranks for each in rounds),
        "ranks_ended": sum(each.ended_ranks for each in rounds),
        "healthy_ranks_lost": [lost for each in rounds for lost in each.lost_healthy],
        "restarts": len(restarts),
        "restarts_with_ladder": sum(bool(restart.ladder) for restart in restarts),
        "restarts_with_ladder_on_healthy_ranks": sum(bool(restart.ladder_healthy) for restart in restarts),
        "restart_s": {
            "quiet": _spread([r for each in rounds if not each.loaded for r in each.restarts]),
            "loaded": _spread([r for each in rounds if each.loaded for r in each.restarts]),
        },
        "slowest_restart": _slowest(restarts),
        "growth": growth,
        "growth_of_torch_alone": torchs_growth,
        "leaks": leaking(growth, torchs_growth),
    }


def growth_of(leaks: list[Leak]) -> dict[str, float]:
    """Return how many ranks and restarts were looked at, and the growth for one restart."""
    restarts = sum(leak.restarts for leak in leaks)
    growth: dict[str, float] = {"ranks": len(leaks), "restarts": restarts}
    return growth | {name: sum(getattr(leak, name) for leak in leaks) / max(1, restarts) for name in HELD}


def leaking(growth: dict[str, float], torchs: dict[str, float]) -> list[str]:
    """Return what grows by more than is allowed, in words."""
    return [
        f"{name}: {growth[name]:.3f} for one restart, allowed {torchs[name] + ALLOWED[name]:.3f}"
        for name in HELD
        if growth[name] > torchs[name] + ALLOWED[name]
    ]


def _slowest(restarts: list[Restart]) -> dict[str, Any]:
    """Return the slowest restart, empty if there was none."""
    timed = [restart for restart in restarts if restart.seconds is not None]
    return msgspec.to_builtins(max(timed, key=lambda restart: restart.seconds or 0.0)) if timed else {}


def _name(strike: dict[str, Any]) -> str:
    if strike["how"] == "skipped":
        return "skipped"
    where = {"building": " while groups are built", "restart": " during a restart", "beside": ""}
    return f"{strike['kind']}{where.get(strike['where'], ' in ' + strike['where'])}".replace(" in anywhere", "")


def _spread(restarts: list[Restart]) -> dict[str, Any]:
    by_cause: dict[str, list[float]] = defaultdict(list)
    for restart in restarts:
        if restart.seconds is not None:
            by_cause[restart.cause].append(restart.seconds)
    return {
        cause: {"count": len(took), "median": statistics.median(took), "slowest": max(took)}
        for cause, took in sorted(by_cause.items())
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [
        f"{figures['rounds']} rounds in {figures['seconds'] / 60:.1f} min, {len(figures['rounds_failed'])} failed",
        f"{figures['ranks']} ranks, {figures['ranks_ended']} ended by a fault",
        f"healthy ranks lost: {len(figures['healthy_ranks_lost'])}",
        *(f"  {lost}" for lost in (*figures["healthy_ranks_lost"], *figures["rounds_failed"])),
        f"restarts: {figures['restarts']}, of which {figures['restarts_with_ladder']} took the abort ladder, "
        f"{figures['restarts_with_ladder_on_healthy_ranks']} of these on a healthy rank",
        "",
        f"{'seconds until all ranks run again':<44}{'count':>7}{'median':>9}{'slowest':>9}",
    ]
    for load, causes in figures["restart_s"].items():
        for cause, took in causes.items():
            lines.append(f"  {load + ', ' + cause:<42}{took['count']:>7}{took['median']:>9.3f}{took['slowest']:>9.3f}")
    slowest = figures["slowest_restart"]
    if slowest:
        lines += [
            "",
            f"slowest restart: {slowest['seconds']:.1f} s, round {slowest['round']}, iteration {slowest['iteration']}, "
            f"after {slowest['cause']}",
        ]
    lines += ["", f"leaks: {len(figures['leaks'])}", *(f"  {leak}" for leak in figures["leaks"])]
    for what, growth in (("ranks", figures["growth"]), ("ranks of torch alone", figures["growth_of_torch_alone"])):
        lines.append(
            f"growth for one restart, {growth['ranks']} {what}, {growth['restarts']} restarts: "
            f"{growth['descriptors']:.3f} descriptors, {growth['threads']:.3f} threads, "
            f"{growth['processes']:.3f} processes, {growth['anonymous_kib']:.1f} KiB of anonymous memory"
        )
    lines += [
        "",
        "faults:",
        *(f"  {count:>5}  {name}" for name, count in figures["faults"].items()),
    ]
    return "\n".join(lines)
