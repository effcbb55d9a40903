"""What the watcher reports of the process groups that an interruption aborts."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from resilience.adapters import group_aborts
from resilience.adapters.patience import Patience
from resilience.core.events import AnyEvent, GroupAborted
from resilience.core.restart import Keys
from resilience.inprocess.state import State
from resilience.inprocess.watcher import NVLS_NOTE, IterationWatcher

LIMIT = 60.0  # seconds


@pytest.mark.parametrize(
    ("backend", "nvls", "note"),
    [
        ("nccl", None, NVLS_NOTE),
        ("nccl", "1", NVLS_NOTE),
        ("cpu:gloo,cuda:nccl", None, NVLS_NOTE),
        ("nccl", "0", ""),
        ("asynchronous", None, ""),
    ],
)
def test_abort_of_an_nccl_group_notes_nvlink_sharp_unless_it_is_switched_off(
    backend: str, nvls: str | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if nvls is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", nvls)
    (event,) = [event for event in events_of_an_interruption(backend, monkeypatch) if isinstance(event, GroupAborted)]
    assert (event.group, event.outcome, event.note) == ("0", "aborted", note)


def events_of_an_interruption(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[AnyEvent]:
    """Return what the watcher of an interrupted iteration emits that has one accelerator group of this backend."""
    group = mock.Mock()
    world = SimpleNamespace(pg_map={group: (backend, None)}, pg_names={group: "0"}, pg_backend_config={group: backend})
    monkeypatch.setattr(group_aborts, "c10d", lambda: SimpleNamespace(_world=world))
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    store.set(at.outcome, "interrupted")

    def abort(state: State) -> None:
        group_aborts.abort_all(LIMIT)

    watcher = IterationWatcher(
        store,
        at,
        State(rank=0, world_size=1),
        abort,  # type: ignore[arg-type]
        mock.MagicMock(),
        emitted.append,
        patience=Patience(store, (), LIMIT),
        abort_wait=LIMIT,
        abort_limit=LIMIT,
    )
    watcher.left()  # the main thread needs no interruption
    watcher.start()
    try:
        assert watcher.join(LIMIT)
    finally:
        group_aborts.forget()
    return emitted
