"""Attainable prefix hits, compared with counts by hand."""

import pytest

from labkit.workload.requests.attainable_prefix_hits import sharing_notes
from labkit.workload.tokenized_prompt import Prompt


def prompts(*texts):
    return [Prompt(f"r{i}", tuple(map(ord, text)), 1) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (["abcdefgh", "abcdefgh"], 4),  # the last token is computed, so its block is too
        (["abcdefgh", "abcdefghi"], 8),
        (["abcdefgh", "abcdXXghi"], 4),
        (["abcdefgh", "XbcdefghX"], 0),
        (["abcdef", "abcdeX"], 4),  # whole blocks only
        (["abcdefghi", "abcd1", "abcdefgh2"], 4 + 8),
        (["abc", "abc"], 0),
    ],
)
def test_only_whole_blocks_of_an_earlier_prompt_s_prefix_count(texts, shared):
    notes = sharing_notes(prompts(*texts), 4, warm=False, unshared=False)
    assert notes["shared_tokens"] == shared


def test_a_warm_cache_hits_all_blocks_but_the_last():
    twice_served = prompts("abcdefghi", "12345678")
    notes = sharing_notes(twice_served, 4, warm=True, unshared=False)
    assert notes["shared_tokens"] == 8 + 4
    notes = sharing_notes(twice_served, 4, warm=False, unshared=False)
    assert notes == {
        "prompt_tokens": 17, "shared_tokens": 0, "block_size": 4, "unshared": False,
    }  # fmt: skip
