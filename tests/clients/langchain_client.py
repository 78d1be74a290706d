"""LangChain's ``ChatOpenAI``, with chat completions or the responses API."""

from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, argument, check, task

uses_responses = argument("chat") == "responses"
# At a temperature of 1, some arguments have so many other properties that they are cut off, because
# the schemas of LangChain's tools allow them.
model = ChatOpenAI(
    model=MODEL,
    temperature=0,
    max_tokens=MAX_TOKENS,
    max_retries=0,
    use_responses_api=uses_responses,
)


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]
    capital: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return TOOL_RESULT


@task("chat")
def chat():
    message = model.invoke("Hello!")
    check(message.text, "no text")
    check(message.usage_metadata["output_tokens"] > 0, "no usage")


@task("stream")
def stream():
    check("".join(chunk.text for chunk in model.stream("Hello!")), "no text")


@task("turns")
def turns():
    messages = [SystemMessage("Be brief.")]
    for question in ("Hello!", "And now?", "Why?"):
        messages.append(HumanMessage(question))
        messages.append(model.invoke(messages))


@task("tools")
def tools():
    messages = [HumanMessage("What is the weather in Paris?")]
    message = model.bind_tools([get_weather], tool_choice="any").invoke(messages)
    (call,) = message.tool_calls
    check(call["args"]["city"] in CITIES, "wrong arguments")
    result = get_weather.invoke(call)
    check(isinstance(result, ToolMessage), "no result")
    answer = model.bind_tools([get_weather]).invoke([*messages, message, result])
    check(answer.text, "no answer after the tool's result")
    chunks = model.bind_tools([get_weather], tool_choice="any").stream(messages)
    total = next(chunks)
    for chunk in chunks:
        total += chunk
    check(total.tool_calls[0]["args"]["city"] in CITIES, "wrong streamed arguments")


@task("structured")
def structured():
    for method in ("json_schema", "function_calling"):
        place = model.with_structured_output(Place, method=method).invoke("Hello!")
        check(isinstance(place, Place), f"{method}: not parsed")
