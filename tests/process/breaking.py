"""A process that injects a fault into itself while its main thread goes on, telling so on stdout."""

from __future__ import annotations

import os
import signal
import sys
import time

from resilience.inprocess.tools.inject_fault import Fault, inject_fault


def main(name: str) -> None:
    """Tell 'struck', then a dot whenever the main thread runs, and the exception that reached it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    try:  # the fault strikes at once, which can be before `inject_fault` has returned
        inject_fault((Fault[name],), 1, 0, 0.0, 7, lambda: os.write(1, b"struck\n"))
        while True:
            os.write(1, b".")
            time.sleep(0.01)
    except Exception as error:
        os.write(1, f"\n{type(error).__name__}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
