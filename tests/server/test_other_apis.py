"""Responses and Messages: text, stateless, as their own clients read them."""

import http.client
import json
from urllib.parse import urlsplit

import openai
import pytest

ASK = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}
SAY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 6,
}


def test_a_response(client):
    answer = client.responses.create(**ASK)
    chat = client.chat.completions.create(**SAY)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 6


def test_a_response_streamed_is_the_response(client):
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    whole = client.responses.create(**ASK)
    assert "".join(event.delta for event in deltas) == whole.output_text
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert events[-1].response.output_text == whole.output_text


def test_an_answer_can_be_asked_about(client):
    first = client.responses.create(**ASK)
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "go on"},
    ]
    answer = client.responses.create(**{**ASK, "input": said}, instructions="be brief")
    assert answer.usage.input_tokens > first.usage.input_tokens


def test_a_response_of_a_schema(client):
    wanted = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
    answer = client.responses.create(**ASK, text={"format": wanted})
    assert json.loads(answer.output_text) in ("yes", "no") and answer.status == "completed"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 1000}, "max_tokens"),
    ],
)
def test_what_a_response_cannot_be(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASK, **options})
    assert caught.value.param == param


def say(server, **options):
    """Post a message; return the status and the body's text."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("POST", "/v1/messages", json.dumps({**SAY, **options}))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_message(server, client):
    status, text = say(server)
    answer, chat = json.loads(text), client.chat.completions.create(**SAY)
    assert status == 200 and answer["content"] == [
        {"text": chat.choices[0].message.content, "type": "text"}
    ]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == (
        "message", "assistant", "max_tokens",
    )  # fmt: skip
    assert answer["usage"] == {"input_tokens": chat.usage.prompt_tokens, "output_tokens": 6}


def test_a_stop_sequence_is_named(server):
    whole = json.loads(say(server, max_tokens=10)[1])["content"][0]["text"]
    stop = whole.split()[2]
    answer = json.loads(say(server, max_tokens=10, stop_sequences=["unheard", stop])[1])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


def test_a_message_streamed_is_the_message(server):
    events = [part.split("\n") for part in say(server, stream=True)[1].strip().split("\n\n")]
    named = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in events]
    assert all(name == data["type"] for name, data in named)
    text = "".join(d["delta"]["text"] for name, d in named if name == "content_block_delta")
    assert text == json.loads(say(server)[1])["content"][0]["text"]
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
def test_errors_are_this_apis(server, options, status, kind):
    found, text = say(server, **options)
    body = json.loads(text)
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
