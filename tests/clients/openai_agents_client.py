"""The OpenAI Agents SDK, with the responses API (its default) or chat completions."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel
from tasks import MODEL, TOOL_RESULT, argument, check, task

set_default_openai_api(argument("responses"))
set_tracing_disabled(True)
assistant = Agent(name="Assistant", instructions="Be brief.", model=MODEL)
cities = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    cities.append(city)
    return TOOL_RESULT


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
async def chat():
    result = await Runner.run(assistant, "Hello!")
    check(result.final_output, "no text")


@task("stream")
async def stream():
    result = Runner.run_streamed(assistant, "Hello!")
    deltas = [e async for e in result.stream_events() if e.type == "raw_response_event"]
    check(deltas and result.final_output, "no text")


@task("turns")
async def turns():
    session = SQLiteSession("turns")
    for question in ("Hello!", "And now?", "Why?"):
        await Runner.run(assistant, question, session=session)
    check(len(await session.get_items()) >= 6, "the session lost a turn")


@task("tools")
async def tools():
    agent = Agent(
        name="Weather",
        instructions="Be brief.",
        model=MODEL,
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="required"),
    )
    result = await Runner.run(agent, "What is the weather in Paris?")
    check(len(cities) == 1 and result.final_output, "no call, or no answer after it")
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?")
    async for _ in streamed.stream_events():
        pass
    check(len(cities) == 2 and streamed.final_output, "no streamed call, or no answer after it")


@task("structured")
async def structured():
    result = await Runner.run(Agent(name="Place", model=MODEL, output_type=Place), "Hello!")
    check(isinstance(result.final_output, Place), "not parsed")
