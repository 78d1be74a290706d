import pytest

from labkit.config import ConfigError
from labkit.models import tokenizer, train_bpe


@pytest.fixture
def folder(tmp_path):
    text = train_bpe.train(["so it goes, so it goes"], vocab_size=300, seed=0)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    return tmp_path


def test_encode_and_decode_round_trip(folder):
    loaded = tokenizer.load(folder)
    ids = loaded.encode("so it goes: ünd 🙂")
    assert all(isinstance(i, int) for i in ids)
    assert len(ids) < len("so it goes: ünd 🙂".encode())
    assert loaded.decode(ids) == "so it goes: ünd 🙂"
    assert loaded.vocab_size == 300


def test_special_tokens_are_decoded_as_text(folder):
    loaded = tokenizer.load(folder)
    assert loaded.token_id("<|eos|>") == 299
    assert loaded.token_id("nothing") is None
    assert loaded.decode([*loaded.encode("so"), 299]) == "so<|eos|>"


def test_an_unreadable_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
