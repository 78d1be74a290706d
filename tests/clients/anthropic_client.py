"""Anthropic's client with the messages API."""

from typing import Literal

import anthropic
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, check, task

client = anthropic.Anthropic(max_retries=0, timeout=60)
HELLO = {"role": "user", "content": "Hello!"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
def chat():
    message = client.messages.create(model=MODEL, messages=[HELLO], max_tokens=MAX_TOKENS)
    check(message.content[0].text, "no text")
    check(message.usage.output_tokens > 0, "no usage")


@task("stream")
def stream():
    with client.messages.stream(model=MODEL, messages=[HELLO], max_tokens=MAX_TOKENS) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    check(text and text == message.content[0].text, "the deltas are not the text")
    check(message.usage.output_tokens > 0, "no usage")


@task("turns")
def turns():
    messages = []
    for question in ("Hello!", "And now?", "Why?"):
        messages.append({"role": "user", "content": question})
        message = client.messages.create(
            model=MODEL, system="Be brief.", messages=messages, max_tokens=MAX_TOKENS
        )
        messages.append({"role": "assistant", "content": message.content})
    count = client.messages.count_tokens(model=MODEL, messages=messages)
    check(count.input_tokens > 0, "no token count")


@task("tools")
def tools():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": MODEL, "tools": [WEATHER], "max_tokens": 256}
    message = client.messages.create(**options, messages=messages, tool_choice={"type": "any"})
    (call,) = [block for block in message.content if block.type == "tool_use"]
    check(call.input["city"] in CITIES, "wrong arguments")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**options, messages=messages)
    check(answer.content, "no answer after the tool's result")
    with client.messages.stream(
        **options, messages=messages[:1], tool_choice={"type": "tool", "name": "get_weather"}
    ) as events:
        streamed = events.get_final_message()
    check(streamed.content[-1].input["city"] in CITIES, "wrong streamed arguments")


@task("structured")
def structured():
    message = client.messages.parse(
        model=MODEL, messages=[HELLO], max_tokens=MAX_TOKENS, output_format=Place
    )
    check(isinstance(message.parsed_output, Place), "not parsed")
    with client.messages.stream(
        model=MODEL, messages=[HELLO], max_tokens=MAX_TOKENS, output_format=Place
    ) as events:
        streamed = events.get_final_message()
    check(isinstance(streamed.parsed_output, Place), "the stream is not parsed")
