"""The ``llm`` command's library, with a model of ``extra-openai-models.yaml``."""

import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from tasks import MAX_TOKENS, MODEL, TOOL_RESULT, URL, check, task

folder = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: labkit\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    "  supports_schema: true\n  supports_tools: true\n"
)

import llm  # noqa: E402 (it reads the variable)

model = llm.get_model("labkit")
model.key = "none"
cities = []


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    cities.append(city)
    return TOOL_RESULT


@task("chat")
def chat():
    response = model.prompt("Hello!", stream=False, max_tokens=MAX_TOKENS)
    check(response.text(), "no text")


@task("stream")
def stream():
    check("".join(model.prompt("Hello!", max_tokens=MAX_TOKENS)), "no text")


@task("turns")
def turns():
    conversation = model.conversation()
    for question in ("Hello!", "And now?", "Why?"):
        check(conversation.prompt(question, max_tokens=MAX_TOKENS).text(), "no text")


@task("tools")
def tools():
    # llm has no way to require a call: the tools are offered, and the model may answer.
    check(model.chain("The weather in Paris?", tools=[get_weather]).text() is not None, "no text")


@task("structured")
def structured():
    Place.model_validate_json(model.prompt("Hello!", schema=Place).text())
