"""Random engines: a model, switches, requests and interruptions, all drawn from one number."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from architectures import settings as architecture
from small_models import CONFIGS, build_model_dir

from labkit import config
from labkit.engine import Request, SamplingParams

VOCAB = 300
EOS = tuple(range(290, 300))
NUM_TEXTS = 280  # ids of whole characters; the others are single bytes of longer characters
HYBRIDS = ("lfm2", "falcon_h1", "rwkv7", "mamba2", "kimi_linear", "qwen3_next")
WITHOUT_KV = ("rwkv7", "mamba2")
# MLX multiplies experts in float32 alone on a CPU, and packed weights very slowly.
NO_HALVES = ("kimi_linear", "qwen3_next", "quantised")
TRUNK = np.random.default_rng(0).integers(0, NUM_TEXTS, 60).tolist()  # of all prompts
STOPS = ("a", "bc", "cab", " a", "漢", "b漢", "é", "\n", "c c")
# Nothing else may differ between an engine and its oracle: these change the arithmetic.
PRECISION = ("dtype", "weights", "activations", "kv.dtype")
BLOCKLESS = ("contiguous", "padded", "naive")
# What a last bit becomes where keys, values or activations are rounded.
TIES = {"float16": 0.05, "bfloat16": 0.3, "int8": 0.1, "int4": 0.5}


def build_model(path, name):
    """Write a tiny model, and a tokenizer of few letters, so that stop texts are met."""
    import tokenizers

    own = {"vocab_size": VOCAB, "eos_token_id": list(EOS)}
    if name in HYBRIDS:  # heads of 64 numbers, as int8 and int4 need
        own |= {"head_dim": 64, "kv_lora_rank": 56}
    if name == "lfm2":
        own |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    build_model_dir(path, {**(CONFIGS.get(name) or architecture(name)), **own})
    texts = ["".join(p) for n in (1, 2, 3) for p in itertools.product("abc \n", repeat=n)]
    texts = [*texts, *(text + "漢" for text in texts)][:NUM_TEXTS]
    pieces = [text.encode() for text in texts] + [bytes([b]) for b in "é€漢😀".encode()]
    pieces += [bytes([b]) for b in range(0xF8, 0x100)]
    letters = _byte_letters()
    ids = {"".join(letters[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


class OnlyEven:
    """A constraint: after an even number of tokens only even ids may follow, then all."""

    def allowed(self, output, vocab_size):
        mask = np.ones(vocab_size, bool)
        mask[1::2] = len(output) % 2
        return mask


INTERRUPTIONS = ("abort", "abort", "preempt", "preempt", "clear", "drain")


@dataclass(frozen=True)
class Case:
    """An engine's options by key, and what is asked of it.

    ``arrivals``: the step before which each request is submitted. ``interruptions``: a step, what
    happens before it (a name of ``INTERRUPTIONS``), and a request's id.
    """

    seed: int
    model: str
    options: dict[str, Any]
    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]
    interruptions: tuple[tuple[int, str, str], ...]
    threads: int
    through_llm: bool

    @property
    def engine(self) -> config.Engine:
        """The options as a config."""
        return engine_options(self.options)

    @property
    def plain(self) -> dict[str, Any]:
        """The options of the oracle, which has the same arithmetic."""
        kept = {key: self.options[key] for key in PRECISION if key in self.options}
        if kept.get("dtype") in ("float16", "bfloat16"):  # NumPy computes in float32 alone
            kept["attention.backend"] = "gather"
        return {**kept, "budget.blocks": 64}

    @property
    def tie(self) -> float:
        """The margin below which two tokens may be swapped if sums have another order."""
        return max(
            TIES.get(self.options.get(key), 1e-3) for key in ("dtype", "activations", "kv.dtype")
        )

    @property
    def exact(self) -> bool:
        """Whether no bit of a request's logits depends on what shares its steps."""
        return is_exact(self.model, self.options)


def is_exact(model: str, options: dict[str, Any]) -> bool:
    """Return whether labkit's own kernels compute everything, in one order of summation."""
    kernels = {"attention.backend": "fused", "attention.split_kv": "off", "attention.device": "cpu"}
    return model in CONFIGS and options.items() >= kernels.items()


