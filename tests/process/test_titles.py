"""What lists of processes show of a process that has changed its title."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from resilience.system import titles
if sys.argv[1] == "refused":
    titles._place_in_memory = lambda command, environment: False
titles.name("a name that is too long")
titles.show(["rank 3 on here: python", "x" * 10000], {"RANK": "3", "ODD": "\\udcff"})
shown = {name: open(f"/proc/self/{name}", "rb").read() for name in ("comm", "cmdline", "environ")}
child = os.fork()
if not child:
    same = all(open(f"/proc/self/{name}", "rb").read() == text for name, text in shown.items())
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
print([shown["comm"], len(shown["cmdline"]), shown["cmdline"].split(b"\\0")[0], shown["environ"]])
"""


@pytest.mark.parametrize("kernel", ["takes it", "refused"])
def test_title_is_shown_whole_or_as_far_as_there_is_room(kernel: str) -> None:
    command = [sys.executable, "-c", SCRIPT, kernel]
    done = subprocess.run(command, env={"PATH": "/bin"}, capture_output=True, timeout=240, check=True)
    name, length, first, environment = eval(done.stdout)
    assert (name, first) == (b"a name that is \n", b"rank 3 on here: python")
    if kernel == "takes it":
        assert (length, environment) == (len("rank 3 on here: python") + 10002, b"RANK=3\0ODD=\xff\0")
    else:
        assert length == sum(len(argument) + 1 for argument in command)
        assert environment.startswith(b"PATH=/bin\0")
