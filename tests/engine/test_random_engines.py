"""Random engines give every request the tokens that it gets alone, and their books balance.

A failure names its seed: ``ENGINE_SEEDS=123 python -m pytest tests/engine/test_random_engines.py``
runs that case again.
"""

import os
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numba
import numpy as np
import pytest
from random_engines import build_model, draw_case, engine_options

from labkit import config
from labkit.config.option import override_text
from labkit.config.option_index import option_groups
from labkit.engine import LLM, create
from labkit.engine.engine_protocol import NO_TOKEN
from labkit.engine.runner.shared_models import SharedModels
from labkit.models.tokenizer import load as load_tokenizer

RUN, WEEKLY = 20, 500


def commit_seed():
    """A number of its own for every commit; outside git a fixed one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        shown = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(shown[:8], 16)


def seeds():
    """The seeds of this run. Those of the weekly run are slow."""
    if chosen := os.environ.get("ENGINE_SEEDS"):
        return [int(seed) for seed in chosen.split(",")]
    first = commit_seed()
    weekly = range(first + RUN, first + RUN + WEEKLY)
    return [*range(first, first + RUN), *(pytest.param(s, marks=pytest.mark.slow) for s in weekly)]


@dataclass
class Output:
    """What a request got; ``text`` is None without a tokenizer."""

    tokens: list = field(default_factory=list)
    margins: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: object = None
    num_cached: int = 0
    reason: str | None = None
    error: str | None = None
    text: str | None = None

    def take(self, event):
        assert self.reason is None, "an event after the end"
        if event.token != NO_TOKEN:
            self.tokens.append(event.token)
            self.margins.append(event.margin)
            self.logprobs.append(event.logprobs)
            self.num_cached = event.num_cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.reason, self.error = event.finish_reason, event.error


class EngineFront:
    """Requests go to the engine itself, and a step is the engine's."""

    def __init__(self, case, path, models):
        self.engine = create(case.engine, path, models)
        self.outputs = {}

    def submit(self, requests):
        for request in requests:
            self.outputs[request.request_id] = Output()
            self.engine.submit(request)

    def step(self):
        for event in self.engine.step():
            self.outputs[event.request_id].take(event)

    def has_work(self):
        return self.engine.has_work()

    def abort(self, request_id):
        self.engine.abort(request_id)
        return {request_id}


class LLMFront:
    """Requests that arrive together are a stream of ``LLM``; a step reads the next stream."""

    def __init__(self, case, path, models):
        options = {k.replace(".", "_"): v for k, v in case.options.items() if k != "name"}
        self.llm = LLM(path, **options)
        self.engine = self.llm._engine
        self.outputs, self.streams = {}, []

    def submit(self, requests):
        ids = {request.request_id for request in requests}
        self.outputs |= {request_id: Output() for request_id in ids}
        prompts = [request.prompt_token_ids for request in requests]
        self.streams.append((ids, self.llm.stream(prompts, [r.params for r in requests])))

    def step(self):
        if not self.streams:
            return
        ids, stream = self.streams.pop(0)
        output = next(stream, None)
        if output is None:
            return
        self.streams.append((ids, stream))
        got = self.outputs[output.request_id]
        assert got.reason is None, "an output after the end"
        got.text = (got.text or "") + output.delta
        assert got.text == output.text
        got.tokens, got.logprobs = list(output.token_ids), list(output.logprobs or ())
        got.prompt_logprobs = output.prompt_logprobs
        got.reason, got.error = output.finish_reason, output.error

    def has_work(self):
        return bool(self.streams)

    def abort(self, request_id):
        """Leave the stream of a request, and so end all of its requests."""
        for ids, stream in self.streams:
            if request_id in ids:
                stream.close()
                self.streams.remove((ids, stream))
                return ids
        return set()


def serve(case, front):
    """Serve a case to its end; return its outputs, and the requests that were aborted."""
    aborted, step = set(), 0
    while step <= max(case.arrivals) or front.has_work():
        arriving = [r for r, at in zip(case.requests, case.arrivals, strict=True) if at == step]
        if arriving:
            front.submit(arriving)
        for _, kind, request_id in filter(lambda item: item[0] == step, case.interruptions):
            if kind == "abort":
                ended = front.abort(request_id) & front.outputs.keys()
                aborted |= {key for key in ended if front.outputs[key].reason is None}
            elif kind == "preempt":
                front.engine._scheduler.preempt(request_id)
            elif kind == "clear":
                front.engine.clear_cache()
            else:
                front.engine.drain()
        front.step()
        front.engine.check()
        kv = front.engine.kv_bytes()
        assert kv.used <= kv.reserved
        step += 1
        assert step < 3000, "the steps do not end"
    return front.outputs, aborted


class Oracle:
    """Serves requests one at a time in a plain engine with the same arithmetic."""

    def __init__(self, root):
        self.root = root
        self.models = SharedModels()
        self.engines, self.tokenizers = {}, {}

    def path(self, model):
        path = self.root / model
        if not path.is_dir():
            build_model(path, model)
            self.tokenizers[model] = load_tokenizer(path)
        return path

    def outputs(self, case, limit):
        """The output of every request; those of more than ``limit`` tokens are refused."""
        key = (case.model, *case.plain.items())
        if key not in self.engines:
            options = engine_options(case.plain)
            self.engines[key] = create(options, self.path(case.model), self.models)
        return {
            request.request_id: Output(reason="error", text="" if case.through_llm else None)
            if len(request.prompt_token_ids) + request.params.max_tokens > limit
            else self.alone(self.engines[key], request, case)
            for request in case.requests
        }

    def alone(self, engine, request, case):
        output, params = Output(), replace(request.params, stop=())
        engine.submit(replace(request, params=params))
        while engine.has_work():
            for event in engine.step():
                output.take(event)
        if case.through_llm:
            cut_at_stop(output, request.params.stop, self.tokenizers[case.model])
        return output


