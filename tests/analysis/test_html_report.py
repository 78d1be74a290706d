"""The HTML report in a real browser, driven over its debugging pipe."""

import json
import os
import shutil
import subprocess
import time

import pytest

from labkit.analysis import write_study

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")

PROBE = """(() => {
  const table = document.querySelector('table.wide');
  const column = (i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent.trim());
  const button = table.tHead.rows[0].cells[2].querySelector('button');
  const before = column(2);
  button.click(); const up = column(2); const sort = button.parentElement.ariaSort;
  button.click(); const down = column(2);
  const charts = [...document.querySelectorAll('figure > svg')].map((svg) => {
    const box = svg.getBoundingClientRect();
    const marks = svg.querySelectorAll('circle, polygon, polyline, rect.bar').length;
    return [box.width, box.height, marks];
  });
  const link = table.querySelector('td.n a');
  link.click();
  const target = document.getElementById(link.hash.slice(1));
  return { before, up, sort, down, charts, details: target.tagName,
    records: [...document.querySelectorAll('ul.runs a')].map((a) => a.getAttribute('href')),
    verdicts: [...table.tBodies[0].rows].map((row) => {
      const name = row.cells[0].getBoundingClientRect();
      const word = row.cells[0].querySelector('.phone');
      const box = word.getBoundingClientRect();
      return [word.textContent, box.width, box.right, box.top - name.top, name.bottom - box.bottom];
    }),
    wide: document.documentElement.scrollWidth <= innerWidth };
})()"""


class Browser:
    """Chromium with its debugging pipe: messages are JSON that ends with a zero byte."""

    def __init__(self, profile):
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        self.process = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=390,800",
             "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: (os.dup2(to_browser, 3), os.dup2(from_browser, 4)),
            pass_fds=(3, 4, to_browser, from_browser),
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.events, self.buffer, self.number, self.session = [], b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def message(self):
        while b"\0" not in self.buffer:
            data = os.read(self.read, 1 << 20)
            assert data, "the browser ended"
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self):
        self.process.kill()
        self.process.wait()


def test_report_in_a_browser(make_cell, published, tmp_path):
    make_cell("study/a-kernel", published=published, skipped={"prefill, 8 × 512": "too large"},
              cases=("decode, 64 reqs, ctx 128", "a", "b", "prefill, 8 × 512"))  # fmt: skip
    study = make_cell(f"study/chat,{'long-name' * 12}", requests=True).parent
    write_study(study, plots=False)
    browser = Browser(tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=(study / "report.html").as_uri())
        for _ in range(100):
            if browser.evaluate("document.readyState") == "complete":
                break
            time.sleep(0.05)
        page_state = browser.evaluate(PROBE)
    finally:
        browser.close()
    methods = [event.get("method") for event in browser.events]
    assert "Runtime.exceptionThrown" not in methods and "Log.entryAdded" not in methods
    fetched = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert [url.split("/")[-1] for url in fetched if not url.startswith("data:")] == ["report.html"]
    numbers = [float(text.replace(",", "")) for text in page_state["up"] if text]
    assert len(numbers) >= 1 and page_state["sort"] == "ascending"
    assert (numbers == sorted(numbers) and page_state["down"] != page_state["up"]) or len(
        numbers
    ) == 1
    assert len(page_state["charts"]) >= 8
    assert all(
        width > 100 and height > 20 and marks for width, height, marks in page_state["charts"]
    )
    words = [word for word, *_ in page_state["verdicts"]]
    assert words == ["faster", "faster", "faster", "skipped"]
    for _, width, right, top, bottom in page_state["verdicts"]:  # beside the name, no scrolling
        assert width > 20 and right <= 390 and top > 0 and bottom > 0
    assert page_state["details"] == "DETAILS" and page_state["wide"]
    assert page_state["records"] and all((study / href).is_file() for href in page_state["records"])
