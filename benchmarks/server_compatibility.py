"""Compatibility of labkit's and mlx_lm's servers with OpenAI's client in strict mode.

Both serve the tests' tiny model, whose chat template supports tools. Run as
``python benchmarks/server_compatibility.py``; ``--write`` puts the table into docs/server.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "server")]

from chat_model import build  # noqa: E402
from server_throughput import Served, free_port, process, until_it_generates  # noqa: E402

PAGE = ROOT / "docs" / "server.md"
BEGIN, END = "<!-- compatibility: begin -->", "<!-- compatibility: end -->"
HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Target:
    """A server under test: its address and its name for the model."""

    url: str
    model: str

    def client(self, strict: bool = True) -> openai.OpenAI:
        """Return a client. Streamed completions need ``strict=False`` (see docs/server.md)."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=strict,
        )

    def chat(self, **options: Any) -> Any:
        """Request a chat completion."""
        defaults = {"model": self.model, "messages": HELLO, "max_tokens": 6, "temperature": 0}
        return self.client().chat.completions.create(**{**defaults, **options})

    def complete(self, *, strict: bool = True, **options: Any) -> Any:
        """Request a completion."""
        defaults = {"model": self.model, "prompt": "hello", "max_tokens": 6, "temperature": 0}
        return self.client(strict).completions.create(**{**defaults, **options})

    def raw(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Send a request; return the status and the body."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        text = body if isinstance(body, str | None) else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        try:
            return answer.status, answer.read().decode()
        finally:
            connection.close()


Check = Callable[[Target], object]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a check under its name in the table."""

    def enter(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return enter


@check("models: list")
def _(t: Target) -> None:
    assert [m.id for m in t.client().models.list()], "no model is listed"


@check("models: one")
def _(t: Target) -> None:
    assert t.client().models.retrieve(t.model).id == t.model


@check("chat")
def _(t: Target) -> None:
    answer = t.chat()
    assert answer.usage.completion_tokens == 6 and answer.choices[0].finish_reason == "length"


@check("chat: stream")
def _(t: Target) -> None:
    chunks = [c for c in t.chat(stream=True) if c.choices]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == t.chat().choices[0].message.content, "the streamed text differs"
    assert chunks[0].choices[0].delta.role == "assistant", "the role is not first"
    assert [bool(c.choices[0].finish_reason) for c in chunks] == [False] * (len(chunks) - 1) + [
        True
    ], "finish_reason is not last"


@check("chat: stream with usage")
def _(t: Target) -> None:
    *_, last = t.chat(stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 6


@check("completions")
def _(t: Target) -> None:
    assert t.complete().usage.completion_tokens == 6


@check("completions: stream (finish_reason null until the last)")
def _(t: Target) -> None:
    chunks = [c for c in t.complete(strict=False, stream=True) if c.choices]
    assert "".join(c.choices[0].text for c in chunks) == t.complete().choices[0].text
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"], "finish_reason is not last"
    assert all(c.object == "text_completion" for c in chunks), "object is not text_completion"


@check("completions: stream with usage")
def _(t: Target) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = t.complete(strict=False, **options)
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert last.object == "text_completion", f"the usage chunk says {last.object}"


@check("completions: token ids as a prompt")
def _(t: Target) -> None:
    assert t.complete(prompt=[300, 301, 302]).usage.prompt_tokens == 3


@check("completions: several prompts")
def _(t: Target) -> None:
    assert len(t.complete(prompt=["hello", "there"]).choices) == 2


@check("`n=2`")
def _(t: Target) -> None:
    count = len(t.chat(n=2, temperature=1).choices)
    assert count == 2, f"{count} choice"


@check("`stop`")
def _(t: Target) -> None:
    text = t.complete().choices[0].text
    stop = text.split()[1]
    answer = t.complete(stop=[stop]).choices[0]
    assert answer.finish_reason == "stop", "the text continues after the stop text"
    assert answer.text == text[: text.index(stop)], "the text before the stop text differs"


@check("`seed`: same seed, same text")
def _(t: Target) -> None:
    texts = [t.chat(temperature=1, seed=s).choices[0].message.content for s in (1, 1, 2)]
    assert texts[0] == texts[1], "the same seed gave different texts"
    assert texts[0] != texts[2], "another seed gave the same text"


@check("`logprobs`, `top_logprobs` of a chat")
def _(t: Target) -> None:
    choice = t.chat(logprobs=True, top_logprobs=2).choices[0]
    tokens = (choice.logprobs and choice.logprobs.content) or []
    assert len(tokens) == 6, f"{len(tokens)} of 6 tokens"
    assert all(len(item.top_logprobs) == 2 for item in tokens), "not two per position"
    assert "".join(item.token for item in tokens) == choice.message.content, (
        "the tokens differ from the text"
    )


@check("`logprobs` of a completion")
def _(t: Target) -> None:
    logprobs = t.complete(logprobs=2).choices[0].logprobs
    assert len(logprobs.token_logprobs) == 6 and len(logprobs.top_logprobs[0]) == 2


@check("`logit_bias`")
def _(t: Target) -> None:
    text = t.complete(logit_bias={"300": 100}).choices[0].text
    assert text != t.complete().choices[0].text, "it has no effect"


@check("`frequency_penalty`")
def _(t: Target) -> None:
    options: dict[str, Any] = {
        "prompt": "hello hello hello",
        "max_tokens": 100,
        "logit_bias": {"300": 20},
    }
    texts = [t.complete(**options, frequency_penalty=f).choices[0].text for f in (0, 2)]
    assert texts[0] != texts[1], "it has no effect"


@check("`max_completion_tokens`")
def _(t: Target) -> None:
    answer = t.client().chat.completions.create(
        model=t.model, messages=HELLO, max_completion_tokens=3
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


@check("`return_token_ids` (vLLM's)")
def _(t: Target) -> None:
    choice = t.complete(extra_body={"return_token_ids": True}).choices[0]
    assert len(getattr(choice, "token_ids", None) or []) == 6, "no token ids"


@check("tools: a required call")
def _(t: Target) -> None:
    choice = t.chat(tools=[TOOL], tool_choice="required", max_tokens=60).choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert call is not None, "no call"
    assert isinstance(json.loads(call.function.arguments)["sure"], bool)


@check("`response_format`: a JSON schema")
def _(t: Target) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    text = t.chat(response_format=wanted, max_tokens=40).choices[0].message.content
    try:
        parsed = json.loads(text)
    except ValueError:
        raise AssertionError("it is ignored") from None
    assert set(parsed) == {"sure"}


@check("an unknown option is refused")
def _(t: Target) -> None:
    status, _ = t.raw("POST", "/v1/chat/completions", _body(t, colour="red"))
    assert status == 400, f"{status}"


@check("error: an option out of range")
def _(t: Target) -> None:
    _error(t.raw("POST", "/v1/chat/completions", _body(t, temperature=9)), 400)


@check("error: no JSON")
def _(t: Target) -> None:
    _error(t.raw("POST", "/v1/chat/completions", "{"), 400)


@check("error: no such model")
def _(t: Target) -> None:
    _error(t.raw("POST", "/v1/chat/completions", {**_body(t), "model": "no-such"}), 404)


@check("error: no such address")
def _(t: Target) -> None:
    _error(t.raw("GET", "/v1/nothing"), 404)


@check("error: another method")
def _(t: Target) -> None:
    _error(t.raw("GET", "/v1/chat/completions"), 405)


@check("error: embeddings")
def _(t: Target) -> None:
    _error(t.raw("POST", "/v1/embeddings", {"model": t.model, "input": "x"}), 404)


def _body(t: Target, **options: Any) -> dict[str, Any]:
    return {"model": t.model, "messages": HELLO, "max_tokens": 2, **options}


def _error(answer: tuple[int, str], status: int) -> None:
    """Check that an answer has the given status and the API's error object as its body."""
    assert answer[0] == status, f"{answer[0]}"
    try:
        error = json.loads(answer[1])["error"]
    except (ValueError, TypeError, KeyError):
        raise AssertionError("no error object") from None
    assert isinstance(error, dict), f"the error is a {type(error).__name__}, not an object"
    assert {"message", "type", "param", "code"} <= set(error)


@check("`/v1/responses`")
def _(t: Target) -> None:
    options: dict[str, Any] = {"model": t.model, "input": "hello", "max_output_tokens": 6}
    assert t.client().responses.create(**options).usage.output_tokens == 6


@check("`/v1/responses`: stream")
def _(t: Target) -> None:
    options: dict[str, Any] = {"model": t.model, "input": "hello", "max_output_tokens": 6}
    *_, last = t.client().responses.create(**options, stream=True)
    assert last.response.usage.output_tokens == 6


@check("`/v1/responses`: a required call")
def _(t: Target) -> None:
    options: dict[str, Any] = {"model": t.model, "input": "hello", "max_output_tokens": 60}
    tool: Any = {"type": "function", **TOOL["function"]}
    response = t.client().responses.create(**options, tools=[tool], tool_choice="required")
    assert isinstance(json.loads(response.output[0].arguments)["sure"], bool)


@check("`/v1/messages`")
def _(t: Target) -> None:
    status, text = t.raw("POST", "/v1/messages", _body(t))
    assert status == 200, f"{status}"
    assert json.loads(text)["type"] == "message"


@check("`/v1/messages`: a required call")
def _(t: Target) -> None:
    tools = {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    status, text = t.raw("POST", "/v1/messages", {**_body(t), "max_tokens": 60, **tools})
    assert status == 200, f"{status}"
    message = json.loads(text)
    assert isinstance(message["content"][0]["input"]["sure"], bool)
    assert message["stop_reason"] == "tool_use"


@check("`/v1/messages/count_tokens`")
def _(t: Target) -> None:
    body = {"model": t.model, "messages": HELLO}
    status, text = t.raw("POST", "/v1/messages/count_tokens", body)
    assert status == 200, f"{status}"
    assert json.loads(text)["input_tokens"] > 0


@check("`/tokenize`")
def _(t: Target) -> None:
    status, _ = t.raw("POST", "/tokenize", {"model": t.model, "prompt": "hello"})
    assert status == 200, f"{status}"


@check("`/health`")
def _(t: Target) -> None:
    status, _ = t.raw("GET", "/health")
    assert status == 200, f"{status}"


@check("`/metrics` by vLLM's names")
def _(t: Target) -> None:
    status, text = t.raw("GET", "/metrics")
    assert status == 200, f"{status}"
    assert "vllm:num_requests_running" in text


def outcome(target: Target, function: Check) -> str:
    """Run a check; return "yes" or a short reason why it failed."""
    try:
        function(target)
    except openai.APIResponseValidationError:
        return "no: the client refuses the response"
    except openai.APIStatusError as error:
        return f"no: {error.status_code}"
    except json.JSONDecodeError:
        return "no: the body is not JSON"
    except Exception as error:  # a server's answer may raise anything in a check
        message = " ".join(str(error).split())[:60]
        return f"no: {message or type(error).__name__}"
    return "yes"


@contextlib.contextmanager
def ours(model: Path, folder: Path) -> Iterator[Target]:
    """Start labkit's server."""
    port, log = free_port(), folder / f"ours-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "labkit.serve", "model=local", f"model.path={model}"]
    command += ["server.model_name=tiny", f"server.port={port}"]
    with process(command, log, stdout=subprocess.DEVNULL) as started:
        until_it_generates(
            Served(f"http://127.0.0.1:{port}", {"model": "tiny"}), "hello", started, log
        )
        yield Target(f"http://127.0.0.1:{port}", "tiny")


@contextlib.contextmanager
def mlx_lm(model: Path, folder: Path) -> Iterator[Target]:
    """Start mlx_lm's server with its defaults."""
    port, log = free_port(), folder / f"mlx_lm-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    command += ["--port", str(port)]
    with process(command, log, stdout=subprocess.DEVNULL) as started:
        until_it_generates(
            Served(f"http://127.0.0.1:{port}", {"model": str(model)}), "hello", started, log
        )
        yield Target(f"http://127.0.0.1:{port}", str(model))


def outcomes(
    start: Callable[[Path, Path], contextlib.AbstractContextManager[Target]],
    model: Path,
    folder: Path,
) -> Iterator[str]:
    """Yield each check's outcome; restart a server that no longer responds."""
    left = list(CHECKS.items())
    while left:
        with start(model, folder) as target:
            alive = True
            while left and alive:
                name, function = left.pop(0)
                result = outcome(target, function)
                if result != "yes":
                    alive = outcome(target, CHECKS["chat"]) == "yes"
                    result += "" if alive else "; then it stops responding"
                print(f"{name}: {result}", flush=True)
                yield result


def table() -> str:
    """Run every check on both servers; return the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(folder / "tiny-chat")
        columns = [list(outcomes(start, model, folder)) for start in (ours, mlx_lm)]
    rows = [f"| {' | '.join(row)} |" for row in zip(CHECKS, *columns, strict=True)]
    version = importlib.metadata.version
    head = f"| call | labkit.serve | mlx_lm.server {version('mlx-lm')} |\n| --- | --- | --- |"
    client = f"Client: openai {version('openai')}, `_strict_response_validation=True`."
    return "\n".join([client, "", head, *rows])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/server.md")
    options = parser.parse_args()
    made = table()
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
