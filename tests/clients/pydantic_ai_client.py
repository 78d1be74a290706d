"""Pydantic AI, with chat completions (its default for servers of others), responses or messages."""

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.settings import ModelSettings
from tasks import MAX_TOKENS, MODEL, TOOL_RESULT, argument, check, task

MODELS = {"chat": "openai-chat", "responses": "openai-responses", "messages": "anthropic"}
model = f"{MODELS[argument('chat')]}:{MODEL}"
agent = Agent(model, model_settings=ModelSettings(max_tokens=MAX_TOKENS))
cities = []


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
async def chat():
    check((await agent.run("Hello!")).output, "no text")


@task("stream")
async def stream():
    async with agent.run_stream("Hello!") as result:
        text = "".join([delta async for delta in result.stream_text(delta=True)])
    check(text, "no text")


@task("turns")
async def turns():
    history = []
    for question in ("Hello!", "And now?", "Why?"):
        history = (await agent.run(question, message_history=history)).all_messages()
    check(len(history) == 6, "the history lost a turn")


@task("tools")
async def tools():
    # The output type is a tool, too: one of the two is called, until it is the output.
    weather = Agent(model, output_type=Place, model_settings=ModelSettings(max_tokens=256))

    async def at_first(context, definition):
        return None if cities else definition

    @weather.tool_plain(prepare=at_first)
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return TOOL_RESULT

    result = await weather.run("What is the weather in Paris?")
    check(isinstance(result.output, Place), "no output")


# With Anthropic's API, the client knows by the model's name whether it has structured output.
if argument("chat") != "messages":

    @task("structured")
    async def structured():
        result = await Agent(model, output_type=NativeOutput(Place)).run("Hello!")
        check(isinstance(result.output, Place), "not parsed")
