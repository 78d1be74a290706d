"""docs/structures.md is what the structures do, with the figures of the articles."""

from pathlib import Path

import pytest

from docs.generators import block_tables_and_radix_tree as structures
from labkit.engine.prefix_cache.radix_tree import RadixPrefixCache

PAGE = Path(__file__).parents[2] / "docs" / "structures.md"


@pytest.fixture(scope="module")
def page():
    """The page as it is now: its requests take thousands of steps."""
    return structures.page()


def test_the_page_is_up_to_date(page):
    assert PAGE.read_text("utf-8") == page, (
        "python -m docs.generators.block_tables_and_radix_tree > docs/structures.md"
    )


def test_blocks_are_as_many_as_the_article_counts(page):
    lines = page.splitlines()
    capital, explain = (
        next(line for line in lines if line.startswith(f"| {prompt}"))
        for prompt in ("What is the capital of France?", "Explain in detail how")
    )
    assert "| 29 | 2 |" in capital and "| 1,295 | 81 |" in explain and "| 128 |" in explain


def test_a_table_has_a_line_for_every_block_and_names_where_a_token_lies():
    listing = list(structures.block_table())
    assert "    [after prefill (24 prompt tokens)]  (24 tokens in KV cache)" in listing
    first = listing.index("    [after token 16]  (16 tokens in KV cache)")
    assert listing[first + 2].split() == ["0", "1", "0-15", "16/16"]
    scattered = list(structures.scattered_table())
    physical = [int(line.split()[1]) for line in scattered[2:7]]
    assert physical != sorted(physical) and len(set(physical)) == 5
    assert scattered[-1].endswith(f"physical block {physical[2]}, offset 15")


def test_a_first_chunk_of_256_leaves_944():
    alone = list(structures.chunks(0, chunk=256, max_num_batched_tokens=2_048))
    assert alone[2] == "| 1 | 0 | 256 | 944 |  |" and len(alone) == 2 + 5
    beside = list(structures.chunks(6, max_num_batched_tokens=256))
    assert beside[2] == "| 1 | 6 | 250 | 950 |  |"


def test_the_template_is_split_off_locked_and_outlives_what_hung_on_it():
    events = "\n".join(structures.radix()).split("\n\n")
    trees = [event for event in events if event.startswith("    [")]
    locks = [tree.splitlines()[0].split("; ")[-1] for tree in trees]
    assert locks == ["locks 1", "locks 2", "locks 3", "locks 2", "locks 2", "no lock", "no lock"]
    assert all("[SYS You are helpful]" in tree for tree in trees[1:])
    assert "[Q1 a1 a2 a3 a4 a5 a6 a7]  blocks 5, 6" in trees[3]
    assert "a4" not in trees[4]  # cut for D, from its end
    assert "B arrives while A decodes: it finds SYS You are helpful (4 tokens)" in "\n".join(events)


def test_a_cache_that_does_not_split_is_seen(page, monkeypatch):
    """The page is a run of the real cache: break that, and it differs."""
    assert "\n".join(structures.radix()) in page
    monkeypatch.setattr(RadixPrefixCache, "match", lambda self, tokens, blocks: [])
    assert "\n".join(structures.radix()) not in page
