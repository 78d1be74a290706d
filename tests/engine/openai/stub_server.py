"""A stub server with configurable behaviour, in this process or as a program of its own.

    python stub_server.py --port N MODE...

Modes change what is streamed; the tests that use a mode explain it. With the mode ``half``, they
apply only to requests for more than 8 tokens. It is HTTP/1.1 over
sockets, a thread per connection, so that every chunk is written when it is meant to be.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

WORDS = ("the", " cat", " sat", " on", " a", " mat", " and", " hat")


class Stub:
    """Listens at a loopback port; ``received_bodies`` collects the bodies of requests."""

    def __init__(self, *modes, port=0):
        self.modes = set(modes)
        self.received_bodies = []
        self.served = []  # prompts whose beginning it remembers
        self.longest = 0
        self._socket = socket.create_server(("127.0.0.1", port), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self):
        self._socket.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, connection.makefile("rb") as reader:
            line = reader.readline().split()
            if not line:
                return
            length = 0
            while header := reader.readline().strip():
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            body = json.loads(reader.read(length)) if length else None
            with contextlib.suppress(OSError):  # the client has gone
                self._answer(connection, line[1].decode(), body)

    def _answer(self, connection, path, body):
        if "ssh" in self.modes:
            connection.sendall(b"SSH-2.0-stub\r\n")
            return
        if body is None:
            known = {"data": [{"id": "stub-model"}]}
            status = "200 OK" if path in ("/health", "/v1/models") else "404 Not Found"
            whole(connection, status, known)
            return
        self.received_bodies.append(body)
        modes = set() if "half" in self.modes and body["max_tokens"] <= 8 else self.modes
        if "dead" in modes:  # healthy, and no token ever
            time.sleep(60)
        if "redirects" in modes:
            head = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://elsewhere/v1\r\n"
            connection.sendall(head + b"content-length: 0\r\n\r\n")
            return
        if "keyless" in modes:
            whole(connection, "401 Unauthorized", {"error": {"message": "a key, please"}})
            return
        if "broken" in modes:
            whole(connection, "500 Internal Server Error", {"error": {"message": "out of order"}})
            return
        if "dies" in modes and sum(b["max_tokens"] > 1 for b in self.received_bodies) == 3:
            os._exit(3)
        if "refuses" in modes and body["max_tokens"] > 1:
            whole(connection, "429 Too Many Requests", {"error": {"message": "too many"}})
            return
        self._stream(connection, path.startswith("/v1/chat"), body, modes)

    def _stream(self, connection, chat, body, modes):
        most = body["max_tokens"]
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        write = Writer(connection, chat)
        while "pings" in modes:
            connection.sendall(b': ping\n\nevent: ping\ndata: {"choices": []}\n\n')
            time.sleep(0.02)
        if "mute" in modes:  # as if all were well
            write.event("", finish="length")
            write.raw("[DONE]")
            return
        delay = self._delay(body)
        if "role_first" in modes:
            write.event(delta={"role": "assistant", "content": ""})
            time.sleep(0.15)
        count = most // 2 if "early" in modes and most > 1 else most
        words = [WORDS[i % len(WORDS)] for i in range(count)]
        if "breaks" in modes and most > 1:
            write.event(words[0], ids=self._ids(0))
            return
        if "nonsense" in modes and most > 1:
            connection.sendall(b"data: {not json\n\n")
            return
        if "refusal" in modes and most > 1:
            write.event(delta={"refusal": "I will not"}, finish="stop")
        elif "bundles" in modes:
            for i in range(0, count, 2):
                time.sleep(2 * delay)
                write.event("".join(words[i : i + 2]), ids=self._ids(i, words[i : i + 2]))
        else:
            for i, word in enumerate(words):
                time.sleep(delay)
                if "tools" in modes:
                    call = {"index": 0, "function": {"arguments": word}}
                    write.event(delta={"tool_calls": [call]})
                else:
                    write.event(word, ids=self._ids(i))
        finish = "tool_calls" if "tools" in modes else "stop" if "early" in modes else "length"
        write.event("", finish=finish)
        if "no_usage" not in modes:
            reported_tokens = count + ("miscounts" in modes) - ("undercounts" in modes)
            reported_tokens = 1 if "counts_one" in modes else reported_tokens
            reported_tokens = 0 if "counts_none" in modes else reported_tokens
            write.usage(len(prompt_of(body)), reported_tokens, self._cached(body))
        write.raw("[DONE]")

    def _ids(self, first, words=("one",)):
        return [first + i for i in range(len(words))] if "ids" in self.modes else None

    def _cached(self, body):
        prompt = prompt_of(body)
        known = prompt in self.served
        self.served.append(prompt)
        return len(prompt) - 1 if known and "prefix_cache" in self.modes else 0

    def _delay(self, body):
        """Seconds before each token: what a cache saves, what an earlier request left behind."""
        known = "prefix_cache" in self.modes and prompt_of(body) in self.served
        slow = "carries_over" in self.modes and self.longest > 500
        self.longest = max(self.longest, len(prompt_of(body)))
        if not self.modes & {"prefix_cache", "carries_over"}:
            return 0.01
        return 0.003 if known else 0.12 if slow else 0.03


def prompt_of(body):
    return body["prompt"] if "prompt" in body else json.dumps(body["messages"])


class Writer:
    def __init__(self, connection, chat):
        self._connection, self._chat = connection, chat

    def raw(self, text):
        self._connection.sendall(f"data: {text}\n\n".encode())

    def event(self, text="", delta=None, finish=None, ids=None):
        choice = {"index": 0, "finish_reason": finish}
        if self._chat or delta is not None:
            choice["delta"] = delta if delta is not None else {"content": text}
        else:
            choice["text"] = text
        if ids is not None:
            choice["token_ids"] = ids
        self.raw(json.dumps({"choices": [choice]}))

    def usage(self, prompt, completion, cached):
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
        self.raw(json.dumps({"choices": [], "usage": counts}))


def whole(connection, status, body):
    data = json.dumps(body).encode()
    connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


if __name__ == "__main__":
    port, modes = int(sys.argv[2]), sys.argv[3:]
    print("the stub begins", flush=True)
    if "ends" in modes:
        sys.exit("no such model")
    if "child" in modes:  # a descendant that leaves the group and the session
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True
        )
        print(f"child {child.pid}", flush=True)
    print(f"server {os.getpid()}", flush=True)
    Stub(*modes, port=port)._thread.join()
