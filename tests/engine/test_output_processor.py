from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.engine_protocol import NO_TOKEN, Logprobs, TokenEvent
from labkit.engine.output_processor import OutputProcessor
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams


class Bytes:
    """Ids are bytes."""

    byte_tokens = MappingProxyType({})

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Fallback(Bytes):
    """Ids are byte tokens, as in Llama 2."""

    byte_tokens = MappingProxyType({byte: byte for byte in range(256)})

    def decode(self, ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


def processor(tokenizer=Bytes, **params):
    return OutputProcessor(Request("a", (1,), SamplingParams(**params)), "p", tokenizer())


def feed(text, reason="length", **params):
    """The outputs of a text's bytes, one event each, up to the one that ends the request."""
    reader, data, outputs = processor(**params), text.encode(), []
    for i, byte in enumerate(data):
        event = TokenEvent("a", byte, reason if i == len(data) - 1 else None)
        outputs.append(reader.next_output(event))
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def test_a_stop_token_is_in_the_ids_but_not_in_the_text():
    out = feed("h!", reason="stop")[-1]
    assert (out.text, out.token_ids, out.finish_reason) == ("h", (ord("h"), ord("!")), "stop")


def test_an_error_carries_its_reason_and_no_token():
    out = processor().next_output(TokenEvent("a", NO_TOKEN, "error", error="too large"))
    assert (out.text, out.token_ids, out.error) == ("", (), "too large")


def test_a_stop_text_ends_the_request_and_is_left_out_of_its_text():
    outputs = feed("one STOP two", stop="STOP")
    assert outputs[-1].text == "one " and outputs[-1].finish_reason == "stop"
    assert bytes(outputs[-1].token_ids) == b"one STOP"
    assert [out.delta for out in outputs] == ["o", "n", "e", " ", "", "", "", ""]


def test_a_false_start_of_a_stop_text_is_shown():
    outputs = feed("one STORY ST", stop=["STOP"])
    assert [out.text for out in outputs][4:8] == ["one ", "one ", "one ", "one STOR"]
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one STORY ST", "length")


def test_a_stop_text_completed_by_the_last_token_wins_over_the_length():
    outputs = feed("one STOP", reason="length", stop=["STOP"])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one ", "stop")


def test_a_stop_token_that_would_complete_a_stop_text_is_no_text():
    outputs = feed("one STOP", reason="stop", stop=["STOP"])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one STO", "stop")


@pytest.mark.parametrize("tokenizer", [Bytes, Fallback])
def test_a_stop_text_within_multi_byte_characters(tokenizer):
    outputs = feed("a€漢b", stop=["€漢"], tokenizer=tokenizer)
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("a", "stop")
    assert bytes(outputs[-1].token_ids) == "a€漢".encode()


@given(st.text("ab€", max_size=12), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3))
def test_deltas_join_to_the_text_with_any_stop_texts(text, stops):
    for out in (outputs := feed(text, stop=stops)):
        assert not any(stop in out.text for stop in stops)
    assert "".join(out.delta for out in outputs) == (outputs[-1].text if outputs else "")
    if outputs and not any(stop in text for stop in stops):
        assert outputs[-1].text == text


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_requested_log_probabilities_are_recorded_per_token(num_logprobs):
    reader = processor(logprobs=num_logprobs)
    expected = [Logprobs(-0.5, ((3, -0.5), (4, -1.0))), Logprobs(-0.1, ((5, -0.1), (6, -3.0)))]
    for i, item in enumerate(expected):
        event = TokenEvent("a", 65 + i, None, logprobs=None if num_logprobs is None else item)
        out = reader.next_output(event)
        assert out.logprobs == (None if num_logprobs is None else tuple(expected[: i + 1]))
