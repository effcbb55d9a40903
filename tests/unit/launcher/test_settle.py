"""Wrong values on the command line are told in a line that names them, whoever finds them."""

from __future__ import annotations

import re

import pytest

from resilience.errors import ConfigurationError
from resilience.launcher.arguments import parse
from resilience.launcher.launch import settle


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node x", "--nproc-per-node is 'x', expected a number of workers, or auto, cpu, gpu or xpu"),
        ("--nproc-per-node 0", "--nproc-per-node is 0, expected 1 or more"),
        ("--nnodes a", "--nnodes is 'a', expected a number of nodes, or MIN:MAX"),
        ("--nnodes 1:2:3", "--nnodes is '1:2:3', expected a number of nodes, or MIN:MAX"),
        ("--nnodes 3:2", "min_nodes=3, max_nodes=2"),
        ("--max-restarts -1", "max_restarts must be >= 0"),
        ("--rdzv-backend nope", "--rdzv-backend is 'nope', expected one of c10d, static"),
        ("--rdzv-conf foo", "'foo' must have a value"),
        ("--redirects 9:9", "9:9"),
    ],
)
def test_wrong_value(options: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        settle(parse([*options.split(), "train.py"]))


def test_one_node_alone_meets_nobody() -> None:
    config, entrypoint, arguments = settle(parse(["--nproc-per-node", "2", "train.py", "--lr", "1"]))
    assert (config.rdzv_backend, config.rdzv_endpoint, config.nproc_per_node) == ("c10d", "localhost:0", 2)
    assert arguments[-3:] == ["train.py", "--lr", "1"] and entrypoint
