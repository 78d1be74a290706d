"""Outlines over OpenAI's client."""

from typing import Literal

import openai
import outlines
from outlines.inputs import Chat
from pydantic import BaseModel
from tasks import MAX_TOKENS, MODEL, check, task

model = outlines.from_openai(openai.OpenAI(max_retries=0, timeout=60), MODEL)


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


@task("chat")
def chat():
    check(model("Hello!", max_tokens=MAX_TOKENS), "no text")


@task("stream")
def stream():
    check("".join(model.stream("Hello!", max_tokens=MAX_TOKENS)), "no text")


@task("turns")
def turns():
    conversation = Chat()
    for question in ("Hello!", "And now?", "Why?"):
        conversation.add_user_message(question)
        conversation.add_assistant_message(model(conversation, max_tokens=MAX_TOKENS))


@task("structured")
def structured():
    Place.model_validate_json(model("Hello!", Place))
