"""Every command that reads a run, in every form of its output, on runs of which one to three files are damaged."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import shlex
from collections.abc import Callable
from pathlib import Path

from resilience.cli import WRONG_USE, main
from resilience.run_folder.query import VIEWS
from resilience.system import timeouts_file
from tests.fuzz import corpus
from tests.fuzz.mutating import mutated
from tests.fuzz.target import RefusedError, Target

COMMANDS: dict[str, float] = {  # and weights
    "report {run}": 1,
    "report {run} --json": 0.5,
    "report {run} --html {out}": 0.5,
    "report {run} --incident 1": 0.5,
    "report {run} --incident 1 --json": 0.3,
    "status {run}": 1,
    "status {run} --all": 0.5,
    "status {run} --json": 0.5,
    "incidents {runs}": 0.5,
    "incidents {run} {other} --all": 0.3,
    "incidents {runs} --json": 0.3,
    "logs {run}": 0.5,
    "logs {run} --no-fold --rank 0-1": 0.3,
    "logs {run} --json": 0.5,
    "logs {run} --json --fold": 0.3,
    "logs {run} --columns time,who,loss,text --iteration 0": 0.3,
    "logs {run} --level error --around 1": 0.5,
    "logs {run} --event 'rank.*' --cycle 0 --since 10m": 0.3,
    "logs {run} --grep [a-z]+": 0.3,
    "logs {run} --diff {other}": 0.3,
    "logs {run} --sql 'SELECT * FROM {view}'": 0.3,
    "logs {run} --sql 'SELECT * FROM {view}' --json": 0.2,
    "trace {run}": 0.3,
    "trace {run} --incident 1 --output {out}": 0.3,
    "trace {run} --json": 0.5,
    "trace {run} --format text -o {out}": 0.3,
    "trace {run} --format perfetto --output {out}": 0.5,
    "trace {run} --format otlp-json": 0.5,
    "calibrate {run}": 0.3,
    "calibrate {run} --json --section data --ranks 64 --horizon 12h": 0.3,
    "calibrate {run} --format nvrx --target-false-alarms 1": 0.2,
    "calibrate {run} --format torchelastic --min-timeout 2s --max-timeout 1h": 0.2,
    "calibrate {run} {other} --plot {out}": 0.2,
    "calibrate {run} --pool --out {limits}": 0.3,
    "calibrate {timings} {table}": 0.2,
    "calibrate {run} {other} --backtest": 0.2,
    "calibrate {run} {other} --backtest --n 30,40 --json": 0.2,
    "calibrate diff {limits} {old}": 0.2,
    "calibrate diff {limits} {old} --json": 0.2,
}
READ = {  # what commands read of a run; damage elsewhere would not be noticed
    "report": ("records", "timings", "job.json", "logs", "output"),
    "status": ("records", "timings"),
    "incidents": ("records", "timings", "job.json"),
    "logs": ("records", "logs", "output"),
    "logs --sql": ("records", "logs", "output", "timings"),
    "trace": ("records", "job.json"),
    "calibrate": ("records", "timings"),
    "calibrate diff": (),
}
WITHOUT_END = {  # options that are left out: the command ends only with the job, which a damaged run may hide
    "logs": ("--follow", "-f"),
    "status": ("--watch",),
}
NO_READERS = ("run", "demo", "dashboards", "completion")  # commands that read no run


class Runs:
    """Two runs, and files beside them that commands read: limits, and a table of durations."""

    def __init__(self, folder: Path) -> None:
        self.all = folder / "runs"
        self.wrapped = corpus.run_folder(self.all / "wrapped", is_launched=False)
        self.launched = corpus.run_folder(self.all / "launched", is_launched=True)
        self.out = folder / "out"
        self.limits, self.old = folder / timeouts_file.NAME, folder / "old.yaml"
        for path in (self.limits, self.old):
            timeouts_file.write(path, corpus.timeouts())
        self.table = folder / "table.csv.gz"
        self.table.write_bytes(gzip.compress(corpus.table()))
        self._whole = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    def read_by(self, command: str, run: Path) -> list[Path]:
        """Return the files that a command reads: those of the run, and those beside it as often as these together."""
        form = max((form for form in READ if set(form.split()) <= set(command.split())), key=len)
        of_run = [path for path in self._whole if run in path.parents and path.relative_to(run).parts[0] in READ[form]]
        names = {"{limits}": self.limits, "{old}": self.old, "{table}": self.table}
        beside = [path for name, path in names.items() if name in command]
        return of_run + beside * max(1, len(of_run))

    def damage(self, path: Path, chance: random.Random) -> None:
        path.write_bytes(mutated(self._whole[path], chance, [self._whole[path]]))

    def repair(self, *paths: Path) -> None:
        """Make files as they were."""
        for path in paths:
            path.write_bytes(self._whole[path])

    def arguments(self, command: str, run: Path, view: str) -> list[str]:
        """Return the arguments of a command that reads this run. view: of an SQL query."""
        other = self.launched if run == self.wrapped else self.wrapped
        timings = min((run / "timings").glob("*.hist"))
        names = {"run": run, "other": other, "runs": self.all, "out": self.out, "timings": timings, "view": view}
        return shlex.split(command.format(**names, limits=self.limits, old=self.old, table=self.table))


def command_targets(folder: Path) -> list[Target]:
    """Return a target for each command. folder: an empty one."""
    runs = Runs(folder / "commands")

    def feed(command: str) -> Callable[[bytes, random.Random], None]:
        def damaged(_: bytes, chance: random.Random) -> None:
            run = chance.choice((runs.wrapped, runs.launched))
            readable = runs.read_by(command, run)
            paths = dict.fromkeys(chance.sample(readable, min(len(readable), chance.choice((1, 1, 2, 3)))))
            try:
                for path in paths:
                    runs.damage(path, chance)
                called(runs.arguments(command, run, chance.choice(list(VIEWS))))
            finally:
                runs.repair(*paths, runs.limits)  # calibrate writes the limits

        return damaged

    return [Target(name(command), weight, (), feed(command), (RefusedError,)) for command, weight in COMMANDS.items()]


def name(command: str) -> str:
    """Return the name of a command's target."""
    return "resilience " + command.replace("{", "").replace("}", "").replace("'", "")


def called(arguments: list[str]) -> int:
    """Run a command in this process; return its status. What it prints goes nowhere, but has to be encodable.

    Raises: RefusedError, if it names what is wrong; AssertionError for any other end."""
    errors = io.StringIO()
    with open("/dev/null", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(errors):
            try:
                status = main(arguments)
            except SystemExit as error:
                raise AssertionError(f"{arguments} is no command: {errors.getvalue()}") from error
    assert status in range(5), f"{arguments} ended with {status}"
    if status == WRONG_USE:
        assert f"resilience {arguments[0]}: " in errors.getvalue(), f"{arguments} did not say why it ended with 2"
        raise RefusedError(errors.getvalue())
    return status
