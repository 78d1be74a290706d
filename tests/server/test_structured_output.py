"""Answers of a given form, and calls of functions."""

import json

import numpy as np
import openai
import pytest

from labkit.models import tokenizer as tokenizers
from labkit.server import tool_calls
from labkit.server.structured_output import Grammars
from labkit.server.tool_calls import ParsedToolCall, ToolCallFormat, ToolCallParser

ASK = {
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


def wanted(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def test_a_schema_is_kept_by_every_choice(client):
    answer = client.chat.completions.create(**ASK, n=3, response_format=wanted(SCHEMA))
    for choice in answer.choices:
        found = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and found.keys() == SCHEMA["properties"].keys()
        assert found["colour"] in ("red", "green") and isinstance(found["sure"], bool)
        assert all(isinstance(size, int) for size in found["sizes"])
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_an_object_begins_as_one(client):
    asked = {**ASK, "max_tokens": 8}
    answer = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("schema", [{"type": "colour"}, {"not": {"type": "string"}}])
def test_a_schema_that_cannot_be_enforced_is_refused(client, schema):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, response_format=wanted(schema))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "warmth"}}]
)
def test_a_call_that_must_be_is_one(client, choice):
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name in (["warmth"] if isinstance(choice, dict) else ["weather", "warmth"])
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")
    stream = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, stream=True)
    chunks = list(stream)
    pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].function.name == call.function.name and pieces[0].id
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_tools_change_the_prompt_and_results_are_read(client):
    def tokens(**options):
        return client.chat.completions.create(**{**ASK, "max_tokens": 2, **options}).usage

    with_tools = tokens(tools=TOOLS, tool_choice="auto")
    assert with_tools.prompt_tokens > tokens().prompt_tokens
    assert tokens(tools=TOOLS, tool_choice="none") == tokens()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
    ]
    assert tokens(messages=said, tools=TOOLS).prompt_tokens > with_tools.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": wanted(SCHEMA)}, "response_format"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": wanted(SCHEMA), "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, **options)
    assert caught.value.param == param


# --- in pieces ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(chat_model):
    return Grammars(chat_model / "tokenizer.json", 4096, [4095])


def test_what_is_allowed_depends_on_the_output_alone(grammars, chat_model):
    """Drafts are asked about and taken back; a constraint answers as if nothing had been asked."""
    ids = tokenizers.load(chat_model).encode('{"colour": "red", "sizes": [1, 2], "sure": true}')
    straight = grammars.from_schema(SCHEMA, "x")
    masks = [straight.allowed(ids[:at], 4096) for at in range(len(ids) + 1)]
    assert all(mask[token] for mask, token in zip(masks, ids, strict=False))
    assert np.flatnonzero(masks[-1]).tolist() == [4095]
    jumping = grammars.from_schema(SCHEMA, "x")
    for at in [5, 2, len(ids), 0, len(ids) - 1, 3, len(ids)]:
        assert (jumping.allowed(ids[:at], 4096) == masks[at]).all()
    assert (jumping.copy().allowed([], 4096) == masks[0]).all()


FORM = ToolCallFormat("json_tools")
TEXT = 'well <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> then <tool'


def read(pieces):
    """Read pieces; return the text, and the calls as (name, arguments)."""
    reader = ToolCallParser(FORM, [])
    said = [item for piece in pieces for item in reader.add(piece)] + list(reader.finish())
    calls = [(item.name, item.arguments) for item in said if isinstance(item, ParsedToolCall)]
    return "".join(item for item in said if isinstance(item, str)), calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(size):
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert read(pieces) == ("well  then <tool", [("f", '{"a": 1}')])


def test_what_is_no_call_is_said():
    assert read(["<tool_call>nonsense</tool_call>"]) == ("<tool_call>nonsense</tool_call>", [])
    assert read(["<tool_call>[1, 2]</tool_call>"]) == ("<tool_call>[1, 2]</tool_call>", [])


def test_two_calls_are_two():
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read([one + one]) == ("", [("f", "{}"), ("f", "{}")])


def test_every_mark_leads_to_a_parser_that_there_is():
    for mark, parser in tool_calls.MARKS:
        form = ToolCallFormat(parser)
        assert form.start and (form.start in mark or mark not in form.start)
