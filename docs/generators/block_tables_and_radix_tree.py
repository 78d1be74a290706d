"""Generator of docs/structures.md: block tables, chunks and a radix tree, step by step.

A scheduler and a KV cache manager serve requests with predefined answers, without a model.
``python -m docs.generators.block_tables_and_radix_tree > docs/structures.md``.

Sources: the alloc and table demos of "Inference Engines 2/N: Batching and PagedAttention"; the
example of three users and that of chunked prefill in M. Saroufim's notes on mini-sglang (24
February 2026).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.prefix_cache.radix_tree import RadixNode, RadixPrefixCache
from labkit.engine.request import Request
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler

RESERVED_TOKENS = 2_048  # per request, in a cache that reserves memory for the longest sequence
BLOCK_SIZE = 16
POOL_BLOCKS = 7_730  # the article's "blocks available after model load"
# The article's eight prompts, the tokens of each, and the decode steps of each in its latency demo.
# The first two have their published lengths; the others' prompts are counted in words and marks,
# with the 13 tokens that the chat template adds to the first.
ALLOC_DEMO = (
    ("What is the capital of France?", 20, 9),
    ("Explain in detail how ...", 26, 1_269),
    ("Is Python interpreted or compiled? ...", 24, 24),
    ("Write a short story about a robot ...", 25, 443),
    ("What is 2 + 2?", 19, 23),
    ("Describe the history of the Roman Empire ...", 24, 1_592),
    ("Name one fruit.", 17, 2),
    ("What are the key differences ...", 24, 913),
)


@dataclass(frozen=True)
class ComputedChunk:
    """A chunk of a request that a step computed; ``samples``: whether a token was then sampled."""

    request: str
    start: int
    tokens: int
    samples: bool


class Simulation:
    """A scheduler and its block pool, which serve requests with predefined answers.

    ``words``: the text of each token id.
    """

    def __init__(
        self,
        *,
        blocks: int = 200,
        block_size: int = BLOCK_SIZE,
        prefixes: str = "none",
        words: Sequence[str] = ("-",),
        **options: Any,
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.prefixes = prefix_cache.create(prefixes, self.pool)
        self.cache = PagedKVCacheManager(self.pool, self.prefixes)
        optimistic = {"reservation": config.Reservation.optimistic, "watermark": 0.0}
        scheduling = config.Scheduler(**{**optimistic, **options})
        self.scheduler = Scheduler(scheduling, self.cache, frozenset())
        self.words = words
        self._answers: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the token ids of words."""
        return [self.words.index(word) for word in words]

    def submit(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Queue a request."""
        self._answers[name] = list(answer)
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        self.scheduler.add(Request(name, tuple(prompt), params))

    def step(self) -> list[ComputedChunk]:
        """Run a step; return the chunks that it computed."""
        output = self.scheduler.schedule()
        sampled = {
            chunk.state.request_id: [Sampled(self._answers[chunk.state.request_id].pop(0), None)]
            for chunk in output.chunks
            if chunk.samples
        }
        for chunk in output.chunks:
            self.computed[chunk.state.request_id] = chunk.start + chunk.num_tokens
        chunks = [
            ComputedChunk(chunk.state.request_id, chunk.start, chunk.num_tokens, chunk.samples)
            for chunk in output.chunks
        ]
        self.scheduler.update(output, sampled)
        self.scheduler.check()
        return chunks

    def blocks(self, name: str) -> list[int]:
        """Return a running request's block table."""
        return [int(block) for block in self.cache.table(name).block_ids]

    def is_running(self, name: str) -> bool:
        """Return whether a request runs."""
        return self.scheduler.is_running(name)

    def finish(self, name: str) -> None:
        """Run steps until a request has ended."""
        while self.scheduler.is_live(name):
            self.step()


# Blocks per sequence.


def blocks_used() -> Iterator[str]:
    """Serve eight requests together, and yield a table of the blocks that each held at its end."""
    simulation = Simulation(blocks=POOL_BLOCKS + 1, max_num_batched_tokens=256)
    prompts = [name for name, _, _ in ALLOC_DEMO]
    for name, prompt, steps in ALLOC_DEMO:
        # The token sampled last is never computed.
        simulation.submit(name, [0] * prompt, [0] * (steps + 1))
    num_blocks: dict[str, int] = {}
    while simulation.scheduler.has_work():
        simulation.step()
        num_blocks |= {
            name: len(simulation.blocks(name)) for name in prompts if simulation.is_running(name)
        }
    yield from _table(
        ("sequence", "tokens in the cache", "blocks", "not filled", "for 2,048", "not filled"),
        [
            (
                name,
                f"{simulation.computed[name]:,}",
                num_blocks[name],
                f"{1 - simulation.computed[name] / (num_blocks[name] * BLOCK_SIZE):.0%}",
                RESERVED_TOKENS // BLOCK_SIZE,
                f"{1 - simulation.computed[name] / RESERVED_TOKENS:.0%}",
            )
            for name in prompts
        ],
    )
    used = sum(num_blocks.values())
    reserved = len(prompts) * RESERVED_TOKENS // BLOCK_SIZE
    yield ""
    yield (
        f"Together {used} of the pool's {POOL_BLOCKS:,} blocks, and {reserved:,} if "
        f"{RESERVED_TOKENS:,} tokens were reserved for each."
    )


# A block table while it grows.


def block_table() -> Iterator[str]:
    """Yield a table that shows a block table each time a block is added or the prompt ends."""
    simulation = Simulation(chunk=BLOCK_SIZE)
    simulation.submit("alone", [0] * 24, [0] * 61)
    yield from ["    prompt tokens: 24  generated: 61  total: 85  block_size: 16", ""]
    num_listed = 0
    while simulation.scheduler.has_work():
        simulation.step()
        tokens = simulation.computed["alone"]
        if not simulation.is_running("alone"):
            break
        blocks = simulation.blocks("alone")
        if tokens in (16, 24) or len(blocks) > num_listed or tokens == 84:
            after = "prefill (24 prompt tokens)" if tokens == 24 else f"token {tokens}"
            yield from _listing(blocks, tokens, f"after {after}")
        num_listed = len(blocks)
    pool = simulation.pool
    yield f"    [after the answer]  {pool.num_free} of {pool.capacity} blocks are free"


def scattered_table() -> Iterator[str]:
    """Yield the block table of a request that shares the pool with others."""
    simulation = Simulation(chunk=BLOCK_SIZE)
    simulation.submit("long", [0] * 24, [0] * 61)
    simulation.submit("short", [0] * 20, [0] * 8)
    simulation.submit("second", [0] * 10, [0] * 40)
    simulation.finish("short")
    simulation.submit("third", [0] * 40, [0] * 20)
    while simulation.computed["long"] < 80:
        simulation.step()
    yield from _listing(simulation.blocks("long"), 80, "after token 80, beside three others")
    block, offset = divmod(47, BLOCK_SIZE)
    yield (
        f"    position 47: logical block {block}, offset {offset}: "
        f"physical block {simulation.blocks('long')[block]}, offset {offset}"
    )


def _listing(blocks: Sequence[int], tokens: int, title: str) -> Iterator[str]:
    yield f"    [{title}]  ({tokens} tokens in KV cache)"
    yield f"    {'logical':>8}{'physical':>11}{'tokens':>12}{'fill':>9}"
    for index, block in enumerate(blocks):
        start, stop = index * BLOCK_SIZE, min((index + 1) * BLOCK_SIZE, tokens)
        span = f"{start}-{stop - 1}" if stop > start else "-"
        yield f"    {index:>8}{block:>11}{span:>12}{f'{max(0, stop - start)}/{BLOCK_SIZE}':>9}"
    yield ""


# A prompt in chunks.


def chunks(decodes: int, **options: Any) -> Iterator[str]:
    """Yield a table of the steps that compute a prompt of 1,200 tokens.

    Meanwhile ``decodes`` other requests decode. ``options`` are those of ``Simulation``.
    """
    simulation = Simulation(blocks=400, max_num_seqs=8, **options)
    for index in range(decodes):
        simulation.submit(f"d{index}", [0], [0] * 50)
    while decodes and len(simulation.step()) < decodes:
        pass
    simulation.submit("long", [0] * 1_200, [0])
    lines = list[tuple[object, ...]]()
    while simulation.scheduler.is_live("long"):
        computed = simulation.step()
        (chunk,) = (c for c in computed if c.request == "long")
        left = 1_200 - chunk.start - chunk.tokens
        note = "samples its first token" if chunk.samples else ""
        lines.append((len(lines) + 1, len(computed) - 1, chunk.tokens, f"{left:,}", note))
    yield from _table(("step", "decodes", "tokens of the prompt", "left", ""), lines)


# Three users in a radix tree.

TEMPLATE = ("SYS", "You", "are", "helpful")
ANSWERS = {"A": 8, "B": 5, "C": 5, "D": 2, "E": 2}  # tokens of each
WORDS = (
    *TEMPLATE,
    *("Q1", "Q2", "Q3", "d", "e"),
    *(f"{user.lower()}{place}" for user, count in ANSWERS.items() for place in range(1, count + 1)),
)


def radix() -> Iterator[str]:
    """Serve users A, B and C, who share a template, and yield the tree after each event."""
    simulation = Simulation(
        blocks=21, block_size=1, prefixes="radix", words=WORDS, max_num_batched_tokens=64
    )

    def ask(name: str, prompt: Sequence[str]) -> None:
        answer = [f"{name.lower()}{place}" for place in range(1, ANSWERS[name] + 1)]
        simulation.submit(name, simulation.ids(prompt), simulation.ids(answer))

    def computed(name: str) -> str:
        (chunk,) = (c for c in simulation.step() if c.request == name)
        prefix = "".join(f" {word}" for word in [*TEMPLATE][: chunk.start])
        hit = f"finds{prefix} ({chunk.start} tokens)" if chunk.start else "finds nothing"
        tokens = "1 token" if chunk.tokens == 1 else f"{chunk.tokens} tokens"
        return f"{hit} and computes {tokens}"

    ask("A", [*TEMPLATE, "Q1"])
    yield from _event(simulation, f"1. A arrives at an empty cache: it {computed('A')}.")
    for _ in range(4):
        simulation.step()
    ask("B", [*TEMPLATE, "Q2"])
    yield from _event(
        simulation,
        f"2. B arrives while A decodes: it {computed('B')}. The node that both begin with is split "
        "where they part, and locked twice.",
    )
    ask("C", [*TEMPLATE, "Q3"])
    yield from _event(
        simulation,
        f"3. C arrives while A and B decode: it {computed('C')}; the template is locked thrice.",
    )
    simulation.finish("A")
    yield from _event(
        simulation,
        "4. A has ended. Its own tokens stay cached without a lock: they can match, or be evicted.",
    )
    needed = simulation.pool.num_free + 2
    ask("D", ["d"] * needed)
    simulation.step()
    yield from _event(
        simulation,
        "5. D's prompt needs more blocks than are free: those that A left are cut, from the end. "
        "What B and C hold, and the template under them, is locked and stays.",
    )
    for name in ("D", "B", "C"):
        simulation.finish(name)
    yield from _event(
        simulation, "6. All have ended: nothing is locked, everything can be evicted."
    )
    ask("E", ["e"] * 8)
    simulation.step()
    yield from _event(
        simulation,
        "7. E needs 8 blocks: leaves are cut in the order of their release, tails first. The "
        "template, released last, is still there for the next user.",
    )


def _event(simulation: Simulation, text: str) -> Iterator[str]:
    """Yield the description of an event and a drawing of the tree."""
    assert isinstance(simulation.prefixes, RadixPrefixCache)
    simulation.prefixes.check()
    depth: dict[int, int] = {}
    yield from [textwrap.fill(text, 100), ""]
    for node in depth_first(simulation.prefixes):
        depth[id(node)] = depth.get(id(node.parent), -1) + 1
        text_of_node = " ".join(simulation.words[token] for span in node.tokens for token in span)
        locks = f"locks {node.locks}" if node.locks else "no lock"
        blocks = ", ".join(map(str, node.blocks))
        yield f"    {'    ' * depth[id(node)]}[{text_of_node}]  blocks {blocks}; {locks}"
    pool = simulation.pool
    yield f"    {pool.num_free} blocks free, {pool.num_evictable} evictable"
    yield ""


def depth_first(cache: RadixPrefixCache) -> Iterator[RadixNode]:
    """Yield the nodes of a tree in depth-first order."""
    nodes = list(cache.nodes())
    tops = [node for node in nodes if node.parent is not None and node.parent not in nodes]
    stack = tops[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(list(node.children.values()))


def _table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for line in lines:
        yield f"| {' | '.join(map(str, line))} |"


def page() -> str:
    """Return docs/structures.md."""
    parts: tuple[str | Iterator[str], ...] = (
        HEAD, BLOCKS, blocks_used(), TABLE, block_table(), SCATTERED, scattered_table(),
        CHUNKS, chunks(0, chunk=256, max_num_batched_tokens=2_048), BUDGET,
        chunks(6, max_num_batched_tokens=256), RADIX, radix(),
    )  # fmt: skip
    texts = (part if isinstance(part, str) else "\n".join(part) for part in parts)
    return "\n\n".join(text.strip("\n") for text in texts) + "\n"


HEAD = """\
# The engine's structures, step by step

Block tables, chunks and a radix tree while requests are served: what the scheduler and the KV
cache do, without a model, which would change none of it. Everything below is printed by the
structures themselves (`docs/generators/block_tables_and_radix_tree.py`), and a test checks that it
is up to date: `python -m docs.generators.block_tables_and_radix_tree > docs/structures.md`."""

BLOCKS = """\
## Blocks on demand

The article's alloc demo (*Inference Engines 2/N*): eight prompts, in a pool of 7,730 blocks of 16
tokens. It prints two rows, 29 tokens in 2 blocks and 1,295 in 81, of 128 that a reservation of
2,048 tokens takes. The other answers have the lengths of its latency demo, and their prompts are
counted in words here."""

TABLE = """\
## A block table

The article's table demo: one sequence, 24 tokens of prompt and 61 of answer, in the article's
layout. Block 0 is the null block here and is never allocated. The last token sampled is never
computed, so 84 of the 85 tokens end in the cache. The prompt is computed 16 tokens per step, to
show it half done; its blocks are all allocated at the beginning."""

SCATTERED = """\
A sequence that is alone gets consecutive physical blocks. In a batch, other sequences allocate and
free blocks in between:"""

CHUNKS = """\
## A prompt in chunks

The notes' example: a step computes 256 tokens of a prompt of 1,200 (`engine.scheduler.chunk`), and
944 are left for later steps."""

BUDGET = """\
The same with a budget of 256 tokens per step (`engine.scheduler.max_num_batched_tokens`). Six
decoding requests get one token each before the prompt gets the rest:"""

RADIX = """\
## Three users in a radix tree

The notes' example, with blocks of one token to show every step: A, B and C share `SYS You are
helpful` and ask Q1, Q2 and Q3. A line is a node with its tokens, its blocks and its locks, the
number of requests that end in it or below it. labkit caches a prompt as soon as it is computed; in
the notes it is cached when its request ends. The last token of a prompt is always computed, because
the first token of the answer is sampled from its logits. [The same tree, to
click](widgets/radix_tree.html)."""


if __name__ == "__main__":
    print(page(), end="")
