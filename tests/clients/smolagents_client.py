"""smolagents' ``OpenAIModel`` and its agent that calls tools."""

from typing import Literal

from pydantic import BaseModel
from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool
from tasks import MAX_TOKENS, MODEL, TOOL_RESULT, URL, check, task

model = OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=MAX_TOKENS)
calls = []


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@tool
def is_sunny(today: bool) -> str:
    """Tell whether it is sunny.

    Args:
        today: Whether today is meant.
    """
    calls.append(today)
    return TOOL_RESULT


def message(role, text):
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])


@task("chat")
def chat():
    check(model([message(MessageRole.USER, "Hello!")]).content, "no text")


@task("stream")
def stream():
    deltas = model.generate_stream([message(MessageRole.USER, "Hello!")])
    check("".join(delta.content or "" for delta in deltas), "no text")


@task("turns")
def turns():
    messages = []
    for question in ("Hello!", "And now?", "Why?"):
        messages.append(message(MessageRole.USER, question))
        messages.append(message(MessageRole.ASSISTANT, model(messages).content))


@task("tools")
def tools():
    response = model([message(MessageRole.USER, "Is it sunny?")], tools_to_call_from=[is_sunny])
    check(response.tool_calls[0].function.name == "is_sunny", "no call")
    # A model of random weights ends no text, so its agent may reach the last step, which is an
    # answer without tools.
    agent = ToolCallingAgent(tools=[is_sunny], model=model, max_steps=2)
    check(agent.run("Is it sunny?") is not None, "no answer")


@task("structured")
def structured():
    schema = {"name": "place", "schema": Place.model_json_schema(), "strict": True}
    response = model(
        [message(MessageRole.USER, "Where?")],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    Place.model_validate_json(response.content)
