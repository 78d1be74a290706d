"""Every counter that a run of labkit's own may leave: its name, unit and meaning, in one table.

The check of claims, the report and ``docs/counters.md`` read it. A counter that is counted
and not listed here fails a test.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

OWN = "own."  # what a class of the user's own counts under this is the user's to name


@dataclass(frozen=True)
class Counter:
    """One counter, or a family of them: ``resolver.*`` stands for one counter of each word.

    Parameters
    ----------
    name
        The counter's name; of a family with a star for the word.
    unit
        What it counts: ``tokens``, ``ms``.
    meaning
        One line for people.
    option
        A family's words are the choices of this option of the config.
    words
        A family's words besides those. A family without option and words counts by number.
    in_kernel
        Whether the attention kernel counts it itself; what its plan says is computed.
    """

    name: str
    unit: str
    meaning: str
    option: str | None = None
    words: tuple[str, ...] = ()
    in_kernel: bool = False

    @property
    def family(self) -> str | None:
        """What the names of a family begin with; None for a single counter."""
        return self.name[:-1] if self.name.endswith("*") else None

    @property
    def numbered(self) -> bool:
        """Whether a family's words are whole numbers."""
        return self.family is not None and self.option is None and not self.words


def _of(option: str, name: str, unit: str, meaning: str, *words: str) -> Counter:
    return Counter(name, unit, meaning, option, words)


