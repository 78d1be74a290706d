"""Tests of structured output and of tool calls."""

import json
import re

import numpy as np
import openai
import pytest

from labkit.engine.sampling.sampling_params import SamplingError
from labkit.models import tokenizer as tokenizers
from labkit.server.constraints.grammar_compiler import GrammarCompiler, GrammarSource
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import (
    TEMPLATE_MARKS,
    ParsedToolCall,
    ToolCallFormat,
    ToolCallParser,
)

REQUEST = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 300,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "sure": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "warmth")
]


def json_schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def test_every_choice_matches_the_schema(client):
    response = client.chat.completions.create(
        **REQUEST, n=3, response_format=json_schema_format(SCHEMA)
    )
    for choice in response.choices:
        parsed = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and parsed.keys() == SCHEMA["properties"].keys()
        assert parsed["colour"] in ("red", "green") and isinstance(parsed["sure"], bool)
        assert all(isinstance(size, int) for size in parsed["sizes"])
    assert len({choice.message.content for choice in response.choices}) > 1


def test_json_object_output_starts_with_a_brace(client):
    request = {**REQUEST, "max_tokens": 8}
    response = client.chat.completions.create(**request, response_format={"type": "json_object"})
    assert response.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("schema", [{"type": "colour"}, {"not": {"type": "string"}}])
def test_a_schema_that_cannot_be_enforced_is_refused(client, schema):
    with pytest.raises(openai.BadRequestError) as error_info:
        client.chat.completions.create(**REQUEST, response_format=json_schema_format(schema))
    assert error_info.value.param == "response_format"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "warmth"}}]
)
def test_a_required_call_is_generated(client, choice):
    response = client.chat.completions.create(**REQUEST, tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = response.message.tool_calls
    assert response.finish_reason == "tool_calls" and response.message.content is None
    assert call.function.name in (["warmth"] if isinstance(choice, dict) else ["weather", "warmth"])
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")
    stream = client.chat.completions.create(**REQUEST, tools=TOOLS, tool_choice=choice, stream=True)
    chunks = list(stream)
    pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].function.name == call.function.name and pieces[0].id
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_tools_and_their_results_are_in_the_prompt(client):
    def usage(**options):
        return client.chat.completions.create(**{**REQUEST, "max_tokens": 2, **options}).usage

    with_tools = usage(tools=TOOLS, tool_choice="auto")
    assert with_tools.prompt_tokens > usage().prompt_tokens
    assert usage(tools=TOOLS, tool_choice="none") == usage()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *REQUEST["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
    ]
    assert usage(messages=messages, tools=TOOLS).prompt_tokens > with_tools.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": json_schema_format(SCHEMA)}, "response_format"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": json_schema_format(SCHEMA), "extra_body": {"ignore_eos": True}},
         "ignore_eos"),
    ],
)  # fmt: skip
def test_invalid_combinations_are_refused(client, options, param):
    with pytest.raises(openai.BadRequestError) as error_info:
        client.chat.completions.create(**REQUEST, **options)
    assert error_info.value.param == param


@pytest.fixture(scope="module")
def constrain(chat_model):
    """Return a constraint of a schema over the tiny model's vocabulary."""
    compiler = GrammarCompiler(str(chat_model / "tokenizer.json"), 4096, [4095])

    def constrain(schema):
        source = GrammarSource("json_schema", json.dumps(schema))
        return GrammarConstraint(compiler.compile(source), [4095], "response_format")

    return constrain


def test_a_mask_depends_only_on_the_output(constrain, chat_model):
    """Masks after a rollback, as for rejected draft tokens, equal those computed in order."""
    ids = tokenizers.load(chat_model).encode('{"colour": "red", "sizes": [1, 2], "sure": true}')
    in_order = constrain(SCHEMA)
    masks = [in_order.allowed(ids[:at], 4096) for at in range(len(ids) + 1)]
    assert all(mask[token] for mask, token in zip(masks, ids, strict=False))
    assert np.flatnonzero(masks[-1]).tolist() == [4095]
    out_of_order = constrain(SCHEMA)
    for at in [5, 2, len(ids), 0, len(ids) - 1, 3, len(ids)]:
        assert (out_of_order.allowed(ids[:at], 4096) == masks[at]).all()
    assert (out_of_order.copy().allowed([], 4096) == masks[0]).all()


