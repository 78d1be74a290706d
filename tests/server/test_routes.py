"""Who may ask, how much, and what a client sees when that is too much."""

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

HELLO = {"model": "tiny", "prompt": "hello", "temperature": 0}


def ask(server, method, path, body=None, headers=()):
    """Send a request; return status, headers, and the body as JSON."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def is_error(answer):
    """Whether an answer is the API's error object."""
    error = answer[2]["error"]
    return set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]


def metric(server, name, **labels):
    """Return a metric's value, all that have these labels added up."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    assert lines, name
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(text in line for text in wanted))


@pytest.fixture(scope="module")
def narrow(chat_model, serving, tmp_path_factory):
    """A server that allows little, to those who have the key."""
    with serving(
        tmp_path_factory.mktemp("narrow") / "log",
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "server.api_key=sesame",
        "server.max_body_bytes=2000",
        "server.max_prompt_tokens=20",
        "server.max_output_tokens=30000",
        "server.max_live=2",
        "server.timeout_s=8",
        "server.grace_s=1",
        "engine.scheduler.max_num_seqs=1",
    ) as running:
        yield running


KEY = {"Authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/models", b"{}", 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"\xff", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"model": "tiny"}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        ("POST", "/v1/embeddings", b'{"model": "tiny", "input": "x"}', 404),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b'{"tokens": [1000000]}', 400),
    ],
)
def test_every_error_is_the_api_object(server, method, path, body, status):
    answer = ask(server, method, path, body)
    assert answer[0] == status and is_error(answer)


def test_the_key(narrow):
    assert ask(narrow, "GET", "/health")[0] == 200  # whoever watches has no key
    for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}):
        answer = ask(narrow, "GET", "/v1/models", headers=headers)
        assert (answer[0], answer[2]["error"]["code"]) == (401, "invalid_api_key")
        assert is_error(answer)
    assert ask(narrow, "GET", "/v1/models", headers=KEY)[0] == 200
    assert ask(narrow, "GET", "/v1/models", headers={"x-api-key": "sesame"})[0] == 200
    with pytest.raises(openai.AuthenticationError):
        narrow.client(api_key="wrong").models.list()


def test_a_body_that_is_too_long(narrow):
    body = json.dumps({**HELLO, "prompt": "x" * 3000}).encode()
    answer = ask(narrow, "POST", "/v1/completions", body, KEY)
    assert answer[0] == 413 and is_error(answer)
    pieces = (body[at : at + 500] for at in range(0, len(body), 500))  # its length is not said
    answer = ask(narrow, "POST", "/v1/completions", pieces, KEY)
    assert answer[0] == 413 and is_error(answer)


def test_a_prompt_that_is_too_long(narrow):
    body = json.dumps({**HELLO, "prompt": [1] * 21}).encode()
    answer = ask(narrow, "POST", "/v1/completions", body, KEY)
    assert answer[0] == 400 and answer[2]["error"]["code"] == "context_length_exceeded"


def test_more_than_ever_fits_is_no_reason_to_come_back(narrow):
    with pytest.raises(openai.BadRequestError, match="3 completions are asked for"):
        narrow.client(api_key="sesame").completions.create(**HELLO, n=3)


def endless(client, **options):
    """A stream that does not end by itself while a test runs."""
    asked = {**HELLO, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(**asked, stream=True)


def test_a_full_server_says_when_to_come_back(narrow):
    client = narrow.client(api_key="sesame", strict=False)
    stream = endless(client)
    next(iter(stream))
    waiting = []
    second = threading.Thread(target=lambda: waiting.append(endless(client)))
    second.start()
    deadline = time.monotonic() + 30
    while metric(narrow, "vllm:num_requests_waiting") < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metric(narrow, "vllm:num_requests_running") == 1
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**HELLO)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    stream.close()  # its place is free: the one that waits begins
    second.join(timeout=30)
    assert next(iter(waiting[0]))
    waiting[0].close()


def test_a_client_that_leaves_frees_what_it_had(server, lenient):
    before = metric(server, "vllm:request_success_total", finished_reason="abort")
    stream = endless(lenient, max_tokens=512)  # left alone it would end by its length
    next(iter(stream))
    assert metric(server, "vllm:kv_cache_usage_perc") > 0
    stream.close()
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metric(server, "vllm:request_success_total", finished_reason="abort") == before + 1
    # The next step says what is held now.
    assert lenient.completions.create(**HELLO).choices[0].finish_reason == "length"
    assert metric(server, "vllm:kv_cache_usage_perc") < 0.01


def test_a_request_that_takes_too_long_ends(narrow):
    client = narrow.client(api_key="sesame", strict=False)
    long = {**HELLO, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        stream = endless(client)
        first = pool.submit(list, stream)
        second = pool.submit(client.completions.create, **long)  # it never begins
        errors = [first.exception(), second.exception()]
    assert isinstance(errors[0], openai.APIError) and "longer than 8 s" in str(errors[0])
    assert not isinstance(errors[0], openai.APIStatusError)  # the stream had begun
    assert isinstance(errors[1], openai.InternalServerError) and errors[1].status_code == 504


def test_metrics_count(server, client):
    def counts():
        return [
            metric(server, "vllm:prompt_tokens_total"),
            metric(server, "vllm:generation_tokens_total"),
            metric(server, "vllm:request_success_total", finished_reason="length"),
            metric(server, "vllm:time_to_first_token_seconds_count"),
            metric(server, "vllm:inter_token_latency_seconds_count"),
            metric(server, "vllm:request_queue_time_seconds_count"),
            metric(server, "vllm:request_prefill_time_seconds_count"),
            metric(server, "vllm:iteration_tokens_total_sum"),
        ]

    before = counts()
    answer = client.completions.create(**HELLO, max_tokens=5)
    prompt = answer.usage.prompt_tokens
    added = [after - old for after, old in zip(counts(), before, strict=True)]
    assert added == [prompt, 5, 1, 1, 4, 1, 1, prompt + 4]


def test_metrics_have_vllms_names(server):
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "cache_config_info",
        "iteration_tokens_total_count", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count", "request_inference_time_seconds_count",
        "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
        "request_prompt_tokens_count", "request_generation_tokens_count",
        "request_params_n_count", "request_params_max_tokens_count",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    ):  # fmt: skip
        metric(server, f"vllm:{name}")


def test_tokenize_and_back(server, client):
    body = json.dumps({"model": "tiny", "prompt": "hello there", "return_token_strs": True})
    found = ask(server, "POST", "/tokenize", body)[2]
    assert found["count"] == len(found["tokens"]) and "".join(found["token_strs"]) == "hello there"
    back = ask(server, "POST", "/detokenize", json.dumps({"tokens": found["tokens"]}))[2]
    assert back == {"prompt": "hello there"}
    messages = [{"role": "user", "content": "hello"}]
    chat = ask(server, "POST", "/tokenize", json.dumps({"messages": messages}))[2]
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert chat["count"] == usage.prompt_tokens


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_streams_properly(chat_model, serving, tmp_path, number):
    with serving(
        tmp_path / "log", "model=local", f"model.path={chat_model}", "server.model_name=tiny",
        "server.grace_s=0.5", "server.max_output_tokens=30000",
    ) as running:  # fmt: skip
        connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=60)
        body = {**HELLO, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        running.process.send_signal(number)
        lines = answer.read().decode().split("\n\n")
        assert running.process.wait(timeout=30) == 0
        assert lines[-2:] == ["data: [DONE]", ""]
        error = json.loads(lines[-3].removeprefix("data: "))["error"]
        assert (error["type"], error["message"]) == ("server_error", "the server is stopping")
        assert "Traceback" not in running.log.read_text()