def engine_options(options):
    """Return the config of options by key."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        group, _, leaf = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[leaf] = value
    return config.from_plain(config.Engine, tree)


class Draw:
    """Draws values from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def number(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, *values: Any) -> Any:
        return values[self.number(0, len(values) - 1)]

    def rarely(self, usual: Any, *others: Any, share: float = 0.3) -> Any:
        return self.pick(*others) if self.chance(share) else usual


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = Draw(seed)
    model = draw.pick(*HYBRIDS) if draw.chance(0.2) else draw.pick(*CONFIGS)
    options = draw_options(draw, model)
    through_llm = options["name"] == "paged" and draw.chance(0.4)
    sampled, count = is_exact(model, options), draw.number(3, 7)
    requests = tuple(
        draw_request(draw, i, sampled=sampled, stops=through_llm) for i in range(count)
    )
    kinds = INTERRUPTIONS if draw.chance(0.6) else ()
    interruptions = [
        (draw.number(1, 30), draw.pick(*kinds), str(draw.number(0, count - 1)))
        for _ in range(draw.number(1, 6) if kinds else 0)
    ]
    arrivals = sorted(draw.rarely(0, *range(12), share=0.5) for _ in range(count))
    threads = draw.number(1, 2)
    return Case(
        seed,
        model,
        options,
        requests,
        tuple(arrivals),
        tuple(interruptions),
        threads,
        through_llm,
    )


def draw_options(draw: Draw, model: str) -> dict[str, Any]:
    """Draw until the switches go together."""
    layout = draw.rarely("paged", *BLOCKLESS, share=0.2)
    while True:
        options = {"name": layout, **draw_scheduler(draw, layout)}
        options |= (
            draw_paged(draw, options, model)
            if layout == "paged"
            else draw_dense(draw, layout, model)
        )
        try:
            engine_options(options)
        except config.ConfigError:
            continue
        return options


def draw_scheduler(draw: Draw, layout: str) -> dict[str, Any]:
    seqs = draw.number(1, 5)
    budget = seqs + draw.pick(0, 2, 7, 13, 24, 60)
    chunk = draw.pick(None, None, draw.number(1, budget), 8 * draw.number(1, 3))
    static = layout == "naive" or (layout != "padded" and draw.chance(0.1))
    options = {
        "admission": "static" if static else "continuous",
        "order": "prefill_first" if static else draw.pick("decode_first", "prefill_first"),
        "composition": "split" if layout in ("padded", "naive") else draw.pick("mixed", "split"),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "chunk": chunk,
        "chunk_policy": draw.rarely("static", "shrinking", share=0.2),
        "prefill_cap": draw.rarely(None, draw.number(1, budget), share=0.2),
        "prefill_floor": draw.rarely(None, draw.number(1, budget), share=0.2),
        "reservation": draw.pick("full", "optimistic") if layout == "paged" else "full",
        "queue": draw.pick("fcfs", "priority"),
    }
    if options["reservation"] == "optimistic":
        options["watermark"] = draw.pick(None, 0, 0.3)
    return {f"scheduler.{key}": value for key, value in options.items()}


def draw_dense(draw: Draw, layout: str, model: str) -> dict[str, Any]:
    """The switches of the layouts without blocks."""
    contiguous = layout == "contiguous"
    options = {
        "kv.layout": "contiguous" if contiguous else "padded",
        "kv.block_size": draw.pick(8, 16, 32, 64),
        "attention.backend": "sdpa",
        "attention.split_kv": "off",
        "attention.device": "cpu",
        "budget.blocks": draw.number(64, 160),
        "forward": draw.rarely("batched", "per_request")
        if contiguous and model in CONFIGS
        else "batched",
    }
    if contiguous:
        # MLX's attention reads no quantised keys in the first two.
        if model not in ("gemma2", "kimi_linear", *WITHOUT_KV):
            options["kv.dtype"] = draw.rarely("float32", "int8", "int4")
        options["kv.growth_step"] = draw.pick(1, 16, 256)
        options["kv.set_aside"] = draw.rarely(None, 1, 100)
    return options


