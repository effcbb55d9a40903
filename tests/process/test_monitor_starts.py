"""A Wrapper's monitor starts in whatever process calls the function, and holds nothing of that process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from resilience.facts import events
from tests.process.closing import HELD
from tests.support.account import Account
from tests.support.ranks import Job
from tests.support.server import ROOT

Start = Callable[..., Job]
USERS_STORE = """
import os
import torch.distributed as dist
import resilience
from resilience.inprocess.store import StoreMixin

class UsersStore(dist.FileStore, StoreMixin):
    def __init__(self, path):
        super().__init__(path, -1)
        with open("imported", "a") as file:
            print(os.getpid(), resilience.__file__, file=file)
"""
BESIDE_A_THREAD = """
import sys
sys.path.insert(0, sys.argv[1])
import threading
import users_store
from resilience.inprocess import Wrapper

threading.Thread(target=threading.Event().wait, daemon=True).start()

@Wrapper(store_factory=users_store.UsersStore, store_kwargs={"path": "store"})
def train():
    return 7

print(train())
"""


def run_beside_a_thread(folder: Path, library: Path) -> set[str]:
    """Run a script in the folder `work` whose modules are in `library`, which it finds by itself. Answers the files of
    the package that rank and monitor have imported."""
    (library / "users_store.py").write_text(USERS_STORE)
    script = folder / "train.py"
    script.write_text(BESIDE_A_THREAD)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    places = {"RESILIENCE_RUN_DIR": str(folder / "runs"), "PYTHONPATH": str(folder / "nothing")}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(library)],
        env={**os.environ, **places, **alone},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    (run,) = (folder / "runs").glob("[!.]*")
    calls = [record.event for record in Account(run).records() if isinstance(record.event, events.CallStarted)]
    assert [call.monitor for call in calls] == ["executed"]
    imported = dict(line.split(" ", 1) for line in (work / "imported").read_text().splitlines())
    assert len(imported) == 2  # rank and monitor
    return set(imported.values())


def test_what_the_function_closes_is_closed_although_it_was_open_before_the_call(start: Start) -> None:
    job = start(1, "tests.process.closing:close_what_was_open_before")
    (rank,) = job.wait()
    assert rank.value == ["client: Connection refused", "lock: free", "helper: exit code 0"]
    assert [record.event.monitor for record in job.of(events.CallStarted)] == ["forked"]


def test_executed_monitor_imports_no_module_of_the_working_directory(tmp_path: Path) -> None:
    work, library = tmp_path / "work", tmp_path / "library"
    (work / "torch").mkdir(parents=True)
    library.mkdir()
    (library / "resilience").symlink_to(ROOT / "resilience")
    for name in ("torch/__init__.py", "queue.py", "pickle.py", "os.py", "resilience.py"):
        (work / name).write_text("raise ImportError('a file of the working directory')\n")
    run_beside_a_thread(tmp_path, library)


def test_executed_monitor_finds_a_package_that_only_the_script_can_find(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "resilience").symlink_to(ROOT / "resilience")
    assert run_beside_a_thread(tmp_path, library) == {str(library / "resilience" / "__init__.py")}


def test_memory_that_the_function_frees_is_free_although_it_was_held_before_the_call(start: Start) -> None:
    job = start(1, "tests.process.closing:free_what_was_loaded_before", are_hooks_sent=True)
    (rank,) = job.wait()
    assert rank.value < HELD, rank.error
    (call,) = [record.event for record in job.of(events.CallStarted)]
    assert (call.monitor, "GiB of memory" in call.monitor_reason) == ("executed", True)
    assert not job.of(events.ConfigurationAdvised)


def test_monitor_of_a_large_process_is_forked_with_advice_if_its_hooks_cannot_be_sent(start: Start) -> None:
    job = start(1, "tests.process.closing:free_what_was_loaded_before", are_hooks_sent=False)
    (rank,) = job.wait()
    assert rank.value > HELD, rank.error
    (call,) = [record.event for record in job.of(events.CallStarted)]
    assert (call.monitor, "GiB of memory" in call.monitor_reason) == ("forked", True)
    (advised,) = [record.event for record in job.of(events.ConfigurationAdvised)]
    assert "store_factory" in advised.advice
