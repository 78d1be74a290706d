import functools
import random
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labkit.engine.incremental_detokenizer import REPLACEMENT, IncrementalDetokenizer
from labkit.models.tokenizer import Tokenizer


class Bytes:
    """Ids are bytes."""

    byte_tokens = MappingProxyType({})

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Pieces:
    """Ids are pieces of bytes of any length, as byte-level BPE has them."""

    byte_tokens = MappingProxyType({})

    def __init__(self, pieces):
        self.pieces = pieces
        self.most = 0

    def decode(self, ids):
        self.most = max(self.most, len(ids))
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_a_character_is_held_back_until_it_is_complete():
    detokenizer = IncrementalDetokenizer(Bytes())
    deltas = [detokenizer.add(byte) for byte in "a€b".encode()]
    assert deltas == ["a", "", "", "€", "b"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_flushed_at_the_end():
    detokenizer = IncrementalDetokenizer(Bytes())
    assert [detokenizer.add(byte) for byte in "x€".encode()[:3]] == ["x", "", ""]
    assert detokenizer.finish() == REPLACEMENT


@pytest.mark.parametrize("seed", range(40))
def test_deltas_join_to_the_whole_text_for_any_split(seed):
    rng = random.Random(seed)
    data = "".join(rng.choice("ab €ñ漢😀\n") for _ in range(40)).encode()
    cuts = sorted(rng.sample(range(1, len(data)), 30))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    tokenizer = Pieces(pieces)
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.add(i) for i in range(len(pieces))]
    assert "".join(deltas) + detokenizer.finish() == data.decode()
    assert not any(REPLACEMENT in delta for delta in deltas)


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
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = ""
    for i in range(len(pieces)):
        text += detokenizer.add(i)
        assert len(text) >= len(tokenizer.decode([*range(i + 1)]).rstrip("\ufffd")) - 3
    assert text + detokenizer.finish() == tokenizer.decode([*range(len(pieces))])
    tokenizer.most = 0
    detokenizer = IncrementalDetokenizer(tokenizer)
    for i in range(len(pieces)):
        detokenizer.add(i)
    assert tokenizer.most <= 40


def cut(data, cuts):
    """Cut bytes at the given places, which are taken modulo their number."""
    places = sorted({c % len(data) for c in cuts} - {0}) if data else []
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def streamed(pieces, prompt=0):
    """The deltas and the rest of all pieces after the first ``prompt`` ones."""
    tokenizer = Pieces(pieces)
    detokenizer = IncrementalDetokenizer(tokenizer, range(prompt))
    deltas = [detokenizer.add(i) for i in range(prompt, len(pieces))]
    return deltas, detokenizer.finish()


TEXT = st.text(st.sampled_from("ab €ñ漢😀\n\ufffd"), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 200), max_size=25)


@given(st.one_of(TEXT.map(str.encode), st.binary(min_size=1, max_size=40)), CUTS)
def test_any_bytes_cut_anywhere_join_to_what_is_decoded_at_once(data, cuts):
    deltas, tail = streamed(cut(data, cuts))
    assert "".join(deltas) + tail == data.decode(errors="replace")


@given(TEXT, CUTS)
def test_a_stream_of_text_never_shows_a_broken_character(text, cuts):
    text = text.replace(REPLACEMENT, "")
    deltas, tail = streamed(cut(text.encode(), cuts)) if text else ([], "")
    assert REPLACEMENT not in "".join(deltas) + tail


