"""Panels show the true numbers of jobs whose series come, go and stay in ways that are easily counted wrong."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with it; it needs Python 3.11")

from dashboards.generator.boards import BOARDS
from dashboards.generator.rules import GROUPS
from dashboards.generator.scenarios import by_two_targets

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt-get install prometheus")
VARIABLES = {"job": "j", "node": ".*", "__range": "6h", "__range_s": "21600"}
VARIABLES |= {"__rate_interval": "4m", "__rate_interval_ms": "240000", "__interval": "30s", "__interval_ms": "30000"}
J = 'job_id="j"'
INTERRUPTED = 'outcome="interrupted"'


class Shown(msgspec.Struct, frozen=True):
    """A panel at a minute. values: by the labels of the result."""

    panel: str
    at: int
    values: Mapping[str, float]
    query: int = 0


class Story(msgspec.Struct, frozen=True):
    """What happens to a job, with its series in promtool's notation, one value per minute."""

    name: str
    series: Mapping[str, str]
    shown: tuple[Shown, ...]


def of(metric: str, *matchers: str, node: str = "n0", job: str = "j") -> str:
    return f"{metric}{{{', '.join((f'job_id={chr(34)}{job}{chr(34)}', f'node={chr(34)}{node}{chr(34)}', *matchers))}}}"


BEGAN = "resilience_start_timestamp_seconds"
PRODUCTIVE = "resilience_productive_seconds_total"
ENDED_ITERATIONS = "resilience_restart_iterations_total"
ACTIVE = ("resilience_ranks", 'state="active"')
SAMPLES = "resilience_section_duration_seconds_count"

LOST = ("resilience_lost_seconds_total", 'cause="restart"')

OUTCOME = "resilience_ended_timestamp_seconds"
BARS = "restarts: Iterations and cycles by outcome"
CYCLES = (ENDED_ITERATIONS, 'layer="launcher"', INTERRUPTED)


def taken_over(series: str, *values: str) -> dict[str, str]:
    """Return a series as one exporter after the other shows it."""
    return {f'{series[:-1]}, instance="n0:{9400 + number}"}}': each for number, each in enumerate(values)}


