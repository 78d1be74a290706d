"""A picture of external fragmentation: caches that grow in one memory, and the same in blocks.

The requests have the lengths of the alloc demo of "Inference Engines 2/N: Batching and
PagedAttention". A cache grows by 256 rows, for which it needs a free hole as long as the larger
cache, beside itself, until it has been copied. ``python -m docs.generators.fragmentation`` writes
``docs/images/fragmentation.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from docs.generators.article_pictures import INSIDE, MARGIN, box, svg
from docs.generators.block_tables_and_radix_tree import ALLOC_DEMO, BLOCK_SIZE
from docs.generators.run_diagrams import FOLDER, text
from labkit.analysis.document.svg_chart_renderer import COLOURS

LENGTHS = tuple(prompt + steps for _, prompt, steps in ALLOC_DEMO)
CAPACITY = 6_144  # rows
GROWTH = 256  # rows
AT_ONCE = 4  # requests


@dataclass
class Cache:
    """A request's cache in the rows ``[start, start + rows)``, of which ``tokens`` are filled."""

    number: int
    length: int
    start: int
    rows: int
    tokens: int = 0


def holes(caches: Sequence[Cache]) -> list[tuple[int, int]]:
    """Return the free holes as (start, rows), in the order of their addresses."""
    edges = [(0, 0), *sorted((c.start, c.start + c.rows) for c in caches), (CAPACITY, CAPACITY)]
    gaps = [(left[1], right[0] - left[1]) for left, right in pairwise(edges)]
    return [(start, rows) for start, rows in gaps if rows]


def first_fit(caches: Sequence[Cache], rows: int) -> int | None:
    """Return the start of the first hole of ``rows`` rows, or None."""
    return next((start for start, free in holes(caches) if free >= rows), None)


@dataclass(frozen=True)
class Moment:
    """The memory when ``needed`` rows were asked for, and found no hole unless ``fits``."""

    caches: tuple[Cache, ...]
    needed: int

    @property
    def free(self) -> int:
        """Rows of no cache."""
        return sum(rows for _, rows in holes(self.caches))

    @property
    def largest(self) -> int:
        """Rows of the largest hole."""
        return max((rows for _, rows in holes(self.caches)), default=0)

    @property
    def fits(self) -> bool:
        """Whether a hole is large enough."""
        return first_fit(self.caches, self.needed) is not None

    @property
    def blocks(self) -> int:
        """Blocks that the same tokens fill or begin, and one more for each cache."""
        return sum(-(-cache.tokens // BLOCK_SIZE) + 1 for cache in self.caches)


def moments() -> Iterator[Moment]:
    """Serve requests without end, 16 tokens of each in turn; yield each request for rows."""
    caches: list[Cache] = []
    number = 0
    while True:
        while len(caches) < AT_ONCE:
            yield Moment(tuple(caches), GROWTH)
            start = first_fit(caches, GROWTH)
            assert start is not None
            caches.append(Cache(number, LENGTHS[number % len(LENGTHS)], start, GROWTH))
            number += 1
        for cache in list(caches):
            if cache.tokens + BLOCK_SIZE > cache.rows:
                yield Moment(tuple(caches), cache.rows + GROWTH)
                start = first_fit(caches, cache.rows + GROWTH)
                assert start is not None
                cache.start, cache.rows = start, cache.rows + GROWTH
            cache.tokens += BLOCK_SIZE
            if cache.tokens >= cache.length:
                caches.remove(cache)


def refused() -> Moment:
    """Return the first moment in which enough rows are free, but no hole is large enough."""
    return next(moment for moment in moments() if not moment.fits)


def picture() -> str:
    """Return the memory in one piece at that moment, and the same tokens in blocks."""
    moment, scale = refused(), INSIDE / CAPACITY
    words = (
        f"{moment.free:,} of {CAPACITY:,} rows are free, the largest hole has {moment.largest:,}:",
        f"no place for a cache of {moment.needed:,} rows.",
    )
    parts = [text(MARGIN, 18 + 16 * row, line, "small") for row, line in enumerate(words)]
    for index, cache in enumerate(moment.caches):
        kind = f"s{index}"
        x, filled = MARGIN + scale * cache.start, scale * cache.tokens
        parts.append(box(round(x, 1), 44, round(scale * cache.rows, 1), 34, "frame hollow"))
        parts.append(box(round(x, 1), 44, round(filled, 1), 34, f"{kind} frame"))
    parts.append(box(MARGIN, 44, INSIDE, 34, "frame hollow"))
    total = CAPACITY // BLOCK_SIZE
    caption = (
        f"In blocks of {BLOCK_SIZE}: {moment.blocks} of {total} in use, and any other will do."
    )
    parts.append(text(MARGIN, 106, caption, "small"))
    columns = 64
    side = INSIDE / columns
    owners = [i for i, c in enumerate(moment.caches) for _ in range(-(-c.tokens // BLOCK_SIZE) + 1)]
    for block in range(total):
        kind = f"s{owners[block]}" if block < len(owners) else "hollow"
        x, y = MARGIN + side * (block % columns), 116 + side * (block // columns)
        parts.append(box(round(x, 1), round(y, 1), round(side - 1, 1), round(side - 1, 1), kind))
    style = "".join(f".s{i}{{fill:{c};fill-opacity:.5}}" for i, c in enumerate(COLOURS))
    style += ".hollow{fill:none;stroke:#8c959f;stroke-width:.5}"
    return svg(126 + side * -(-total // columns), "External fragmentation", parts, style)


if __name__ == "__main__":
    (FOLDER / "fragmentation.svg").write_text(picture(), encoding="utf-8")
