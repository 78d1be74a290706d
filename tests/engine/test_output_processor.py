import random

import pytest

from labkit.engine.base import NO_TOKEN, TokenEvent
from labkit.engine.output_processor import Detokenizer, OutputProcessor


class Bytes:
    """Ids are bytes."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Pieces:
    """Ids are pieces of bytes of any length, as byte-level BPE has them."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.most = 0

    def decode(self, ids):
        self.most = max(self.most, len(ids))
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_a_character_is_held_back_until_it_is_whole():
    detokenizer = Detokenizer(Bytes())
    deltas = [detokenizer.add(byte) for byte in "a€b".encode()]
    assert deltas == ["a", "", "", "€", "b"]
    assert detokenizer.finish() == ""


def test_what_never_becomes_whole_is_shown_at_the_end():
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.add(byte) for byte in "x€".encode()[:3]] == ["x", "", ""]
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("seed", range(40))
def test_deltas_join_to_the_whole_text_for_any_split(seed):
    rng = random.Random(seed)
    data = "".join(rng.choice("ab €ñ漢😀\n") for _ in range(40)).encode()
    cuts = sorted(rng.sample(range(1, len(data)), 30))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    tokenizer = Pieces(pieces)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.add(i) for i in range(len(pieces))]
    assert "".join(deltas) + detokenizer.finish() == data.decode()
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


@pytest.mark.parametrize("seed", range(40))
def test_a_flood_of_wrong_bytes_is_shown_in_time_and_in_bounded_work(seed):
    rng = random.Random(seed)
    kinds = [bytes([rng.randrange(128, 256)]) for _ in range(30)] + [
        "€".encode(),
        b"a",
        b"\xf0\x9f",
    ]
    pieces = [rng.choice(kinds) for _ in range(300)]
    tokenizer = Pieces(pieces)
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for i in range(len(pieces)):
        text += detokenizer.add(i)
        assert len(text) >= len(tokenizer.decode([*range(i + 1)]).rstrip("\ufffd")) - 3
    assert text + detokenizer.finish() == tokenizer.decode([*range(len(pieces))])
    tokenizer.most = 0
    detokenizer = Detokenizer(tokenizer)
    for i in range(len(pieces)):
        detokenizer.add(i)
    assert tokenizer.most <= 40


def test_a_stop_token_is_in_the_ids_but_not_in_the_text():
    processor = OutputProcessor("a", "p", (1,), Bytes())
    processor.process(TokenEvent("a", ord("h"), None))
    out = processor.process(TokenEvent("a", ord("!"), "stop"))
    assert (out.text, out.token_ids, out.finish_reason) == ("h", (ord("h"), ord("!")), "stop")


def test_an_error_carries_its_reason_and_no_token():
    processor = OutputProcessor("a", "p", (1,), Bytes())
    out = processor.process(TokenEvent("a", NO_TOKEN, "error", error="too large"))
    assert (out.text, out.token_ids, out.error) == ("", (), "too large")
