import json

import pytest
from jinja2 import nodes

from labkit.config import ConfigError
from labkit.models import chat_template
from labkit.models.chat_template import ChatTemplate, RenderOptions

HELLO = [{"role": "user", "content": "hello"}]


def render(source, messages=HELLO, **tokens):
    return ChatTemplate(source, tokens).render(messages)


def test_jinja_has_transformers_settings():
    source = """
    {%- for message in messages %}
        {%- if loop.index > 9 %}{% break %}{% endif %}
        {{- bos_token + message.role + ': ' + message['content'] | trim }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ ' answer:' }}{% endif %}"""
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = transformers.render_jinja_template(
        conversations=[HELLO], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )[0][0]
    assert render(source, bos_token="<s>") == theirs == "<s>user: hello answer:"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


@pytest.mark.parametrize(
    "options",
    [
        "", "ensure_ascii=False", "true", "false, 2", "indent=2", "separators=(',', ':')",
        "sort_keys=true, ensure_ascii=true",
    ],
)  # fmt: skip
def test_json_has_transformers_options(options):
    source = "{{ {'b': '<é>', 'a': [1, none]} | tojson(OPTIONS) }}".replace("OPTIONS", options)
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = transformers.render_jinja_template(conversations=[HELLO], chat_template=source)
    assert render(source) == theirs[0][0]


def test_text_for_training_is_part_of_a_prompt():
    """Many models' templates mark it with this tag of transformers."""
    source = (
        "{% set kept = 1 %}{% for m in messages %}{% generation %}{% set kept = 2 %}{{ m.content }}"
        "{% if true %}!{% endif %}{% endgeneration %}{% endfor %}{{ kept }}"
    )
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = transformers.render_jinja_template(conversations=[HELLO], chat_template=source)
    assert render(source) == theirs[0][0] == "hello!1"
    with pytest.raises(ConfigError, match="chat template: "):
        render("{% generation %}")


def test_a_template_has_no_clock():
    assert render("{{ strftime_now is defined }}") == "False"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "chat template: "),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
        ("{{ 'x' * 999999999 }}", r"\* works with small numbers"),
        ("{{ 9 ** 9 ** 9 }}", r"\*\* works with small numbers"),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages[0].__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(99999999) %}x{% endfor %}", "too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}",
            "adds more than 1048576 characters",
        ),
        ("{{ raise_exception('only two roles') }}", r"refuses the conversation \(only two roles\)"),
        ("{{ nothing.at.all }}", "undefined"),
        (
            "{# " + "x" * chat_template.MAX_TEMPLATE_CHARACTERS + " #}",
            "characters; it must have at most",
        ),
    ],
)
def test_a_failing_template_is_one_line(source, message):
    with pytest.raises(ConfigError, match=message) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_loading_a_template_computes_nothing(monkeypatch):
    """Otherwise '%2000000000d' % 1 would fill the memory of whoever loads the model."""
    computed = []
    for node in (nodes.BinExpr, nodes.Filter, nodes.Concat):
        monkeypatch.setattr(node, "as_const", lambda self, *_: computed.append(self))
    for constant in ("'%9d' % 1", "'x' | center(9)", "'x' ~ 'y'"):
        assert render("{% if C %}{% set a = C %}{{ a + (C) }}{% endif %}".replace("C", constant))
    with pytest.raises(ConfigError, match="autoescape is not supported"):
        render("{% autoescape 'x' ~ 'y' %}{% endautoescape %}")
    assert computed == []


def test_multiplying_numbers_is_allowed():
    assert render("{{ 6 * 7 }}") == "42"


def test_the_places_of_a_template_in_a_directory(tmp_path):
    assert chat_template.load_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>"}))
    assert chat_template.load_template(tmp_path) is None
    tokens = {"eos_token": {"content": "</s>"}}
    config.write_text(json.dumps(tokens | {"chat_template": "{{eos_token}}"}))
    assert chat_template.load_template(tmp_path).render(HELLO) == "</s>"
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert chat_template.load_template(tmp_path).render(HELLO) == "d"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert chat_template.load_template(tmp_path).render(HELLO) == "own"
    for text, message in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        config.write_text(text)
        with pytest.raises(ConfigError, match=message):
            chat_template.load_template(tmp_path)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ end }}"
HISTORY = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}],
    },
]


@pytest.mark.parametrize(
    ("addition", "messages", "dropped"),
    [
        ("", [{**HELLO[0], "name": "Ann"}], "the names of user messages"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.name }}{% endfor %}",
            [{**HELLO[0], "name": "Ann"}, {"role": "assistant", "content": "", "name": "Bo"}],
            "the names of assistant messages",
        ),
        ("", HISTORY, "the tool calls of assistant messages"),
        ("{{ messages[-1].tool_calls[0].function.name }}", HISTORY, "the arguments of tool calls"),
    ],
)
def test_what_a_template_would_drop_is_refused(addition, messages, dropped):
    with pytest.raises(ConfigError, match=f"drops {dropped}; leave them out"):
        render(PLAIN + addition, messages)


def test_what_a_template_uses_is_rendered():
    named = [{**HELLO[0], "name": "Ann"}]
    assert render(PLAIN + "{{ messages[0].name }}", named) == "user: hello;Ann"
    assert render(PLAIN + "{{ messages[-1].tool_calls | tojson }}", HISTORY).count("sky") == 1
    tool = [*HELLO, {"role": "tool", "name": "look", "content": "x"}]
    assert render(PLAIN, tool) == "user: hello;tool: x;"


def test_variables_are_passed_to_a_template_that_has_them():
    def render_with(**variables):
        return ChatTemplate(PLAIN, {}).render(HELLO, (), RenderOptions(variables=variables))

    assert render_with(end="!") == "user: hello;!"
    for name in ("colour", "messages"):
        with pytest.raises(ConfigError, match=name):
            render_with(**{name: "x"})


def test_the_final_message_is_continued_where_its_text_ends():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "hello "}]
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    template = ChatTemplate(source, {})
    assert template.render(messages, (), options) == "<user>hello</s><assistant>hello "
    without_last = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ConfigError, match="does not end with"):
        without_last.render(messages, (), options)
