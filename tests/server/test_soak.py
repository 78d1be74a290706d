"""Soak test: up to 64 clients at once, some slow, some disconnecting, some sending invalid HTTP.

The server must leak nothing, and undisturbed streams must have the tokens of an idle server.
"""

import asyncio
import contextlib
import json
import math
import random
import re
import signal
import socket
import time
from urllib.parse import urlsplit

import psutil
import pytest

NUM_REQUESTS = 12  # distinct requests, each with tokens known from an idle server
INVALID_REQUESTS = [
    b"\x00\xff\x13\x37\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"model":',
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"model":',
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n[]",
]


def request(number, **options):
    """Return an HTTP request for a stream, as bytes; its number determines its tokens."""
    body = {
        "model": "tiny",
        "prompt": [(number * 37 + at * 11) % 4000 for at in range(5 + number * 3)],
        "max_tokens": 12 + number * 2,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **options,
    }
    text = json.dumps(body).encode()
    header = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return header.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text


def token_ids(response):
    """Return a stream's token ids; the stream must have ended with ``[DONE]``."""
    events = [line[6:] for line in response.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]", response[-500:]
    return [t for event in events[:-1] for t in json.loads(event)["choices"][0]["token_ids"]]


class ClientCrowd:
    """The clients of one server; ``expected`` has each request's tokens from an idle server."""

    def __init__(self, url, seed):
        self.host, _, self.port = urlsplit(url).netloc.partition(":")
        self.random = random.Random(seed)
        self.expected = {}
        self.counts = dict.fromkeys(("read_fast", "read_slowly", "disconnect", "send_invalid"), 0)

    async def connect(self, receive_buffer=None):
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (self.host, int(self.port)))
        return await asyncio.open_connection(sock=raw, limit=4096)

    async def read_fast(self, number):
        """Read a stream to its end, as fast as it arrives."""
        reader, writer = await self.connect()
        writer.write(request(number))
        tokens = token_ids(await reader.read())
        writer.close()
        assert self.expected.setdefault(number, tokens) == tokens

    async def read_slowly(self, number):
        """Read a long stream slowly, 4 KiB at a time; its tokens must be right."""
        reader, writer = await self.connect(receive_buffer=4096)
        writer.write(request(number, logprobs=20))
        parts = []
        while part := await reader.read(4096):
            parts.append(part)
            await asyncio.sleep(0.002)
        writer.close()
        assert self.expected.get(number) == token_ids(b"".join(parts))

    async def disconnect(self, number):
        """Disconnect before the response or in the middle of it."""
        reader, writer = await self.connect()
        writer.write(request(number, max_tokens=400))
        for _ in range(self.random.choice((0, 0, 3, 20))):
            await reader.readline()
        if self.random.random() < 0.5:
            writer.transport.abort()  # a reset instead of a regular close
        writer.close()

    async def send_invalid(self, number):
        """Send invalid HTTP; any response is allowed."""
        reader, writer = await self.connect()
        writer.write(self.random.choice(INVALID_REQUESTS))
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(200), 0.2)
        writer.close()

    async def client(self, deadline, pause_s):
        behaviours = (
            "read_fast",
            "read_fast",
            "read_slowly",
            "disconnect",
            "disconnect",
            "send_invalid",
        )
        while time.monotonic() < deadline:
            behaviour = self.random.choice(behaviours)
            await getattr(self, behaviour)(self.random.randrange(NUM_REQUESTS))
            self.counts[behaviour] += 1
            await asyncio.sleep(self.random.uniform(0, 2 * pause_s))

    async def run_alone(self):
        for number in range(NUM_REQUESTS):
            await self.read_fast(number)

    async def run_all(self, seconds, num_clients, pause_s=0.0):
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self.client(deadline, pause_s) for _ in range(num_clients)))


def metrics(url):
    """Return running requests, waiting requests, and the share of KV memory in use."""
    with contextlib.closing(socket.create_connection(urlsplit(url).netloc.split(":"))) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [float(re.search(rf"vllm:{name}{{.*}} (\S+)", page).group(1)) for name in names]


def resources(running):
    """Return the threads, file descriptors and memory (bytes) of an idle server."""
    deadline = time.monotonic() + 20
    while metrics(running.url)[:2] != [0, 0]:
        assert time.monotonic() < deadline, "requests are still live"
        time.sleep(0.05)
    process = psutil.Process(running.process.pid)
    while (fds := process.num_fds()) > process.num_fds():
        time.sleep(0.05)
    time.sleep(0.3)  # for connections that are being closed
    return process.num_threads(), min(fds, process.num_fds()), process.memory_info().rss


@pytest.mark.parametrize(
    ("seconds", "clients", "warm_ups"),
    [(0.2, 32, 1), pytest.param(120, 64, 8, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_many_clients_leak_nothing(chat_model, start_server, tmp_path, seconds, clients, warm_ups):
    with start_server(
        tmp_path / "log",
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "engine.batch_invariant=true",
        "engine.prefix_cache=hash",
    ) as running:
        crowd = ClientCrowd(running.url, seed=seconds)
        asyncio.run(crowd.run_alone())
        assert len({tuple(tokens) for tokens in crowd.expected.values()}) == NUM_REQUESTS
        memory_bytes = -math.inf
        # Allocates what the server keeps from then on: on a busy machine a little at a time.
        for _ in range(warm_ups):
            before = memory_bytes
            asyncio.run(crowd.run_all(seconds / 4, clients))
            threads, fds, memory_bytes = resources(running)
            if memory_bytes - before < 4 << 20:
                break
        asyncio.run(crowd.run_all(seconds, clients))
        asyncio.run(crowd.run_alone())
        after = resources(running)
        assert after[:2] == (threads, fds)
        assert after[2] - memory_bytes < 24 << 20
        assert metrics(running.url) == [0, 0, 0]
        assert min(crowd.counts.values()) > 0, crowd.counts
        assert "Traceback" not in running.log.read_text(), running.log.read_text()[-3000:]
        print(crowd.counts, threads, fds, memory_bytes, after)
        assert running.stop(signal.SIGINT) == 0
