"""Inspect's ``openai-api`` provider, and an evaluation of two samples."""

import os
from typing import Literal

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, URL, check, task

os.environ["INSPECT_DISPLAY"] = "none"
os.environ["LABKIT_BASE_URL"], os.environ["LABKIT_API_KEY"] = f"{URL}/v1", "none"
NAME = f"openai-api/labkit/{MODEL}"


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@tool
def get_weather():
    async def execute(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city.

        Args:
            city: The city.
        """
        return TOOL_RESULT

    return execute


def model(**options):
    return get_model(NAME, config=GenerateConfig(max_retries=0, **options))


@task("chat")
async def chat():
    samples = [Sample("Hello!", target="a"), Sample("Why?", target="b")]
    (log,) = await eval_async(
        Task(dataset=samples, solver=generate(), scorer=includes()),
        model=model(max_tokens=MAX_TOKENS),
        log_dir="logs",
    )
    check(log.status == "success" and len(log.samples) == 2, f"{log.status}: {log.error}")


@task("turns")
async def turns():
    messages = []
    for question in ("Hello!", "And now?", "Why?"):
        messages.append(ChatMessageUser(content=question))
        output = await model(max_tokens=MAX_TOKENS).generate(messages)
        messages.append(output.message)


@task("tools")
async def tools():
    messages = [ChatMessageUser(content="What is the weather in Paris?")]
    output = await model(max_tokens=256).generate(
        messages, tools=[get_weather()], tool_choice="any"
    )
    (call,) = output.message.tool_calls
    check(call.arguments["city"] in CITIES, "wrong arguments")
    result = ChatMessageTool(content=TOOL_RESULT, tool_call_id=call.id, function=call.function)
    answer = await model(max_tokens=MAX_TOKENS).generate(
        [*messages, output.message, result], tools=[get_weather()]
    )
    check(answer.completion, "no answer after the tool's result")


@task("structured")
async def structured():
    schema = ResponseSchema(name="place", json_schema=json_schema(Place))
    output = await model(response_schema=schema).generate("Hello!")
    Place.model_validate_json(output.completion)