@given(TEXT, CUTS, st.integers(0, 25))
@example("a€b", [2], 1)
@example("😀", [1, 2, 3], 2)
def test_a_prompt_that_ends_within_a_character_leaves_it_to_the_output(text, cuts, prompt):
    text = text.replace(REPLACEMENT, "") or "€"
    pieces = cut(text.encode(), cuts)
    prompt = min(prompt, len(pieces) - 1)
    deltas, tail = streamed(pieces, prompt)
    begun = b"".join(pieces[:prompt]).decode(errors="ignore")
    assert begun + "".join(deltas) + tail == text


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (["x\ufffd".encode()], [b"a"], "a"),  # the prompt's own U+FFFD is not ours to show
        ([b"x\xe2"], [b"a", b"b"], "ab"),  # what the output does not complete, neither
        ([b"x\xe2"], [b"\x82"], ""),
        ([b"x\xe2"], ["€".encode()], "€"),
        ([b"x\xe2"], [b"\x82", b"\xac", b"\xe2\x82"], "€\ufffd"),
        ([b"\xac", b"\xac"], [b"a"], "a"),
        ([], [b"\xac"], "\ufffd"),
    ],
)
def test_characters_across_the_border_of_prompt_and_output(prompt, output, text):
    deltas, tail = streamed(prompt + output, len(prompt))
    assert "".join(deltas) + tail == text


def test_a_flood_of_wrong_bytes_costs_the_same_per_token():
    class Counting(Pieces):
        decoded = 0

        def decode(self, ids):
            self.decoded += len(ids)
            return super().decode(ids)

    def cost(count):
        tokenizer = Counting([b"\xf0"] * count)
        detokenizer = IncrementalDetokenizer(tokenizer)
        for i in range(count):
            detokenizer.add(i)
        return tokenizer.decoded

    assert cost(4000) <= 2.1 * cost(2000)


@functools.cache
def fallback(first_space):
    """A tokenizer like Llama 2's (which adds and strips a first space) or Gemma's."""
    import tokenizers
    from tokenizers import decoders, normalizers

    words = ["\u2581", "a", "b", "\u2581a", "\u2581b", "ab", "\n"]
    vocab = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=[("\u2581", "a"), ("\u2581", "b"), ("a", "b")],
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "\u2581")
    own = [normalizers.Prepend("\u2581")] if first_space else []
    built.normalizer = normalizers.Sequence([*own, space])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if first_space else []
    built.decoder = decoders.Sequence([*parts, *strip])
    return Tokenizer(built)


FALLBACK_TEXT = st.text(st.sampled_from("ab \n\u00f1\u65e5\u672c\U0001f600"), max_size=20)


@given(FALLBACK_TEXT, FALLBACK_TEXT, st.booleans())
@example("", "\u65e5\u672c", True)
@example("ab\u65e5\u672c", "\u65e5\u672c", False)
def test_byte_tokens_stream_the_text_of_their_characters(prompt, text, first_space):
    tokenizer = fallback(first_space)
    before, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    if ids[: len(before)] != before or not before:
        before = ids[:1]
    shown = tokenizer.decode(before)
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    if REPLACEMENT in shown:  # the prompt is the first byte of a character
        shown = ""
    deltas = [detokenizer.add(token) for token in ids[len(before) :]]
    assert shown + "".join(deltas) + detokenizer.finish() == prompt + text
    assert not any(REPLACEMENT in delta for delta in deltas)


@pytest.mark.parametrize(
    ("prompt", "output", "deltas", "tail"),
    [
        (b"a", "\u65e5\u672c".encode(), ["", "", "\u65e5", "", "", "\u672c"], ""),
        (b"a", b"\xe6\x97a\xa5b", ["", "", "\ufffda", "\ufffd", "b"], ""),
        (b"\xe6", b"\x97\xa5", ["", "\u65e5"], ""),  # the prompt ends within a character
        (b"\xe6", b"ab", ["a", "b"], ""),
        (b"\xe6", b"\xe6\x97", ["", ""], "\ufffd"),
        ("\u65e5\u672c".encode() * 9, "\u65e5".encode(), ["", "", "\u65e5"], ""),
    ],
)
def test_characters_of_byte_tokens(prompt, output, deltas, tail):
    tokenizer = fallback(True)
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt))
    assert [detokenizer.add(byte) for byte in output] == deltas
    assert detokenizer.finish() == tail
