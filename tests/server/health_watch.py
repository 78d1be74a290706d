"""``python health_watch.py HOST:PORT PID``: ask a server for its health until standard input ends.

A process of its own, because a test that decodes a long response would delay the questions. Asks
every ``EVERY_S`` seconds and prints one JSON list of ``[status, seconds, waited_s, at]``. ``PID``
is the server's process. ``waited_s`` is how long its event loop, or this process, was ready to run
while the machine ran something else: the part of ``seconds`` that is not the server's. It is 0
where the kernel does not report it. ``at`` is the time of the question (s since the epoch).

``--naps SECONDS`` asks nobody: it sleeps that long again and again and prints ``[late_s, at]``, how
much later than that it woke and when. That is the delay of this machine for an idle process.
"""

import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path

EVERY_S = 0.1
TIMEOUT_S = 10.0  # after which the status is 0


def waited_s(pid):
    """Return how long the main thread of a process has waited for a core since it started."""
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(waited_ns) / 1e9


def ask(address):
    """Return the status of ``GET /health``, or 0 if there is no answer."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


def question(address, pids):
    started, waited = time.monotonic(), sum(map(waited_s, pids))
    at, status = time.time(), ask(address)
    seconds = time.monotonic() - started
    return status, seconds, sum(map(waited_s, pids)) - waited, at


def nap(seconds):
    started = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - started - seconds, time.time()


def main():
    ending = threading.Event()

    def wait_for_end():
        sys.stdin.read()
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    observed = []
    while not ending.is_set():
        if sys.argv[1] == "--naps":
            observed.append(nap(float(sys.argv[2])))
        else:
            observed.append(question(sys.argv[1], (int(sys.argv[2]), os.getpid())))
            ending.wait(EVERY_S)
    print(json.dumps(observed))


if __name__ == "__main__":
    main()
