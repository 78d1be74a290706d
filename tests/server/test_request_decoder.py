"""Tests of request decoding: which fields are accepted, and what the errors say."""

import asyncio
import importlib
import json
import pkgutil
from types import SimpleNamespace

import msgspec
import pytest
from in_process import post, run_scenario

from labkit import server
from labkit.server.types import request_decoder
from labkit.server.types.api_error import ApiError
from labkit.server.types.messages_types import MessagesRequest
from labkit.server.types.openai_types import ChatRequest, CompletionRequest
from labkit.server.types.request_decoder import decode
from labkit.server.types.responses_types import ResponsesRequest

USER = {"role": "user", "content": "hello"}
REQUIRED = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "hello"},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": [USER], "max_tokens": 4},
}


def decode_fields(kind, fields):
    body = json.dumps({"model": "tiny", **REQUIRED[kind], **fields})
    return decode(msgspec.json.Decoder(kind), body.encode())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"response_format": {"type": "text"}, "chat_template_kwargs": {}}),
        (CompletionRequest, {"skip_special_tokens": False, "length_penalty": 1.0, "stop": ""}),
        (ChatRequest, {"reasoning_effort": "none", "bad_words": [], "length_penalty": 1}),
        (ResponsesRequest, {"reasoning": {"effort": None, "summary": None}}),
        (MessagesRequest, {"mcp_servers": [], "container": None}),
        (ChatRequest, {"stream_options": {"include_obfuscation": False, "x": None}}),
        (ChatRequest, {"response_format": {"type": "text", "x": None}}),
        (
            ChatRequest,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "x": None},
                }
            },
        ),
        (ResponsesRequest, {"text": {"verbosity": None, "format": {"type": "text", "x": None}}}),
        (
            ResponsesRequest,
            {
                "input": [
                    {
                        **USER,
                        "content": [
                            {"type": "input_text", "text": "a", "annotations": [], "x": None}
                        ],
                    }
                ]
            },
        ),
        (MessagesRequest, {"tool_choice": {"type": "auto", "x": None}, "metadata": {"x": None}}),
    ],
)
def test_a_field_that_asks_for_nothing_is_accepted(kind, fields):
    assert decode_fields(kind, fields).model == "tiny"


