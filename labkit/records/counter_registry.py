"""Registry of the counters that labkit's own code may record: name, unit and meaning.

Claims (``claims.engaged``), the report and ``docs/counters.md`` look counters up here. A test
fails if the code increments a counter that is not in this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Counters of a user's own classes: any name that begins with this prefix may be claimed.
USER_PREFIX = "own."


@dataclass(frozen=True)
class Counter:
    """One counter, or a family such as ``resolver.*``, which has one counter per resolver.

    The suffixes of a family are the choices of an option, and ``suffixes``. If it has neither, they
    are whole numbers.
    """

    name: str  # a family's ends with a star in place of the suffix
    unit: str  # such as ``tokens`` or ``ms``
    meaning: str  # a phrase for readers of the report
    option: str | None = None
    suffixes: tuple[str, ...] = ()
    counted_by_kernel: bool = False  # else the host computes it from the launch's plan
    is_level: bool = False  # a peak, a share or a present amount, of which parts make no sum

    @property
    def family_prefix(self) -> str | None:
        """The prefix of all names in a family (``resolver.``); None for a single counter."""
        return self.name[:-1] if self.name.endswith("*") else None

    @property
    def is_numbered(self) -> bool:
        """Whether a family's suffixes are whole numbers, as in ``block_size.16``."""
        return self.family_prefix is not None and self.option is None and not self.suffixes


def _family_of(option: str, name: str, unit: str, meaning: str, *suffixes: str) -> Counter:
    return Counter(name, unit, meaning, option, suffixes)


