"""JavaScript functions called from tests: in Node.js, or else in Chromium."""

import json
import shutil
import subprocess
import tempfile

from headless_browser import CHROMIUM, HeadlessBrowser

NODE = shutil.which("node") or ""
HAS_JAVASCRIPT = bool(NODE or CHROMIUM)
NO_JAVASCRIPT = "neither node nor chromium on this machine"


def run(programs, value):
    """Run the bodies of functions of ``input``, a JSON value, and return what each returns."""
    bodies = ", ".join(f"(input) => {{ {program}\n}}" for program in programs)
    code = f"JSON.stringify([{bodies}].map((program) => program({json.dumps(value)})))"
    if not NODE:
        # The browser's children may still write while the folder is removed.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with folder as profile, HeadlessBrowser(profile) as browser:
            return json.loads(browser.evaluate(code))
    done = subprocess.run(
        [NODE, "-"], input=f"console.log({code})", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
