"""NVIDIA's AIPerf: synthetic requests, whole, streamed and as conversations."""

import json
import os
from pathlib import Path

from tasks import MODEL, TOKENIZER, URL, check, command, task

del os.environ["HF_HUB_OFFLINE"]  # with it, AIPerf takes a folder's path for a name on the Hub


def profile(name, *options):
    server = ["--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--tokenizer", TOKENIZER]
    load = ["--isl", "64", "--osl", "16", "--concurrency", "2"]
    output = ["--ui", "none", "--artifact-dir", name]
    command("aiperf", "profile", *server, *load, *output, *options)
    (file,) = Path(name).rglob("profile_export_aiperf.json")
    measured = json.loads(file.read_text())
    check(measured["request_count"]["avg"] > 0, "no request succeeded")
    check(not measured.get("error_summary"), f"errors: {measured.get('error_summary')}")


@task("chat")
def chat():
    profile("chat", "--request-count", "4")


@task("stream")
def stream():
    profile("stream", "--request-count", "4", "--streaming")


@task("turns")
def turns():
    profile("turns", "--streaming", "--conversation-num", "2", "--conversation-turn-mean", "3")
