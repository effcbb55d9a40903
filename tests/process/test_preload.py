"""What the zygote of `resilience run` imports for workers: modules of --preload, and what workers have imported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.facts.records import Record
from tests.process.launching import Launched, launcher
from tests.support.account import Account
from tests.support.ranks import Job

LIMIT = 110.0  # seconds
# Which modules of torch run code of theirs while a job makes its first step with DDP and with FSDP?
FIRST_STEPS = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
executed = []
is_watching = True
def watch(event, arguments):
    if event == "exec" and is_watching:
        executed.append(arguments[0].co_filename)
sys.addaudithook(watch)
dist.init_process_group("gloo")
def step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
step(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)))
layer = torch.nn.Linear(8, 8)
fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
step(layer)
is_watching = False
import lightning
dist.destroy_process_group()
mine = f"{sys.argv[1]}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
with open(mine + ".new", "w") as file:
    json.dump([name for name in executed if name.startswith(os.path.dirname(torch.__file__))], file)
os.rename(mine + ".new", mine)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    deadline = time.monotonic() + 90
    while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit(3)
"""


@contextlib.contextmanager
def begun(
    tmp_path: Path, *arguments: str, launcher: str = "resilience.launcher", **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start `resilience run`, or another launcher; end it, and what it has started, if it still runs afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", launcher, *arguments],
        env={
            **os.environ,
            "RESILIENCE_RUN_DIR": str(tmp_path / "runs"),
            "RESILIENCE_JOB_ID": "job",
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `resilience run` to its end."""
    with begun(tmp_path, "--max-restarts=0", *arguments, **env) as process:
        shown, errors = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(arguments, process.returncode, shown, errors)


def await_that(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds. Fails, with the process's output, if it ends before, or after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(process.communicate())
        time.sleep(0.05)


def leave_last_module(tmp_path: Path) -> None:
    """Leave a module `lightning` beside the script. Once this name has been preloaded, so have all earlier ones."""
    (tmp_path / "lightning.py").write_text("")


def records(tmp_path: Path, kind: type[events.Event]) -> list[Record]:
    return [record for record in Account(tmp_path / "runs" / "job").records() if isinstance(record.event, kind)]


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "ours"])
def test_first_step_with_ddp_and_fsdp_imports_nothing_of_torch_in_a_restarted_worker(
    tmp_path: Path, launcher: str
) -> None:
    script, go = tmp_path / "script.py", tmp_path / "go"
    told = [tmp_path / f"go.{cycle}.{rank}" for cycle in range(2) for rank in range(2)]
    script.write_text(FIRST_STEPS)
    leave_last_module(tmp_path)
    if launcher == "torchrun":
        go.touch()
        # No restart: torchrun's second start of ranks sometimes hangs in init_process_group for ever.
        options = ("--standalone", "--max-restarts=0", "--nproc-per-node=2")
        with begun(tmp_path, *options, str(script), str(go), launcher="torch.distributed.run") as process:
            _, errors = process.communicate(timeout=2 * LIMIT)
        assert process.returncode == 1, errors
        assert all(len(json.loads(path.read_text())) > 100 for path in told[:2])
        return
    with begun(tmp_path, "--max-restarts=1", "--nproc-per-node=2", str(script), str(go)) as process:
        await_that(lambda: all(path.exists() for path in told[:2]), process)
        preloaded = events.ModulesPreloaded
        await_that(lambda: any("lightning" in r.event.modules for r in records(tmp_path, preloaded)), process)
        go.touch()
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    imported = [json.loads(path.read_text()) for path in told]
    assert all(len(each) > 100 for each in imported[:2])
    # A module that only torch's own CUDA library may need, 2 ms; `_remote_module` is generated text.
    assert all(len(each) <= 2 for each in imported[2:]), imported[2:]
    assert [record.event.how for record in records(tmp_path, events.WorkerStarted)] == ["warm"] * 4
    assert all(record.event.is_learned for record in records(tmp_path, events.ModulesPreloaded))


def test_job_that_needs_no_module_of_ddp_imports_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.stdout.write(str([name for name in ('torch._dynamo', 'sympy') if name in sys.modules]))"
    )
    done = run(tmp_path, str(script))
    assert (done.returncode, done.stdout) == (0, "[]"), done.stderr
    assert records(tmp_path, events.ModulesPreloaded) == []


def test_module_of_preload_is_imported_once_for_all_workers(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "slow_to_import.py").write_text("import os\nimported_by = os.getpid()")
    (modules / "with_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, slow_to_import\nsys.stdout.write(f'{slow_to_import.imported_by} {os.getpid()}\\n')"
    )
    preload = ("--preload", "slow_to_import", "--preload", "with_a_thread")
    done = run(tmp_path, *preload, "--nproc-per-node=2", str(script), PYTHONPATH=str(modules))
    assert done.returncode == 0, done.stderr
    (one, other) = [line.split() for line in sorted(done.stdout.splitlines())]
    assert one[0] == other[0]
    assert len({*one, *other}) == 3
    refused, loaded = (record.event for record in records(tmp_path, events.ModulesPreloaded))
    assert refused.refused == ("with_a_thread",)
    assert "slow_to_import" in loaded.modules
    assert "with_a_thread cannot be preloaded (2 threads run" in done.stderr


READS = """
import os
number_at_import = os.environ.get("OMP_NUM_THREADS")
"""


def test_module_of_preload_reads_the_number_of_threads_that_workers_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun sets it, for two workers, after the zygote was forked."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "reads_threads.py").write_text(READS)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, reads_threads\n"
        "sys.stdout.write(f'{reads_threads.number_at_import} {os.environ[\"OMP_NUM_THREADS\"]}\\n')"
    )
    preload = ("--preload", "reads_threads", "--nproc-per-node=2")
    done = run(tmp_path, *preload, str(script), PYTHONPATH=str(tmp_path / "modules"))
    assert (done.returncode, done.stdout) == (0, "1 1\n" * 2), done.stderr
    (loaded,) = (record.event for record in records(tmp_path, events.ModulesPreloaded))
    assert (loaded.modules, loaded.refused) == (("reads_threads",), ())


def test_module_that_reads_the_devices_is_not_preloaded_if_each_worker_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "reads_devices.py").write_text("import os\nseen = os.environ.get('CUDA_VISIBLE_DEVICES')")
    script = tmp_path / "script.py"
    script.write_text("import sys, reads_devices\nsys.stdout.write(f'{reads_devices.seen}\\n')")
    options = ("--preload", "reads_devices", "--virtual-local-rank", "--nproc-per-node=2")
    env = {"PYTHONPATH": str(tmp_path / "modules"), "CUDA_VISIBLE_DEVICES": "4,5"}
    done = run(tmp_path, *options, str(script), **env)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["4", "5"]), done.stderr
    (refused,) = (record.event for record in records(tmp_path, events.ModulesPreloaded))
    assert refused.refused == ("reads_devices",)
    assert "reads CUDA_VISIBLE_DEVICES at its import, which differs between workers" in refused.why


@pytest.mark.slow
def test_first_workers_start_without_a_module_that_takes_too_long_and_a_line_says_so(tmp_path: Path) -> None:
    modules, imported = tmp_path / "modules", tmp_path / "go"
    modules.mkdir()
    (modules / "takes_long.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(imported)!r}): time.sleep(0.05)"  # the worker creates it
    )
    script = tmp_path / "script.py"
    script.write_text(f"open({str(imported)!r}, 'w').close()")
    done = run(tmp_path, "--preload", "takes_long", str(script), PYTHONPATH=str(modules))
    assert done.returncode == 0, done.stderr
    (late,) = (record.event for record in records(tmp_path, events.ModulesTooLate))
    assert late.modules == ("takes_long",)
    assert "takes_long is still being imported (--preload) after 20 s; workers start without it" in done.stderr
    assert [record.event.how for record in records(tmp_path, events.WorkerStarted)] == ["warm"]


def test_preload_of_an_unknown_module_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for name in ("no_such_module", "json.no_such_module"):
        done = run(tmp_path, "--preload", name, str(script))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"resilience run: --preload {name}: this interpreter finds no module of that name\n"
    done = run(tmp_path, "--preload", "json", "--cold", str(script))
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


def test_preload_for_which_no_process_can_be_forked_is_named_once(start: Callable[..., Job], tmp_path: Path) -> None:
    begin: Callable[..., Launched] = launcher(start, tmp_path)
    job = begin("sys.exit(3 if cycle == 0 else 0)", "--preload", "colorsys", LACKS="successor")
    assert job.wait() == [0]
    (refused,) = (record.event for record in job.of(events.ModulesPreloaded))
    why = "the zygote could not fork: Resource temporarily unavailable"
    assert (refused.modules, refused.refused, refused.why) == ((), ("colorsys",), why)
    assert job.output(stream=2).count(f"colorsys cannot be preloaded ({why}); each worker imports it") == 1
    assert {record.event.how for record in job.of(events.WorkerStarted)} == {"warm"}


# How much code of torch.distributed.pipelining runs when it is imported? In cycle 0 the test lets the worker fail.
IMPORTING = """
executed = []
def watch(event, arguments):
    if event == "exec" and "torch/distributed/pipelining" in arguments[0].co_filename:
        executed.append(arguments[0].co_filename)
sys.addaudithook(watch)
import torch.distributed.pipelining
import lightning
(here / f"executed.{cycle}").write_text(str(len(executed)))
say("up")
await_file("go")
sys.exit(3 if cycle == 0 else 0)
"""


def test_module_of_torch_that_workers_have_imported_is_there_in_the_next_cycle(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    begin: Callable[..., Launched] = launcher(start, tmp_path)
    leave_last_module(tmp_path)
    job = begin(IMPORTING)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.await_record(events.ModulesPreloaded, where=lambda event: "lightning" in event.modules)
    (job.folder / "go").touch()
    assert job.wait() == [0]
    executed = [int((job.folder / f"executed.{cycle}").read_text()) for cycle in (0, 1)]
    assert executed[0] > 5
    assert executed[1] == 0
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm"] * 4
