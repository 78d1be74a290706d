"""A headless Chromium, driven over its debugging pipe, whose messages are JSON with a zero byte."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
NO_CHROMIUM = "no chromium on this machine"
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
DESKTOP, PHONE = (1280, 900), (390, 800)
PROBLEMS = Path(__file__).with_name("page_problems.js")


class HeadlessBrowser:
    """A tab of its own browser. ``profile`` is a new folder for the browser's files."""

    def __init__(self, profile):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: (os.dup2(to_browser, 3), os.dup2(from_browser, 4)),
            pass_fds=(3, 4, to_browser, from_browser),
        )
        os.close(to_browser)
        os.close(from_browser)
        self._events, self._buffer, self._number, self._session = [], b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method, **params):
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._events.append(answer)

    def _message(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def resize(self, size):
        """Set the size of the window."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE,
        )  # fmt: skip

    def open(self, path, size=DESKTOP, scheme="light", fragment="", media="screen", scripts=True):
        """Load a file and wait until it is complete.

        ``scheme`` is light or dark; ``scripts``: whether the page's own scripts run.
        """
        self.resize(size)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features, media=media)
        self.call("Page.navigate", url="about:blank")
        self._events.clear()
        url = path.as_uri() + (f"#{fragment}" if fragment else "")
        self.call("Page.navigate", url=url)
        for _ in range(200):
            if self.evaluate("location.protocol + document.readyState") == "file:complete":
                return
            time.sleep(0.02)
        raise AssertionError(f"{url} did not load")

    def wait(self, condition):
        """Wait until a JavaScript expression is true."""
        for _ in range(500):
            if self.evaluate(condition):
                return
            time.sleep(0.02)
        raise AssertionError(f"never true: {condition}")

    def printed_pages(self):
        """Return the number of pages of the page as a PDF on A4."""
        data = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"]
        return len(re.findall(rb"/Type /Page\b", base64.b64decode(data)))

    def evaluate(self, expression):
        """Evaluate JavaScript and return its value, which must be JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys):
        """Press keys by name: Tab, ArrowRight, Home, Enter, ..."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37,
                 "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}  # fmt: skip
        for key in keys:
            code = codes[key]
            text = {"Enter": "\r", " ": " "}.get(key, "")
            names = {"key": key, "code": key if key != " " else "Space"}
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, windowsVirtualKeyCode=code,
                          text=text if kind == "keyDown" else "", **names)  # fmt: skip

    def errors(self):
        """Return what the page logged since it was opened: exceptions, errors and messages."""
        self.evaluate("0")  # reads the events that are on their way
        names = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self._events if event.get("method") in names]

    def fetched(self):
        """Return the addresses that the page requested since it was opened, data URLs aside."""
        urls = [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def problems(self):
        """Return what is wrong with the page as it is shown now, one line each.

        Text with too little contrast (WCAG AA), text over text, a page or an element that is wider
        than the window, and controls without a name.
        """
        return self.evaluate(PROBLEMS.read_text("utf-8"))

    def unreached(self):
        """Press Tab through the page, and return the controls that never had the focus."""
        self.evaluate("document.activeElement.blur()")
        controls = self.evaluate(
            """(window.controls = [...document.querySelectorAll(
                 "a[href], button, input, select, textarea, summary, [tabindex='0']")]
               .filter((e) => !e.disabled && e.checkVisibility()
                 && (e.tabIndex >= 0) && (e.type !== "radio" || e.checked))).length"""
        )
        self.evaluate("window.reached = new Set()")
        for _ in range(controls + 1):
            self.press("Tab")
            self.evaluate("window.reached.add(document.activeElement), 0")
        return self.evaluate(
            "window.controls.filter((e) => !window.reached.has(e)).map((e) => e.outerHTML)"
        )

    def screenshot(self, path, full=True):
        """Write a PNG of the page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(picture["data"]))
