"""What must not raise an alert?  Situations of Prometheus and of a job, with the alerts that may fire in them.

`examples` tests each alert alone. Here all series of a job exist, and all alerts are checked minute by minute. Series
are in the notation of `promtool test rules`. Times count from 0; a job may have started earlier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dashboards.generator.rules import unit_test_file


class Scenario(msgspec.Struct, frozen=True):
    """One situation. series: selector and values. looked_at: the checked minutes. fires: alert -> minutes at which
    exactly one fires; no other alert may fire. paged: the job of the alerts."""

    name: str
    series: Mapping[str, str]
    looked_at: tuple[int, ...]
    fires: Mapping[str, tuple[int, ...]] = {}
    paged: str = "j"


_SIGNS = ("resilience_step", "resilience_heartbeat_interval_seconds_count")


def job(
    *, pattern: str, began: float = -36_000, restarts: str = "7", job_id: str = "j", node: str = "n0", ranks: int = 8
) -> dict[str, str]:
    """Return the series of a healthy job.

    pattern: values of a constant series, with X for the value. restarts: a number, or values in the same notation."""
    labels = f'job_id="{job_id}", node="{node}"'

    def constant(value: float) -> str:
        return pattern.replace("X", f"{value:g}")

    def growing(by: int, from_value: int = 0) -> str:
        """Return a counter that grows by `by` per minute where the pattern has samples."""
        value_parts, at = [], from_value
        for part in pattern.split():
            kind, _, times = part.partition("x")
            if kind == "_":
                value_parts.append(part)
                at += by * int(times or 1)
            elif kind == "X":
                value_parts.append(f"{at}+{by}x{int(times or 0)}")
                at += by * (int(times or 0) + 1)
            else:
                value_parts.append(part)
        return " ".join(value_parts)

    restart_values = constant(float(restarts)) if restarts.isdecimal() else restarts
    return {
        f'up{{{labels}, job="resilience", instance="{node}:9400"}}': constant(1),
        f"resilience_start_timestamp_seconds{{{labels}}}": constant(began),
        f'resilience_ranks{{{labels}, state="active"}}': constant(ranks),
        f'resilience_restart_iteration{{{labels}, layer="launcher"}}': restart_values,
        f'resilience_restart_iterations_total{{{labels}, layer="launcher", outcome="interrupted"}}': restart_values,
        f'resilience_interruptions_total{{{labels}, interruption="exception", category="user_code", origin="first"}}': (
            restart_values
        ),
        f'resilience_telemetry_dropped_total{{{labels}, signal="span", reason="queue"}}': constant(
            12 if began < 0 else 0
        ),
        f"resilience_step{{{labels}}}": growing(60, 5000),
        f"resilience_heartbeat_interval_seconds_count{{{labels}}}": growing(60, 5000),
        f"resilience_productive_seconds_total{{{labels}}}": growing(60 * ranks, 100_000),
        f'resilience_lost_seconds_total{{{labels}, cause="restart"}}': restart_values,
    }


def silent(ranks: int, since: int) -> dict[str, str]:
    """Return the series of ranks without signs of life from a minute on."""
    series = {}
    for rank in range(ranks):
        labels = f'job_id="j", node="n{rank // 8}", rank="{rank}"'
        series[f"resilience_rank_silence_seconds{{{labels}}}"] = f"0x{since} {rank % 7}+60x60"
        series[f'resilience_rank_state{{{labels}, state="active"}}'] = "1x90"
    return series


def finished(waits: int, leaves: int, ranks: int, at: int) -> dict[str, str]:
    """Return the series of the single ranks of a job in which two finish at a minute. A rank that waits for the others
    stays active, and its silence has no value any more. tests/unit/dashboards/test_alerts_of_finished_ranks.py shows
    that exporters do so."""
    series = {}
    for rank in range(ranks):
        labels = f'job_id="j", node="n0", rank="{rank}"'
        is_finished = rank in (waits, leaves)
        series[f"resilience_rank_silence_seconds{{{labels}}}"] = f"3x{at} stale" if is_finished else "3x120"
        series[f'resilience_rank_state{{{labels}, state="active"}}'] = f"1x{at} stale" if rank == leaves else "1x120"
    return series


def hung(since: int, minutes: int = 120, restarts: str = "7", began: float = -36_000) -> dict[str, str]:
    """Return the series of a job whose counters stop at a minute."""
    return {
        name: f"{values} {_last(values)}x{minutes}"
        if values.endswith(f"x{since}") and "+" in values
        else values.replace(f"x{since}", f"x{minutes}")
        for name, values in job(pattern=f"Xx{since}", restarts=restarts, began=began).items()
    }


def hangs_hourly(ranks: int, hours: int) -> dict[str, str]:
    """Return the series of a job that steps for the first half of each hour and hangs for the other one, until a limit
    fires. All ranks wait: the silence is lost by each of them. The time at work includes it, as in a real job: nobody
    knows of the hang before the limit fires (tests/unit/history/test_rank_time.py)."""
    restarts = " ".join(f"{hour}x59" for hour in range(hours))
    stepping = " ".join(f"{5000 + 1740 * hour}+60x29 {5000 + 1740 * (hour + 1)}x29" for hour in range(hours))
    series = job(pattern=f"Xx{60 * hours}", restarts=restarts, ranks=ranks)
    of_node = 'job_id="j", node="n0"'
    return {
        **{name: stepping if name.startswith(_SIGNS) else values for name, values in series.items()},
        f'resilience_lost_seconds_total{{{of_node}, cause="hang"}}': " ".join(
            f"{1800 * ranks * hour}x59" for hour in range(hours)
        ),
    }


def without(part: str, series: Mapping[str, str]) -> dict[str, str]:
    """Return series without those whose selector contains a text."""
    return {name: values for name, values in series.items() if part not in name}


def without_endpoint(series: Mapping[str, str]) -> dict[str, str]:
    """Return the series of a job whose only exporter is the file for node-exporter."""
    return without("up{", series)


def by_two_targets(series: Mapping[str, str]) -> dict[str, str]:
    """Return the series of a node that Prometheus scrapes at its own endpoint, and in its file by node-exporter."""
    targets = ('job="resilience", instance="n0:9400"', 'job="node", instance="n0:9100"')
    return {f"{name[:-1]}, {target}}}": values for name, values in series.items() for target in targets}


def killed(since: int, minutes: int) -> dict[str, str]:
    """Return the series of a job that was killed at a minute, and whose file for node-exporter stays."""
    of_node = 'job_id="j", node="n0"'
    return {
        **without_endpoint(hung(since, minutes)),
        f"resilience_written_timestamp_seconds{{{of_node}}}": f"0+60x{since} {since * 60}x{minutes}",
        f'resilience_timeout_headroom_ratio{{{of_node}, section="save"}}': f"0.1x{since - 1} 0.9x{minutes}",
        f'resilience_restart_budget_remaining{{{of_node}, layer="launcher"}}': f"3x{since - 1} 1x{minutes}",
        f'resilience_restart_budget_max{{{of_node}, layer="launcher"}}': f"3x{minutes}",
        f'resilience_rank_silence_seconds{{{of_node}, rank="0"}}': f"0x{since - 1} 130x{minutes}",
        f'resilience_rank_state{{{of_node}, rank="0", state="active"}}': f"1x{minutes}",
        f'resilience_ranks{{{of_node}, state="inactive"}}': f"1x{since - 1} 0x{minutes}",
        f'resilience_ranks{{{of_node}, state="unmonitored"}}': f"0x{since - 1} 1x{minutes}",
        f'resilience_calibration_stale{{{of_node}, section="save"}}': f"1x{minutes}",
    }


def lost_host(at: int, node: str = "n0") -> dict[str, str]:
    """Return the series of a job on a host that loses power at a minute, and with it node-exporter."""
    return {
        **without_endpoint(job(pattern=f"Xx{at} stale", node=node)),
        f'resilience_written_timestamp_seconds{{job_id="j", node="{node}"}}': f"0+60x{at} stale",
    }


def _last(values: str) -> int:
    """Return the last value of `first+stepxtimes`."""
    first, _, progression = values.partition("+")
    step, _, times = progression.partition("x")
    return int(first) + int(step) * int(times)


def ended(
    at: int, outcome: str, minutes: int, node: str = "n1", restarts: str = "7", began: float = -36_000
) -> dict[str, str]:
    """Return the file for node-exporter of a node whose job ended at a minute. Its gauges are removed then."""
    of_node = f'job_id="j", node="{node}"'
    gauges = ("resilience_start", "resilience_ranks", "resilience_restart_iteration{", "resilience_step")
    series = {
        name.replace("n0", node): f"{values.split('x')[0]}x{at - 1} stale" if name.startswith(gauges) else values
        for name, values in without_endpoint(hung(at, minutes, restarts, began)).items()
    }
    return {
        **series,
        f"resilience_written_timestamp_seconds{{{of_node}}}": f"0+60x{at} {at * 60}x{minutes}",
        f'resilience_ended_timestamp_seconds{{{of_node}, outcome="{outcome}"}}': f"_x{at} {at * 60}x{minutes}",
    }


def switched_off(at: int, outcome: str, node: str = "n1") -> dict[str, str]:
    """Return the series of a job that ended at a minute, on a host that is switched off five minutes later."""
    of_node = f'job_id="j", node="{node}"'
    return {
        **{name: f"{values} stale" for name, values in ended(at, outcome, at + 5, node).items()},
        f"resilience_written_timestamp_seconds{{{of_node}}}": f"0+60x{at} {at * 60}x5 stale",
        f'resilience_ended_timestamp_seconds{{{of_node}, outcome="{outcome}"}}': f"_x{at} {at * 60}x6 stale",
    }


_SAVED = 'job_id="j", node="n0", section="save", outcome="completed"'
QUIET = tuple(range(1, 120))
_LOOP = "0x10 1+1x6 7x60"  # seven restarts from the eleventh minute on

SCENARIOS = (
    Scenario("Prometheus did not scrape for 10 minutes", job(pattern="Xx60 _x10 Xx60"), QUIET),
    Scenario("a new Prometheus scrapes a job that has restarted before", job(pattern="Xx120"), QUIET),
    Scenario("Prometheus was restarted and missed one minute", job(pattern="Xx30 _ Xx90"), QUIET),
    Scenario(
        "a job that restarted often has completed",
        job(pattern="Xx20 stale", restarts="0x10 1+1x6 7x2 stale", began=0),
        tuple(range(1, 60)),
        {"RestartLoop": tuple(range(15, 23))},  # immediately, until 2 minutes after the end
    ),
    Scenario(
        "a job that restarted often has completed, and its file for node-exporter stays",
        ended(20, "completed", 60, restarts="0x10 1+1x6 7x60", began=0),
        tuple(range(1, 60)),
        {"RestartLoop": tuple(range(15, 22))},
    ),
    Scenario(
        "a counter is reset, because a new exporter has not read everything yet",
        job(pattern="Xx120", restarts="7x40 0 3 7x80"),
        QUIET,
    ),
    Scenario(
        "a job of the same name starts again in an emptied folder",
        job(pattern="Xx120", began=2400, restarts="7x30 _x10 0x10 1x70"),
        tuple(range(41, 120)),
    ),
    Scenario(
        "one of two jobs restarts in a loop",
        {**job(pattern="Xx60", job_id="quiet"), **job(pattern="Xx60", job_id="loops", restarts=_LOOP)},
        (20,),
        {"RestartLoop": (20,)},
        "loops",
    ),
    Scenario(
        "the only agent of a job is killed",
        {**job(pattern="Xx20 stale"), 'up{job_id="j", node="n0", job="resilience", instance="n0:9400"}': "1x20 0x100"},
        (10, 20, 27, 40, 60, 90),
        {"JobGone": (27, 40, 60, 90)},
    ),
    Scenario(
        "the only agent is killed, and its file for node-exporter stays",
        killed(20, 430),
        (10, 18, 32, 45, 60, 120, 300, 375, *range(382, 430)),
        {"JobGone": (32, 45, 60, 120, 300, 375)},
    ),
    Scenario(
        "a node is killed, and the other one completes the job; both have a file for node-exporter",
        {**without('state="inactive"', killed(30, 130)), **ended(90, "completed", 130)},
        (20, 60, 85, *range(91, 130)),
        {"MonitorDown": (60, 85)},
    ),
    Scenario(
        "without a launcher, a node loses its ranks, and the other one completes the job",
        {**ended(30, "failed", 130, "n0"), **ended(90, "completed", 130)},
        (20, *range(31, 45), 60, 89, *range(90, 130)),
    ),
    Scenario(
        "all nodes lose power, and with them node-exporter",
        {**lost_host(30), **lost_host(31, "n1")},
        (20, 34, 43, 60, 90, 380, 400),
        {"JobGone": (43, 60, 90, 380)},
    ),
    Scenario(
        "one of two nodes loses power, and the other one completes the job",
        {**lost_host(30), **switched_off(90, "completed")},
        (20, 33, 40, 60, 88, *range(92, 120)),
        {"MonitorDown": (40, 60, 88)},
    ),
    Scenario(
        "a job completes, and its hosts are switched off",
        {**switched_off(20, "completed", "n0"), **switched_off(20, "completed")},
        tuple(range(1, 60)),
    ),
    Scenario(
        "a job fails, and its host is switched off",
        switched_off(20, "failed"),
        (10, 27, 40, 60, 90),
        {"JobFailed": (27, 40, 60, 90)},
    ),
    Scenario(
        "a job completes, starts again in an emptied folder, and loses power",
        {
            'resilience_written_timestamp_seconds{job_id="j", node="n0"}': "0+60x20 1200x19 2400+60x20 stale",
            'resilience_ended_timestamp_seconds{job_id="j", node="n0", outcome="completed"}': "_x20 1200x19 stale",
        },
        (*range(1, 69), 73, 90),
        {"JobGone": (73, 90)},
    ),
    Scenario(
        "without a launcher, one node is drained, and the other one is killed an hour later",
        {**ended(10, "stopped", 100, "n0"), **lost_host(70, "n1")},
        (9, *range(15, 70), 82, 100),
        {"JobGone": (82, 100)},
    ),
    Scenario(
        "without a launcher, a scheduler stops all nodes within a minute",
        {**ended(20, "stopped", 60, "n0"), **ended(21, "stopped", 60, "n1")},
        tuple(range(1, 60)),
    ),
    Scenario(
        "the clock of a node is 4 minutes slow",
        {
            **without_endpoint(job(pattern="Xx120")),
            'resilience_written_timestamp_seconds{job_id="j", node="n0"}': "-240+60x120",
        },
        QUIET,
    ),
    Scenario(
        "the file for node-exporter cannot be written, but the endpoint answers",
        {
            **job(pattern="Xx120"),
            'resilience_written_timestamp_seconds{job_id="j", node="n0"}': "0+60x20 1200x100",
        },
        QUIET,
    ),
    Scenario(
        "a node has both an endpoint and a file for node-exporter",
        by_two_targets(
            {
                **without_endpoint(job(pattern="Xx120")),
                f"resilience_section_duration_seconds_count{{{_SAVED}}}": "300x120",
            }
        ),
        QUIET,
    ),
    Scenario(
        "1,000 ranks hang at the same time",
        {**hung(20), **silent(1000, 20)},
        (20, 25, 45),
        {"RankHeartbeatStale": (25, 45), "JobStalled": (45,)},
    ),
    Scenario(
        "two of eight ranks have finished, one has left and one waits for the others, which train on",
        {**job(pattern="Xx120"), **finished(waits=0, leaves=1, ranks=8, at=40)},
        QUIET,
    ),
    Scenario(
        "1,000 ranks hang for 30 minutes in each hour",
        hangs_hourly(1000, 4),
        (20, 45, 55, 70, 90, 115, 130, 150, 175, 200, 235),
        {"JobStalled": (55, 115, 175, 235), "GoodputLow": (90, 115, 130, 150, 175, 200, 235)},
    ),
    Scenario(
        "a job reports steps only, and single ranks have no series",
        without("heartbeat", job(pattern="Xx120", began=0, restarts="0")),
        QUIET,
    ),
    Scenario(
        "a healthy job has one spare for eight ranks",
        {
            **job(pattern="Xx240", began=0, restarts="0"),
            'resilience_ranks{job_id="j", node="n0", state="inactive"}': "1x240",
            'resilience_lost_seconds_total{job_id="j", node="n0", cause="idle"}': "0+60x240",
        },
        tuple(range(60, 240, 10)),
    ),
    Scenario(
        "all nodes of a job wait for each other, and one is scraped a minute after the others",
        {
            **job(pattern="_x20 Xx100", began=0, restarts="0"),
            **{
                f'{name}{{job_id="j", node="n{number}"}}': values
                for number in (0, 1)
                for name, values in (
                    ("resilience_node_waiting", f"1x{20 + number} 0x100"),
                    ("resilience_start_timestamp_seconds", "0x120"),
                )
            },
        },
        QUIET,
    ),
    Scenario(
        "the launcher's spare node takes the place of a lost one",
        {
            **job(pattern="Xx120"),
            'resilience_node_waiting{job_id="j", node="n1"}': "1x40 0x80",
        },
        (20, 40, 45, 65, 80, 119),
        {"SparesExhausted": (65, 80, 119)},
    ),
    Scenario(
        "the launcher restarts a Wrapper's job with a spare rank, and the scripts load for 10 minutes",
        {
            **without("resilience_ranks", job(pattern="Xx120")),
            'resilience_ranks{job_id="j", node="n0", state="active"}': "8x40 stale _ 9x9 8x67",
            'resilience_ranks{job_id="j", node="n0", state="inactive"}': "1x40 stale _x11 1x67",
            'resilience_ranks{job_id="j", node="n0", state="terminated"}': "_x41 9 9 stale",
        },
        QUIET,
    ),
    Scenario(
        "the launcher restarts a job within 10 minutes, and its spare node keeps waiting",
        {
            **without("resilience_ranks", job(pattern="Xx120")),
            'resilience_ranks{job_id="j", node="n0", state="active"}': "8x40 stale _x9 8x69",
            'resilience_ranks{job_id="j", node="n0", state="terminated"}': "_x41 8x9 stale",
            'resilience_node_waiting{job_id="j", node="n1"}': "1x120",
        },
        QUIET,
    ),
    Scenario(
        "a job waits for its nodes for hours",
        {
            'resilience_start_timestamp_seconds{job_id="j", node="n0"}': "0x300",
            'up{job_id="j", node="n0", job="resilience", instance="n0:9400"}': "1x300",
        },
        (30, 59, 62, 120, 290),
        {"StartStalled": (62, 120, 290)},
    ),
)


def unit_tests() -> dict[str, Any]:
    """Return all scenarios as a file for promtool, for a folder next to the rules."""
    return unit_test_file(
        [
            {
                "name": scenario.name,
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in scenario.series.items()],
                "promql_expr_test": [_firing(scenario, minute) for minute in scenario.looked_at],
            }
            for scenario in SCENARIOS
        ],
        every="1m",  # Prometheus's own default, where the examples have that of the shipped configuration
    )


def _firing(scenario: Scenario, minute: int) -> dict[str, Any]:
    names = sorted(name for name, minutes in scenario.fires.items() if minute in minutes)
    samples = [{"labels": f'{{alertname="{name}", job_id="{scenario.paged}"}}', "value": 1} for name in names]
    expr = 'count by (alertname, job_id) (ALERTS{alertstate="firing"})'
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}
