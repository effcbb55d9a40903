"""Which options of `ft_launcher` does `resilience run` understand, and what happens to each?

`TABLE` lists the options of nvidia-resiliency-ext 0.2 to 0.7 that neither torchrun nor we have under that name. An
option is an alias of one of ours; or it is accepted, because nothing needs to be done for it; or it is refused, with
our option or the reason. The parser, the tests and the table in docs/migration.md are generated from the rows."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from resilience.errors import ConfigurationError
from resilience.monitor.unknown_settings import ACCEPTED, HEALTH, OFF

Kind = Literal["alias", "accepted", "refused"]
Form = Literal["value", "switch", "flag"]
STACKED = "--ft-param-"  # prefix of settings in 0.2 to 0.4


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """Options of `ft_launcher` that are handled alike.

    names: with hyphens. kind: alias of `text`, one of our options; accepted, and `text` says why nothing needs to be
    done; refused, and `text` says what to do. form: what follows the option: a value; a yes or no (switch; "no" is
    always accepted); or nothing (flag). to: converts the text to our option's value; by default our own conversion.
    remark: added to the table."""

    names: tuple[str, ...]
    kind: Kind
    text: str
    form: Form = "value"
    to: Callable[[str], Any] | None = None
    remark: str = ""


def _whole_seconds(seconds: str) -> int:
    try:
        return math.ceil(float(seconds))
    except (ValueError, OverflowError) as error:  # not a number, or infinite
        raise argparse.ArgumentTypeError(f"is {seconds!r}, expected seconds") from error


OUTPUT = "the run folder (`--run-dir`) keeps the output of each worker and cycle; `resilience logs` merges it"
ATTRIBUTION = "a log attribution service is out of scope; `resilience report` names the rank that failed first"
ONE_AT_A_TIME = "workers start after all workers of the previous cycle have exited, which frees their device memory"

SETTINGS = (
    "initial-rank-heartbeat-timeout",
    "rank-heartbeat-timeout",
    "rank-section-timeouts",
    "rank-out-of-section-timeout",
    "node-health-check-interval",
    "safety-factor",
    "rank-termination-signal",
    "log-level",
)
"""Settings that 0.2 to 0.4 spell with STACKED, and we with `--ft-`."""

TABLE = (
    OptionGroup(
        (STACKED + "workload-check-interval",),
        "alias",
        "--ft-workload-check-interval",
        remark=": accepted without effect",
    ),
    *(OptionGroup((STACKED + name,), "alias", f"--ft-{name}") for name in SETTINGS),
    OptionGroup(("--fault-tol-cfg-path",), "alias", "--ft-cfg-path"),
    OptionGroup(("--restart-policy",), "alias", "--ft-restart-policy"),
    OptionGroup(("--workers-stop-timeout",), "alias", "--shutdown-timeout", to=_whole_seconds),
    OptionGroup(("--ft-max-no-progress-restarts",), "alias", "--stalled-restarts"),
    OptionGroup(("--ft-no-restart-exit-code",), "alias", "--same-failure-exit-code"),
    OptionGroup(
        ("--ignore-missing-fault-tol-cfg", "--ft-ignore-missing-cfg"),
        "accepted",
        "without a file or flags, the defaults apply anyway",
        form="flag",
    ),
    OptionGroup(("--ft-rdzv-impl",), "accepted", "there is only one rendezvous, whatever the value"),
    OptionGroup(
        ("--ft-restart-check-interval", STACKED + "restart-check-interval"),
        "accepted",
        ACCEPTED["restart_check_interval"],
    ),
    OptionGroup(
        ("--ft-skip-section-response",),
        "accepted",
        ACCEPTED["skip_section_response"],
    ),
    OptionGroup(
        ("--ft-gpu-memory-reclaim-timeout", "--ft-gpu-memory-tolerance-mb", "--ft-gpu-memory-poll-interval"),
        "accepted",
        ONE_AT_A_TIME,
    ),
    OptionGroup(
        ("--ft-check-remaining-processes",),
        "accepted",
        "a worker that cannot be killed is always recorded, and no other worker starts on its node",
    ),
    OptionGroup(
        ("--ft-install-exception-hook",),
        "refused",
        "install a `sys.excepthook` in the script; exceptions are recorded without one",
        form="switch",
    ),
    OptionGroup(
        ("--ft-enable-nic-monitor", STACKED + "enable-nic-monitor", "--ft-enable-nic-healthcheck"),
        "refused",
        HEALTH,
        form="switch",
    ),
    OptionGroup(
        (
            "--ft-pci-topo-file",
            STACKED + "pci-topo-file",
            "--ft-link-down-path-template",
            STACKED + "link-down-path-template",
            "--ft-link-state-path-template",
        ),
        "refused",
        HEALTH,
    ),
    OptionGroup(
        ("--ft-enable-dist-storage-healthcheck", "--ft-dist-storage-health-check"),
        "refused",
        HEALTH,
        form="switch",
    ),
    OptionGroup(
        ("--ft-storage-health-check-path", "--ft-segment-health-check-dir", "--ft-node-health-check-endpoint"),
        "refused",
        HEALTH,
    ),
    OptionGroup(
        ("--ft-max-no-progress-cycles",),
        "refused",
        "use `--stalled-restarts`, which counts restarts, not cycles: subtract one",
    ),
    OptionGroup(
        ("--ft-min-progress-iterations", "--ft-checkpoint-iteration-file"),
        "refused",
        "call `resilience.step(n)` in the script: any step higher than before counts as progress",
    ),
    OptionGroup(("--ft-numa-bind-strict",), "refused", "use torchrun's `--numa-binding`"),
    OptionGroup(
        ("--ft-segment",),
        "refused",
        "nodes of an NVLink domain are not kept together; order nodes by SLURM_PROCID (`--ft-use-infra-group-rank`)",
    ),
    OptionGroup(("--ft-base-logfile", "--ft-per-cycle-applog-prefix", "--ft-nvrx-logfile"), "refused", OUTPUT),
    OptionGroup(("--ft-enable-log-server",), "refused", OUTPUT, form="switch"),
    OptionGroup(
        (
            "--ft-log-server-port",
            "--ft-log-aggregator-count",
            "--ft-log-leaf-max-queue-chunks",
            "--ft-log-server-log",
            "--ft-log-server-log-prefix",
            "--ft-log-server-graceful-shutdown-timeout",
        ),
        "refused",
        OUTPUT,
    ),
    OptionGroup(
        ("--ft-cycle-info-dir",),
        "refused",
        "`resilience status --json` shows the cycle; workers have RESILIENCE_ATTEMPT and RESILIENCE_CYCLE",
    ),
    OptionGroup(
        tuple(
            f"--ft-attribution-{name}"
            for name in (
                "endpoint",
                "startup-timeout",
                "stop-action",
                "llm-api-key-file",
                "llm-base-url",
                "llm-model",
                "analysis-backend",
                "compute-timeout",
                "log-level",
                "export-url",
                "applog-dir",
                "log",
                "cache-file",
                "host",
                "port",
            )
        ),
        "refused",
        ATTRIBUTION,
    ),
)


def spellings(name: str) -> tuple[str, ...]:
    """Return an option in every spelling that a version of ft_launcher has: hyphens, underscores, or both."""
    bare = name.removeprefix("--")
    underscored = bare.replace("-", "_")
    variants = ["--" + bare, "--" + underscored]
    for prefix in (STACKED, "--ft-"):
        if name.startswith(prefix):
            variants.append(prefix + name.removeprefix(prefix).replace("-", "_"))
    return tuple(dict.fromkeys(variants))


def add_arguments(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Add ft_launcher's options to a parser that already has ours. The help does not show them."""
    ours: Mapping[str, argparse.Action] = parser._option_string_actions
    for row in TABLE:
        target = ours[row.text] if row.kind == "alias" else None
        for name in row.names:
            new_spellings = [spelling for spelling in spellings(name) if spelling not in ours]
            if target is not None:
                value_type: Any = row.to or target.type
                group.add_argument(
                    *new_spellings,
                    dest=target.dest,
                    default=argparse.SUPPRESS,
                    type=value_type,
                    choices=target.choices,
                    help=argparse.SUPPRESS,
                )
            else:
                group.add_argument(
                    *new_spellings, action=_Foreign, row=row, dest=argparse.SUPPRESS, help=argparse.SUPPRESS
                )


