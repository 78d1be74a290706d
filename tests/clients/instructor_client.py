"""Instructor over OpenAI's client: its modes for JSON schemas and for tools."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from tasks import MODEL, check, task

HELLO = {"role": "user", "content": "Where are you?"}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    capital: bool


def ask(mode, messages=(HELLO,)):
    client = instructor.from_openai(openai.OpenAI(max_retries=0, timeout=60), mode=mode)
    place = client.chat.completions.create(
        model=MODEL, messages=list(messages), response_model=Place, max_retries=0
    )
    check(isinstance(place, Place), "not parsed")
    return place


@task("stream")
def stream():
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.TOOLS)
    places = list(
        client.chat.completions.create_partial(model=MODEL, messages=[HELLO], response_model=Place)
    )
    check(places[-1].city in ("Paris", "Rome"), "not parsed")


@task("turns")
def turns():
    place = ask(instructor.Mode.JSON_SCHEMA)
    answer = {"role": "assistant", "content": place.model_dump_json()}
    ask(instructor.Mode.JSON_SCHEMA, (HELLO, answer, HELLO))


@task("tools")
def tools():
    ask(instructor.Mode.TOOLS)


@task("structured")
def structured():
    ask(instructor.Mode.JSON_SCHEMA)
