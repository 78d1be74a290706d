"""Tests of API keys, limits, errors, metrics, tokenising and shutdown over plain HTTP."""

import asyncio
import http.client
import itertools
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import urlsplit

import openai
import pytest
import tokenizers
from api_client import connect
from fake_engine import CharTokenizer, FakeEngine
from fake_server import FakeModel, FakeServer, TemplatesHere, post
from test_uvicorn_protocol import COMPLETION, PATH, status

from labkit import config
from labkit.server.generation import http_response
from labkit.server.generation.service import Service
from labkit.server.http import http_listener
from labkit.server.http.routes import create_app
from labkit.server.types.api_error import ApiError

HELLO = {"model": "tiny", "prompt": "hello", "temperature": 0}


def send(server, method, path, body=None, headers=()):
    """Send a request; return status, headers, and the body as JSON."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def is_error(response):
    """Return whether the body of a response is the API's error object."""
    error = response[2]["error"]
    return set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]


def metric(server, name, **labels):
    """Return a metric's value, summed over the series that have these labels."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    assert lines, name
    pairs = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(text in line for text in pairs))


@pytest.fixture(scope="module")
def limited_server(tiny_server):
    """A server with an API key and low limits."""
    with tiny_server(
        "server.api_key=sesame",
        "server.max_body_bytes=2000",
        "server.max_prompt_tokens=20",
        "server.max_output_tokens=30000",
        "server.max_live=2",
        "server.timeout_s=600",
        "engine.scheduler.max_num_seqs=1",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def limited_client(limited_server):
    return connect(limited_server.url, api_key="sesame", strict=False)


KEY = {"Authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
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
def test_every_error_is_the_apis_error_object(server, method, path, body, expected):
    response = send(server, method, path, body)
    assert response[0] == expected and is_error(response)


def test_the_api_key_is_required_except_for_health(limited_server):
    assert send(limited_server, "GET", "/health")[0] == 200  # monitoring needs no key
    wrong = {}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}
    for headers, path in itertools.product(wrong, ("/v1/models", "/v1/models/tiny")):
        response = send(limited_server, "GET", path, headers=headers)
        assert (response[0], response[2]["error"]["code"]) == (401, "invalid_api_key")
        assert is_error(response)
    assert send(limited_server, "GET", "/v1/models", headers=KEY)[0] == 200
    assert send(limited_server, "GET", "/v1/models/tiny", headers=KEY)[0] == 200
    assert send(limited_server, "GET", "/v1/models", headers={"x-api-key": "sesame"})[0] == 200
    with pytest.raises(openai.AuthenticationError):
        connect(limited_server.url, api_key="wrong").models.list()


def test_a_too_long_body_is_refused(limited_server):
    body = json.dumps({**HELLO, "prompt": "x" * 3000}).encode()
    response = send(limited_server, "POST", "/v1/completions", body, KEY)
    assert response[0] == 413 and is_error(response)
    pieces = (body[at : at + 500] for at in range(0, len(body), 500))  # chunked: without a length
    response = send(limited_server, "POST", "/v1/completions", pieces, KEY)
    assert response[0] == 413 and is_error(response)


def test_a_too_long_prompt_is_refused(limited_server):
    body = json.dumps({**HELLO, "prompt": [1] * 21}).encode()
    response = send(limited_server, "POST", "/v1/completions", body, KEY)
    assert response[0] == 400 and response[2]["error"]["code"] == "context_length_exceeded"


def test_more_choices_than_the_server_allows_are_a_bad_request(limited_client):
    with pytest.raises(openai.BadRequestError, match="needs 3 completions; at most 2"):
        limited_client.completions.create(**HELLO, n=3)


def endless_stream(client, **options):
    """Return a stream that does not end by itself during a test."""
    request = {**HELLO, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(**request, stream=True)


def test_a_full_server_sends_retry_after(limited_server, limited_client):
    client = limited_client
    stream = endless_stream(client)
    next(iter(stream))
    waiting = []
    second = threading.Thread(target=lambda: waiting.append(endless_stream(client)))
    second.start()
    deadline = time.monotonic() + 30
    while metric(limited_server, "vllm:num_requests_waiting") < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metric(limited_server, "vllm:num_requests_running") == 1
    with pytest.raises(openai.RateLimitError) as error_info:
        client.completions.create(**HELLO)
    assert int(error_info.value.response.headers["retry-after"]) >= 1
    stream.close()  # lets the waiting request start
    second.join(timeout=30)
    assert next(iter(waiting[0]))
    waiting[0].close()


def test_a_request_of_a_lower_priority_overtakes_an_earlier_one(tiny_server):
    options = "engine.scheduler.max_num_seqs=1", "engine.scheduler.queue=priority"
    with tiny_server(*options) as server, ThreadPoolExecutor(2) as pool:
        client = connect(server.url, strict=False)

        def stream(priority):
            return endless_stream(client, extra_body={"ignore_eos": True, "priority": priority})

        running = stream(0)
        next(iter(running))
        waiting = []
        for priority in (9, -1):
            waiting.append(pool.submit(stream, priority))
            deadline = time.monotonic() + 30
            while metric(server, "vllm:num_requests_waiting") < len(waiting):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        running.close()
        with waiting[1].result(timeout=60):
            assert not waiting[0].done()  # it has no first token, with which its status is sent
        waiting[0].result(timeout=60).close()


def wait_for_free_memory(server):
    """Wait until no request has KV memory, without a further request."""
    deadline = time.monotonic() + 60
    while metric(server, "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disconnect_frees_the_requests_memory(server, lenient_client):
    before = metric(server, "vllm:request_success_total", finished_reason="abort")
    # Without the disconnect it would finish with reason length.
    stream = endless_stream(lenient_client, max_tokens=512)
    next(iter(stream))
    assert metric(server, "vllm:kv_cache_usage_perc") > 0
    stream.close()
    wait_for_free_memory(server)
    assert metric(server, "vllm:num_requests_running") == 0
    assert metric(server, "vllm:request_success_total", finished_reason="abort") == before + 1


def test_a_stop_text_frees_the_requests_memory(server, client):
    """The engine does not know the text: the request is aborted there after its last step."""
    text = client.completions.create(**HELLO, max_tokens=8).choices[0].text
    long = {**HELLO, "max_tokens": 512, "extra_body": {"ignore_eos": True}}
    response = client.completions.create(**long, stop=[text[2:4]])
    assert response.choices[0].finish_reason == "stop"
    wait_for_free_memory(server)


def test_a_request_ends_at_the_time_limit(limited_client, monkeypatch):
    passed, limits = threading.Event(), []

    async def wait(tasks, *, timeout, **options):
        """Wait until the test says that the time limit has passed."""
        assert options == {"return_when": asyncio.FIRST_COMPLETED}  # a response that is sent ends
        if timeout <= 1:
            return await asyncio.wait(tasks, timeout=timeout, **options)
        limits.append(timeout)
        done, left = set(), tasks
        while not (done or passed.is_set()):
            done, left = await asyncio.wait(tasks, timeout=0.01, **options)
        return done, left

    clock = SimpleNamespace(**{**vars(asyncio), "wait": wait})
    monkeypatch.setattr(http_response, "asyncio", clock)
    long = {**HELLO, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        stream = iter(endless_stream(limited_client))
        next(stream)
        first = pool.submit(list, stream)
        second = pool.submit(limited_client.completions.create, **long)
        while len(limits) < 2:
            time.sleep(0.01)
        passed.set()  # while the second request waits for the first
        errors = [first.exception(), second.exception()]
    assert all(590 < limit <= 600 for limit in limits)
    assert isinstance(errors[0], openai.APIError) and "longer than 600 s" in str(errors[0])
    assert not isinstance(errors[0], openai.APIStatusError)  # the stream had started
    assert isinstance(errors[1], openai.InternalServerError) and errors[1].status_code == 504


def test_metrics_count_a_request(server, client):
    def counts():
        return [
            metric(server, "vllm:prompt_tokens_total"),
            metric(server, "vllm:generation_tokens_total"),
            metric(server, "vllm:request_success_total", finished_reason="length"),
            metric(server, "vllm:time_to_first_token_seconds_count"),
            metric(server, "vllm:inter_token_latency_seconds_count"),
            metric(server, "vllm:request_queue_time_seconds_count"),
            metric(server, "vllm:request_prefill_time_seconds_count"),
            metric(server, "vllm:request_params_max_tokens_sum"),
            metric(server, "vllm:iteration_tokens_total_sum"),
        ]

    before = counts()
    response = client.completions.create(**HELLO, max_tokens=5)
    prompt = response.usage.prompt_tokens
    deltas = [after - old for after, old in zip(counts(), before, strict=True)]
    assert deltas == [prompt, 5, 1, 1, 4, 1, 1, 5, prompt + 4]
    before = counts()  # of the prompt alone, the token that the engine generates is dropped
    stop = {"logit_bias": {"300": 100}, "extra_body": {"stop_token_ids": [300]}}
    response = client.completions.create(**HELLO, max_tokens=0, echo=True, **stop)
    assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (0, "length")
    deltas = [after - old for after, old in zip(counts(), before, strict=True)]
    assert deltas[:8] == [prompt, 0, 1, 0, 0, 1, 0, 0]


def test_tokens_are_counted_while_their_request_runs(limited_server, limited_client):
    def counts():
        names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running")
        return [metric(limited_server, f"vllm:{name}") for name in names]

    before = counts()
    stream = endless_stream(limited_client)
    next(iter(stream))
    after = counts()
    stream.close()
    assert after[2] == 1 and after[0] > before[0] and after[1] > before[1]


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


def test_tokenize_and_detokenize(server, client, chat_model):
    body = json.dumps({"model": "tiny", "prompt": "hello there", "return_token_strs": True})
    tokenized = send(server, "POST", "/tokenize", body)[2]
    vocabulary = tokenizers.Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    spellings = [vocabulary.id_to_token(token) for token in tokenized["tokens"]]
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["token_strs"] == spellings
    assert "".join(spellings).replace("Ġ", " ") == "hello there"
    detokenized = send(server, "POST", "/detokenize", json.dumps({"tokens": tokenized["tokens"]}))[
        2
    ]
    assert detokenized == {"prompt": "hello there"}
    messages = [{"role": "user", "content": "hello"}]
    chat = send(server, "POST", "/tokenize", json.dumps({"messages": messages}))[2]
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert chat["count"] == usage.prompt_tokens


class SlowTemplates(TemplatesHere):
    """Renders conversations some time after the signal, or never if ``ends`` is false."""

    def __init__(self, service, ends):
        super().__init__(service.tokenizer)
        self._service, self._ends, self._closed = service, ends, asyncio.Event()

    async def render(self, *conversation):
        signal.raise_signal(signal.SIGTERM)
        while not self._service._stopping:
            await asyncio.sleep(0.01)
        if self._ends:
            return await super().render(*conversation)
        await self._closed.wait()
        raise ApiError(503, "the server is stopping")

    async def close(self):
        self._closed.set()


@pytest.mark.parametrize("ends", [True, False])
def test_a_signal_gives_a_conversation_that_is_rendered_the_grace_period(
    tmp_path, ends, monkeypatch
):
    monkeypatch.setattr(http_listener, "CLOSE_S", 0.1)
    options = config.Server(port=0, grace_s=60.0 if ends else 0.1)
    service = Service(options, "fake", CharTokenizer(), FakeEngine(), FakeModel(tmp_path))
    service.templates = SlowTemplates(service, ends)
    bound = http_listener.bind(options)
    url = http_listener.url(bound)
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "fake", "messages": messages, "max_tokens": 2})

    def chat():
        return send(SimpleNamespace(url=url), "POST", "/v1/chat/completions", body)

    with ThreadPoolExecutor(1) as pool:
        sent = []
        http_listener.run(
            service, create_app(service), bound, lambda: sent.append(pool.submit(chat))
        )
        code, _, response = sent[0].result()
    if ends:
        assert code == 200, response
        assert response["choices"][0]["message"]["content"] == "aa"
    else:
        assert code == 503 and response["error"]["message"] == "the server is stopping"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_an_error_event(tmp_path, signum, capfd, monkeypatch):
    monkeypatch.setattr(http_listener, "CLOSE_S", 0.1)
    options = config.Server(port=0, grace_s=0.1, max_output_tokens=1 << 20)
    service = Service(options, "fake", CharTokenizer(), FakeEngine(), FakeModel(tmp_path))
    bound = http_listener.bind(options)

    def stream():
        connection = http.client.HTTPConnection(*bound.getsockname(), timeout=60)
        body = {**HELLO, "model": "fake", "max_tokens": 1 << 20, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.readline()
        signal.raise_signal(signum)
        return response.read().decode()

    with ThreadPoolExecutor(1) as pool:
        streams = []
        http_listener.run(
            service, create_app(service), bound, lambda: streams.append(pool.submit(stream))
        )
        lines = streams[0].result().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    error = json.loads(lines[-3].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("server_error", "the server is stopping")
    assert "Traceback" not in capfd.readouterr().err


def send_until(server, body, expected):
    """Send a request again and again until it has the expected status; return the response."""
    deadline = time.monotonic() + 30
    while status(response := server.send(post(PATH, body))) != expected:
        assert time.monotonic() < deadline, response
    return response


@pytest.mark.parametrize("ending", ["completed", "disconnected"])
def test_bodies_that_arrive_are_limited_together(tmp_path, ending):
    body = json.dumps({**COMPLETION, "user": "x" * 900}).encode()
    with FakeServer(tmp_path, max_live=2, max_body_bytes=1024) as server:
        clients = [server.connect() for _ in range(2)]
        for client in clients:
            client.sendall(post(PATH, body)[:-1])
        refused = send_until(server, body, 429)
        assert b"2048 bytes (server.max_live * server.max_body_bytes)" in refused
        assert b"retry-after: 1" in refused
        for client in clients:
            if ending == "completed":
                client.sendall(body[-1:])
                assert status(client.recv(1 << 16)) == 200
            client.close()
        send_until(server, body, 200)
