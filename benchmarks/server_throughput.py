"""The cost of HTTP: output tokens/s of the engine in process, of labkit's server and of others.

All servers start once and stay alive. Every round runs all of them, in a new random order. In a
round, each of 16 clients sends its next request when its previous request has ended, so a server
gets the next request one round trip later. All servers get the same texts and sample greedily. The
clients share one event loop on raw sockets. mlx_lm.server gets a preloaded OpenBLAS, which its pip
package lacks.
llama.cpp's server takes part if ``--llama`` gives its command with a GGUF file of the same weights.
Run as ``python benchmarks/server_throughput.py``; ``--json FILE`` writes every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

INSIDE, OURS, MLX_LM, LLAMA = "in process", "labkit.serve", "mlx_lm.server", "llama.cpp"
TARGETS = {INSIDE: 0.95, MLX_LM: 4.0, LLAMA: 1.3}


@dataclass(frozen=True)
class Load:
    """The load of a round: the prompts, the output tokens per prompt, the concurrent requests."""

    texts: tuple[str, ...]
    max_tokens: int
    concurrency: int


@dataclass(frozen=True)
class Round:
    """The result of a round: output tokens and wall seconds."""

    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


# --- inside the process ---------------------------------------------------------------------


def child(model: str) -> None:
    """Serve each round (a line of JSON on standard input), and print its tokens and seconds."""
    from labkit.engine.request import Request
    from labkit.engine.sampling.sampling_params import SamplingParams
    from labkit.serve import compose
    from labkit.server.__main__ import load

    _, tokenizer, engine = load(compose([f"model={model}"]))
    encode = tokenizer.encode
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        work = Load(**json.loads(line))
        params = SamplingParams(max_tokens=work.max_tokens, ignore_eos=True)
        start, tokens = time.perf_counter(), 0
        waiting = [
            Request(f"{number}-{at}", tuple(encode(text)), params)
            for at, text in enumerate(work.texts)
        ][::-1]
        for _ in range(min(work.concurrency, len(waiting))):
            engine.submit(waiting.pop())
        while engine.has_work():
            for event in engine.step():
                tokens += 1
                if event.finish_reason is not None and waiting:
                    engine.submit(waiting.pop())
        print(json.dumps([tokens, time.perf_counter() - start]), flush=True)


class Inside:
    """The engine in a separate process, driven by calls of ``step``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def round(self, load: Load) -> Round:
        """Run a round."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(vars(load)) + "\n")
        self._process.stdin.flush()
        return Round(*json.loads(self._process.stdout.readline()))


# --- over HTTP ------------------------------------------------------------------------------


class Served:
    """An OpenAI-compatible server and the clients of a round."""

    def __init__(self, url: str, extra: dict[str, Any]) -> None:
        self._host, _, self._port = urlsplit(url).netloc.partition(":")
        self._extra = extra

    def round(self, load: Load) -> Round:
        """Run a round."""
        return asyncio.run(self._round(load))

    async def _round(self, load: Load) -> Round:
        waiting, start, tokens = list(load.texts)[::-1], time.perf_counter(), 0

        async def client() -> None:
            nonlocal tokens
            while waiting:
                count = await self._ask(waiting.pop(), load.max_tokens)
                tokens += count

        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        return Round(tokens, time.perf_counter() - start)

    async def _ask(self, text: str, max_tokens: int) -> int:
        """Stream a completion and return the number of output tokens that the server reports."""
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._extra}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(data)
            + data
        )
        tail = b""
        while part := await reader.read(1 << 16):
            tail = (tail + part)[-4096:]
        writer.close()
        counts = re.findall(rb'"completion_tokens": ?(\d+)', tail)
        assert counts, tail
        return int(counts[-1])


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own; end the whole group on exit."""
    with log.open("w") as output:
        started = subprocess.Popen(
            command, stderr=output, text=True, start_new_session=True, **options
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def until_it_generates(arm: Served, text: str, started: subprocess.Popen[str], log: Path) -> None:
    """Wait for a first token: a health check may succeed although the engine is dead."""
    deadline = time.monotonic() + 180
    while True:
        try:
            arm.round(Load((text,), 2, 1))
            return
        except (OSError, AssertionError):
            if started.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{log}: the server did not start\n{log.read_text()[-2000:]}")
            time.sleep(0.2)


@contextlib.contextmanager
def inside(model: str, folder: Path) -> Iterator[Inside]:
    """Start the engine's process, with the environment that the server's process has."""
    from labkit.machine.worker_environment import core_count, worker_environment

    environment, _ = worker_environment(os.environ, threads=core_count(), cores=core_count())
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "--model", model]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    with process(command, folder / "inside.log", **pipes) as started:
        assert started.stdout
        for line in started.stdout:
            if line == "ready\n":
                break
        yield Inside(started)


