"""Walks through the engine's own structures, without a model: docs/structures.md.

What a scheduler schedules, a block table holds and a radix tree keeps, step by step, of requests
whose answers are given. ``python -m docs.generators.structures > docs/structures.md``.

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
from labkit.engine.prefix_cache.radix import RadixNode, RadixPrefixCache
from labkit.engine.request import Request, SamplingParams
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler import Scheduler

GREATEST = 2_048  # tokens that a cache set aside for any request would hold
BLOCK = 16


@dataclass(frozen=True)
class Chunk:
    """What a step computed of a request: tokens from ``start`` on; whether it sampled."""

    request: str
    start: int
    tokens: int
    samples: bool


class Walk:
    """A scheduler over a pool of blocks, whose requests answer what they are told to.

    ``words``: spells tokens, in the order of their ids; a token's id is its place there.
    """

    def __init__(
        self,
        *,
        blocks: int = 200,
        block_size: int = BLOCK,
        prefixes: str = "none",
        words: Sequence[str] = ("-",),
        **options: Any,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.prefixes = prefix_cache.create(prefixes, self.pool, block_size)
        self.cache = PagedKVCacheManager(self.pool, block_size, self.prefixes)
        optimistic = {"reservation": config.Reservation.optimistic, "watermark": 0.0}
        asked = config.Scheduler(**{**optimistic, **options})
        self.scheduler = Scheduler(asked, self.cache, frozenset())
        self.words = words
        self._answers: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the token ids of words."""
        return [self.words.index(word) for word in words]

    def ask(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Queue a request."""
        self._answers[name] = list(answer)
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        self.scheduler.add(Request(name, tuple(prompt), params))

    def step(self) -> list[Chunk]:
        """Run a step; return what was computed."""
        output = self.scheduler.schedule()
        sampled = {
            chunk.state.request_id: [Sampled(self._answers[chunk.state.request_id].pop(0), None)]
            for chunk in output.chunks
            if chunk.samples
        }
        for chunk in output.chunks:
            self.computed[chunk.state.request_id] = chunk.start + chunk.num_tokens
        made = [
            Chunk(chunk.state.request_id, chunk.start, chunk.num_tokens, chunk.samples)
            for chunk in output.chunks
        ]
        self.scheduler.update(output, sampled)
        self.scheduler.check()
        return made

    def blocks(self, name: str) -> list[int]:
        """Return a running request's block table."""
        return [int(block) for block in self.cache.table(name).block_ids]

    def is_running(self, name: str) -> bool:
        """Tell whether a request runs."""
        return self.scheduler.is_running(name)

    def finish(self, name: str) -> None:
        """Run steps until a request has ended."""
        while self.scheduler.is_live(name):
            self.step()


# How many blocks a sequence takes.


def blocks_used() -> Iterator[str]:
    """Serve two requests together and lay out what they held at their ends."""
    walk = Walk(max_num_batched_tokens=64)
    asked = {"What is the capital of France?": (20, 10), "Explain in detail how ...": (26, 1_270)}
    for name, (prompt, answer) in asked.items():
        walk.ask(name, [0] * prompt, [0] * answer)
    held: dict[str, int] = {}
    while walk.scheduler.has_work():
        walk.step()
        held |= {name: len(walk.blocks(name)) for name in asked if walk.is_running(name)}
    yield from _table(
        ("sequence", "tokens in the cache", "blocks", "not filled", "for 2,048", "not filled"),
        [
            (
                name,
                f"{walk.computed[name]:,}",
                held[name],
                f"{1 - walk.computed[name] / (held[name] * BLOCK):.0%}",
                GREATEST // BLOCK,
                f"{1 - walk.computed[name] / GREATEST:.0%}",
            )
            for name in asked
        ],
    )


# A block table, as it grows.


def block_table() -> Iterator[str]:
    """List a block table whenever a block begins or a prompt ends."""
    walk = Walk(chunk=BLOCK)
    walk.ask("alone", [0] * 24, [0] * 61)
    yield from ["    prompt tokens: 24  generated: 61  total: 85  block_size: 16", ""]
    size = 0
    while walk.scheduler.has_work():
        walk.step()
        tokens = walk.computed["alone"]
        if not walk.is_running("alone"):
            break
        blocks = walk.blocks("alone")
        if tokens in (16, 24) or len(blocks) > size or tokens == 84:
            said = {16: "after token 16", 24: "after prefill (24 prompt tokens)"}
            yield from _listing(blocks, tokens, said.get(tokens, f"after token {tokens}"))
        size = len(blocks)
    yield from [
        f"    [after the answer]  {walk.pool.num_free} of {walk.pool.capacity} blocks are free",
    ]


def scattered_table() -> Iterator[str]:
    """List the block table of a request that shares the pool with others."""
    walk = Walk(chunk=BLOCK)
    walk.ask("long", [0] * 24, [0] * 61)
    walk.ask("short", [0] * 20, [0] * 8)
    walk.ask("second", [0] * 10, [0] * 40)
    walk.finish("short")
    walk.ask("third", [0] * 40, [0] * 20)
    while walk.computed["long"] < 80:
        walk.step()
    yield from _listing(walk.blocks("long"), 80, "after token 80, beside three others")
    block, offset = divmod(47, BLOCK)
    yield (
        f"    position 47: logical block {block}, offset {offset}: "
        f"physical block {walk.blocks('long')[block]}, offset {offset}"
    )


def _listing(blocks: Sequence[int], tokens: int, title: str) -> Iterator[str]:
    yield f"    [{title}]  ({tokens} tokens in KV cache)"
    yield f"    {'logical':>8}{'physical':>11}{'tokens':>12}{'fill':>9}"
    for index, block in enumerate(blocks):
        start, stop = index * BLOCK, min((index + 1) * BLOCK, tokens)
        span = f"{start}-{stop - 1}" if stop > start else "-"
        yield f"    {index:>8}{block:>11}{span:>12}{f'{max(0, stop - start)}/{BLOCK}':>9}"
    yield ""


# A prompt in chunks.


def chunks(decodes: int, **options: Any) -> Iterator[str]:
    """Lay out the steps that compute a prompt of 1,200 tokens beside so many decodes."""
    walk = Walk(blocks=400, max_num_seqs=8, **options)
    for index in range(decodes):
        walk.ask(f"d{index}", [0], [0] * 50)
    while decodes and len(walk.step()) < decodes:
        pass
    walk.ask("long", [0] * 1_200, [0])
    lines = list[tuple[object, ...]]()
    while walk.scheduler.is_live("long"):
        made = walk.step()
        (chunk,) = (one for one in made if one.request == "long")
        left = 1_200 - chunk.start - chunk.tokens
        what = "samples its first token" if chunk.samples else ""
        lines.append((len(lines) + 1, len(made) - 1, chunk.tokens, f"{left:,}", what))
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
    """Serve users A, B and C, who share a template, and show the tree after each event."""
    walk = Walk(blocks=21, block_size=1, prefixes="radix", words=WORDS, max_num_batched_tokens=64)

    def ask(name: str, prompt: Sequence[str]) -> None:
        answer = [f"{name.lower()}{place}" for place in range(1, ANSWERS[name] + 1)]
        walk.ask(name, walk.ids(prompt), walk.ids(answer))

    def computed(name: str) -> str:
        (chunk,) = (one for one in walk.step() if one.request == name)
        found = "".join(f" {word}" for word in [*TEMPLATE][: chunk.start])
        hit = f"finds{found} ({chunk.start} tokens)" if chunk.start else "finds nothing"
        tokens = "1 token" if chunk.tokens == 1 else f"{chunk.tokens} tokens"
        return f"{hit} and computes {tokens}"

    ask("A", [*TEMPLATE, "Q1"])
    yield from _event(walk, f"1. A arrives at an empty cache: it {computed('A')}.")
    for _ in range(4):
        walk.step()
    ask("B", [*TEMPLATE, "Q2"])
    yield from _event(
        walk,
        f"2. B arrives while A decodes: it {computed('B')}. The node that both begin with is split "
        "where they part, and locked twice.",
    )
    ask("C", [*TEMPLATE, "Q3"])
    yield from _event(
        walk,
        f"3. C arrives while A and B decode: it {computed('C')}; the template is locked thrice.",
    )
    walk.finish("A")
    yield from _event(
        walk,
        "4. A has ended. Its own tokens stay, without a lock: they can be found, and evicted.",
    )
    needed = walk.pool.num_free + 2
    ask("D", ["d"] * needed)
    walk.step()
    yield from _event(
        walk,
        "5. D's prompt needs more blocks than are free: those that A left are cut, from the end. "
        "What B and C hold, and the template under them, is locked and stays.",
    )
    for name in ("D", "B", "C"):
        walk.finish(name)
    yield from _event(walk, "6. All have ended: nothing is locked, everything can be evicted.")
    ask("E", ["e"] * 8)
    walk.step()
    yield from _event(
        walk,
        "7. E needs 8 blocks: leaves are cut in the order of their release, tails first. The "
        "template, released last, is still there for the next user.",
    )


def _event(walk: Walk, text: str) -> Iterator[str]:
    """Say what happened and draw the tree."""
    assert isinstance(walk.prefixes, RadixPrefixCache)
    walk.prefixes.check()
    depth: dict[int, int] = {}
    yield from [textwrap.fill(text, 100), ""]
    for node in _in_depth(walk.prefixes):
        depth[id(node)] = depth.get(id(node.parent), -1) + 1
        spelled = " ".join(walk.words[token] for span in node.tokens for token in span)
        locks = f"locks {node.locks}" if node.locks else "no lock"
        blocks = ", ".join(map(str, node.blocks))
        yield f"    {'    ' * depth[id(node)]}[{spelled}]  blocks {blocks}; {locks}"
    pool = walk.pool
    yield f"    {pool.num_free} blocks free, {pool.num_evictable} kept for nobody"
    yield ""


def _in_depth(cache: RadixPrefixCache) -> Iterator[RadixNode]:
    """Yield the nodes of a tree, each with what is below it."""
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
cache do, without a model, because it would change none of it. Everything below was printed by the
structures themselves (`docs/generators/structures.py`), and a test holds that it still is:
`python -m docs.generators.structures > docs/structures.md`."""

BLOCKS = """\
## Blocks, as many as are needed

Two answers, a short and a long one, in blocks of 16 tokens. The article's figures (alloc demo of
*Inference Engines 2/N*): 29 tokens in 2 blocks, 1,295 tokens in 81, and 128 blocks for either if
2,048 tokens were set aside."""

TABLE = """\
## A block table

