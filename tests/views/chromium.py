"""Drive a headless Chromium through its debugging pipe, with the standard library only."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    def __init__(self, profile: Path) -> None:
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        command_out, self._write = os.pipe()
        self._read, answer_in = os.pipe()
        first, second = os.dup(command_out), os.dup(answer_in)

        def place() -> None:
            a, b = os.dup(first), os.dup(second)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [str(BINARY), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=place, close_fds=False,  # noqa: PLW1509
        )  # fmt: skip
        for descriptor in (command_out, answer_in, first, second):
            os.close(descriptor)
        self._buffer, self._last = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> Any:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60.0)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def window(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path | str) -> None:
        """Load a file, or the page at an address, and wait until its charts are drawn."""
        url = page.resolve().as_uri() if isinstance(page, Path) else page
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.charts")

    def until(self, expression: str, seconds: float = 15.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            found = self.evaluate(expression)
            if found:
                return found
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """The errors and warnings on the console since the page was opened."""
        bad = {"error", "warning", "assert"}
        return [
            str(event["params"])
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in bad)
            or (event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in bad)
        ]

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
