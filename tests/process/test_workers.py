"""How an agent starts its workers, and what it does if it cannot watch them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from resilience.launcher.workers import start
from tests.process.warming import specification, told


@pytest.mark.parametrize("configured", [None, "SIGUSR1"])
def test_start_of_workers_changes_no_signal_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    if configured is not None:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", configured)
    script = tmp_path / "worker.py"
    script.write_text("")
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        workers = start(specification([str(script)], None, tmp_path / "logs", redirects=Std.NONE))
        after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    assert told(workers)["codes"] == [0]
    assert after == before
