"""A server that computes nothing: ``python -m labkit.engine.openai.null_server --port N``.

The server sends tokens at fixed times, to all streams at the same moment, like an engine whose
steps serve a whole batch. Every chunk carries two times: when its request arrived, and when the
chunk was written. With these times, the client can compute its own overhead without the server's
delay. The times are read from ``time.perf_counter``, a clock that the processes of one machine
share on Linux and macOS. The module imports only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_TOKEN_MS, TOKEN_INTERVAL_MS, DEFAULT_MAX_TOKENS = 20.0, 10.0, 16
TOKEN_TEXT = " a"
RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n"
)
MODEL_LIST = b'{"object": "list", "data": [{"id": "null", "object": "model"}]}'


@dataclass
class NullStream:
    """A response being streamed. ``sent`` is the number of tokens written so far."""

    writer: asyncio.StreamWriter
    received: float  # the time at which the request was read
    max_tokens: int
    prompt_tokens: int
    chat: bool
    due: float  # the earliest time of the first token
    sent: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def write_token(self, now: float) -> None:
        """Write the next token, and after the last the usage. A stream without client ends."""
        if self.writer.is_closing():
            self.done.set()
            return
        self.sent += 1
        last = self.sent == self.max_tokens
        events = [self._chunk(now, "length" if last else None)]
        if last:
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.max_tokens}
            events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        self.writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        if last:
            self.writer.write(b"0\r\n\r\n")
            self.done.set()

    def _chunk(self, now: float, finish: str | None) -> str:
        content = {"delta": {"content": TOKEN_TEXT}} if self.chat else {"text": TOKEN_TEXT}
        choice = {"index": 0, "finish_reason": finish, **content}
        return json.dumps({"choices": [choice], "null": {"got": self.received, "sent": now}})


class NullServer:
    """A server that sends one token to each stream every ``interval_ms``, all at the same ticks.

    A stream gets its first token at the first tick that is ``first_ms`` or more after its request.
    """

    def __init__(self, first_ms: float, interval_ms: float) -> None:
        self._first_s, self._interval_s = first_ms / 1e3, interval_ms / 1e3
        self._streams: list[NullStream] = []

    async def tick(self) -> None:
        """Run until cancelled: at each tick, write one token to every stream that is due."""
        next_tick = time.perf_counter()
        while True:
            next_tick += self._interval_s
            await asyncio.sleep(max(0.0, next_tick - time.perf_counter()))
            now = time.perf_counter()
            for stream in [s for s in self._streams if s.due <= now]:
                stream.write_token(time.perf_counter())
            self._streams = [s for s in self._streams if not s.done.is_set()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection, one after the other."""
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                await self._respond(line.split()[1], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError):
            pass  # not a request: close the connection
        finally:
            writer.close()

    async def _respond(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not body:
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(MODEL_LIST)}\r\n\r\n"
            writer.write(head.encode() + MODEL_LIST)
            return
        received, payload = time.perf_counter(), json.loads(body)
        writer.write(RESPONSE_HEAD)
        max_tokens = int(
            payload.get("max_completion_tokens") or payload.get("max_tokens") or DEFAULT_MAX_TOKENS
        )
        prompt = payload.get("prompt", "")
        stream = NullStream(
            writer=writer,
            received=received,
            max_tokens=max_tokens,
            prompt_tokens=len(prompt),
            chat=path.endswith(b"/chat/completions"),
            due=received + self._first_s,
        )
        self._streams.append(stream)
        await stream.done.wait()


async def run(port: int) -> None:
    """Serve until the process is killed."""
    server = NullServer(FIRST_TOKEN_MS, TOKEN_INTERVAL_MS)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=4096)
    async with listening:
        await server.tick()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m labkit.engine.openai.null_server")
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(run(parser.parse_args(argv).port))


if __name__ == "__main__":
    main()
