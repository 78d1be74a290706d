"""An hour of abuse: 500 hostile requests, 100 clients that leave, 15 minutes of soak.

A server in a process of its own gets the hostile requests of ``tests/server/hostile_cases`` and
bodies with one random field exchanged, while other clients get their tokens and some leave in the
middle of a stream; then a soak of fast, slow, leaving and invalid clients. Throughout, ``/health``
must answer 200 within 500 ms, the others' tokens must be those of the idle server, and at the end
the server must have no more than 100 MB more than before. Memory is what processes alone have
written, once with and once without the server's child processes, of which some may have ended.

A second process, which does nothing but sleep, measures how late this machine lets a process run.
A late answer is the server's if it is still late without the time in which the server or its
client waited for a core. Run as ``python benchmarks/server_endurance.py``, before which ``nice -n
-10`` keeps neighbours from delaying it; ``--minutes 5 --requests 220`` is a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "server"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(TESTS)]

from chat_model import build  # noqa: E402
from hostile_cases import CASES, check_message  # noqa: E402
from hostile_client import (  # noqa: E402
    HEALTH_WITHIN_S,
    NUM_REFERENCES,
    Client,
    add_hostile_template,
    memory_bytes,
    own_bytes,
)
from test_soak import NUM_REQUESTS, ClientCrowd, metrics  # noqa: E402

MEMORY_BYTES = 100 << 20
NUM_ABUSERS, NUM_OTHERS = 2, 4
NAP_S = 0.02
NUM_BLOCKS, BLOCK_TOKENS = 1024, 16  # of KV memory, all of which is touched before the hour
SOAK_SHARE = 0.25
SETTLE_S = 5
OPTIONS = (
    "model=local", "server.model_name=tiny", "server.grammar_timeout_s=2",
    "server.receive_timeout_s=5", "server.grace_s=5", "engine.batch_invariant=true",
    "engine.prefix_cache=hash",
    "server.max_output_tokens=512",  # else a request without a limit of its own may take minutes
    f"engine.budget.blocks={NUM_BLOCKS}",
)  # fmt: skip


# --- hostile requests ------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hello", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "seed": 1, "n": 1, "stop": ["x"], "logprobs": 1, "echo": False,
        "logit_bias": {"5": 1}, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "repetition_penalty": 1.1, "stream": False, "ignore_eos": True, "min_tokens": 1,
        "stop_token_ids": [7], "prompt_logprobs": 1,
    },
    "/v1/chat/completions": {
        "messages": MESSAGES, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto",
        "logprobs": True, "top_logprobs": 2, "temperature": 0.5, "n": 1, "stop": "x",
        "stream_options": None, "response_format": {"type": "text"}, "seed": 3,
        "max_completion_tokens": 4, "parallel_tool_calls": True,
    },
    "/v1/responses": {"input": "hello", "max_output_tokens": 4, "instructions": "be", "tools": []},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "system": "be", "stop_sequences": []},
    "/tokenize": {"prompt": "hello", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip
DEEP = "[" * 3000 + "]" * 3000
HOSTILE_VALUES = (  # JSON texts
    "1e400", "-1e400", "NaN", "2.5", "-1", "0", "null", "true", '"x"', "[]", "{}", "1e308",
    "9" * 400, "9" * 5000, str(2**63), str(-(2**64)), r'"\ud800"', r'"\u0000"', DEEP, "[[1e400]]",
    "[null]", '[{"type":"text"}]', '{"a":' * 3000 + "1" + "}" * 3000, '"' + "x" * 300_000 + '"',
    "[" + "1," * 300_000 + "1]", '[{"role":"user","content":[{"type":"image_url"}]}]',
    '[{"role":"user","content":"%s"}]' % ("é" * 100_000), '{"__proto__":{}}', "[-1]", "[1e9]",
    '[{"role":"tool","tool_call_id":1e400,"content":null}]', '"' + r"\ud83d\ude00" * 20_000 + '"',
)  # fmt: skip
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    b"Content-Length: 90\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"ffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"1\r\n{\r\n" * 20_000,
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 200,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500,
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"\xff\0" * 50 + b"\r\n\r\n",
)


def mutation(draw: random.Random) -> tuple[str, str, str]:
    """Return a path, a field of its body, and a hostile value for it (JSON)."""
    path = draw.choice(sorted(BODIES))
    return path, draw.choice(sorted(BODIES[path])), draw.choice(HOSTILE_VALUES)


def send_mutated(client: Client, path: str, name: str, value: str) -> None:
    """Send a valid body of which one field has a hostile value; any answer is short and its own."""
    fields = {key: json.dumps(each) for key, each in BODIES[path].items()}
    fields |= {"model": '"tiny"', name: value}
    body = "{" + ",".join(f'"{key}":{text}' for key, text in fields.items()) + "}"
    response = client.send("POST", path, body)
    shown = f"{path} {name}={value[:80]}: {response.status} {response.text[:300]}"
    assert response.status in (200, 400, 404, 413, 422), shown
    if response.status != 200:
        check_message(response.json()["error"]["message"])


def send_raw(client: Client, draw: random.Random) -> None:
    """Send bytes that are no request, or one that never ends; any answer is allowed."""
    with client.connect() as connection, contextlib.suppress(OSError):
        connection.settimeout(draw.choice((0.2, 2)))
        connection.sendall(draw.choice(RAW))
        while connection.recv(1 << 16):
            pass


def hostile_requests(count: int, draw: random.Random) -> list[str]:
    """Return the names of ``count`` requests: every case as often as fits, the rest generated."""
    cases = [name for _ in range(count * 2 // (3 * len(CASES))) for name in CASES]
    if not cases:
        cases = draw.sample(sorted(CASES), count * 2 // 3)
    generated = [("mutated", "mutated", "raw")[at % 3] for at in range(count - len(cases))]
    return draw.sample(cases + generated, count)


# --- what is observed ------------------------------------------------------------------------


@dataclass
class Observations:
    """What went on: failures by kind, and samples of memory (bytes)."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    memory: list[dict[str, float]] = field(default_factory=list)
    durations: list[tuple[str, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        """Count an event."""
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1

    @contextlib.contextmanager
    def of(self, kind: str, name: str) -> Iterator[None]:
        """Keep what fails inside, with the load, instead of raising it."""
        started = time.time()
        try:
            yield
            self.count(kind)
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-1500:]
            failure = {"kind": kind, "name": name, "at": started, "s": time.time() - started}
            self.failures.append({**failure, "load": os.getloadavg()[0], "error": text})
            print(f"FAILED {kind} {name}: {error!r:.300}", flush=True)
        if kind == "abuse":
            self.durations.append((name, time.time() - started))


@contextlib.contextmanager
def watcher(*arguments: str) -> Iterator[list[list[float]]]:
    """Run ``health_watch.py`` meanwhile; afterwards the list has its observations."""
    command = [sys.executable, str(TESTS / "health_watch.py"), *arguments]
    observed: list[list[float]] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield observed
        finally:
            output, _ = child.communicate("", timeout=120)
            observed.extend(json.loads(output))


def late_answers(
    answers: list[list[float]], naps: list[list[float]], limit_s: float = HEALTH_WITHIN_S
) -> list[dict[str, Any]]:
    """Return the answers later than the limit, whose fault each is, and the control's delay."""
    late = []
    for status, seconds, waited, at in answers:
        if seconds <= limit_s and status == 200:
            continue
        delays = [nap for nap, ended in naps if at <= ended <= at + seconds + 1]
        blamed = "machine" if status == 200 and seconds - waited <= limit_s else "server"
        late.append({
            "at": at, "status": status, "s": seconds, "waited_for_a_core_s": waited,
            "control_late_by_s": max(delays, default=None), "fault": blamed,
        })  # fmt: skip
    return late


# --- the hour --------------------------------------------------------------------------------


@dataclass
class Hour:
    """The run: a server, its clients, and the seconds of its parts."""

    client: Client
    crowd: ClientCrowd
    pid: int
    draw: random.Random
    seen: Observations
    expected: list[list[int]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def others(self, number: int) -> None:
        """Complete requests one after the other; their tokens must be those of the idle server."""
        draw = random.Random(number)
        while not self.ended.wait(draw.uniform(0, 1)):
            at = draw.randrange(NUM_REFERENCES)
            with self.seen.of("others", f"reference {at}"):
                assert self.client.reference(at) == self.expected[at]

    def abuse(self, requests: list[str], every_s: float) -> None:
        """Send requests, the next ``every_s`` after the one before or when that has ended."""
        draw = random.Random(len(requests))
        due = time.monotonic()
        while requests:
            name = requests.pop()
            changed = mutation(draw) if name == "mutated" else ()
            with self.seen.of("abuse", " ".join((name, *changed))[:100]):
                if changed:
                    send_mutated(self.client, *changed)
                elif name == "raw":
                    send_raw(self.client, draw)
                else:
                    CASES[name](self.client)
            due += every_s
            self.ended.wait(max(0.0, due - time.monotonic()))

    def leave(self, count: int, every_s: float) -> None:
        """Let clients leave, before the first token or in the middle of a stream."""
        for number in range(count):
            with self.seen.of("leaving", str(number)):
                asyncio.run(self.crowd.disconnect(number % NUM_REQUESTS))
            self.ended.wait(every_s)

    def num_requests(self) -> int:
        """Return the number of requests so far, but those for the health."""
        counts = self.seen.counts
        known = sum(counts.get(name, 0) for name in ("others", "abuse", "leaving"))
        return known + int(sum(self.crowd.counts.values()))

    @contextlib.contextmanager
    def memory_watch(self) -> Iterator[None]:
        """Note memory and load every ten seconds meanwhile."""
        started, ended = time.monotonic(), threading.Event()

        def watch() -> None:
            while not ended.wait(10):
                with contextlib.suppress(Exception):  # a process may end meanwhile
                    self.seen.memory.append({
                        "at": time.monotonic() - started, "requests": self.num_requests(),
                        "server": own_bytes(self.pid), "all": memory_bytes(self.pid),
                        "load": os.getloadavg()[0],
                    })  # fmt: skip

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def be_abused(self, seconds: float, requests: list[str], leaving: int) -> None:
        """Run the hostile requests beside the others and the clients that leave."""
        every_s = seconds / max(1, len(requests))
        threads = [threading.Thread(target=self.others, args=(at,)) for at in range(NUM_OTHERS)]
        workers = [
            threading.Thread(target=self.abuse, args=(requests, every_s * NUM_ABUSERS))
            for _ in range(NUM_ABUSERS)
        ]
        workers.append(threading.Thread(target=self.leave, args=(leaving, seconds / leaving)))
        for thread in (*threads, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        self.ended.set()
        for thread in threads:
            thread.join()
        with self.seen.of("all at once", "references"):
            assert self.client.references() == self.expected

    def soak(self, seconds: float, clients: int) -> None:
        """Run the crowd of fast, slow, leaving and invalid clients, then every request alone."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self.seen.of("soak", "crowd"):
                left = deadline - time.monotonic()
                asyncio.run(self.crowd.run_all(min(60.0, left), clients, pause_s=0.2))
        with self.seen.of("soak", "alone"):
            asyncio.run(self.crowd.run_alone())


def touch_kv_memory(client: Client) -> None:
    """Fill the prefix cache with other prompts until every block has been used.

    Blocks are resident only from their first use on, so that memory would grow for hours.
    """
    length = 1000
    for number in range(2 * NUM_BLOCKS * BLOCK_TOKENS // length):
        prompt = [(number * 37 + at * 11) % 4000 for at in range(length)]
        client.post("/v1/completions", prompt=prompt, max_tokens=1, ignore_eos=True)


def idle(url: str) -> None:
    """Wait until no request is live."""
    deadline = time.monotonic() + 60
    while metrics(url)[:2] != [0, 0]:
        assert time.monotonic() < deadline, "requests are still live"
        time.sleep(0.1)


def memory(pid: int) -> dict[str, int]:
    """Return the memory (bytes) of an idle server and of all its processes.

    The server gives freed memory back some seconds after its last request.
    """
    time.sleep(SETTLE_S)
    return {"server": own_bytes(pid), "all": memory_bytes(pid)}


def slope(samples: list[dict[str, float]], per: str) -> float:
    """Return by how much the server's memory grows with another quantity (Theil-Sen)."""
    slopes = [
        (later["server"] - sooner["server"]) / (later[per] - sooner[per])
        for at, later in enumerate(samples)
        for sooner in samples[:at]
        if later[per] > sooner[per]
    ]
    return statistics.median(slopes) if slopes else 0.0


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the hour and return its report."""
    from conftest import _run_server

    seconds, draw = options.minutes * 60, random.Random(options.seed)
    model = add_hostile_template(build(folder / "model"))
    log = folder / "log"
    with _run_server(log, f"model.path={model}", *OPTIONS) as server:
        seen, pid = Observations(), server.process.pid
        hour = Hour(Client(server.url), ClientCrowd(server.url, options.seed), pid, draw, seen)
        hour.expected = hour.client.references()
        asyncio.run(hour.crowd.run_alone())
        for name in ("chat_empty", "a_quarter_of_a_million_log_probabilities"):
            CASES[name](hour.client)  # allocates what the server keeps from then on
        touch_kv_memory(hour.client)
        idle(server.url)
        before = memory(pid)
        requests = hostile_requests(options.requests, draw)
        with (
            watcher("--naps", str(NAP_S)) as naps,
            watcher(hour.client.address, str(pid)) as asked,
            hour.memory_watch(),
        ):
            hour.be_abused(seconds * (1 - SOAK_SHARE), requests, options.leaving)
            hour.soak(seconds * SOAK_SHARE, options.clients)
        after = memory(pid)
        stopping = time.monotonic()
        code = server.stop()
        stopped_s = time.monotonic() - stopping
        text = log.read_text()
    late = late_answers(asked, naps)
    return {
        "minutes": options.minutes, "requests": options.requests, "counts": seen.counts,
        "crowd": hour.crowd.counts, "failures": seen.failures, "health": summary(asked),
        "late": late, "control": summary([[200, *nap] for nap in naps]),
        "memory_before": before, "memory_after": after,
        "grown_mb": {name: (after[name] - before[name]) / 1e6 for name in after},
        "memory_peak_mb": max((each["all"] for each in seen.memory), default=0) / 1e6,
        "mb_per_1000_requests": slope(seen.memory, "requests") / 1e3,
        "mb_per_hour": slope(seen.memory, "at") * 3600 / 1e6,
        "num_requests": hour.num_requests(), "memory": seen.memory,
        "exit_code": code, "stopped_s": stopped_s,
        "slowest_requests": sorted(seen.durations, key=lambda each: -each[1])[:10],
        "tracebacks": text.count("Traceback"), "log_end": text[-4000:],
    }  # fmt: skip


def summary(answers: list[list[float]]) -> dict[str, float]:
    """Return the number of answers and percentiles of their seconds."""
    seconds = sorted(each[1] for each in answers)
    at = {f"p{share:g}": seconds[int(share / 100 * (len(seconds) - 1))] for share in (50, 99, 99.9)}
    return {"n": len(seconds), **at, "max": seconds[-1]}


def faults(report: dict[str, Any]) -> list[str]:
    """Return one line per promise that did not hold."""
    blamed = [each for each in report["late"] if each["fault"] == "server"]
    found = [
        f"{each['kind']}: {each['name']}: {each['error'][-200:]}" for each in report["failures"]
    ]
    found += [f"health late, the server's fault: {each}" for each in blamed]
    if max(report["grown_mb"].values()) * 1e6 > MEMORY_BYTES:
        found.append(f"memory grew by {report['grown_mb']} MB")
    if report["exit_code"] != 0 or report["tracebacks"]:
        found.append(f"exit code {report['exit_code']}, {report['tracebacks']} tracebacks")
    return found


def main() -> int:
    """Run the command line; return 1 if a promise did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="a quarter of them is soak")
    parser.add_argument("--requests", type=int, default=500, help="hostile ones")
    parser.add_argument("--leaving", type=int, default=100, help="clients that leave")
    parser.add_argument("--clients", type=int, default=24, help="clients of the soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    shown = ("counts", "crowd", "health", "control", "late", "num_requests", "memory_before",
             "grown_mb", "memory_peak_mb", "mb_per_1000_requests", "mb_per_hour", "stopped_s",
             "slowest_requests")  # fmt: skip
    for name in shown:
        print(f"{name}: {report[name]}")
    broken = faults(report)
    print("\n".join(broken) or "every promise held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
