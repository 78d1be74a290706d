"""Tests of ``/v1/responses`` and ``/v1/messages``."""

import http.client
import json
from urllib.parse import urlsplit

import openai
import pytest

RESPONSES_REQUEST = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}
CHAT_REQUEST = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 6,
}


def test_a_response_matches_the_chat_api(client):
    response = client.responses.create(**RESPONSES_REQUEST)
    chat = client.chat.completions.create(**CHAT_REQUEST)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 6


def test_a_streamed_response_equals_the_whole_one(client):
    events = list(client.responses.create(**RESPONSES_REQUEST, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    whole = client.responses.create(**RESPONSES_REQUEST)
    assert "".join(event.delta for event in deltas) == whole.output_text
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert events[-1].response.output_text == whole.output_text


def test_output_messages_can_be_sent_back(client):
    first = client.responses.create(**RESPONSES_REQUEST)
    messages = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "go on"},
    ]
    response = client.responses.create(
        **{**RESPONSES_REQUEST, "input": messages}, instructions="be brief"
    )
    assert response.usage.input_tokens > first.usage.input_tokens


def test_a_response_matches_its_schema(client):
    text_format = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
    response = client.responses.create(**RESPONSES_REQUEST, text={"format": text_format})
    assert json.loads(response.output_text) in ("yes", "no") and response.status == "completed"


BAD_FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "colour"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": []}, "input"),
        # The length is checked before a schema is compiled.
        ({"input": "x" * 200_000, "text": {"format": BAD_FORMAT}}, "input"),
        ({"max_output_tokens": 1000}, "max_tokens"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as error_info:
        client.responses.create(**{**RESPONSES_REQUEST, **options})
    assert error_info.value.param == param


SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
NAMES = ("weather", "warmth")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "warmth"}])
def test_a_response_with_a_required_call(client, choice):
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
    request = {**RESPONSES_REQUEST, "tools": tools, "tool_choice": choice, "max_output_tokens": 300}
    response = client.responses.create(**request)
    (call,) = response.output
    assert response.status == "completed" and call.type == "function_call"
    assert call.name in (NAMES if choice == "required" else ["warmth"])
    assert json.loads(call.arguments)["unit"] in ("celsius", "kelvin")
    with client.responses.stream(**request) as stream:
        done = [e for e in stream if e.type == "response.function_call_arguments.done"]
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert [event.arguments for event in done] == [call.arguments]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "warmth"}])
def test_a_message_with_a_required_call(server, choice):
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    single = {**choice, "disable_parallel_tool_use": True}
    status, text = post_message(server, tools=tools, tool_choice=single, max_tokens=300)
    message = json.loads(text)
    (call,) = message["content"]
    assert status == 200 and message["stop_reason"] == "tool_use"
    assert call["name"] in (NAMES if choice["type"] == "any" else ["warmth"])
    assert call["input"]["unit"] in ("celsius", "kelvin")


def post_message(server, **options):
    """Post to ``/v1/messages``; return the status and the body's text."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("POST", "/v1/messages", json.dumps({**CHAT_REQUEST, **options}))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_a_message_matches_the_chat_api(server, client):
    status, text = post_message(server)
    response, chat = json.loads(text), client.chat.completions.create(**CHAT_REQUEST)
    assert status == 200 and response["content"] == [
        {"text": chat.choices[0].message.content, "type": "text"}
    ]
    assert (response["type"], response["role"], response["stop_reason"]) == (
        "message", "assistant", "max_tokens",
    )  # fmt: skip
    usage = response["usage"]
    assert usage["output_tokens"] == 6
    num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt_tokens == chat.usage.prompt_tokens


def test_a_message_matches_its_schema(server):
    schema = {"enum": ["yes", "no"]}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": None}
    status, text = post_message(server, output_config=config)
    message = json.loads(text)
    assert status == 200 and message["stop_reason"] == "end_turn"
    assert json.loads(message["content"][0]["text"]) in schema["enum"]
    broken = {"format": {"type": "json_schema", "schema": {"type": "colour"}}}
    status, text = post_message(server, output_config=broken)
    assert status == 400 and "output_config.format" in json.loads(text)["error"]["message"]


def test_the_matched_stop_sequence_is_reported(server):
    whole = json.loads(post_message(server, max_tokens=10)[1])["content"][0]["text"]
    stop = whole.split()[2]
    response = json.loads(post_message(server, max_tokens=10, stop_sequences=["unheard", stop])[1])
    assert (response["stop_reason"], response["stop_sequence"]) == ("stop_sequence", stop)


def test_a_streamed_message_equals_the_whole_one(server):
    events = [
        part.split("\n") for part in post_message(server, stream=True)[1].strip().split("\n\n")
    ]
    named = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in events]
    assert all(name == data["type"] for name, data in named)
    text = "".join(d["delta"]["text"] for name, d in named if name == "content_block_delta")
    assert text == json.loads(post_message(server)[1])["content"][0]["text"]
    assert [name for name, _ in named if name != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert named[-2][1]["usage"] == {"output_tokens": 6}


@pytest.mark.parametrize(
    ("options", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"colour": 1}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
    ],
)
def test_errors_have_the_form_of_the_messages_api(server, options, status, kind):
    actual_status, text = post_message(server, **options)
    body = json.loads(text)
    assert (actual_status, body["type"], body["error"]["type"]) == (status, "error", kind)
