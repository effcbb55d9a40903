"""Which programs need a fresh interpreter, as a decision about a command line, an environment and a folder."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from resilience.launcher.worker import fork_safety, script_variables


@pytest.fixture(autouse=True)
def plain_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "resilience.launcher"])


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def why_not(*arguments: str, **environment: str) -> str:
    return fork_safety.why_not([(arguments, {**fork_safety.AT_START, **environment})])


def test_script_and_module_as_torchrun_starts_them_need_none(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why_not("-u", script, "-x", "a b", RANK="1", OMP_NUM_THREADS="7", MASTER_ADDR="here") == ""
    assert why_not("-u", "train.py") == ""
    assert why_not("-u", "-m", "json.tool", "-x") == ""


@pytest.mark.parametrize(
    "arguments", [[], ["-u"], ["-u", "-m"], ["-c", "pass"], ["-O", "-u", "x.py"], ["-u", "gone.py"]]
)
def test_other_commands_need_one(arguments: list[str]) -> None:
    assert why_not(*arguments)


def test_folder_and_archive_need_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "program.pyc").write_text("")
    assert why_not("-u", str(tmp_path)) == "the script is not a file"
    assert why_not("-u", str(tmp_path / "program.pyz")) == "the script is an archive"
    assert why_not("-u", str(tmp_path / "program.pyc")) == "the script is an archive"


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "MALLOC_ARENA_MAX", "LC_ALL"])
def test_variable_that_is_read_at_the_start_only_needs_one_if_it_is_another(script: str, name: str) -> None:
    assert why_not("-u", script, **{name: "another"}) == f"{name} is not as it was when the agent started"


def test_variable_that_is_gone_needs_one(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fork_safety.AT_START, "PYTHONWARNINGS", "error")
    environment = {name: value for name, value in fork_safety.AT_START.items() if name != "PYTHONWARNINGS"}
    assert "PYTHONWARNINGS" in fork_safety.why_not([(["-u", script], environment)])


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["python", "-m", "resilience.launcher", "-O"], []),
        (["python", "-u", "/bin/resilience", "run"], []),
        (["python", "-O", "-Xdev", "-m", "resilience.launcher"], ["-O", "-Xdev"]),
        (["python", "-sE", "/bin/resilience"], ["-sE"]),
        (["python", "-c", "-x"], []),
        (["python"], []),
    ],
)
def test_options_of_the_agents_interpreter(command: list[str], options: list[str]) -> None:
    assert fork_safety.options_of(command) == options


@pytest.mark.parametrize("kind", ["json.py", "json/__init__.py", "json.so"])
def test_folder_with_a_module_that_is_imported_from_elsewhere_needs_one(script: str, tmp_path: Path, kind: str) -> None:
    assert "json" in sys.modules
    path = tmp_path / kind
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    reason = why_not("-u", script)
    assert reason.endswith("takes the place of a module that is imported already")


@pytest.mark.parametrize("kind", ["json.txt", "json/data.txt", "sys.py", "os.py", "other.py", ".json.py"])
def test_folder_without_one_needs_none(script: str, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert why_not("-u", script) == ""


def test_folder_whose_own_module_is_imported_already_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(fork_safety.__file__).parents[2])
    assert why_not("-u", "-m", "resilience.launcher") == ""


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
@pytest.mark.parametrize(
    ("source", "variable"),
    [
        ("import os\nos.environ['DEVICE'] = os.environ.get('LOCAL_RANK', '')", "LOCAL_RANK"),
        ("import os\nnode = os.getenv('RESILIENCE_NODE')", "RESILIENCE_NODE"),
        ("import os\nRANKING = os.environ.get('MY_RANK', 'BURNRANK')", ""),
    ],
)
def test_module_of_each_start_that_names_a_variable_of_a_worker_needs_one(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, variable: str
) -> None:
    file, module = tmp_path / "site" / f"{name}.py", ModuleType(name)
    file.parent.mkdir()
    file.write_text(source)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, module)
    reason = f"{file} names {variable}, and runs only when an interpreter starts"
    assert why_not("-u", script) == (reason if variable else "")


def test_files_of_a_program_are_read_once_for_all_of_its_workers(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[tuple[str, list[str]]] = []

    def note(file: str, folder: str, environments: list[dict[str, str]], preloaded: object) -> str:
        programs.append((file, [environment["RANK"] for environment in environments]))
        return ""

    monkeypatch.setattr(script_variables, "why_not", note)
    other = f"{script}.1"
    shutil.copy(script, other)
    workers = [((("-u", script, f"--shard={rank}")), {**fork_safety.AT_START, "RANK": str(rank)}) for rank in range(8)]
    assert fork_safety.why_not([*workers, (("-u", other), {**fork_safety.AT_START, "RANK": "8"})]) == ""
    assert programs == [(script, [str(rank) for rank in range(8)]), (other, ["8"])]
