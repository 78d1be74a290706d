"""64 clients at once, some slow, some gone in mid-stream, some talking nonsense: nothing leaks.

Streams that are let alone have the tokens that they have on a server of their own.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from urllib.parse import urlsplit

import psutil
import pytest

CLIENTS = 64
WITNESSES = 12  # requests whose tokens are known from an undisturbed run
NONSENSE = [
    b"\x00\xff\x13\x37\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"model":',
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"model":',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
]


def request(number, **options):
    """Return a witness's request as bytes."""
    body = {
        "model": "tiny",
        "prompt": [(number * 37 + at * 11) % 4000 for at in range(5 + number * 3)],
        "max_tokens": 20 + number * 4,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **options,
    }
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text


def token_ids(answer):
    """Return the tokens of a stream; it must have ended well."""
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]", answer[-500:]
    return [t for event in events[:-1] for t in json.loads(event)["choices"][0]["token_ids"]]


class Crowd:
    """The clients of one server. ``alone``: each witness's tokens, once they are known."""

    def __init__(self, url, seed):
        self.host, _, self.port = urlsplit(url).netloc.partition(":")
        self.random = random.Random(seed)
        self.alone = {}
        self.counts = dict.fromkeys(("witness", "slow", "leaver", "nonsense"), 0)

    async def connect(self, receive_buffer=None):
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (self.host, int(self.port)))
        return await asyncio.open_connection(sock=raw, limit=4096)

    async def witness(self, number):
        """Read a stream to its end, as fast as it comes."""
        reader, writer = await self.connect()
        writer.write(request(number))
        found = token_ids(await reader.read())
        writer.close()
        assert self.alone.setdefault(number, found) == found

    async def slow(self, number):
        """Read a long answer in small bites; its tokens are right nevertheless."""
        reader, writer = await self.connect(receive_buffer=4096)
        writer.write(request(number, logprobs=20))
        parts = []
        while part := await reader.read(4096):
            parts.append(part)
            await asyncio.sleep(0.002)
        writer.close()
        assert self.alone.get(number) == token_ids(b"".join(parts))

    async def leaver(self, number):
        """Go away: before the answer, or in the middle of it."""
        reader, writer = await self.connect()
        writer.write(request(number, max_tokens=400))
        for _ in range(self.random.choice((0, 0, 3, 20))):
            await reader.readline()
        if self.random.random() < 0.5:
            writer.transport.abort()  # without a goodbye
        writer.close()

    async def nonsense(self, number):
        """Send what is no request; whatever comes back, the server lives."""
        reader, writer = await self.connect()
        writer.write(self.random.choice(NONSENSE))
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(200), 0.2)
        writer.close()

    async def client(self, end):
        kinds = ("witness", "witness", "slow", "leaver", "leaver", "nonsense")
        while time.monotonic() < end:
            kind = self.random.choice(kinds)
            await getattr(self, kind)(self.random.randrange(WITNESSES))
            self.counts[kind] += 1

    async def undisturbed(self):
        for number in range(WITNESSES):
            await self.witness(number)

    async def disturb(self, seconds):
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.client(end) for _ in range(CLIENTS)))


def metrics(url):
    """Return what runs, what waits, and how much KV memory is held."""
    with contextlib.closing(socket.create_connection(urlsplit(url).netloc.split(":"))) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [float(re.search(rf"vllm:{name}{{.*}} (\S+)", page).group(1)) for name in names]


def held(running):
    """Return threads, descriptors and memory (bytes) of a server at rest."""
    deadline = time.monotonic() + 20
    while metrics(running.url)[:2] != [0, 0]:
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.05)
    process = psutil.Process(running.process.pid)
    while (fds := process.num_fds()) > process.num_fds():
        time.sleep(0.05)
    time.sleep(0.3)  # for connections that are being closed
    return process.num_threads(), min(fds, process.num_fds()), process.memory_info().rss


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(120, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_crowd_leaves_nothing_behind(chat_model, serving, tmp_path, seconds):
    with serving(
        tmp_path / "log",
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "engine.batch_invariant=true",
        "engine.prefix_cache=hash",
    ) as running:
        crowd = Crowd(running.url, seed=seconds)
        asyncio.run(crowd.undisturbed())
        assert len({tuple(tokens) for tokens in crowd.alone.values()}) == WITNESSES
        asyncio.run(crowd.disturb(seconds / 4))  # what a server has of all this once, it keeps
        threads, fds, memory = held(running)
        asyncio.run(crowd.disturb(seconds))
        asyncio.run(crowd.undisturbed())
        after = held(running)
        assert after[:2] == (threads, fds)
        assert after[2] - memory < 24 << 20
        assert metrics(running.url) == [0, 0, 0]
        assert min(crowd.counts.values()) > 0, crowd.counts
        assert "Traceback" not in running.log.read_text(), running.log.read_text()[-3000:]
        print(crowd.counts, threads, fds, memory, after)
        assert running.stop() == 0
