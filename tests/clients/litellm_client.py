"""LiteLLM's library."""

import json
from typing import Literal

import litellm
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, URL, check, task

OPTIONS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
HELLO = {"role": "user", "content": "Hello!"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
        },
    },
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
def chat():
    response = litellm.completion(**OPTIONS, messages=[HELLO], max_tokens=MAX_TOKENS)
    check(response.choices[0].message.content, "no text")
    check(response.usage.completion_tokens > 0, "no usage")


@task("stream")
def stream():
    chunks = litellm.completion(**OPTIONS, messages=[HELLO], max_tokens=MAX_TOKENS, stream=True)
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "no text")


@task("turns")
def turns():
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("Hello!", "And now?", "Why?"):
        messages.append({"role": "user", "content": question})
        response = litellm.completion(**OPTIONS, messages=messages, max_tokens=MAX_TOKENS)
        messages.append(response.choices[0].message)


@task("tools")
def tools():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = litellm.completion(
        **OPTIONS, messages=messages, tools=[WEATHER], tool_choice="required"
    )
    message = response.choices[0].message
    (call,) = message.tool_calls
    check(json.loads(call.function.arguments)["city"] in CITIES, "wrong arguments")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}]
    answer = litellm.completion(
        **OPTIONS, messages=messages, tools=[WEATHER], max_tokens=MAX_TOKENS
    )
    check(answer.choices[0].message.content, "no answer after the tool's result")


@task("structured")
def structured():
    response = litellm.completion(**OPTIONS, messages=[HELLO], response_format=Place)
    Place.model_validate_json(response.choices[0].message.content)
