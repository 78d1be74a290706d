"""Tests of what clients send by default, and of vLLM's options that clients use."""

import json

import pytest
from test_routes import send

USER = [{"role": "user", "content": "hello"}]
PREFIX = [*USER, {"role": "assistant", "content": "well, "}]
LABELS = {
    "metadata": {"run": "7"},
    "user": "ann",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "service_tier": "auto",
    "store": False,
}
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}


def post(server, path, **fields):
    """Post greedy decoding of ``BODIES[path]`` with further fields; return status and body."""
    body = {"model": "tiny", "temperature": 0, **BODIES.get(path, {}), **fields}
    response = send(server, "POST", path, json.dumps(body))
    return response[0], response[2]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, LABELS) for path in list(BODIES)[:3]),
        ("/v1/completions", {"best_of": 1, "echo": False, "suffix": ""}),
        ("/v1/completions", {"suffix": None, "colour": None, "logprobs": None, "stop": ""}),
        ("/v1/chat/completions", {"tools": [], "functions": [], "modalities": ["text"]}),
        ("/v1/chat/completions", {"audio": None, "top_logprobs": 0, "parallel_tool_calls": False}),
        ("/v1/responses", {"include": [], "tools": [], "tool_choice": "auto", "reasoning": {}}),
        ("/v1/responses", {"truncation": "disabled", "parallel_tool_calls": False, "priority": 0}),
        ("/v1/chat/completions", {"priority": 0}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "tools": [], "service_tier": "auto"}),
        ("/v1/messages", {"metadata": {"user_id": "u"}, "tool_choice": {"type": "auto"}}),
    ],
)
def test_fields_at_neutral_values_change_nothing(server, path, fields):
    status, body = post(server, path, **fields)
    assert status == 200
    plain = post(server, path)[1]
    for name in ("choices", "output_text", "content"):
        assert body.get(name) == plain.get(name)


def test_a_message_that_comes_back_with_nulls_is_accepted(client):
    reply = client.chat.completions.create(model="tiny", messages=USER, max_tokens=4)
    message = {**reply.choices[0].message.model_dump(), "annotations": [], "audio": None}
    message["provider_specific_fields"] = {"refusal": None}  # LiteLLM's
    assert message["function_call"] is None and message["tool_calls"] is None
    again = client.chat.completions.create(
        model="tiny", messages=[*USER, message, *USER], max_tokens=4
    )
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_nulls_of_a_schema_are_kept(client):
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    schema["additionalProperties"] = False  # random weights may write other properties at length
    text_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = client.chat.completions.create(
        model="tiny", messages=USER, response_format=text_format, extra_body={"echo": False}
    )
    assert json.loads(reply.choices[0].message.content)["a"] is None


TOOL = {"type": "function", "function": {"name": "look"}}


def test_a_required_call_may_be_the_only_one(client):
    options = {"model": "tiny", "messages": USER, "tools": [TOOL], "parallel_tool_calls": False}
    reply = client.chat.completions.create(**options, tool_choice="required")
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["look"]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"choice": ['say "é"', "no\n"]}, ('say "é"', "no\n")),
        ({"regex": "x{3}y"}, ("xxxy",)),
        ({"grammar": 'start: "p" "q"'}, ("pq",)),
        ({"json": {"enum": [7]}}, ("7",)),
        ({"json": '{"enum": [7]}'}, ("7",)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_structured_outputs(server, path, outputs, expected):
    status, body = post(server, path, structured_outputs=outputs, max_tokens=64)
    choice = body["choices"][0] if status == 200 else body
    text = choice.get("text") or choice["message"]["content"]
    assert text in expected and choice["finish_reason"] == "stop"


def test_min_tokens_forbids_the_end(server):
    options = {"logit_bias": {"3000": 100}, "return_token_ids": True}
    ends = {**options, "stop_token_ids": [3000]}
    short = post(server, "/v1/completions", **ends)[1]["choices"][0]
    assert (short["finish_reason"], short["token_ids"]) == ("stop", [3000])
    longer = post(server, "/v1/completions", **ends, min_tokens=3, max_tokens=10)[1]["choices"][0]
    assert longer["finish_reason"] == "stop" and longer["token_ids"].index(3000) == 3


def test_an_assistants_message_at_the_end_is_continued(server):
    def prompt(messages, **fields):
        status, body = post(
            server, "/v1/chat/completions", messages=messages, return_token_ids=True, **fields
        )
        assert status == 200
        ids = {"tokens": body["prompt_token_ids"]}
        return send(server, "POST", "/detokenize", json.dumps(ids))[2]["prompt"]

    assert prompt(PREFIX) == prompt(PREFIX, continue_final_message=True)
    assert prompt(PREFIX).endswith("assistant: well, ")
    assert prompt(PREFIX, add_generation_prompt=True).endswith("well, assistant:")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert post(server, "/v1/chat/completions", messages=PREFIX, **both)[0] == 400
    continued = post(server, "/v1/chat/completions", messages=PREFIX)[1]["choices"][0]
    message = post(server, "/v1/messages", messages=PREFIX)[1]
    assert message["content"][0]["text"] == continued["message"]["content"]


def test_tool_calls_of_the_history_are_in_the_prompt(client):
    def num_prompt_tokens(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": "look", "content": "a tree"},
        ]
        reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        return reply.usage.prompt_tokens

    assert num_prompt_tokens('{"at": "the old mill"}') > num_prompt_tokens("{}")


def test_output_is_bounded_by_the_context(tiny_server):
    with tiny_server("engine.budget.blocks=8") as small:
        status, body = post(small, "/v1/completions", max_tokens=16_384)
        context = send(small, "GET", "/v1/models/tiny")[2]["max_model_len"]
        assert status == 200 and context < 16_384
        assert body["usage"]["total_tokens"] == context
        assert body["choices"][0]["finish_reason"] == "length"
        whole = post(small, "/v1/chat/completions", max_tokens=None)[1]
        assert whole["usage"]["total_tokens"] == context
        status, body = post(small, "/v1/completions", max_tokens=16_384, ignore_eos=True)
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
