"""OpenAI's client with the chat completions API."""

import json
from typing import Literal

import openai
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, check, task

client = openai.OpenAI(max_retries=0, timeout=60)
HELLO = {"role": "user", "content": "Hello!"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
def chat():
    response = client.chat.completions.create(model=MODEL, messages=[HELLO], max_tokens=MAX_TOKENS)
    check(response.choices[0].message.content, "no text")
    check(response.usage.completion_tokens > 0, "no usage")


@task("stream")
def stream():
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[HELLO],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    check(text, "no text")
    check(usage.completion_tokens > 0, "no usage")


@task("turns")
def turns():
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("Hello!", "And now?", "Why?"):
        messages.append({"role": "user", "content": question})
        response = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=MAX_TOKENS
        )
        messages.append(response.choices[0].message)


@task("tools")
def tools():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required"
    )
    message = response.choices[0].message
    (call,) = message.tool_calls
    check(json.loads(call.function.arguments)["city"] in CITIES, "wrong arguments")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], max_tokens=MAX_TOKENS
    )
    check(answer.choices[0].message.content, "no answer after the tool's result")
    with client.chat.completions.stream(
        model=MODEL, messages=messages[:1], tools=[WEATHER], tool_choice="required"
    ) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls
    check(streamed[0].function.parsed_arguments["city"] in CITIES, "wrong streamed arguments")


@task("structured")
def structured():
    response = client.chat.completions.parse(model=MODEL, messages=[HELLO], response_format=Place)
    check(isinstance(response.choices[0].message.parsed, Place), "not parsed")
