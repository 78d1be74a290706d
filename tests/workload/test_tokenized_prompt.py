"""A prompt of a workload."""

import pytest

from labkit.workload.tokenized_prompt import Prompt


def test_a_prompt_needs_tokens():
    with pytest.raises(ValueError, match="request r0"):
        Prompt("r0", (), 3)