The article's table demo: one sequence, 24 tokens of prompt and 61 of answer. Its listing, in the
article's layout; block 0 is the null block here and is never handed out, and the last token sampled
is never computed, so that 84 of the 85 end in the cache. The prompt is computed 16 tokens a step,
so that it can be seen half done; blocks for all of it are held from the beginning."""

SCATTERED = """\
Alone, logical and physical blocks count in step. The same sequence in a batch, where others take
blocks between two of its own and give theirs back:"""

CHUNKS = """\
## A prompt in chunks

The notes' example: of a prompt of 1,200 tokens 256 are computed in a step
(`engine.scheduler.chunk`), and 944 are left for later ones."""

BUDGET = """\
The same under a budget of 256 tokens a step (`engine.scheduler.max_num_batched_tokens`), of which
six requests that decode take theirs first:"""

RADIX = """\
## Three users in a radix tree

The notes' example, with blocks of one token so that every step can be seen: A, B and C share
`SYS You are helpful` and ask Q1, Q2 and Q3. A line is a node with its tokens, its blocks and its
locks: as many as requests end in it or below it. labkit offers a prompt for reuse as soon as it is
computed; in the notes that is when its request ends. The last token of a prompt is always computed,
for it is what the first answer is sampled from."""


if __name__ == "__main__":
    print(page(), end="")
