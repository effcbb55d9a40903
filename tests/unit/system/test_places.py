"""Where can nothing free a thread?  Only where gloo builds a group over the store of the iteration.

A place is a frame: its file, its function, and what its local variables hold. The rows below that are True are all the
places where a rank may be ended before `hard_timeout`."""

from __future__ import annotations

import inspect
import sys
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from resilience.system.places import Place, is_unfreeable

DISTRIBUTED = "/site-packages/torch/distributed/"
C10D = DISTRIBUTED + "distributed_c10d.py"
PORT, OTHER_PORT = 29511, 29512

OURS = SimpleNamespace(port=PORT, host="127.0.0.1")
IN_PREFIXES = SimpleNamespace(underlying_store=SimpleNamespace(underlying_store=OURS))
USERS_TCP = SimpleNamespace(port=OTHER_PORT, host="127.0.0.1")
FILE_STORE = SimpleNamespace(path="/meeting")  # has no server, and so no port
FILE_IN_PREFIX = SimpleNamespace(underlying_store=FILE_STORE)
HELPER, WRAPPER, BARRIER = "_new_process_group_helper", "_create_process_group_wrapper", "_store_based_barrier"

ROWS = [
    # Building a gloo group over the store of the iteration.
    (C10D, HELPER, {"store": OURS, "backend_str": "gloo"}, True),
    (C10D, HELPER, {"store": IN_PREFIXES, "backend_str": "gloo"}, True),
    (C10D, WRAPPER, {"store": OURS}, True),
    (C10D, WRAPPER, {"store": IN_PREFIXES}, True),
    (C10D, BARRIER, {"store": OURS}, True),
    (C10D, BARRIER, {"store": IN_PREFIXES}, True),
    # The same functions, before they build a group or while they build one of an accelerator.
    (C10D, HELPER, {"store": OURS, "backend_str": "nccl"}, False),
    (C10D, HELPER, {"store": OURS, "backend_str": "asynchronous"}, False),
    (C10D, HELPER, {"store": OURS, "backend_str": None}, False),
    (C10D, HELPER, {"store": OURS}, False),
    (C10D, HELPER, {"store": OURS, "backend": "gloo"}, False),
    # The same functions, over a store of the user's, or none.
    (C10D, HELPER, {"store": USERS_TCP, "backend_str": "gloo"}, False),
    (C10D, HELPER, {"store": FILE_STORE, "backend_str": "gloo"}, False),
    (C10D, HELPER, {"store": FILE_IN_PREFIX, "backend_str": "gloo"}, False),
    (C10D, HELPER, {"store": None, "backend_str": "gloo"}, False),
    (C10D, HELPER, {"backend_str": "gloo"}, False),
    (C10D, WRAPPER, {"store": USERS_TCP}, False),
    (C10D, WRAPPER, {"store": FILE_STORE}, False),
    (C10D, BARRIER, {"store": USERS_TCP}, False),
    (C10D, BARRIER, {"store": FILE_IN_PREFIX}, False),
    (C10D, BARRIER, {}, False),
    # Other functions of the same file: cuts free a collective, and every other wait has a limit of its own.
    (C10D, "all_reduce", {"store": OURS, "backend_str": "gloo"}, False),
    (C10D, "barrier", {"store": OURS}, False),
    (C10D, "monitored_barrier", {"store": OURS}, False),
    (C10D, "init_process_group", {"store": OURS, "backend_str": "gloo"}, False),
    (C10D, "new_group", {"store": OURS}, False),
    (C10D, "split_group", {"store": OURS}, False),
    (C10D, "destroy_process_group", {"store": OURS}, False),
    (C10D, "<lambda>", {"store": OURS, "backend_str": "gloo"}, False),
    # Other files of torch.distributed.
    (DISTRIBUTED + "checkpoint/filesystem.py", "_write_files_from_queue", {"store": OURS}, False),
    (DISTRIBUTED + "checkpoint/state_dict_saver.py", "save", {"store": OURS, "backend_str": "gloo"}, False),
    (DISTRIBUTED + "rendezvous.py", "_create_c10d_store", {"store": OURS}, False),
    (DISTRIBUTED + "rendezvous.py", BARRIER, {"store": OURS}, False),
    (DISTRIBUTED + "device_mesh.py", HELPER, {"store": OURS, "backend_str": "gloo"}, False),
    ("/other" + C10D, HELPER, {"store": OURS, "backend_str": "gloo"}, False),
    # Code of the user, whatever it is called and holds.
    ("/home/user/train.py", "train", {"store": OURS, "backend_str": "gloo"}, False),
    ("/home/user/train.py", HELPER, {"store": OURS, "backend_str": "gloo"}, False),
    ("/home/user/train.py", BARRIER, {"store": OURS}, False),
    ("/home/user/distributed_c10d.py", WRAPPER, {"store": OURS}, False),
    ("<string>", BARRIER, {"store": OURS}, False),
]


def frame_of(file: str, function: str, variables: dict[str, Any]) -> FrameType:
    """Return a frame of a function in `file` with these local variables."""
    is_named = function.isidentifier()
    source = f"def {function if is_named else 'function'}({', '.join(variables)}): return getframe()"
    names: dict[str, Any] = {"getframe": lambda: sys._getframe(1)}
    exec(compile(source, file, "exec"), names)
    made = names[function if is_named else "function"]
    made.__code__ = made.__code__.replace(co_name=function)
    frame: FrameType = made(**variables)
    return frame


def place(file: str, function: str, variables: dict[str, Any]) -> Place:
    frame = frame_of(file, function, variables)
    return Place(frame, frame.f_lasti)


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.distributed.distributed_c10d")
    module.__file__ = C10D
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize(("file", "function", "variables", "is_given_up"), ROWS)
def test_only_gloos_group_building_over_the_iterations_store_is_unfreeable(
    file: str, function: str, variables: dict[str, Any], is_given_up: bool
) -> None:
    assert is_unfreeable(place(file, function, variables), PORT) is is_given_up


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize(("file", "function", "variables"), [row[:3] for row in ROWS])
def test_no_place_is_unfreeable_while_the_port_of_the_iterations_store_is_unknown(
    file: str, function: str, variables: dict[str, Any]
) -> None:
    assert not is_unfreeable(place(file, function, variables), None)


@pytest.mark.parametrize(("file", "function", "variables"), [row[:3] for row in ROWS])
def test_no_place_is_unfreeable_without_torch_distributed(
    monkeypatch: pytest.MonkeyPatch, file: str, function: str, variables: dict[str, Any]
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    assert not is_unfreeable(place(file, function, variables), PORT)


@pytest.mark.parametrize(
    ("function", "variables"), [(HELPER, {"store", "backend_str"}), (WRAPPER, {"store"}), (BARRIER, {"store"})]
)
def test_installed_torch_has_the_functions_and_variables_of_the_rule(function: str, variables: set[str]) -> None:
    code = inspect.unwrap(getattr(distributed_c10d, function)).__code__
    assert (code.co_name, code.co_filename) == (function, distributed_c10d.__file__)
    assert variables <= set(code.co_varnames)