COUNTERS: tuple[Counter, ...] = (
    # Which part ran.
    _of("engine.name", "engine.*", "steps", "steps (kernel workloads: launches) of the engine"),
    Counter("forward.*", "steps", "steps whose forward ran there", words=("numpy", "mlx")),
    Counter("forward.replayed", "steps", "of those, steps replayed from a recording in one call"),
    _of("engine.blas", "blas.*", "flag", "1: this BLAS multiplies for MLX", "accelerate"),
    _of("engine.kv.layout", "layout.*", "steps", "steps over this KV layout"),
    _of("engine.budget.policy", "budget.*", "flag", "1: this policy sized the KV pool"),
    _of("engine.prefix_cache", "prefix_cache.*", "requests", "admissions with this prefix cache"),
    _of("engine.decode_shape", "decode_shape.*", "steps", "steps of decodes alone in this shape"),
    _of("engine.pipeline", "pipeline.*", "steps", "steps of this pipeline"),
    Counter("pipeline.overlapped", "steps", "steps submitted while the one before still ran"),
    _of("engine.speculation", "speculation.*", "steps", "steps with this way of drafting"),
    Counter("ranks.*", "steps", "steps that so many processes computed together"),
    Counter("ranks.agreed", "steps", "steps that all ranks had scheduled alike before any began"),
    Counter("ranks.sums", "sums", "sums over the ranks, by layers of which each had some inputs"),
    Counter("ranks.kv_heads", "heads", "key/value heads that the pools of a process hold"),
    Counter("batch_invariant", "flag", "1: logits were checked not to depend on the batch"),
    Counter("dtype.*", "flag", "1: weights and activations are of this type", None,
            ("float32", "float16", "bfloat16")),
    Counter("weights.*", "bytes", "bytes of weights that are held, and so read, in this form", None,
            ("quantised", "float32", "float16", "bfloat16")),
    Counter("weights.narrow", "bytes", "those of them in less than float32: quantised or in half "
            "precision"),
    _of("engine.kv.dtype", "kv_dtype.*", "launches",
        "launches over keys and values that are kept in this type"),
    Counter("mlx.evaluations", "evaluations", "evaluations of MLX graphs that steps waited for"),
    # The scheduler.
    _of("engine.scheduler.admission", "admission.*", "requests", "requests admitted by this rule"),
    _of("engine.scheduler.reservation", "reservation.*", "requests",
        "requests admitted under this reservation"),
    _of("engine.scheduler.queue", "queue.*", "requests",
        "requests that this queue let overtake another"),
    _of("engine.scheduler.order", "order.*", "steps", "steps in which the order decided"),
    _of("engine.scheduler.composition", "composition.*", "steps",
        "steps in which the composition decided"),
    _of("engine.scheduler.chunk_policy", "chunk.*", "chunks", "chunks that this policy cut short"),
    Counter("steps.total", "steps", "steps of the engine"),
    Counter("steps.*", "steps", "steps of decodes alone, of prompts alone, or of both", None,
            ("decode", "prefill", "mixed")),
    Counter("steps.full", "steps", "steps that used up max_num_batched_tokens"),
    Counter("steps.prefill_capped", "steps", "steps whose prompts prefill_cap cut short"),
    Counter("steps.prefill_floored", "steps", "steps in which prefill_floor made room for prompts"),
    Counter("preemptions", "preemptions", "running requests sent back to the queue"),
    Counter("requests.submitted", "requests", "requests submitted"),
    Counter("requests.finished", "requests", "requests that came to their end"),
    Counter("requests.aborted", "requests", "requests aborted"),
    Counter("requests.refused", "requests", "requests refused at submission"),
    Counter("requests.most_running", "requests", "the most that ran at a time"),
    # Streams of a server.
    Counter("requests.failed", "requests", "requests that a server did not serve whole"),
    Counter("finish.*", "requests", "streams that ended for this reason", None,
            ("stop", "length", "tool_calls", "content_filter", "other")),
    Counter("stream.chunks", "chunks", "reads of a stream that brought content"),
    Counter("stream.bundled", "chunks", "those of them that brought more than one event or token"),
    Counter("stream.empty", "events", "events without content: a role, an empty delta"),
    Counter("stream.tool_calls", "events", "events with a part of a tool call"),
    Counter("stream.refusals", "events", "events with a part of a refusal"),
    Counter("prompts.respelled", "requests",
            "prompts that a server reads as other token ids, as far as is known"),
    Counter("tokens.prompt", "tokens", "prompt tokens as the workload has them"),
    Counter("tokens.prompt_usage", "tokens", "prompt tokens as the server counts them"),
    Counter("tokens.cached", "tokens", "prompt tokens that the server found computed"),
    Counter("tokens.usage", "tokens", "output tokens as the server counts them"),
    Counter("tokens.tokenizer", "tokens", "output tokens as the tokenizer counts their text"),
    Counter("tokens.stream", "tokens",
            "output tokens as the stream has them: ids, else events with text"),
    # Tokens.
    Counter("tokens.prefill", "tokens", "prompt tokens computed"),
    Counter("tokens.decode", "tokens", "tokens computed behind a prompt"),
    Counter("tokens.computed", "tokens", "tokens computed in all"),
    Counter("tokens.sampled", "tokens", "tokens sampled"),
    Counter("tokens.padded", "tokens", "rows computed for no token"),
    Counter("tokens.discarded", "tokens", "tokens computed for a request that had ended"),
    Counter("tokens.recomputed", "tokens", "tokens computed again after a preemption"),
    Counter("shape.new", "steps", "steps of a shape not seen before"),
    Counter("shape.reused", "steps", "steps of a shape seen before"),
    Counter("shape.repeated", "steps", "steps of the shape of the step before"),
    # Time.
    Counter("step_ms", "ms", "time of all steps"),
    Counter("device_ms", "ms", "time of the model's forwards"),
    Counter("host_ms", "ms", "time of all steps in which the host did not wait for a forward"),
    Counter("pipeline.wait_ms", "ms", "time that the host waited for an overlapped step"),
    # KV memory.
    Counter("blocks.allocated", "blocks", "KV blocks handed out"),
    Counter("blocks.freed", "blocks", "KV blocks given back"),
    Counter("blocks.peak", "blocks", "the most KV blocks in use"),
    Counter("blocks.headroom", "blocks", "KV blocks that were never in use at a time"),
    Counter("blocks.total", "blocks", "KV blocks of the pool"),
    Counter("kv_block_bytes", "bytes", "bytes of a KV block over all layers"),
    Counter("peak_kv_bytes", "bytes", "the most KV memory held"),
    Counter("kv_used_bytes", "bytes", "the most KV memory that held computed tokens"),
    Counter("kv.slots_held", "tokens", "tokens of KV memory that requests held when they left"),
    Counter("kv.slots_filled", "tokens", "those of them that were computed"),
    Counter("kv.set_aside", "tokens", "tokens of KV memory that requests had from the beginning"),
    Counter("kv.bytes_copied", "bytes", "KV bytes copied from one place to another"),
    Counter("kv.moves", "moves", "times that KV memory moved"),
    Counter("kv.padded_slots", "slots", "padding in the KV cache that decodes attended to"),
    Counter("padding.waste_pct", "%", "keys read over that hold no token of a live request"),
    Counter("prefix.queried_tokens", "tokens", "prompt tokens looked up in the prefix cache"),
    Counter("prefix.hit_tokens", "tokens", "prompt tokens found there"),
    Counter("prefix.cached_blocks", "blocks", "KV blocks kept for their prefix"),
    Counter("prefix.evicted_blocks", "blocks", "KV blocks dropped from the prefix cache"),
    # Drafts.
    Counter("spec.*", "steps", "steps with drafts asked of this proposer", None,
            ("ngram", "draft", "random")),
    Counter("spec.drafted", "tokens", "tokens drafted"),
    Counter("spec.accepted", "tokens", "drafted tokens that were right"),
    Counter("spec.drafted.pos*", "tokens", "tokens drafted at this place behind the last token"),
    Counter("spec.accepted.pos*", "tokens", "those of them that were right"),
    Counter("spec.unit_segments", "segments", "segments of one token that a draft was cut into"),
    Counter("spec.draft_ms", "ms", "time of drafting"),
    # Videos.
    _of("workload.picks", "picks.*", "requests",
        "requests whose frames and decoder's counts are those of this way of picking"),
    _of("workload.decoder", "decoder.*", "requests", "those of them with this decoder"),
    Counter("video.packets_read", "packets", "packets that the demuxer gave"),
    Counter("video.packets_decoded", "packets", "packets that the decoder was given"),
    Counter("video.frames_decoded", "frames", "frames that the decoder gave"),
    Counter("video.delta_frames", "frames", "those of them that are no keyframes"),
    Counter("video.keyframes_alone", "frames", "frames of requests that decoded nothing else"),
    Counter("video.seeks", "seeks", "seeks to a keyframe"),
    Counter("video.frames_picked", "frames", "frames that requests returned, repeats included"),
    # Compiled graphs.
    Counter("compile.count", "graphs", "graphs traced for compilation"),
    Counter("compile.reused", "calls", "calls that found their graph"),
    # Attention; sums over launches.
    Counter("kernel.*", "launches", "launches of this kernel", None,
            ("decode", "tiled", "reduce", "reference", "gather", "sdpa")),
    _of("engine.attention.resolver", "resolver.*", "launches", "launches with this resolver"),
    _of("engine.attention.device", "device.*", "launches", "launches of a fused kernel there"),
    Counter("block_size.*", "launches", "launches over KV blocks of so many tokens"),
    Counter("gqa.shared", "launches", "launches in which query heads shared the load of a key"),
    Counter("gqa.unshared", "launches", "launches in which every query head loaded its own"),
    Counter("split_kv.partitions", "units", "units among which a query's keys were divided"),
    Counter("attention.search_iterations", "iterations", "binary-search iterations over all units",
            in_kernel=True),
    Counter("attention.dependent_loads", "loads",
            "loads that units waited for, one after the other, to learn their sequence"),
    Counter("attention.surplus_threadgroups", "units", "units that found no work and exited",
            in_kernel=True),
    Counter("attention.kv_blocks_visited", "blocks", "KV blocks walked, over all units",
            in_kernel=True),
    Counter("attention.bytes", "bytes", "bytes of the keys, values, queries and output moved"),
    Counter("attention.map_us", "us", "host time of building the resolver's maps"),
    Counter("attention.keys", "keys", "keys that MLX's own attention read, padding included"),
    Counter("attention.keys_padded", "keys", "those of them that hold no token"),
    Counter("window.skipped_blocks", "blocks", "KV blocks outside a window that were left out"),
    Counter("window.masked_blocks", "blocks",
            "KV blocks outside a window that were walked for nothing"),
)  # fmt: skip

