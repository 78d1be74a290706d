"""Tests with LiteLLM and LangChain as clients: one call each, whole and streamed.

Neither is a dependency. If they are installed, run ``pytest -m slow tests/server``.
"""

import pytest

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
