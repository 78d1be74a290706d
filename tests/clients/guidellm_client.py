"""GuideLLM: synthetic requests, whole and streamed."""

import json
from pathlib import Path

from tasks import MODEL, TOKENIZER, URL, check, command, task


def benchmark(name, stream):
    backend = f"kind=openai_http,target={URL},model={MODEL},stream={stream}"
    load = ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    data = ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    data += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    output = ["--output", f"kind=json,path={name}.json", "--disable-console"]
    command("guidellm", "run", "--backend", backend, *load, *data, *output)
    (measured,) = json.loads(Path(f"{name}.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    check(totals["successful"] > 0 and not totals["errored"], f"requests: {totals}")


@task("chat")
def chat():
    benchmark("chat", "false")


@task("stream")
def stream():
    benchmark("stream", "true")
