"""The documented binary search is the one that the kernels run."""

from pathlib import Path

import numpy as np
import pytest

from docs.generators import binary_search_steps
from labkit.engine.attention import paged_attention
from labkit.engine.attention.sequence_resolvers.binary_search import (
    BinarySearchLookup,
    BinarySearchResolver,
)
from labkit.engine.attention.sequence_resolvers.seq_map import qblock_map, token_map
from labkit.kernel_constants import BQ

DOCS = Path(__file__).parents[2] / "docs"
BATCHES = (
    (1,),
    (1, 1, 1, 1, 1),
    binary_search_steps.BATCH,
    (33, 1, 64, 31, 97, 7, 32),
    (512, 1, 1),
)


def test_the_article_s_step_is_as_it_says():
    lengths = (*[1] * 32, 512)
    prefix = binary_search_steps.prefix_sums(lengths)
    assert np.array(prefix, np.int32).nbytes == 136 and prefix[-2:] == (32, 544)
    owners = qblock_map(np.array(prefix, np.int32), prefix[-1], BQ).tolist()
    assert len(owners) == 544 // BQ + 33 == 50 and owners.count(32) == 16
    assert owners.count(-1) == 2 and len(owners) - 16 - 2 == 32
    assert binary_search_steps.max_steps(33) == 6
    assert binary_search_steps.max_steps(16) == 5 and 4 * 17 == 68
    text = " ".join((DOCS / "articles" / "one-launch.md").read_text("utf-8").split())
    for claim in (
        "are 136 bytes",
        "33 = 50 Q-blocks",
        "2 are surplus",
        "at most 6 loads",
        "68 bytes",
    ):
        assert claim in text


@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_every_unit_searches_as_the_kernel_does(lengths):
    prefix = binary_search_steps.prefix_sums(lengths)
    cu = np.array(prefix, np.int32)
    lookup = BinarySearchLookup(cu)
    for token, owner in enumerate(token_map(cu)):
        result = binary_search_steps.search(prefix, token)
        assert (result.owner, token, len(result.steps)) == BinarySearchResolver.find_token(
            lookup, token, cu
        )
        assert result.owner == owner
    keys = binary_search_steps.qblock_keys(prefix)
    for block, owner in enumerate(qblock_map(cu, prefix[-1], BQ)):
        result = binary_search_steps.search(keys, block)
        sequence, row, steps = BinarySearchResolver.find_qblock(lookup, block, cu)
        assert (result.owner, len(result.steps)) == (sequence, steps)
        surplus = result.owner >= len(lengths) or row >= lengths[result.owner]
        assert surplus == (owner < 0)
        assert ("surplus" in binary_search_steps._rows(result, lengths, keys)) == surplus


def test_the_steps_are_those_that_a_launch_counts():
    lengths, heads = binary_search_steps.BATCH, 2
    prefix = binary_search_steps.prefix_sums(lengths)
    k = v = np.zeros((9, 16, heads, 64), np.float32)
    q = np.zeros((prefix[-1], heads, 64), np.float32)
    tables = np.ones((len(lengths), 4), np.int32)
    options = {"block_tables": tables, "seq_lens": np.array(lengths, np.int32), "scale": 1.0}
    _, report = paged_attention(q, k, v, cu_seqlens_q=np.array(prefix, np.int32), **options)
    units = range(prefix[-1] // BQ + len(lengths))
    steps = sum(
        len(binary_search_steps.search(binary_search_steps.qblock_keys(prefix), unit).steps)
        for unit in units
    )
    assert report.counters()["attention.search_iterations"] == steps * heads


@pytest.mark.parametrize("requests", range(1, 40))
def test_the_bound_is_reached_and_never_exceeded(requests):
    prefix = range(requests + 1)
    steps = [len(binary_search_steps.search(prefix, unit).steps) for unit in range(requests)]
    assert max(steps) == binary_search_steps.max_steps(requests)


def test_the_page_is_up_to_date():
    page = DOCS / "binary-search.md"
    assert page.read_text("utf-8") == binary_search_steps.page()


def test_command_line_takes_query_lengths(capsys):
    assert binary_search_steps.main(["1", "40"]) == 0
    assert "Query lengths 1, 40: 41 packed" in capsys.readouterr().out
    assert binary_search_steps.main(["1", "0"]) == 2
    assert "query lengths must be integers above 0" in capsys.readouterr().err
