"""Start a script on several ranks of this machine, as a scheduler would: plain environment, no supervision.

    python examples/launch.py --nproc 4 SCRIPT [ARGUMENT ...]

The end of one rank does not end the others (torchrun would stop them), because they may continue without it. The
exit status is 0 if any rank succeeded: a wrapped function returns only when the job is complete."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a script on several ranks of this machine.")
    parser.add_argument("--nproc", type=int, default=4, help="number of ranks")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start(rank, options, port) for rank in range(options.nproc)]
    try:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()  # only those that still run, after Ctrl-C
            rank.wait()
    for number, rank in enumerate(ranks):
        if rank.returncode:
            print(f"rank {number} ended with {rank.returncode}", file=sys.stderr)
    return 0 if any(rank.returncode == 0 for rank in ranks) else 1


def _start(rank: int, options: argparse.Namespace, port: int) -> subprocess.Popen[bytes]:
    environment = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return subprocess.Popen([sys.executable, options.script, *options.arguments], env=environment)


if __name__ == "__main__":
    sys.exit(main())
