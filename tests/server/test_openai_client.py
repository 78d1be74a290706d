"""Tests of completions and chat with OpenAI's client under strict validation."""

import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0, **options}
    )


def complete(client, **options):
    return client.completions.create(
        **{"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0, **options}
    )


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as error_info:
        client.models.retrieve("other")
    assert error_info.value.code == "model_not_found"


def test_chat(client):
    response = chat(client)
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 6
    assert response.usage.total_tokens == response.usage.prompt_tokens + 6
    assert chat(client).choices[0].message.content == response.choices[0].message.content


def test_a_streamed_chat_equals_the_whole_one(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    first, *between, last, with_usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in [*between, last])
    assert [c.choices[0].finish_reason for c in [first, *between]] == [None] * (len(between) + 1)
    assert last.choices[0].finish_reason == "length"
    assert with_usage.choices == [] and with_usage.usage == whole.usage
    assert all(c.usage is None for c in [first, *between, last])


def test_a_stream_has_no_usage_by_default(client):
    assert all(chunk.choices and chunk.usage is None for chunk in chat(client, stream=True))


def test_continuous_usage_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6


def test_continuous_usage_needs_include_usage_as_in_vllm(client, lenient_client):
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    for chunks in (chat(client, **options), complete(lenient_client, **options)):
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_completion_whole_and_streamed(client, lenient_client):
    response = complete(client)
    assert response.object == "text_completion" and response.usage.completion_tokens == 6
    chunks = list(complete(lenient_client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == response.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "length"
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage == response.usage


def test_returned_token_ids_reproduce_the_completion(client):
    options_with_ids = {"extra_body": {"return_token_ids": True}}
    response = complete(client, **options_with_ids).choices[0]
    repeated = complete(client, prompt=response.prompt_token_ids, **options_with_ids).choices[0]
    assert len(response.token_ids) == 6 and repeated.token_ids == response.token_ids
    stream = list(chat(client, stream=True, **options_with_ids))
    with_prompt = [hasattr(chunk, "prompt_token_ids") for chunk in stream]
    assert with_prompt == [True, *[False] * (len(stream) - 1)]
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chat(client, stream=True))
    ids = [token for chunk in stream for token in chunk.choices[0].token_ids]
    assert ids == chat(client, **options_with_ids).choices[0].token_ids


def test_several_prompts_and_choices(client):
    response = complete(client, prompt=["hello", "other text"], n=2, temperature=1, seed=5)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in response.choices]
    assert texts[0] != texts[1]
    repeated = complete(client, prompt=["hello", "other text"], n=2, temperature=1, seed=5)
    assert [choice.text for choice in repeated.choices] == texts


def test_n_choices_of_a_chat(client):
    response = chat(client, n=3, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in response.choices]
    assert len(set(texts)) == 3
    chunks = list(chat(client, n=3, temperature=1.0, seed=7, stream=True))
    streamed_texts = [
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
        for i in range(3)
    ]
    assert streamed_texts == texts


def test_a_stop_string_ends_the_text_and_is_left_out(client):
    text = complete(client, max_tokens=8).choices[0].text
    stop = text.split()[2]
    response = complete(client, max_tokens=8, stop=[stop]).choices[0]
    assert response.finish_reason == "stop"
    assert response.text == text[: text.index(stop)]


def test_logprobs(client):
    response = chat(client, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(item.token for item in response.logprobs.content) == response.message.content
    for item in response.logprobs.content:
        assert len(item.top_logprobs) == 3
        assert item.logprob == max(top.logprob for top in item.top_logprobs) < 0  # greedy
        assert bytes(item.bytes).decode() == item.token
    chunks = list(chat(client, logprobs=True, top_logprobs=3, stream=True))
    assert [i for c in chunks for i in c.choices[0].logprobs.content] == response.logprobs.content
    text = complete(client, logprobs=2).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert all(len(top) == 2 for top in text.logprobs.top_logprobs)


def test_logit_bias_forces_a_token_until_its_penalty(client):
    options_with_ids = {"logit_bias": {"300": 100}, "extra_body": {"return_token_ids": True}}
    assert complete(client, **options_with_ids).choices[0].token_ids == [300] * 6
    options_with_ids["frequency_penalty"] = 2.0
    assert complete(client, max_tokens=60, **options_with_ids).choices[0].token_ids[-1] != 300


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"extra_body": {"store": True}}, "store"),
        ({"extra_body": {"echo": True}}, "echo"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"service_tier": "priority"}}, "service_tier"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "messages"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}},
            "structured_outputs",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(("}}}, "structured_outputs"),
        ({"extra_body": {"min_tokens": 7}}, "min_tokens"),
        ({"extra_body": {"min_tokens": 2}, "stop": "x"}, "min_tokens"),
        ({"extra_body": {"min_tokens": 50_000}, "max_tokens": 512}, "max_tokens"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 17}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "bishop", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
    ],
)
def test_an_invalid_option_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as error_info:
        chat(client, **options)
    error = error_info.value
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert error.body["message"] and "\n" not in error.body["message"]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as error_info:
        chat(client, model="gpt-4")
    assert (error_info.value.code, error_info.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("prompt", ["", [], [1, "a"], [[1], "a"], [-1], [99999], [[]], [[1], []]])
def test_invalid_prompts_are_refused(client, prompt):
    with pytest.raises(openai.BadRequestError) as error_info:
        complete(client, prompt=prompt)
    assert error_info.value.param.startswith("prompt")