COUNTERS: tuple[Counter, ...] = (
    # Which implementation ran.
    _family_of("engine.name", "engine.*", "steps",
               "steps (kernel workloads: launches) of the engine"),
    Counter("forward.*", "steps", "steps whose forward passes ran on this backend", None,
            ("numpy", "mlx")),
    _family_of("engine.forward", "forwards.*", "forwards",
               "forward passes of this kind, for a whole batch or for one request of it"),
    Counter("forward.replayed", "forwards",
            "forward passes replayed from a captured graph in one call"),
    Counter("forward.eager", "forwards", "forward passes in which Python called each layer"),
    _family_of("engine.blas", "blas.*", "flag", "1: MLX multiplies matrices with this BLAS",
               "accelerate"),
    _family_of("engine.kv.layout", "layout.*", "steps", "steps over this KV layout"),
    _family_of("engine.budget.policy", "budget.*", "flag", "1: this policy sized the KV pool"),
    _family_of("engine.prefix_cache", "prefix_cache.*", "requests",
               "admissions with this prefix cache"),
    _family_of("engine.kv.free_list", "free_list.*", "blocks",
               "blocks allocated from a free list of this order"),
    _family_of("engine.kv.prefix_insert", "prefix_insert.*", "requests",
               "admissions whose blocks enter the prefix cache at this time"),
    _family_of("engine.prefix_eviction", "prefix_eviction.*", "blocks",
               "cached blocks evicted in this order"),
    _family_of("engine.decode_shape", "decode_shape.*", "steps",
               "decode-only steps with this batch shape policy"),
    _family_of("engine.pipeline", "pipeline.*", "steps", "steps run with this pipeline"),
    Counter("pipeline.overlapped", "steps",
            "steps launched to run while the host processes the previous step's results and "
            "schedules the next step; the previous step had ended"),
    _family_of("engine.speculation", "speculation.*", "steps",
               "steps with this method of speculation"),
    Counter("ranks.*", "steps", "steps computed by this number of tensor-parallel processes"),
    Counter("ranks.agreed", "steps", "steps that began after all ranks had agreed on the schedule"),
    Counter("ranks.sums", "sums", "all-reduce sums over the ranks, for row-parallel layers"),
    Counter("ranks.kv_heads", "heads", "key/value heads in the KV pool of each process"),
    Counter("batch_invariant", "flag", "1: a check found that logits do not depend on the batch"),
    Counter("dtype.*", "flag", "1: weights and activations have this type", None,
            ("float32", "float16", "bfloat16")),
    Counter("weights.*", "bytes", "bytes of weights stored (and so read) in this form", None,
            ("quantised", "float32", "float16", "bfloat16")),
    Counter("weights.narrow", "bytes",
            "of those, bytes in less than float32: quantised or half precision"),
    _family_of("engine.activations", "activations.*", "bytes",
               "bytes of weights that labkit's CPU kernels multiply by activations of this type"),
    _family_of("engine.kv.dtype", "kv_dtype.*", "launches",
               "launches over keys and values stored in this type"),
    Counter("mlx.evaluations", "evaluations", "evaluations of MLX graphs that steps waited for"),
    # The scheduler.
    _family_of("engine.scheduler.admission", "admission.*", "requests",
               "requests admitted by this rule"),
    _family_of("engine.scheduler.reservation", "reservation.*", "requests",
               "requests admitted under this reservation"),
    _family_of("engine.scheduler.queue", "queue.*", "requests",
               "requests that overtook another in this queue, or that it held back or preempted "
               "out of turn; for a class of your own also steps whose phases it exchanged"),
    _family_of("engine.scheduler.order", "order.*", "steps",
               "steps in which this order decided whether decodes or prefills went first"),
    _family_of("engine.scheduler.composition", "composition.*", "steps",
               "steps in which this composition rule decided"),
    _family_of("engine.scheduler.chunk_policy", "chunk.*", "chunks",
               "prompt chunks that this policy shortened"),
    Counter("steps.total", "steps", "steps of the engine"),
    Counter("steps.*", "steps", "steps with only decodes, only prefills, or both", None,
            ("decode", "prefill", "mixed")),
    Counter("steps.full", "steps", "steps that used up max_num_batched_tokens"),
    Counter("steps.prefill_capped", "steps",
            "steps in which prefill_cap reduced the prompt tokens"),
    Counter("steps.prefill_floored", "steps",
            "steps in which prefill_floor reserved room for prompts"),
    Counter("preemptions", "preemptions", "running requests preempted and put back into the queue"),
    Counter("requests.submitted", "requests", "requests submitted"),
    Counter("requests.finished", "requests", "requests that finished"),
    Counter("requests.aborted", "requests", "requests aborted"),
    Counter("requests.refused", "requests", "requests refused at submission"),
    Counter("requests.sampling_failed", "requests",
            "requests ended because no token could be sampled for them"),
    Counter("requests.most_running", "requests", "peak number of running requests", is_level=True),
    # Streams from a server.
    Counter("requests.failed", "requests", "requests that a server failed or did not complete"),
    Counter("finish.*", "requests", "streams that ended with this finish reason", None,
            ("stop", "length", "tool_calls", "content_filter", "other")),
    Counter("stream.chunks", "chunks", "network reads of a stream that contained content"),
    Counter("stream.bundled", "chunks", "of those, reads with more than one event or token"),
    Counter("stream.empty", "events", "events without content: a role, an empty delta"),
    Counter("stream.tool_calls", "events", "events that carry part of a tool call"),
    Counter("stream.refusals", "events", "events that carry part of a refusal"),
    Counter("prompts.respelled", "requests",
            "prompts that a server is known to tokenise to other ids than the workload's"),
    Counter("tokens.prompt", "tokens", "prompt tokens by the workload's own count"),
    Counter("tokens.prompt_usage", "tokens", "prompt tokens by the server's usage report"),
    Counter("tokens.cached", "tokens", "prompt tokens that the server reports as cached"),
    Counter("tokens.usage", "tokens", "output tokens by the server's usage report"),
    Counter("tokens.tokenizer", "tokens", "output tokens by tokenising the returned text"),
    Counter("tokens.stream", "tokens",
            "output tokens in the stream: its token ids, else its events with text"),
    # Tokens.
    Counter("tokens.prefill", "tokens", "prompt tokens computed"),
    Counter("tokens.decode", "tokens", "decode tokens computed"),
    Counter("tokens.computed", "tokens", "tokens computed in all"),
    Counter("tokens.output", "tokens", "output tokens returned to requests"),
    Counter("tokens.padded", "tokens", "padding rows computed"),
    Counter("tokens.discarded", "tokens", "tokens computed for requests that had already finished"),
    Counter("tokens.recomputed", "tokens", "tokens computed again after a preemption"),
    Counter("shape.new", "steps", "steps with a batch shape not seen before"),
    Counter("shape.reused", "steps", "steps with a batch shape seen before"),
    Counter("shape.repeated", "steps", "steps with the same batch shape as the previous step"),
    Counter("shape.same_requests", "steps",
            "steps with the batch shape and the requests of the previous step"),
    # Time.
    Counter("step_ms", "ms", "total time of all steps"),
    Counter("device_ms", "ms", "total time of the model's forward passes"),
    Counter("host_ms", "ms",
            "total step time in which the host was not waiting for a forward pass"),
    Counter("pipeline.wait_ms", "ms", "time that the host waited for an overlapped step"),
    # KV memory.
    Counter("blocks.allocated", "blocks", "KV blocks allocated"),
    Counter("blocks.freed", "blocks", "KV blocks freed"),
    Counter("blocks.peak", "blocks", "peak number of KV blocks in use", is_level=True),
    Counter("blocks.headroom", "blocks", "KV blocks left free at that peak", is_level=True),
    Counter("blocks.total", "blocks", "KV blocks in the pool"),
    Counter("kv_block_bytes", "bytes", "bytes of one KV block over all layers"),
    Counter("peak_kv_bytes", "bytes", "peak KV memory allocated to requests", is_level=True),
    Counter("kv_used_bytes", "bytes", "peak KV memory that held computed tokens", is_level=True),
    Counter("kv.slots_held", "tokens", "KV slots (tokens) that requests held when they ended"),
    Counter("kv.slots_filled", "tokens", "of those, slots that held computed tokens"),
    Counter("kv.set_aside", "tokens", "KV slots (tokens) reserved for requests at admission"),
    Counter("kv.bytes_copied", "bytes", "KV bytes copied within KV memory"),
    Counter("kv.moves", "moves", "relocations of KV memory"),
    Counter("window_pools.freed_blocks", "blocks",
            "KV blocks freed because every query to come is past their sliding window"),
    Counter("window_pools.peak_blocks", "blocks",
            "peak number of KV blocks in use by layers with a sliding window", is_level=True),
    Counter("window_pools.total_blocks", "blocks", "KV blocks in the pools of sliding windows"),
    Counter("kv.padded_slots", "slots", "padding slots that decodes attended to"),
    Counter("padding.waste_pct", "%",
            "share of the keys read that hold no token of a live request", is_level=True),
    Counter("state_slots.allocated", "slots", "slots of recurrent states allocated"),
    Counter("state_slots.freed", "slots", "slots of recurrent states freed"),
    Counter("state_slots.peak", "slots", "peak number of requests with a slot", is_level=True),
    Counter("state_slots.total", "slots", "slots in all, those for snapshots included"),
    Counter("state_slot_bytes", "bytes", "bytes of one slot over all layers"),
    Counter("state_bytes_copied", "bytes", "bytes of recurrent states moved between arrays"),
    Counter("state_snapshots.taken", "snapshots", "copies of recurrent states taken for reuse"),
    Counter("state_snapshots.restored", "snapshots", "of those, copies with which a request began"),
    Counter("state_snapshots.evicted", "snapshots", "snapshots that made room for newer ones"),
    Counter("prefix.queried_tokens", "tokens", "prompt tokens looked up in the prefix cache"),
    Counter("prefix.hit_tokens", "tokens", "prompt tokens found in the prefix cache"),
    Counter("prefix.cached_blocks", "blocks", "KV blocks kept for reuse by the prefix cache",
            is_level=True),
    Counter("prefix.evicted_blocks", "blocks", "KV blocks evicted from the prefix cache"),
    # Speculative decoding.
    Counter("spec.*", "steps", "steps in which this proposer was asked for draft tokens", None,
            ("ngram", "draft", "random")),
    Counter("spec.drafted", "tokens", "tokens drafted"),
    Counter("spec.accepted", "tokens", "drafted tokens accepted"),
    Counter("spec.drafted.pos*", "tokens", "tokens drafted at this position after the last token"),
    Counter("spec.accepted.pos*", "tokens", "of those, tokens accepted"),
    Counter("spec.unit_segments", "segments", "one-token segments that drafts were split into"),
    Counter("spec.draft_ms", "ms", "time of drafting"),
    # Videos.
    _family_of("workload.picks", "picks.*", "requests",
               "requests whose frames and decoder counters match this way of picking frames"),
    _family_of("workload.decoder", "decoder.*", "requests",
               "of those, requests decoded with this decoder"),
    Counter("video.packets_read", "packets", "packets read by the demuxer"),
    Counter("video.packets_decoded", "packets", "packets sent to the decoder"),
    Counter("video.frames_decoded", "frames", "frames returned by the decoder"),
    Counter("video.delta_frames", "frames", "of those, frames that are not keyframes"),
    Counter("video.keyframes_alone", "frames", "frames of requests that decoded keyframes only"),
    Counter("video.seeks", "seeks", "seeks to a keyframe"),
    Counter("video.frames_picked", "frames", "frames returned to requests, repeats included"),
    # Compiled graphs.
    Counter("compile.count", "graphs", "graphs traced for compilation"),
    Counter("compile.reused", "calls", "calls that reused a compiled graph"),
    # Attention: sums over launches. A unit is a threadgroup of the kernel's grid.
    Counter("kernel.*", "launches", "launches of this kernel", None,
            ("decode", "tiled", "reduce", "reference", "gather", "gather_padded",
             "masked", "sdpa")),
    _family_of("engine.attention.resolver", "resolver.*", "launches",
               "launches with this resolver"),
    _family_of("engine.attention.device", "device.*", "launches",
               "launches of a fused kernel on this device"),
    Counter("block_size.*", "launches", "launches over KV blocks of this many tokens"),
    Counter("unit.*", "launches",
            "launches whose units serve one query head, the query heads of one KV head, or all "
            "heads of a token",
            None, ("head", "kv_head", "token")),
    Counter("gqa.shared", "launches",
            "launches in which grouped query heads shared each loaded key"),
    Counter("gqa.unshared", "launches",
            "launches in which every query head loaded its keys itself"),
    Counter("split_kv.partitions", "units", "partitions into which a query's keys were split"),
    Counter("attention.search_iterations", "iterations",
            "binary-search iterations, summed over all units",
            counted_by_kernel=True),
    Counter("attention.dependent_loads", "loads",
            "serially dependent loads by which units found their sequence"),
    Counter("attention.surplus_threadgroups", "units", "units that found no work and exited",
            counted_by_kernel=True),
    Counter("attention.kv_blocks_visited", "blocks", "KV blocks visited, summed over all units",
            counted_by_kernel=True),
    Counter("attention.bytes", "bytes", "bytes of keys, values, queries and outputs moved"),
    Counter("attention.map_us", "us", "host time spent building the resolver's maps, without "
            "their conversion for a GPU"),
    Counter("attention.keys", "keys", "keys read by MLX's own attention, padding included"),
    Counter("attention.keys_padded", "keys", "of those, keys that hold no token of the request"),
    Counter("window.skipped_blocks", "blocks",
            "KV blocks outside the sliding window that were skipped"),
    Counter("window.masked_blocks", "blocks",
            "KV blocks outside the sliding window that were visited and masked"),
)  # fmt: skip

