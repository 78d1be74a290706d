"""A server that computes nothing: ``python -m labkit.engine.openai.null_server --port N``.

Tokens come at fixed times, those of all streams in the same moment, as from an engine whose steps
serve a whole batch. What a client measures of it beyond those times is the client's own. Every
chunk says by the system's clock when its stream's request was there and when the chunk was written
(``time.perf_counter``, which processes of one machine share on Linux and macOS), so that this
server's own lateness is not mistaken for the client's. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_TOKEN_MS, TOKEN_INTERVAL_MS, DEFAULT_MAX_TOKENS = 20.0, 10.0, 16
TOKEN_TEXT = " a"  # of every token
RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n"
)
MODEL_LIST = b'{"object": "list", "data": [{"id": "null", "object": "model"}]}'


@dataclass
class NullStream:
    """A stream on its way: how many tokens it has had, of how many."""

    writer: asyncio.StreamWriter
    got: float
    most: int
    prompt_tokens: int
    chat: bool
    due: float
    sent: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, now: float) -> None:
        """Write the next token, and behind the last one the usage and the end."""
        self.sent += 1
        last = self.sent == self.most
        events = [self._chunk(now, "length" if last else None)]
        if last:
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.most}
            events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        self.writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        if last:
            self.writer.write(b"0\r\n\r\n")
            self.done.set()

    def _chunk(self, now: float, finish: str | None) -> str:
        said = {"delta": {"content": TOKEN_TEXT}} if self.chat else {"text": TOKEN_TEXT}
        choice = {"index": 0, "finish_reason": finish, **said}
        return json.dumps({"choices": [choice], "null": {"got": self.got, "sent": now}})


class NullServer:
    """The first token comes ``first_ms`` after the request, or with the next tick behind it."""

    def __init__(self, first_ms: float, between_ms: float) -> None:
        self._first_s, self._between_s = first_ms / 1e3, between_ms / 1e3
        self._answers: list[NullStream] = []

    async def tick(self) -> None:
        """Write a token of every stream that is due, at fixed times."""
        following = time.perf_counter()
        while True:
            following += self._between_s
            await asyncio.sleep(max(0.0, following - time.perf_counter()))
            now = time.perf_counter()
            for answer in [a for a in self._answers if a.due <= now]:
                answer.say(time.perf_counter())
            self._answers = [a for a in self._answers if not a.done.is_set()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, request by request."""
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
            pass  # what is no request has no answer
        finally:
            writer.close()

    async def _respond(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not body:
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(MODEL_LIST)}\r\n\r\n"
            writer.write(head.encode() + MODEL_LIST)
            return
        got, asked = time.perf_counter(), json.loads(body)
        writer.write(RESPONSE_HEAD)
        most = int(
            asked.get("max_completion_tokens") or asked.get("max_tokens") or DEFAULT_MAX_TOKENS
        )
        prompt = asked.get("prompt", "")
        answer = NullStream(
            writer, got, most, len(prompt), path.endswith(b"/chat/completions"), got + self._first_s
        )
        self._answers.append(answer)
        await answer.done.wait()


async def run(port: int, first_ms: float, between_ms: float) -> None:
    """Serve until this process is ended."""
    server = NullServer(first_ms, between_ms)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=4096)
    async with listening:
        await server.tick()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m labkit.engine.openai.null_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=FIRST_TOKEN_MS)
    parser.add_argument("--between-ms", type=float, default=TOKEN_INTERVAL_MS)
    options = parser.parse_args(argv)
    asyncio.run(run(options.port, options.first_ms, options.between_ms))


if __name__ == "__main__":
    main()