def test_draft_tokens_that_violate_the_grammar_leave_it_usable(constrain, chat_model):
    ids = tokenizers.load(chat_model).encode('{"colour": "red"')
    constraint = constrain(SCHEMA)
    masks = [constraint.allowed(ids[:at], 4096) for at in range(len(ids) + 1)]
    for at in range(len(ids)):
        wrong = int(np.flatnonzero(~masks[at])[0])
        with pytest.raises(SamplingError, match="violates the grammar"):
            constraint.allowed([*ids[:at], wrong, *ids[at:]], 4096)
        assert (constraint.allowed(ids[: at + 1], 4096) == masks[at + 1]).all()


def generate_arbitrary_tokens(constraint):
    """Generate allowed tokens, chosen by a fixed seed; return them when only the end may follow."""
    choose, output = np.random.default_rng(0), []
    while True:
        allowed = np.flatnonzero(constraint.allowed(output, 4096))
        if allowed.tolist() == [4095]:
            return output
        output.append(int(choose.choice(allowed[allowed != 4095])))


def test_a_grammar_that_exceeds_a_limit_is_an_error_and_not_the_end(constrain, chat_model):
    """After an error, llguidance's own mask allows the end of the text."""
    output = generate_arbitrary_tokens(constrain(SCHEMA))
    assert (
        json.loads(tokenizers.load(chat_model).decode(output)).keys() == SCHEMA["properties"].keys()
    )
    pattern = {"type": "string", "pattern": "^.*[aeiou].{500}b.{500}$"}
    with pytest.raises(
        SamplingError, match=r"^response_format: the grammar cannot be enforced: lexer error"
    ) as error_info:
        generate_arbitrary_tokens(constrain(pattern))
    assert len(str(error_info.value).splitlines()) == 1


CALL_FORMAT = ToolCallFormat("json_tools")


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def object_of(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def travel(name, city):
    """A tool whose schema is like those that Pydantic makes of nested models."""
    place = object_of({"city": {"const": city}}, required=["city"])
    schema = object_of({"place": {"$ref": "#/$defs/Place"}}, required=["place"])
    return tool(name, {**schema, "$defs": {"Place": place}})


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("near", {"place": {"city": "Rome"}}, True),
        ("near", {"place": {"city": "Oslo"}}, False),
        ("far", {"place": {"city": "Oslo"}}, True),
        ("tree", {"child": {"child": {}}}, True),
        ("tree", {"child": {"name": "tree", "arguments": {}}}, False),
        ("plain", {}, True),
        ("plain", {"a": 1}, False),
    ],
)
def test_references_of_a_schema_begin_at_the_function_s_parameters(
    chat_model, name, arguments, allowed
):
    tree = tool("tree", object_of({"child": {"$ref": "#"}}))
    tools = [travel("near", "Rome"), tree, travel("far", "Oslo"), tool("plain")]
    tokenizer = tokenizers.load(chat_model)
    source = GrammarSource("lark", CALL_FORMAT.grammar(tools, tokenizer))
    matcher = GrammarCompiler(str(chat_model / "tokenizer.json"), 4096, [4095]).compile(source)
    call = json.dumps({"name": name, "arguments": arguments})
    ids = tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", special=False)
    assert (matcher.try_consume_tokens(ids) == len(ids)) is allowed
    assert matcher.is_accepting() is allowed


TEXT = 'well <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> then <tool'


def parse_items(pieces, call_format=CALL_FORMAT):
    parser = ToolCallParser(call_format, [tool("f")])
    return [item for piece in pieces for item in parser.add(piece)] + list(parser.finish())


def parse(pieces, call_format=CALL_FORMAT):
    """Parse pieces of text; return the plain text, and the calls as (name, arguments)."""
    items = parse_items(pieces, call_format)
    calls = [(item.name, item.arguments) for item in items if isinstance(item, ParsedToolCall)]
    return "".join(item for item in items if isinstance(item, str)), calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_parsed_however_the_text_is_split(size):
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert parse(pieces) == ("well  then <tool", [("f", '{"a": 1}')])