def draw_paged(draw: Draw, scheduler: dict[str, Any], model: str) -> dict[str, Any]:
    """The switches of the paged layout, whose pool is often far too small."""
    size = draw.pick(8, 8, 16, 32, 64)
    own = ("draft", "per_request") if model in CONFIGS else ()  # not with recurrent states
    options = {
        "decode_shape": draw.rarely("exact", "bucketed", "fixed", "captured"),
        "prefix_cache": draw.pick("none", "hash", "hash", "radix", "radix"),
        "speculation": draw.rarely("none", "ngram", "random", *own[:1], share=0.4),
        "pipeline": draw.rarely("sync", "overlap"),
        "forward": draw.rarely("batched", *own[1:], share=0.1) if own else "batched",
        "graph_replay": draw.chance(0.8),
        "batch_invariant": draw.chance(0.1 * bool(own)),
        "activations": draw.pick("float32", "int8") if model == "quantised" else "float32",
        "weights": draw.rarely("model", "float32", share=0.1),
        "kv.layout": "paged",
        "kv.block_size": size,
        "kv.free_list": draw.pick("lifo", "fifo"),
        "kv.window_pools": model == "gemma3" and draw.chance(0.5),
        "budget.blocks": 2 + draw.pick(*range(40 // size, 160 // size), 400 // size),
    }
    if options["decode_shape"] == "captured":
        options["decode_sizes"] = draw.pick([1, 2, 4, 8], [2, 3], [4])
    if options["prefix_cache"] != "none":
        options["prefix_eviction"] = draw.pick("lru", "lfu")
        if model in CONFIGS:  # refused with recurrent states
            options["kv.prefix_insert"] = draw.rarely("computed", "finish")
        chunk = scheduler["scheduler.chunk"]
        aligned = chunk is not None and chunk % size == 0
        options["prefix_align"] = "chunk" if aligned and draw.chance(0.5) else "block"
        options["kv.state_snapshots"] = draw.rarely(None, 1, 2, 6)
    options |= draw_attention(draw)
    if options["attention.device"] != "cpu":
        options["batch_invariant"] = False  # refused: MLX multiplies
    if options["attention.backend"] in ("gather", "gather_padded", "masked"):
        halves = () if model in NO_HALVES else ("float16", "bfloat16")
        options["dtype"] = draw.pick("model", "float32", *halves)
    elif (
        model not in WITHOUT_KV
        and options["attention.device"] == "cpu"
        and options["attention.backend"] == "fused"
    ):
        narrow = ("float16", "bfloat16", "int8", "int4")[: 2 if model == "kimi_linear" else 4]
        options["kv.dtype"] = draw.rarely("float32", *narrow, share=0.5)
    return options | draw_drafts(draw, options["speculation"], model)


def draw_attention(draw: Draw) -> dict[str, Any]:
    backend = draw.rarely("fused", "gather", "gather_padded", "masked", "reference", share=0.3)
    options = {"backend": backend, "split_kv": "off", "device": "cpu"}
    if backend == "fused":
        options["device"] = draw.rarely("cpu", "emulated", share=0.06)
        options |= {
            "resolver": draw.pick("binary_search", "seq_map", "padded_grid", "work_plan"),
            "split_kv": draw.rarely("off", "auto", "2", "3", share=0.2),
            "unit": draw.rarely("auto", "head", "kv_head", "token", share=0.3),
            "window_skip": draw.chance(0.7),
            "tile_threshold": draw.pick(2, 2, 3, 9),
        }
    return {f"attention.{key}": value for key, value in options.items()}


def draw_drafts(draw: Draw, speculation: str, model: str) -> dict[str, Any]:
    if speculation == "none":
        return {}
    options = {
        "num_draft_tokens": draw.number(1, 6),
        "verification": draw.pick("window", "staircase"),
    }
    if speculation == "ngram":
        options |= {"ngram_min": draw.number(1, 2), "ngram_max": draw.number(2, 4)}
    if speculation == "draft":
        options["draft_layers"] = draw.pick(None, 3, *(() if model == "gemma3" else (1, 2)))
    return {f"drafts.{key}": value for key, value in options.items()}


def draw_request(draw: Draw, index: int, *, sampled: bool, stops: bool) -> Request:
    """A request that often begins like others; ``sampled``: it may draw its tokens at random."""
    trunk = TRUNK[: draw.pick(0, 16, 32, 48, draw.number(0, 60))]
    length = draw.number(not trunk, draw.pick(1, 5, 20))
    tail = [draw.number(0, NUM_TEXTS - 1) for _ in range(length)]
    few = [draw.number(0, VOCAB - 1) for _ in range(3)]  # often repeated, so drafts are right
    params: dict[str, Any] = {
        "max_tokens": draw.number(1, draw.pick(2, 12, 24)),
        "ignore_eos": draw.chance(0.5),
        "logprobs": draw.rarely(None, 0, 3, share=0.15),
        "prompt_logprobs": draw.rarely(None, 0, 2, share=0.1),
        "logit_bias": dict.fromkeys(few, 9.0) if draw.chance(0.3) else {},
        "repetition_penalty": draw.rarely(1.0, 1.3, share=0.1),
        "frequency_penalty": draw.rarely(0.0, 0.7, share=0.1),
        "presence_penalty": draw.rarely(0.0, 0.5, share=0.1),
        "stop_token_ids": tuple(few) if draw.chance(0.2) else (),
        "constraint": OnlyEven() if draw.chance(0.1) else None,
        "stop": draw.pick((), draw.pick(*STOPS), (draw.pick(*STOPS), "cc")) if stops else (),
    }
    if sampled and draw.chance(0.3):
        params |= {
            "temperature": draw.pick(0.7, 1.5),
            "top_k": draw.pick(0, 5, 40),
            "top_p": draw.pick(1.0, 0.9),
            "min_p": draw.pick(0.0, 0.05),
            "seed": draw.pick(None, 7),
        }
    priority = 0 if stops else draw.number(-1, 1)
    return Request(str(index), (*trunk, *tail), SamplingParams(**params), priority=priority)
