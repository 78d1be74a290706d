"""LlamaIndex's ``OpenAILike``."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from tasks import CITIES, MAX_TOKENS, MODEL, TOOL_RESULT, URL, check, task

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    max_tokens=MAX_TOKENS,
    max_retries=0,
    is_chat_model=True,
    is_function_calling_model=True,
)
HELLO = ChatMessage(role="user", content="Hello!")


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]
    capital: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return TOOL_RESULT


@task("chat")
def chat():
    check(model.chat([HELLO]).message.content, "no text")
    check(model.complete("Hello!").text, "no text of a completion")


@task("stream")
def stream():
    check("".join(chunk.delta or "" for chunk in model.stream_chat([HELLO])), "no text")


@task("turns")
def turns():
    messages = [ChatMessage(role="system", content="Be brief.")]
    for question in ("Hello!", "And now?", "Why?"):
        messages.append(ChatMessage(role="user", content=question))
        messages.append(model.chat(messages).message)


@task("tools")
def tools():
    tool = FunctionTool.from_defaults(get_weather)
    question = ChatMessage(role="user", content="What is the weather in Paris?")
    response = model.chat_with_tools([tool], chat_history=[question], tool_required=True)
    (call,) = model.get_tool_calls_from_response(response)
    check(call.tool_kwargs["city"] in CITIES, "wrong arguments")
    result = ChatMessage(
        role="tool", content=TOOL_RESULT, additional_kwargs={"tool_call_id": call.tool_id}
    )
    answer = model.chat_with_tools([tool], chat_history=[question, response.message, result])
    check(answer.message.content, "no answer after the tool's result")


@task("structured")
def structured():
    place = model.structured_predict(Place, PromptTemplate("Hello!"))
    check(isinstance(place, Place), "not parsed")