def cut_at_stop(output, stops, tokenizer):
    """Add the text of an output, and end it at the token that completes a stop text."""
    for count in range(1, len(output.tokens) + 1):
        is_stop = count == len(output.tokens) and output.reason == "stop"
        output.text = tokenizer.decode(output.tokens[: count - is_stop])
        found = [(at + len(s), at) for s in stops if (at := output.text.find(s)) >= 0]
        if found:
            output.text = output.text[: min(found)[1]]
            output.tokens, output.reason = output.tokens[:count], "stop"
            return


def compare(case, got, expected):
    """Compare an output, if it is aborted its beginning, with what the request gets alone.

    If the case is not exact, outputs may part where two tokens are equally likely.
    """
    pairs = zip(got.tokens, expected.tokens, strict=False)
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if parted is not None and not case.exact and expected.margins[parted] < case.tie:
        return
    assert got.tokens == expected.tokens[: len(got.tokens)]
    if case.exact:
        assert got.logprobs == expected.logprobs[: len(got.logprobs)]
    if got.prompt_logprobs is not None:
        scores = [output.prompt_logprobs.tokens for output in (got, expected)]
        np.testing.assert_allclose(*scores, rtol=0, atol=0 if case.exact else 10 * case.tie)
    if got.reason is None:
        return
    assert (got.tokens, got.reason) == (expected.tokens, expected.reason)
    assert got.text in (None, expected.text)
    assert ("raise the budget" in (got.error or "")) == (got.reason == "error")


def check_counters(case, engine, outputs, aborted):
    """The counters agree with each other and with the outputs, and no memory is held."""
    engine.clear_cache()
    counters = Counter(engine.counters())
    ended = [output for request_id, output in outputs.items() if request_id not in aborted]
    refused = sum(output.reason == "error" for output in ended)
    submitted = counters["requests.submitted"]
    assert counters["requests.refused"] >= refused  # those of a stream that is left are refused too
    left = len(outputs) - submitted - counters["requests.refused"]
    assert left == 0 or (case.through_llm and aborted)  # a stream that was never read
    assert submitted == counters["requests.finished"] + counters["requests.aborted"]
    assert engine.kv_bytes().reserved == 0
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    assert counters["blocks.peak"] + counters["blocks.headroom"] == counters["blocks.total"]
    assert counters["state_slots.allocated"] == counters["state_slots.freed"]
    steps = counters["steps.total"]
    assert steps == sum(counters[f"steps.{kind}"] for kind in ("decode", "prefill", "mixed"))
    assert steps == counters[f"engine.{case.options['name']}"]
    computed = counters["tokens.computed"]
    assert computed == counters["tokens.prefill"] + counters["tokens.decode"]
    assert counters["spec.accepted"] <= counters["spec.drafted"]
    if not case.through_llm:  # which drops the tokens after a stop text in the same step
        returned = sum(len(output.tokens) for output in outputs.values())
        assert counters["tokens.output"] == returned
    prompt_tokens = sum(len(request.prompt_token_ids) for request in case.requests)
    assert counters["prefix.hit_tokens"] <= counters["prefix.queried_tokens"] <= prompt_tokens
    preempting = any(kind == "preempt" for _, kind, _ in case.interruptions)
    if case.options["scheduler.reservation"] == "full" and not preempting:
        assert counters["preemptions"] == 0
    if not counters["preemptions"]:
        assert counters["tokens.recomputed"] == 0


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return Oracle(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("seed", seeds())
def test_random_engine(seed, oracle):
    case = draw_case(seed)
    threads = numba.get_num_threads()
    numba.set_num_threads(min(case.threads, numba.config.NUMBA_NUM_THREADS))
    try:
        path = oracle.path(case.model)
        front = (LLMFront if case.through_llm else EngineFront)(case, path, oracle.models)
        outputs, aborted = serve(case, front)
        expected = oracle.outputs(case, front.engine.max_request_tokens())
        for request_id, output in outputs.items():
            assert (output.reason is None) == (request_id in aborted), "a request was lost"
            compare(case, output, expected[request_id])
        check_counters(case, front.engine, outputs, aborted)
        front.engine.close()
    except BaseException as error:
        error.add_note(f"ENGINE_SEEDS={seed}: {case}")
        raise
    finally:
        numba.set_num_threads(threads)


# What belongs to a process, a machine or a server, and what an engine of labkit's own has not.
NOT_DRAWN = ("blas", "threads", "memory_limit", "mlx", "budget", "parallel", "server")
NOT_DRAWN = (*NOT_DRAWN, "drafts.draft_path", "openai", "cuda", "metal", "identity", "mlx_lm")


def test_every_switch_is_drawn():
    """A new option, or a new value of one, belongs into ``random_engines``."""
    drawn = {}
    for seed in range(200):
        for key, value in draw_case(seed).options.items():
            text = str(value) if isinstance(value, list) else override_text(value)
            drawn.setdefault(key, set()).add(text)
    entries = [entry for group in option_groups(config.Engine) for entry in group.entries]
    for entry in (entry for entry in entries if not entry.key.startswith(NOT_DRAWN)):
        values = drawn.get(entry.key, set())
        assert len(values) > 1, f"{entry.key} never changes"
        assert set(entry.choices) <= values | set(NOT_DRAWN), entry.key
