"""Serve a model on 1, 2, 4, 8 and 16 threads of a pool of 16, however many cores there are.

    NUMBA_NUM_THREADS=16 python logits_by_threads.py FOLDER

Prints JSON. ``digests``: for each kind of model, one of all logits for each number of threads.
``steps``: for each number of threads, the waits of a replayed step of one row in which all threads
meet, and for each of its products [tasks, units].
"""

import hashlib
import json
import sys
from pathlib import Path

import numba
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from small_models import COMMON, build_model_dir

from labkit import config
from labkit.cpu.capture import graph_ops
from labkit.cpu.matmul import matmul_launch
from labkit.cpu.replay import graph_op_kernels
from labkit.engine import Request, SamplingParams, create
from labkit.engine.sampling import sampler

THREADS = (1, 2, 4, 8, 16)
LAYERS = 2
# A layer of SmolLM2 135M.
SIZES = COMMON | {
    "model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": LAYERS,
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 6144,
}  # fmt: skip
QUANTISED = SIZES | {"quantization": {"bits": 4, "group_size": 32}}
KINDS = {
    "float32": (SIZES, {}),
    "4 bits": (QUANTISED, {}),
    "int8": (QUANTISED, {"activations": config.Activations.int8}),
}
units_of = numba.njit(lambda *arguments: graph_op_kernels.num_units(*arguments))
tasks_of = numba.njit(lambda *arguments: matmul_launch._num_tasks(*arguments))


def serve(engine):
    """Serve a long prompt, a short one and one token; return a digest of all logits."""
    seen, sample, rng = {}, sampler.sample_rows, np.random.default_rng(0)

    def capture(logits, states):
        for row, state in zip(logits[: len(states)], states, strict=True):
            seen[state.request_id, state.num_tokens] = row.tobytes()
        return sample(logits, states)

    sampler.sample_rows = capture
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for length in (90, 1, 18):
        prompt = tuple(rng.integers(0, 298, length).tolist())
        engine.submit(Request(str(length), prompt, params))
    while engine.has_work():
        engine.step()
    sampler.sample_rows = sample
    assert len(seen) == 3 * params.max_tokens and engine.counters()["forward.replayed"]
    return hashlib.sha256(b"".join(seen[key] for key in sorted(seen))).hexdigest()


def step_of(engine, threads):
    """Return the waits of a replayed step of one row, and its products' tasks and units."""
    graph = engine._loop._launcher.run_model._forward._graph_runner._graph
    graph.set_shape(1, 64)
    units = [units_of(node["op"], node["params"], 1, threads) for node in graph._nodes]
    waits = sum(count > 1 or i == 0 or units[i - 1] > 1 for i, count in enumerate(units))
    products = []
    for node, count in zip(graph._nodes, units, strict=True):
        if node["op"] in matmul_launch.MATMULS:
            address = int(node["params"]) - graph._words.ctypes.data
            first, size = address // graph_ops.WORD_BYTES, graph_ops.num_words(node["op"])
            (params,) = graph._words[first : first + size].view(graph_ops.PARAMS[node["op"]])
            products.append([tasks_of(node["op"], params["num_panels"], 1), count])
    return {"waits": waits, "products": products}


def main(folder):
    digests, steps = {}, {}
    for kind, (sizes, options) in KINDS.items():
        path = folder / str("quantization" in sizes)
        if not path.exists():
            build_model_dir(path, sizes)
        scheduler = config.Scheduler(max_num_seqs=4, max_num_batched_tokens=64)
        budget = config.Budget(blocks=64)
        engine = create(config.Engine(budget=budget, scheduler=scheduler, **options), path)
        digests[kind], steps[kind] = {}, {}
        for threads in THREADS:
            numba.set_num_threads(threads)
            digests[kind][threads] = serve(engine)
            steps[kind][threads] = step_of(engine, threads)
    print(json.dumps({"layers": LAYERS, "digests": digests, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
