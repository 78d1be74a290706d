"""Request bodies for a server: the seed of sampling, and what is sampled from."""

import json
from types import SimpleNamespace

import pytest

from labkit import config
from labkit.engine.openai.request_payload import PayloadBuilder
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

TEXTS = SimpleNamespace(prompt_text=lambda ids: ("a b", True))


def bodies(preset, *params):
    """Return the bodies of requests with sampling parameters, as sent to a preset's server."""
    builder = PayloadBuilder(config.OpenAIServer(preset=preset), "m", TEXTS, ())
    payloads = [builder.payload(Request(str(i), (1, 2), own)) for i, own in enumerate(params)]
    return [json.loads(payload.body) for payload in payloads]


def seeds(experiment_seed, count=4):
    """Return the seeds of ``count`` requests as a serving session numbers them, as sent."""
    numbers = [(experiment_seed << 32) + i for i in range(count)]
    params = [SamplingParams(temperature=1.0, seed=number) for number in numbers]
    return [body["seed"] for body in bodies("vllm", *params)]


def test_each_request_of_each_experiment_has_a_seed_of_its_own():
    sent = [seed for experiment in (0, 1, 2, (1 << 32) - 1) for seed in seeds(experiment)]
    assert len(set(sent)) == len(sent)
    assert all(0 <= seed < 1 << 31 for seed in sent)
    assert seeds(0) == [0, 1, 2, 3]
    assert seeds(1) == seeds(1)


@pytest.mark.parametrize(
    ("preset", "all_tokens"),
    [
        ("vllm", {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3}),
        ("mlx_lm", {"top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ("other", {"top_p": 1.0, "seed": 3}),
    ],
)
def test_a_sampled_request_leaves_nothing_to_the_server_s_defaults(preset, all_tokens):
    """Servers have their own: llama.cpp keeps 40 tokens. mlx_lm's serves one with a seed alone."""
    cut, names = {"top_p": 0.5, "top_k": 9}, ("top_p", "top_k", "min_p", "seed")
    sampled = SamplingParams(temperature=1.0, seed=3)
    few = SamplingParams(temperature=1.0, seed=3, **cut)
    sent = bodies(preset, sampled, few, SamplingParams(seed=3))
    kept = [{name: body[name] for name in names if name in body} for body in sent]
    assert kept == [all_tokens, {**all_tokens, **cut}, {}]