# What launches count by themselves, without an engine's steps: how its name begins.
OF_LAUNCHES = (
    "engine.", "kernel.", "resolver.", "device.", "block_size.", "kv_dtype.", "gqa.", "split_kv.",
    "attention.", "window.",
)  # fmt: skip
Choices = Callable[[str], Sequence[str]]
_SINGLE = {counter.name: counter for counter in COUNTERS if counter.family is None}
_FAMILIES = tuple(counter for counter in COUNTERS if counter.family is not None)


def find(name: str, choices: Choices | None = None) -> Counter | None:
    """Return the table's entry for a counter; None where there is none.

    ``choices``: returns the words of an option, to which its family is then held; without
    it a family takes any word.
    """
    if name in _SINGLE:
        return _SINGLE[name]
    return next((c for c in _FAMILIES if _belongs(name, c, choices)), None)


def _belongs(name: str, counter: Counter, choices: Choices | None) -> bool:
    start = str(counter.family)
    word = name.removeprefix(start)
    if not name.startswith(start) or not word:
        return False
    if counter.numbered:
        return word.isdecimal()
    return choices is None or word in _words(counter, choices)


def _words(counter: Counter, choices: Choices) -> Iterable[str]:
    return (*(choices(counter.option) if counter.option is not None else ()), *counter.words)


def names(choices: Choices) -> Iterator[str]:
    """Name every counter, families word by word; those that go by number with a star."""
    for counter in COUNTERS:
        if counter.family is None or counter.numbered:
            yield counter.name
        else:
            yield from (f"{counter.family}{word}" for word in _words(counter, choices))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'resolver.seq_map'?)``, or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def page() -> str:
    """Return ``docs/counters.md``."""
    lines = [HEAD]
    for counter in COUNTERS:
        words = ", ".join(f"`{word}`" for word in counter.words)
        if counter.option is not None:
            words = f"the choices of `{counter.option}`" + (f", {words}" if words else "")
        if counter.numbered:
            words = "a number"
        meaning = counter.meaning + (f" ({words})" if words else "")
        lines.append(f"| `{counter.name}` | {counter.unit} | {meaning} |")
    return "\n".join(lines) + "\n"


HEAD = """\
# Counters

What a run may count. The counters of a run are in its record (`runs/*.json`, `counters`); an
ablation claims them by name (`claims.engaged`), and a name that is not in this table is refused
before anything runs. A star stands for a word, which is said behind the meaning. What a class of
your own counts is yours to name: an arm with your engine or attention backend may claim any
counter, one with your resolver any `resolver.*`, and every arm whatever begins with `own.`.

This page is written from `labkit/records/counter_registry.py`:
`python -m labkit.records.counter_registry`.

| counter | unit | meaning |
| --- | --- | --- |"""


if __name__ == "__main__":
    print(page(), end="")
