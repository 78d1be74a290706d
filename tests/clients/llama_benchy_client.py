"""llama-benchy: prompt and generation speeds, and those at a depth of a conversation."""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tasks import MODEL, TOKENIZER, URL, check, command, task

# Prompts are parts of a book, which it reads from a server.
Path("book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
books = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory="."))
threading.Thread(target=books.serve_forever, daemon=True).start()
BOOK = f"http://127.0.0.1:{books.server_port}/book.txt"


def measure(name, *options):
    common = ["--base-url", f"{URL}/v1", "--model", MODEL, "--tokenizer", TOKENIZER]
    sizes = ["--pp", "64", "--tg", "16", "--runs", "1"]
    result = ["--format", "json", "--save-result", name, "--exit-on-first-fail"]
    book = ["--book-url", BOOK, "--skip-coherence"]
    command("llama-benchy", *common, *sizes, *result, *book, *options)
    check(json.loads(Path(name).read_text())["benchmarks"], "no result")


@task("stream")
def stream():
    measure("stream.json")


@task("turns")
def turns():
    measure("turns.json", "--depth", "64", "--enable-prefix-caching")
