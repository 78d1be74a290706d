"""LiteLLM's proxy in front of the server: OpenAI's client, with the proxy's address."""

import os
import runpy
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tasks import MODEL, URL

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [str(Path(sys.executable).with_name("litellm")), "--model", f"openai/{MODEL}"]
command += ["--api_base", f"{URL}/v1", "--alias", MODEL, "--host", "127.0.0.1"]
command += ["--port", str(port)]
key = f"sk-{secrets.token_hex(32)}"
proxy = subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "LITELLM_MASTER_KEY": key})
try:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
            break
        except OSError:
            time.sleep(0.5)
    os.environ["OPENAI_API_KEY"] = key
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}"
    runpy.run_path(str(Path(__file__).with_name("openai_client.py")))
finally:
    proxy.terminate()
    proxy.wait()
