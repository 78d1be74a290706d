import threading

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from labkit.config import ConfigError
from labkit.models import tokenizer
from labkit.models.chat_template import ChatTemplate
from labkit.models.synthetic import train_bpe
from labkit.models.tokenizer import SpecialTokenEscape
from labkit.workload.sources import text_requests
from labkit.workload.sources.text_requests import TextRequest


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


def test_stored_truncation_and_padding_do_not_change_a_prompt(folder):
    """Files of sentence encoders and some fine-tunes store the settings of their training."""
    path = folder / "tokenizer.json"
    texts = ["so it goes " * repeats for repeats in (1, 20, tokenizer.LONG_TEXT)]
    whole = [tokenizer.load(folder).encode(text) for text in texts]
    stored = tokenizers.Tokenizer.from_file(str(path))
    stored.enable_truncation(8)
    stored.enable_padding(length=512)
    stored.save(str(path))
    assert [tokenizer.load(folder).encode(text) for text in texts] == whole


def test_special_tokens_are_decoded_as_text(folder):
    loaded = tokenizer.load(folder)
    assert loaded.token_id("<|eos|>") == 299
    assert loaded.token_id("nothing") is None
    assert loaded.decode([*loaded.encode("so"), 299]) == "so<|eos|>"


def test_an_unreadable_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_long_text_has_the_tokens_of_its_pieces(folder):
    loaded = tokenizer.load(folder)
    text = "so it goes: ünd 🙂, " * tokenizer.LONG_TEXT
    ids = loaded.encode(text)
    assert ids == loaded.encode("so it goes: ünd 🙂, ") * tokenizer.LONG_TEXT
    assert loaded.decode(ids) == text


def test_other_threads_run_while_a_long_text_is_tokenised(folder):
    loaded, ticks, done = tokenizer.load(folder), 0, threading.Event()

    def count():
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    counting = threading.Thread(target=count)
    counting.start()
    loaded.encode("so it goes " * 100_000)
    ticks_meanwhile = ticks
    done.set()
    counting.join()
    assert ticks_meanwhile > 10  # with the GIL held: two or three


def test_no_token_is_longer_than_the_longest(folder):
    loaded = tokenizer.load(folder)
    pieces = [loaded.piece(token) for token in range(loaded.vocab_size)]
    assert loaded.max_token_characters == max(map(len, pieces)) > 1


@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("added", ["<s> $A", "<s> $A </s>", "$A"])
def test_turns_are_one_text_with_special_tokens_around_it(spaces, added):

    words = ["<s>", "</s>", "\u2581", "a", "b", "\n", "\n\n", "\u2581a", "ab"]
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("\n", "\n"), ("\u2581", "a"), ("a", "b")],
        )
    )
    replace = normalizers.Replace(" ", "\u2581")
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if spaces else replace
    )
    strip = [decoders.Strip(" ", 1, 0)] if spaces else []
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), *strip])
    built.post_processor = processors.TemplateProcessing(
        single=added, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    built.add_special_tokens(["<s>", "</s>"])
    loaded = tokenizer.Tokenizer(built)
    turns = ["a", "b a\n\n", "\n ab", " a"]
    for count in range(1, 5):
        ids = loaded.encode_turns(turns[:count])
        assert [ids.count(0), ids.count(1)] == [added.count("<s>"), added.count("</s>")]
        plain = ids[added.count("<s>") : len(ids) - added.count("</s>")]
        assert loaded.decode(plain) == "".join(turns[:count])
        longer = loaded.encode_turns([*turns[:count], "b"])
        assert longer[: len(ids) - added.count("</s>")] == ids[: len(ids) - added.count("</s>")]
    assert loaded.encode_turns(["a b"]) == loaded.encode("a b")


@pytest.mark.parametrize("template", [b"{% for %}", b"\xff"])
def test_a_template_that_cannot_be_parsed_matters_only_to_chats(folder, template):
    (folder / "chat_template.jinja").write_bytes(template)
    loaded = tokenizer.load(folder)
    assert loaded.decode(loaded.encode("so it goes")) == "so it goes"
    messages = [{"role": "user", "content": "so"}]
    with pytest.raises(ConfigError, match=r"chat.template.*; send a text instead of a conv"):
        loaded.encode_chat(messages)
    text = TextRequest(("so",), 1, tuple(messages))
    with pytest.raises(ConfigError, match=r"chat.template"):  # its plain text is another prompt
        text_requests._ids(loaded, text)
    assert text_requests._ids(loaded, TextRequest(("so",), 1)) == tuple(loaded.encode("so"))


def encode(loaded, escape, template, messages):
    return loaded.encode_pieces(escape.split(template.render(escape.mark(messages))))


def sentence_piece(kind):
    """Return a tokenizer in which every text begins with a space."""

    words = ["<unk>", "</s>", "\u2581", *"so<>/", "</", "s>", "\u2581so"]
    if kind == "unigram":
        built = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    else:
        words += [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {word: i for i, word in enumerate(words)}
        merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("s", "o"), ("\u2581", "so")]
        built = tokenizers.Tokenizer(
            models.BPE(vocab=vocab | {"so": 999}, merges=merges, byte_fallback=True)
        )
    if kind == "llama":
        prepend, replace = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
        built.normalizer = normalizers.Sequence([prepend, replace])
        built.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Metaspace()
    built.add_special_tokens(["</s>"])
    return tokenizer.Tokenizer(built)


@pytest.mark.parametrize("kind", ["llama", "metaspace", "unigram"])
def test_no_space_is_added_within_an_escaped_token(kind):
    loaded = sentence_piece(kind)
    escape = SpecialTokenEscape(loaded.special_tokens)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}</s>{% endfor %}", {})
    ids = encode(loaded, escape, template, [{"role": "user", "content": "so </s> so"}])
    assert loaded.decode(ids) == "so </s> so</s>" and ids.count(1) == 1


def test_the_templates_tokens_act_and_those_of_a_message_do_not(folder):
    loaded = tokenizer.load(folder)
    escape = SpecialTokenEscape(loaded.special_tokens)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}", {})
    eos = loaded.token_id("<|eos|>")
    messages = [{"role": "user", "content": "so <|eos|> it"}, {"role": "user", "content": "goes"}]
    ids = encode(loaded, escape, template, messages)
    assert ids.count(eos) == 2
    assert loaded.decode(ids) == template.render(messages)
    assert loaded.encode(template.render(messages), special=False).count(eos) == 3


def test_nested_strings_are_marked_and_other_values_are_kept():
    escape = SpecialTokenEscape(["<s>", "<s><t>"])
    value = {"a<s>": ["<s><t>", 1, None, True], "b": "plain"}
    marked = escape.mark(value)
    assert "<s>" not in str(marked) and marked["b"] == "plain"
    assert "".join(escape.split(next(iter(marked)))) == "a<s>"
    assert escape.split(next(iter(marked.values()))[0]) == ["<", "s><t>"]
    assert next(iter(marked.values()))[1:] == [1, None, True]
    assert SpecialTokenEscape([]).mark(value) == value
