"""Which options of `ft_launcher` does `resilience run` understand, and what becomes of each?

`TABLE` has the options of nvidia-resiliency-ext 0.2 to 0.7 that neither torchrun nor we have by that name. An option
is an alias of one of ours; or it is accepted, because nothing has to be done for it; or it is refused, with the name of
ours or the reason. The parser, the tests and the table in docs/migration.md are made from the rows."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from resilience.errors import ConfigurationError

Kind = Literal["alias", "accepted", "refused"]
Form = Literal["value", "switch", "flag"]
OFF = ("false", "0", "no")  # what switches off an option that ft_launcher gives a yes or no
STACKED = "--ft-param-"  # how 0.2 to 0.4 began the names of settings


@dataclasses.dataclass(frozen=True)
class Row:
    """Options of `ft_launcher` that are treated alike.

    names: with hyphens. kind: alias of `text`, an option of ours; accepted, and `text` says why nothing has to be done;
    refused, and `text` says what to do. form: what follows the option: a value; a yes or no (switch), where a no is
    always accepted; or nothing (flag). to: makes the value of our option of the text, by default as our option does."""

    names: tuple[str, ...]
    kind: Kind
    text: str
    form: Form = "value"
    to: Callable[[str], Any] | None = None


def _whole_seconds(text: str) -> int:
    return math.ceil(float(text))


HEALTH = "give `--health-check` a command that looks at it; it runs on each node before each cycle"
OUTPUT = "the output of each worker and cycle is in the run folder (`--run-dir`); `resilience logs` merges it"
ATTRIBUTION = "attribution of logs by a service is out of scope; `resilience report` names the rank that failed first"
ONE_AT_A_TIME = "workers start once all workers of the cycle before are gone, which frees their device memory"

SETTINGS = (
    "workload-check-interval",
    "initial-rank-heartbeat-timeout",
    "rank-heartbeat-timeout",
    "rank-section-timeouts",
    "rank-out-of-section-timeout",
    "node-health-check-interval",
    "safety-factor",
    "rank-termination-signal",
    "log-level",
)
"""The settings that 0.2 to 0.4 have with STACKED, and we with `--ft-`."""

TABLE = (
    *(Row((STACKED + name,), "alias", f"--ft-{name}") for name in SETTINGS),
    Row(("--fault-tol-cfg-path",), "alias", "--ft-cfg-path"),
    Row(("--restart-policy",), "alias", "--ft-restart-policy"),
    Row(("--workers-stop-timeout",), "alias", "--shutdown-timeout", to=_whole_seconds),
    Row(("--ft-max-no-progress-restarts",), "alias", "--stalled-restarts"),
    Row(
        ("--ignore-missing-fault-tol-cfg", "--ft-ignore-missing-cfg"),
        "accepted",
        "without a file and flags the defaults hold anyway",
        form="flag",
    ),
    Row(("--ft-rdzv-impl",), "accepted", "there is one rendezvous, and every value means it"),
    Row(
        ("--ft-restart-check-interval", STACKED + "restart-check-interval"),
        "accepted",
        "nothing is polled at intervals: a monitor wakes when a limit is due",
    ),
    Row(
        ("--ft-skip-section-response",),
        "accepted",
        "a heartbeat or section is a store into shared memory; wrong use is an error at once",
    ),
    Row(
        ("--ft-gpu-memory-reclaim-timeout", "--ft-gpu-memory-tolerance-mb", "--ft-gpu-memory-poll-interval"),
        "accepted",
        ONE_AT_A_TIME,
    ),
    Row(
        ("--ft-check-remaining-processes",),
        "accepted",
        "a worker that cannot be ended is always on record, and no other one starts on its node",
    ),
    Row(
        ("--ft-install-exception-hook",),
        "refused",
        "install a `sys.excepthook` in the script; exceptions are on record without one",
        form="switch",
    ),
    Row(
        ("--ft-enable-nic-monitor", STACKED + "enable-nic-monitor", "--ft-enable-nic-healthcheck"),
        "refused",
        HEALTH,
        form="switch",
    ),
    Row(
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
    Row(
        ("--ft-enable-dist-storage-healthcheck", "--ft-dist-storage-health-check"),
        "refused",
        HEALTH,
        form="switch",
    ),
    Row(("--ft-storage-health-check-path", "--ft-node-health-check-endpoint"), "refused", HEALTH),
    Row(
        ("--ft-max-no-progress-cycles",),
        "refused",
        "use `--stalled-restarts`, which counts restarts and not cycles: one less",
    ),
    Row(
        ("--ft-min-progress-iterations", "--ft-checkpoint-iteration-file"),
        "refused",
        "call `resilience.step(n)` in the script: any step higher than before is progress",
    ),
    Row(("--ft-numa-bind-strict",), "refused", "use torchrun's `--numa-binding`"),
    Row(
        ("--ft-segment",),
        "refused",
        "nodes of one NVLink domain are not kept together; order nodes by SLURM_PROCID (`--ft-use-infra-group-rank`)",
    ),
    Row(("--ft-base-logfile", "--ft-per-cycle-applog-prefix", "--ft-nvrx-logfile"), "refused", OUTPUT),
    Row(("--ft-enable-log-server",), "refused", OUTPUT, form="switch"),
    Row(
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
    Row(
        ("--ft-cycle-info-dir",),
        "refused",
        "`resilience status --json` shows the cycle; workers have RESILIENCE_ATTEMPT and RESILIENCE_CYCLE",
    ),
    Row(
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
    """Return an option as the versions of ft_launcher spell it: with hyphens, underscores, or both."""
    bare = name.removeprefix("--")
    lines = bare.replace("-", "_")
    variants = ["--" + bare, "--" + lines]
    for prefix in (STACKED, "--ft-"):
        if name.startswith(prefix):
            variants.append(prefix + name.removeprefix(prefix).replace("-", "_"))
    return tuple(dict.fromkeys(variants))


def add_arguments(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Give the parser, which has all our options already, those of ft_launcher. The help does not show them."""
    ours: Mapping[str, argparse.Action] = parser._option_string_actions
    for row in TABLE:
        target = ours[row.text] if row.kind == "alias" else None
        for name in row.names:
            new = [spelling for spelling in spellings(name) if spelling not in ours]
            if target is not None:
                kind: Any = row.to or target.type
                group.add_argument(
                    *new,
                    dest=target.dest,
                    default=argparse.SUPPRESS,
                    type=kind,
                    choices=target.choices,
                    help=argparse.SUPPRESS,
                )
            else:
                group.add_argument(*new, action=_Foreign, row=row, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Foreign(argparse.Action):
    """Accepts an option for which nothing has to be done, and refuses another."""

    def __init__(self, option_strings: Sequence[str], dest: str, row: Row, help: str | None) -> None:
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
                f"{option_string} is an option of ft_launcher that `resilience run` does not have: {row.text}",
                option=option_string,
            )


def table() -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| option of `ft_launcher` | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_shown(row)} | {_becomes(row)} |" for row in TABLE)]) + "\n"


def _shown(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names)


def _becomes(row: Row) -> str:
    switch = "; a no is accepted" if row.form == "switch" else ""
    match row.kind:
        case "alias":
            rounded = ", rounded up" if row.to is _whole_seconds else ""
            return f"the same as `{row.text}`{rounded}"
        case "accepted":
            return f"accepted without effect: {row.text}"
        case "refused":
            return f"refused{switch}: {row.text}"


def names() -> Iterator[tuple[Row, str]]:
    """Yield each row with each spelling of each of its options."""
    for row in TABLE:
        for name in row.names:
            for spelling in spellings(name):
                yield row, spelling
