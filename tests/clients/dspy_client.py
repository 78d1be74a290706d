"""DSPy, with its JSON adapter."""

from typing import Literal

import dspy
import litellm
from tasks import CITIES, MAX_TOKENS, MODEL, URL, check, task

# Without this entry, DSPy does not send the schema.
entry = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
litellm.register_model({f"openai/{MODEL}": entry})
lm = dspy.LM(
    f"openai/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="none",
    max_tokens=MAX_TOKENS,
    cache=False,
    num_retries=0,
)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Place(dspy.Signature):
    """Name a place."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()
    capital: bool = dspy.OutputField()


@task("chat")
def chat():
    check(lm("Hello!")[0], "no text")


@task("turns")
def turns():
    messages = []
    for question in ("Hello!", "And now?", "Why?"):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": lm(messages=messages)[0]})


@task("structured")
def structured():
    check(dspy.Predict(Place)(question="Where?").city in CITIES, "not parsed")
