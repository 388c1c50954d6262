"""A headless Chromium, told what to do over its debugging pipe."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
PATIENCE_S = 60.0


class Browser:
    """One page; a context manager that ends the browser.

    Attributes:
      complaints: What the page's console and the security policy said.
    """

    def __init__(self, profile: Path) -> None:
        ends = [os.pipe(), os.pipe()]
        # Chromium reads at 3 and writes at 4, so what becomes them must lie above them.
        reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (ends[0][0], ends[1][1]))
        self._write, self._read = ends[0][1], ends[1][0]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--window-size=1400,900", "about:blank"]
        self._process = subprocess.Popen(
            [FOUND, *flags],
            preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (ends[0][0], ends[1][1], reads, writes):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        [target] = [one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, address: str) -> None:
        self._ask("Page.navigate", url=address)
        self.wait("document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (value := self.value(expression)):
            seen = self.value("document.body?.innerText.slice(0, 500)")
            assert time.monotonic() < end, f"{expression} stays false; {self.complaints}; {seen}"
            time.sleep(0.05)
        return value

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag over an element, from one share of its width to another."""
        of = f"document.querySelector({selector!r}).getBoundingClientRect()"
        box = self.value(f"(r => [r.left, r.top, r.width, r.height])({of})")
        for kind, share in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            place = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
            self._ask("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)

    def screenshot(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._ask("Page.captureScreenshot")["data"])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        os.close(self._read)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._read, 1 << 20)
                assert part, "the browser ended"
                self._buffer += part
            one, _, self._buffer = self._buffer.partition(b"\0")
            said = json.loads(one)
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]
            if said.get("method") == "Log.entryAdded":
                self.complaints.append(said["params"]["entry"]["text"])
            if said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
