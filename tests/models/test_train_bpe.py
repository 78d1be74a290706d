import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from labkit.models.synthetic import train_bpe

TEXTS = (
    "the cat sat on the mat; the other cat sat beside it.",
    "Ein zweiter Text, über Äpfel.",
) * 3
SIZE = 700
JSON = train_bpe.train(TEXTS, vocab_size=SIZE, seed=0)
TOKENIZER = Tokenizer.from_str(JSON)
BYTES = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}


def token_bytes(name):
    """Decode by GPT-2's table: printable bytes map to themselves, the others to 256 and above."""
    others = [b for b in range(256) if chr(b) not in BYTES]
    table = BYTES | {chr(256 + i): b for i, b in enumerate(others)}
    return bytes(table[c] for c in name)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_round_trips(text):
    ids = TOKENIZER.encode(text).ids
    if "<|bos|>" not in text and "<|eos|>" not in text:
        assert max(ids, default=0) < SIZE - 2
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_id_has_distinct_bytes():
    names = [TOKENIZER.id_to_token(i) for i in range(SIZE)]
    assert TOKENIZER.get_vocab_size() == SIZE
    assert names[-2:] == ["<|bos|>", "<|eos|>"]
    assert len({token_bytes(name) for name in names[:-2]}) == SIZE - 2
    assert {token_bytes(name) for name in names[:256]} == {bytes([b]) for b in range(256)}
    assert all(TOKENIZER.decode([i], skip_special_tokens=False) for i in range(SIZE))


def test_merges_are_learned_from_the_text():
    assert len(TOKENIZER.encode(TEXTS[0]).ids) < len(TEXTS[0]) / 3
    assert len(train_bpe.train(["ab ab"], vocab_size=300, seed=0)) < len(JSON)


def test_a_small_vocabulary_stops_the_merges():
    small = json.loads(train_bpe.train(TEXTS, vocab_size=260, seed=0))
    assert len(small["model"]["merges"]) == 2
    assert [t["id"] for t in small["added_tokens"]] == [258, 259]


def test_the_seed_changes_invented_words_but_not_merges():
    first, other = json.loads(JSON), json.loads(train_bpe.train(TEXTS, vocab_size=SIZE, seed=1))
    assert first["model"]["merges"] == other["model"]["merges"]
    assert first["model"]["vocab"] != other["model"]["vocab"]


def test_invented_words_fill_any_vocabulary():
    large = json.loads(train_bpe.train(TEXTS, vocab_size=4000, seed=0))["model"]
    words = list(large["vocab"])[256 + len(large["merges"]) :]
    assert len(words) > 3000 and all(re.fullmatch("Ġ[a-z]{3,9}", word) for word in words)


def test_training_is_the_same_in_another_process():
    code = (
        "import sys; from labkit.models.synthetic import train_bpe\n"
        f"sys.stdout.write(train_bpe.train({TEXTS!r}, vocab_size={SIZE}, seed=0))"
    )
    # This process has a hash seed of its own, and a thread per core.
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )
    assert done.stdout == JSON


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="must be 258 or more"):
        train_bpe.train(TEXTS, vocab_size=257, seed=0)


def test_the_byte_table_of_this_test_equals_the_librarys():
    assert {chr(256 + i) for i in range(68)} | set(BYTES) == set(
        pre_tokenizers.ByteLevel.alphabet()
    )
