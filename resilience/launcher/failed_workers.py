"""How does the surrounding world learn which worker failed?  By torchelastic's events and by the launcher's error file.

torchelastic's events (`--event-log-handler console`) describe a failed worker by its exit status and the error that it
wrote itself. A scheduler such as TorchX names a file for the launcher's own error in TORCHELASTIC_ERROR_FILE; torchrun
leaves a copy of the first failed worker's file there. A launch inside a worker has no such file: the variable belongs
to the outer worker, and `environment.settings_of_a_launch` drops it."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from resilience.errors import error_in_words
from resilience.facts.encoding import to_json
from resilience.launcher.console import note
from resilience.launcher.worker.worker_processes import EndedWorker
from resilience.system import environment
from resilience.system.background import READ_LIMIT, asked

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # torch's for a file that is not as expected


class FailedWorker(NamedTuple):
    """A worker that failed by itself. error_file: where `record` leaves its exception, if the script uses it."""

    ended: EndedWorker
    error_file: str

    def failure(self) -> ProcessFailure:
        """Return torchelastic's description, with the content of the worker's error file if that is legible."""
        local_rank, _, pid, code = self.ended
        try:
            return asked(lambda: ProcessFailure(local_rank, pid, code, self.error_file), READ_LIMIT)
        except _UNREADABLE:
            return ProcessFailure(local_rank, pid, code, "")


def leave_error_file(message: str, failed: FailedWorker | None = None) -> None:
    """Write the launcher's own error file, if one is wanted: a copy of the failed worker's, else this message. Print a
    line if it cannot be written."""
    path = environment.error_file()
    if path is None:
        return
    try:
        if failed is not None and asked(lambda: _copy(failed), READ_LIMIT):
            return
    except _UNREADABLE:
        pass  # it is not JSON, or not as torch writes it
    code = 1 if failed is None else failed.ended.code
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    text = to_json({"message": {"message": message, "extraInfo": extra, "errorCode": code}})
    try:
        asked(lambda: _write(path, text), READ_LIMIT)
    except OSError as error:
        note(f"the error file {path} ({environment.ERROR_FILE}) cannot be written: {error_in_words(error)}")


def _copy(failed: FailedWorker) -> bool:
    """Copy a worker's error file. Return False if there is none."""
    if not os.path.isfile(failed.error_file):
        return False
    get_error_handler().dump_error_file(failed.error_file, failed.ended.code)
    return True


def _write(path: str, text: bytes) -> None:
    with open(path, "wb") as file:
        file.write(text)
