"""Rules of requests at their limits, without a server: parameters, lengths, counts and health."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from in_process import run_scenario

pytest.importorskip("msgspec")

from labkit.engine.engine_protocol import Logprobs
from labkit.models.tokenizer import LONG_TEXT
from labkit.server.apis import generated_choice, response_logprobs
from labkit.server.apis.generated_choice import GeneratedChoice, build_body, usage
from labkit.server.apis.request_checks import (
    MAX_LOGIT_BIASES,
    check_free_length,
    check_model,
    check_stream,
    min_output,
    min_tokens_constraint,
    num_choices,
    to_params,
)
from labkit.server.apis.response_logprobs import token_logprob
from labkit.server.generation.api_generation import TokenOutput
from labkit.server.generation.prompt_encoding import check_contents, is_long, resolve_max_tokens
from labkit.server.generation.service import Service
from labkit.server.types.api_error import ERROR_TYPES_BY_STATUS, ApiError
from labkit.server.types.openai_types import Sampling, StreamOptions

SERVICE = SimpleNamespace(
    name="tiny",
    vocab_size=10,
    eos_token_ids=(3,),
    max_prompt_tokens=6,
    max_model_len=8,
    options=SimpleNamespace(max_choices=3, max_output_tokens=4, max_live=5, stuck_s=2.0),
    token_text=lambda token: "\N{REPLACEMENT CHARACTER}" if token == 9 else "é",
)


def sampling(**fields):
    return Sampling(model="tiny", **fields)


def refused(check, *arguments, **options):
    """Return the status and the parameter of the error that a call raises, or None."""
    try:
        check(*arguments, **options)
    except ApiError as error:
        return error.status, error.detail.param
    return None


def test_parameters_have_openai_s_defaults_and_pass_unchanged():
    plain = to_params(SERVICE, sampling(), max_tokens=7, logprobs=None)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)
    assert (plain.repetition_penalty, plain.presence_penalty, plain.frequency_penalty) == (1, 0, 0)
    assert (plain.stop, plain.stop_token_ids, plain.ignore_eos, plain.seed) == ((), (), False, None)
    assert (plain.logit_bias, plain.max_tokens, plain.logprobs, plain.prompt_logprobs) == (
        {}, 7, None, None
    )  # fmt: skip
    given = sampling(
        temperature=0.0, top_p=0.5, top_k=-1, min_p=0.25, repetition_penalty=1.5, stop="x",
        presence_penalty=-1.0, frequency_penalty=2.0, logit_bias={"9": 1.0, "0": -2.0}, seed=-1,
        stop_token_ids=[4], ignore_eos=True,
    )  # fmt: skip
    made = to_params(SERVICE, given, max_tokens=1, logprobs=2, prompt_logprobs=3)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.0, 0.5, 0, 0.25)
    assert (made.repetition_penalty, made.presence_penalty, made.frequency_penalty) == (1.5, -1, 2)
    assert (made.stop, made.stop_token_ids, made.ignore_eos) == (("x",), (4,), True)
    assert (made.logit_bias, made.seed) == ({9: 1.0, 0: -2.0}, 2**64 - 1)
    assert (made.logprobs, made.prompt_logprobs) == (2, 3)
    assert to_params(SERVICE, sampling(stop=["a", "b"]), max_tokens=1, logprobs=None).stop == (
        "a", "b"
    )  # fmt: skip
    too_many = {f"{1:0{digits}}": 1.0 for digits in range(1, MAX_LOGIT_BIASES + 2)}
    for bias in ({"10": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"²": 1.0}, too_many):
        arguments = SERVICE, sampling(logit_bias=bias)
        assert refused(to_params, *arguments, max_tokens=1, logprobs=None) == (400, "logit_bias")


def test_each_choice_has_the_next_seed_and_a_constraint_of_its_own(tmp_path):
    async def scenario(service, engine):
        async def submitted(n, constraint=None, **fields):
            params = to_params(SERVICE, sampling(**fields), max_tokens=1, logprobs=None)
            engine.submitted.clear()
            service.generate("call", [[1]], params, n, constraint)
            while len(engine.submitted) < n:
                await asyncio.sleep(0.001)
            return params, [request.params for request in engine.submitted]

        _, made = await submitted(3, seed=-1)
        assert [one.seed for one in made] == [2**64 - 1, 0, 1]
        free, made = await submitted(2)
        assert made == [free] * 2
        biased, made = await submitted(2, logit_bias={"3": 1.0}, stop="x", seed=1)
        assert all(one.bias is biased.bias for one in made)  # nothing is checked or copied again
        assert [one.logit_bias for one in made] == [{3: 1.0}] * 2
        copies = iter(["a copy", "another"])
        _, made = await submitted(2, SimpleNamespace(copy=lambda: next(copies)))
        assert [one.constraint for one in made] == ["a copy", "another"]

    run_scenario(scenario, tmp_path)


@pytest.mark.parametrize(
    ("check", "arguments", "error"),
    [
        (check_model, (SERVICE, "tiny"), None),
        (check_model, (SERVICE, "other"), (404, "model")),
        (check_stream, (sampling(stream=True, stream_options=StreamOptions()),), None),
        (check_stream, (sampling(stream_options=StreamOptions()),), (400, "stream_options")),
        (check_stream, (sampling(stream=True, prompt_logprobs=0),), (400, "prompt_logprobs")),
        (check_stream, (sampling(prompt_logprobs=0),), None),
        (check_free_length, (sampling(ignore_eos=False, min_tokens=0), "x"), None),
        (check_free_length, (sampling(ignore_eos=True), "x"), (400, "ignore_eos")),
        (check_free_length, (sampling(min_tokens=1), "x"), (400, "min_tokens")),
        (num_choices, (SERVICE, 3), None),
        (num_choices, (SERVICE, 4), (400, "n")),
        (min_tokens_constraint, (SERVICE, sampling(min_tokens=4), 4), None),
        (min_tokens_constraint, (SERVICE, sampling(min_tokens=5), 4), (400, "min_tokens")),
        (
            min_tokens_constraint,
            (SERVICE, sampling(min_tokens=1, stop="x"), 4),
            (400, "min_tokens"),
        ),
        (min_tokens_constraint, (SERVICE, sampling(stop="x"), 4), None),
        (check_contents, (SERVICE, [["part"] * 2, "text", ["part"]], "messages"), None),
        (
            check_contents,
            (SERVICE, [["part"] * 3, "text", ["part"]], "messages"),
            (400, "messages"),
        ),
    ],
)
def test_a_request_is_refused_beyond_a_limit(check, arguments, error):
    assert refused(check, *arguments) == error


def test_an_output_cannot_end_before_its_least_length():
    assert num_choices(SERVICE, None) == 1 and num_choices(SERVICE, 2) == 2
    assert min_output(sampling(min_tokens=2), 9) == 2 and min_output(sampling(), 9) == 0
    assert min_output(sampling(min_tokens=2, ignore_eos=True), 9) == 9
    assert min_output(sampling(ignore_eos=True), None) == 0
    none = min_tokens_constraint(SERVICE, sampling(min_tokens=2, ignore_eos=True), 4)
    assert none is None and min_tokens_constraint(SERVICE, sampling(), 4) is None
    made = min_tokens_constraint(SERVICE, sampling(min_tokens=2, stop_token_ids=[4, 10]), 4)
    for output, forbidden in (([], {3, 4}), ([1], {3, 4}), ([1, 2], set())):
        allowed = made.allowed(output, 10)
        assert {i for i in range(10) if not allowed[i]} == forbidden


@pytest.mark.parametrize(
    ("prompt", "wanted", "options", "expected"),
    [
        (3, 4, {}, 4),
        (5, 4, {}, 3),  # the context leaves less
        (2, None, {}, 4),
        (2, None, {"default": 2}, 2),
        (2, 3, {"default": 2}, 3),
        (6, None, {"min_tokens": 2}, 2),
        (6, None, {"min_tokens": 3}, (400, "max_tokens")),
        (3, 5, {}, (400, "max_tokens")),
        (7, 1, {}, (400, "prompt")),
        (0, 1, {}, (400, "prompt")),
    ],
)
def test_an_output_s_room_is_what_the_context_leaves(prompt, wanted, options, expected):
    arguments = SERVICE, [9] * prompt, wanted
    if isinstance(expected, tuple):
        assert refused(resolve_max_tokens, *arguments, param="prompt", **options) == expected
    else:
        assert resolve_max_tokens(*arguments, param="prompt", **options) == expected


def test_ids_are_below_the_vocabulary_s_size():
    assert refused(resolve_max_tokens, SERVICE, [1, 10], 1, param="p") == (400, "p")


def test_log_probabilities_of_prompts_are_counted(monkeypatch):
    monkeypatch.setattr(response_logprobs, "MAX_LOGPROBS_PER_RESPONSE", 30)
    check = response_logprobs.check_prompt_logprobs
    assert refused(check, [[1, 2], [3]], 2, 4) is None  # 3 tokens, 2 choices, 5 each
    assert refused(check, [[1, 2], [3]], 2, 5) == (400, "prompt")
    assert refused(check, [[1] * 99], 9, None) is None and refused(check, [[1] * 31], 1, 0)
    with pytest.raises(ApiError, match="no log probabilities of the prompt"):
        response_logprobs.prompt_logprobs_by_token(None, [1, 2], 0)
    assert response_logprobs.prompt_logprobs_by_token(None, [1], 0) == [None]


def test_log_probabilities_of_outputs_are_counted(monkeypatch):
    monkeypatch.setattr(generated_choice, "MAX_LOGPROBS_PER_RESPONSE", 6)

    async def outputs(count, logprobs):
        for index in range(count):
            yield [TokenOutput(index % 2, 1, "a", None, logprobs)]

    def collect(count, logprobs):
        generation = SimpleNamespace(outputs=lambda: outputs(count, logprobs))
        return asyncio.run(generated_choice.collect(generation, 2))

    two = Logprobs(-1.0, ((2, -1.0),))
    assert [len(choice.tokens) for choice in collect(3, two)] == [2, 1]
    assert len(collect(99, None)[0].tokens) == 50
    with pytest.raises(ApiError, match="more than 6 log probabilities; set max_tokens lower"):
        collect(4, two)


def test_a_choice_gathers_its_outputs():
    choice, made = GeneratedChoice(), Logprobs(-1.0, ())
    choice.add(TokenOutput(0, 5, "a", None, made))
    choice.add(TokenOutput(0, 6, "", None, None))
    choice.add(TokenOutput(0, None, "b", "stop", None, stop="x"))
    assert (choice.tokens, choice.text, choice.texts) == ([5, 6], "ab", ["a", "b"])
    assert (choice.logprobs, choice.finish_reason, choice.stop) == ([made], "stop", "x")
    total = usage(3, 4, 2)
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (3, 4, 7)
    assert total.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("num_tokens", "prompt", "in_thread"), [(2, None, False), (3, None, True), (0, "any", True)]
)
def test_a_body_of_many_log_probabilities_is_built_in_a_thread(
    monkeypatch, num_tokens, prompt, in_thread
):
    monkeypatch.setattr(generated_choice, "MAX_LOGPROBS_ON_LOOP", 4)
    made, used = [Logprobs(-1.0, ((1, -1.0),))] * num_tokens, []
    choice = GeneratedChoice(logprobs=made, prompt_logprobs=prompt)

    async def run_in_thread(work, *arguments, long):
        used.append(long)
        return work(*arguments)

    service = SimpleNamespace(run_in_thread=run_in_thread)
    assert asyncio.run(build_body(service, lambda choices: choices, [choice])) == [choice]
    assert used == [True] * in_thread


def test_a_log_probability_has_its_token_s_bytes_unless_it_is_a_part_of_a_character():
    made = token_logprob(SERVICE, 1, Logprobs(-math.inf, ((9, -0.5), (1, -1e4))))
    assert (made.token, made.logprob, made.bytes) == ("é", -9999.0, [0xC3, 0xA9])
    (first, second) = made.top_logprobs
    assert (first.logprob, first.bytes, second.logprob) == (-0.5, None, -9999.0)


def test_long_texts_wait_for_each_other_and_not_for_short_ones():
    names = "short", "long"
    threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in names}
    service = SimpleNamespace(_threads=threads)

    async def run(**options):
        name = await Service.run_in_thread(
            service, lambda: threading.current_thread().name, **options
        )
        return name.partition("_")[0]

    assert asyncio.run(run()) == "short" and asyncio.run(run(long=True)) == "long"
    for pool in threads.values():
        pool.shutdown()
    assert is_long("x" * LONG_TEXT) and not is_long([1] * (LONG_TEXT - 1))


def test_a_server_is_healthy_until_its_engine_fails_ends_or_sticks():
    def reason(failure=None, alive=True, busy_s=0.0, stopping=False):
        thread = None if alive is None else SimpleNamespace(alive=alive, busy_s=busy_s)
        service = SimpleNamespace(
            engine_failure=failure, _thread=thread, options=SERVICE.options, _stopping=stopping
        )
        return Service.unhealthy_reason(service)

    assert reason() is None and reason(busy_s=2.0) is None
    assert reason(failure="it failed", alive=False) == "it failed"
    assert reason(alive=False) == reason(alive=None) == "the engine's thread has ended"
    assert reason(busy_s=2.4) == "the engine is stuck: a step has been running for 2 s"
    assert reason(stopping=True) == "the server is stopping"


def test_no_more_completions_run_than_the_server_allows():
    service = SimpleNamespace(options=SERVICE.options, _live=dict.fromkeys("abc"), _num_preparing=1)
    assert refused(Service._check_room, service, 2) is None
    assert refused(Service._check_room, service, 3) == (429, None)
    assert refused(Service.check_num_completions, service, 5) is None
    assert refused(Service.check_num_completions, service, 6) == (400, None)


def test_an_error_has_its_type_and_one_line_that_keeps_both_ends():
    error = ApiError(429, "a\n b " + "x" * 400 + "the end", param="p" * 351, retry_after=1)
    assert len(error.detail.message) == len(error.detail.param) == 240 + 5 + 100
    assert error.detail.message.startswith("a b x") and error.detail.message.endswith("xthe end")
    assert (error.detail.type, error.headers) == ("rate_limit_error", {"Retry-After": "1"})
    assert len(ApiError(400, "x" * 350).detail.message) == 350
    assert ApiError(401, "x").headers == {"WWW-Authenticate": "Bearer"}
    kinds = {status: kind.partition("_")[0] for status, kind in ERROR_TYPES_BY_STATUS.items()}
    assert {status for status, kind in kinds.items() if kind == "server"} == {500, 503}
    assert {status for status, kind in kinds.items() if kind == "timeout"} == {408, 504}
