"""Clients that people use instead of OpenAI's own: one call each, whole and streamed.

Neither is a dependency; where they are installed: ``pytest -m slow tests/server``.
"""

import pytest

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def expected(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0
    )
    return answer.choices[0].message.content


def test_litellm(server, expected):
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": "openai/tiny",
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
        "api_base": f"{server.url}/v1",
        "api_key": "none",
    }
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 6
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_langchain(server, expected):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=6, temperature=0
    )
    answer = model.invoke("hello")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 6
    assert "".join(chunk.content for chunk in model.stream("hello")) == expected
