"""OpenAI's client with the responses API."""

import json
from typing import Literal

import openai
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, check, task

client = openai.OpenAI(max_retries=0, timeout=60)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
def chat():
    response = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=MAX_TOKENS)
    check(response.output_text, "no text")
    check(response.usage.output_tokens > 0, "no usage")


@task("stream")
def stream():
    text, last = "", None
    for event in client.responses.create(
        model=MODEL, input="Hello!", max_output_tokens=MAX_TOKENS, stream=True
    ):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    check(text and text == last.response.output_text, "the deltas are not the text")
    check(last.response.usage.output_tokens > 0, "no usage")


@task("turns")
def turns():
    items = []
    for question in ("Hello!", "And now?", "Why?"):
        items.append({"role": "user", "content": question})
        response = client.responses.create(
            model=MODEL, instructions="Be brief.", input=items, max_output_tokens=MAX_TOKENS
        )
        items += response.output


@task("tools")
def tools():
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.responses.create(
        model=MODEL, input=items, tools=[WEATHER], tool_choice="required"
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    check(json.loads(call.arguments)["city"] in CITIES, "wrong arguments")
    items += response.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT})
    answer = client.responses.create(
        model=MODEL, input=items, tools=[WEATHER], max_output_tokens=MAX_TOKENS
    )
    check(answer.output_text, "no answer after the tool's result")
    with client.responses.stream(
        model=MODEL, input=items[:1], tools=[WEATHER], tool_choice="required"
    ) as events:
        output = events.get_final_response().output
    (call,) = [item for item in output if item.type == "function_call"]
    check(json.loads(call.arguments)["city"] in CITIES, "wrong streamed arguments")


@task("structured")
def structured():
    response = client.responses.parse(model=MODEL, input="Hello!", text_format=Place)
    check(isinstance(response.output_parsed, Place), "not parsed")