def test_text_between_marks_that_is_no_call_is_plain_text():
    assert parse(["<tool_call>nonsense</tool_call>"]) == ("<tool_call>nonsense</tool_call>", [])
    assert parse(["<tool_call>[1, 2]</tool_call>"]) == ("<tool_call>[1, 2]</tool_call>", [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("json_tools", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
        (
            "json_tools",
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
            "</tool_call>",
        ),
        ("glm47", "<tool_call>f, but which?</tool_call>"),
        ("mistral", "[TOOL_CALLS]g[ARGS]{}"),
    ],
)
def test_a_call_of_a_function_that_the_request_does_not_have_is_plain_text(parser, text):
    assert parse([text], ToolCallFormat(parser)) == (text, [])


ARGUMENTS = {
    "json_tools": ('<tool_call>{"name": "f", "arguments": {"a": 1}', "}\n</tool_call>"),
    "glm47": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>",
        "<arg_value>2</arg_value></tool_call>",
    ),
    "minicpm5": (
        '<function name="f"><param name="a">1</param><param name="b">',
        "2</param></function>",
    ),
    "muse_spark": (
        '<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">1</atem:parameter>',
        '<atem:parameter name="b">2</atem:parameter></atem:invoke></atem:function_calls>',
    ),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"a": 1', "}"),
}


@pytest.mark.parametrize("parser", ARGUMENTS)
def test_a_call_without_its_end_is_plain_text(parser):
    begin, end = ARGUMENTS[parser]
    call_format = ToolCallFormat(parser)
    assert parse([begin], call_format) == (begin, [])
    text, calls = parse([begin, end], call_format)
    assert (text, [name for name, _ in calls]) == ("", ["f"])


def test_a_whole_json_call_needs_no_end_mark():
    call_format = ToolCallFormat("json_tools")
    whole = '<tool_call>{"name": "f", "arguments": {"a": 1}}'
    text, calls = parse([whole], call_format)
    assert (text, [name for name, _ in calls]) == ("", ["f"])
    assert parse([whole[:-1]], call_format) == (whole[:-1], [])


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("parser", "text", "ids"),
    [
        ("json_tools", '<tool_call>{"name": "f", "id": "x"}</tool_call>', "call_[0-9a-f]{24}"),
        ("kimi_k2", KIMI, "functions.f:7"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "[0-9a-f]{9}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "id": "abcDEF123"}]', "abcDEF123"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "id": "call_1234"}]', "[0-9a-f]{9}"),
    ],
)
def test_the_ids_of_calls_are_those_that_the_template_needs(parser, text, ids):
    calls = parse_items([text], ToolCallFormat(parser))
    assert calls and all(re.fullmatch(ids, call.prefixed_id("call")) for call in calls)
    assert len({call.id for call in calls}) == len(calls)


def test_two_adjacent_calls_are_parsed():
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse([one + one]) == ("", [("f", "{}"), ("f", "{}")])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_whitespace_around_calls_is_not_text(size):
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f" \n{one}\n\n{one} \n"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(pieces) == ("", [("f", "{}"), ("f", "{}")])
    assert parse([" \n "]) == (" \n ", [])
    assert parse([one, "\n and", " more "]) == ("\n and more ", [("f", "{}")])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "\\u00e9"}', '{"a": "é"}'), ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("null", "{}"), ('""', "{}"),
        ("[1]", None), ("3", None), ('"x"', None), ('{"a": NaN}', None), ('{"a": "\\ud800"}', None),
    ],
)  # fmt: skip
def test_only_an_object_of_arguments_makes_a_call(arguments, expected):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse([text]) == (("", [("f", expected)]) if expected else (text, []))


def test_every_template_mark_has_a_parser():
    for mark, parser in TEMPLATE_MARKS:
        call_format = ToolCallFormat(parser)
        start = call_format.start
        assert start and (start in mark or mark not in start)


@pytest.mark.parametrize("depth", [64, 200])
def test_a_deeply_nested_schema_is_a_bad_request(client, depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError) as error_info:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            response_format=json_schema_format(schema),
            max_tokens=500,
        )
    assert error_info.value.body["message"].endswith("it is nested too deeply")
