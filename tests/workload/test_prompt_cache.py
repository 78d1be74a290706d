"""The cache of prompts."""

import json

import pytest

from labkit.workload import prompt_cache
from labkit.workload.tokenized_prompt import Prompt


@pytest.mark.parametrize("damage", [b"", b'{"requests": [{"id": "r0"}]}', b'{"requests": 3}'])
def test_a_damaged_cache_file_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(prompt_cache.cache_entries, "root", lambda: tmp_path)

    def make():
        return (Prompt("r0", (1, 2), 3),)

    key = prompt_cache.prompt_key({"a": 1})
    prompt_cache.cached_prompts(key, make)
    path = tmp_path / "workloads" / f"{key}.json"
    path.write_bytes(damage)
    assert prompt_cache.cached_prompts(key, make) == make()
    assert json.loads(path.read_bytes())["requests"][0]["token_ids"] == [1, 2]