def test_what_a_user_defines_keeps_its_nulls():
    schema = {"default": None, "annotations": [], "properties": {"a": {"const": None}}}
    function = {"name": "f", "parameters": schema, "x": None}
    tools = [{"type": "function", "function": function, "y": None}]
    request = decode_fields(ChatRequest, {"tools": tools, "metadata": {"z": None}})
    assert request.tools[0].function.parameters == schema and request.metadata == {"z": None}


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        (ChatRequest, {"service_tier": "flex"}, "service_tier",
         "service_tier='flex': must be 'auto' or 'default'"),
        (ChatRequest, {"messages": [{"role": "bishop"}]}, "messages[0].role",
         "messages[0].role='bishop': must be 'assistant', 'developer', 'system', 'tool' or 'user'"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", "messages[0].content[0].type='image_url': must be 'text'"),
        (ChatRequest, {"tool_choice": "maybe"}, "tool_choice",
         "tool_choice='maybe': must be 'auto', 'none' or 'required'"),
        (MessagesRequest, {"tool_choice": {"type": "must"}}, "tool_choice.type",
         "tool_choice.type='must': must be 'auto', 'any', 'tool' or 'none'"),
        (ResponsesRequest, {"input": [{"type": "reasoning"}]}, "input[0].type",
         "input[0].type='reasoning': must be 'message', 'function_call' or 'function_call_output'"),
        (ChatRequest, {"service_tier": "x" * 500}, "service_tier",
         f"service_tier='{'x' * 99}...: must be 'auto' or 'default'"),
        (ChatRequest, {"best_of": 2}, "best_of",
         "best_of: this server supports only 1; leave it out"),
        (ChatRequest, {"skip_special_tokens": True}, "skip_special_tokens",
         "skip_special_tokens: this server supports only false; leave it out"),
        (ChatRequest, {"thinking": {"type": "enabled"}}, "thinking",
         'thinking: this server supports only {"type": "disabled"}; leave it out'),
        (ChatRequest, {"colour": "red"}, "colour",
         "colour: this server has no such field; leave it out"),
        (ChatRequest, {"messages": [{**USER, "mood": "good"}]}, "messages[0].mood",
         "messages[0].mood: this server has no such field; leave it out"),
        (ChatRequest, {"messages": [{"content": "hello"}]}, "messages[0].role",
         "messages[0].role: required, but missing"),
        (ChatRequest, {"n": "two"}, "n", "n: expected `int | null`, got `str`"),
        (ChatRequest, {"stop": [""]}, "stop[0]", "stop[0]: expected `str` of length >= 1"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_and_what_it_must_be(kind, fields, param, message):
    with pytest.raises(ApiError) as error_info:
        decode_fields(kind, fields)
    detail = error_info.value.detail
    assert (error_info.value.status, detail.param, detail.message) == (400, param, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "the body: expected `object`, got `array`"),
        (b'{"model": "tiny"}', "messages: required, but missing"),
        (b"{", "the body is not valid JSON: Input data was truncated"),
        (b'{"model": "\\udc00x"}', "the body is not valid JSON: it may have a lone surrogate"),
        (
            b'{"temperature": NaN}',
            "the body is not valid JSON: JSON is malformed: invalid character (byte 16)",
        ),
        (b'{"temperature": 1e400}', "temperature: number out of range"),
        (b'{"seed": 1%s}' % (b"0" * 5000), "seed: integer value out of range"),
        (b'{"metadata": {"a": 1%s}}' % (b"0" * 5000), "metadata[...]: integer value out of range"),
        (b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_an_error_of_the_whole_body_says_so(body, message):
    with pytest.raises(ApiError) as error_info:
        decode(msgspec.json.Decoder(ChatRequest), body)
    assert error_info.value.detail.message == message


@pytest.mark.parametrize("item", [b"{}", b'{"type":"x"}', b"[]"])
def test_a_body_of_many_objects_is_refused_without_being_cleaned(item, monkeypatch):
    monkeypatch.setattr(request_decoder, "MAX_CLEANED", 1000)
    monkeypatch.setattr(request_decoder, "without_neutral_values", None)
    body = b'{"model":"tiny","messages":[%s]}' % b",".join([item] * 1000)
    with pytest.raises(ApiError, match=r"messages\[0\]"):
        decode(msgspec.json.Decoder(ChatRequest), body)


def test_memory_is_given_back_whenever_the_process_has_grown(tmp_path, monkeypatch):
    resident, trimmed = [100], []

    def trim():
        trimmed.append(resident[-1])
        resident.append(resident[-1] - 10)

    monkeypatch.setattr("labkit.server.http.heap_trimming.LOOK_EVERY_S", 0.002)
    monkeypatch.setattr("labkit.server.http.heap_trimming.REPEATS", 2)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=resident[-1] << 20))
    monkeypatch.setattr(
        "labkit.server.http.heap_trimming.psutil", SimpleNamespace(Process=lambda: process)
    )
    monkeypatch.setattr("labkit.machine.facts.memory_capacity.trim_heap", trim)

    async def scenario(service, engine):
        async def trims_at(megabytes, count):
            trimmed.clear()
            resident.append(megabytes)
            await post(service, "/tokenize", {"prompt": "a"})
            await asyncio.sleep(0.02)
            while len(trimmed) < count:
                await asyncio.sleep(0.002)
            return trimmed

        assert await trims_at(100, 3) == [100, 90, 80]  # at the first look, the second, the fourth
        assert await trims_at(85, 0) == []  # 70 are kept
        assert await trims_at(86, 3) == [86, 76, 66]
        assert await trims_at(50, 0) == await trims_at(65, 0) == []
        assert await trims_at(66, 3) == [66, 56, 46]

    run_scenario(scenario, tmp_path)


def test_no_request_has_an_unknown_field_and_no_response_changes():
    """A struct is one of both: what a client sends is checked, what it is sent is final."""
    structs = {
        struct
        for module in pkgutil.walk_packages(server.__path__, f"{server.__name__}.")
        if module.name.endswith(("types", "routes", "_api", "api_error", "api_generation"))
        for struct in vars(importlib.import_module(module.name)).values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        if struct.__module__ == module.name
    }
    rules = {struct: struct.__struct_config__ for struct in structs}
    assert len(rules) > 80
    wrong = [one for one, rule in rules.items() if rule.frozen is rule.forbid_unknown_fields]
    assert wrong == []
