"""Tests of tools in all three APIs of conversations, with an engine whose replies are given."""

import json
import re

import pytest
from chat_model import TEMPLATE
from fake_engine import ToolTokenizer
from in_process import post, run_scenario

from labkit.models.chat_template import ChatTemplate

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
MESSAGES_TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "hello"}
BASES = {
    CHAT: {"messages": [USER], "tools": [CHAT_TOOL], "max_tokens": 500},
    RESPONSES: {"input": [USER], "tools": [RESPONSES_TOOL], "max_output_tokens": 500},
    MESSAGES: {"messages": [USER], "tools": [MESSAGES_TOOL], "max_tokens": 500},
    COUNT: {"messages": [USER], "tools": [MESSAGES_TOOL]},
}


def call_text(city):
    arguments = json.dumps({"city": city})
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


REPLY = f"Let me see.\n{call_text('Rome')}\n{call_text('Oslo')}\n"


@pytest.fixture
def respond(tmp_path):
    """Return a function that posts requests and returns (status, text) of each, and the prompts."""

    def respond(*requests, reply=REPLY, template=TEMPLATE):
        tokenizer, responses = ToolTokenizer(), []
        tokenizer.template = ChatTemplate(template, {})

        async def scenario(service, engine):
            engine.reply = reply
            for path, fields in requests:
                status, body = await post(service, path, {"model": "fake", **BASES[path], **fields})
                responses.append((status, body.decode()))

        options = {"tokenizer": tokenizer, "max_output_tokens": 500}
        respond.engine = run_scenario(scenario, tmp_path, **options)
        return responses, tokenizer.encoded

    return respond


def events(text):
    """Return a stream's events, whose names must be their types."""
    named = [part.split("\n") for part in text.strip().split("\n\n")]
    decoded = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in named]
    assert all(name == data["type"] for name, data in decoded)
    return [data for _, data in decoded]


def without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_response_has_texts_and_calls_as_items(respond):
    ((_, whole), (_, stream)), _ = respond((RESPONSES, {}), (RESPONSES, {"stream": True}))
    whole, stream = json.loads(whole), events(stream)
    message, *calls = whole["output"]
    assert message["content"][0]["text"] == "Let me see.\n" and message["status"] == "completed"
    assert [call["type"] for call in calls] == ["function_call"] * 2
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({call["call_id"] for call in calls}) == 2 and whole["status"] == "completed"
    assert whole["tools"][0]["name"] == "weather" and whole["tool_choice"] == "auto"
    call_events = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
    ]  # fmt: skip
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len("Let me see.\n"),
        "output_text.done", "content_part.done", "output_item.done",
        *call_events, *call_events, "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    output = stream[-1]["response"]["output"]
    assert list(map(without_ids, output)) == list(map(without_ids, whole["output"]))
    done = [event for event in stream if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in done] == [0, 1, 2]
    deltas = [e for e in stream if e["type"] == "response.function_call_arguments.delta"]
    assert [(e["item_id"], e["delta"]) for e in deltas] == [
        (call["id"], call["arguments"]) for call in output[1:]
    ]


