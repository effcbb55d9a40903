"""The two runs of the demonstration, and the checks on their results.

One run has spares, planned faults and the wrapper; the other is undisturbed and has none of them. Shows both, prints
the incidents from the records of the first, and states each check with its result."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from torch import Tensor

from resilience.attribution.incident import Incident
from resilience.demo.faults import DemoFault, Kind
from resilience.demo.ranks import DemoPlan, Team
from resilience.demo.screen import DemoScreen, DemoView, FaultProgress, fault_line, name_of, picture, progress
from resilience.demo.train import Task, Trained, Transformer, load_text
from resilience.facts.in_words import count, seconds
from resilience.report.condensed import report
from resilience.report.terminal import incident_lines
from resilience.run_folder.load import load
from resilience.system.render import width_of_terminal

FRAME = 0.1  # seconds between two reads of the board
KIND_ON_RECORD: dict[Kind, str] = {"exception": "exception", "kill": "terminated", "hang": "soft_timeout"}
LINE_EVERY = 5.0  # seconds, at most, between two lines of output that cannot be redrawn
STALLED = 60.0  # seconds without any change until a run is stopped


class Demonstration:
    """Runs both trainings and checks their results."""

    def __init__(
        self,
        screen: DemoScreen,
        ranks: int,
        steps: int,
        faults: tuple[DemoFault, ...],
        seed: int,
        run_dir: Path,
        job_id: str,
    ) -> None:
        self._screen = screen
        self._ranks = ranks
        self._steps = steps
        self._faults = faults
        self._seed = seed
        self._run_dir = run_dir
        self._job_id = job_id
        self._folder = run_dir / job_id
        self._has_passed = True

    def run(self) -> bool:
        """Show both runs. Return True if all checks passed."""
        corpus = load_text()
        kills = sum(fault.kind == "kill" for fault in self._faults)
        disturbed = self._plan("disturbed", spares=max(1, kills), faults=self._faults, wrapped=True)
        undisturbed = self._plan("undisturbed", spares=0, faults=(), wrapped=False)
        self._introduce(disturbed, len(corpus))
        view, results = self._train(disturbed, corpus)
        incidents = self._show_incidents()
        self._screen.say(("The same training without faults and without the wrapper", "bold"))
        self._screen.say()
        _, reference = self._train(undisturbed, corpus)
        self._check_results(view, incidents, results, reference)
        return self._has_passed

    def _plan(self, name: str, spares: int, faults: tuple[DemoFault, ...], wrapped: bool) -> DemoPlan:
        folder = self._folder / "demo" / name
        return DemoPlan(
            ranks=self._ranks,
            spares=spares,
            task=Task(self._steps, self._seed, str(folder / "checkpoints")),
            faults=faults,
            folder=str(folder),
            run_dir=str(self._run_dir),
            job_id=self._job_id,
            wrapped=wrapped,
        )

    def _introduce(self, plan: DemoPlan, characters: int) -> None:
        parameters = sum(parameter.numel() for parameter in Transformer().parameters())
        spares = count(plan.spares, "spare")
        say = self._screen.say
        say((f"{count(plan.ranks, 'rank')} and {spares} train a transformer of {parameters:,} parameters", "bold"))
        every = count(plan.task.every, "step")
        say(f"on {characters / 1e6:.1f} MB of Python's own sources, with a checkpoint every {every}.")
        planned = ", ".join(f"{name_of(fault)} at step {fault.step}" for fault in plan.faults)
        say(f"Planned faults: {planned or 'none'}.")
        say()

    # -- watching -------------------------------------------------------------------------------

    def _train(self, plan: DemoPlan, text: Tensor) -> tuple[DemoView, dict[int, Trained]]:
        """Run a plan to its end while showing it."""
        with Team(plan, text) as team:
            view = self._watch(team)
        self._screen.say()
        self._check_end(team, view)
        return view, team.results()

    def _watch(self, team: Team) -> DemoView:
        changed_at = time.monotonic()
        reporter = LineReporter(self._screen)
        previous_view: DemoView | None = None
        while True:
            is_over = team.reap()
            view = _look(team)
            if view != previous_view:
                changed_at = time.monotonic()
                if self._screen.is_live:
                    self._screen.show(picture(view))
                else:
                    reporter.report(view)
            previous_view = view
            if is_over:
                return view
            if time.monotonic() - changed_at > STALLED:
                self._check(False, f"no rank made progress for {STALLED:.0f} s; the run was stopped")
                return view
            time.sleep(FRAME)

    def _check_end(self, team: Team, view: DemoView) -> None:
        """Show the last output of each process that did not end as planned."""
        killed = {h.strike.process for h in view.fault_progress if h.strike is not None and h.fault.kind == "kill"}
        for process, code in sorted(view.ended.items()):
            expected = -signal.SIGKILL if process in killed else 0
            if code != expected:
                self._check(False, f"process {process} ended with {code}, expected {expected}; its last output:")
                output = team.output_of(process)
                for line in output.read_text(errors="backslashreplace").splitlines()[-12:] if output.is_file() else ():
                    self._screen.say((f"    {line}", "dim"))
        if team.left_behind:
            self._check(
                False, f"{count(team.left_behind, 'process', 'processes')} still ran 10 s after the ranks had ended"
            )

    # -- judging --------------------------------------------------------------------------------

    def _show_incidents(self) -> tuple[Incident, ...]:
        """Show the incidents that the run recorded, one for each restart."""
        incidents = report(load(self._folder)).incidents
        say = self._screen.say
        say(("Incidents that the run recorded", "bold"))
        say()
        for incident in incidents:
            for line in incident_lines(incident, width_of_terminal()):
                say(*line)
            say()
        return incidents

    def _check_results(
        self,
        view: DemoView,
        incidents: tuple[Incident, ...],
        results: dict[int, Trained],
        reference: dict[int, Trained],
    ) -> None:
        say = self._screen.say
        say(("Checks", "bold"))
        say()
        recovered = [fault_progress.recovered_after for fault_progress in view.fault_progress]
        times = [seconds(recovery_s) for recovery_s in recovered if recovery_s is not None]
        if view.fault_progress:
            recoveries = f"recovered from {len(times)} of {count(len(recovered), 'fault')}"
            self._check(
                len(times) == len(recovered), f"{recoveries}, after {', '.join(times)}" if times else recoveries
            )
            named = sum(_is_named(fault_progress, incidents) for fault_progress in view.fault_progress)
            self._check(
                named == len(recovered),
                f"{named} of {count(len(recovered), 'fault')} identified by the report: right kind, right process",
            )
        if len(incidents) > len(recovered):
            say(f"        {count(len(incidents), 'incident')}: more than the planned faults")
        self._check(len(results) == self._ranks, f"{len(results)} of {count(self._ranks, 'rank')} trained to the end")
        digests = {trained.digest for trained in results.values()}
        expected = {trained.digest for trained in reference.values()}
        is_equal = len(digests) == len(expected) == 1 and digests == expected
        self._check(is_equal, "parameters are equal bit for bit to those of the undisturbed run")
        for name, run_digests, runs in (("disturbed", digests, results), ("undisturbed", expected, reference)):
            losses = sorted({trained.loss for trained in runs.values()})
            loss = ", ".join(f"{value:.6f}" for value in losses) or "-"
            digest = ", ".join(sorted(digest[:16] for digest in run_digests)) or "-"
            say((f"        {name:11}  loss {loss}   SHA-256 {digest}…", "dim"))

    def _check(self, held: bool, claim: str) -> None:
        self._has_passed &= held
        self._screen.say(("  ok    " if held else "  FAILED", "green" if held else "bold red"), f"  {claim}")


def _is_named(fault_progress: FaultProgress, incidents: tuple[Incident, ...]) -> bool:
    """Return True if an incident has the right kind for this fault and blames the process that it hit."""
    strike = fault_progress.strike
    return strike is not None and any(
        incident.iteration == strike.iteration
        and incident.kind == KIND_ON_RECORD[fault_progress.fault.kind]
        and incident.verdict.first == strike.process
        for incident in incidents
    )


def _look(team: Team) -> DemoView:
    return DemoView(
        rows=tuple(team.board.row(process) for process in range(team.size)),
        pids=tuple(team.pids),
        ended=dict(team.ended),
        fault_progress=tuple(
            FaultProgress(fault, team.board.struck(number), tuple(team.board.returns(number)), team.plan.ranks)
            for number, fault in enumerate(team.plan.faults)
        ),
        ranks=team.plan.ranks,
        steps=team.plan.task.steps,
    )


class LineReporter:
    """Reports a run line by line on output that cannot be redrawn: every tenth of the steps, every LINE_EVERY seconds
    at the latest, and each fault and recovery."""

    def __init__(self, screen: DemoScreen) -> None:
        self._screen = screen
        self._reported: set[tuple[DemoFault, bool]] = set()
        self._tenth = -1
        self._last_line_at = time.monotonic()

    def report(self, view: DemoView) -> None:
        for fault_progress in view.fault_progress:
            stage = (fault_progress.fault, fault_progress.recovered_after is not None)
            if fault_progress.strike is not None and stage not in self._reported:
                self._reported.add(stage)
                self._screen.say(*fault_line(fault_progress))
        tenth = view.step * 10 // view.steps
        now = time.monotonic()
        if tenth > self._tenth or now - self._last_line_at > LINE_EVERY:
            self._tenth, self._last_line_at = tenth, now
            self._screen.say(progress(view))