@contextlib.contextmanager
def ours(model: str, folder: Path, text: str) -> Iterator[Served]:
    """Start labkit's server."""
    port, log = free_port(), folder / "ours.log"
    command = [sys.executable, "-m", "labkit.serve", f"model={model}", f"server.port={port}"]
    with process(command, log, stdout=subprocess.DEVNULL) as started:
        arm = Served(f"http://127.0.0.1:{port}", {"model": model, "ignore_eos": True})
        until_it_generates(arm, text, started, log)
        yield arm


@contextlib.contextmanager
def mlx_lm(path: Path, folder: Path, text: str) -> Iterator[Served]:
    """Start mlx_lm's server on the same model directory."""
    from labkit.machine.worker_environment import core_count

    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        from labkit.machine import openblas_for_mlx

        environment["LD_PRELOAD"] = str(openblas_for_mlx.build_library())
        environment["OPENBLAS_NUM_THREADS"] = str(core_count())
    port, log = free_port(), folder / "mlx_lm.log"
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(path)]
    command += ["--port", str(port)]
    with process(command, log, stdout=subprocess.DEVNULL, env=environment) as started:
        arm = Served(f"http://127.0.0.1:{port}", {"model": str(path)})
        until_it_generates(arm, text, started, log)
        yield arm


@contextlib.contextmanager
def llama(command: str, folder: Path, text: str) -> Iterator[Served]:
    """Start llama.cpp's server; ``{port}`` in the command is filled in."""
    port, log = free_port(), folder / "llama.log"
    words = command.format(port=port).split()
    with process(words, log, stdout=subprocess.DEVNULL) as started:
        arm = Served(f"http://127.0.0.1:{port}", {"model": "x", "ignore_eos": True})
        until_it_generates(arm, text, started, log)
        yield arm


def free_port() -> int:
    """Return a free port."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- the comparison -------------------------------------------------------------------------


def texts(path: Path, count: int, tokens: int) -> tuple[str, ...]:
    """Return ``count`` texts of about ``tokens`` tokens each, no two with a common prefix."""
    from labkit.models.tokenizer import load

    tokenizer, draw = load(path), random.Random(0)
    return tuple(
        tokenizer.decode([draw.randrange(300, tokenizer.vocab_size - 2) for _ in range(tokens)])
        for _ in range(count)
    )


def compare(options: argparse.Namespace) -> dict[str, list[float]]:
    """Run the rounds and return each arm's tokens per second by round."""
    from labkit import models
    from labkit.serve import compose

    path = models.resolve(compose([f"model={options.model}"]).model).path
    load = Load(
        texts(path, options.requests, options.prompt_tokens),
        options.output_tokens,
        options.concurrency,
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms: dict[str, Inside | Served] = {
            INSIDE: stack.enter_context(inside(options.model, folder)),
            OURS: stack.enter_context(ours(options.model, folder, load.texts[0])),
        }
        if not options.no_mlx_lm:
            arms[MLX_LM] = stack.enter_context(mlx_lm(path, folder, load.texts[0]))
        if options.llama:
            arms[LLAMA] = stack.enter_context(llama(options.llama, folder, load.texts[0]))
        rates_by_arm: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            arm.round(Load(load.texts[: options.concurrency], 8, options.concurrency))
        order = random.Random(options.seed)
        for number in range(options.rounds):
            for name in order.sample(sorted(arms), len(arms)):
                done = arms[name].round(load)
                rates_by_arm[name].append(done.tok_s)
                print(f"round {number + 1}, {name}: {done.tokens} tokens, {done.tok_s:.1f} tok/s")
    return rates_by_arm


def show(rates_by_arm: dict[str, list[float]]) -> None:
    """Print the table: each arm's median, and the ratios of labkit's server to it by round."""
    print(f"\n| arm | tok/s | {OURS} / arm | rounds | target |\n| --- | --- | --- | --- | --- |")
    for name, rates in rates_by_arm.items():
        ratios = [mine / rate for mine, rate in zip(rates_by_arm[OURS], rates, strict=True)]
        least, most = min(ratios), max(ratios)
        target = f"{TARGETS[name]:g}" if name in TARGETS else ""
        print(
            f"| {name} | {statistics.median(rates):.1f} | {statistics.median(ratios):.3f} | "
            f"{least:.3f} to {most:.3f} | {target} |"
        )
    if LLAMA not in rates_by_arm:
        print("\nllama.cpp's server: not run; give its command with --llama")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-mlx-lm", action="store_true")
    parser.add_argument("--llama", metavar="COMMAND", help="such as 'llama-server ... {port}'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.model)
        return
    rates_by_arm = compare(options)
    show(rates_by_arm)
    if options.json:
        options.json.write_text(json.dumps(rates_by_arm, indent=1))


if __name__ == "__main__":
    main()
