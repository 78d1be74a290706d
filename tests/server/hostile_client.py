"""The client of hostile requests, and what a server must keep to meanwhile."""

import concurrent.futures
import http.client
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from hostile_cases import TEMPLATE

HEALTH_WITHIN_S = 0.5
NUM_REFERENCES = 16


@dataclass
class Response:
    status: int
    text: str

    def json(self):
        return json.loads(self.text)


class Client:
    """Sends requests to a server. ``options`` are the fields of a request's body."""

    def __init__(self, url):
        self.address = urlsplit(url).netloc

    def chat(self, **options):
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/chat/completions", messages=messages, **options)

    def responses(self, **options):
        return self.post("/v1/responses", input="hello", **options)

    def messages(self, **options):
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/messages", messages=messages, **options)

    def connect(self):
        """Return a connection that the caller must close."""
        host, _, port = self.address.partition(":")
        return socket.create_connection((host, int(port)), timeout=120)

    def post(self, path, **options):
        return self.send("POST", path, json.dumps({"model": "tiny", **options}))

    def send(self, method, path, body=None, timeout=120):
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return Response(response.status, response.read().decode())
        finally:
            connection.close()

    def reference(self, number):
        """Return the token ids of one of the 16 requests."""
        prompt = [(number * 37 + at * 11) % 4000 for at in range(5 + number * 3)]
        response = self.post(
            "/v1/completions", prompt=prompt, max_tokens=24, seed=number, ignore_eos=True,
            return_token_ids=True,
        )  # fmt: skip
        assert response.status == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def references(self):
        """Return the token ids of all 16, sent at once."""
        with concurrent.futures.ThreadPoolExecutor(NUM_REFERENCES) as pool:
            return list(pool.map(self.reference, range(NUM_REFERENCES)))


def memory_bytes(pid):
    """Return the memory of a process and of the processes that it started, each one's own."""
    processes = [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    return sum(map(own_bytes, processes))


def own_bytes(pid):
    """Return what a process alone has written, or 0 if it has ended.

    The rest of its resident memory are pages of files, such as libraries. Whether they count as
    shared depends on what other processes map.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if sys.platform == "linux" else psutil.Process(pid).memory_full_info().uss
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def add_hostile_template(model):
    """Put templates without end before the chat template of a model's directory; return it."""
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields["chat_template"] = TEMPLATE + fields["chat_template"]
    path.write_text(json.dumps(fields))
    return model
