"""Which programs set variables too late for a worker that has imported torch already, by their source alone."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection
from pathlib import Path

import pytest

from resilience.launcher.worker import script_variables

ENVIRONMENT = {"TORCH_LOGS": "dynamo", "MKL_DYNAMIC": "0"}


def why_not(folder: Path, source: str, preloaded: Collection[str] = (), **modules: str) -> str:
    """modules: their sources, by name, where `_in_` stands for a dot and `init` for `__init__`."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    for name, text in modules.items():
        path = folder / f"{name.replace('_in_', '/').replace('init', '__init__')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return script_variables.why_not(str(script), str(folder), [ENVIRONMENT], preloaded)


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['TORCH_SHOW_CPP_STACKTRACES'] = '1'",
        "os.environ['TORCH_SHOW_CPP_STACKTRACES'] = str(1)",
        "os.environ.setdefault('KMP_BLOCKTIME', '0')",
        "os.environ.update({'A': '1', 'TORCH_LOGS': '+all'})",
        "os.environ.update(A='1', TORCH_LOGS='+all')",
        "os.environ |= {'TORCH_LOGS': '+all'}",
        "os.environ['TORCH_LOGS'] += ',inductor'",
        "os.environ.pop('TORCH_LOGS', None)",
        "del os.environ['TORCH_LOGS']",
        "os.putenv('MKL_NUM_THREADS', '4')",
        "environ['GOMP_CPU_AFFINITY'] = '0'",
        "if len(sys.argv) > 1:\n    os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
        "try:\n    pass\nfinally:\n    os.environ['TORCH_LOGS'] = ''",
        "class Settings:\n    os.environ['TORCH_LOGS'] = ''",
    ],
)
def test_variable_that_torch_reads_at_its_import_is_found_before_the_import(tmp_path: Path, statement: str) -> None:
    assert " before torch is imported" in why_not(tmp_path, f"{statement}\nimport torch\n")
    assert why_not(tmp_path, f"import torch\n{statement}\n") == ""


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['MASTER_PORT'] = '29500'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']",
        "os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '1'",
        "os.environ['TORCH_HOME'] = '/models'",
        "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'",
        "os.environ['TORCH_LOGS'] = 'dynamo'",  # as it is
        "os.environ.setdefault('MKL_DYNAMIC', '1')",  # there is one
        "os.environ.pop('TORCH_TRACE', None)",  # there is none
        "os.environ['OMP_NUM_THREADS'] = '3'",  # it can be applied
        "env = {}\nenv['TORCH_LOGS'] = 'all'",
        "print(os.environ['TORCH_LOGS'])",
    ],
)
def test_variable_that_makes_no_difference_is_none(tmp_path: Path, statement: str) -> None:
    assert why_not(tmp_path, f"{statement}\nimport torch\n") == ""


def test_variable_is_found_if_it_makes_a_difference_to_one_worker_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("os.environ['TORCH_LOGS'] = 'dynamo'\n")
    workers = [ENVIRONMENT, {"TORCH_LOGS": "all"}]
    assert script_variables.why_not(str(script), str(tmp_path), workers, ()).endswith("before torch is imported")


def test_restart_parses_only_files_that_have_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    reader = script_variables._Reader

    def note(path: str) -> ast.NodeVisitor:
        parsed.append(Path(path).name)
        return reader(path)

    monkeypatch.setattr(script_variables, "_Reader", note)
    script, model = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text("import model\n")
    model.write_text("first = 1\n")

    def start() -> str:
        return script_variables.why_not(str(script), str(tmp_path), [ENVIRONMENT], ())

    assert [start(), start()] == ["", ""]
    assert parsed == ["train.py", "model.py"]
    model.write_text("os.environ['TORCH_LOGS'] = 'all'\n")
    assert start().endswith("model.py, line 1, sets TORCH_LOGS before torch is imported")
    assert parsed[2:] == ["model.py"]


def test_reason_names_file_line_and_variable(tmp_path: Path) -> None:
    reason = why_not(tmp_path, "import os\n\nos.environ['TORCH_LOGS'] = 'all'\nimport torch\n")
    assert reason == f"{tmp_path}/train.py, line 3, sets TORCH_LOGS before torch is imported"


def test_function_counts_only_where_no_module_imports_torch(tmp_path: Path) -> None:
    function = "def main():\n    os.environ['TORCH_LOGS'] = 'all'\n    import torch\n"
    assert why_not(tmp_path, function + "main()\n")
    assert why_not(tmp_path, "import torch\n" + function + "main()\n") == ""
    assert why_not(tmp_path, "from models import Model\n" + function, models="from torch import nn\n") == ""


def test_modules_beside_the_script_are_looked_into(tmp_path: Path) -> None:
    setting = "import os\nos.environ['TORCH_LOGS'] = 'all'\n"
    assert why_not(tmp_path, "import settings\nimport torch\n", settings=setting) == (
        f"{tmp_path}/settings.py, line 2, sets TORCH_LOGS before torch is imported"
    )
    assert why_not(tmp_path, "import torch\nimport settings\n", settings=setting) == ""
    assert "own/__init__.py, line 2" in why_not(tmp_path, "from own import x\nimport torch\n", own_in_init=setting)
    low = {"own_in_init": "", "own_in_deep": "from . import low", "own_in_low": setting}
    assert "own/low.py, line 2" in why_not(tmp_path, "from own import deep\nimport torch\n", **low)
    assert why_not(tmp_path, "import one\nimport torch\n", one="import two\n", two="import one\n") == ""


def test_variable_that_a_preloaded_module_has_read_is_found_anywhere(tmp_path: Path) -> None:
    source = "import torch\ndef main():\n    os.environ['HF_HOME'] = '/models'\n    import transformers\n"
    assert why_not(tmp_path, source) == ""
    assert why_not(tmp_path, source, {"HF_HOME"}).endswith("sets HF_HOME, which a preloaded module has read already")


def test_source_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert why_not(tmp_path, "value = = 1\n") == ""
    assert script_variables.why_not(str(tmp_path / "gone.py"), str(tmp_path), [{}], ()) == ""


@pytest.mark.parametrize(
    ("name", "is_read"),
    [("OMP_NUM_THREADS", True), ("OPENBLAS_CORETYPE", True), ("PYTORCH_CUDA_ALLOC_CONF", False), ("TORCH_LOGS", False)],
)
def test_numpy_reads_no_variable_of_torch(name: str, is_read: bool) -> None:
    assert script_variables.is_read_at_import(name)
    assert script_variables.is_read_by_numpy(name) == is_read


DEEP = {"sum": "x = 0" + " + 1" * 500, "elif": "if x == 0:\n    pass\n" + "elif x == 1:\n    pass\n" * 400}


@pytest.mark.parametrize("kind", DEEP)
def test_module_with_a_deep_syntax_tree_is_left_to_the_worker(tmp_path: Path, kind: str) -> None:
    late = "import os\nos.environ['TORCH_LOGS'] = 'all'\nimport torch\n"
    assert why_not(tmp_path, f"{late}{DEEP[kind]}\n") == ""
    assert why_not(tmp_path, f"import mine\n{late}", mine=DEEP[kind]).endswith(
        "sets TORCH_LOGS before torch is imported"
    )
