"""Tests of special tokens in a text that must be tokenised as plain text."""

import pytest

from labkit.models import tokenizer
from labkit.models.chat_template import ChatTemplate
from labkit.models.synthetic import train_bpe
from labkit.models.tokenizer import SpecialTokenEscape


def encode(loaded, escape, template, messages):
    return loaded.encode_pieces(escape.split(template.render(escape.mark(messages))))


def sentence_piece(kind):
    """Return a tokenizer in which every text begins with a space."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

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


def test_the_templates_tokens_act_and_those_of_a_message_do_not(tmp_path):
    text = train_bpe.train(["so it goes, so it goes"], vocab_size=300, seed=0)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    loaded = tokenizer.load(tmp_path)
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