def test_a_message_has_texts_and_calls_as_blocks(respond):
    ((_, whole), (_, stream)), _ = respond((MESSAGES, {}), (MESSAGES, {"stream": True}))
    whole, stream = json.loads(whole), events(stream)
    assert whole["stop_reason"] == "tool_use" and whole["stop_sequence"] is None
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": "Let me see.\n"}
    assert [call["input"] for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert all(call["id"].startswith("toolu_") for call in calls)
    blocks = []
    for event in stream:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta" and block["input"] == {}
                block["json"] += delta["partial_json"]
    assert blocks[0] == {**text, "json": ""}
    assert [(b["name"], json.loads(b["json"])) for b in blocks[1:]] == [
        (call["name"], call["input"]) for call in calls
    ]
    assert [e["type"] for e in stream if e["type"] != "content_block_delta"] == [
        "message_start", *["content_block_start", "content_block_stop"] * 3, "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def histories(failed=False):
    """Return the same conversation with a call and its result in each API."""
    arguments = {"city": "Rome"}
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    result = "Error: no data" if failed else "warm"
    content = [{"type": "text", "text": "no data" if failed else "warm"}]
    ids = {"call_id": "call_1"}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": arguments}
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    if failed:
        block["is_error"] = True
    text = {"type": "text", "text": "and now?"}
    return [
        (CHAT, {"messages": [
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "content": "well", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
            {"role": "user", "content": "and now?"},
        ]}),
        (RESPONSES, {"instructions": "be brief", "input": [
            USER,
            {"role": "assistant", "content": "well"},
            {"type": "function_call", **function, **ids, "id": "fc_1", "status": "completed"},
            {"type": "function_call_output", "output": result, **ids},
            {"role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
        ]}),
        (MESSAGES, {"system": "be brief", "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "well"}, use]},
            {"role": "user", "content": [block, text]},
        ]}),
    ]  # fmt: skip


@pytest.mark.parametrize("failed", [False, True])
def test_a_conversation_has_the_same_prompt_in_every_api(respond, failed):
    responses, prompts = respond(*histories(failed))
    assert [status for status, _ in responses] == [200] * 3
    assert len(set(prompts)) == 1
    assert f"tool: {'Error: no data' if failed else 'warm'}" in prompts[0]
    assert '"arguments":{"city": "Rome"}' in prompts[0] and "be brief" in prompts[0]


def test_a_result_has_the_function_s_name_in_every_api(respond):
    template = TEMPLATE.replace("{{- message.role }}:", "{{- message.role ~ message.name }}:")
    chat, *others = histories()
    *before, result, user = chat[1]["messages"]
    named = (CHAT, {"messages": [*before, {**result, "name": "own"}, user]})
    _, (*prompts, last) = respond(chat, *others, named, template=template)
    assert len(set(prompts)) == 1 and "toolweather: warm" in prompts[0]
    assert "toolown: warm" in last


MISTRAL = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- for id in [message.tool_call_id] if id is defined %}
{%- if id | length != 9 %}{{ raise_exception("an id has 9 characters") }}{% endif %}
{%- endfor %}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception("an id has 9 characters") }}{% endif %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}
{{- message.role }}: {{ message.content }}
{%- endfor %}"""


def chat_turns(body):
    message = body["choices"][0]["message"]
    (call,) = message["tool_calls"]
    return {
        "messages": [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": ""}]
    }


def response_items(body):
    (call,) = body["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": ""}
    return {"input": [USER, call, output]}


def message_turns(body):
    (use,) = body["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"]}
    messages = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return {"messages": messages}


@pytest.mark.parametrize(
    ("path", "next_turn"),
    [(CHAT, chat_turns), (RESPONSES, response_items), (MESSAGES, message_turns)],
)
def test_the_template_takes_the_ids_of_the_model_s_own_calls(respond, path, next_turn):
    options = {"reply": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "template": MISTRAL}
    ((status, text),), _ = respond((path, {}), **options)
    assert status == 200
    ((status, text),), (prompt,) = respond((path, next_turn(json.loads(text))), **options)
    assert status == 200 and '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}' in prompt


def test_results_of_parallel_calls_are_in_the_order_of_the_calls(respond):
    uses = [{"type": "tool_use", "id": i, "name": "weather", "input": {}} for i in "ab"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": f"of {i}"} for i in "ba"]
    turns = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}] * 2
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": ""}} for i in "ab"
    ]
    unknown = {"role": "tool", "tool_call_id": "c", "content": "of c"}
    chat = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in "ba"]
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, unknown, *chat]
    _, prompts = respond((MESSAGES, {"messages": [USER, *turns]}), (CHAT, {"messages": chat}))
    texts = [re.findall(r"tool: of (.)", prompt) for prompt in prompts]
    assert texts == [["a", "b"] * 2, ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("path", "item"),
    [
        (RESPONSES, lambda body: {"input": [USER, *body["output"]]}),
        (MESSAGES, lambda b: {"messages": [USER, {"role": "assistant", "content": b["content"]}]}),
    ],
)
def test_an_output_can_be_sent_back(respond, path, item):
    ((_, text),), _ = respond((path, {}), reply=REPLY + "Wait.")
    ((status, _),), (prompt,) = respond((path, item(json.loads(text))))
    assert status == 200 and prompt.count("assistant: Let me see.\nWait.") == 0
    written = prompt.partition("assistant: ")[2]
    assert written.startswith("Let me see.\n\nWait.") and written.count('"arguments":{"city"') == 2


def test_the_models_text_is_not_parsed_where_it_may_not_call(respond):
    choices = {RESPONSES: "none", MESSAGES: {"type": "none"}}
    requests = [(path, {"tool_choice": choice}) for path, choice in choices.items()]
    ((_, response), (_, message)), prompts = respond(*requests)
    assert json.loads(response)["output"][0]["content"][0]["text"] == REPLY
    assert json.loads(message)["content"] == [{"type": "text", "text": REPLY}]
    assert json.loads(message)["stop_reason"] == "end_turn"
    assert not any("# Tools" in prompt for prompt in prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_text(respond, stream):
    fields = {"max_output_tokens": 40, "stream": stream}, {"max_tokens": 40, "stream": stream}
    (response, message), _ = respond(*zip((RESPONSES, MESSAGES), fields, strict=True))
    if stream:
        body = events(response[1])[-1]["response"]
        assert events(message[1])[-2]["delta"]["stop_reason"] == "max_tokens"
    else:
        body = json.loads(response[1])
        assert json.loads(message[1])["stop_reason"] == "max_tokens"
    (item,) = body["output"]
    assert (body["status"], item["status"]) == ("incomplete", "incomplete")
    assert item["content"][0]["text"] == REPLY[:40]


SINGLE = [
    (CHAT, {"parallel_tool_calls": False}),
    (RESPONSES, {"parallel_tool_calls": False}),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
]
LISTED = """<tool_call>
[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {}}]
</tool_call>"""


@pytest.mark.parametrize("reply", [REPLY, LISTED])
def test_without_parallel_calls_the_output_ends_after_the_first_call(respond, reply):
    before = reply[: reply.index("</tool_call>") + len("</tool_call>")]
    streams = [(path, {**fields, "stream": True}) for path, fields in SINGLE]
    responses, _ = respond(*SINGLE, *streams, reply=reply)
    chat, response, message = (json.loads(text) for _, text in responses[:3])
    (choice,) = chat["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["stop_reason"], response["status"]) == ("tool_use", "completed")
    (item,) = [item for item in response["output"] if item["type"] == "function_call"]
    (use,) = [block for block in message["content"] if block["type"] == "tool_use"]
    arguments = [call["function"]["arguments"], item["arguments"], json.dumps(use["input"])]
    assert [json.loads(text) for text in arguments] == [{"city": "Rome"}] * 3
    for body, name in [(chat, "completion"), (response, "output"), (message, "output")]:
        assert body["usage"][f"{name}_tokens"] == len(before)
    items = list(map(without_ids, response["output"]))
    chat, response, message = (text for _, text in responses[3:])
    assert chat.count('"id":"call_') == chat.count('"finish_reason":"tool_calls"') == 1
    assert list(map(without_ids, events(response)[-1]["response"]["output"])) == items
    assert message.count('"type":"tool_use"') == 1
    assert events(message)[-2]["delta"]["stop_reason"] == "tool_use"
    assert len(respond.engine.aborted) == 6


def test_without_parallel_calls_every_choice_may_have_a_call(respond):
    ((_, text),), _ = respond((CHAT, {**SINGLE[0][1], "n": 2}))
    for choice in json.loads(text)["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1
    ((_, text),), _ = respond(SINGLE[0], reply="No tool is needed.")
    assert json.loads(text)["choices"][0]["message"]["content"] == "No tool is needed."


def test_a_stop_sequence_is_reported_after_a_call(respond):
    ((_, text),), _ = respond((MESSAGES, {"stop_sequences": ["Wait"]}), reply=REPLY + "Wait.")
    body = json.loads(text)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "Wait")
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "tool_use"]


def test_tokens_are_counted_as_they_are_used(respond):
    *_, (_, history) = histories()
    (used, counted, without), _ = respond(
        (MESSAGES, history), (COUNT, history), (COUNT, {**history, "tool_choice": {"type": "none"}})
    )
    count = json.loads(counted[1])
    assert count == {"input_tokens": json.loads(used[1])["usage"]["input_tokens"]}
    assert json.loads(without[1])["input_tokens"] < count["input_tokens"]


def test_what_asks_for_nothing_changes_nothing(respond):
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "hello", "citations": None, **mark}
    marked = {
        "messages": [{"role": "user", "content": [text]}],
        "tools": [{**MESSAGES_TOOL, "type": "custom", "defer_loading": None, **mark}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
    }
    nulls = {"tools": [{**RESPONSES_TOOL, "strict": None, "defer_loading": None}]}
    auto = {"tool_choice": "auto", "parallel_tool_calls": True, "include": []}
    responses, prompts = respond(
        (MESSAGES, {}), (MESSAGES, marked), (RESPONSES, {}), (RESPONSES, {**nulls, **auto})
    )
    assert [status for status, _ in responses] == [200] * 4 and len(set(prompts)) == 1
    no_tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
    ((status, _),), _ = respond((RESPONSES, no_tools))
    assert status == 200


WEB_SEARCH = {"max_uses": 2, "name": "web_search", "type": "web_search_20250305"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "private"}
USE = {"type": "tool_use", "id": "toolu_9", "name": "weather", "input": {}}
OUTPUT = {"type": "function_call_output", "call_id": "call_9", "output": "private"}
CALL = {"type": "function_call", "call_id": "call_9", "name": "weather", "arguments": "private"}
SCHEMA_FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OUTPUT_CONFIG = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "built-in tools such as web_search"),
        (RESPONSES, {"tools": [RESPONSES_TOOL, WEB_SEARCH]}, "tools[1]: only functions"),
        (MESSAGES, {"tools": [WEB_SEARCH]}, "built-in tools such as web_search"),
        (COUNT, {"tools": [WEB_SEARCH]}, "built-in tools such as web_search"),
        (CHAT, {"tools": [WEB_SEARCH]}, "built-in tools such as web_search"),
        (RESPONSES, {"tools": [], "tool_choice": "required"}, "tool_choice needs tools"),
        (MESSAGES, {"tools": [], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "x"}}, "no function 'x'"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "x"}}, "no function 'x'"),
        (MESSAGES, {"output_config": OUTPUT_CONFIG}, "output_config.format cannot be combined"),
        (RESPONSES, {"text": {"format": SCHEMA_FORMAT}}, "text.format cannot be combined"),
        (RESPONSES, {"input": [USER, OUTPUT]}, "id matches no earlier tool call"),
        (RESPONSES, {"input": [USER, CALL]}, "not a JSON object"),
        (
            CHAT,
            {"parallel_tool_calls": False, "min_tokens": 9},
            "min_tokens cannot be combined with parallel_tool_calls=false",
        ),
        (
            CHAT,
            {"parallel_tool_calls": False, "ignore_eos": True},
            "ignore_eos cannot be combined with parallel_tool_calls=false",
        ),
        *[
            (RESPONSES, {"input": [USER, {**CALL, "arguments": text}]}, "not a JSON object")
            for text in (
                '{"a": Infinity}',
                '{"a": 1e400}',
                '{"a": "\\ud800"}',
                "[1]",
                "[" * 100_000,
            )
        ],
        (MESSAGES, {"messages": [{"role": "user", "content": [RESULT]}]}, "no earlier tool call"),
        (MESSAGES, {"messages": [{"role": "user", "content": [USE]}]}, "must not have tool_use"),
        (
            MESSAGES,
            {"messages": [USER, {"role": "assistant", "content": [RESULT]}]},
            "must not have tool_result",
        ),
        (MESSAGES, {"thread": {"type": "create"}}, "thread: this server has no such field"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(respond, path, fields, message):
    ((status, text),), _ = respond((path, fields))
    error = json.loads(text)["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"] and "\n" not in error["message"]
    assert "private" not in text
    assert (json.loads(text).get("type") == "error") is path.startswith(MESSAGES)
