"""A server's stream becomes tokens, counts and failures."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from labkit import config
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.openai.sse_decoder import (
    DONE,
    SSEDecoder,
    StreamError,
    error_text,
    may_have_content,
    parse_chunk,
)
from labkit.engine.openai.streamed_response import StreamedResponse
from labkit.workload.requests.serving_metrics import ServedRequest, serving_metrics

PROMPT = (300, 301, 302)


def test_a_response_is_text_with_the_servers_token_count(opponent, run_load, ask):
    engine, stub = opponent()
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert (entry.outcome, entry.finish, entry.output_tokens) == ("served", "length", 6)
    assert entry.text == "the cat sat on a mat" and entry.tokens == []
    counts = engine.counters()
    assert counts["stream.chunks"] == len(entry.chunk_times) <= 6  # reads; one may hold several
    assert counts["tokens.usage"] == counts["tokens.stream"] == 6
    assert counts["engine.openai"] > 0 and counts["finish.length"] == 1
    server = engine.notes["server"]
    assert (server["identity"], server["model"]) == ("text", "stub-model")
    (body,) = stub.received_bodies
    assert body["stream_options"] == {"include_usage": True} and isinstance(body["prompt"], str)


def test_token_ids_of_a_server_are_used_for_identity(opponent, run_load, ask):
    engine, stub = opponent("ids", preset="vllm")
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert entry.tokens == [0, 1, 2, 3, 4, 5] and entry.text is None
    assert engine.notes["server"]["identity"] == "token ids"
    assert stub.received_bodies[0]["prompt"] == list(PROMPT)
    assert stub.received_bodies[0]["return_token_ids"] and stub.received_bodies[0]["ignore_eos"]


def test_tokens_bundled_in_one_chunk_are_all_counted(opponent, run_load, ask):
    engine, _ = opponent("bundles", "ids", preset="vllm")
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert entry.tokens == [0, 1, 2, 3, 4, 5] and len(entry.chunk_times) <= 3
    assert engine.counters()["stream.bundled"] == len(entry.chunk_times)
    assert entry.tpot == pytest.approx((entry.e2e - entry.ttft) / (6 - entry.first_chunk))


def test_bundles_without_ids_use_the_servers_count(opponent, run_load, ask):
    engine, _ = opponent("bundles")
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert entry.output_tokens == 6 and len(entry.chunk_times) <= 3
    assert engine.counters()["tokens.stream"] == 3
    server = engine.notes["server"]
    assert server["disagree"][0]["stream"] == 3
    assert server["first_chunk_excess_pct"] == pytest.approx(20)  # about 1 of 5 later tokens


@pytest.mark.parametrize(
    ("chunks", "reads", "usage", "first", "excess"),
    [
        ([("a", None)] * 6, (1, 5), 6, 1, 0),
        ([("a", None)] * 6, (2, 4), 6, 2, 0),  # two chunks of a token each in the first read
        ([("a", None)] * 5, (1, 4), 6, 1, 0),  # the last token has no text
        ([("a", [1, 2])] * 3, (1, 2), 6, 2, 0),
        ([("a", [1]), ("a", [2, 3, 4, 5, 6])], (1, 1), 6, 1, 0),  # as with speculation
        ([("", []), *[("a", [1, 2, 3])] * 2], (1, 1, 1), 6, 3, 0),
        ([("ab", None)] * 3, (1, 2), 6, 1, 1 / 5),  # two tokens each, or other numbers
        ([("abcdef", None)], (1,), 6, 1, 1),
    ],
)
def test_the_tokens_of_the_first_chunk(ask, chunks, reads, usage, first, excess):
    """They are known from token ids, or where every chunk is a token; else their share is noted."""
    (request,) = ask(PROMPT)
    response, left = StreamedResponse(request), list(chunks)
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": usage}}
    for number in reads:
        parts = [{"choices": [{"text": text, "token_ids": ids}]} for text, ids in left[:number]]
        left = left[number:]
        parts += [] if left else [{"choices": [{"text": "", "finish_reason": "length"}]}, usage]
        data = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
        list(response.feed(data.encode(), 1.0, Counters()))
    response.ended = True
    detokenizer = SimpleNamespace(normalize=str)
    event = response.final_event(2.0, detokenizer, Counters())
    assert (event.counted, event.first_chunk) == (6, first), event.error
    assert response.first_chunk_excess(6) == pytest.approx(excess)


@pytest.mark.parametrize(
    ("ids", "finish", "usage", "later"),
    [
        (None, "stop", 7, 5),  # six chunks, and the token that ended the text
        (None, "stop", 6, 5),  # as if usage did not count that token
        (None, "length", 7, 6),  # a chunk has two tokens: nothing ended the text
        (None, "stop", 8, 7),  # chunks have several tokens
        ([1], "stop", 7, 5),  # the ids say how many tokens there are
    ],
)
def test_a_token_that_ends_a_text_has_no_time(ids, finish, usage, later, ask):
    """A token per second: the time of the later ones is that until the last chunk."""
    (request,) = ask(PROMPT, tokens=usage, ignore_eos=False)
    response, entry = StreamedResponse(request), ServedRequest("r0", 3, 0.0)
    parts = [{"choices": [{"text": "a", "token_ids": ids}]} for _ in range(6)]
    parts.append({"choices": [{"text": "", "finish_reason": finish}]})
    parts.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": usage}})
    for at, part in enumerate(parts, 1):
        if list(response.feed(f"data: {json.dumps(part)}\n\n".encode(), at, Counters())):
            entry.chunk_times.append(at)
    response.ended = True
    event = response.final_event(9.0, SimpleNamespace(normalize=str), Counters())
    entry.counted, entry.untimed_tokens = event.counted, event.untimed_tokens
    assert entry.output_tokens == (6 if ids else usage) and entry.e2e - entry.ttft == 5
    assert entry.tpot == 5 / later


def test_without_usage_the_tokenizer_counts_tokens(opponent, run_load, ask):
    engine, _ = opponent("no_usage")
    (entry,) = run_load(engine, ask(PROMPT)).entries
    notes = engine.notes["server"]
    assert notes["counted_by"] == "tokenizer"
    assert notes["counted_beyond_max"] == (entry.output_tokens > 6) == 1
    assert entry.output_tokens == engine.counters()["tokens.tokenizer"]
    assert "tokens.usage" not in engine.counters()


def test_disagreeing_token_counts_are_noted(opponent, run_load, ask):
    engine, _ = opponent("miscounts", "ids", preset="vllm")
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert entry.outcome == "served" and entry.output_tokens == 6
    (first,) = engine.notes["server"]["disagree"]
    assert (first["id"], first["usage"], first["stream"]) == ("r0", 7, 6)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("refuses", "429: too many"),
        ("breaks", "the stream broke off"),
        ("early", "the stream ended early: 3 of 6 tokens, finish reason stop"),
        ("nonsense", "invalid chunk: {not json"),
        ("refusal", "the server refused: I will not"),
    ],
)
def test_a_failed_response_is_never_a_success(opponent, run_load, ask, mode, why):
    engine, stub = opponent(mode)
    entries = run_load(engine, ask(PROMPT, PROMPT)).entries
    assert {entry.outcome for entry in entries} <= {"failed", "refused"}
    assert [entry.error for entry in entries] == [f"request r{i}: {why}" for i in range(2)]
    assert engine.counters()["requests.failed"] == 2
    assert engine.counters()["tokens.stream"] == engine.counters()["tokens.tokenizer"] == 0
    assert len(stub.received_bodies) == 2, "a request was sent again"


def test_a_failed_request_does_not_change_how_the_others_were_counted(opponent, run_load, ask):
    engine, stub = opponent()
    stub.modes |= {"half", "breaks"}
    entries = run_load(engine, [*ask(PROMPT), *map(rename, ask(PROMPT, tokens=9))]).entries
    assert [entry.outcome for entry in entries] == ["served", "failed"]
    notes = engine.notes["server"]
    assert (notes["counted_by"], notes["counted_below_chunks"]) == ("usage", 0)
    assert engine.counters()["tokens.usage"] == engine.counters()["tokens.stream"] == 6


def rename(request):
    return replace(request, request_id="long")


def test_a_usage_below_the_number_of_chunks_is_noted(opponent, run_load, ask):
    engine, _ = opponent("early", "counts_one")
    (entry,) = run_load(engine, ask(PROMPT, ignore_eos=False)).entries
    notes = engine.notes["server"]
    assert entry.output_tokens == 1 and notes["counted_below_chunks"] == 1
    assert notes["counted_beyond_max"] == 0


@pytest.mark.parametrize("modes", [("early",), ()])
def test_a_usage_of_no_tokens_beside_a_text_is_no_count(opponent, run_load, ask, modes):
    engine, _ = opponent(*modes, "counts_none")
    (entry,) = run_load(engine, ask(PROMPT, ignore_eos=False)).entries
    assert entry.outcome == "served", entry.error
    assert entry.timed_tokens == engine.counters()["tokens.tokenizer"] > 0
    notes = engine.notes["server"]
    assert notes["counted_by"] == "tokenizer" and notes["disagree"][0]["usage"] == 0
    assert serving_metrics([entry], None)


@pytest.mark.parametrize("uncounted", ["no_usage", "counts_none"])
def test_an_output_of_unknown_length_may_not_end_early_either(opponent, run_load, ask, uncounted):
    engine, _ = opponent("early", uncounted)
    for fixed, outcome in ((True, "failed"), (False, "served")):
        (entry,) = run_load(engine, ask(PROMPT, ignore_eos=fixed)).entries
        assert entry.outcome == outcome
        assert not fixed or entry.error == "request r0: the stream ended early: finish reason stop"


def test_an_output_may_end_early_without_ignore_eos(opponent, run_load, ask):
    engine, _ = opponent("early")
    (entry,) = run_load(engine, ask(PROMPT, ignore_eos=False)).entries
    assert (entry.outcome, entry.finish, entry.output_tokens) == ("served", "stop", 3)


def test_a_token_counted_beyond_the_text_s_chunks_reaches_the_metrics(opponent, run_load, ask):
    engine, _ = opponent("early", "miscounts")
    (entry,) = run_load(engine, ask(PROMPT, tokens=12, ignore_eos=False)).entries
    assert (entry.output_tokens, entry.timed_tokens, entry.finish) == (7, 6, "stop")


def test_tool_calls_count_as_content(opponent, run_load, ask):
    engine, _ = opponent("tools", api=config.Api.chat)
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert entry.outcome == "served"
    counts = engine.counters()
    assert counts["stream.tool_calls"] == 6 and counts["finish.tool_calls"] == 1


def test_chat_sends_the_conversation(opponent, run_load, ask):
    engine, stub = opponent(api=config.Api.chat)
    conversation = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    )
    (request,) = ask(PROMPT)
    run_load(engine, [replace(request, messages=conversation)])
    assert stub.received_bodies[0]["messages"] == [dict(message) for message in conversation]


@pytest.mark.parametrize(("mode", "what"), [("dead", "nothing"), ("pings", "only keep-alives")])
def test_a_silent_server_fails_its_request(opponent, run_load, ask, mode, what):
    engine, stub = opponent(silence_s=0.2)
    stub.modes.add(mode)
    (entry,) = run_load(engine, ask(PROMPT)).entries
    assert f"the server sent {what} for 0.2 s (engine.server.silence_s)" in entry.error


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b": ping\n\n", False),
        (b"\r\n: a\r\nevent: ping\r\nid: 3\r\nretry: 9\r\n\r\n", False),
        (b'data: {"choices": []}\n\n', False),
        (b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n', False),
        (b': ping\n\ndata: {"choices": [{"text": "a"}]}\n\n', True),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n', True),
        (b'": "cut"}]}\n\n: ping\n\n', True),
        (b'data: {"choices": [{"te', True),
        (b'data: {"error": "broken"}\n\n', True),
        (b"data: [DONE]\n\n", True),
    ],
)
def test_only_what_carries_output_ends_a_silence(data, expected):
    assert may_have_content(data) is expected


def test_a_parameter_not_sent_to_servers_is_refused(opponent, run_load, ask):
    engine, stub = opponent()
    (entry,) = run_load(engine, ask(PROMPT, min_p=0.5)).entries
    assert entry.outcome == "refused" and "min_p=0.5" in entry.error and stub.received_bodies == []


def test_an_aborted_request_gives_no_more_events(opponent, ask):
    engine, _ = opponent()
    requests = ask(PROMPT, PROMPT, tokens=20)
    for request in requests:
        engine.submit(request)
    with pytest.raises(EngineError, match="already in use"):
        engine.submit(requests[0])
    engine.abort("r0")
    seen = []
    while engine.has_work():
        engine.wait(0.02)
        seen += engine.step()
    assert {event.request_id for event in seen} == {"r1"}
    assert engine.counters()["requests.aborted"] == 1


def test_tokens_have_their_arrival_time(opponent, run_load, ask):
    """The main thread sleeps while tokens arrive; their times must not depend on it."""
    engine, _ = opponent()
    original_step, before_step = engine.step, []

    def late():
        start = time.perf_counter()
        events = original_step()
        before_step.extend(event.received < start for event in events)
        time.sleep(0.05)
        return events

    engine.step = late
    run_load(engine, ask(PROMPT, tokens=12))
    assert len(before_step) == 13 and sum(before_step) > 6


def test_a_request_is_sent_when_due_even_if_nothing_arrives(opponent, run_load, ask):
    engine, _ = opponent()
    entries = run_load(engine, ask(PROMPT, PROMPT, tokens=30), due=[0.0, 0.1]).entries
    assert entries[1].due - entries[0].due == pytest.approx(0.1)
    assert entries[1].late < 0.1


def test_events_are_decoded_whatever_the_read_boundaries():
    stream = (
        b': keep\n\ndata: {"a": 1}\r\n\r\ndata: one\ndata: two\n\nid: 4\ndata:[DONE]\n\ndata: x'
    )
    for size in (1, 3, 7, len(stream)):
        events = SSEDecoder()
        blocks = [stream[i : i + size] for i in range(0, len(stream), size)]
        event_data = [data for block in blocks for data in events.feed(block)]
        assert event_data == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_malformed_chunks_are_errors():
    def parse(event):
        return parse_chunk(json.dumps(event).encode())

    assert parse_chunk(b"[DONE]") is DONE
    assert parse({"choices": [{"delta": {"role": "assistant"}}]}).is_empty
    assert parse({"choices": [{"delta": {"reasoning_content": "hm"}}]}).text == "hm"
    for choices in ({"choices": []}, {"choices": None}, {}):  # OpenAI's, and other servers'
        usage = parse({**choices, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).usage
        assert (usage.prompt, usage.completion, usage.cached) == (3, 4, None)
    deep, infinite = b"[" * 100_000, b'{"choices": [], "usage": {"completion_tokens": 1e999}}'
    shapes = (b"7", b"[]", b"{}", b'{"choices": 3}', b'{"choices": [{"delta": 3}]}', b"\xff")
    for wrong in (*shapes, deep, infinite):
        with pytest.raises(StreamError):
            parse_chunk(wrong)
    with pytest.raises(StreamError, match=r"^no room$"):
        parse({"error": {"message": "no\nroom"}})
    assert error_text(b"<html>" + b"x" * 999).endswith("...") and error_text(deep).endswith("...")
    assert error_text(b'{"error": "text"}') == "text"
