"""How much prompts share: counted by hand."""

import pytest

from labkit.workload.attainable_prefix_hits import shared_tokens, sharing_notes
from labkit.workload.tokenized_prompts import Prompt


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
def test_whole_blocks_with_which_an_earlier_prompt_begins(texts, shared):
    assert shared_tokens(prompts(*texts), 4) == shared


def test_after_all_were_served_once_everything_is_found_but_the_last_block():
    asked = prompts("abcdefghi", "12345678")
    assert shared_tokens(asked, 4, warm=True) == 8 + 4
    notes = sharing_notes(asked, 4, warm=False, unshared=False)
    assert notes == {
        "prompt_tokens": 17, "shared_tokens": 0, "block_size": 4, "unshared": False,
    }  # fmt: skip
