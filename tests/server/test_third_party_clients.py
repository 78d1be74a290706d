"""Tests with clients that are not dependencies: each does its ordinary calls, whole and streamed.

Run ``pytest -m slow tests/server`` in an environment that has them.
"""

import asyncio

import pytest
from fake_engine import ToolTokenizer
from fake_server import FakeServer

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def expected(client):
    response = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0
    )
    return response.choices[0].message.content


def test_litellm(server, expected):
    litellm = pytest.importorskip("litellm")
    options = {
        "model": "openai/tiny",
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
        "api_base": f"{server.url}/v1",
        "api_key": "none",
    }
    response = litellm.completion(**options)
    assert response.choices[0].message.content == expected
    assert response.usage.completion_tokens == 6
    chunks = list(litellm.completion(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_langchain(server, expected):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=6, temperature=0
    )
    response = model.invoke("hello")
    assert response.content == expected and response.usage_metadata["output_tokens"] == 6
    assert "".join(chunk.content for chunk in model.stream("hello")) == expected


REPLY = """Let me see.
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""


@pytest.fixture
def agent_server(tmp_path):
    """A server whose model calls a tool twice, and answers once it has the results."""
    with FakeServer(tmp_path, tokenizer=ToolTokenizer()) as running:
        engine, submit = running.engine, running.engine.submit

        def reply_to(request):
            last_turn = "".join(map(chr, request.prompt_token_ids)).rpartition("user:")[2]
            engine.reply = "It is warm." if "tool: warm" in last_turn else REPLY
            submit(request)

        engine.submit = reply_to
        yield running


def test_openai_agents_with_its_default_model(agent_server):
    agents, cities = pytest.importorskip("agents"), []
    from openai import AsyncOpenAI

    @agents.function_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "warm"

    async def run():
        url = f"http://127.0.0.1:{agent_server.port}/v1"
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(client, use_for_tracing=False)
        agent = agents.Agent(name="a", instructions="be brief", model="fake", tools=[weather])
        whole = await agents.Runner.run(agent, "hello")
        streamed = agents.Runner.run_streamed(agent, whole.to_input_list() + HELLO)
        events = [event async for event in streamed.stream_events()]
        return whole.final_output, streamed.final_output, events

    *outputs, events = asyncio.run(run())
    assert outputs == ["It is warm."] * 2 and events
    assert cities == ["Rome", "Oslo"] * 2


def test_anthropics_client_and_its_tool_runner(agent_server):
    anthropic, cities = pytest.importorskip("anthropic"), []
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{agent_server.port}", api_key="none", max_retries=0
    )

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "warm"

    options = {"model": "fake", "max_tokens": 500, "messages": HELLO}
    runner = client.beta.messages.tool_runner(**options, tools=[weather], thread=False)
    assert runner.until_done().content[0].text == "It is warm."
    assert cities == ["Rome", "Oslo"]
    tools = [weather.to_dict()]
    whole = client.messages.create(**options, tools=tools)
    with client.messages.stream(**options, tools=tools) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.input["city"] for block in message.content[1:]] == ["Rome", "Oslo"]
    counted = client.messages.count_tokens(model="fake", messages=HELLO, tools=tools)
    assert counted.input_tokens == whole.usage.input_tokens
