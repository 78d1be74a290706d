"""A client of a few lines beside labkit's own, on one running server: do both measure the same?

    python benchmarks/independent_client.py PRESET http://127.0.0.1:8000 [CLIENTS [ROUNDS]]

Both send requests of the same lengths in turns, in a random order, ``ROUNDS`` times, from as many
clients. Each time the words are others, so that no server has their keys and values yet. The plain
client has a thread for each, and times the lines of a response as it reads them. For the median
TTFT, the mean TPOT and the tokens per second, the program prints the medians over the rounds, and
the geometric mean of the rounds' ratios, labkit's over the plain one's, with its 95 % interval
(Student's t). The server must serve ``model=smollm2`` and end no answer early. ``EXTRA`` of the
environment has further fields of the requests (JSON) that the server needs, such as ``{"model":
"smollm2", "ignore_eos": true}``.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from scipy.special import stdtrit

METRICS = ("ttft_p50_ms", "tpot_excl_first_mean_ms", "output_tok_s")
NUM_REQUESTS, PROMPT_WORDS, OUTPUT_TOKENS = 12, 60, 32
WORDS = "the old mill by river has left its clock and nobody in city past noon wind wall"


def request(url: str, prompt: str) -> tuple[float, list[float]]:
    """Return when a request was sent, and when each chunk with text was read."""
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True, "temperature": 0}
    body |= json.loads(os.environ.get("EXTRA", "{}"))
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    start = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response, times = connection.getresponse(), []
    if response.status != http.client.OK:
        sys.exit(f"{response.status}: {response.read().decode()}")
    for line in response:
        choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ()
        if choices and choices[0]["text"]:
            times.append(time.perf_counter())
    connection.close()
    return start, times


def plain(url: str, prompts: list[str], clients: int) -> list[float]:
    """Serve the prompts and return the values of ``METRICS``, one token to a chunk."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: request(url, prompt), prompts))
    ttft = statistics.median(times[0] - start for start, times in answers)
    tpot = statistics.mean((t[-1] - t[0]) / (len(t) - 1) for _, t in answers)
    tokens = sum(len(times) for _, times in answers)
    return [ttft * 1e3, tpot * 1e3, tokens / (max(t[-1] for _, t in answers) - begin)]


def labkit(preset: str, url: str, path: Path, clients: int) -> list[float]:
    """Serve the file's prompts with labkit and return the values of ``METRICS``."""
    out = path.with_name("study")
    overrides = [
        "engine=openai", f"engine.server.preset={preset}", f"engine.server.url={url}",
        "model=smollm2", "workload=chat", "workload.prompts.source=file",
        f"workload.prompts.path={path}", f"workload.num_requests={NUM_REQUESTS}",
        f"workload.concurrency={clients}", "ablation=none", "design.control=false",
        "design.blocks=1", f"out={out}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "labkit", *overrides, "-m"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    (record,) = out.glob("*/runs/*.json")
    metrics = json.loads(record.read_text("utf-8"))["cases"][0]["metrics"]
    values = {metric["name"]: metric["repeats"][0] for metric in metrics}
    out.rename(out.with_name(f"study-{time.monotonic_ns()}"))
    return [values[name] for name in METRICS]


def main(preset: str, url: str, clients: int = 1, rounds: int = 10) -> None:
    draw, words = random.Random(0), WORDS.split()

    def prompts() -> list[str]:
        return [" ".join(draw.choices(words, k=PROMPT_WORDS)) for _ in range(NUM_REQUESTS)]

    def by_labkit() -> list[float]:
        lines = ({"prompt": prompt, "max_tokens": OUTPUT_TOKENS} for prompt in prompts())
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
        return labkit(preset, url, path, clients)

    by = {"plain": lambda: plain(url, prompts(), clients), "labkit": by_labkit}
    values: dict[str, list[list[float]]] = {name: [] for name in by}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        plain(url, prompts(), clients)  # warm-up
        for _ in range(rounds):
            for name in draw.sample(sorted(by), 2):
                values[name].append(by[name]())
    for place, metric in enumerate(METRICS):
        own, ours = ([value[place] for value in values[name]] for name in by)
        logs = [math.log(b / a) for a, b in zip(own, ours, strict=True)]
        mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(rounds)
        low, high = (mean + sign * error * stdtrit(rounds - 1, 0.975) for sign in (-1, 1))
        print(
            f"{metric}: plain {statistics.median(own):.4g}, labkit {statistics.median(ours):.4g}, "
            f"ratio {math.exp(mean):.3f} ({math.exp(low):.3f} to {math.exp(high):.3f})"
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
