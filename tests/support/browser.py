"""A real Chromium without a window, driven over a pipe: `with Browser() as browser: browser.open(path, 390)`.

Speaks the DevTools protocol by two pipes (`--remote-debugging-pipe`: JSON, ended by NUL), so that it needs no library.
Console messages and uncaught errors of all pages are kept in `errors`."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 120.0  # seconds for an answer
WHERE = "Chromium is not installed (Debian: apt-get install chromium)"


def path_of_browser() -> str | None:
    """Return where a Chromium is, None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page at a time. Raises: RuntimeError if it does not answer, or a script fails."""

    def __init__(self) -> None:
        path = path_of_browser()
        if path is None:
            raise RuntimeError(WHERE)
        self.errors: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="browser-")
        self._number, self._session, self._rest = 0, "", b""
        self._loaded: set[str] = set()
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--disable-dev-shm-usage"]
        command = [
            "bash",
            "-c",
            'exec 3<&"$0" 4>&"$1"; shift; exec "$@"',
            str(read),
            str(write),
            path,
            *flags,
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(read, write),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has gone with its pipes
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path, width: int, height: int = 900, scheme: str = "light", scripts: bool = True) -> float:
        """Show a file in a fresh page; returns the seconds from the request until it is loaded and laid out.

        width: of the window in CSS pixels; a phone's below 600. scheme: light or dark. scripts: whether they run."""
        self._close()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        is_phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._loaded.clear()
        began = time.monotonic()
        self._call("Page.navigate", url=page.absolute().as_uri())
        self._await(lambda: "Page.loadEventFired" in self._loaded)
        self._call("Page.getLayoutMetrics")  # answers when the page is laid out
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """Return what a script evaluates to; the result of a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script[:80]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys as a person would, one after the other."""
        codes = {"Tab": 9, "Enter": 13, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            what = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            self._call("Input.dispatchKeyEvent", type="keyDown", **what, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", **what)

    def media(self, name: str) -> None:
        """Lay the page out for this medium: print, or "" for the screen."""
        self._call("Emulation.setEmulatedMedia", media=name)

    def picture(self, path: Path, height: int) -> None:
        """Write what the page's first `height` pixels show, as PNG."""
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    # -- the protocol --------------------------------------------------------------------------

    def _close(self) -> None:
        if self._session:
            self._call("Page.close")
            self._session = ""

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        answers: list[Any] = []
        self._await(lambda: bool(answers), number, answers)
        if "error" in answers[0]:
            raise RuntimeError(f"{method}: {answers[0]['error']}")
        return answers[0]["result"]

    def _await(self, is_there: Any, number: int = 0, answers: list[Any] | None = None) -> None:
        until = time.monotonic() + LIMIT
        while not is_there():
            for message in self._messages(until):
                if message.get("id") == number and answers is not None:
                    answers.append(message)
                elif "method" in message:
                    self._note(message["method"], message["params"])

    def _messages(self, until: float) -> list[Any]:
        if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
            raise RuntimeError(f"the browser did not answer within {LIMIT:g} s")
        data = os.read(self._read, 1 << 20)
        if not data:
            raise RuntimeError(f"the browser ended with {self._process.wait()}")
        *whole, self._rest = (self._rest + data).split(b"\0")
        return [json.loads(message) for message in whole]

    def _note(self, method: str, parameters: Any) -> None:
        self._loaded.add(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"])[:400])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"])[:400])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(parameters["entry"])[:400])