STORIES = (
    *(
        Story(
            f"a job that was restarted once has completed, and its file for node-exporter stays; it began {when}",
            {
                of(BEGAN): f"{began}x60 stale",
                of(OUTCOME, 'outcome="completed"'): "_x60 3600x800",
                of(PRODUCTIVE): "0x1 480+480x58 28320x800",
                of(*LOST): "_x30 900x800",
                of(*CYCLES): "_x30 1x800",
            },
            (
                *(Shown("overview: Restarts", at, {"": 1}) for at in (55, 80, 95, 200, 340)),
                *(Shown("fleet: Most restarts", at, {J: 1}) for at in (55, 95, 340)),
                *(Shown("overview: Goodput", at, {"": 0.969}) for at in (80, 200, 340)),
                Shown("fleet: Most lost time", 200, {J: 900}),
            ),
        )
        for when, began in (("within the range", 0), ("long before Prometheus", -36_000))
    ),
    Story(
        "another exporter has taken over, and the job restarts once a minute",
        {
            **taken_over(of(*ACTIVE), "8x180 stale", "_x180 8x180"),
            **taken_over(of(BEGAN), "-36000x180 stale", "_x180 -36000x180"),
            **taken_over(of(PRODUCTIVE), "0+480x180 stale", "_x180 86400+480x180"),
            **taken_over(of(*CYCLES), "0+1x180 stale", "_x180 180+1x180"),
        },
        (Shown("overview: Time between restarts", 359, {"": 60}), Shown("overview: Restarts", 359, {"": 359})),
    ),
    Story(
        "a node was replaced by another one, and the job restarts once a minute",
        {
            of(*ACTIVE): "8x400",
            of(*ACTIVE, node="n1"): "8x180 stale",
            of(*ACTIVE, node="n2"): "_x181 8x200",
            of(BEGAN): "0x400",
            of(BEGAN, node="n1"): "0x180 stale",
            of(BEGAN, node="n2"): "_x181 10860x200",
            of(PRODUCTIVE): "0+480x400",
            of(PRODUCTIVE, node="n1"): "0+480x180 stale",
            of(PRODUCTIVE, node="n2"): "_x181 480+480x200",
            of(*CYCLES): "0+1x400",
        },
        (Shown("overview: Time between restarts", 359, {"": 60}), Shown("overview: Active ranks", 359, {"": 16})),
    ),
    Story(
        "one of two nodes was killed, and its file for node-exporter stays",
        {
            name.replace("n0", node): values.replace("60x30 1800x270", "60x300") if node == "n0" else values
            for node in ("n0", "n1")
            for name, values in {
                of("resilience_written_timestamp_seconds"): "0+60x30 1800x270",
                of(*ACTIVE): "1x300",
                of("resilience_step"): "0+60x30 1800x270",
                of("resilience_step_lowest"): "0+60x30 1800x270",
                of("resilience_step_median"): "0+60x30 1800x270",
                of("resilience_monitor_up"): "1x300",
                of("resilience_rank_silence_seconds", f'rank="{node[1]}"'): "5x300",
                of("resilience_rank_step", f'rank="{node[1]}"'): "0+60x30 1800x270",
                of("resilience_rank_state", f'rank="{node[1]}"', 'state="active"'): "1x300",
                of("resilience_timeout_headroom_ratio", f'section="{node}"'): "0.5x300",
                of("resilience_section_timeout_seconds", f'section="{node}"', 'source="config"'): "60x300",
            }.items()
        },
        (
            Shown("overview: Active ranks", 200, {"": 1}),
            Shown("overview: Ranks by state", 200, {'state="active"': 1}),
            Shown("overview: Progress", 200, {"": 12_000}, query=1),
            Shown("overview: Steps per second", 200, {"": 1}, query=1),
            Shown("fleet: Active ranks by job", 200, {J: 1}),
            Shown("fleet: Longest silence", 200, {J: 5}),
            Shown("node: Monitors", 200, {'node="n0"': 1}),
            Shown("node: State of each rank", 200, {'node="n0", rank="0", state="active"': 1}),
            Shown("hangs: Step skew", 200, {"": 0}),
            Shown("hangs: Ranks furthest behind", 200, {'node="n0", rank="0"': 0}),
            Shown("hangs: Most silent ranks", 200, {'node="n0", rank="0"': 5}),
            Shown("sections: Used share of the limit", 200, {'section="n0"': 0.5}),
            Shown("sections: Limits in force", 200, {'section="n0", source="config"': 60}),
        ),
    ),
    Story(
        "a node of the launcher waits for a place in a job that runs",
        {of(*ACTIVE): "8x10", of("resilience_node_waiting", node="n1"): "1x10"},
        (Shown("overview: Spares", 5, {"": 1}),),
    ),
    Story(
        "a rank hangs without a limit, and only unhealthy ranks have series",
        {
            of("resilience_step"): "0+60x60",
            of("resilience_step_median"): "0+60x60",
            of("resilience_step_lowest"): "0+60x10 600x50",
            of("resilience_step", node="n1"): "0+60x60",
            of("resilience_step_median", node="n1"): "0+60x60",
            of("resilience_step_lowest", node="n1"): "0+60x60",
            of("resilience_rank_step", 'rank="1"'): "_x12 600x48",
            of("resilience_rank_state", 'rank="1"', 'state="active"'): "_x12 1x48",
        },
        (
            Shown("hangs: Step skew", 30, {"": 1200}),
            Shown("hangs: Ranks furthest behind", 30, {'node="n0", rank="1"': 1200}),
            Shown("overview: Progress", 30, {"": 1800}, query=0),
            Shown("overview: Progress", 30, {"": 600}, query=1),
            Shown("overview: Steps per second", 30, {"": 1}, query=0),
            Shown("overview: Steps per second", 30, {"": 0}, query=1),
        ),
    ),
    Story(
        "a first section is open under its warm-up limit, which is longer than that of another rank",
        {
            of("resilience_rank_section_open_seconds", 'rank="0"', 'section="setup"'): "600x10",
            of("resilience_rank_section_used_ratio", 'rank="0"', 'section="setup"'): "0.2x10",
            of("resilience_section_timeout_seconds", 'section="setup"', 'source="config"', node="n1"): "60x10",
        },
        (Shown("hangs: Open sections against their limits", 5, {'node="n0", rank="0", section="setup"': 0.2}),),
    ),
    Story(
        "a job has ended after another exporter took over",
        {
            **taken_over(of(BEGAN), "0x100 stale", "_x100 0x20 stale"),
            **taken_over(of(PRODUCTIVE), "0+240x100 stale", "_x100 24000+480x20 stale"),
            **taken_over(of(*LOST), "0+240x100 stale", "_x100 24000x20 stale"),
        },
        (
            Shown("overview: Goodput", 110, {"": 0.545}),
            Shown("overview: Goodput", 150, {"": 0.583}),
            Shown("fleet: Most lost time", 150, {J: 24000}),
        ),
    ),
    Story(
        "an old job has ended after another exporter took over",
        {
            **taken_over(of(BEGAN), "-36000x100 stale", "_x100 -36000x20 stale"),
            **taken_over(of(PRODUCTIVE), "0+240x100 stale", "_x100 24000+480x20 stale"),
            **taken_over(of(*LOST), "0+240x100 stale", "_x100 24000x20 stale"),
        },
        (Shown("overview: Goodput", 150, {"": 0.583}), Shown("fleet: Most lost time", 150, {J: 24000})),
    ),
    Story(
        "a job only restarts, beside a healthy one",
        {
            of(BEGAN): "-36000x300",
            of(PRODUCTIVE): "100000x300",
            of(*LOST): "50+480x300",
            of(BEGAN, job="healthy"): "-36000x300",
            of(PRODUCTIVE, job="healthy"): "100000+480x300",
        },
        (
            Shown("overview: Goodput", 200, {"": 0}),
            Shown("fleet: Lowest goodput", 200, {J: 0, 'job_id="healthy"': 1}),
        ),
    ),
    *(
        Story(
            f"a quiet job that restarted before; {what}",
            {of(BEGAN): values.replace("7x", "-36000x"), of(*CYCLES): values},
            tuple(
                Shown(panel, at, shown, query)
                for at in minutes
                for panel, query, shown in (
                    ("overview: Restarts", 0, {"": 0}),
                    ("fleet: Most restarts", 0, {}),
                    # Unknown at the first sample after the gap.
                    (BARS, 0, {} if at == 71 else {'layer="launcher", outcome="interrupted"': 0}),
                )
            ),
        )
        for what, values, minutes in (
            ("Prometheus did not scrape for 10 minutes", "7x60 _x10 7x290", (50, 61, 71, 73, 80, 120, 300)),
            ("a new Prometheus", "7x360", (1, 3, 10, 60, 300)),
        )
    ),
    Story(
        "a program runs for hours and sends no signal of progress",
        {
            of(BEGAN): "0x400",
            of(PRODUCTIVE): "0x400",
            of("resilience_lost_seconds_total", 'cause="startup"'): "4x400",
        },
        (Shown("overview: Goodput", 300, {}), Shown("fleet: Lowest goodput", 300, {})),
    ),
    Story(
        "a node has both an endpoint and a file for node-exporter",
        by_two_targets(
            {
                of(BEGAN): "-36000x400",
                of(*ACTIVE): "8x400",
                of("resilience_ranks", 'state="inactive"'): "2x400",
                of("resilience_monitor_up"): "10x400",
                of(PRODUCTIVE): "0+480x400",
                of(SAMPLES, 'section="step"', 'outcome="completed"'): "0+1x400",
            }
        ),
        (
            Shown("overview: Active ranks", 360, {"": 8}),
            Shown("overview: Spares", 360, {"": 2}),
            Shown("overview: Ranks by state", 360, {'state="active"': 8, 'state="inactive"': 2}),
            Shown("fleet: Active ranks by job", 360, {J: 8}),
            Shown("node: Monitors", 360, {'node="n0"': 10}),
            Shown(
                "node: Ranks by state and node", 360, {'node="n0", state="active"': 8, 'node="n0", state="inactive"': 2}
            ),
            Shown("sections: Samples", 300, {'section="step"': 300}),
        ),
    ),
)


def expression(panel: str, query: int, to: float = 0.001) -> str:
    """Return a panel's query, rounded, with values for Grafana's variables."""
    board_name, _, title = panel.partition(": ")
    (found,) = (each for board in BOARDS if board.name == board_name for each in board.panels() if each.title == title)
    text = found.queries[query].expr
    for name in sorted(VARIABLES, key=len, reverse=True):
        text = text.replace(f"${name}", VARIABLES[name])
    return f"round({text}, {to})"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_panels_show_the_true_numbers(story: Story, tmp_path: Path) -> None:
    test = {
        "name": story.name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in story.series.items()],
        "promql_expr_test": [
            {
                "expr": expression(shown.panel, shown.query),
                "eval_time": f"{shown.at}m",
                "exp_samples": [{"labels": f"{{{labels}}}", "value": value} for labels, value in shown.values.items()],
            }
            for shown in story.shown
        ],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"group_eval_order": list(GROUPS), "tests": [test]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
