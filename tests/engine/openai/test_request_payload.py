"""Request bodies for a server: the seed of sampling."""

import json

from labkit import config
from labkit.engine.openai.request_payload import PayloadBuilder
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams


def seeds(experiment_seed, count=4):
    """Return the seeds of ``count`` requests as a serving session numbers them, as sent."""
    builder = PayloadBuilder(config.OpenAIServer(preset="vllm"), "m", None, ())
    params = [
        SamplingParams(temperature=1.0, seed=(experiment_seed << 32) + i) for i in range(count)
    ]
    payloads = [builder.payload(Request(str(i), (1, 2), own)) for i, own in enumerate(params)]
    return [json.loads(payload.body)["seed"] for payload in payloads]


def test_each_request_of_each_experiment_has_a_seed_of_its_own():
    sent = [seed for experiment in (0, 1, 2, (1 << 32) - 1) for seed in seeds(experiment)]
    assert len(set(sent)) == len(sent)
    assert all(0 <= seed < 1 << 31 for seed in sent)
    assert seeds(0) == [0, 1, 2, 3]
    assert seeds(1) == seeds(1)
