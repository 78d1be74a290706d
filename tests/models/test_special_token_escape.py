"""Tests of special tokens in a text that must be tokenised as plain text."""

from labkit.models import tokenizer, train_bpe
from labkit.models.chat_template import ChatTemplate
from labkit.models.special_token_escape import SpecialTokenEscape


def encode(loaded, escape, template, messages):
    pieces = escape.split(template.render(escape.mark(messages)))
    return [i for piece in pieces for i in loaded.encode(piece, special=False)]


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