# Prefixes of the counters that kernel workloads record: launches without an engine's steps.
LAUNCH_PREFIXES = (
    "engine.", "kernel.", "resolver.", "device.", "block_size.", "kv_dtype.", "unit.", "gqa.",
    "split_kv.", "attention.", "window.", "mlx.",
)  # fmt: skip
# The prefix of the counters of a draft model's forwards, and those of the names that follow it.
DRAFT_PREFIX = "draft."
_FORWARD_PREFIXES = (
    "forward.", "forwards.", "layout.", "compile.", "device_ms", *LAUNCH_PREFIXES[1:],
)  # fmt: skip
OptionChoices = Callable[[str], Sequence[str]]  # the choices of an option, from its key
_SINGLE = {counter.name: counter for counter in COUNTERS if counter.family_prefix is None}
_FAMILIES = tuple(counter for counter in COUNTERS if counter.family_prefix is not None)


def find_counter(name: str, option_choices: OptionChoices | None = None) -> Counter | None:
    """Return the counter with this name or the family to which the name belongs, else None.

    With ``option_choices``, a suffix must be a choice of the family's option or be listed in the
    registry. Without ``option_choices``, any suffix matches. ``draft.NAME`` is the counter ``NAME``
    of the draft model's forwards.
    """
    if name.startswith(DRAFT_PREFIX):
        name = name.removeprefix(DRAFT_PREFIX)
        if not name.startswith(_FORWARD_PREFIXES):
            return None
    if name in _SINGLE:
        return _SINGLE[name]
    return next((family for family in _FAMILIES if _matches(name, family, option_choices)), None)


def is_level(name: str) -> bool:
    """Return whether a counter is a peak, a share or a present amount (``Counter.is_level``)."""
    counter = find_counter(name)
    return counter is not None and counter.is_level


def _matches(name: str, family: Counter, option_choices: OptionChoices | None) -> bool:
    prefix = str(family.family_prefix)
    suffix = name.removeprefix(prefix)
    if not name.startswith(prefix) or not suffix:
        return False
    if family.is_numbered:
        return suffix.isdecimal()
    return option_choices is None or suffix in _all_suffixes(family, option_choices)


def _all_suffixes(family: Counter, option_choices: OptionChoices) -> Iterable[str]:
    chosen = () if family.option is None else option_choices(family.option)
    return (*chosen, *family.suffixes)


def counter_names(option_choices: OptionChoices) -> Iterator[str]:
    """Yield every counter's name. A numbered family yields one name, which ends with a star."""
    for counter in COUNTERS:
        if counter.family_prefix is None or counter.is_numbered:
            yield counter.name
        else:
            suffixes = _all_suffixes(counter, option_choices)
            yield from (f"{counter.family_prefix}{suffix}" for suffix in suffixes)
