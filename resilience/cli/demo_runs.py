"""The two runs of the demonstration, and what is made of them.

One with spares, planned faults and the wrapper, one undisturbed and without it. Shows both, tells the
incidents from the account that the first left, and judges: each claim is stated and whether it held."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from torch import Tensor

from resilience.analysis.load import load
from resilience.analysis.report import report
from resilience.attribution.incident import Incident
from resilience.cli.demo_faults import Fault, Kind
from resilience.cli.demo_ranks import Plan, Team
from resilience.cli.demo_screen import Happened, Screen, View, happened_line, name_of, picture, progress
from resilience.cli.demo_train import Task, Trained, Transformer, load_text
from resilience.cli.render import count, seconds, width_of_terminal
from resilience.cli.report import incident_lines

FRAME = 0.1  # seconds from one look at the ranks to the next
KIND_ON_RECORD: dict[Kind, str] = {"exception": "exception", "kill": "terminated", "hang": "soft_timeout"}
LINE_EVERY = 5.0  # seconds from one line to the next at the latest, where nothing can be redrawn
STALLED = 60.0  # seconds without any change after which a run is given up


class Demonstration:
    """Both runs and what is made of them."""

    def __init__(
        self, screen: Screen, ranks: int, steps: int, faults: tuple[Fault, ...], seed: int, run_dir: Path, job_id: str
    ) -> None:
        self._screen = screen
        self._ranks = ranks
        self._steps = steps
        self._faults = faults
        self._seed = seed
        self._run_dir = run_dir
        self._job_id = job_id
        self._folder = run_dir / job_id
        self._has_held = True

    def run(self) -> bool:
        """Show everything; answers whether all of it held."""
        text = load_text()
        kills = sum(fault.kind == "kill" for fault in self._faults)
        disturbed = self._plan("disturbed", spares=max(1, kills), faults=self._faults, wrapped=True)
        undisturbed = self._plan("undisturbed", spares=0, faults=(), wrapped=False)
        self._introduce(disturbed, len(text))
        view, results = self._train(disturbed, text)
        incidents = self._tell_incidents()
        self._screen.say(("The same again, without faults and without the wrapper", "bold"))
        self._screen.say()
        _, reference = self._train(undisturbed, text)
        self._judge(view, incidents, results, reference)
        return self._has_held

    def _plan(self, name: str, spares: int, faults: tuple[Fault, ...], wrapped: bool) -> Plan:
        folder = self._folder / "demo" / name
        return Plan(
            ranks=self._ranks,
            spares=spares,
            task=Task(self._steps, self._seed, str(folder / "checkpoints")),
            faults=faults,
            folder=str(folder),
            run_dir=str(self._run_dir),
            job_id=self._job_id,
            wrapped=wrapped,
        )

    def _introduce(self, plan: Plan, characters: int) -> None:
        parameters = sum(parameter.numel() for parameter in Transformer().parameters())
        spares = "1 spare" if plan.spares == 1 else f"{plan.spares} spares"
        say = self._screen.say
        say((f"{plan.ranks} ranks and {spares} train a transformer of {parameters:,} parameters", "bold"))
        say(f"on {characters / 1e6:.1f} MB of Python's own sources, with a checkpoint every {plan.task.every} steps.")
        planned = ", ".join(f"{name_of(fault)} at step {fault.step}" for fault in plan.faults)
        say(f"Planned faults: {planned or 'none'}.")
        say()

    # -- watching -------------------------------------------------------------------------------

    def _train(self, plan: Plan, text: Tensor) -> tuple[View, dict[int, Trained]]:
        """Run a plan to its end while showing it."""
        with Team(plan, text) as team:
            view = self._watch(team)
        self._screen.say()
        self._check_end(team, view)
        return view, team.results()

    def _watch(self, team: Team) -> View:
        changed_at = time.monotonic()
        teller = Teller(self._screen)
        before: View | None = None
        while True:
            is_over = team.reap()
            view = _look(team)
            if view != before:
                changed_at = time.monotonic()
                if self._screen.is_live:
                    self._screen.show(picture(view))
                else:
                    teller.tell(view)
            before = view
            if is_over:
                return view
            if time.monotonic() - changed_at > STALLED:
                self._hold(False, f"nothing moved for {STALLED:.0f} s; the run was ended")
                return view
            time.sleep(FRAME)

    def _check_end(self, team: Team, view: View) -> None:
        """Say of every process that ended otherwise than planned what it said last."""
        killed = {h.strike.process for h in view.happened if h.strike is not None and h.fault.kind == "kill"}
        for process, code in sorted(view.ended.items()):
            expected = -signal.SIGKILL if process in killed else 0
            if code != expected:
                self._hold(False, f"process {process} ended with {code}, expected {expected}; its last words:")
                output = team.output_of(process)
                for line in output.read_text(errors="backslashreplace").splitlines()[-12:] if output.is_file() else ():
                    self._screen.say((f"    {line}", "dim"))
        if team.left_behind:
            self._hold(False, f"{team.left_behind} processes were still there 10 s after the ranks had ended")

    # -- judging --------------------------------------------------------------------------------

    def _tell_incidents(self) -> tuple[Incident, ...]:
        """Show the account that the run left: one incident for each restart."""
        incidents = report(load(self._folder)).incidents
        say = self._screen.say
        say(("What the run's own account says", "bold"))
        say()
        for incident in incidents:
            for line in incident_lines(incident, width_of_terminal()):
                say(*line)
            say()
        return incidents

    def _judge(
        self,
        view: View,
        incidents: tuple[Incident, ...],
        results: dict[int, Trained],
        reference: dict[int, Trained],
    ) -> None:
        say = self._screen.say
        say(("What held", "bold"))
        say()
        recovered = [happened.recovered_after for happened in view.happened]
        times = [seconds(after) for after in recovered if after is not None]
        if view.happened:
            told = f"{len(times)} of {count(len(recovered), 'fault')} recovered from"
            self._hold(len(times) == len(recovered), f"{told}, after {', '.join(times)}" if times else told)
            named = sum(_is_named(happened, incidents) for happened in view.happened)
            self._hold(
                named == len(recovered),
                f"{named} of {count(len(recovered), 'fault')} found by the account: right kind, right process",
            )
        if len(incidents) > len(recovered):
            say(f"        {count(len(incidents), 'incident')}: more than the planned faults")
        self._hold(len(results) == self._ranks, f"{len(results)} of {self._ranks} ranks trained to the end")
        digests = {trained.digest for trained in results.values()}
        expected = {trained.digest for trained in reference.values()}
        is_equal = len(digests) == len(expected) == 1 and digests == expected
        self._hold(is_equal, "parameters equal bit for bit to those of the undisturbed run")
        for name, these, runs in (("disturbed", digests, results), ("undisturbed", expected, reference)):
            losses = sorted({trained.loss for trained in runs.values()})
            loss = ", ".join(f"{value:.6f}" for value in losses) or "-"
            digest = ", ".join(sorted(digest[:16] for digest in these)) or "-"
            say((f"        {name:11}  loss {loss}   SHA-256 {digest}…", "dim"))

    def _hold(self, held: bool, claim: str) -> None:
        self._has_held &= held
        self._screen.say(("  ok    " if held else "  FAILED", "green" if held else "bold red"), f"  {claim}")


def _is_named(happened: Happened, incidents: tuple[Incident, ...]) -> bool:
    """Whether the account has this fault as what it was, and blames the process that it struck."""
    strike = happened.strike
    return strike is not None and any(
        incident.iteration == strike.iteration
        and incident.kind == KIND_ON_RECORD[happened.fault.kind]
        and incident.verdict.first == strike.process
        for incident in incidents
    )


def _look(team: Team) -> View:
    return View(
        rows=tuple(team.board.row(process) for process in range(team.size)),
        pids=tuple(team.pids),
        ended=dict(team.ended),
        happened=tuple(
            Happened(fault, team.board.struck(number), tuple(team.board.returns(number)), team.plan.ranks)
            for number, fault in enumerate(team.plan.faults)
        ),
        ranks=team.plan.ranks,
        steps=team.plan.task.steps,
    )


class Teller:
    """Tells a run in lines, where nothing can be redrawn: each tenth of the way, at the latest every
    LINE_EVERY seconds, and what becomes of a fault."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._told: set[tuple[Fault, bool]] = set()
        self._tenth = -1
        self._told_at = time.monotonic()

    def tell(self, view: View) -> None:
        for happened in view.happened:
            chapter = (happened.fault, happened.recovered_after is not None)
            if happened.strike is not None and chapter not in self._told:
                self._told.add(chapter)
                self._screen.say(*happened_line(happened))
        tenth = view.step * 10 // view.steps
        now = time.monotonic()
        if tenth > self._tenth or now - self._told_at > LINE_EVERY:
            self._tenth, self._told_at = tenth, now
            self._screen.say(progress(view))