class _Foreign(argparse.Action):
    """Accept an option that needs nothing done; refuse any other."""

    def __init__(self, option_strings: Sequence[str], dest: str, row: OptionGroup, help: str | None) -> None:
        nargs = 0 if row.form == "flag" else None
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, help=help)
        self._row = row

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        row = self._row
        is_off = row.form == "switch" and str(values).lower() in OFF
        if row.kind == "refused" and not is_off:
            raise ConfigurationError(
                f"{option_string} is an option of ft_launcher that `resilience run` does not support: {row.text}",
                option=option_string,
            )


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| option of `ft_launcher` | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_option_names(row)} | {_meaning(row)} |" for row in TABLE)]) + "\n"


def _option_names(row: OptionGroup) -> str:
    return ", ".join(f"`{name}`" for name in row.names)


def _meaning(row: OptionGroup) -> str:
    switch = '; "no" is accepted' if row.form == "switch" else ""
    match row.kind:
        case "alias":
            rounded = ", rounded up" if row.to is _whole_seconds else ""
            return f"the same as `{row.text}`{rounded}{row.remark}"
        case "accepted":
            return f"accepted without effect: {row.text}"
        case "refused":
            return f"refused{switch}: {row.text}"


def names() -> Iterator[tuple[OptionGroup, str]]:
    """Yield each row with each spelling of each of its options."""
    for row in TABLE:
        for name in row.names:
            for spelling in spellings(name):
                yield row, spelling
